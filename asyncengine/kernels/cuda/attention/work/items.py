"""The items of work lists, and how a line of units is cut into them (see work/lists.py)."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

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
# Columns of a team. Before them come the columns of its first item, so that one look finds all that its program begins
# with.
FIRST = tl.constexpr(6)
LAST = tl.constexpr(7)  # one past its last item
TEAM = tl.constexpr(8)
ITEM = tl.constexpr(16)

ITEM_COST = 1
"""Cost of starting an item beside its KV tiles, in tiles."""
LINE_COST = 3
"""Cost to a step of teams that begin and end anywhere, in tiles: second items, and combinations of units that need no
cut."""
LATE_SHARE = tl.constexpr(12)
"""Early teams are at most about so many times as long as late ones."""


@triton.jit
def kv_tiles(context, length, index, window, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """First and one past the last KV tile that the queries of tile ``index`` of a row see."""
    begin = tl.maximum(context + index * QUERIES - window + 1, 0)
    end = context + tl.minimum((index + 1) * QUERIES, length)
    return begin // KEYS, (end + KEYS - 1) // KEYS


@triton.jit
def store_teams(team_items, team, first, last, opens, closes):
    tl.store(team_items + team * TEAM + FIRST, first, mask=opens)
    tl.store(team_items + team * TEAM + LAST, last, mask=closes)


@triton.jit
def team_costs(total, units, TEAMS: tl.constexpr, LATE: tl.constexpr, MIN_COST: tl.constexpr):
    """The stretches of the line that an early team and a late one take.

    A late one takes what a unit does on average, so that there is one for each of units that are alike.
    """
    late_cost = tl.maximum(tl.cdiv(total, tl.maximum(units, 1)), tl.cdiv(total, TEAMS * LATE_SHARE))
    late_cost = tl.maximum(late_cost, 1)
    return tl.maximum(tl.cdiv(total - LATE * late_cost, TEAMS), MIN_COST), late_cost


@triton.jit
def team_begin(team, team_cost, late_cost, TEAMS: tl.constexpr):
    return tl.minimum(team, TEAMS) * team_cost + tl.maximum(team - TEAMS, 0) * late_cost


@triton.jit
def _team_at(cost, team_cost, late_cost, TEAMS: tl.constexpr):
    """Return the team in whose stretch a place on the line lies."""
    late = cost - TEAMS * team_cost
    return tl.where(late < 0, cost // team_cost, TEAMS + late // late_cost)


@triton.jit
def cut_line(
    team_items, item, start, begin, end, total, team_cost, late_cost, piece, TEAMS: tl.constexpr,
    ITEM_COST: tl.constexpr,
):  # fmt: skip
    """Unit number ``item``, whose tile t lies at start + t on the line: pieces, low, high, partial slot, items, teams,
    whether these are the teams' first.

    As a team is longer than the gap that ITEM_COST leaves between two units, every team up to the last one in use has
    a tile. Without tiles there is no unit, and no pieces.
    """
    first_team = _team_at(start, team_cost, late_cost, TEAMS)
    pieces = tl.where(end > begin, _team_at(start + end - begin - 1, team_cost, late_cost, TEAMS) - first_team + 1, 0)
    team = first_team + piece
    opening = team_begin(team, team_cost, late_cost, TEAMS)
    closing = team_begin(team + 1, team_cost, late_cost, TEAMS)
    low = begin + tl.maximum(opening - start, 0)
    high = tl.minimum(begin + closing - start, end)
    to = item + team
    following = start + end - begin + ITEM_COST
    opens = (piece < pieces) & (opening >= start - ITEM_COST)
    closes = (piece < pieces) & ((closing <= following) | (following == total))
    store_teams(team_items, team, to, to + 1, opens, closes)
    return pieces, low, high, 2 * first_team, to, team, opens


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
    items, team_items, to, team, opens, slot, query, count, position, low, high, partial, piece, pieces
):  # fmt: skip
    there = piece < pieces
    store_place(items + to * ITEM, slot, query, count, position, low, high, there)
    tl.store(items + to * ITEM + PARTIAL, partial, mask=there)
    tl.store(items + to * ITEM + PIECE, piece, mask=there)
    tl.store(items + to * ITEM + PIECES, pieces, mask=there)
    store_place(team_items + team * TEAM, slot, query, count, position, low, high, opens)
