"""Callables of the embedder that change logits: each runs on a thread while the device computes others' tokens.

A row whose token such a callable decides finds no mask (``csrc/core/mask_board.h``), so it gives its logits instead of
a token. The callable changes them, the token is drawn here, and the mask that is posted allows this token alone. So the
device samples it like any other: its penalties, log probabilities and ends are those of every row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import CoroutineType
from typing import TYPE_CHECKING

from asyncengine._core import MaskChannel, SamplingState, draw_token
from asyncengine.api.checks import quoted, said
from asyncengine.api.request import LogitsProcessor
from asyncengine.errors import LogitsProcessorError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class ProcessedSequence:
    """One sequence whose logits a callable changes. ``work`` runs on one worker at a time: the next logits come when
    the token of the last ones is known."""

    def __init__(
        self, processor: LogitsProcessor, prompt: Sequence[int], vocab_size: int, state: SamplingState
    ) -> None:
        self.channel = MaskChannel(-(-vocab_size // 32))
        self._answered = -1  # tokens of the output behind which logits have come: the event loop's
        self._processor = processor
        self._prompt = prompt
        self._state = state
        self._ended = False
        self._mask_bytes = 4 * -(-vocab_size // 32)

    def is_news(self, num_tokens: int) -> bool:
        """Return whether the logits behind so many tokens of the output come for the first time: a preemption repeats
        them."""
        news = num_tokens > self._answered
        self._answered = max(num_tokens, self._answered)
        return news

    @property
    def is_wanted(self) -> bool:
        """Return whether the request goes on."""
        return not self._ended

    def end(self) -> None:
        """The request has ended: no token is decided any more."""
        self._ended = True

    def work(self, output: Sequence[int], payload: bytes) -> None:
        """Decide the token behind ``output`` by its logits, float32 [V]. Raises LogitsProcessorError."""
        import numpy as np

        history = [*self._prompt, *output]
        given = np.frombuffer(payload, np.float32)
        position = len(history)
        logits = _called(self._processor, history, given)
        logits[np.isneginf(given)] = -np.inf
        token = draw_token(logits, self._state, position)
        if token < 0:
            raise LogitsProcessorError("the logits_processor left NaN, +inf, or no token that may come")
        if self._ended:
            return
        ctypes.memset(self.channel.address, 0, self._mask_bytes)
        ctypes.c_uint32.from_address(self.channel.address + token // 32 * 4).value = 1 << token % 32
        self.channel.write(position)
        self.channel.post()


def _called(processor: LogitsProcessor, history: list[int], given: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The logits that the program's code makes of those given, as an array that it does not know.

    Whatever that code does to its array, returns or raises is its own mistake: LogitsProcessorError.
    """
    import numpy as np

    try:
        logits = given.copy()
        changed = processor(history, logits)
        changed = logits if changed is None else changed
        if isinstance(changed, np.ndarray) and changed.shape == given.shape and changed.dtype.kind == "f":
            return np.array(changed, np.float32, subok=False)
        if isinstance(changed, CoroutineType):
            changed.close()  # it would be warned of
    except BaseException as e:  # SystemExit and KeyboardInterrupt end a thread as little as others
        raise LogitsProcessorError(f"the logits_processor raised {said(e)}") from e
    is_array = isinstance(changed, np.ndarray)
    got = f"{changed.dtype} {list(changed.shape)}" if is_array else quoted(changed)
    raise LogitsProcessorError(f"the logits_processor must leave, or return, floats {list(given.shape)}, got {got}")
