"""Paged attention in Triton against plain torch, over poisoned caches and outputs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncengine.errors import ConfigError
from asyncengine.kernels.cuda.attention import paged
from asyncengine.kernels.cuda.attention.call import KernelCall
from asyncengine.kernels.cuda.attention.choose import fixed_tile, paged_tiles
from asyncengine.kernels.cuda.attention.plan import AttentionShape, Launch, Tile
from asyncengine.kernels.cuda.attention.run import launch_all
from asyncengine.kernels.cuda.attention.work.lists import Work, WorkList
from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.step.tensors import DeviceStep, allocate_step
from asyncengine.kernels.float8 import FLOAT8, FLOAT8_MAX
from asyncengine.kernels.float8_cache import with_inverses
from asyncengine.kernels.ops import AttentionLayer, LayerKVCache
from tests.amounts import examples

SMALL = (Tile(16, 16, 4, 2, 1), Tile(16, 16, 4, 2, 1))
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    rows: tuple[tuple[int, int], ...]
    """(query_len, context_len) of each row"""
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    block_size: int = 16
    window: int = 0
    split_tokens: int = 0
    programs: int | None = 6
    min_split_tokens: int = 16
    whole_tokens: int = 0
    tiles: tuple[Tile, Tile | None] | None = SMALL
    late: bool = False
    softcap: float = 0.0
    sinks: Tensor | None = None
    float8: bool = False
    """Keys and values are in float8."""
    seed: int = 0

    @property
    def shape(self) -> AttentionShape:
        heads = self.group * self.num_kv_heads
        return AttentionShape(heads, self.num_kv_heads, self.head_dim, self.dtype, self.float8)

    @property
    def scales(self) -> Tensor | None:
        """Scales of keys and values, another for each head; some of the numbers saturate."""
        if not self.float8:
            return None
        return with_inverses(torch.tensor([0.007, 2**-8, 0.005]).repeat(2)[: 2 * self.num_kv_heads].view(2, -1))

    @property
    def layer(self) -> AttentionLayer:
        """A layer with neither norms nor rotary embedding."""
        return AttentionLayer(
            self.shape.num_heads, None, None, self.head_dim**-0.5, self.window, self.softcap, None, self.sinks
        )

    @property
    def tiles_taken(self) -> tuple[Tile, Tile | None]:
        """Tiles of the case, or of a GPU."""
        if self.tiles:
            return self.tiles
        shape = self.shape
        return (fixed_tile(shape, H200),) * 2 if self.split_tokens else paged_tiles(shape, H200)

    @property
    def num_tokens(self) -> int:
        return sum(length for length, _ in self.rows)

    @property
    def max_context(self) -> int:
        return max(length + context for length, context in self.rows) + 1


@dataclass(frozen=True)
class World:
    """The tensors of a case: caches that are NaN wherever no query of the step may look."""

    case: Case
    step: DeviceStep
    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def scales(self) -> Tensor | None:
        scales = self.case.scales
        return None if scales is None else scales.to(self.q.device)

    def exact(self, which: int) -> Tensor:
        """Keys or values as numbers of float64."""
        cache, scales = (self.k, self.v)[which].cpu(), self.case.scales
        return cache.double() if scales is None else cache.double() * scales[which, 0].double()[:, None, None]

    def visible(self, row: int) -> tuple[int, int]:
        """The positions that some query of the row sees."""
        length, context = self.case.rows[row]
        return max(0, context - self.case.window + 1) if self.case.window else 0, context + length

    def cells(self, row: int) -> tuple[Tensor, Tensor]:
        """Blocks and offsets of the visible positions of a row."""
        position = torch.arange(*self.visible(row))
        table = self.step.slots.block_tables[int(self.step.row_slot[row])].cpu().long()
        return table[position // self.case.block_size], position % self.case.block_size

    def work(self, **overrides: int) -> WorkList:
        """A work list with not a row or token to spare."""
        case = self.case
        room = {"max_rows": len(case.rows), "max_tokens": max(1, case.num_tokens), "max_context": case.max_context}
        return WorkList.allocate(
            case.shape,
            case.tiles_taken,
            **(room | overrides),
            device=self.q.device,
            window=case.window,
            split_tokens=case.split_tokens,
            min_split_tokens=case.min_split_tokens,
            whole_tokens=case.whole_tokens,
            late=case.late,
            num_programs=case.programs,
        )

    def call(self, work: Work, out: Tensor, **others: Any) -> KernelCall:
        """The call that kernels are handed, with ``others`` in place of the world's own."""
        cache = LayerKVCache(self.k, self.v, self.scales)
        return replace(KernelCall(self.q, self.case.layer, cache, self.step, work, out), **others)

    def attend(self, work: WorkList) -> Tensor:
        case = self.case
        out = torch.full((len(self.q), case.shape.num_heads * case.head_dim), math.nan, device=self.q.device)
        out = out.to(case.dtype)
        launches = [Launch("paged", section.tile, section.rows, stored=True) for section in work.sections]
        launch_all(launches, self.call(work, out))
        for section in work.sections:
            assert not section.arrivals.any()
        return out.cpu()

    def expected(self) -> Tensor:
        """Compute attention in float64; NaN for the tokens of no row."""
        case = self.case
        q, caches = self.q.cpu().double(), [self.exact(i) for i in (0, 1)]
        out = torch.full((len(q), case.shape.num_heads * case.head_dim), math.nan, dtype=torch.float64)
        for row, (length, context) in enumerate(case.rows):
            first = int(self.step.row_query_start[row])
            blocks, offsets = self.cells(row)
            k, v = (cache[blocks, :, offsets].repeat_interleave(case.group, 1) for cache in caches)
            i = torch.arange(context, context + length)[:, None]
            j = torch.arange(*self.visible(row))[None, :]
            hidden = j > i
            if case.window:
                hidden |= j <= i - case.window
            score = torch.einsum("qhd,khd->hqk", q[first : first + length], k) * case.head_dim**-0.5
            if case.softcap:
                score = case.softcap * torch.tanh(score / case.softcap)
            score = score.masked_fill(hidden, -math.inf)
            if case.sinks is not None:
                score = torch.cat((score, case.sinks.cpu().double()[:, None, None].expand(-1, length, 1)), -1)
            weight = score.softmax(-1)[..., : hidden.shape[1]]
            out[first : first + length] = torch.einsum("hqk,khd->qhd", weight, v).flatten(1)
        return out


def make_world(case: Case, device: torch.device, spare_tokens: int = 3) -> World:
    generator = torch.Generator().manual_seed(case.seed)
    num_rows, slots = len(case.rows), len(case.rows) + 2
    blocks_per_slot = -(-case.max_context // case.block_size)
    tokens = case.num_tokens + spare_tokens
    step = allocate_step(slots, blocks_per_slot, num_rows, max(1, case.num_tokens), torch.device("cpu"))
    # Block 0 is nobody's: it stays poison.
    blocks = 1 + torch.randperm(slots * blocks_per_slot, generator=generator)
    step.slots.block_tables.copy_(blocks.view(slots, blocks_per_slot))
    step.row_slot.copy_(torch.randperm(slots, generator=generator)[:num_rows])
    start = 0
    for row, (length, context) in enumerate(case.rows):
        step.row_query_start[row], step.row_query_len[row], step.row_context_len[row] = start, length, context
        position = torch.arange(context, context + length)
        block = step.slots.block_tables[int(step.row_slot[row]), position // case.block_size]
        step.slot_mapping[start : start + length] = block.long() * case.block_size + position % case.block_size
        start += length
        if length == 0:
            step.row_slot[row] = -1
    shape = case.shape
    qkv = torch.randn(tokens, (shape.num_heads + 2 * case.num_kv_heads) * case.head_dim, generator=generator)
    q = qkv.to(case.dtype).to(device)[:, : shape.num_heads * case.head_dim].unflatten(1, (shape.num_heads, -1))
    caches = torch.full((2, len(blocks) + 1, case.num_kv_heads, case.block_size, case.head_dim), math.nan)
    world = World(case, step, q, caches[0], caches[1])
    for row, (length, _) in enumerate(case.rows):
        if length:
            cells = world.cells(row)
            for cache in (world.k, world.v):
                size = (len(cells[0]), case.num_kv_heads, case.head_dim)
                cache[cells[0], :, cells[1]] = torch.randn(size, generator=generator)
    if case.scales is not None:
        inverses = case.scales[:, 1, :, None, None]
        k, v = (caches * inverses[:, None]).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8).to(device)
    else:
        k, v = caches.to(case.dtype).to(device)
    return World(case, to_device(step, device), q, k, v)


def to_device(step: DeviceStep, device: torch.device) -> DeviceStep:
    def moved(tensors: object, names: Iterable[str]) -> dict[str, Tensor]:
        there = {name: getattr(tensors, name) for name in names}
        return {name: tensor.to(device) for name, tensor in there.items() if tensor is not None}

    slots = replace(step.slots, **moved(step.slots, step.slots.__slots__))
    return replace(step, slots=slots, **moved(step, set(step.__slots__) - {"slots"}))


def check(world: World, out: Tensor) -> None:
    expected = world.expected()
    assert torch.equal(out.isnan(), expected.isnan())
    tolerance = TOLERANCE[world.case.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


decodes = st.tuples(st.just(1), st.integers(0, 120))
prefills = st.tuples(st.integers(2, 30), st.integers(0, 70))
edges = st.sampled_from([(0, 0), (1, 0), (1, 15), (1, 16), (1, 31), (16, 0), (17, 16), (2, 62)])


@st.composite
def cases(draw: st.DrawFn, head_dims: Sequence[int] = (16, 32, 64, 80, 96, 128)) -> Case:
    kind = draw(st.sampled_from([decodes, prefills, st.one_of(decodes, prefills, edges)]))
    return Case(
        rows=tuple(draw(st.lists(kind, min_size=1, max_size=4))),
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7])),
        head_dim=draw(st.sampled_from(head_dims)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        block_size=draw(st.sampled_from([16, 32, 48])),
        window=draw(st.sampled_from([0, 0, 1, 7, 16, 33])),
        split_tokens=draw(st.sampled_from([0, 0, 16, 48])),
        programs=draw(st.integers(1, 12)),
        float8=draw(st.sampled_from([False, False, True])),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=examples(12))
@given(cases())
@example(Case(((1, 200), (1, 0), (1, 16))))
@example(Case(((1, 150), (30, 20), (0, 0), (2, 47)), head_dim=80, group=3, dtype=torch.bfloat16))
@example(Case(((33, 70), (1, 100)), window=33, split_tokens=32, block_size=48))
@example(Case(((1, 150), (30, 20), (0, 0), (2, 47)), head_dim=80, group=3, dtype=torch.bfloat16, float8=True))
@example(Case(((33, 70), (1, 100)), window=33, split_tokens=32, block_size=48, float8=True))
@example(Case(((2, 49),), window=34))  # the first key of a tile is just out of the last query's window
def test_matches_torch(device: torch.device, case: Case) -> None:
    world = make_world(case, device)
    work = world.work()
    work.build(world.step)
    check(world, world.attend(work))


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_default_tiles(device: torch.device, dtype: torch.dtype, float8: bool) -> None:
    rows = ((1, 300), (70, 90), (1, 3))
    case = Case(rows, num_kv_heads=1, group=4, head_dim=64, dtype=dtype, tiles=None, float8=float8)
    world = make_world(case, device)
    work = world.work()
    work.build(world.step)
    check(world, world.attend(work))


@pytest.mark.parametrize("softcap", [0.3, 50.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_caps(device: torch.device, dtype: torch.dtype, softcap: float) -> None:
    """Scores have either sign, and are small and large beside the cap; there are rows in pieces, masks and a window."""
    case = Case(((1, 70), (20, 33), (0, 0), (1, 0)), softcap=softcap, dtype=dtype, window=40, head_dim=16)
    world = make_world(case, device)
    world.q.mul_(4)
    work = world.work()
    work.build(world.step)
    out = world.attend(work)
    check(world, out)
    uncapped = replace(world, case=replace(case, softcap=0.0)).expected()
    assert softcap > 1 or not torch.allclose(out.nan_to_num().double(), uncapped.nan_to_num(), atol=0.1)


def test_sinks_take_their_part_of_the_softmax(device: torch.device) -> None:
    """Once, though some rows are in pieces; above and below the scores."""
    sinks = torch.tensor([-3.0, 0.0, 1.5, 30.0], device=device)
    world = make_world(Case(((1, 70), (20, 33), (0, 0), (1, 0)), sinks=sinks, window=40, head_dim=16), device)
    work = world.work()
    work.build(world.step)
    out = world.attend(work)
    check(world, out)
    without = replace(world, case=replace(world.case, sinks=None)).expected()
    assert not torch.allclose(out.nan_to_num().double(), without.nan_to_num(), atol=0.1)


@pytest.mark.parametrize("room", ["shared", "of its own"])
def test_decode_only_touches_no_prefill_row(device: torch.device, room: str) -> None:
    case = Case(((1, 40), (1, 0), (1, 77)))
    world = make_world(case if room == "shared" else replace(case, tiles=(SMALL[0], None)), device)
    work = world.work(max_tokens=8)
    work = work.decode_only if room == "shared" else work
    work.build(world.step)
    check(world, world.attend(work))
    assert work.sections == (work.decode,)


@contextlib.contextmanager
def backwards(device: torch.device) -> Iterator[None]:
    """The interpreter runs the programs of a grid in order; here in the opposite one. A GPU knows no order."""
    if device.type == "cuda":
        yield
        return
    from triton.runtime.interpreter import interpreter_builder as builder

    forwards = builder.set_grid_idx
    builder.set_grid_idx = lambda x, y, z: forwards(builder.grid_dim[0] - 1 - x, y, z)
    try:
        yield
    finally:
        del builder.set_grid_idx


@pytest.mark.sampled(2)
@pytest.mark.parametrize("split_tokens", [0, 32])
def test_results_do_not_depend_on_the_order_of_arrival(device: torch.device, split_tokens: int) -> None:
    case = Case(((1, 150), (25, 60), (1, 90)), split_tokens=split_tokens, programs=8)
    world = make_world(case, device)
    work = world.work()
    work.build(world.step)
    once = world.attend(work)
    with backwards(device):
        work.build(world.step)
        again = world.attend(work)
    assert torch.equal(once.nan_to_num(), again.nan_to_num())
    check(world, again)


def test_a_step_leaves_nothing_to_the_next(device: torch.device) -> None:
    large = make_world(Case(((1, 150), (25, 60), (1, 90), (9, 0))), device)
    small = make_world(Case(((0, 0), (1, 20)), seed=1), device)
    empty = make_world(Case(((0, 0), (0, 0))), device)
    work = large.work()
    for world in (large, small, empty, large):
        work.build(world.step)
        check(world, world.attend(work))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fixed_splits_make_rows_independent(device: torch.device, dtype: torch.dtype) -> None:
    case = Case(((1, 140), (1, 12), (20, 33), (1, 60)), dtype=dtype, split_tokens=32)
    world = make_world(case, device)
    work = world.work()
    work.build(world.step)
    together = world.attend(work)
    for row, (length, _) in enumerate(case.rows):
        first = int(world.step.row_query_start[row])
        # The row alone, with the others there but inert.
        lengths = torch.zeros_like(world.step.row_query_len)
        lengths[row] = length
        alone = replace(world, step=replace(world.step, row_query_len=lengths))
        work.build(alone.step)
        mine = slice(first, first + length)
        assert torch.equal(alone.attend(work)[mine], together[mine])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("window", [0, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fixed_splits_make_tokens_independent_of_chunks(device: torch.device, dtype: torch.dtype, window: int) -> None:
    """Bit for bit, and one token at a time too, as decode and a recomputed sequence take them."""
    whole = make_world(Case(((40, 30),), split_tokens=16, window=window, dtype=dtype), device)
    work = whole.work()
    work.build(whole.step)
    expected = whole.attend(work)
    check(whole, expected)
    for first, last in ((0, 13), (13, 40), (5, 7), (0, 1), (2, 3), (18, 19), (39, 40)):
        step = replace(
            whole.step,
            row_query_start=torch.tensor([first], dtype=torch.int32, device=device),
            row_query_len=torch.tensor([last - first], dtype=torch.int32, device=device),
            row_context_len=torch.tensor([30 + first], dtype=torch.int32, device=device),
        )
        work.build(step)
        assert torch.equal(replace(whole, step=step).attend(work)[first:last], expected[first:last])


def test_misuse_is_reported(device: torch.device) -> None:
    world = make_world(Case(((1, 20),)), device)
    work = world.work()
    work.build(world.step)
    out = torch.empty(len(world.q), 4 * 32, device=device)
    launch, layer = Launch("paged", work.decode.tile, "one", stored=True), world.case.layer

    def call(launch=launch, layer=layer, k=world.k, work=work, out=out):
        paged.run(launch, world.call(work, out, layer=layer, cache=LayerKVCache(k, world.v)))

    call()
    with pytest.raises(ConfigError, match="window"):
        call(layer=layer._replace(window=8))
    with pytest.raises(ConfigError, match="out"):
        call(out=out[:, :64])
    with pytest.raises(ConfigError, match="bfloat16"):
        call(out=out.bfloat16())
    with pytest.raises(ConfigError, match="k_cache"):
        call(k=world.k.transpose(2, 3))
    with pytest.raises(ConfigError, match="another kernel"):
        call(launch._replace(tile=replace(launch.tile, warps=8)))
    with pytest.raises(ConfigError, match="another kernel"):
        call(launch._replace(rows="any"))
