"""Attention over the paged KV cache: one interface, several back ends."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncengine._core import StepBatch
from asyncengine.kernels.cpu.host import HostOps
from asyncengine.kernels.cpu.paging import gather_kv, visible
from asyncengine.kernels.ops import AttentionLayer, Ops


class LayerKVCache(NamedTuple):
    """The KV cache of one layer; ``Ops`` says how its blocks are laid out."""

    k: Tensor
    v: Tensor


class AttentionBackend(Protocol):
    """Store a step's keys and values, and attend."""

    def __call__(self, heads: Tensor, layer: AttentionLayer, cache: LayerKVCache, batch: Any) -> Tensor:
        """heads is [T, (num_heads + 2 Hk) * D], the result [T, num_heads * D] (see Ops.attention)."""


class NativeAttention:
    """Every row through the paged kernel: the result of a row depends on nothing but that row."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __call__(self, heads: Tensor, layer: AttentionLayer, cache: LayerKVCache, batch: Any) -> Tensor:
        return self._ops.attention(heads, layer, cache.k, cache.v, batch)


class SdpaPrefillAttention:
    """Prefill rows through torch's scaled_dot_product_attention, decode rows through the paged kernel.

    Faster than the paged kernel on long prompts. How a prompt is cut into chunks may change its last bits.
    """

    def __init__(self, ops: HostOps) -> None:
        self._ops = ops

    def __call__(self, heads: Tensor, layer: AttentionLayer, cache: LayerKVCache, batch: StepBatch) -> Tensor:
        q = self._ops.store_heads(heads, layer, cache.k, cache.v, batch)
        scale, window = layer.scale, layer.window
        starts = batch.query_start.tolist()
        decodes = 0
        while decodes < batch.num_rows and starts[decodes + 1] == decodes + 1:
            decodes += 1
        if decodes == batch.num_rows:
            return self._ops.paged_attention(q, cache.k, cache.v, batch, scale, window)
        out = q.new_empty(len(q), q.shape[1] * q.shape[2])
        if decodes:
            out[:decodes] = self._ops.paged_attention(q[:decodes], cache.k, cache.v, batch, scale, window)
        for row in range(decodes, batch.num_rows):
            first, last = starts[row], starts[row + 1]
            context = int(batch.context_len[row])
            num_blocks = -(-(context + last - first) // cache.v.shape[2])
            blocks = torch.from_numpy(batch.block_table(row, num_blocks))
            out[first:last] = _prefill_row(q[first:last], cache, blocks, context, scale, window)
        return out


def _prefill_row(
    q: Tensor, cache: LayerKVCache, blocks: Tensor, context: int, scale: float, window: int
) -> Tensor:
    """Attention of one row's query q [n, Hq, D], which follows ``context`` cached tokens: [n, Hq * D]."""
    end = context + len(q)
    start = max(0, context - window + 1) if window else 0
    k, v = gather_kv(cache.k, cache.v, blocks, start, end)
    plain = start == 0 and context == 0 and (not window or end <= window)
    mask = None if plain else visible(len(q), start, end, window)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=mask,
        is_causal=plain,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).flatten(1)


def make_attention(name: Literal["native", "sdpa"], ops: HostOps) -> AttentionBackend:
    """The back end that EngineConfig.prefill_attention names."""
    return SdpaPrefillAttention(ops) if name == "sdpa" else NativeAttention(ops)
