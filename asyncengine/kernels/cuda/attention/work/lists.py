"""The work of paged attention, cut on the device into even shares for a grid of fixed size.

A *unit* is one tile of queries of one row with the KV tiles that it sees: a decode row is one unit, a
prefill row one per tile of its queries. The programs of the attention grid are *teams* times KV heads, and
a team is the same for every head. All KV tiles of the step, in the order of rows, form one line; team l
takes the l-th stretch of it, so that every team reads the same count of tiles whatever the lengths are
(stream-K: Osama et al., 2023). A unit that a boundary between teams cuts becomes several *items*, whose
partial results the attention kernel combines.

Units stay whole where teams get about the same without a cut. Prefill's longest ones left go in turn to a team each,
the first of them to the one that has least: then all teams begin with long ones, whose keys meet in the L2 cache.
Decode rows, by their length, are dealt to the teams from the first to the last and back: so in every two turns a team
gets a longer one and a shorter one. It reads the shortest first.

Multiprocessors do not get equal shares of the memory: of programs with as much to do the first ends when the last has a
quarter left. So steps of many rows have *late* teams too, as many again, which take a unit each, the shortest, and
whose programs find no room until others end: they run wherever that is first.

Bounds, for R rows, T tokens and L teams, that no content of a step exceeds:
  units     decode: R. Prefill: with Q queries to a tile a row of n tokens has at most 1 + (n - 1) / Q, so r
            rows have at most r + (T - r) / Q, and r <= min(R, T / 2) since such a row has two tokens or more.
  items     unit u in team l is item u + l (both only ever grow along the line): units + L. An index that no
            pair (u, l) has stays unused; the items of one team are neighbours. Units that stay whole take as many
            items a team as there are turns, fewer than 1 + units / L.
  partials  2 L: a unit cut over the teams f to e > f uses the slots 2f to f+e < 2e, and the next unit that is
            cut begins in team e or later.
With fixed splits decode and prefill are one section, so that a token's result is the same in whatever step it is
computed. An item is then a split of a unit, at most ceil(max_context / split_tokens) of them, each with a partial
slot of its own; teams take items in turn.

Decode rows that are no more than the teams, and much alike, are better cut *apart* than along the line, which is cut
where it happens to be: each into even pieces, or not at all, and every piece has a team, an item and a partial slot of
its own. The longest piece is as short as the teams allow. If it is longer by LINE_COST than a stretch of the line would
be, because of a row that is much longer than the others, the step is cut along the line after all.
"""
# mypy: disable-error-code="no-untyped-call, import-untyped"

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from asyncengine.errors import ConfigError
from asyncengine.kernels.cuda.attention.plan import AttentionPlan, AttentionShape, Launch, LayerKind, Rows, Tile
from asyncengine.kernels.cuda.attention.work.decode import PROGRAMS, build_apart_kernel, build_decode_kernel
from asyncengine.kernels.cuda.attention.work.items import ITEM, ITEM_COST, LINE_COST, TEAM
from asyncengine.kernels.cuda.attention.work.prefill import UNIT, build_prefill_kernel
from asyncengine.kernels.cuda.attention.work.splits import build_split_kernel
from asyncengine.kernels.cuda.gpu import Gpu, describe
from asyncengine.kernels.cuda.launch.programmatic import launch_options
from asyncengine.kernels.cuda.step.tensors import DeviceStep

NO_WINDOW = 1 << 30
"""A window that no position reaches."""
MIN_SPLIT_TOKENS = 256
"""A unit is not cut into pieces much shorter than this: combining would cost more than the split gains."""


@dataclass(frozen=True, slots=True)
class Section:
    """The items of one variant, decode, prefill or both, and the room for their partial results."""

    tile: Tile
    queries: int
    """tokens of a full tile"""
    rows: Rows
    """rows that belong to this section"""
    teams: int
    late_teams: int
    """the last of them, which are short, and whose programs begin when others end"""
    split_tiles: int
    """KV tiles of a fixed split; 0 is adaptive"""
    min_split_tiles: int
    whole_tiles: int
    """KV tiles of the longest unit that is not cut apart; 0 if units are not"""
    max_splits: int
    """most splits of a unit whose splits are fixed"""
    item_step: int
    """places in ``items`` from one item of a team to its next"""
    items: Tensor
    """int32 [max_items, ITEM]"""
    team_items: Tensor
    """int32 [teams, TEAM]"""
    units: Tensor
    """int32 [max_units, UNIT], of prefill with adaptive splits: what the items are made of"""
    partials: Tensor
    """float32 [slots, Hk, queries * group, D]: sums of values, each relative to the peak of its row"""
    stats: Tensor
    """float32 [2, slots, Hk, queries * group]: peaks of the scores (base 2), sums of the weights"""
    arrivals: Tensor
    """int32 [slots, Hk]: pieces of a unit that are ready, 0 between launches"""

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Tensors that the attention kernels take, one after the other."""
        return self.items, self.team_items, self.partials, self.stats, self.arrivals

    def build(self, step: DeviceStep, window: int, pdl: bool = False) -> None:
        arguments = (
            step.row_slot, step.row_query_start, step.row_query_len, step.row_context_len, self.items, self.team_items,
            step.num_rows, window or NO_WINDOW,
        )  # fmt: skip
        if self.whole_tiles:
            build_apart_kernel[(step.num_rows,)](
                *arguments,
                KEYS=self.tile.keys,
                TEAMS=self.teams,
                MIN_COST=self.min_split_tiles + ITEM_COST,
                ITEM_COST=ITEM_COST,
                LINE_COST=LINE_COST,
                WHOLE_TILES=self.whole_tiles,
                WIDTH=triton.next_power_of_2(self.teams),
                num_warps=1,
                **launch_options(pdl),
            )
            return
        if self.rows == "several":
            build_prefill_kernel[(1,)](
                *arguments,
                self.units,
                QUERIES=self.queries,
                KEYS=self.tile.keys,
                TEAMS=self.teams,
                MIN_COST=self.min_split_tiles + ITEM_COST,
                ITEM_COST=ITEM_COST,
                WIDTH=triton.next_power_of_2(self.teams),
                num_warps=8,
                **launch_options(pdl),
            )
            return
        if self.split_tiles:
            build_split_kernel[(step.num_rows,)](
                *arguments,
                QUERIES=self.queries,
                KEYS=self.tile.keys,
                TEAMS=self.teams,
                SPLIT=self.split_tiles,
                ROWS=256,
                WIDTH=triton.next_power_of_2(max(self.teams, self.max_splits)),
                num_warps=8,
                **launch_options(pdl),
            )
            return
        build_decode_kernel[(min(step.num_rows, PROGRAMS),)](
            *arguments,
            KEYS=self.tile.keys,
            TEAMS=self.teams - self.late_teams,
            LATE=self.late_teams,
            MIN_COST=self.min_split_tiles + ITEM_COST,
            ITEM_COST=ITEM_COST,
            LINE_COST=LINE_COST,
            ROWS=256,
            DEALT=triton.next_power_of_2(self.teams - self.late_teams),
            WIDTH=triton.next_power_of_2(self.teams),
            num_warps=8,
            **launch_options(pdl),
        )


@dataclass(frozen=True, slots=True)
class WorkList:
    """Work of one step for all layers that share a window. ``build`` fills it, once per step.

    Memory is allocated once; a captured graph may hold on to it. The same list serves every bucket up to
    the rows and tokens that it was allocated for.
    """

    shape: AttentionShape
    window: int
    max_rows: int
    max_tokens: int
    decode: Section
    """section of rows of one token; with fixed splits, of rows of any length"""
    prefill: Section | None

    @classmethod
    def allocate(
        cls,
        shape: AttentionShape,
        tiles: tuple[Tile, Tile | None],
        *,
        max_rows: int,
        max_tokens: int,
        max_context: int,
        device: torch.device,
        window: int = 0,
        split_tokens: int = 0,
        min_split_tokens: int = MIN_SPLIT_TOKENS,
        whole_tokens: int = 0,
        late: bool = False,
        num_programs: int | None = None,
        gpu: Gpu | None = None,
    ) -> WorkList:
        """Room for every step of at most ``max_rows`` rows and ``max_tokens`` tokens.

        ``max_context`` bounds context and query of a row together. A window of 0 is none. With
        ``split_tokens`` 0 the splits follow the work of the step; otherwise every row is cut at multiples of it, so
        that a token's result depends neither on other rows nor on what else of its own row is computed with it: that
        costs balance, and room for a partial result of every unit and split. With ``whole_tokens`` units of more than
        so many tokens are cut apart, which is for rows of one token, no more than there are teams. With ``late`` there
        are as many short teams behind those that have room at once; not with prefill, fixed splits or units cut apart.
        ``num_programs`` sizes the grids (default: what fits on ``gpu``, which is the device's unless it is given).
        ``tiles`` are those of decode and of prefill; fixed splits take the latter, which is None if no row will have
        more than one token.

        Raises ConfigError if ``split_tokens`` is no multiple of the tile, the heads do not divide, or units
        that are not for it are to be cut apart or to have late teams.
        """
        if shape.num_heads % shape.num_kv_heads:
            raise ConfigError(f"{shape.num_heads} query heads do not divide into {shape.num_kv_heads} KV heads")
        decode, prefill = tiles
        keys = prefill.keys if prefill else 0
        sms = (gpu or describe(device)).multiprocessors
        if split_tokens < 0 or (split_tokens and (not keys or split_tokens % keys)):
            raise ConfigError(f"split_tokens {split_tokens} is not a multiple of the KV tile of {keys} tokens")
        if late and (prefill or split_tokens or whole_tokens):
            raise ConfigError("late teams are for rows of one token that are cut along the line")

        def section(tile: Tile, queries: int, of: Rows, max_units: int, split_tiles: int = 0) -> Section:
            teams = max(1, num_programs // shape.num_kv_heads) if num_programs else tile.count_teams(shape, sms)
            late_teams = teams if late else 0
            teams += late_teams
            splits = -(-max_context // (split_tiles * tile.keys)) if split_tiles else 1
            if split_tiles:
                max_items, slots = max_units * splits, max_units * splits if splits > 1 else 0
            else:
                max_items, slots = max_units + teams, 2 * teams
            per_slot = (shape.num_kv_heads, queries * shape.group)
            ints = functools.partial(torch.zeros, dtype=torch.int32, device=device)
            floats = functools.partial(torch.empty, dtype=torch.float32, device=device)
            return Section(
                tile,
                queries,
                of,
                teams,
                late_teams,
                split_tiles,
                min_split_tiles=-(-min_split_tokens // tile.keys),
                whole_tiles=-(-whole_tokens // tile.keys),
                max_splits=splits,
                item_step=teams if split_tiles else 1,
                items=ints((max_items, ITEM.value)),
                team_items=ints((teams, TEAM.value)),
                units=ints((max_units if of == "several" else 0, UNIT.value)),
                partials=floats((slots, *per_slot, shape.head_dim)),
                stats=floats((2, slots, *per_slot)),
                arrivals=ints((slots, shape.num_kv_heads)),
            )

        def units(rows: int, queries: int) -> int:
            return rows + (max_tokens - rows) // queries

        if split_tokens and prefill:
            queries = prefill.rows // shape.group
            most = units(min(max_rows, max_tokens), queries)
            all_rows = section(prefill, queries, "any", most, split_tokens // prefill.keys)
            return cls(shape, window, max_rows, max_tokens, all_rows, None)
        decodes, prefills = section(decode, 1, "one", max_rows), None
        if whole_tokens and (prefill or split_tokens or max_rows > decodes.teams):
            raise ConfigError(f"{max_rows} rows are not cut apart on {decodes.teams} teams, nor with prefill or splits")
        if prefill and (rows := min(max_rows, max_tokens // 2)):
            queries = prefill.rows // shape.group
            prefills = section(prefill, queries, "several", units(rows, queries))
        return cls(shape, window, max_rows, max_tokens, decodes, prefills)

    @property
    def decode_only(self) -> WorkList:
        """The same memory for steps in which no row has more than one token: nothing of prefill is launched."""
        return replace(self, prefill=None)

    def section(self, launch: Launch, layer: LayerKind) -> Section | None:
        """Return the section that a kernel of a plan for such layers walks; None if no step that this has room for has
        such rows.

        Raises ConfigError if this was allocated for another kernel.
        """
        if (layer.shape, layer.window) != (self.shape, self.window):
            raise ConfigError(
                f"the work list is of window {self.window} and {self.shape}, not {layer.window} and {layer.shape}"
            )
        section = self.prefill if launch.rows == "several" else self.decode
        if section and (section.tile, section.rows) != (launch.tile, launch.rows):
            raise ConfigError(f"the work list is for another kernel, of {section.rows} rows in {section.tile}")
        return section

    @property
    def sections(self) -> tuple[Section, ...]:
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)

    def build(self, step: DeviceStep, pdl: bool = False) -> None:
        """Derive the work of a step from its rows, by one launch per section. Every layer may then read it."""
        if step.num_rows > self.max_rows or step.num_tokens > self.max_tokens:
            raise ConfigError(
                f"a step of {step.num_rows} rows and {step.num_tokens} tokens is more than the work list holds, "
                f"{self.max_rows} and {self.max_tokens}"
            )
        for section in self.sections:
            section.build(step, self.window, pdl)


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of few_keys, which needs no work list."""

    arrivals: Tensor
    """int32: pieces of a row's query head that are ready, 0 between launches"""

    def build(self, step: DeviceStep, pdl: bool = False) -> None:
        """Nothing has to be built."""


Work = WorkList | Counters
"""The memory that a plan's kernels share, layer after layer and step after step."""


class StepWork:
    """The memory of all plans of an engine, allocated once. Plans with the same tiles and cut have the same."""

    def __init__(
        self, plans: Sequence[AttentionPlan], *, max_rows: int, max_tokens: int, max_context: int, gpu: Gpu,
        device: torch.device,
    ) -> None:  # fmt: skip
        def allocate(plan: AttentionPlan) -> WorkList:
            (shape, window, *_), cut = plan.layer, plan.cut
            decode, prefill = plan.tile("one") or plan.tile("any"), plan.tile("several") or plan.tile("any")
            assert cut
            assert decode
            apart, fixed = (cut.tokens if cut.kind == kind else 0 for kind in ("apart", "fixed"))
            rows = min(max_rows, decode.count_teams(shape, gpu.multiprocessors)) if apart else max_rows
            return WorkList.allocate(
                shape, (decode, prefill), max_rows=rows, max_tokens=max_tokens, max_context=max_context, device=device,
                window=window, split_tokens=fixed, whole_tokens=apart, late=cut.kind == "late", gpu=gpu,
            )  # fmt: skip

        self._lists: dict[tuple[object, ...], WorkList] = {}
        unlike = {self._key(plan): plan for plan in plans if plan.cut}
        for key, plan in unlike.items():
            if plan.tile("several"):  # whose list has one for rows of one token in it
                work = allocate(plan)
                self._lists |= {key: work, self._key(plan, decode_only=True): work.decode_only}
        for key, plan in unlike.items():
            if key not in self._lists:
                self._lists[key] = allocate(plan)
        heads = max((plan.layer.shape.num_heads for plan in plans), default=0)
        self._counters = Counters(torch.zeros(max(max_rows, max_tokens) * heads, dtype=torch.int32, device=device))

    def of(self, plan: AttentionPlan) -> Work:
        return self._lists[self._key(plan)] if plan.cut else self._counters

    @staticmethod
    def _key(plan: AttentionPlan, *, decode_only: bool = False) -> tuple[object, ...]:
        several = None if decode_only else plan.tile("several")
        return plan.layer.shape, plan.layer.window, plan.cut, plan.tile("one"), several, plan.tile("any")
