"""Linear biases (ALiBi, Press et al. 2021) and fused heads: the attention of Bloom, MPT and Falcon.

A head's score of a key falls by its slope for each token between them. As a softmax ignores what all scores have in
common, a score may as well grow by the slope for each position. Eight more numbers of each query and key say that: keys
hold their position, queries the slope, and the kernels of attention stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asyncengine.kernels.ops import AttentionLayer, Batch, Handle, LayerKVCache, ModelOps, Norm, Residual
from asyncengine.models.config import RawConfig

PLACES = 8
"""Numbers that hold slopes and positions. Four would do; heads of an even multiple of 16 bytes are read faster."""
_BASE = 256
"""A position is two digits of this base. bfloat16 has both exactly, up to 65,536 positions."""


def check_positions(raw: RawConfig, max_positions: int) -> int:
    """Return ``max_positions``. Raises UnsupportedModelError for more than two digits hold."""
    if max_positions > _BASE * _BASE:
        raise raw.unsupported(f"linear biases over {max_positions} positions, more than {_BASE * _BASE}")
    return max_positions


def power_slopes(num_heads: int) -> list[float]:
    """Slopes of MPT: powers of two from -8 / n to -8 for the next power of two n of heads, every second first."""
    count = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** -(8.0 * i / count) for i in range(1, count + 1)]
    return slopes if count == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


def bloom_slopes(num_heads: int) -> list[float]:
    """Slopes of Bloom and Falcon: powers for the largest power of two of heads, and for the others those between."""
    count = 1 << (num_heads.bit_length() - 1)
    between = [2.0 ** -(8.0 * i / (2 * count)) for i in range(1, 2 * (num_heads - count) + 1, 2)]
    return [2.0 ** -(8.0 * i / count) for i in range(1, count + 1)] + between


def query_places(slopes: Sequence[float], scale: float, dtype: torch.dtype) -> Tensor:
    """[heads, PLACES]: the slopes before scores are multiplied by ``scale``, each as a sum of two numbers."""
    wanted = torch.tensor(slopes, dtype=torch.float32) / scale
    high = wanted.to(dtype)
    low = (wanted - high.float()).to(dtype)
    places = torch.zeros(len(slopes), PLACES, dtype=dtype)
    for place, part in enumerate((high * _BASE, low * _BASE, high, low)):
        places[:, place] = part
    return places


class FusedHeads(NamedTuple):
    """Order in which one matrix gives the heads of queries, keys and values, and their slopes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Numbers of a head, without its places"""
    by_group: bool
    """Queries that share a key lie before it and its value, group by group; if not, all queries lie first."""
    places: Tensor | None = None
    """[num_heads, PLACES]; None: no linear biases, and heads have no places"""
    largest: float = math.inf
    """Numbers of heads are kept within ± this."""

    def split(self, fused: Tensor, positions: Tensor) -> Tensor:
        """Queries, keys and values side by side, [T, (num_heads + 2 Hk) * D], of a product in the matrix's order."""
        count, dim, groups = len(fused), self.head_dim, self.num_kv_heads
        if self.largest != math.inf:
            fused = fused.clamp(-self.largest, self.largest)
        if self.by_group:
            heads = fused.view(count, groups, self.num_heads // groups + 2, dim)
            queries, keys, values = heads[:, :, :-2].reshape(count, -1, dim), heads[:, :, -2], heads[:, :, -1]
        else:
            sizes = [self.num_heads, groups, groups]
            queries, keys, values = torch.split(fused.view(count, -1, dim), sizes, dim=1)
        if self.places is None:
            return torch.cat((queries, keys, values), dim=1).view(count, -1)
        wide = fused.new_zeros(count, self.num_heads + 2 * groups, dim + PLACES)
        wide[:, : self.num_heads, :dim] = queries
        wide[:, : self.num_heads, dim:] = self.places
        own = wide[:, self.num_heads : self.num_heads + groups]
        own[..., :dim] = keys
        high, low = positions // _BASE, positions % _BASE
        for place, digit in enumerate((high, high, low, low)):
            own[..., dim + place] = digit[:, None].to(fused.dtype)
        wide[:, self.num_heads + groups :, :dim] = values
        return wide.view(count, -1)

    def joined(self, x: Tensor) -> Tensor:
        """Results of attention, [T, num_heads * D], without the places."""
        if self.places is None:
            return x
        return x.view(len(x), self.num_heads, -1)[..., : self.head_dim].reshape(len(x), -1)


class FusedAttentionBlock(NamedTuple):
    """An AttentionBlock whose projection is in another order, and whose heads may have linear biases."""

    norm: Norm
    qkv: Handle
    layer: AttentionLayer
    output: Handle
    heads: FusedHeads

    def attend(self, ops: ModelOps, residual: Residual, cache: LayerKVCache, batch: Batch, is_last: bool) -> Tensor:
        """Everything before the product with ``output``, whose input is returned."""
        heads = self.heads.split(ops.norm_linear(residual, self.norm, self.qkv, batch), ops.positions(batch))
        x = ops.attention(heads, self.layer, cache, batch)
        ops.exchange(heads, x, residual, self.layer, cache, batch)
        x = self.heads.joined(x)
        return ops.keep_sampled(x, residual, batch) if is_last else x

    def forward(self, ops: ModelOps, residual: Residual, cache: LayerKVCache, batch: Batch, is_last: bool) -> None:
        x = self.attend(ops, residual, cache, batch, is_last)
        ops.linear_add_(x, self.output, residual, batch)
