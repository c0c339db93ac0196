"""The kernels that write the items of rows of one token (see work/lists.py)."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from asyncengine.kernels.cuda.attention.work.items import (
    cut_line,
    kv_tiles,
    store_items,
    store_teams,
    team_begin,
    team_costs,
)
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import wait

GRAIN = tl.constexpr(16)
"""Tokens of a grain. The cost of units that stay whole is counted in grains, since only the tokens that are there are
read of their last tiles."""
PROGRAMS = 128
"""Most programs of build_decode_kernel: each looks at all rows, so two on a multiprocessor take longer than one."""


@triton.jit
def _costs(row_query_len, row_context_len, row, num_rows, window, ITEM_GRAINS: tl.constexpr):
    """Return the cost of each row's unit in grains; 0 if the row has no unit."""
    length = tl.load(row_query_len + row, mask=row < num_rows, other=0)
    context = tl.load(row_context_len + row, mask=row < num_rows, other=0)
    cost = tl.cdiv(tl.minimum(context, window - 1), GRAIN) + ITEM_GRAINS
    return tl.where(length == 1, cost, 0)


@triton.jit
def _key(cost, row, ROWS: tl.constexpr):
    """Return the key by which units are ranked, no two alike: longer ones first, then earlier ones.

    As float32, which multiprocessors compare twice as fast as int32; integers of 24 bits are exact.
    """
    return (tl.minimum(cost, (1 << 24) // ROWS - 1) * ROWS + (ROWS - 1 - row % ROWS)).to(tl.float32)


@triton.jit
def _across(turn, place, TEAMS: tl.constexpr):
    """Return the team that takes its turn at ``place``; the map is its own inverse, so it gives a team's place, too.
    Even turns go from the first team to the last, odd ones back."""
    return tl.where(turn % 2 == 0, place, TEAMS - 1 - place)


@triton.jit
def _deal(rank, early, TEAMS: tl.constexpr):
    """The team and the turn in which it gets the unit of this rank. The last ones, the shortest, go to late teams."""
    turn = rank // TEAMS
    team = _across(turn, rank % TEAMS, TEAMS)
    return tl.where(rank < early, team, TEAMS + rank - early), tl.where(rank < early, turn, 0)


@triton.jit
def _dealt(team, early, TEAMS: tl.constexpr):
    """Return the number of units that a team is dealt, and the place where its items begin."""
    turns, left = early // TEAMS, early % TEAMS
    count = turns + tl.where(_across(turns, team, TEAMS) < left, 1, 0)
    most = tl.cdiv(early, TEAMS)
    return tl.where(team < TEAMS, count, 1), tl.minimum(team, TEAMS) * most + tl.maximum(team - TEAMS, 0)


@triton.jit
def _count_units(row_query_len, num_rows, ROWS: tl.constexpr):
    units = 0
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        units += tl.sum((tl.load(row_query_len + row, mask=row < num_rows, other=0) == 1).to(tl.int32), 0)
    return units


@triton.jit
def _deal_all(
    row_query_len, row_context_len, num_rows, window, early, TEAMS: tl.constexpr, ITEM_GRAINS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Return, if no unit is cut, the cost that each team takes, int32 [WIDTH], that of all units, and the longest of a
    late team.

    Ranks are among ROWS rows at a time, which are compared with some of them at once: code that a step runs through
    for the first time is read from memory, and takes longer to read than to run.
    """
    teams, taken = tl.arange(0, WIDTH), tl.zeros([WIDTH], tl.int32)
    before, total, most_late = 0, 0, 0
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        cost = _costs(row_query_len, row_context_len, row, num_rows, window, ITEM_GRAINS)
        key, last = _key(cost, row, ROWS), tl.minimum(num_rows - first, ROWS)
        longer = tl.zeros([ROWS], tl.float32)
        for some in range(0, last, AT_ONCE):
            others = tl.gather(key, some + tl.arange(0, AT_ONCE), 0)
            longer += tl.sum(tl.where(others[:, None] > key[None, :], 1.0, 0.0), 0)
        rank = before + longer.to(tl.int32)
        team, _ = _deal(rank, early, TEAMS)
        for some in range(0, last, AT_ONCE):
            index = some + tl.arange(0, AT_ONCE)
            team_of, cost_of = tl.gather(team, index, 0), tl.gather(cost, index, 0)
            taken += tl.sum(tl.where(team_of[:, None] == teams[None, :], cost_of[:, None], 0), 0)
        before += tl.sum((cost > 0).to(tl.int32), 0)
        total += tl.sum(cost, 0)
        most_late = tl.maximum(most_late, tl.max(tl.where(team >= TEAMS, cost, 0), 0))
    return taken, total, most_late


@triton.jit
def _rank(
    row_query_len, row_context_len, num_rows, row, window, ITEM_GRAINS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Return the rank of one row's unit."""
    key = _key(_costs(row_query_len, row_context_len, row, num_rows, window, ITEM_GRAINS), row, ROWS)
    rank = 0
    for first in range(0, row + 1, ROWS):
        other = first + tl.arange(0, ROWS)
        cost = _costs(row_query_len, row_context_len, other, num_rows, window, ITEM_GRAINS)
        before = tl.where(first + ROWS <= row, cost > 0, _key(cost, other, ROWS) > key)
        rank += tl.sum(before.to(tl.int32), 0)
    return rank


@triton.jit
def _sum_tiles(
    row_query_len, row_context_len, num_rows, row, window, KEYS: tl.constexpr, ITEM_COST: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Units and cost of the rows before ``row``, and the cost of all."""
    units_before, before, total = 0, 0, 0
    for first in range(0, num_rows, ROWS):
        r = first + tl.arange(0, ROWS)
        length = tl.load(row_query_len + r, mask=r < num_rows, other=0)
        context = tl.load(row_context_len + r, mask=r < num_rows, other=0)
        begin, end = kv_tiles(context, length, 0, window, 1, KEYS)
        cost = tl.where(length == 1, end - begin + ITEM_COST, 0)
        units_before += tl.sum(((r < row) & (cost > 0)).to(tl.int32), 0)
        before += tl.sum(tl.where(r < row, cost, 0), 0)
        total += tl.sum(cost, 0)
    return units_before, before, total


@triton.jit
def _write_dealt(
    row_slot, row_query_start, row_query_len, row_context_len, items, team_items, num_rows, window, units, early,
    KEYS: tl.constexpr, TEAMS: tl.constexpr, LATE: tl.constexpr, ITEM_GRAINS: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        if tl.load(row_query_len + row) == 1:
            slot, query = tl.load(row_slot + row), tl.load(row_query_start + row)
            context = tl.load(row_context_len + row)
            begin, end = kv_tiles(context, 1, 0, window, 1, KEYS)
            rank = _rank(row_query_len, row_context_len, num_rows, row, window, ITEM_GRAINS, ROWS)
            team, turn = _deal(rank, early, TEAMS)
            count, at = _dealt(team, early, TEAMS)
            index = count - 1 - turn  # the shortest first
            store_items(items, team_items, at + index, team, index == 0, slot, query, 1, context, begin, end, 0, 0, 1)
    if tl.program_id(0) == 0:
        teams = tl.arange(0, WIDTH)
        count, at = _dealt(teams, early, TEAMS)
        count, there = tl.where(teams < TEAMS + units - early, count, 0), teams < TEAMS + LATE
        store_teams(team_items, teams, at, at + count, there, there)


@triton.jit
def _write_cut(
    row_slot, row_query_start, row_query_len, row_context_len, items, team_items, num_rows, window, units,
    KEYS: tl.constexpr, TEAMS: tl.constexpr, LATE: tl.constexpr, MIN_COST: tl.constexpr, ITEM_COST: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    teams = tl.arange(0, WIDTH)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        item, start, total = _sum_tiles(row_query_len, row_context_len, num_rows, row, window, KEYS, ITEM_COST, ROWS)
        team_cost, late_cost = team_costs(total, units, TEAMS, LATE, MIN_COST)
        if tl.load(row_query_len + row) == 1:
            slot, query = tl.load(row_slot + row), tl.load(row_query_start + row)
            context = tl.load(row_context_len + row)
            begin, end = kv_tiles(context, 1, 0, window, 1, KEYS)
            pieces, low, high, partial, to, team, opens = cut_line(
                team_items, item, start, begin, end, total, team_cost, late_cost, teams, TEAMS, ITEM_COST
            )
            store_items(items, team_items, to, team, opens, slot, query, 1, context, low, high, partial, teams, pieces)
        if row == 0:
            # Teams past the last tile are idle; what follows that tile on the line is the cost of its item.
            idle = team_begin(teams, team_cost, late_cost, TEAMS) >= total - ITEM_COST
            idle &= teams < TEAMS + LATE
            store_teams(team_items, teams, 0, 0, idle, idle)


@kernel(do_not_specialize=["num_rows", "window"])
def build_decode_kernel(
    row_slot,
    row_query_start,
    row_query_len,
    row_context_len,
    items,
    team_items,
    num_rows,
    window,
    KEYS: tl.constexpr,
    TEAMS: tl.constexpr,
    LATE: tl.constexpr,
    MIN_COST: tl.constexpr,
    ITEM_COST: tl.constexpr,
    LINE_COST: tl.constexpr,
    ROWS: tl.constexpr,
    DEALT: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program finds out for itself how all rows are shared, and writes the items of some."""
    wait(PDL)
    GRAINS: tl.constexpr = KEYS // GRAIN
    units = _count_units(row_query_len, num_rows, ROWS)
    early = units - tl.maximum(tl.minimum(units - TEAMS, LATE), 0)
    taken, total, most_late = _deal_all(
        row_query_len, row_context_len, num_rows, window, early, TEAMS, ITEM_COST * GRAINS, ROWS, DEALT, 32
    )
    # Late teams make up for early ones that are unlike, and may each have a unit that is twice as long as others are.
    usual = 0 if LATE == 0 else total // tl.maximum(units, 1)
    share = tl.maximum(tl.cdiv(tl.sum(tl.where(tl.arange(0, DEALT) < TEAMS, taken, 0), 0), TEAMS), MIN_COST * GRAINS)
    if (tl.max(taken, 0) <= share + LINE_COST * GRAINS + usual) & (most_late <= 2 * usual):
        _write_dealt(
            row_slot, row_query_start, row_query_len, row_context_len, items, team_items, num_rows, window, units,
            early, KEYS, TEAMS, LATE, ITEM_COST * GRAINS, ROWS, WIDTH,
        )  # fmt: skip
    else:
        _write_cut(
            row_slot, row_query_start, row_query_len, row_context_len, items, team_items, num_rows, window, units,
            KEYS, TEAMS, LATE, MIN_COST, ITEM_COST, ROWS, WIDTH,
        )  # fmt: skip


@kernel(do_not_specialize=["num_rows", "window"])
def build_apart_kernel(
    row_slot,
    row_query_start,
    row_query_len,
    row_context_len,
    items,
    team_items,
    num_rows,
    window,
    KEYS: tl.constexpr,
    TEAMS: tl.constexpr,
    MIN_COST: tl.constexpr,
    ITEM_COST: tl.constexpr,
    LINE_COST: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row, no more than teams. Each finds out for itself which way all rows are cut."""
    wait(PDL)
    row = tl.program_id(0)
    index = tl.arange(0, WIDTH)
    length = tl.load(row_query_len + index, mask=index < num_rows, other=0)
    context = tl.load(row_context_len + index, mask=index < num_rows, other=0)
    begin, end = kv_tiles(context, length, 0, window, 1, KEYS)
    tiles = tl.where(length == 1, end - begin, 0)
    cost = tl.where(tiles > 0, tiles + ITEM_COST, 0)
    total = tl.sum(cost, 0)
    team_cost, late_cost = team_costs(total, num_rows, TEAMS, 0, MIN_COST)
    # Longer pieces are fewer. With the longest row's length each unit is one piece, and there is a team for it.
    most = tl.where(tiles > WHOLE_TILES, tiles, tl.minimum(tiles, 1))
    longest, enough = tl.maximum(tl.cdiv(tl.sum(tiles, 0), TEAMS), 1), tl.max(tiles, 0)
    while longest < enough:
        middle = (longest + enough) // 2
        fit = tl.sum(tl.minimum(tl.cdiv(tiles, middle), most), 0) <= TEAMS
        longest, enough = tl.where(fit, longest, middle + 1), tl.where(fit, middle, enough)
    all_pieces = tl.minimum(tl.cdiv(tiles, longest), most)
    apart = tl.max(tl.cdiv(tiles, tl.maximum(all_pieces, 1)), 0) <= team_cost + LINE_COST

    before, mine = index < row, index == row
    unit_begin, unit_end = tl.sum(tl.where(mine, begin, 0), 0), tl.sum(tl.where(mine, end, 0), 0)
    unit_tiles = tl.sum(tl.where(mine, tiles, 0), 0)
    if unit_tiles > 0:
        if apart:
            pieces = tl.sum(tl.where(mine, all_pieces, 0), 0)
            partial = tl.sum(tl.where(before, all_pieces, 0), 0)
            to = partial + index
            low, high = unit_tiles * index // pieces + unit_begin, unit_tiles * (index + 1) // pieces + unit_begin
            team, opens = to, index < pieces
            store_teams(team_items, team, to, to + 1, opens, opens)
        else:
            item, start = tl.sum(tl.where(before & (tiles > 0), 1, 0), 0), tl.sum(tl.where(before, cost, 0), 0)
            pieces, low, high, partial, to, team, opens = cut_line(
                team_items, item, start, unit_begin, unit_end, total, team_cost, late_cost, index, TEAMS, ITEM_COST
            )
        slot, query = tl.load(row_slot + row), tl.load(row_query_start + row)
        position = tl.load(row_context_len + row)
        store_items(
            items, team_items, to, team, opens, slot, query, 1, position, low, high, partial, index, pieces
        )  # fmt: skip
    if row == 0:
        used = tl.where(apart, tl.sum(all_pieces, 0), tl.cdiv(total - ITEM_COST, team_cost))
        idle = (index >= used) & (index < TEAMS)
        store_teams(team_items, index, 0, 0, idle, idle)
