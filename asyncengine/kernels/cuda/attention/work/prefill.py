"""The kernel that writes the items of prefill (see work/lists.py)."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from asyncengine.kernels.cuda.attention.work.items import (
    BEGIN,
    COUNT,
    END,
    POSITION,
    QUERY,
    SLOT,
    cut_line,
    kv_tiles,
    store_items,
    store_place,
    store_teams,
    team_costs,
)
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import wait

# Columns of a unit, behind those that an item begins with.
RANKED = tl.constexpr(6)  # of unit u: which unit so many are longer than, or as long and before it
UNIT = tl.constexpr(8)

WHOLE_GAIN = tl.constexpr(6)
"""Least cost to a step of teams that begin and end anywhere, in tiles, since each piece leaves 64 KiB to be combined: 5
to 8 at 2,048 tokens."""
WHOLE_SHARE = tl.constexpr(10)
"""The same cost as a part of a long team, one in so many: teams are at keys of their own. 11% after 14,336 tokens."""


@triton.jit
def _list_units(
    row_slot, row_query_start, row_query_len, row_context_len, units, num_rows, window, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Write all units of prefill to ``units``, row by row; how many there are."""
    all_units = 0
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        length = tl.load(row_query_len + row, mask=row < num_rows, other=0)
        slot = tl.load(row_slot + row, mask=row < num_rows, other=0)[:, None]
        query = tl.load(row_query_start + row, mask=row < num_rows, other=0)[:, None]
        context = tl.load(row_context_len + row, mask=row < num_rows, other=0)[:, None]
        count = tl.where(length > 1, tl.cdiv(length, QUERIES), 0)
        before = (all_units + tl.cumsum(count, 0) - count)[:, None]
        for some in range(0, tl.max(count, 0), AT_ONCE):
            index = some + tl.arange(0, AT_ONCE)[None, :]
            begin, end = kv_tiles(context, length[:, None], index, window, QUERIES, KEYS)
            tokens = tl.minimum(length[:, None] - index * QUERIES, QUERIES)
            store_place(
                units + (before + index) * UNIT, slot, query + index * QUERIES, tokens, context + index * QUERIES,
                begin, end, index < count[:, None],
            )  # fmt: skip
        all_units += tl.sum(count, 0)
    return all_units


@triton.jit
def _unit_tiles(units, unit, there):
    begin = tl.load(units + unit * UNIT + BEGIN, mask=there, other=0)
    return tl.load(units + unit * UNIT + END, mask=there, other=0) - begin


@triton.jit
def _rank_units(units, all_units, AT_ONCE: tl.constexpr):
    """Find the order of units by their length, the longest first."""
    for first in range(0, all_units, AT_ONCE):
        unit = first + tl.arange(0, AT_ONCE)
        tiles = _unit_tiles(units, unit, unit < all_units)[:, None]
        rank = tl.zeros([AT_ONCE], tl.int32)
        for some in range(0, all_units, AT_ONCE):
            other = some + tl.arange(0, AT_ONCE)
            others = _unit_tiles(units, other, other < all_units)[None, :]
            as_long = (others == tiles) & (other[None, :] < unit[:, None])
            rank += tl.sum(((others > tiles) | as_long).to(tl.int32), 1)
        tl.store(units + rank * UNIT + RANKED, unit, mask=unit < all_units)


@triton.jit
def _load_units(units, unit, there):
    of = units + unit * UNIT
    slot, query = tl.load(of + SLOT, mask=there, other=0), tl.load(of + QUERY, mask=there, other=0)
    count, position = tl.load(of + COUNT, mask=there, other=0), tl.load(of + POSITION, mask=there, other=0)
    begin, end = tl.load(of + BEGIN, mask=there, other=0), tl.load(of + END, mask=there, other=0)
    return slot, query, count, position, begin, end


@triton.jit
def _take_turns(
    items, team_items, units, all_units, TEAMS: tl.constexpr, ITEM_COST: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Make every unit an item: in each turn the longest ones left go to a team each, the first to who has least.

    int32 [WIDTH]: what each team has then.
    """
    team = tl.arange(0, WIDTH)
    taken, count = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.int32)
    turns = tl.cdiv(all_units, TEAMS)
    for turn in range(0, turns):
        least = tl.where(team < TEAMS, taken * WIDTH + team, 1 << 30)
        place = turn * TEAMS + tl.sum((least[None, :] < least[:, None]).to(tl.int32), 1)
        there = (team < TEAMS) & (place < all_units)
        unit = tl.load(units + place * UNIT + RANKED, mask=there, other=0)
        slot, query, tokens, position, begin, end = _load_units(units, unit, there)
        store_items(
            items, team_items, team * turns + turn, team, there & (turn == 0), slot, query, tokens, position, begin,
            end, 0, 0, there.to(tl.int32),
        )  # fmt: skip
        taken += tl.where(there, end - begin + ITEM_COST, 0)
        count += there.to(tl.int32)
    store_teams(team_items, team, team * turns, team * turns + count, team < TEAMS, team < TEAMS)
    return taken


@triton.jit
def _cut_units(
    items, team_items, units, all_units, total, team_cost, late_cost, TEAMS: tl.constexpr, ITEM_COST: tl.constexpr,
    AT_ONCE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """All units along the line."""
    piece = tl.arange(0, WIDTH)
    idle = (piece < TEAMS) & (piece * team_cost >= total - ITEM_COST)
    store_teams(team_items, piece, 0, 0, idle, idle)
    before = 0
    for first in range(0, all_units, AT_ONCE):
        unit = first + tl.arange(0, AT_ONCE)[:, None]
        slot, query, tokens, position, begin, end = _load_units(units, unit, unit < all_units)
        cost = tl.where(unit < all_units, end - begin + ITEM_COST, 0)
        pieces, low, high, partial, to, team, opens = cut_line(
            team_items, unit, before + tl.cumsum(cost, 0) - cost, begin, end, total, team_cost, late_cost,
            piece[None, :], TEAMS, ITEM_COST,
        )  # fmt: skip
        store_items(
            items, team_items, to, team, opens, slot, query, tokens, position, low, high, partial, piece[None, :],
            pieces,
        )  # fmt: skip
        before += tl.sum(cost)


@kernel(do_not_specialize=["num_rows", "window"])
def build_prefill_kernel(
    row_slot,
    row_query_start,
    row_query_len,
    row_context_len,
    items,
    team_items,
    num_rows,
    window,
    units,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    TEAMS: tl.constexpr,
    MIN_COST: tl.constexpr,
    ITEM_COST: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for all rows of several tokens.

    Units stay whole if teams get about the same by that, and all begin with their longest: those meet in the L2 cache.
    Otherwise all are cut along the line.
    """
    wait(PDL)
    AT_ONCE: tl.constexpr = 64
    all_units = _list_units(
        row_slot, row_query_start, row_query_len, row_context_len, units, num_rows, window, QUERIES, KEYS, AT_ONCE, 16
    )
    tl.debug_barrier()
    _rank_units(units, all_units, AT_ONCE)
    tl.debug_barrier()
    taken = _take_turns(items, team_items, units, all_units, TEAMS, ITEM_COST, WIDTH)
    total = tl.sum(taken, 0)
    team_cost, late_cost = team_costs(total, all_units, TEAMS, 0, MIN_COST)
    if tl.max(taken, 0) > team_cost + tl.maximum(WHOLE_GAIN, team_cost // WHOLE_SHARE):
        tl.debug_barrier()
        _cut_units(
            items, team_items, units, all_units, total, team_cost, late_cost, TEAMS, ITEM_COST, 2048 // WIDTH, WIDTH
        )
