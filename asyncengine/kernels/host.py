"""What the kernel packages for host memory share."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from asyncengine._core import StepBatch
from asyncengine.kernels.ops import HeadNorms, StepTokens, split_heads


class HostOps(ABC):
    """The part of Ops that follows from a StepBatch and from simpler operations."""

    device = torch.device("cpu")
    # Scores of neighbouring tokens are neighbours, and so a vector.
    transposed_keys = True

    @abstractmethod
    def head_rms_norm_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """RMS norm over the last axis of the view x [T, H, D], in place."""

    @abstractmethod
    def rotary_(self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
        """Rotate the views q [T, Hq, D] and k [T, Hk, D] in place."""

    @abstractmethod
    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: StepBatch) -> None:
        """Write the views k, v [T, Hk, D] to the cache slots of the step."""

    def tokens(self, batch: StepBatch) -> StepTokens:
        return StepTokens(
            torch.from_numpy(batch.input_ids),
            torch.from_numpy(batch.positions),
            torch.from_numpy(batch.sample_index),
        )

    def rotary_store_kv(
        self,
        heads: Tensor,
        num_heads: int,
        norms: HeadNorms | None,
        cos_sin: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: StepBatch,
    ) -> None:
        """Norm, rotate and store the heads [T, num_heads + 2 Hk, D]; see Ops."""
        q, k, v = split_heads(heads, num_heads)
        if norms is not None:
            self.head_rms_norm_(q, norms.q, norms.eps)
            self.head_rms_norm_(k, norms.k, norms.eps)
        self.rotary_(q, k, cos_sin, positions)
        self.store_kv(k, v, k_cache, v_cache, batch)
