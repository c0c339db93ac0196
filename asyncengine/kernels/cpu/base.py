"""Operations common to the kernel packages for host memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from asyncengine._core import CpuLanes, Need, StepBatch
from asyncengine.kernels import experts
from asyncengine.kernels.cpu import latent, recurrent, sdpa
from asyncengine.kernels.latent import LatentLayer
from asyncengine.kernels.ops import (
    Activation,
    AttentionCall,
    AttentionLayer,
    Experts,
    HandleT,
    LayerKVCache,
    LayerLatentCache,
    LayerStates,
    Norm,
    Ops,
    Reduction,
    Routing,
    RoutingRule,
    split_heads,
)
from asyncengine.kernels.states import DeltaNet, Mamba2, ShortConv
from asyncengine.kernels.weight import PackedWeight, dense

PrefillAttention = Literal["native", "sdpa"]


@dataclass(slots=True)
class Residual:
    """The residual of a step, and what is still to be added to it: whoever norms it next does both in one pass."""

    x: Tensor
    """[T, H]"""
    pending: Tensor | None = None
    """[T, H]"""


def sampled(residual: Residual, batch: StepBatch) -> Residual:
    """Return the residual of only the tokens that are sampled from."""
    index, pending = torch.from_numpy(batch.sample_index), residual.pending
    return Residual(residual.x[index], None if pending is None else pending[index])


class BaseOps(Ops[StepBatch, Residual, HandleT]):
    """The part of Ops that follows from a StepBatch and from simpler operations."""

    device = torch.device("cpu")
    # Scores of neighbouring tokens are neighbours, and so a vector.
    transposed_keys = True
    reads_blocks = True
    expert_codes = False

    def __init__(self, prefill_attention: PrefillAttention = "native", *, fast_prefill: bool = True) -> None:
        """``prefill_attention``, which kernel attends for rows of several tokens, and ``fast_prefill`` are as in
        EngineConfig."""
        self._by_sdpa = prefill_attention == "sdpa"
        self._fast_prefill = fast_prefill
        self.reduction: Reduction | None = None
        self.lanes: CpuLanes | None = None
        """Lanes through which rows that decode on the host pass queries and results."""

    @abstractmethod
    def make_linear(self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None]) -> HandleT:
        """A handle for ``multiply`` over weights [N_i, K] that share their input. It copies none of them."""

    def make_head(self, weight: PackedWeight) -> HandleT:
        return self.make_linear([weight], [None])

    def make_embedding(self, table: PackedWeight, *, tied: bool, copy: bool = False) -> HandleT:
        return self.make_head(table)

    def make_experts(
        self,
        up: Sequence[Sequence[PackedWeight]],
        down: Sequence[PackedWeight],
        activation: Activation,
        up_biases: Sequence[Sequence[Tensor]] | None = None,
        down_biases: Sequence[Tensor] | None = None,
    ) -> Experts[HandleT]:
        return experts.make_experts(self.make_linear, up, down, activation, up_biases, down_biases)

    @abstractmethod
    def multiply(self, x: Tensor, handle: HandleT, batch: StepBatch, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [M, K] times every weight of the handle, transposed, side by side: [M, N]."""

    @abstractmethod
    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        """The norm of x [M, H], or of residual += x, which is in place."""

    @abstractmethod
    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """x [M, N] activated; a gated activation halves N."""

    @abstractmethod
    def soft_cap_(self, x: Tensor, cap: float) -> Tensor:
        """x [M, N] in float32 = cap * tanh(x / cap), in place."""

    @abstractmethod
    def head_rms_norm_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """RMS norm over the last axis of the view x [T, H, D], in place."""

    @abstractmethod
    def rotary_(self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
        """Rotate the views q [T, Hq, D] and k [T, Hk, D] in place."""

    @abstractmethod
    def store_kv(self, k: Tensor, v: Tensor, cache: LayerKVCache, batch: StepBatch) -> None:
        """Write the views k, v [T, Hk, D] to the cache slots of the step; with scales of the cache, in float8."""

    @abstractmethod
    def paged_attention(self, call: AttentionCall[StepBatch]) -> Tensor:
        """Attention over keys and values that are in the cache: [T, num_heads * D].

        There may be just the queries of the leading rows; the other rows are then left out.
        """

    def residual(self, x: Tensor, batch: StepBatch) -> Residual:
        return Residual(x)

    def norm_linear(
        self,
        residual: Residual,
        norm: Norm | None,
        handle: HandleT,
        batch: StepBatch,
        activation: Activation | None = None,
    ) -> Tensor:
        x = self._read(residual, norm, batch)
        y = self.multiply(x, handle, batch)
        return y if activation is None else self.activate(y, activation)

    def linear_add_(
        self, x: Tensor, handle: HandleT, residual: Residual, batch: StepBatch, norm: Norm | None = None
    ) -> None:
        self.plain(residual, batch)  # the product may be written where the one that is pending lies
        self.add_(self.multiply(x, handle, batch), residual, batch, norm)

    def normed(self, residual: Residual, norm: Norm, batch: StepBatch) -> Tensor:
        pending, residual.pending = residual.pending, None
        return self.norm(residual.x, norm) if pending is None else self.norm(pending, norm, residual.x)

    def _read(self, residual: Residual, norm: Norm | None, batch: StepBatch) -> Tensor:
        """The normed residual, or without a norm the residual: [T, H]."""
        return self.plain(residual, batch) if norm is None else self.normed(residual, norm, batch)

    def linear(self, x: Tensor, handle: HandleT, batch: StepBatch) -> Tensor:
        return self.multiply(x, handle, batch)

    def route(
        self, residual: Residual, norm: Norm | None, router: HandleT, rule: RoutingRule, batch: StepBatch
    ) -> tuple[Tensor, Routing]:
        x = self._read(residual, norm, batch)
        return x, experts.choose_experts(self.multiply(x, router, batch, torch.float32), rule)

    def rms_norm(self, x: Tensor, norm: Norm, batch: StepBatch) -> Tensor:
        return self.norm(x, norm)

    def activated(self, x: Tensor, activation: Activation, batch: StepBatch) -> Tensor:
        return self.activate(x, activation)

    def gated(self, x: Tensor, gate: Tensor, batch: StepBatch) -> Tensor:
        return (x.float() * gate.float().sigmoid()).to(x.dtype)

    def experts(self, x: Tensor, routing: Routing, handle: Experts[HandleT], batch: StepBatch) -> Tensor:
        def block(index: int, rows: Tensor) -> Tensor:
            inner = self.activate(self.multiply(rows, handle.up[index], batch), handle.activation)
            return self.multiply(inner, handle.down[index], batch)

        return experts.mix_rows(x, routing, block)

    def experts_add_(
        self,
        x: Tensor,
        routing: Routing,
        handle: Experts[HandleT],
        residual: Residual,
        batch: StepBatch,
        norm: Norm | None = None,
    ) -> None:
        self.add_(self.experts(x, routing, handle, batch), residual, batch, norm)

    def add_(self, x: Tensor, residual: Residual, batch: StepBatch, norm: Norm | None = None) -> None:
        self.plain(residual, batch)
        if self.reduction is not None:
            self.reduction(x, batch)
        residual.pending = x if norm is None else self.norm(x, norm)

    def plain(self, residual: Residual, batch: StepBatch) -> Tensor:
        pending, residual.pending = residual.pending, None
        return residual.x if pending is None else residual.x.add_(pending)

    def input_ids(self, batch: StepBatch) -> Tensor:
        return torch.from_numpy(batch.input_ids)

    def positions(self, batch: StepBatch) -> Tensor:
        return torch.from_numpy(batch.positions)

    def attention(self, heads: Tensor, layer: AttentionLayer, cache: LayerKVCache, batch: StepBatch) -> Tensor:
        call = AttentionCall(heads.view(heads.shape[0], -1, cache.v.shape[3]), layer, cache, batch)
        self.store_heads(call)
        if not self._by_sdpa or layer.softcap or layer.sinks is not None:  # torch's kernel has neither
            return self.paged_attention(call)
        decodes = sdpa.count_decodes(batch)
        if decodes == batch.num_rows:
            return self.paged_attention(call)
        q = call.queries
        out = q.new_empty(len(q), q.shape[1] * q.shape[2])
        if decodes:
            out[:decodes] = self.paged_attention(replace(call, heads=call.heads[:decodes]))
        sdpa.attend_prompts(call, decodes, out)
        return out

    def make_latent_up(self, up: Tensor, key_dim: int) -> tuple[tuple[HandleT, ...], tuple[HandleT, ...]]:
        """The heads' matrices [rank, key_dim] for queries, and [value_dim, rank] for values."""
        parts = up[:, :key_dim].transpose(1, 2), up[:, key_dim:]
        keys, values = (
            tuple(self.make_linear([dense(weight.contiguous())], [None]) for weight in part) for part in parts
        )
        return keys, values

    def _by_head(self, x: Tensor, heads: tuple[HandleT, ...], batch: StepBatch) -> Tensor:
        """x [T, num_heads, K] times the matrix of each head, transposed: [T, num_heads, N]."""
        return torch.stack([self.multiply(x[:, head], own, batch) for head, own in enumerate(heads)], 1)

    def latent_attention(
        self, q: Tensor, rows: Tensor, layer: LatentLayer, cache: LayerLatentCache, batch: StepBatch
    ) -> Tensor:
        of_queries, of_values = layer.up
        q, q_rope = self._by_head(q[..., : -layer.rope], of_queries, batch), q[..., -layer.rope :]
        latents = self.norm(rows[:, : layer.rank], Norm(layer.norm_weight, None, layer.norm_eps))
        q_rope, keys = q_rope.contiguous(), rows[:, None, layer.rank : layer.width].contiguous()
        self.rotary_(q_rope, keys, layer.cos_sin, self.positions(batch))
        latent.store_latents(latents, keys[:, 0], cache, batch)
        x = latent.attend(torch.cat((q, q_rope), -1), layer, cache, batch)
        return self._by_head(x, of_values, batch).flatten(1)

    def short_conv(self, x: Tensor, conv: ShortConv, cache: LayerStates, batch: StepBatch) -> Tensor:
        return recurrent.short_conv(x, conv, cache, batch)

    def mamba2(self, x: Tensor, mixer: Mamba2, cache: LayerStates, batch: StepBatch) -> Tensor:
        return recurrent.mamba2(x, mixer, cache, batch)

    def delta_net(self, x: Tensor, mixer: DeltaNet, cache: LayerStates, batch: StepBatch) -> Tensor:
        return recurrent.delta_net(x, mixer, cache, batch)

    def store_heads(self, call: AttentionCall[StepBatch]) -> None:
        """Everything of ``attention`` that precedes it: queries and keys are normed and rotated in place."""
        heads, layer = call.heads, call.layer
        self.prepare_heads(heads, heads.shape[2], layer, call.step)
        if not layer.shares:
            _, k, v = split_heads(heads, layer.num_heads)
            self.store_kv(k, v, call.cache, call.step)

    def prepare_heads(self, heads: Tensor, head_dim: int, layer: AttentionLayer, batch: StepBatch) -> None:
        """Norm and rotate queries and keys in place, and norm values, as the layer says."""
        if layer.norms is None and layer.cos_sin is None and layer.query_scales is None:
            return
        q, k, v = split_heads(heads.view(heads.shape[0], -1, head_dim), layer.num_heads)
        if layer.norms is not None:
            eps = layer.norms.eps
            for x, weight in ((q, layer.norms.q),) if layer.shares else ((q, layer.norms.q), (k, layer.norms.k)):
                # A norm over all heads takes them for one.
                self.head_rms_norm_(x.view(len(x), -1, len(weight)), weight, eps)
            if layer.norms.v is not None and not layer.shares:
                self.head_rms_norm_(v, layer.norms.v, eps)
        if layer.cos_sin is not None:
            self.rotary_(q, k, layer.cos_sin, self.positions(batch))
        if layer.query_scales is not None:
            q.mul_(layer.query_scales[self.positions(batch)][:, None, None])

    def exchange(
        self, heads: Tensor, x: Tensor, residual: Residual, layer: AttentionLayer, cache: LayerKVCache, batch: StepBatch
    ) -> None:
        if not batch.num_lanes:
            return
        assert self.lanes is not None
        assert heads.is_contiguous()  # otherwise attention prepared a copy
        assert residual.pending is None
        self.lanes.exchange(batch, cache.number, heads.data_ptr(), x.data_ptr(), residual.x.data_ptr())

    def keep_sampled(self, x: Tensor, residual: Residual, batch: StepBatch) -> Tensor:
        if batch.num_samples == batch.num_tokens or batch.needs & Need.mean:  # in order, or all are wanted
            return x
        assert residual.pending is None
        residual.x = sampled(residual, batch).x
        return x[torch.from_numpy(batch.sample_index)]

    def sampled_step(self, residual: Residual, batch: StepBatch) -> tuple[StepBatch, Tensor | None]:
        if not self._fast_prefill or batch.num_samples == batch.num_tokens or batch.needs & Need.mean:
            return batch, None
        self.plain(residual, batch)
        residual.x = sampled(residual, batch).x
        return batch.only_sampled(), torch.from_numpy(batch.sample_index)

    def hidden(self, residual: Residual, norm: Norm | None, batch: StepBatch) -> Tensor:
        wanted = residual if batch.needs & Need.mean else self._sampled(residual, batch)
        return self._read(wanted, norm, batch)

    def logits(
        self,
        residual: Residual,
        norm: Norm | None,
        handle: HandleT,
        batch: StepBatch,
        softcap: float = 0.0,
        scale: float = 1.0,
    ) -> Tensor | None:
        if not batch.num_samples:
            return None
        y = self._logits(self._sampled(residual, batch), norm, handle, batch)
        if scale != 1:
            y *= scale
        return self.soft_cap_(y, softcap) if softcap else y

    def _logits(self, residual: Residual, norm: Norm | None, handle: HandleT, batch: StepBatch) -> Tensor:
        """Logits of every token of the residual, float32."""
        x = self._read(residual, norm, batch)
        return self.multiply(x, handle, batch, torch.float32)

    def _sampled(self, residual: Residual, batch: StepBatch) -> Residual:
        """``sampled``, unless ``keep_sampled`` has left no others."""
        return sampled(residual, batch) if batch.num_samples < residual.x.shape[0] else residual
