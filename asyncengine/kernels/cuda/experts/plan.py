"""Tiles of the products of experts, by a formula of the rows that an expert has on average."""

from __future__ import annotations

from typing import NamedTuple

from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.linear.grouped import TILE

FEW_ROWS = 2
"""Most rows whose experts are multiplied without sorting (see few_rows.py): most of these experts differ."""
_SHORTEST, _TALLEST = 16, 128


class Tiles(NamedTuple):
    """Tiles of a grouped product."""

    rows: int
    """rows of one expert in a tile"""
    columns: int
    """rows of the weight in a tile"""
    inner: int
    """elements of K in a step"""
    warps: int
    stages: int


class DirectTiles(NamedTuple):
    """Tiles of a product in the way of direct.py."""

    rows: int
    """rows of one expert in a tile"""
    columns: int
    """rows of the weight in a tile"""
    units: int
    """tiles of K in a step of a warp"""
    ahead: bool
    """x of the next step is loaded in this one."""
    along_inner: int
    """warps that divide K"""
    along_columns: int
    """warps that divide the rows of the weight"""


class DirectPlan(NamedTuple):
    """Tiles of the two products of a mixture in the way of direct.py; both have the same rows."""

    up: DirectTiles
    down: DirectTiles


def direct_plan_for(pairs: int, experts: int, hidden: int, inner: int, *, fp4: bool) -> DirectPlan | None:
    """The tiles of products in the way of direct.py for so many pairs, of weights with ``hidden`` columns and with
    ``inner``; None if an expert has too many rows on average. ``fp4``: codes stand for floats.

    Few pairs leave multiprocessors without a program unless K is divided, and a warp waits for memory twice if it has
    two steps. Of the others those that have more rows read x more often than weights, and share it between more warps.
    Floats take more instructions than numbers: with two tiles in a step, programs of full and of half tiles side by
    side are read again and again.
    """
    rows = 8
    while rows * experts < 2 * pairs:
        rows *= 2
    if rows > 32:
        return None
    if pairs <= 16:
        up, down = (DirectTiles(8, 16, min(3, -(-columns // (8 * 128))), True, 4, 1) for columns in (hidden, inner))
        return DirectPlan(up, down)
    if rows == 16:
        return DirectPlan(DirectTiles(16, 64, 1 if fp4 else 2, False, 2, 2), DirectTiles(16, 64, 1, False, 2, 2))
    tiles = DirectTiles(8, 32, 2, False, 2, 2) if rows == 8 else DirectTiles(32, 128, 1, False, 1, 4)
    return DirectPlan(tiles, tiles)


def tiles_for(pairs: int, experts: int, bits: tuple[int, int], gpu: Gpu, *, invariant: bool = False) -> Tiles:
    """The tiles for so many pairs of a row and an expert, with ``bits`` in an element of a weight and of a row.

    Twice the mean height holds nearly every expert's rows in one tile, so that weights are read once. Low tiles are for
    reading: two programs share a multiprocessor, and keep as much of the weights on the way as their memory holds. A
    step of 256 columns in 4 bits has four bytes of scales for each thread, the least that are copied beside products.
    An ``invariant`` choice depends on no number of rows.
    """
    rows = _SHORTEST
    while not invariant and rows < _TALLEST and rows * experts < 2 * pairs:
        rows *= 2
    if rows >= _TALLEST and min(bits) == 16:
        columns, inner, warps, memory = 128, 64, 8, gpu.tile_bytes_of_two
    else:
        inner = 64 if rows > 32 else 128 if bits[0] > 4 else 256
        columns, warps, memory = 64, 4, gpu.tile_bytes_of_two
    if max(bits) == 32:
        inner //= 2
    if bits[0] == 4:  # codes are read by whole tiles
        inner = max(inner, TILE)
    step = (columns * bits[0] + rows * bits[1]) * inner // 8
    return Tiles(rows, columns, inner, warps, max(2, min(6, memory // step)))
