"""Rows sorted by expert on the GPU, in tiles of one expert each, in one launch.

A *pair* is a row and one of its experts: pair p is row p // top_k. A launch cannot depend on the routing, so there is
room for the most tiles that there can be, and programs for tiles that there are not end at once.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, misc, unreachable"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, start_next, wait

_LARGEST_CHUNK = 2048
"""Most pairs that a program reads at a time."""
_TILES_AT_ONCE = 32


class SortedPairs(NamedTuple):
    """Pairs in the order of their experts, those of an expert in their own order, and tiles of them."""

    order: Tensor
    """int32 [P]: pairs"""
    tiles: Tensor
    """int32 [3 * limit + 1]: the expert of each tile, its first place in ``order``, its number of pairs; the number of
    tiles"""
    limit: int
    """Most tiles that there can be."""


@kernel
def _sort_kernel(
    ids,
    order,
    tiles,
    pairs,
    limit,
    ROWS: tl.constexpr,
    EXPERTS_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    TILES_AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program is an expert. Each counts the pairs of all, and places its own."""
    start_next(PDL)
    wait(PDL)
    expert = tl.program_id(0)
    number, at = tl.arange(0, EXPERTS_TILE), tl.arange(0, CHUNK)
    counts = tl.zeros([EXPERTS_TILE], tl.int32)
    for first in tl.range(0, pairs, CHUNK):
        inside = first + at < pairs
        of_pair = tl.load(ids + first + at, mask=inside, other=0).to(tl.int32)
        counts += tl.histogram(of_pair, EXPERTS_TILE, mask=inside)
    heights = (counts + ROWS - 1) // ROWS
    start = tl.sum(tl.where(number < expert, counts, 0), 0)
    count = tl.sum(tl.where(number == expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(number < expert, heights, 0), 0)
    own = (count + ROWS - 1) // ROWS
    for begin in tl.range(0, own, TILES_AT_ONCE):
        tile = begin + tl.arange(0, TILES_AT_ONCE)
        to = tiles + first_tile + tile
        tl.store(to, tl.zeros([TILES_AT_ONCE], tl.int32) + expert, mask=tile < own)
        tl.store(to + limit, start + tile * ROWS, mask=tile < own)
        tl.store(to + 2 * limit, tl.minimum(count - tile * ROWS, ROWS), mask=tile < own)
    if expert == 0:
        tl.store(tiles + 3 * limit, tl.sum(heights, 0))
    if count == 0:
        return
    done = start
    for first in tl.range(0, pairs, CHUNK):
        inside = first + at < pairs
        of_pair = tl.load(ids + first + at, mask=inside, other=0).to(tl.int32)
        mine = (inside & (of_pair == expert)).to(tl.int32)
        tl.store(order + done + tl.cumsum(mine, 0) - 1, first + at, mask=mine > 0)
        done += tl.sum(mine, 0)


def sort_pairs(ids: Tensor, experts: int, rows: int, *, pdl: bool = False) -> SortedPairs:
    """Sort the pairs of ids [T, top_k], integers below ``experts``, into tiles of at most so many ``rows``."""
    if not ids.is_contiguous():
        raise ValueError(f"ids must be contiguous, got strides {ids.stride()}")
    pairs = ids.numel()
    limit = min(experts, pairs) + pairs // rows
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(3 * limit + 1, dtype=torch.int32, device=ids.device)
    chunk = max(32, min(_LARGEST_CHUNK, triton.next_power_of_2(pairs)))
    _sort_kernel[(experts,)](
        ids, order, tiles, pairs, limit, ROWS=rows, EXPERTS_TILE=max(2, triton.next_power_of_2(experts)), CHUNK=chunk,
        TILES_AT_ONCE=_TILES_AT_ONCE, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return SortedPairs(order, tiles, limit)
