"""Choice of attention kernels and tiles, for cards that need not be there."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from asyncengine.kernels.cuda import gpu
from asyncengine.kernels.cuda.attention import choose
from asyncengine.kernels.cuda.attention.choose import (
    Limits,
    describe,
    describe_all,
    few_keys_context,
    fixed_tile,
    late_context,
    paged_tiles,
    short_context,
    short_mixed_context,
    takes_tma_decode,
    tma_decode_tile,
    tma_prefill_tile,
)
from asyncengine.kernels.cuda.attention.plan import AttentionPlan, AttentionShape, Cut, Launch, LayerKind, Tile
from asyncengine.kernels.cuda.attention.work.lists import StepWork, WorkList
from asyncengine.kernels.cuda.gpu import H200, Gpu
from asyncengine.runner.steps.buckets import Bucket, choose_buckets

BF16 = torch.bfloat16
SHAPES = {
    "gpt2": AttentionShape(12, 12, 64, BF16),
    "qwen3-0.6b": AttentionShape(16, 8, 128, BF16),
    "llama-3.1-8b": AttentionShape(32, 8, 128, BF16),
}
LLAMA = SHAPES["llama-3.1-8b"]
WIDE = LayerKind(AttentionShape(16, 4, 256, BF16))
"""Layers with heads of 256: on an H200, each of 33 rows has a team of programs with a multiprocessor each."""
LIMITS = Limits(256, 2048, 4096, 16)


def plan_for(bucket: Bucket, layer: LayerKind, card: Gpu = H200, limits: Limits = LIMITS) -> AttentionPlan:
    return describe(bucket, layer, card, limits)


def decode(rows: int, layer: LayerKind, **bucket: int) -> AttentionPlan:
    return plan_for(Bucket(rows, rows, True, **bucket), layer)


def buckets_for(layer: LayerKind, card: Gpu, limits: Limits) -> list[Bucket]:
    def short(rows: int) -> int:
        return short_context(rows, [layer], card, limits)

    def short_mixed(tokens: int) -> int:
        return short_mixed_context(tokens, [layer], card, limits)

    return choose_buckets(limits.max_rows, limits.max_tokens, limits.max_context, short, short_mixed)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("window", [0, 512])
@pytest.mark.parametrize("shape", [*SHAPES.values(), WIDE.shape], ids=[*SHAPES, "wide"])
@pytest.mark.parametrize("card", gpu.KNOWN, ids=lambda card: card.name)
def test_every_card_has_a_plan_for_every_bucket(
    card: Gpu, shape: AttentionShape, window: int, batch_invariant: bool
) -> None:
    """Each plan covers all rows once, asks for nothing that the card lacks, and finds the memory that it works in."""
    limits = replace(LIMITS, max_rows=64, max_tokens=512, max_context=1024, batch_invariant=batch_invariant)
    layer = LayerKind(shape, window)
    plans = describe_all(layer, card, limits)
    room = {"max_rows": limits.max_rows, "max_tokens": limits.max_tokens, "max_context": limits.max_context}
    work = StepWork(list(plans), **room, gpu=card, device=torch.device("meta"))
    for bucket in buckets_for(layer, card, limits):
        plan = plan_for(bucket, layer, card, limits)
        assert [launch.rows for launch in plan.launches] in (["one"], ["any"], ["one", "several"], ["several", "one"])
        assert not (bucket.single_token_rows and plan.tile("several"))
        assert not (not bucket.single_token_rows and plan.tile("one") and not plan.tile("several"))
        assert plan.prepares == (not bucket.single_token_rows or batch_invariant)
        assert isinstance(work.of(plan), WorkList) == (plan.cut is not None)
        assert str(plan)
        for launch in plan.launches:
            assert not launch.kernel.startswith("tma") or card.tma
            if isinstance(memory := work.of(plan), WorkList):
                assert memory.section(launch, layer)
        if batch_invariant:
            assert plan.cut == Cut("fixed", 1024)
    with pytest.raises(KeyError):
        work.of(plan_for(Bucket(8, 8, False), layer._replace(window=77), card, limits))


def test_capped_scores_are_for_kernels_that_cap_them() -> None:
    """A card with the accelerator takes the other kernels, and the buckets are those of a card without."""
    layer = LayerKind(LLAMA, softcap=50.0)
    plain = replace(H200, tma=False)
    for rows in (1, 8, 40, 256):
        assert {launch.kernel for launch in decode(rows, layer).launches} <= {"few_keys", "paged_decode"}
    assert {launch.kernel for launch in plan_for(Bucket(64, 512, False), layer).launches} == {"paged"}
    assert buckets_for(layer, H200, LIMITS) == buckets_for(LayerKind(LLAMA), plain, LIMITS)


@pytest.mark.parametrize("card", gpu.KNOWN, ids=lambda card: card.name)
def test_tiles_of_wide_heads_shrink_where_shared_memory_is_small(card: Gpu) -> None:
    """test_compile.py shows that these have room, and the tiles of other heads as they are."""
    wide = AttentionShape(8, 4, 256, BF16)
    small = card == gpu.L40S
    assert paged_tiles(wide, card)[1] == (Tile(64, 16, 4, 3, 1) if small else Tile(128, 32, 8, 3, 1))
    assert fixed_tile(wide, card) == Tile(64, 16 if small else 32, 4, 3, 2)
    for shape in SHAPES.values():
        assert paged_tiles(shape, card) == paged_tiles(shape, H200)
        assert fixed_tile(shape, card) == fixed_tile(shape, H200)


def test_a_plan_in_words() -> None:
    layer = LayerKind(LLAMA)
    tile = "[16 x 64, 4 warps, 3 stages]"
    words = f"tma_decode {tile} for rows of one token; cut along the line, late teams (formula)"
    assert str(decode(256, layer)) == words
    mixed = str(plan_for(Bucket(64, 512, False), layer))
    assert mixed.startswith("rotary and store; tma_decode [")
    assert "tma_prefill [128 x 128, 8 warps, 2 stages] for rows of several tokens; cut along the line" in mixed


def test_which_layers_tma_decode_is_for() -> None:
    shape = AttentionShape(16, 8, 128, BF16)
    assert tma_decode_tile(LayerKind(shape), H200, 16) == Tile(16, 64, 4, 3, 2)
    assert tma_decode_tile(LayerKind(replace(shape, head_dim=64), 700), H200, 16) == Tile(16, 64, 4, 6, 2)
    assert decode(2, LayerKind(shape)).tile("one") == Tile(16, 64, 4, 6, 1)
    assert decode(2, LayerKind(replace(shape, head_dim=64))).tile("one") == Tile(16, 64, 4, 6, 1)
    assert tma_decode_tile(LayerKind(shape), H200, 32) is None
    assert tma_decode_tile(LayerKind(shape), gpu.A100, 16) is None
    assert decode(2, LayerKind(replace(shape, head_dim=64), 128, sinks=True)).launches[0].kernel == "tma_decode"
    for other in ({"dtype": torch.float32}, {"head_dim": 80}, {"num_heads": 80}):
        assert tma_decode_tile(LayerKind(replace(shape, **other)), H200, 16) is None


@pytest.mark.parametrize("window", [0, 512])
@pytest.mark.parametrize("prepared", [False, True])
def test_few_rows_of_wide_heads_take_tma_decode(window: int, prepared: bool) -> None:
    """Steps take it at any context, as long as each row has a team with multiprocessors to itself."""
    layer = WIDE._replace(window=window, prepared=prepared)
    launch = Launch("tma_decode", Tile(16, 64, 4, 3, 1), "one", stored=prepared)
    for rows in (2, 8, 33):
        assert decode(rows, layer) == AttentionPlan(layer, (launch,), Cut("apart", 512))
        assert decode(rows, layer, max_context=64) == decode(rows, layer)
        assert short_context(rows, [layer], H200, LIMITS) == 0
    for rows in (1, 34, 256):
        assert decode(rows, layer).launches[0].kernel == ("paged" if prepared else "paged_decode")
        assert short_context(rows, [layer], H200, LIMITS) == few_keys_context(rows, layer.shape, H200)
        assert late_context(rows, layer, H200, 16) is None
    assert decode(1, layer, max_context=64).launches[0].kernel == "few_keys"


def test_which_wide_heads_take_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed steps take paged, and so do layers, blocks and cards that tma_decode is not for."""
    mixed = plan_for(Bucket(8, 512, False), WIDE)
    assert [launch.kernel for launch in mixed.launches] == ["paged", "paged"]
    grouped, float8 = replace(WIDE.shape, num_heads=36), replace(WIDE.shape, float8_cache=True)
    for layer in (WIDE._replace(softcap=50.0), WIDE._replace(shape=grouped), WIDE._replace(shape=float8)):
        assert not takes_tma_decode(8, layer, H200, 16)
    assert not takes_tma_decode(8, WIDE, H200, 32)
    assert not takes_tma_decode(8, WIDE, gpu.A100, 16)
    assert takes_tma_decode(8, WIDE, H200, 16)
    monkeypatch.setattr(choose, "FEWEST_WIDE_ROWS", sys.maxsize)
    assert decode(8, WIDE).launches[0].kernel == "paged_decode"
    assert short_context(8, [WIDE], H200, LIMITS) == few_keys_context(8, WIDE.shape, H200) > 0


def test_layers_with_one_plan_for_all_contexts_leave_short_ones_to_others() -> None:
    """In Gemma 4 layers with a window have heads of 256, the others heads of 512, for which few_keys is faster."""
    widest = LayerKind(AttentionShape(16, 2, 512, BF16), prepared=True)
    wide = LayerKind(AttentionShape(16, 8, 256, BF16), 1024, prepared=True)
    short = short_context(4, [wide, widest], H200, LIMITS)
    assert short == few_keys_context(4, widest.shape, H200) > 0
    assert [decode(4, layer, max_context=short).launches[0].kernel for layer in (wide, widest)] == [
        "tma_decode", "few_keys",
    ]  # fmt: skip


def test_which_kernels_mixed_steps_take() -> None:
    """Kernels are listed in the order of launch."""

    def kernels(
        shape: AttentionShape, window: int = 0, block_size: int = 16, *, sinks: bool = False
    ) -> list[tuple[str, str]]:
        limits = replace(LIMITS, block_size=block_size)
        plan = plan_for(Bucket(64, 512, False), LayerKind(shape, window, sinks=sinks), limits=limits)
        if plan.launches[-1].kernel == "tma_prefill":
            assert plan.launches[-1].beside == (plan.launches[0].kernel == "tma_decode")
        return [(launch.kernel, launch.rows) for launch in plan.launches]

    both = [("tma_decode", "one"), ("tma_prefill", "several")]
    neither = [("paged", "one"), ("paged", "several")]
    assert kernels(LLAMA) == both
    assert kernels(replace(LLAMA, head_dim=64)) == both
    assert tma_prefill_tile(LayerKind(replace(LLAMA, head_dim=64)), H200, 16) == Tile(128, 128, 8, 4, 1)
    assert kernels(replace(LLAMA, num_heads=128)) == [("paged", "one"), ("tma_prefill", "several")]
    assert kernels(replace(LLAMA, num_heads=24)) == [("paged", "several"), ("tma_decode", "one")]
    assert kernels(LLAMA, window=1024) == [("paged", "several"), ("tma_decode", "one")]
    assert kernels(LLAMA, sinks=True) == [("paged", "several"), ("tma_decode", "one")]
    for other in ({"dtype": torch.float32}, {"head_dim": 80}, {"num_heads": 256}):
        assert kernels(replace(LLAMA, **other)) == neither
    assert kernels(LLAMA, block_size=32) == neither
    assert kernels(replace(LLAMA, num_heads=128), window=1024) == neither


def test_rows_of_one_token_share_their_list_with_mixed_steps() -> None:
    layer, cpu = LayerKind(replace(LLAMA, head_dim=80)), torch.device("cpu")
    plans = list(describe_all(layer, H200, LIMITS))
    work = StepWork(plans, max_rows=256, max_tokens=2048, max_context=4096, gpu=H200, device=cpu)
    alone, mixed = work.of(decode(256, layer)), work.of(plan_for(Bucket(64, 512, False), layer))
    assert isinstance(alone, WorkList)
    assert isinstance(mixed, WorkList)
    assert alone.decode is mixed.decode
    assert alone.prefill is None
    assert mixed.prefill is not None


@pytest.mark.parametrize(("heads", "dim", "fewest", "tokens"), [(8, 128, 198, 192), (12, 64, 132, 128)])
def test_which_steps_have_late_teams(heads: int, dim: int, fewest: int, tokens: int) -> None:
    """Late teams are for many rows a team, and for so many tokens that teams are long."""
    layer = LayerKind(AttentionShape(2 * heads, heads, dim, BF16))
    assert late_context(fewest - 1, layer, H200, 16) is None
    assert late_context(fewest, layer, H200, 16) == 320
    assert late_context(256, layer, H200, 16) == tokens
    assert late_context(4096, layer, H200, 16) == 0
    assert late_context(256, layer, H200, 32) is None
    assert decode(256, layer).cut == Cut("late")
    assert decode(256, layer, max_context=tokens).cut == Cut("line")
    assert decode(fewest - 1, layer).cut == Cut("line")


@pytest.mark.parametrize(("shape", "one", "two"), [("qwen3-0.6b", 16, 33), ("llama-3.1-8b", 16, 33), ("gpt2", 11, 22)])
def test_whose_rows_are_cut_apart(shape: str, one: int, two: int) -> None:
    """Rows are cut apart where each has a team, with as few programs as suffice; a lone row is cut by small
    programs."""
    layer = LayerKind(SHAPES[shape])
    lone, *plans = (decode(rows, layer) for rows in range(1, 64))
    assert (lone.tile("one"), lone.cut) == (Tile(16, 64, 4, 1, 2), Cut("apart", 64))
    assert [plan.cut for plan in plans] == [Cut("apart", 512)] * (two - 1) + [Cut("line")] * (63 - two)
    tiles = [plan.tile("one") for plan in plans]
    teams = [tile.count_teams(layer.shape, H200.multiprocessors) for tile in tiles if tile]
    assert teams == [one] * (one - 1) + [two] * (63 - one)


def test_a_lone_row_takes_few_keys_where_heads_share_none() -> None:
    gpt2, llama = LayerKind(SHAPES["gpt2"]), LayerKind(LLAMA)
    short = few_keys_context(1, gpt2.shape, H200)
    assert decode(1, gpt2, max_context=short).launches[0].kernel == "few_keys"
    assert decode(1, gpt2, max_context=short + 1).launches[0].kernel == "tma_decode"
    assert decode(1, llama, max_context=64).launches[0].kernel == "tma_decode"
    assert paged_tiles(LLAMA, H200)[0].rows == 16
