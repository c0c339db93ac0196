"""Attention over latents in host memory.

Each token is computed by itself, by the same products of the same sizes, so that the cut of a prompt into chunks and
the other rows of a step change no bit of its result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncengine._core import StepBatch
from asyncengine.kernels.float8_cache import quantize_heads
from asyncengine.kernels.latent import LatentLayer
from asyncengine.kernels.ops import LayerLatentCache


def store_latents(latents: Tensor, keys: Tensor, cache: LayerLatentCache, batch: StepBatch) -> None:
    """Write normed latents [T, rank] and rotated keys [T, rope] to the cache slots of the step."""
    slots = torch.from_numpy(batch.slot_mapping)
    if cache.scales is not None:
        parts = zip((latents, keys), cache.scales, strict=True)
        latents, keys = (quantize_heads(x[:, None], scale)[:, 0] for x, scale in parts)
    cache.latents.view(-1, cache.latents.shape[2])[slots] = torch.cat((latents, keys), -1)


def attend(q: Tensor, layer: LatentLayer, cache: LayerLatentCache, batch: StepBatch) -> Tensor:
    """Attention of queries [T, num_heads, width] over latents that are in the cache: [T, num_heads, rank].

    It is computed in float32, and has the dtype of the queries.
    """
    out = q.new_empty(len(q), layer.num_heads, layer.rank)
    block_size, starts = cache.latents.shape[1], batch.query_start.tolist()
    for row, context in enumerate(batch.context_len.tolist()):
        first, last = starts[row], starts[row + 1]
        blocks = torch.from_numpy(batch.block_table(row, -(-(context + last - first) // block_size)))
        known = _exact(cache, blocks, layer.rank)
        for token in range(first, last):
            seen = known[: context + token - first + 1]
            # A copy begins where memory is aligned: products of other alignments may add in another order.
            weights = (torch.mm(q[token].to(torch.float32, copy=True), seen.t()) * layer.scale).softmax(-1)
            out[token] = torch.mm(weights, seen[:, : layer.rank])
    return out


def _exact(cache: LayerLatentCache, blocks: Tensor, rank: int) -> Tensor:
    """float32 [tokens of the blocks, width]: vectors that are in the cache."""
    stored = cache.latents[blocks].flatten(0, 1).float()
    if cache.scales is not None:
        stored[:, :rank] *= cache.scales[0, 0]
        stored[:, rank:] *= cache.scales[1, 0]
    return stored
