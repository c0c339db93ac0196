"""Models that think before they answer: a grammar begins after that part."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncengine.text.markers import REASONING, TAIL, under_way

if TYPE_CHECKING:
    from asyncengine.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Reasoning:
    """Place of a sequence relative to the reasoning part. Without markers there is no such part."""

    begin: int = -1
    end: int = -1
    under_way: bool = False
    """Any token may come."""
    may_begin: bool = False
    """The next token may begin it."""

    @property
    def is_open(self) -> bool:
        """True if the next token may belong to the part."""
        return self.under_way or self.may_begin

    def take(self, token: int) -> bool:
        """Advance by a token. Returns whether it belongs to the part, its markers included."""
        if self.under_way:
            self.under_way = token != self.end
            return True
        if self.may_begin:
            self.may_begin = False
            self.under_way = token == self.begin
            return self.under_way
        return False

    def allow_begin(self, mask: int) -> None:
        """Set the first marker's bit in the mask at this address."""
        word = ctypes.c_uint32.from_address(mask + self.begin // 32 * 4)
        word.value |= 1 << self.begin % 32


def reasoning_at(tokenizer: Tokenizer, prompt: Sequence[int], *, is_chat: bool, continued: str = "") -> Reasoning:
    """Return the place of a sequence that begins with ``prompt``, which the chat template made or did not.

    A prompt may have begun the part, or have ended it. Where it says neither, a model whose template knows the markers
    may begin the part with its first token. ``continued``: the message of a chat that the output continues, if any. A
    marker without a row of the embedding is none.
    """
    for markers in REASONING.values():
        begin, end = (tokenizer.backend.token_to_id(name) for name in markers)
        if begin is None or end is None or max(begin, end) >= tokenizer.num_rows:
            continue
        if is_chat:
            tail = tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False)
            said = under_way(markers, tail, continued)
            may_begin = said is None and tokenizer.template_has(markers.end)
            return Reasoning(begin, end, under_way=bool(said), may_begin=may_begin)
        for token in reversed(prompt):
            if token in (begin, end):
                return Reasoning(begin, end, under_way=token == begin)
        return Reasoning(begin, end)
    return Reasoning()
