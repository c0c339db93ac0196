"""Attention of prompts by torch's scaled_dot_product_attention, over the paged KV cache.

It serves comparisons with the native kernel. The cut of a prompt into chunks may change its last bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncengine._core import StepBatch
from asyncengine.kernels.cpu.paging import gather_kv, visible
from asyncengine.kernels.ops import AttentionCall, LayerKVCache


def count_decodes(batch: StepBatch) -> int:
    """Count the rows of one token, which come first in the batch."""
    starts = batch.query_start.tolist()
    decodes = 0
    while decodes < batch.num_rows and starts[decodes + 1] == decodes + 1:
        decodes += 1
    return decodes


def attend_prompts(call: AttentionCall[StepBatch], first_row: int, out: Tensor) -> None:
    """Attention of the rows from ``first_row`` on, to their part of out [T, Hq * D].

    The layer caps no scores.
    """
    layer, batch = call.layer, call.step
    starts = batch.query_start.tolist()
    for row in range(first_row, batch.num_rows):
        first, last = starts[row], starts[row + 1]
        context = int(batch.context_len[row])
        num_blocks = -(-(context + last - first) // call.cache.v.shape[2])
        blocks = torch.from_numpy(batch.block_table(row, num_blocks, call.cache.group))
        q = call.queries[first:last]
        out[first:last] = _attend_row(q, call.cache, blocks, context, layer.scale, layer.window)


def _attend_row(q: Tensor, cache: LayerKVCache, blocks: Tensor, context: int, scale: float, window: int) -> Tensor:
    """Attention of one row's query q [n, Hq, D], which follows ``context`` cached tokens: [n, Hq * D]."""
    end = context + len(q)
    start = max(0, context - window + 1) if window else 0
    k, v = (x.to(q.dtype) for x in gather_kv(cache.k, cache.v, blocks, start, end, cache.scales))
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
