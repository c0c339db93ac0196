"""Cut of the work of a step's attention into items and teams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncengine.errors import ConfigError
from asyncengine.kernels.cuda.attention.choose import LATE_ROWS
from asyncengine.kernels.cuda.attention.plan import AttentionShape
from asyncengine.kernels.cuda.attention.work.items import (
    BEGIN,
    COUNT,
    END,
    FIRST,
    ITEM_COST,
    LAST,
    LATE_SHARE,
    LINE_COST,
    PARTIAL,
    PIECE,
    PIECES,
    POSITION,
    QUERY,
    SLOT,
)
from asyncengine.kernels.cuda.attention.work.lists import Section, WorkList
from asyncengine.kernels.cuda.attention.work.prefill import WHOLE_GAIN, WHOLE_SHARE
from tests.amounts import examples
from tests.kernels.test_paged_attention import SMALL, Case, World, cases, check, make_world


def items_of(section: Section) -> Iterator[tuple[int, Tensor]]:
    """(team, item) as the attention kernel walks them."""
    items = section.items.cpu()
    for team, of_team in enumerate(section.team_items.tolist()):
        indices = range(of_team[FIRST], of_team[LAST], section.item_step)
        if indices:
            assert of_team[:FIRST] == items[indices[0], :FIRST].tolist()
        for index in indices:
            assert index < len(items)
            yield team, items[index]


def built_over_another(world: World) -> WorkList:
    """The list of its step, where one of an earlier step was, with every pair in it."""
    work = world.work()
    for section in work.sections:
        for ints in (section.items, section.team_items, section.units):
            ints.fill_(77)
    work.build(world.step)
    check_every_pair(world, work)
    return work


@st.composite
def apart_cases(draw: st.DrawFn) -> Case:
    """Rows of one token or none, teams enough for them."""
    context = st.one_of(st.integers(0, 80), st.integers(0, 1200))
    rows = draw(st.lists(st.tuples(st.sampled_from([1, 1, 1, 0]), context), min_size=1, max_size=9))
    return apart_case(
        *rows,
        window=draw(st.sampled_from([0, 0, 1, 100, 331])),
        programs=len(rows) + draw(st.integers(0, 9)),
        min_split_tokens=draw(st.sampled_from([16, 64])),
        whole_tokens=draw(st.sampled_from([16, 64, 320])),
    )


def apart_case(*rows: tuple[int, int], programs: int, **fields: int) -> Case:
    fields = {"whole_tokens": 16, **fields}
    return Case(rows, num_kv_heads=1, head_dim=16, programs=programs, tiles=(SMALL[0], None), **fields)


def even_pieces(tiles: list[int], whole: int, teams: int) -> list[int]:
    """Pieces of units with so many tiles, the longest that may be cut as short as teams allow."""
    for longest in range(1, max(tiles) + 1):
        pieces = [-(-n // longest) if n > whole else 1 for n in tiles]
        if sum(pieces) <= teams:
            return pieces
    raise AssertionError("more units than teams")


@settings(max_examples=examples(40))
@given(apart_cases())
@example(apart_case(*[(1, 287)] * 8, programs=8))
@example(apart_case((1, 700), (0, 0), (1, 0), programs=33))
@example(apart_case((0, 0), (0, 0), programs=5))
@example(apart_case(*[(1, 20)] * 6, (1, 700), programs=8))
def test_units_cut_apart(device: torch.device, case: Case) -> None:
    """Evenly, each piece on a team; along the line if one would be much longer than the teams' shares of it."""
    world = make_world(case, device)
    section = built_over_another(world).decode
    keys, expected, line, tiles = section.tile.keys, [], 0, []
    for row, (length, _) in enumerate(case.rows):
        if length:
            first, last = world.visible(row)
            tiles.append(-(-last // keys) - first // keys)
            line += tiles[-1] + ITEM_COST
    pieces = even_pieces(tiles, section.whole_tiles, section.teams) if tiles else []
    share = max(-(-line // section.teams), section.min_split_tiles + ITEM_COST)
    apart = all(-(-n // p) <= share + LINE_COST for n, p in zip(tiles, pieces, strict=True))
    event("apart" if apart else "along the line")
    if not apart:
        return
    for n, p in zip(tiles, pieces, strict=True):
        expected += [(piece, p, (piece + 1) * n // p - piece * n // p) for piece in range(p)]
    items = [item.tolist() for _, item in items_of(section)]
    assert [(item[PIECE], item[PIECES], item[END] - item[BEGIN]) for item in items] == expected
    assert [team for team, _ in items_of(section)] == list(range(len(expected))), "in the order of rows, then idle ones"


def decode_section(device: torch.device, *contexts: int | None, teams: int) -> Section:
    """The list of rows of one token after so many, None for rows of none."""
    rows = tuple((0, 0) if context is None else (1, context) for context in contexts)
    case = Case(rows, num_kv_heads=1, head_dim=16, programs=teams, tiles=(SMALL[0], None), min_split_tokens=16)
    return built_over_another(make_world(case, device)).decode


@pytest.mark.parametrize("count", [3, 8, 15, 16, 31, 40])
def test_rows_alike_are_not_cut(device: torch.device, count: int) -> None:
    """Equal rows are not cut, and no team takes more of them than it must."""
    teams, keys = 8, SMALL[0].keys
    contexts: list[int | None] = [5 * keys - 1] * count
    contexts[1:1] = [None]
    section = decode_section(device, *contexts, teams=teams)
    taken = [0] * teams
    for team, item in items_of(section):
        assert item.tolist()[PIECES] == 1
        taken[team] += 1
    assert sum(taken) == count
    assert max(taken) == -(-count // teams)


def test_rows_are_cut_where_a_team_would_be_much_longer(device: torch.device) -> None:
    keys = SMALL[0].keys
    section = decode_section(device, 40 * keys, *[5 * keys] * 4, teams=4)
    assert max(item.tolist()[PIECES] for _, item in items_of(section)) > 1


@st.composite
def prompt_cases(draw: st.DrawFn) -> Case:
    """Prompts, alike or not, some chunks of long ones, and a few rows of one token or none."""
    context = draw(st.sampled_from([st.just(0), st.integers(0, 60), st.sampled_from([0, 40, 1500])]))
    prompt = st.tuples(st.integers(2, 90), context)
    others = st.lists(st.one_of(prompt, st.sampled_from([(1, 70), (0, 0)])), max_size=8)
    return prompt_case(draw(prompt), *draw(others), programs=draw(st.integers(1, 9)))


def prompt_case(*rows: tuple[int, int], programs: int) -> Case:
    return Case(rows, num_kv_heads=1, group=1, head_dim=16, programs=programs)


def in_turn(tiles: list[int], teams: int) -> list[list[int]]:
    """Return the units of each team: in each turn the longest units left, the first of them to the team that has
    least."""
    order = sorted(range(len(tiles)), key=lambda unit: -tiles[unit])
    taken: list[list[int]] = [[] for _ in range(teams)]
    for first in range(0, len(order), teams):
        by_load = sorted(taken, key=lambda units: sum(tiles[unit] + ITEM_COST for unit in units))
        for team, unit in zip(by_load, order[first : first + teams], strict=False):
            team.append(unit)
    return taken


@settings(max_examples=examples(40))
@given(prompt_cases())
@example(prompt_case((64, 0), (1, 500), (0, 0), (32, 32), programs=6))
@example(prompt_case(*[(90, 0)] * 40, programs=7))  # more units than are looked at at once
@example(prompt_case((80, 1200), (16, 0), programs=4))
@example(prompt_case(*[(64, 1500)] * 7, (48, 1500), programs=4))  # more than 6 tiles too many, but less than a tenth
def test_units_of_prompts_are_taken_in_turn(device: torch.device, case: Case) -> None:
    """Whole, the longest first; they are cut along the line if a team would be much longer than its share of it."""
    world = make_world(case, device)
    section = built_over_another(world).prefill
    assert section is not None
    units = [
        (row, first, -(-(context + min(first + section.queries, length)) // section.tile.keys))
        for row, (length, context) in enumerate(case.rows)
        if length > 1
        for first in range(0, length, section.queries)
    ]
    tiles = [tiles for *_, tiles in units]
    turns = in_turn(tiles, section.teams)
    share = max(-(-sum(n + ITEM_COST for n in tiles) // section.teams), section.min_split_tiles + ITEM_COST)
    most = max(sum(tiles[unit] + ITEM_COST for unit in taken) for taken in turns)
    whole = most <= share + max(WHOLE_GAIN.value, share // WHOLE_SHARE.value)
    items = [(team, item.tolist()) for team, item in items_of(section)]
    event("whole" if whole else "along the line")
    if not whole:
        assert [team for team, _ in items] == sorted(team for team, _ in items)
        assert [item[QUERY] for _, item in items] == sorted(item[QUERY] for _, item in items)
        return
    expected = []
    for team, taken in enumerate(turns):
        for unit in taken:
            row, first, end = units[unit]
            query = int(world.step.row_query_start[row]) + first
            expected.append((team, (query, 0, end, 1)))
    assert [(team, (item[QUERY], item[BEGIN], item[END], item[PIECES])) for team, item in items] == expected


@st.composite
def many_cases(draw: st.DrawFn) -> Case:
    """Many rows of one token a team, some of none; alike or not."""
    context = draw(st.sampled_from([st.integers(0, 300), st.integers(60, 80), st.just(79)]))
    rows = draw(st.lists(st.tuples(st.sampled_from([1, 1, 1, 0]), context), min_size=1, max_size=40))
    window, late = draw(st.sampled_from([0, 0, 100])), draw(st.booleans())
    return many_case(*rows, programs=draw(st.integers(1, 4)), window=window, late=late)


def many_case(*rows: tuple[int, int], late: bool = True, **fields: int) -> Case:
    fields = {"min_split_tokens": 16, **fields}
    return Case(rows, num_kv_heads=1, head_dim=16, tiles=(SMALL[0], None), late=late, **fields)


def grains(case: Case, section: Section, context: int) -> int:
    """Return the cost of a unit of one token that stays whole, in 16 tokens."""
    past = min(context, case.window - 1) if case.window else context
    return -(-past // 16) + ITEM_COST * section.tile.keys // 16


def may_stay_whole(section: Section, taken: list[int], units: int) -> bool:
    """Return whether no team takes much more than its share, in 16 tokens."""
    early, per_tile = section.teams - section.late_teams, section.tile.keys // 16
    usual = sum(taken) // max(1, units) if section.late_teams else 0
    share = max(-(-sum(taken[:early]) // early), (section.min_split_tiles + ITEM_COST) * per_tile)
    return max(taken[:early]) <= share + LINE_COST * per_tile + usual and max(taken[early:], default=0) <= 2 * usual


def deal(costs: dict[int, int], teams: int, late: int) -> list[list[int]]:
    """Return the rows of each team, and of the late ones behind them: the longest of 256 first, then the next 256."""
    order = sorted(costs, key=lambda row: (row // 256, -costs[row], row))
    early = len(order) - max(0, min(late, len(order) - teams))
    dealt: list[list[int]] = [[] for _ in range(teams)]
    for first in range(0, early, teams):
        to = dealt if first // teams % 2 == 0 else dealt[::-1]
        for team, row in zip(to, order[first : min(first + teams, early)], strict=False):
            team.insert(0, row)
    return dealt + [[row] for row in order[early:]]


@settings(max_examples=examples(5))
@given(many_cases())
@example(many_case(*[(1, 79)] * 31, programs=4))
@example(many_case((1, 1000), *[(1, 79)] * 20, programs=3))
@example(many_case((1, 1000), *[(1, 79)] * 20, programs=3, late=False))
@example(many_case((0, 0), programs=2))
@example(many_case(*[(1, n % 37) for n in range(270)], (0, 0), *[(1, 200)] * 4, programs=3))
def test_rows_of_one_token_are_dealt(device: torch.device, case: Case) -> None:
    """Whole, of unlike ones a longer and a shorter; along the line if a team would be much longer than its share."""
    world = make_world(case, device)
    section = (work := built_over_another(world)).decode
    check(world, world.attend(work))
    costs = {row: grains(case, section, context) for row, (length, context) in enumerate(case.rows) if length}
    early = section.teams - section.late_teams
    dealt = deal(costs, early, section.late_teams)
    taken = [sum(costs[row] for row in rows) for rows in dealt]
    whole = may_stay_whole(section, taken, len(costs))
    if set(case.rows) == {(1, 79)} and len(case.rows) >= LATE_ROWS * early:
        assert whole
    late = "late teams" if any(taken[early:]) else "no late teams"
    event(f"whole, {late}" if whole else f"along the line, {late}")
    items = [(team, item.tolist()) for team, item in items_of(section)]
    if not whole:
        assert [team for team, _ in items] == sorted(team for team, _ in items)
        assert [item[QUERY] for _, item in items] == sorted(item[QUERY] for _, item in items)
        return
    expected = [(team, (int(world.step.row_query_start[row]), 1)) for team, rows in enumerate(dealt) for row in rows]
    assert [(team, (item[QUERY], item[PIECES])) for team, item in items] == expected


@settings(max_examples=examples(25))
@given(cases(head_dims=(16,)))
@example(Case(((2, 0), (2, 5), (2, 40), (3, 0)), programs=12))
@example(Case(((1, 1000), (1, 0), (1, 0), (1, 500)), programs=16, num_kv_heads=1))
@example(Case(((100, 0), (3, 300)), programs=7, num_kv_heads=1))
def test_every_pair_is_covered_once(device: torch.device, case: Case) -> None:
    world = make_world(case, device)
    work = world.work()
    work.build(world.step)
    check_every_pair(world, work)


def check_every_pair(world: World, work: WorkList) -> None:
    case = world.case
    seen = torch.zeros(case.num_tokens, case.max_context + 64, dtype=torch.int32)
    slots = {}
    for section in work.sections:
        team_costs, team_grains = [0] * section.teams, [0] * section.teams
        partials: list[int] = []
        units: dict[int, list[list[int]]] = {}
        keys = section.tile.keys
        for team, item in items_of(section):
            values = item.tolist()
            assert values[BEGIN] < values[END]
            query, count = values[QUERY], values[COUNT]
            assert 1 <= count <= section.queries
            seen[query : query + count, values[BEGIN] * keys : values[END] * keys] += 1
            slots |= {query + t: (values[SLOT], values[POSITION] + t) for t in range(count)}
            team_costs[team] += values[END] - values[BEGIN] + ITEM_COST
            team_grains[team] += grains(case, section, values[POSITION])
            units.setdefault(query, []).append(values)
            if values[PIECES] > 1:
                partials.append(values[PARTIAL] + values[PIECE])
        for pieces in units.values():
            pieces.sort(key=lambda values: values[PIECE])
            assert [values[PIECE] for values in pieces] == list(range(len(pieces)))
            assert {values[PIECES] for values in pieces} == {len(pieces)}
            assert len({values[PARTIAL] for values in pieces}) == 1
        assert len(set(partials)) == len(partials)
        assert all(0 <= slot < len(section.partials) for slot in partials)
        first, last = section.team_items[0, [FIRST.value, LAST.value]].tolist()
        assert (first < last) == bool(units)  # by which attention of prompts knows
        if case.split_tokens or not units:
            continue
        is_decode = section.rows == "one"
        whole = not section.whole_tiles and all(len(pieces) == 1 for pieces in units.values())
        if is_decode and whole and may_stay_whole(section, team_grains, len(units)):
            continue
        total = sum(team_costs) - ITEM_COST * sum(len(p) - 1 for p in units.values())
        early, least = section.teams - section.late_teams, section.min_split_tiles + ITEM_COST
        late_share = max(-(-total // len(units)), -(-total // (early * LATE_SHARE.value)))
        share = max(-(-(total - section.late_teams * late_share) // early), least)
        whole_gain = max(WHOLE_GAIN.value, share // WHOLE_SHARE.value)
        assert max(team_costs[:early]) <= share + (LINE_COST + ITEM_COST if is_decode else whole_gain)
        assert max(team_costs[early:], default=0) <= late_share + ITEM_COST

    for row, (length, context) in enumerate(case.rows):
        for t in range(length):
            token = int(world.step.row_query_start[row]) + t
            position = context + t
            assert slots[token] == (int(world.step.row_slot[row]), position)
            first = max(0, position - case.window + 1) if case.window else 0
            assert (seen[token, first : position + 1] == 1).all()
    assert (seen <= 1).all()


def test_misuse_is_reported(device: torch.device) -> None:
    work = make_world(Case(((1, 20),)), device).work()
    with pytest.raises(ConfigError, match="more than the work list holds"):
        work.build(make_world(Case(((1, 2), (1, 2))), device).step)
    with pytest.raises(ConfigError, match="multiple"):
        make_world(Case(((1, 20),), split_tokens=24), device).work()
    with pytest.raises(ConfigError, match="multiple"):
        make_world(Case(((1, 20),), split_tokens=16, tiles=(SMALL[0], None)), device).work()
    for apart in (
        Case(((1, 20),) * 3, whole_tokens=16, programs=5, tiles=(SMALL[0], None)),
        Case(((1, 20),), whole_tokens=16),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="not cut apart"):
            make_world(apart, device).work()
    for fields in ({}, {"whole_tokens": 16, "tiles": (SMALL[0], None)}, {"split_tokens": 16}):
        with pytest.raises(ConfigError, match="late teams"):
            make_world(Case(((1, 20),), late=True, **fields), device).work()
    with pytest.raises(ConfigError, match="divide"):
        WorkList.allocate(
            AttentionShape(3, 2, 16, torch.float32), SMALL, max_rows=1, max_tokens=1, max_context=1, device=device
        )
