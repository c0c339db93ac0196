"""Reading the paged KV cache with plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_kv(
    k_cache: Tensor, v_cache: Tensor, blocks: Tensor, start: int, end: int, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Keys and values [Hk, end - start, D] of the positions start to end of one sequence; of float8 in float32."""
    block_size = v_cache.shape[2]
    first = start // block_size
    chosen = blocks[first : -(-end // block_size)]
    k = k_cache[chosen].permute(1, 0, 3, 2).flatten(1, 2)
    v = v_cache[chosen].permute(1, 0, 2, 3).flatten(1, 2)
    offset = first * block_size
    k, v = k[:, start - offset : end - offset], v[:, start - offset : end - offset]
    if scales is None:
        return k, v
    return k.float() * scales[0, 0, :, None, None], v.float() * scales[1, 0, :, None, None]


def visible(query_len: int, start: int, end: int, window: int) -> Tensor:
    """bool [query_len, end - start]: which of the positions start to end each of the last query_len sees."""
    i = torch.arange(end - query_len, end)[:, None]
    j = torch.arange(start, end)[None, :]
    mask = j <= i
    return mask & (j > i - window) if window else mask
