"""Means over the states of prompts that come in parts."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncengine._core import StepBatch


class Means:
    """Sums by slot, in float64: those of prompts of which more is to come. A prompt's first part begins a new sum."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def pool(self, states: Tensor, batch: StepBatch) -> Tensor:
        """[num_samples, H] of the step's states [T, H]: a sample's own, or its prompt's mean where that is wanted."""
        vectors = states[torch.from_numpy(batch.sample_index)]
        starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
        for row, slot, sample in batch.means:
            begin, end = starts[row], starts[row + 1]
            total = states[begin:end].sum(0, dtype=torch.float64)
            before = self._sums.pop(slot, None)
            if contexts[row]:
                assert before is not None
                total += before
            if sample < 0:
                self._sums[slot] = total
            else:
                vectors[sample] = (total / (contexts[row] + end - begin)).to(vectors.dtype)
        return vectors
