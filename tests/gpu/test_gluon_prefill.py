"""Attention of prompts by two warp groups and the accelerator's copies, which Triton's interpreter cannot run.

Against a float64 twin, over caches that are NaN wherever no row looks; see tests/kernels/test_triton_attention.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncengine.errors import ConfigError
from asyncengine.kernels.cuda import attend_stored
from asyncengine.kernels.gluon_paged_prefill import streamed_prefill_attention
from asyncengine.kernels.work_items import BEGIN, PIECES
from asyncengine.kernels.work_list import WorkList, choose_mixed_tiles, choose_tiles
from tests.gpu.conftest import needs_hopper
from tests.kernels.poison import poison_new_memory
from tests.kernels.test_triton_attention import Case, World, check, make_world

pytestmark = needs_hopper

MODELS: dict[str, dict[str, int]] = {
    "gpt2": {"num_kv_heads": 3, "group": 1, "head_dim": 64},
    "qwen3": {"num_kv_heads": 2, "group": 2, "head_dim": 128},
    "llama": {"num_kv_heads": 2, "group": 4, "head_dim": 128},
    "eight heads": {"num_kv_heads": 3, "group": 8, "head_dim": 64},
    "sixteen heads": {"num_kv_heads": 1, "group": 16, "head_dim": 128},
}
"""Heads like those of models, fewer groups of them; and of other sizes."""
LENGTHS = ((2, 0), (7, 0), (8, 8), (15, 0), (16, 0), (17, 0), (31, 1), (33, 31), (64, 0), (65, 63), (129, 127))
"""(tokens, tokens before them), about the ends of blocks, tiles and units."""


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


def make(model: str, rows: tuple[tuple[int, int], ...], **case: Any) -> tuple[World, WorkList]:
    fields = {"dtype": torch.bfloat16, "programs": None, "min_split_tokens": 256, **MODELS[model], **case}
    made = Case(rows, **fields)
    tiles = choose_mixed_tiles(made.shape, 16, 0)
    assert tiles is not None
    world = make_world(replace(made, tiles=tiles), torch.device("cuda"))
    work = world.work()
    work.build(world.step)
    return world, work


def attend(world: World, work: WorkList, pdl: bool = True) -> Tensor:
    """As ``World.attend``, with the engine's choice of kernels."""
    case = world.case
    out = torch.full((len(world.q), case.shape.num_heads * case.head_dim), math.nan, dtype=case.dtype, device="cuda")
    attend_stored(world.q, world.k, world.v, world.step, work, case.head_dim**-0.5, 0, out, pdl=pdl)
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


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("programs", [1, 6, 24])
def test_programs_of_many_items(model: str, programs: int) -> None:
    """Copies go on across items, and lanes are cut within units."""
    world, work = make(model, ((300, 77), (128, 128), (0, 0), (37, 500), (256, 0)), programs=programs)
    check(world, attend(world, work))


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("rows", [((100, 3000),), ((64, 5000), (3, 1), (500, 900))], ids=["one", "several"])
def test_units_in_pieces(model: str, rows: tuple[tuple[int, int], ...]) -> None:
    """And the same bit for bit, whichever piece comes last."""
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
    plain = replace(world, case=replace(world.case, tiles=choose_tiles(world.case.shape))).work()
    for other in (plain, work.decode_only, replace(work, window=64)):
        with pytest.raises(ConfigError, match="another kernel"):
            streamed_prefill_attention(world.q, world.k, world.v, world.step, other, 1.0, out)
