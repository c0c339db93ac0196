"""The work of paged attention, cut on the device into even shares for a grid of fixed size.

A *unit* is one tile of queries of one row with the KV tiles that it sees: a decode row is one unit, a
prefill row one per tile of its queries. The programs of the attention grid are *lanes* times KV heads, and
a lane is the same for every head. All KV tiles of the step, in the order of rows, form one line; lane l
takes the l-th stretch of it, so that every lane reads the same count of tiles whatever the lengths are
(stream-K: Osama et al., 2023). A unit that a boundary between lanes cuts becomes several *items*, whose
partial results the attention kernel combines.

Units stay whole where lanes get about the same without a cut. Prefill's longest ones left go in turn to a lane each,
the first of them to the one that has least: then all lanes begin with long ones, whose keys meet in the L2 cache.
Decode rows, by their length, are dealt to the lanes from the first to the last and back: so in every two turns a lane
gets a longer one and a shorter one. It reads the shortest first.

Multiprocessors do not get equal shares of the memory: of programs with as much to do the first ends when the last has a
quarter left. So steps of many rows have *late* lanes too, as many again, which take a unit each, the shortest, and
whose programs find no room until others end: they run wherever that is first.

Bounds, for R rows, T tokens and L lanes, that no content of a step exceeds:
  units     decode: R. Prefill: with Q queries to a tile a row of n tokens has at most 1 + (n - 1) / Q, so r
            rows have at most r + (T - r) / Q, and r <= min(R, T / 2) since such a row has two tokens or more.
  items     unit u in lane l is item u + l (both only ever grow along the line): units + L. An index that no
            pair (u, l) has stays unused; the items of one lane are neighbours. Units that stay whole take as many
            items a lane as there are turns, fewer than 1 + units / L.
  partials  2 L: a unit cut over the lanes f to e > f uses the slots 2f to f+e < 2e, and the next unit that is
            cut begins in lane e or later.
With fixed splits decode and prefill are one section, so that a token's result is the same in whatever step it is
computed. An item is then a split of a unit, at most ceil(max_context / split_tokens) of them, each with a partial
slot of its own; lanes take items in turn.

Decode rows that are no more than the lanes, and much alike, are better cut *apart* than along the line, which is cut
where it happens to be: each into even pieces, or not at all, and every piece has a lane, an item and a partial slot of
its own. The longest piece is as short as the lanes allow. If it is longer by LINE_COST than a stretch of the line would
be, because of a row that is much longer than the others, the step is cut along the line after all.
"""
# mypy: disable-error-code="no-untyped-call, import-untyped"

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from asyncengine.errors import ConfigError
from asyncengine.kernels.cuda.attention.work.decode import PROGRAMS, build_apart_kernel, build_decode_kernel
from asyncengine.kernels.cuda.attention.work.items import ITEM, ITEM_COST, LANE, LINE_COST
from asyncengine.kernels.cuda.attention.work.prefill import UNIT, build_prefill_kernel
from asyncengine.kernels.cuda.attention.work.splits import build_split_kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options
from asyncengine.kernels.cuda.step.tensors import DeviceStep

NO_WINDOW = 1 << 30
"""A window that no position reaches."""
MIN_SPLIT_TOKENS = 256
"""A unit is not cut into pieces much shorter than this: combining would cost more than the split gains."""
_WHOLE_TOKENS = 512
"""A unit of so many tokens is not cut apart, if several rows are: steps of Qwen3 take 626 us instead of 677 at 8 x 384,
643 instead of 683 at 8 x 448, and the same in pieces from 512 on. Longer ones are cut as small as lanes allow."""
LATE_ROWS = 6
_LATE_COST = 36
"""Late lanes are for steps of so many rows a lane, and so many tiles, what starting their items costs included. Below,
their programs' first loads take longer than they gain: GPT-2 at 256 x 64 tokens 507 us and 535, at 256 x 200 830 and
808."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Tile:
    """How one variant of the attention kernel is laid out."""

    rows: int
    """packed (token, head of the group) rows of a dot: a power of two, 16 at least"""
    keys: int
    """KV tokens of one turn of the loop: a power of two, 16 at least"""
    warps: int
    stages: int
    programs_per_sm: int
    streamed: bool = False
    """of tma_decode.py, where rows have one token, or of tma_prefill.py"""

    def count_lanes(self, shape: AttentionShape, sms: int) -> int:
        """Lanes whose programs, one for each KV head, have room at once on so many multiprocessors."""
        return max(1, self.programs_per_sm * sms // shape.num_kv_heads)


def choose_tiles(shape: AttentionShape) -> tuple[Tile, Tile]:
    """The tiles of decode and of prefill, by the bytes of a KV tile.

    Decode waits for memory: small programs, of two warps, hide each other's first loads. At 64 sequences of 288 tokens
    four of them a multiprocessor, with two tiles of 32 keys of heads of 128 in flight each, take 24.7 us, where one of
    64 keys takes 26 and three programs of four warps with twice the keys take 32.
    Prefill waits for the tensor cores: two warp groups of 64 rows each, whose registers (250 a thread) leave
    no room for a second program. float32 is multiplied exactly, without tensor cores: small tiles.
    """
    width = max(16, triton.next_power_of_2(shape.head_dim))
    group = triton.next_power_of_2(shape.group)
    if shape.dtype == torch.float32:
        keys = min(32, max(16, 4096 // width))
        return Tile(max(16, group), keys, 4, 2, 2), Tile(max(32, group), keys, 4, 1, 2)
    few, keys = (min(64, max(16, elements // width)) for elements in (4096, 8192))
    programs = 4 if width > 64 else 6
    # Triton keeps one stage less than it is told.
    return Tile(max(16, group), few, 2, 3, programs), Tile(max(128, group), keys, 8, 3, 1)


def choose_fixed_tile(shape: AttentionShape) -> Tile:
    """The tile of fixed splits, for decode and prefill alike.

    A decode row wastes most of its 64 rows, but tensor cores with 64 rows still keep up with memory.
    """
    prefill = choose_tiles(shape)[1]
    if shape.dtype == torch.float32:
        return prefill
    return replace(prefill, rows=max(64, triton.next_power_of_2(shape.group)), warps=4, programs_per_sm=2)


def _fits_gluon(shape: AttentionShape, block_size: int) -> bool:
    """Whether attention in Gluon is for such heads and blocks; each kernel has groups of its own."""
    return shape.dtype == torch.bfloat16 and shape.head_dim in (64, 128) and block_size == 16


def choose_streamed_tile(shape: AttentionShape, block_size: int, programs_per_sm: int = 2) -> Tile | None:
    """The tile of tma_decode.py, four blocks of the cache; None if that is not for such heads or blocks.

    Two programs with 96 KiB of tiles in flight fill a multiprocessor's shared memory. A lone one may have twice that,
    but no more than six tiles: at 8 rows of 288 tokens GPT-2 takes 4.8 us with them and 6.3 with twelve, Qwen3 4.7 and
    with three 6.2.
    """
    if not _fits_gluon(shape, block_size) or shape.group > 8:
        return None
    stages = min(6, (192 << 10) // programs_per_sm // (64 * shape.head_dim * 4))
    return Tile(16, 64, 4, stages, programs_per_sm, streamed=True)


def choose_mixed_tiles(shape: AttentionShape, block_size: int, window: int) -> tuple[Tile, Tile] | None:
    """As ``choose_tiles``, with rows of one token by tma_decode.py, prefill by tma_prefill.py, or both.

    Each for the heads, blocks and windows that it takes; None if neither does. Prefill has as many stages of keys and
    values as shared memory holds beside the queries of two units.
    """
    decode, prefill = choose_tiles(shape)
    streamed = choose_streamed_tile(shape, block_size)
    divides = shape.group in (1, 2, 4, 8, 16)  # of a unit's rows each head has as many, eight at least
    if _fits_gluon(shape, block_size) and divides and not window:
        return streamed or decode, Tile(128, 128, 8, 256 // shape.head_dim, 1, streamed=True)
    return (streamed, prefill) if streamed else None


class Apart(NamedTuple):
    """How decode rows are cut apart."""

    tile: Tile
    whole_tokens: int
    """of the longest unit that is not cut"""


def choose_apart(rows: int, shape: AttentionShape, block_size: int, sms: int) -> Apart | None:
    """For decode steps of so many rows; None if they are not to be cut apart.

    A lone row has a tile a program, 33 KiB at most. Its projections use no shared memory, and a multiprocessor has to
    be empty before it divides cache and shared memory another way: with 96 KiB a layer of the 8B took 10 us longer.
    """
    if tile := choose_streamed_tile(shape, block_size):
        if rows == 1:
            return Apart(replace(tile, stages=1), tile.keys)
        for programs_per_sm in (1, 2):
            tile = choose_streamed_tile(shape, block_size, programs_per_sm)
            if tile and rows <= tile.count_lanes(shape, sms):
                return Apart(tile, _WHOLE_TOKENS)
    return None


def choose_late(rows: int, shape: AttentionShape, block_size: int, sms: int) -> int | None:
    """Decode steps of so many rows are to have late lanes if one has more tokens than this; None if never."""
    tile = choose_streamed_tile(shape, block_size)
    lanes = tile.count_lanes(shape, sms) if tile else 0
    if not tile or rows < LATE_ROWS * lanes:
        return None
    return max(0, _LATE_COST * lanes // rows - ITEM_COST) * tile.keys


class Cut(NamedTuple):
    """How a work list for tma_decode.py cuts the rows of a decode step."""

    tile: Tile
    whole_tokens: int
    """of the longest unit that is not cut apart; 0 if units are cut along the line"""
    late: bool
    """There are late lanes."""


def choose_cut(rows: int, context: int, shape: AttentionShape, block_size: int, sms: int) -> Cut | None:
    """For decode steps of so many rows, after so many tokens at most; None if they are for another kernel."""
    if apart := choose_apart(rows, shape, block_size, sms):
        return Cut(*apart, late=False)
    tile, short = choose_streamed_tile(shape, block_size), choose_late(rows, shape, block_size, sms)
    return Cut(tile, 0, short is not None and context > short) if tile else None


@dataclass(frozen=True, slots=True)
class Section:
    """The items of one variant, decode, prefill or both, and the room for their partial results."""

    tile: Tile
    queries: int
    """tokens of a full tile"""
    row_lengths: range
    """query_len of the rows that are of this section"""
    lanes: int
    late_lanes: int
    """the last of them, which are short, and whose programs begin when others end"""
    split_tiles: int
    """KV tiles of a fixed split; 0 is adaptive"""
    min_split_tiles: int
    whole_tiles: int
    """KV tiles of the longest unit that is not cut apart; 0 if units are not"""
    max_splits: int
    """of a unit whose splits are fixed"""
    item_step: int
    """from one item of a lane to its next"""
    items: Tensor
    """int32 [max_items, ITEM]"""
    lane_items: Tensor
    """int32 [lanes, LANE]"""
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
        """As the attention kernels take them, one after the other."""
        return self.items, self.lane_items, self.partials, self.stats, self.arrivals

    def build(self, step: DeviceStep, window: int, pdl: bool = False) -> None:
        arguments = (
            step.row_slot, step.row_query_start, step.row_query_len, step.row_context_len, self.items, self.lane_items,
            step.num_rows, window or NO_WINDOW,
        )  # fmt: skip
        if self.whole_tiles:
            build_apart_kernel[(step.num_rows,)](
                *arguments,
                KEYS=self.tile.keys,
                LANES=self.lanes,
                MIN_COST=self.min_split_tiles + ITEM_COST,
                ITEM_COST=ITEM_COST,
                LINE_COST=LINE_COST,
                WHOLE_TILES=self.whole_tiles,
                WIDTH=triton.next_power_of_2(self.lanes),
                num_warps=1,
                **launch_options(pdl),
            )
            return
        if self.row_lengths.start > 1:
            build_prefill_kernel[(1,)](
                *arguments,
                self.units,
                QUERIES=self.queries,
                KEYS=self.tile.keys,
                LANES=self.lanes,
                MIN_COST=self.min_split_tiles + ITEM_COST,
                ITEM_COST=ITEM_COST,
                WIDTH=triton.next_power_of_2(self.lanes),
                num_warps=8,
                **launch_options(pdl),
            )
            return
        if self.split_tiles:
            build_split_kernel[(step.num_rows,)](
                *arguments,
                QUERIES=self.queries,
                KEYS=self.tile.keys,
                LANES=self.lanes,
                SPLIT=self.split_tiles,
                ROWS=256,
                WIDTH=triton.next_power_of_2(max(self.lanes, self.max_splits)),
                num_warps=8,
                **launch_options(pdl),
            )
            return
        build_decode_kernel[(min(step.num_rows, PROGRAMS),)](
            *arguments,
            KEYS=self.tile.keys,
            LANES=self.lanes - self.late_lanes,
            LATE=self.late_lanes,
            MIN_COST=self.min_split_tiles + ITEM_COST,
            ITEM_COST=ITEM_COST,
            LINE_COST=LINE_COST,
            ROWS=256,
            DEALT=triton.next_power_of_2(self.lanes - self.late_lanes),
            WIDTH=triton.next_power_of_2(self.lanes),
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
    """with fixed splits, of rows of any length"""
    prefill: Section | None

    @classmethod
    def allocate(
        cls,
        shape: AttentionShape,
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
        tiles: tuple[Tile, Tile | None] | None = None,
    ) -> WorkList:
        """Room for every step of at most ``max_rows`` rows and ``max_tokens`` tokens.

        ``max_context`` bounds context and query of a row together. A window of 0 is none. With
        ``split_tokens`` 0 the splits follow the work of the step; otherwise every row is cut at multiples of it, so
        that a token's result depends neither on other rows nor on what else of its own row is computed with it: that
        costs balance, and room for a partial result of every unit and split. With ``whole_tokens`` units of more than
        so many tokens are cut apart, which is for rows of one token, no more than there are lanes. With ``late`` there
        are as many short lanes behind those that have room at once; not with prefill, fixed splits or units cut apart.
        ``num_programs`` (default: what fits on the device) sizes the grids. ``tiles`` are those of decode and of
        prefill; fixed splits take the latter, which is None if no row will have more than one token.

        Raises ConfigError if ``split_tokens`` is no multiple of the tile, the heads do not divide, or units
        that are not for it are to be cut apart or to have late lanes.
        """
        if shape.num_heads % shape.num_kv_heads:
            raise ConfigError(f"{shape.num_heads} query heads do not divide into {shape.num_kv_heads} KV heads")
        decode, prefill = tiles or choose_tiles(shape)
        fixed = prefill if tiles else choose_fixed_tile(shape)
        keys = fixed.keys if fixed else 0
        if split_tokens < 0 or (split_tokens and (not keys or split_tokens % keys)):
            raise ConfigError(f"split_tokens {split_tokens} is not a multiple of the KV tile of {keys} tokens")
        if late and (prefill or split_tokens or whole_tokens):
            raise ConfigError("late lanes are for rows of one token that are cut along the line")

        def section(tile: Tile, queries: int, row_lengths: range, max_units: int, split_tiles: int = 0) -> Section:
            sms = multiprocessors(device)
            lanes = max(1, num_programs // shape.num_kv_heads) if num_programs else tile.count_lanes(shape, sms)
            late_lanes = lanes if late else 0
            lanes += late_lanes
            splits = -(-max_context // (split_tiles * tile.keys)) if split_tiles else 1
            if split_tiles:
                max_items, slots = max_units * splits, max_units * splits if splits > 1 else 0
            else:
                max_items, slots = max_units + lanes, 2 * lanes
            per_slot = (shape.num_kv_heads, queries * shape.group)
            ints = functools.partial(torch.zeros, dtype=torch.int32, device=device)
            floats = functools.partial(torch.empty, dtype=torch.float32, device=device)
            return Section(
                tile,
                queries,
                row_lengths,
                lanes,
                late_lanes,
                split_tiles,
                min_split_tiles=-(-min_split_tokens // tile.keys),
                whole_tiles=-(-whole_tokens // tile.keys),
                max_splits=splits,
                item_step=lanes if split_tiles else 1,
                items=ints((max_items, ITEM.value)),
                lane_items=ints((lanes, LANE.value)),
                units=ints((max_units if row_lengths.start > 1 else 0, UNIT.value)),
                partials=floats((slots, *per_slot, shape.head_dim)),
                stats=floats((2, slots, *per_slot)),
                arrivals=ints((slots, shape.num_kv_heads)),
            )

        def units(rows: int, queries: int) -> int:
            return rows + (max_tokens - rows) // queries

        if split_tokens and fixed:
            queries = fixed.rows // shape.group
            most = units(min(max_rows, max_tokens), queries)
            all_rows = section(fixed, queries, range(1, max_tokens + 1), most, split_tokens // fixed.keys)
            return cls(shape, window, max_rows, max_tokens, all_rows, None)
        decodes, prefills = section(decode, 1, range(1, 2), max_rows), None
        if whole_tokens and (prefill or split_tokens or max_rows > decodes.lanes):
            raise ConfigError(f"{max_rows} rows are not cut apart on {decodes.lanes} lanes, nor with prefill or splits")
        if prefill and (rows := min(max_rows, max_tokens // 2)):
            queries = prefill.rows // shape.group
            prefills = section(prefill, queries, range(2, max_tokens + 1), units(rows, queries))
        return cls(shape, window, max_rows, max_tokens, decodes, prefills)

    @property
    def decode_only(self) -> WorkList:
        """The same memory for steps in which no row has more than one token: nothing of prefill is launched."""
        return replace(self, prefill=None)

    @property
    def takes_heads(self) -> bool:
        """Whether its steps may go through paged_decode_attention: all rows are of one token, cut wherever it suits."""
        return self.prefill is None and self.decode.split_tiles == 0

    @property
    def streams_prefill(self) -> bool:
        """Whether gluon_paged_prefill computes its rows of several tokens."""
        return self.prefill is not None and self.prefill.tile.streamed

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


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; of the interpreter as many as a test can wait for."""
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
