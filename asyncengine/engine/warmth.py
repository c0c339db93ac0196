"""Memory of the prompts that an engine was given: how much of a new one its prefix cache may hold.

A prompt is cut into pieces before it is tokenized. The memory forgets the pieces that were used least recently, about
as the prefix cache does. It may be wrong: then an engine computes what another has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from asyncengine.api.conversation import Conversation
from asyncengine.api.request import Prompt

PIECE_TOKENS = 64
"""Tokens of a piece. A piece of text has four times as many characters."""
MOST_PIECES = 512
"""Pieces of a prompt that are looked at: 32,768 tokens. Behind them prompts are taken for different."""
_CHARACTERS = 4 * PIECE_TOKENS


class Pieces(NamedTuple):
    """A prompt for the memory."""

    keys: list[int]
    """Hash of each piece, with all before it and the salt."""
    tokens: int
    """Tokens of the prompt, about."""


def pieces_of(prompt: Prompt, salt: str | None) -> Pieces:
    """Cut a prompt into pieces. Whoever gives something else than a prompt is told by the engine that gets it."""
    keys: list[int] = []
    key, length, unit = hash(salt), 0, 1
    for part in _parts(prompt):
        piece = _CHARACTERS if isinstance(part, str) else PIECE_TOKENS
        unit = piece // PIECE_TOKENS
        length += len(part)
        for first in range(0, len(part), piece):
            if len(keys) == MOST_PIECES:
                break
            key = hash((key, part[first : first + piece]))
            keys.append(key)
    return Pieces(keys, length // unit)


def _parts(prompt: Any) -> Iterator[str | tuple[int, ...]]:
    """Texts or token ids whose order makes the prompt."""
    if isinstance(prompt, str):
        yield prompt
        return
    if isinstance(prompt, Conversation):
        if prompt.tools or prompt.documents or prompt.chat_template:
            yield repr((prompt.tools, prompt.documents, prompt.chat_template))
        prompt = prompt.messages
    if not isinstance(prompt, Sequence):
        return
    if prompt and isinstance(prompt[0], int):
        yield tuple(prompt)
        return
    for message in prompt:
        content = message.get("content") if hasattr(message, "get") else None
        yield content if isinstance(content, str) and content else repr(message)


class Warmth:
    """The pieces that one engine was given."""

    def __init__(self, most_pieces: int) -> None:
        self._most = max(1, most_pieces)
        self._known: OrderedDict[int, None] = OrderedDict()

    def matched(self, pieces: Pieces) -> int:
        """Count the tokens at the beginning of a prompt that the engine was given before, about."""
        count = 0
        for key in pieces.keys:
            if key not in self._known:
                break
            count += 1
        return min(pieces.tokens, count * PIECE_TOKENS)

    def add(self, pieces: Pieces) -> None:
        """The engine gets this prompt."""
        for key in reversed(pieces.keys):  # the beginning is kept longest
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
