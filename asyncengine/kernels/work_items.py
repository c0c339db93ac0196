"""The kernels that build work lists, and the items that they write (see work_list.py)."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from asyncengine.kernels.compiling import kernel
from asyncengine.kernels.pdl import wait

# Columns of an item.
SLOT = tl.constexpr(0)
QUERY = tl.constexpr(1)  # first token of the tile among the step's
COUNT = tl.constexpr(2)  # tokens of the tile
POSITION = tl.constexpr(3)  # position of the first
BEGIN = tl.constexpr(4)  # first KV tile
END = tl.constexpr(5)  # one past the last
PARTIAL = tl.constexpr(6)  # partial slot of the unit's first piece
PIECE = tl.constexpr(7)
PIECES = tl.constexpr(8)  # 1: the result goes straight to the output
ITEM = tl.constexpr(16)

ITEM_COST = 1
"""What starting an item costs beside its KV tiles, in tiles."""


@triton.jit
def _kv_tiles(context, length, index, window, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """First and one past the last KV tile that the queries of tile ``index`` of a row see."""
    begin = tl.maximum(context + index * QUERIES - window + 1, 0)
    end = context + tl.minimum((index + 1) * QUERIES, length)
    return begin // KEYS, (end + KEYS - 1) // KEYS


@triton.jit
def _units(length, MIN_QUERY: tl.constexpr, MAX_QUERY: tl.constexpr, QUERIES: tl.constexpr):
    """Tiles of queries of a row of this length, 0 if it is not of the section."""
    return tl.where((length >= MIN_QUERY) & (length <= MAX_QUERY), tl.cdiv(length, QUERIES), 0)


@triton.jit
def _sum_rows(
    row_query_len,
    row_context_len,
    num_rows,
    row,
    window,
    MIN_QUERY: tl.constexpr,
    MAX_QUERY: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    ITEM_COST: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Items and cost of the rows before ``row``, then of all. With adaptive splits a unit counts as one item."""
    items_before, cost_before, items, cost = 0, 0, 0, 0
    for first in range(0, num_rows, ROWS):
        r = first + tl.arange(0, ROWS)
        length = tl.load(row_query_len + r, mask=r < num_rows, other=0)
        context = tl.load(row_context_len + r, mask=r < num_rows, other=0)
        units = _units(length, MIN_QUERY, MAX_QUERY, QUERIES)
        row_cost = tl.zeros([ROWS], tl.int32)
        row_items = tl.zeros([ROWS], tl.int32)
        for index in range(0, tl.max(units, 0)):
            begin, end = _kv_tiles(context, length, index, window, QUERIES, KEYS)
            row_cost += tl.where(index < units, end - begin + ITEM_COST, 0)
            if SPLIT == 0:
                row_items += tl.where(index < units, 1, 0)
            else:
                row_items += tl.where(index < units, tl.cdiv(end, SPLIT) - begin // SPLIT, 0)
        items_before += tl.sum(tl.where(r < row, row_items, 0), 0)
        cost_before += tl.sum(tl.where(r < row, row_cost, 0), 0)
        items += tl.sum(row_items, 0)
        cost += tl.sum(row_cost, 0)
    return items_before, cost_before, items, cost


@triton.jit
def _store_lanes(lane_items, lane, first, last, opens, closes):
    tl.store(lane_items + 2 * lane, first, mask=opens)
    tl.store(lane_items + 2 * lane + 1, last, mask=closes)


@kernel(do_not_specialize=["num_rows", "window"])
def build_kernel(
    row_slot,
    row_query_start,
    row_query_len,
    row_context_len,
    items,
    lane_items,
    num_rows,
    window,
    MIN_QUERY: tl.constexpr,
    MAX_QUERY: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
    MIN_COST: tl.constexpr,
    ITEM_COST: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row. Each sums up the rows before it for itself: cheaper than a second launch."""
    wait(PDL)
    row = tl.program_id(0)
    length = tl.load(row_query_len + row)
    units = _units(length, MIN_QUERY, MAX_QUERY, QUERIES)
    piece = tl.arange(0, WIDTH)
    if (units > 0) | (row == 0):
        item, start, all_items, total = _sum_rows(
            row_query_len, row_context_len, num_rows, row, window,
            MIN_QUERY, MAX_QUERY, QUERIES, KEYS, ITEM_COST, SPLIT, ROWS,
        )  # fmt: skip
        lane_cost = tl.maximum(tl.cdiv(total, LANES), MIN_COST)
        if row == 0:
            if SPLIT == 0:
                # Lanes past the last tile; what follows that tile on the line is the cost of its item.
                idle = (piece < LANES) & (piece * lane_cost >= total - ITEM_COST)
                _store_lanes(lane_items, piece, 0, 0, idle, idle)
            else:
                _store_lanes(lane_items, piece, piece, all_items, piece < LANES, piece < LANES)

        slot = tl.load(row_slot + row)
        query = tl.load(row_query_start + row)
        context = tl.load(row_context_len + row)
        for index in range(0, units):
            begin, end = _kv_tiles(context, length, index, window, QUERIES, KEYS)
            if SPLIT == 0:
                # Tile t of the unit lies at start + t. As a lane is longer than the gap that ITEM_COST leaves
                # between two units, every lane up to the last one in use has a tile.
                first_lane = start // lane_cost
                pieces = (start + end - begin - 1) // lane_cost - first_lane + 1
                lane = first_lane + piece
                low = begin + tl.maximum(lane * lane_cost - start, 0)
                high = tl.minimum(begin + (lane + 1) * lane_cost - start, end)
                partial = 2 * first_lane
                to = item + lane
                opens = (piece < pieces) & (lane * lane_cost >= start - ITEM_COST)
                start += end - begin + ITEM_COST
                closes = (piece < pieces) & (((lane + 1) * lane_cost <= start) | (start == total))
                _store_lanes(lane_items, lane, to, to + 1, opens, closes)
                item += 1
            else:
                first_split = begin // SPLIT
                pieces = tl.cdiv(end, SPLIT) - first_split
                low = tl.maximum((first_split + piece) * SPLIT, begin)
                high = tl.minimum((first_split + piece + 1) * SPLIT, end)
                partial = item
                to = item + piece
                item += pieces
            fields = items + to * ITEM
            there = piece < pieces
            tl.store(fields + SLOT, slot, mask=there)
            tl.store(fields + QUERY, query + index * QUERIES, mask=there)
            tl.store(fields + COUNT, tl.minimum(length - index * QUERIES, QUERIES), mask=there)
            tl.store(fields + POSITION, context + index * QUERIES, mask=there)
            tl.store(fields + BEGIN, low, mask=there)
            tl.store(fields + END, high, mask=there)
            tl.store(fields + PARTIAL, partial, mask=there)
            tl.store(fields + PIECE, piece, mask=there)
            tl.store(fields + PIECES, pieces, mask=there)


@kernel(do_not_specialize=["num_rows", "window"])
def build_apart_kernel(
    row_slot,
    row_query_start,
    row_query_len,
    row_context_len,
    items,
    lane_items,
    num_rows,
    window,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row. Each finds the longest piece for itself, and so what the rows before it take."""
    wait(PDL)
    row = tl.program_id(0)
    index = tl.arange(0, WIDTH)
    length = tl.load(row_query_len + index, mask=index < num_rows, other=0)
    context = tl.load(row_context_len + index, mask=index < num_rows, other=0)
    begin, end = _kv_tiles(context, length, 0, window, 1, KEYS)
    tiles = tl.where(length == 1, end - begin, 0)
    most = tl.maximum(tiles // MIN_TILES, tl.minimum(tiles, 1))
    # Longer pieces are fewer. With a unit's length for all, each unit is one piece, which always fits.
    longest, high = tl.maximum(tl.cdiv(tl.sum(tiles, 0), LANES), 1), tl.max(tiles, 0)
    while longest < high:
        middle = (longest + high) // 2
        fit = tl.sum(tl.minimum(tl.cdiv(tiles, middle), most), 0) <= LANES
        longest, high = tl.where(fit, longest, middle + 1), tl.where(fit, middle, high)
    all_pieces = tl.minimum(tl.cdiv(tiles, longest), most)

    lane = tl.sum(tl.where(index < row, all_pieces, 0), 0) + index
    pieces = tl.sum(tl.where(index == row, all_pieces, 0), 0)
    begin = tl.sum(tl.where(index == row, begin, 0), 0)
    tiles = tl.sum(tl.where(index == row, tiles, 0), 0)
    there = index < pieces
    _store_lanes(lane_items, lane, lane, lane + 1, there, there)
    fields = items + lane * ITEM
    share = tl.maximum(pieces, 1)
    tl.store(fields + SLOT, tl.load(row_slot + row), mask=there)
    tl.store(fields + QUERY, tl.load(row_query_start + row), mask=there)
    tl.store(fields + COUNT, 1, mask=there)
    tl.store(fields + POSITION, tl.load(row_context_len + row), mask=there)
    tl.store(fields + BEGIN, begin + tiles * index // share, mask=there)
    tl.store(fields + END, begin + tiles * (index + 1) // share, mask=there)
    tl.store(fields + PARTIAL, lane - index, mask=there)
    tl.store(fields + PIECE, index, mask=there)
    tl.store(fields + PIECES, pieces, mask=there)
    if row == 0:
        idle = (index >= tl.sum(all_pieces, 0)) & (index < LANES)
        _store_lanes(lane_items, index, 0, 0, idle, idle)
        tl.store(items + index * ITEM + PIECES, 0, mask=idle)
