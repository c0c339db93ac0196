"""The items of work lists, and the kernels that write those of decode (see work_list.py)."""
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
# Of a lane; before them are those of its first item, so that one look finds all that its program begins with.
FIRST = tl.constexpr(6)
LAST = tl.constexpr(7)  # one past its last item
LANE = tl.constexpr(8)
ITEM = tl.constexpr(16)

ITEM_COST = 1
"""What starting an item costs beside its KV tiles, in tiles."""
LINE_COST = 3
"""What lanes that begin and end anywhere cost a step, in tiles: second items, and combinations of what need not be
cut."""
LATE_SHARE = tl.constexpr(12)
"""Early lanes are at most about so many times as long as late ones."""


@triton.jit
def kv_tiles(context, length, index, window, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """First and one past the last KV tile that the queries of tile ``index`` of a row see."""
    begin = tl.maximum(context + index * QUERIES - window + 1, 0)
    end = context + tl.minimum((index + 1) * QUERIES, length)
    return begin // KEYS, (end + KEYS - 1) // KEYS


@triton.jit
def _units(length, MAX_QUERY: tl.constexpr, QUERIES: tl.constexpr):
    """Tiles of queries of a row of this length, 0 if it is not of the section."""
    return tl.where(length <= MAX_QUERY, tl.cdiv(length, QUERIES), 0)


@triton.jit
def _sum_rows(
    row_query_len,
    row_context_len,
    num_rows,
    row,
    window,
    MAX_QUERY: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    ITEM_COST: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Items and cost of the rows before ``row``, then of all.

    With adaptive splits a unit counts as one item.
    """
    items_before, cost_before, items, cost = 0, 0, 0, 0
    for first in range(0, num_rows, ROWS):
        r = first + tl.arange(0, ROWS)
        length = tl.load(row_query_len + r, mask=r < num_rows, other=0)
        context = tl.load(row_context_len + r, mask=r < num_rows, other=0)
        units = _units(length, MAX_QUERY, QUERIES)
        row_cost = tl.zeros([ROWS], tl.int32)
        row_items = tl.zeros([ROWS], tl.int32)
        for index in range(0, tl.max(units, 0)):
            begin, end = kv_tiles(context, length, index, window, QUERIES, KEYS)
            tiles = tl.where(index < units, end - begin, 0)
            row_cost += tl.where(index < units, tiles + ITEM_COST, 0)
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
def store_lanes(lane_items, lane, first, last, opens, closes):
    tl.store(lane_items + lane * LANE + FIRST, first, mask=opens)
    tl.store(lane_items + lane * LANE + LAST, last, mask=closes)


@triton.jit
def lane_costs(total, units, LANES: tl.constexpr, LATE: tl.constexpr, MIN_COST: tl.constexpr):
    """The stretches of the line that an early lane and a late one take.

    A late one takes what a unit does on average, so that there is one for each of units that are alike.
    """
    late_cost = tl.maximum(tl.cdiv(total, tl.maximum(units, 1)), tl.cdiv(total, LANES * LATE_SHARE))
    late_cost = tl.maximum(late_cost, 1)
    return tl.maximum(tl.cdiv(total - LATE * late_cost, LANES), MIN_COST), late_cost


@triton.jit
def _lane_begin(lane, lane_cost, late_cost, LANES: tl.constexpr):
    return tl.minimum(lane, LANES) * lane_cost + tl.maximum(lane - LANES, 0) * late_cost


@triton.jit
def _lane_at(cost, lane_cost, late_cost, LANES: tl.constexpr):
    """In which stretch a place on the line lies."""
    late = cost - LANES * lane_cost
    return tl.where(late < 0, cost // lane_cost, LANES + late // late_cost)


@triton.jit
def cut_line(
    lane_items, item, start, begin, end, total, lane_cost, late_cost, piece, LANES: tl.constexpr,
    ITEM_COST: tl.constexpr,
):  # fmt: skip
    """Unit number ``item``, whose tile t lies at start + t on the line: pieces, low, high, partial slot, items, lanes,
    whether these are the lanes' first.

    As a lane is longer than the gap that ITEM_COST leaves between two units, every lane up to the last one in use has
    a tile. Without tiles there is no unit, and no pieces.
    """
    first_lane = _lane_at(start, lane_cost, late_cost, LANES)
    pieces = tl.where(end > begin, _lane_at(start + end - begin - 1, lane_cost, late_cost, LANES) - first_lane + 1, 0)
    lane = first_lane + piece
    opening = _lane_begin(lane, lane_cost, late_cost, LANES)
    closing = _lane_begin(lane + 1, lane_cost, late_cost, LANES)
    low = begin + tl.maximum(opening - start, 0)
    high = tl.minimum(begin + closing - start, end)
    to = item + lane
    following = start + end - begin + ITEM_COST
    opens = (piece < pieces) & (opening >= start - ITEM_COST)
    closes = (piece < pieces) & ((closing <= following) | (following == total))
    store_lanes(lane_items, lane, to, to + 1, opens, closes)
    return pieces, low, high, 2 * first_lane, to, lane, opens


@triton.jit
def _lane_of(start, cost, lane_cost, late_cost, LANES: tl.constexpr):
    """That of a unit which is not cut: where its middle lies on the line."""
    return _lane_at(start + cost // 2, lane_cost, late_cost, LANES)


@triton.jit
def _share_whole(
    row_query_len,
    row_context_len,
    num_rows,
    window,
    lane_cost,
    late_cost,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
    ITEM_COST: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """int32 [WIDTH]: what each lane takes of units of one token if none of them is cut."""
    lanes = tl.arange(0, WIDTH)
    taken = tl.zeros([WIDTH], tl.int32)
    before = 0
    for first in range(0, num_rows, ROWS):
        r = first + tl.arange(0, ROWS)
        length = tl.load(row_query_len + r, mask=r < num_rows, other=0)
        context = tl.load(row_context_len + r, mask=r < num_rows, other=0)
        begin, end = kv_tiles(context, length, 0, window, 1, KEYS)
        cost = tl.where(length == 1, end - begin + ITEM_COST, 0)
        lane = _lane_of(before + tl.cumsum(cost, 0) - cost, cost, lane_cost, late_cost, LANES)
        taken += tl.sum(tl.where(lane[None, :] == lanes[:, None], cost[None, :], 0), 1)
        before += tl.sum(cost, 0)
    return taken


@triton.jit
def _keep_whole(
    lane_items, item, start, begin, end, lane_cost, late_cost, taken, piece, LANES: tl.constexpr,
    ITEM_COST: tl.constexpr,
):  # fmt: skip
    """What cut_line gives, for a unit that is not cut; ``taken`` is what each lane takes of such units."""
    lane = _lane_of(start, end - begin + ITEM_COST, lane_cost, late_cost, LANES)
    before = tl.sum(tl.where(piece < lane, taken, 0), 0)
    with_lane = before + tl.sum(tl.where(piece == lane, taken, 0), 0)
    to = item + lane + piece
    opens, closes = start == before, start + end - begin + ITEM_COST == with_lane
    store_lanes(lane_items, lane, item + lane, item + lane + 1, opens, closes)
    return lane * 0 + 1, begin + piece * 0, end + piece * 0, lane * 2, to, lane + piece, opens & (piece == 0)


@triton.jit
def store_place(to, slot, query, count, position, low, high, there):
    tl.store(to + SLOT, slot, mask=there)
    tl.store(to + QUERY, query, mask=there)
    tl.store(to + COUNT, count, mask=there)
    tl.store(to + POSITION, position, mask=there)
    tl.store(to + BEGIN, low, mask=there)
    tl.store(to + END, high, mask=there)


@triton.jit
def store_items(
    items, lane_items, to, lane, opens, slot, query, count, position, low, high, partial, piece, pieces
):  # fmt: skip
    there = piece < pieces
    store_place(items + to * ITEM, slot, query, count, position, low, high, there)
    tl.store(items + to * ITEM + PARTIAL, partial, mask=there)
    tl.store(items + to * ITEM + PIECE, piece, mask=there)
    tl.store(items + to * ITEM + PIECES, pieces, mask=there)
    store_place(lane_items + lane * LANE, slot, query, count, position, low, high, opens)


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
    MAX_QUERY: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
    LATE: tl.constexpr,
    MIN_COST: tl.constexpr,
    ITEM_COST: tl.constexpr,
    LINE_COST: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of rows of one token, or of any with fixed splits. One program per row.

    Each sums up the rows before it for itself: cheaper than a second launch.
    """
    wait(PDL)
    row = tl.program_id(0)
    length = tl.load(row_query_len + row)
    units = _units(length, MAX_QUERY, QUERIES)
    piece = tl.arange(0, WIDTH)
    if (units > 0) | (row == 0):
        item, start, all_items, total = _sum_rows(
            row_query_len, row_context_len, num_rows, row, window,
            MAX_QUERY, QUERIES, KEYS, ITEM_COST, SPLIT, ROWS,
        )  # fmt: skip
        lane_cost, late_cost = lane_costs(total, all_items, LANES, LATE, MIN_COST)
        # Lanes past the last tile are idle; what follows that tile on the line is the cost of its item.
        idle, whole = _lane_begin(piece, lane_cost, late_cost, LANES) >= total - ITEM_COST, False
        taken = tl.zeros([WIDTH], tl.int32)
        if SPLIT == 0:
            taken = _share_whole(
                row_query_len, row_context_len, num_rows, window, lane_cost, late_cost, KEYS, LANES, ITEM_COST, ROWS,
                WIDTH,
            )  # fmt: skip
            # Late lanes make up for early ones that are unlike, and may each have a unit that is twice as long.
            spare = 0 if LATE == 0 else late_cost
            most = tl.where(piece < LANES, lane_cost + LINE_COST + spare, 2 * late_cost)
            whole = tl.max(taken - most, 0) <= 0
            idle = tl.where(whole, taken == 0, idle)
        if row == 0:
            if SPLIT == 0:
                idle &= piece < LANES + LATE
                store_lanes(lane_items, piece, 0, 0, idle, idle)
            else:
                store_lanes(lane_items, piece, piece, all_items, piece < LANES, piece < LANES)

        slot = tl.load(row_slot + row)
        query = tl.load(row_query_start + row)
        context = tl.load(row_context_len + row)
        for index in range(0, units):
            begin, end = kv_tiles(context, length, index, window, QUERIES, KEYS)
            if SPLIT == 0:
                if whole:
                    pieces, low, high, partial, to, lane, opens = _keep_whole(
                        lane_items, item, start, begin, end, lane_cost, late_cost, taken, piece, LANES, ITEM_COST
                    )
                else:
                    pieces, low, high, partial, to, lane, opens = cut_line(
                        lane_items, item, start, begin, end, total, lane_cost, late_cost, piece, LANES, ITEM_COST
                    )
                start += end - begin + ITEM_COST
                item += 1
            else:
                first_split = begin // SPLIT
                pieces = tl.cdiv(end, SPLIT) - first_split
                low = tl.maximum((first_split + piece) * SPLIT, begin)
                high = tl.minimum((first_split + piece + 1) * SPLIT, end)
                partial = item
                to = item + piece
                lane, opens = to, (piece < pieces) & (to < LANES)
                item += pieces
            count = tl.minimum(length - index * QUERIES, QUERIES)
            store_items(
                items, lane_items, to, lane, opens, slot, query + index * QUERIES, count, context + index * QUERIES,
                low, high, partial, piece, pieces,
            )  # fmt: skip


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
    MIN_COST: tl.constexpr,
    ITEM_COST: tl.constexpr,
    LINE_COST: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row, no more than lanes. Each finds out for itself which way all rows are cut."""
    wait(PDL)
    row = tl.program_id(0)
    index = tl.arange(0, WIDTH)
    length = tl.load(row_query_len + index, mask=index < num_rows, other=0)
    context = tl.load(row_context_len + index, mask=index < num_rows, other=0)
    begin, end = kv_tiles(context, length, 0, window, 1, KEYS)
    tiles = tl.where(length == 1, end - begin, 0)
    cost = tl.where(tiles > 0, tiles + ITEM_COST, 0)
    total = tl.sum(cost, 0)
    lane_cost, late_cost = lane_costs(total, num_rows, LANES, 0, MIN_COST)
    # Longer pieces are fewer. With the longest row's length each unit is one piece, and there is a lane for it.
    most = tl.where(tiles > WHOLE_TILES, tiles, tl.minimum(tiles, 1))
    longest, enough = tl.maximum(tl.cdiv(tl.sum(tiles, 0), LANES), 1), tl.max(tiles, 0)
    while longest < enough:
        middle = (longest + enough) // 2
        fit = tl.sum(tl.minimum(tl.cdiv(tiles, middle), most), 0) <= LANES
        longest, enough = tl.where(fit, longest, middle + 1), tl.where(fit, middle, enough)
    all_pieces = tl.minimum(tl.cdiv(tiles, longest), most)
    apart = tl.max(tl.cdiv(tiles, tl.maximum(all_pieces, 1)), 0) <= lane_cost + LINE_COST

    before, mine = index < row, index == row
    unit_begin, unit_end = tl.sum(tl.where(mine, begin, 0), 0), tl.sum(tl.where(mine, end, 0), 0)
    unit_tiles = tl.sum(tl.where(mine, tiles, 0), 0)
    if unit_tiles > 0:
        if apart:
            pieces = tl.sum(tl.where(mine, all_pieces, 0), 0)
            partial = tl.sum(tl.where(before, all_pieces, 0), 0)
            to = partial + index
            low, high = unit_tiles * index // pieces + unit_begin, unit_tiles * (index + 1) // pieces + unit_begin
            lane, opens = to, index < pieces
            store_lanes(lane_items, lane, to, to + 1, opens, opens)
        else:
            item, start = tl.sum(tl.where(before & (tiles > 0), 1, 0), 0), tl.sum(tl.where(before, cost, 0), 0)
            pieces, low, high, partial, to, lane, opens = cut_line(
                lane_items, item, start, unit_begin, unit_end, total, lane_cost, late_cost, index, LANES, ITEM_COST
            )
        slot, query = tl.load(row_slot + row), tl.load(row_query_start + row)
        position = tl.load(row_context_len + row)
        store_items(
            items, lane_items, to, lane, opens, slot, query, 1, position, low, high, partial, index, pieces
        )  # fmt: skip
    if row == 0:
        used = tl.where(apart, tl.sum(all_pieces, 0), tl.cdiv(total - ITEM_COST, lane_cost))
        idle = (index >= used) & (index < LANES)
        store_lanes(lane_items, index, 0, 0, idle, idle)
