"""What the kernel packages for host memory share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncengine._core import StepBatch
from asyncengine.kernels.ops import Activation, AttentionLayer, Norm, split_heads


@dataclass(slots=True)
class Stream:
    """A residual stream, and what is still to be added to it: whoever norms it next does both in one pass."""

    residual: Tensor
    pending: Tensor | None = None


def sampled(stream: Stream, batch: StepBatch) -> Stream:
    """Only the tokens that are sampled from."""
    index, pending = torch.from_numpy(batch.sample_index), stream.pending
    return Stream(stream.residual[index], None if pending is None else pending[index])


class HostOps(ABC):
    """The part of Ops that follows from a StepBatch and from simpler operations."""

    device = torch.device("cpu")
    # Scores of neighbouring tokens are neighbours, and so a vector.
    transposed_keys = True

    @abstractmethod
    def make_linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Any:
        """A handle for ``linear`` over weights [N_i, K] that share their input. It copies none of them."""

    def make_head(self, weight: Tensor) -> Any:
        return self.make_linear([weight], [None])

    def make_embedding(self, table: Tensor, *, tied: bool, copy: bool = False) -> Any:
        return self.make_head(table)

    @abstractmethod
    def embed(self, batch: StepBatch, embedding: Any, position_table: Tensor | None = None) -> Stream:
        """The stream of a step's tokens."""

    @abstractmethod
    def linear(self, x: Tensor, handle: Any, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [M, K] times every weight of the handle, transposed, side by side: [M, N]."""

    @abstractmethod
    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        """The norm of x [M, H], or of residual += x, which is in place."""

    @abstractmethod
    def activate(self, x: Tensor, activation: Activation) -> Tensor: ...

    @abstractmethod
    def head_rms_norm_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """RMS norm over the last axis of the view x [T, H, D], in place."""

    @abstractmethod
    def rotary_(self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
        """Rotate the views q [T, Hq, D] and k [T, Hk, D] in place."""

    @abstractmethod
    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: StepBatch) -> None:
        """Write the views k, v [T, Hk, D] to the cache slots of the step."""

    @abstractmethod
    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: StepBatch, scale: float, window: int
    ) -> Tensor:
        """Causal attention of the view q [T, Hq, D] over the rows' KV in the cache: [T, Hq * D].

        q may also hold just the tokens of the leading rows; the other rows are then left out.
        """

    def norm_linear(self, stream: Stream, norm: Norm, handle: Any, activation: Activation | None = None) -> Tensor:
        y = self.linear(self._normed(stream.residual, stream.pending, norm), handle)
        stream.pending = None
        return y if activation is None else self.activate(y, activation)

    def linear_add_(self, x: Tensor, handle: Any, stream: Stream) -> None:
        assert stream.pending is None
        stream.pending = self.linear(x, handle)

    def attention(
        self, heads: Tensor, layer: AttentionLayer, k_cache: Tensor, v_cache: Tensor, batch: StepBatch
    ) -> Tensor:
        q = self.store_heads(heads, layer, k_cache, v_cache, batch)
        return self.paged_attention(q, k_cache, v_cache, batch, layer.scale, layer.window)

    def store_heads(
        self, heads: Tensor, layer: AttentionLayer, k_cache: Tensor, v_cache: Tensor, batch: StepBatch
    ) -> Tensor:
        """Everything of ``attention`` that precedes it; the queries [T, Hq, D], normed and rotated."""
        head_dim = v_cache.shape[3]
        self.prepare_heads(heads, head_dim, layer, batch)
        q, k, v = split_heads(heads.view(heads.shape[0], -1, head_dim), layer.num_heads)
        self.store_kv(k, v, k_cache, v_cache, batch)
        return q

    def prepare_heads(self, heads: Tensor, head_dim: int, layer: AttentionLayer, batch: StepBatch) -> None:
        """Norm and rotate queries and keys in place, as the layer says."""
        if layer.norms is None and layer.cos_sin is None:
            return
        q, k, _ = split_heads(heads.view(heads.shape[0], -1, head_dim), layer.num_heads)
        if layer.norms is not None:
            self.head_rms_norm_(q, layer.norms.q, layer.norms.eps)
            self.head_rms_norm_(k, layer.norms.k, layer.norms.eps)
        if layer.cos_sin is not None:
            self.rotary_(q, k, layer.cos_sin, torch.from_numpy(batch.positions))

    def keep_sampled(self, x: Tensor, stream: Stream, batch: StepBatch) -> Tensor:
        if batch.num_samples == batch.num_tokens:  # every token is sampled from, in order
            return x
        assert stream.pending is None
        stream.residual = sampled(stream, batch).residual
        return x[torch.from_numpy(batch.sample_index)]

    def logits(self, stream: Stream, norm: Norm, handle: Any, batch: StepBatch) -> Tensor | None:
        if not batch.num_samples:
            return None
        if batch.num_samples < stream.residual.shape[0]:
            stream = sampled(stream, batch)
        return self._logits(stream, norm, handle)

    def _logits(self, stream: Stream, norm: Norm, handle: Any) -> Tensor:
        """Of every token of the stream."""
        return self.linear(self._normed(stream.residual, stream.pending, norm), handle, torch.float32)

    def _normed(self, residual: Tensor, pending: Tensor | None, norm: Norm) -> Tensor:
        return self.norm(residual, norm) if pending is None else self.norm(pending, norm, residual)
