"""Callables of the embedder that change logits: each runs on a thread while the device computes others' tokens.

A row whose token such a callable decides finds no mask (``csrc/core/mask_board.h``), so it gives its logits instead of
a token. The callable changes them, the token is drawn here, and the mask that is posted allows this token alone. So the
device samples it like any other: its penalties, log probabilities and ends are those of every row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncengine import _core
from asyncengine.checks import quoted
from asyncengine.errors import LogitsProcessorError
from asyncengine.request import LogitsProcessor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class ProcessedSequence:
    """One sequence whose logits a callable changes. ``work`` runs on one worker at a time: the next logits come when
    the token of the last ones is known."""

    def __init__(
        self, processor: LogitsProcessor, prompt: Sequence[int], vocab_size: int, state: _core.SamplingState
    ) -> None:
        self.channel = _core.MaskChannel(-(-vocab_size // 32))
        self._answered = -1  # tokens of the output behind which logits have come: the event loop's
        self._processor = processor
        self._prompt = prompt
        self._state = state
        self._mask_bytes = 4 * -(-vocab_size // 32)

    def is_news(self, num_tokens: int) -> bool:
        """Whether the logits behind so many tokens of the output come for the first time: a preemption repeats them."""
        news = num_tokens > self._answered
        self._answered = max(num_tokens, self._answered)
        return news

    def work(self, output: Sequence[int], payload: bytes) -> None:
        """Decide the token behind ``output`` by its logits, float32 [V]. Raises LogitsProcessorError."""
        import numpy as np

        history = [*self._prompt, *output]
        logits = np.frombuffer(payload, np.float32).copy()
        banned = np.isneginf(logits)
        position = len(history)
        try:
            changed = self._processor(history, logits)
        except Exception as e:
            raise LogitsProcessorError(f"the logits_processor raised {e!r}") from e
        if changed is not None:
            logits = _checked(changed, logits)
        logits[banned] = -np.inf
        token = _core.draw_token(logits, self._state, position)
        if token < 0:
            raise LogitsProcessorError("the logits_processor left NaN, +inf, or no token that may come")
        ctypes.memset(self.channel.address, 0, self._mask_bytes)
        ctypes.c_uint32.from_address(self.channel.address + token // 32 * 4).value = 1 << token % 32
        self.channel.write(position)
        self.channel.post()


def _checked(changed: object, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    import numpy as np

    if not isinstance(changed, np.ndarray) or changed.shape != logits.shape or changed.dtype.kind != "f":
        got = f"{changed.dtype} {list(changed.shape)}" if isinstance(changed, np.ndarray) else quoted(changed)
        raise LogitsProcessorError(f"the logits_processor must return None or floats {list(logits.shape)}, got {got}")
    return np.array(changed, np.float32)
