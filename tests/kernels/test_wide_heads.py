"""Heads of 512, layers that norm values, and layers that share keys and values, against plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from asyncengine.errors import ConfigError
from asyncengine.kernels.cpu.reference import ReferenceOps
from asyncengine.kernels.cuda.attention.choose import Limits, describe, fixed_tile, paged_tiles
from asyncengine.kernels.cuda.attention.plan import AttentionShape, LayerKind, Tile
from asyncengine.kernels.cuda.attention.run import PlannedAttention, StepAttention
from asyncengine.kernels.cuda.gpu import A100, H200, INTERPRETER, KNOWN, L40S, Gpu
from asyncengine.kernels.cuda.rows.rotary import rotary_store_kv, rotate_queries
from asyncengine.kernels.cuda.step.bucket import Bucket
from asyncengine.kernels.ops import HeadNorms, LayerKVCache
from tests.kernels.poison import poison_new_memory
from tests.kernels.test_decode_attention import check_prompts_as_rows, make_decode
from tests.kernels.test_paged_attention import Case, World, check, make_world
from tests.kernels.test_rows import assert_near_or_poisoned, expected_cache, random, rotary_case, rotary_twin

WIDEST = Case(((1, 40), (9, 20), (1, 0)), num_kv_heads=1, group=4, head_dim=512, tiles=None)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


@pytest.mark.parametrize(("window", "split_tokens"), [(0, 0), (17, 0), (0, 32)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_attention_of_the_widest_heads(
    device: torch.device, dtype: torch.dtype, window: int, split_tokens: int
) -> None:
    """The tiles are those of a card."""
    world = make_world(replace(WIDEST, dtype=dtype, window=window, split_tokens=split_tokens), device)
    work = world.work()
    work.build(world.step)
    check(world, world.attend(work))


@pytest.mark.parametrize("way", ["work list", "few keys", "few keys, stored"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_attention_of_the_widest_heads(device: torch.device, dtype: torch.dtype, way: str) -> None:
    case = replace(WIDEST, rows=((1, 37), (0, 0), (1, 5)), dtype=dtype)
    if way == "few keys, stored":
        check_prompts_as_rows(replace(case, rows=((1, 37), (3, 0)), group=2), device, pieces=2)
        return
    decode = make_decode(case, device)
    decode.check(decode.world.work().decode_only if way == "work list" else 2)


# ---- tiles and plans ----


@pytest.mark.parametrize("card", KNOWN, ids=lambda card: card.name)
@pytest.mark.parametrize("group", [1, 8, 64])
def test_tiles_of_the_widest_heads_leave_registers_for_their_results(card: Gpu, group: int) -> None:
    """A thread has at most half of its 255 registers for results, but of groups that are larger than a tile."""
    for dtype in DTYPES:
        shape = AttentionShape(group, 1, 512, dtype)
        for tile in (*paged_tiles(shape, card), fixed_tile(shape, card)):
            assert tile.rows >= group
            assert tile.rows * 512 <= max(128, 8 * group) * 32 * tile.warps


def test_a_third_stage_is_for_cards_with_room() -> None:
    shape = AttentionShape(16, 2, 512, torch.bfloat16)
    assert [paged_tiles(shape, card)[1].stages for card in (A100, H200, L40S)] == [3, 3, 2]
    assert paged_tiles(shape, H200)[0] == Tile(16, 16, 4, 3, 2)


@pytest.mark.parametrize("dim", [64, 256, 512])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_layers_whose_heads_are_prepared_have_them_prepared_in_every_step(dim: int, batch_invariant: bool) -> None:
    limits = Limits(64, 512, 4096, 16, batch_invariant)
    kind = LayerKind(AttentionShape(16, 2, dim, torch.bfloat16), prepared=True)
    for bucket in (Bucket(1, 1, True, 64), Bucket(1, 1, True), Bucket(64, 64, True), Bucket(64, 512, False)):
        for card in KNOWN:
            plan = describe(bucket, kind, card, limits)
            assert plan.prepares
            assert all(launch.stored and launch.kernel != "paged_decode" for launch in plan.launches)


# ---- layers ----


@pytest.mark.parametrize("dim", [2, 48, 512])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_normed_and_not_rotated(device: torch.device, dtype: torch.dtype, dim: int) -> None:
    heads, cos_sin, positions, slots, caches = rotary_case(5, 3, 2, dim, 16, dtype, 1)
    norms = [random(dim, dtype=dtype, seed=seed) for seed in (2, 3, 4)]
    q, k, v = rotary_twin(heads, 3, (norms[0], norms[1]), cos_sin, positions)
    ReferenceOps().head_rms_norm_(v, norms[2], 1e-6)
    x, k_cache, v_cache, q_norm, k_norm, v_norm, table = (
        tensor.clone().to(device) for tensor in (heads, *caches, *norms, cos_sin)
    )
    at, to = positions.to(device), slots.to(device)
    rotary_store_kv(x, 3, q_norm, k_norm, 1e-6, table, at, to, k_cache, v_cache, v_norm=v_norm)
    assert_near_or_poisoned(x[slots >= 0, :3], q[slots >= 0])
    assert torch.equal(x[:, 3:].cpu(), heads[:, 3:])
    assert_near_or_poisoned(k_cache, expected_cache(caches[0], slots, k))
    assert_near_or_poisoned(v_cache, expected_cache(caches[1], slots, v))
    with pytest.raises(ValueError, match="v_norm with both"):
        rotary_store_kv(x, 3, None, None, 1e-6, table, at, to, k_cache, v_cache, v_norm=v_norm)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_without_keys_are_prepared_alike(device: torch.device, dtype: torch.dtype, norm: bool) -> None:
    heads, cos_sin, positions, slots, _ = rotary_case(5, 3, 1, 512, 16, dtype, 2)
    gain = random(512, dtype=dtype, seed=3)
    q, _, _ = rotary_twin(heads, 3, (gain, gain) if norm else None, cos_sin, positions)
    x = heads[:, :3].contiguous().to(device)
    before, table = x.clone(), cos_sin.to(device)
    gains = gain.to(device) if norm else None
    rotate_queries(x, gains, 1e-6, table, positions.to(device), slots.to(device))
    assert_near_or_poisoned(x[slots >= 0], q[slots >= 0])
    assert torch.equal(x[slots < 0], before[slots < 0])
    with pytest.raises(ValueError, match="no halves"):
        rotate_queries(x[:, :, :5].contiguous(), None, 1e-6, table, positions.to(device), slots.to(device))


def planned(world: World, bucket: Bucket, *, prepared: bool) -> PlannedAttention:
    case = world.case
    kind = LayerKind(case.shape, case.window, prepared=prepared)
    attention = StepAttention([kind], Limits(8, 32, 128, case.block_size), INTERPRETER, world.q.device).of(bucket)
    attention.build(world.step, pdl=False)
    return attention.of(world.case.layer, case.num_kv_heads, case.head_dim)


@pytest.mark.parametrize("bucket", [Bucket(3, 3, True, 64), Bucket(3, 3, True), Bucket(3, 32, False)], ids=str)
def test_a_layer_that_shares_reads_what_an_earlier_one_stored(device: torch.device, bucket: Bucket) -> None:
    """The heads are queries alone, and the cache stays as it is."""
    single = bucket.single_token_rows
    case = replace(WIDEST, rows=((1, 40), (1, 0), (1, 9)) if single else WIDEST.rows, head_dim=32, window=11)
    world = make_world(case, device, spare_tokens=0)
    step = world.step
    for row, (length, context) in enumerate(case.rows):
        first = int(step.row_query_start[row])
        step.positions[first : first + length] = torch.arange(context, context + length)
        step.token_slot[first : first + length] = step.row_slot[row]
    before, heads = [cache.clone() for cache in (world.k, world.v)], world.q.flatten(1).clone()
    layer = case.layer._replace(shares=True)
    cache = LayerKVCache(world.k, world.v)
    check(world, planned(world, bucket, prepared=True)(heads, layer, cache, step).cpu())
    for after, was in zip((world.k, world.v), before, strict=True):
        assert torch.equal(after.nan_to_num(), was.nan_to_num())
    if single:
        ones = torch.ones(32, device=device)
        norming = case.layer._replace(norms=HeadNorms(ones, ones, 1e-6, ones), cos_sin=torch.ones(64, 32).to(device))
        others = planned(world, bucket, prepared=False)
        for wrong in (layer, norming):
            with pytest.raises(ConfigError, match="share keys and values or norm values"):
                others(heads, wrong, cache, step)
