"""A model that writes given texts, on the CPU's step loop: its logits make the next token of a script certain.

The parts behind the logits are the engine's own: sampling, log probabilities, grammars and processors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncengine._core import StepBatch

VECTOR_SIZE = 64
_WRITES, _REPLACES, _ENDS = 100.0, 75.0, 50.0
"""Logits of the token that comes, of the next one that is no blank, and of the end: a grammar may exclude the first."""


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """The tokens that follow a prompt, without the end."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    request_id: str

    blanks: frozenset[int]
    """Tokens of white space, which a grammar may leave out."""

    def next_tokens(self, tokens: Sequence[int], end: int) -> tuple[int, int]:
        """The token behind ``tokens``, which begin with the prompt, and the one in its place if that is left out."""
        place = 0
        for token in tokens[len(self.prompt) :]:
            if token != self._at(place, end):
                place = self._behind_blanks(place)
            place += 1
        return self._at(place, end), self._at(self._behind_blanks(place), end)

    def _at(self, place: int, end: int) -> int:
        return self.reply[place] if place < len(self.reply) else end

    def _behind_blanks(self, place: int) -> int:
        while place < len(self.reply) and self.reply[place] in self.blanks:
            place += 1
        return place

    def rank(self, tokens: tuple[int, ...]) -> tuple[bool, int]:
        """Rank a script after ``tokens``: a script that has written these tokens comes first, then one with a longer
        prompt."""
        written = tokens[len(self.prompt) :]
        return written == self.reply[: len(written)], len(self.prompt)


class ScriptedModel:
    """The forward of a step: logits [samples, vocab_size] and vectors [samples, VECTOR_SIZE]."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int, end: int, step_s: float) -> None:
        self._cache = np.zeros((num_blocks, block_size), np.int64)  # the tokens themselves
        self._block_size, self._vocab_size, self._end, self._step_s = block_size, vocab_size, end, step_s
        self._answers: Any = None
        self.scripts: tuple[Script, ...] = ()
        """Replaced as a whole by the event loop, while the executor's thread reads."""

    @property
    def kv_regions(self) -> list[tuple[int, int]]:
        """Addresses of the cache, and bytes of a block."""
        return [(self._cache.ctypes.data, self._cache[0].nbytes)]

    def forward(self, batch: StepBatch) -> tuple[int, int, int]:
        """Addresses of the logits and the vectors, and the vectors' width. They stay valid until the next call."""
        if self._step_s:
            time.sleep(self._step_s)
        places = batch.slot_mapping
        self._cache.reshape(-1)[places[places >= 0]] = batch.input_ids[places >= 0]
        logits = np.zeros((batch.num_samples, self._vocab_size), np.float32)
        vectors = np.zeros((batch.num_samples, VECTOR_SIZE), np.float32)
        for sample, index in enumerate(batch.sample_index.tolist()):
            row = int(np.searchsorted(batch.query_start, index, side="right")) - 1
            length = int(batch.context_len[row]) + index - int(batch.query_start[row]) + 1
            blocks = batch.block_table(row, -(-length // self._block_size))
            tokens = self._cache[blocks].reshape(-1)[:length]
            logits[sample, self._end] = _ENDS
            first, second = self._next(tuple(tokens.tolist()))
            logits[sample, second] = _REPLACES
            logits[sample, first] = _WRITES
            vectors[sample] = np.bincount(tokens % VECTOR_SIZE, minlength=VECTOR_SIZE)
        self._answers = logits, vectors
        return logits.ctypes.data, vectors.ctypes.data, VECTOR_SIZE

    def _next(self, tokens: tuple[int, ...]) -> tuple[int, int]:
        fitting = [script for script in self.scripts if tokens[: len(script.prompt)] == script.prompt]
        if not fitting:
            return self._end, self._end
        return max(fitting, key=lambda script: script.rank(tokens)).next_tokens(tokens, self._end)
