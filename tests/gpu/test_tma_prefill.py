"""Attention of prompts, and of rows of one token beside them, in Gluon, which Triton's interpreter cannot run.

Against a float64 twin, over caches that are NaN wherever no row looks; see tests/kernels/test_paged_attention.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncengine.errors import ConfigError
from asyncengine.kernels.cuda.attention import tma_decode, tma_prefill
from asyncengine.kernels.cuda.attention.choose import Limits, describe, paged_tiles
from asyncengine.kernels.cuda.attention.plan import AttentionPlan, LayerKind
from asyncengine.kernels.cuda.attention.run import launch_all
from asyncengine.kernels.cuda.attention.work.items import BEGIN, PIECES
from asyncengine.kernels.cuda.attention.work.lists import WorkList
from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.linear.plan import Plan
from asyncengine.kernels.cuda.linear.tma import tma_linear
from asyncengine.kernels.cuda.rows.rotary import rotary_store_kv, store_kv
from asyncengine.kernels.cuda.step.bucket import Bucket
from asyncengine.kernels.ops import split_heads
from tests.gpu.conftest import needs_hopper
from tests.gpu.test_tma_decode import EDGES
from tests.kernels.poison import poison_new_memory
from tests.kernels.test_paged_attention import Case, World, check, make_world

pytestmark = needs_hopper

MODELS: dict[str, dict[str, int]] = {
    "gpt2": {"num_kv_heads": 3, "group": 1, "head_dim": 64},
    "qwen3": {"num_kv_heads": 2, "group": 2, "head_dim": 128},
    "llama": {"num_kv_heads": 2, "group": 4, "head_dim": 128},
    "eight heads": {"num_kv_heads": 3, "group": 8, "head_dim": 64},
    "sixteen heads": {"num_kv_heads": 1, "group": 16, "head_dim": 128},
    "seven heads": {"num_kv_heads": 2, "group": 7, "head_dim": 64},
    "window": {"num_kv_heads": 2, "group": 4, "head_dim": 128, "window": 700},
}
"""Heads like those of models, fewer groups of them; and of other sizes. Prompts of the last two are Triton's."""
LENGTHS = ((2, 0), (7, 0), (8, 8), (15, 0), (16, 0), (17, 0), (31, 1), (33, 31), (64, 0), (65, 63), (129, 127))
"""(tokens, tokens before them), about the ends of blocks, tiles and units."""


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


def plan_for(case: Case) -> AttentionPlan:
    """Return the plan of mixed steps."""
    layer = LayerKind(case.shape, case.window)
    return describe(Bucket(64, 2048, False), layer, H200, Limits(64, 2048, 1 << 20, 16))


def make(model: str, rows: tuple[tuple[int, int], ...], **case: Any) -> tuple[World, WorkList]:
    fields = {"dtype": torch.bfloat16, "programs": None, "min_split_tokens": 256, **MODELS[model], **case}
    made = Case(rows, **fields)
    plan = plan_for(made)
    assert any(launch.kernel.startswith("tma") for launch in plan.launches)
    one, several = plan.tile("one"), plan.tile("several")
    assert one
    world = make_world(replace(made, tiles=(one, several)), torch.device("cuda"))
    work = world.work()
    work.build(world.step)
    return world, work


def attend(world: World, work: WorkList, pdl: bool = True) -> Tensor:
    """Attend as ``World.attend`` does, with the engine's choice of kernels."""
    case = world.case
    out = torch.full((len(world.q), case.shape.num_heads * case.head_dim), math.nan, dtype=case.dtype, device="cuda")
    launches = plan_for(case).launches
    launch_all(launches, world.call(work, out, pdl=pdl))
    for section in work.sections:
        assert not section.arrivals.any()
    return out.cpu()


def most_pieces(work: WorkList) -> int:
    assert work.prefill is not None
    return int(work.prefill.items[:, PIECES.value].max())


@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_edges_of_blocks_tiles_and_units(model: str, pdl: bool) -> None:
    world, work = make(model, LENGTHS)
    check(world, attend(world, work, pdl))


@pytest.mark.parametrize("model", MODELS)
def test_a_step_of_prompts_and_rows_of_one_token(model: str) -> None:
    world, work = make(model, ((1, 300), (90, 40), (0, 0), (1, 0), (2, 700), (1, 15), (200, 0)))
    check(world, attend(world, work))


@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_rows_of_one_token_beside_prompts(model: str, pdl: bool) -> None:
    """About the ends of blocks and tiles, and in pieces."""
    world, work = make(model, (*((1, context) for context in (*EDGES, 5000)), (0, 0), (40, 30)))
    assert int(work.decode.items[:, PIECES.value].max()) > 1
    check(world, attend(world, work, pdl))


@pytest.mark.parametrize("rows", [
    ((1, 700), (400, 0)), (*((1, 300 + 7 * i) for i in range(40)), (90, 200)), ((500, 0), (0, 0)), ((1, 90), (0, 0)),
], ids=["one row", "many", "none", "no prompt"])  # fmt: skip
@pytest.mark.parametrize("model", ["gpt2", "qwen3", "llama"])
def test_kernels_beside_one_another(model: str, rows: tuple[tuple[int, int], ...]) -> None:
    """Prompts begin before rows of one token are over: what is before both and behind them is in order all the same.

    Four layers in a graph, since a launch from here takes longer than such a kernel, and since layers share a list.
    """
    world, work = make(model, rows)
    step, shape, count = world.step, world.case.shape, world.case.num_tokens
    dim, width = shape.head_dim, shape.num_heads * shape.head_dim
    heads = torch.randn(count, shape.num_heads + 2 * shape.num_kv_heads, dim, device="cuda").bfloat16()
    step.positions.copy_(torch.cat([context + torch.arange(length) for length, context in rows]))
    cos_sin = torch.randn(world.case.max_context, dim, device="cuda")
    weight, plan = torch.randn(64, width, device="cuda").bfloat16(), Plan("tma", 64, 64, 4, 64, stages=3)
    k, v, slots = world.k, world.v, step.slot_mapping[:count]
    block, offset = slots // 16, slots % 16
    nothing = k.new_full((count, shape.num_kv_heads, dim), math.nan)

    def layer(pdl: bool) -> tuple[Tensor, Tensor]:
        x = heads.clone()
        _, new_k, new_v = split_heads(x, shape.num_heads)
        out, y = heads.new_full((count, width), math.nan), heads.new_full((count, 64), math.nan)
        k[block, :, offset] = nothing
        v[block, :, offset] = nothing
        if model == "gpt2":
            store_kv(new_k, new_v, slots, k, v, pdl=pdl)
        else:
            rotary_store_kv(x, shape.num_heads, None, None, 0.0, cos_sin, step.positions, slots, k, v, pdl=pdl)
        launch_all(plan_for(world.case).launches, world.call(work, out, heads=x, pdl=pdl))
        tma_linear(out, weight, plan, out=y, pdl=pdl)
        return out, y

    expected = layer(pdl=False)
    assert not expected[1].isnan().any()
    layer(pdl=True)  # compiled, before it is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers = [layer(pdl=True) for _ in range(4)]
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        for result in layers:
            for got, wanted in zip(result, expected, strict=True):
                assert torch.equal(got, wanted)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("programs", [1, 6, 24])
def test_programs_of_many_items(model: str, programs: int) -> None:
    """Copies go on across items, and teams are cut within units."""
    world, work = make(model, ((300, 77), (128, 128), (0, 0), (37, 500), (256, 0)), programs=programs)
    check(world, attend(world, work))


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("rows", [((100, 3000),), ((64, 5000), (3, 1), (500, 900))], ids=["one", "several"])
def test_units_in_pieces(model: str, rows: tuple[tuple[int, int], ...]) -> None:
    """Results are right, and the same bit for bit, whichever piece comes last."""
    world, work = make(model, rows)
    assert most_pieces(work) > 2
    out = attend(world, work)
    check(world, out)
    for _ in range(5):
        assert torch.equal(attend(world, work).nan_to_num(), out.nan_to_num())


def test_pieces_in_which_some_rows_see_nothing() -> None:
    """The last piece begins behind the first tokens."""
    world, work = make("gpt2", ((128, 2000),), programs=9, min_split_tokens=7 * 128)
    assert work.prefill is not None
    assert work.prefill.items[:, BEGIN.value].max() * work.prefill.tile.keys > 2000
    check(world, attend(world, work))


def test_a_step_leaves_nothing_to_the_next() -> None:
    large, work = make("qwen3", ((900, 0), (1, 90), (300, 1500)))
    small, _ = make("qwen3", ((0, 0), (20, 3), (1, 5)), seed=1)
    empty, _ = make("qwen3", ((0, 0), (0, 0), (1, 7)))
    for world in (large, small, empty, large):
        work.build(world.step)
        check(world, attend(world, work))


def test_lists_for_other_kernels_are_refused() -> None:
    world, work = make("llama", ((40, 0),))
    out = torch.empty_like(world.q.flatten(1))
    apart = torch.empty(*world.q.shape[:2], 2 * world.q.shape[2], dtype=world.q.dtype, device="cuda")
    apart = apart[:, :, : world.q.shape[2]]
    plain = replace(world, case=replace(world.case, tiles=paged_tiles(world.case.shape, H200))).work()
    one, several = plan_for(world.case).launches
    layer = world.case.layer

    def call(run, launch, heads=world.q, layer=layer, work=work):
        run(launch, world.call(work, out, heads=heads, layer=layer))

    for other in (plain, replace(work, prefill=work.decode)):
        with pytest.raises(ConfigError, match="another kernel"):
            call(tma_prefill.run, several, work=other)
    with pytest.raises(ConfigError, match="another kernel"):
        call(tma_prefill.run, several, layer=layer._replace(softcap=50.0))
    with pytest.raises(ConfigError, match="the work list is for another kernel"):
        call(tma_decode.run, one, work=plain)
    for run, launch in ((tma_decode.run, one), (tma_prefill.run, several)):
        with pytest.raises(ConfigError, match="the work list is of window 64"):
            call(run, launch, work=replace(work, window=64))
    with pytest.raises(ConfigError, match="elements apart"):
        call(tma_decode.run, one, heads=apart)
