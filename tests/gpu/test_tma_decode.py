"""Decode attention whose keys flow through shared memory, which Triton's interpreter cannot run.

Against a float64 twin, over caches that are NaN wherever no row looks; see tests/kernels/test_decode_attention.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncengine.errors import ConfigError
from asyncengine.kernels.cuda.attention.choose import tma_decode_tile
from asyncengine.kernels.cuda.attention.plan import Launch, LayerKind, Tile
from asyncengine.kernels.cuda.attention.run import launch_all
from asyncengine.kernels.cuda.attention.work.items import FIRST, LAST, PIECES
from asyncengine.kernels.cuda.attention.work.lists import WorkList
from asyncengine.kernels.cuda.gpu import H200
from tests.gpu.conftest import needs_hopper
from tests.kernels.poison import poison_new_memory
from tests.kernels.test_decode_attention import Decode, make_decode
from tests.kernels.test_paged_attention import Case, check, make_world

pytestmark = needs_hopper

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"num_kv_heads": 3, "group": 1, "head_dim": 64, "norm": False, "rotary": False},
    "qwen3": {"num_kv_heads": 2, "group": 2, "head_dim": 128},
    "llama": {"num_kv_heads": 2, "group": 4, "head_dim": 128, "norm": False},
    "seven heads": {"num_kv_heads": 3, "group": 7, "head_dim": 64},
    "five heads": {"num_kv_heads": 3, "group": 5, "head_dim": 128, "norm": False, "rotary": False},
    "eight heads": {"num_kv_heads": 2, "group": 8, "head_dim": 128},
    "gpt-oss": {"num_kv_heads": 2, "group": 8, "head_dim": 64, "norm": False},
    "gemma-3": {"num_kv_heads": 2, "group": 2, "head_dim": 256},
    "qwen3.5": {"num_kv_heads": 2, "group": 4, "head_dim": 256},
    "eight wide heads": {"num_kv_heads": 1, "group": 8, "head_dim": 256},
    "five wide heads": {"num_kv_heads": 3, "group": 5, "head_dim": 256, "norm": False, "rotary": False},
}
"""Heads like those of models, fewer groups of them; and of other sizes."""
EDGES = (0, 1, 2, 15, 16, 17, 31, 48, 63, 64, 65, 79, 80, 127, 128, 129, 255, 300)
"""Tokens before the new one, about the ends of blocks and tiles."""


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


def make(
    model: str, contexts: tuple[int | None, ...], *, programs_per_sm: int = 2, stages: int = 0, **case: Any
) -> Decode:
    """Rows of one token after so many; None is a row of none. The tile and the grid are the engine's, of many rows, or
    of few if only those are for such heads."""
    fields = {"dtype": torch.bfloat16, "programs": None, "min_split_tokens": 256, **MODELS[model], **case}
    norm, rotary = fields.pop("norm", True), fields.pop("rotary", True)
    rows = tuple((0, 0) if context is None else (1, context) for context in contexts)
    made = Case(rows, **fields)
    tile = tma_decode_tile(LayerKind(made.shape), H200, 16)
    if tile is None:
        tile = Tile(16, 64, 4, stages or 3, 1)
    else:
        most = 6 if programs_per_sm == 1 else tile.stages
        tile = replace(tile, stages=stages or most, programs_per_sm=programs_per_sm)
    decode = make_decode(replace(made, tiles=(tile, None)), torch.device("cuda"), norm, rotary)
    return replace(decode, kernel="tma_decode")


def most_pieces(work: WorkList) -> int:
    return int(work.decode.items[:, PIECES.value].max())


@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_edges_of_blocks_and_tiles(model: str, pdl: bool) -> None:
    decode = make(model, EDGES)
    decode.check(decode.world.work(), pdl)


@pytest.mark.parametrize("window", [1, 33, 64, 1000])
@pytest.mark.parametrize("model", ["gpt2", "qwen3", "gemma-3"])
def test_windows(model: str, window: int) -> None:
    decode = make(model, (*EDGES, 700), window=window)
    decode.check(decode.world.work(), pdl=True)


@pytest.mark.parametrize(
    ("contexts", "case"),
    [
        ((5000,), {}),
        ((20000,), {}),
        ((5000, 37, 2900, 1, 640, 1500), {}),
        ((3000, 40, 2000, 700), {"window": 700, "min_split_tokens": 64}),
        (EDGES, {"min_split_tokens": 64}),
    ],
    ids=["one row", "more pieces than are read at once", "ragged", "window", "finely"],
)
@pytest.mark.parametrize("model", ["gpt2", "qwen3", "qwen3.5"])
def test_rows_in_pieces(model: str, contexts: tuple[int, ...], case: dict[str, Any]) -> None:
    decode = make(model, contexts, **case)
    work = decode.world.work()
    decode.check(work, pdl=True)
    assert most_pieces(work) > 1


@pytest.mark.parametrize("model", ["gpt-oss", "qwen3", "qwen3.5"])
@pytest.mark.parametrize("window", [0, 128])
def test_sinks_take_their_part_of_the_softmax(model: str, window: int) -> None:
    """In whole units, and without a window in those of few and of many pieces."""
    heads = MODELS[model]["num_kv_heads"] * MODELS[model]["group"]
    sinks = torch.linspace(-3, 12, heads, device="cuda")
    decode = make(model, (*EDGES, None, 20000, 900), sinks=sinks, window=window, min_split_tokens=64)
    work = decode.world.work()
    decode.check(work, pdl=True)
    assert (most_pieces(work) > 1) == (window == 0)
    without = make(model, (*EDGES, None, 20000, 900), window=window, min_split_tokens=64)
    caches = decode.world.k.clone(), decode.world.v.clone()
    assert not torch.equal(decode.attend(*caches, work), without.attend(*caches, work))


@pytest.mark.parametrize("model", ["gpt2", "llama", "gemma-3"])
@pytest.mark.parametrize("programs", [1, 24, None], ids=["one team", "few programs", "all"])
def test_many_rows(model: str, programs: int | None) -> None:
    """Programs take several items, whose tiles they ask for without a pause."""
    random = torch.Generator().manual_seed(1)
    contexts = tuple(torch.randint(0, 500, (40,), generator=random).tolist())
    decode = make(model, (None, *contexts, None), programs=programs)
    decode.check(decode.world.work(), pdl=True)


@pytest.mark.parametrize("model", ["gpt2", "qwen3"])
def test_a_full_batch(model: str) -> None:
    decode = make(model, (288,) * 128)
    decode.check(decode.world.work(), pdl=True)


@pytest.mark.parametrize("model", ["gpt2", "qwen3"])
@pytest.mark.parametrize("contexts", [(287,) * 48, (900, *EDGES, None, *EDGES, 640)], ids=["alike", "ragged"])
@pytest.mark.parametrize("programs", [12, 24])
def test_late_teams(model: str, contexts: tuple[int | None, ...], programs: int) -> None:
    """Late teams follow the others on the line, and rows that the line cuts between both are put together."""
    decode = make(model, contexts, programs=programs, late=True)
    work = decode.world.work()
    decode.check(work, pdl=True)
    items = work.decode.team_items[-work.decode.late_teams :]
    assert (items[:, FIRST.value] < items[:, LAST.value]).any()


def test_late_teams_find_room_when_others_end() -> None:
    decode = make("qwen3", (288,) * 800, late=True)
    work = decode.world.work()
    assert work.decode.teams == 2 * work.decode.late_teams
    decode.check(work, pdl=True)


# ---- units cut apart ----


@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize("grid", [{"programs_per_sm": 1}, {}, {"stages": 1}], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_edges_apart(model: str, grid: dict[str, int], pdl: bool) -> None:
    """Idle teams too, where rows are not to be cut."""
    decode = make(model, (None, *EDGES, None), whole_tokens=128, **grid)
    decode.check(decode.world.work(), pdl)


@pytest.mark.parametrize(
    ("whole_tokens", "grid"), [(320, {"programs_per_sm": 1}), (320, {}), (64, {"stages": 1})], ids=str
)
@pytest.mark.parametrize("contexts", [(287,), (287,) * 8, (700, 5, 287, 544, 64), (5000, 37, 1500), (20000,)], ids=str)
@pytest.mark.parametrize("model", ["gpt2", "qwen3", "llama", "qwen3.5", "eight wide heads"])
def test_pieces_apart(model: str, contexts: tuple[int, ...], grid: dict[str, int], whole_tokens: int) -> None:
    decode = make(model, contexts, whole_tokens=whole_tokens, **grid)
    work = decode.world.work()
    decode.check(work, pdl=True)
    assert (most_pieces(work) > 1) == (max(contexts) // 64 + 1 > whole_tokens // 64)


@pytest.mark.parametrize("window", [1, 33, 64, 150, 1000])
@pytest.mark.parametrize("whole_tokens", [64, 128])
@pytest.mark.parametrize("model", ["qwen3", "gemma-3"])
def test_windows_apart(model: str, window: int, whole_tokens: int) -> None:
    """Only the end of a first piece may be in the window."""
    decode = make(model, (*EDGES, 700, 2000), window=window, whole_tokens=whole_tokens)
    decode.check(decode.world.work(), pdl=True)


@pytest.mark.parametrize("programs", [36, 40, 264])
def test_teams_apart(programs: int) -> None:
    """There are as many teams as rows, a few more, and many that stay idle."""
    random = torch.Generator().manual_seed(1)
    contexts = tuple(torch.randint(0, 500, (18,), generator=random).tolist())
    decode = make("llama", contexts, programs=programs, whole_tokens=64)
    decode.check(decode.world.work(), pdl=True)


def test_a_step_apart_leaves_nothing_to_the_next() -> None:
    """A list that had many pieces has few, then none, then many again."""
    large = make("qwen3", (1500, 37, 2900), whole_tokens=64)
    work = large.world.work()
    for contexts in ((1500, 37, 2900), (20, None, 3), (None, None, None), (None, 700, 1), (1500, 37, 2900)):
        decode = make("qwen3", contexts, whole_tokens=128)
        decode.check(work, pdl=True)


def test_results_apart_are_the_same_each_time() -> None:
    decode = make("llama", (544, 287, 700, 1, 640), whole_tokens=64)
    work = decode.world.work()
    once, *more = (decode.attend(decode.world.k.clone(), decode.world.v.clone(), work, pdl=True) for _ in range(20))
    for again in more:
        assert torch.equal(again.nan_to_num(), once.nan_to_num())


# ---- either way ----


@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize("window", [0, 150])
@pytest.mark.parametrize("model", ["qwen3", "gemma-3", "eight wide heads"])
def test_heads_that_another_kernel_prepared(model: str, window: int, pdl: bool) -> None:
    """New keys and values come from the cache, queries are taken as they are."""
    decode = make(model, (None, *EDGES, 700, 2000, None), window=window, whole_tokens=128)
    case = decode.world.case
    world = make_world(case, torch.device("cuda"))
    work = world.work()
    work.build(world.step)
    out = torch.full((len(world.q), case.shape.num_heads * case.head_dim), math.nan).to(world.q)
    launch_all([Launch("tma_decode", work.decode.tile, "one", stored=True)], world.call(work, out, pdl=pdl))
    check(world, out.cpu())


def test_no_slot_is_no_write() -> None:
    """A row without a slot writes nothing, and the new token is seen all the same."""
    decode = make("qwen3", (5, 64, 700))
    with_slots = decode.attend(decode.world.k.clone(), decode.world.v.clone(), decode.world.work())
    decode.world.step.slot_mapping.fill_(-1)
    k, v = decode.world.k.clone(), decode.world.v.clone()
    out = decode.attend(k, v, decode.world.work())
    assert torch.equal(out[:3], with_slots[:3])
    assert not out[:3].isnan().any()
    for after, before in ((k, decode.world.k), (v, decode.world.v)):
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


def test_results_are_the_same_each_time() -> None:
    """Results do not depend on which of a row's pieces comes last, or on earlier uses of the list."""
    decode = make("llama", (5000, 37, 2900, 1, 640, 1500))
    work = decode.world.work()
    once, *more = (decode.attend(decode.world.k.clone(), decode.world.v.clone(), work, pdl=True) for _ in range(20))
    for again in more:
        assert torch.equal(again.nan_to_num(), once.nan_to_num())


def test_cache_hints_change_no_result() -> None:
    """Hints change no result for whole blocks and for halves."""
    decode = make("qwen3", (287, 290, 17, 1000))
    hinted, plain = (
        decode.attend(decode.world.k.clone(), decode.world.v.clone(), decode.world.work(), l2_cache_hints=hints)
        for hints in (True, False)
    )
    assert torch.equal(hinted.nan_to_num(), plain.nan_to_num())


def test_what_is_for_another_kernel_is_refused() -> None:
    decode = make("qwen3", (20,))
    right = decode.world.work()
    with pytest.raises(ConfigError, match="work list"):
        decode.attend(decode.world.k, decode.world.v, replace(right, window=8))
    other_tile = replace(right, decode=replace(right.decode, tile=replace(right.decode.tile, keys=32)))
    with pytest.raises(ValueError, match="another kernel"):
        decode.attend(decode.world.k, decode.world.v, other_tile)
    capped = replace(decode, world=replace(decode.world, case=replace(decode.world.case, softcap=50.0)))
    with pytest.raises(ValueError, match="another kernel"):
        capped.attend(decode.world.k, decode.world.v, right)
    large_blocks = make("qwen3", (20,), block_size=32)
    with pytest.raises(ValueError, match="another kernel"):
        large_blocks.attend(large_blocks.world.k, large_blocks.world.v, large_blocks.world.work())
