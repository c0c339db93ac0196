"""Fused decode attention, with a work list and without, against plain torch.

The cache is NaN wherever no row looks, and where the new tokens go.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncengine.errors import ConfigError
from asyncengine.kernels.cuda.attention import few_keys, paged, paged_decode
from asyncengine.kernels.cuda.attention.call import KernelCall
from asyncengine.kernels.cuda.attention.choose import few_keys_context, few_keys_pieces, few_keys_tile
from asyncengine.kernels.cuda.attention.plan import AttentionShape, Kernel, Launch
from asyncengine.kernels.cuda.attention.run import launch_all
from asyncengine.kernels.cuda.attention.work.lists import Counters, WorkList
from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.rows.rotary import rotary_store_kv
from asyncengine.kernels.cuda.step.tensors import allocate_step
from asyncengine.kernels.float8_cache import quantize_heads
from asyncengine.kernels.ops import AttentionLayer, HeadNorms, LayerKVCache
from tests.amounts import examples
from tests.kernels.test_paged_attention import SMALL, TOLERANCE, Case, World, backwards, check, make_world, to_device
from tests.kernels.test_paged_attention import cases as attention_cases

Way = WorkList | int | None
"""A work list, or how many pieces at most without one."""


def few_launch(shape: AttentionShape, rows: int, pieces: int | None = None, *, stored: bool = False) -> Launch:
    pieces = pieces or few_keys_pieces(rows, shape.num_heads, shape.head_dim, 8)
    return Launch("few_keys", few_keys_tile(shape), "any" if stored else "one", stored, pieces)


def counters(device: torch.device, count: int = 128) -> Counters:
    return Counters(torch.zeros(count, dtype=torch.int32, device=device))


@dataclass(frozen=True)
class Decode:
    """A world whose rows' new keys and values are not in the cache yet."""

    world: World
    heads: Tensor
    norms: HeadNorms | None
    cos_sin: Tensor | None
    kernel: Kernel = "paged_decode"
    """kernel for steps with a work list"""

    @property
    def layer(self) -> AttentionLayer:
        return self.world.case.layer._replace(norms=self.norms, cos_sin=self.cos_sin)

    def attend(self, k: Tensor, v: Tensor, way: Way = None, pdl: bool = False, **how: bool) -> Tensor:
        case, step = self.world.case, self.world.step
        out = torch.full((len(self.heads), case.shape.num_heads * case.head_dim), math.nan, device=self.heads.device)
        out, before = out.to(case.dtype), self.heads.clone()
        if isinstance(way, WorkList):
            arrivals = way.decode.arrivals
            way.build(step)
            work: WorkList | Counters = way
            launch = Launch(self.kernel, way.decode.tile, "one", stored=False)
        else:
            work = counters(self.heads.device)
            launch, arrivals = few_launch(case.shape, len(case.rows), way), work.arrivals
        cache = LayerKVCache(k, v, self.world.scales)
        launch_all([launch], KernelCall(self.heads, self.layer, cache, step, work, out, pdl=pdl, **how))
        assert torch.equal(self.heads, before)
        assert not arrivals.any()
        return out.cpu()

    def check(self, way: Way = None, pdl: bool = False) -> None:
        """Output and caches against those of separate operations in torch."""
        case, heads = self.world.case, self.heads.cpu()
        k, v = self.world.k.clone(), self.world.v.clone()
        out = self.attend(k, v, way, pdl)
        k, v = k.cpu(), v.cpu()
        q, new_k, new_v = heads.split([case.shape.num_heads, case.num_kv_heads, case.num_kv_heads], 1)
        q, new_k = self._rotate(q, 0), self._rotate(new_k, 1)
        expected_k, expected_v = self.world.k.cpu().clone(), self.world.v.cpu().clone()
        slots = self.world.step.slot_mapping.cpu()
        for token in (slots >= 0).nonzero()[:, 0].tolist():
            block, offset = divmod(int(slots[token]), case.block_size)
            # Exactly where it belongs: the rest is compared bit by bit.
            tolerance = 1e-5 if case.dtype == torch.float32 else 1e-2
            written, key, value = k[block, :, offset], new_k[token], new_v[token]
            if case.scales is not None:  # a key whose last bit is another may be the next number of float8
                tolerance = 0.13
                key, value = (quantize_heads(x[None], s)[0] for x, s in zip((key, value), case.scales, strict=True))
            torch.testing.assert_close(written.float(), key.float(), rtol=tolerance, atol=tolerance)
            expected_k[block, :, offset], expected_v[block, :, offset] = written, value
        for after, expected in ((k, expected_k), (v, expected_v)):
            torch.testing.assert_close(after.float(), expected.float(), rtol=0, atol=0, equal_nan=True)
        expected = replace(self.world, q=q, k=expected_k, v=expected_v).expected()
        assert torch.equal(out.isnan(), expected.isnan())
        tolerance = TOLERANCE[case.dtype]
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)

    def _rotate(self, x: Tensor, which: int) -> Tensor:
        if self.norms is not None:
            exact = x.float()
            factor = torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.norms.eps)
            x = (exact * factor * self.norms[which].cpu().float()).to(x.dtype)
        if self.cos_sin is not None:
            # Tokens of no row have no position; they are looked at by nobody.
            positions = torch.zeros(len(x), dtype=torch.long)
            for row, (length, context) in enumerate(self.world.case.rows):
                if length:
                    positions[int(self.world.step.row_query_start[row])] = context
            cosine, sine = self.cos_sin.cpu()[positions][:, None].chunk(2, -1)
            a, b = x.float().chunk(2, -1)
            x = torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1).to(x.dtype)
        return x


def make_decode(case: Case, device: torch.device, norm: bool = True, rotary: bool = True) -> Decode:
    world = make_world(case, device)
    step, shape = world.step, case.shape
    generator = torch.Generator().manual_seed(case.seed + 1000)
    heads = torch.randn(len(world.q), shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, generator=generator)
    for slot in step.slot_mapping[step.slot_mapping >= 0].tolist():
        block, offset = divmod(slot, case.block_size)
        world.k[block, :, offset] = math.nan
        world.v[block, :, offset] = math.nan
    norms, cos_sin = None, None
    if norm:
        weights = (torch.rand(2, shape.head_dim, generator=generator) + 0.5).to(case.dtype).to(device)
        norms = HeadNorms(weights[0], weights[1], 1e-6)
    if rotary:
        angle = 6 * torch.rand(case.max_context, shape.head_dim // 2, generator=generator)
        cos_sin = torch.cat((angle.cos(), angle.sin()), 1).to(device)
    return Decode(world, heads.to(case.dtype).to(device), norms, cos_sin)


lengths = st.one_of(st.integers(0, 100), st.sampled_from([0, 1, 15, 16, 17, 31, 32, 47, 48]))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, bool, bool, int]:
    case = Case(
        rows=tuple((draw(st.sampled_from([1, 1, 1, 0])), draw(lengths)) for _ in range(draw(st.integers(1, 4)))),
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7, 8])),
        head_dim=draw(st.sampled_from([16, 64, 80, 96, 128, 256])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        block_size=draw(st.sampled_from([16, 32, 48])),
        window=draw(st.sampled_from([0, 0, 1, 7, 16, 33])),
        programs=draw(st.integers(1, 12)),
        float8=draw(st.sampled_from([False, False, True])),
        seed=draw(st.integers(0, 99)),
    )
    return case, draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from([1, 2, 4, 16]))


@settings(max_examples=examples(10))
@given(cases())
@example((Case(((1, 0), (1, 16), (1, 77))), True, True, 2))
@example((Case(((1, 31), (0, 0), (1, 48)), head_dim=80, group=7, dtype=torch.bfloat16), True, True, 4))
@example((Case(((1, 31), (0, 0), (1, 300)), head_dim=96, group=3, dtype=torch.bfloat16), False, True, 8))
@example((Case(((1, 31), (0, 0), (1, 48)), head_dim=80, group=7, dtype=torch.bfloat16, float8=True), True, True, 4))
@example((Case(((1, 49), (1, 33)), window=33, block_size=48), False, False, 1))
@example((Case(((1, 49), (1, 133)), window=18, block_size=48, head_dim=128), False, False, 8))
def test_matches_separate_operations(device: torch.device, drawn: tuple[Case, bool, bool, int]) -> None:
    case, norm, rotary, pieces = drawn
    make_decode(case, device, norm, rotary).check(pieces)


@settings(max_examples=examples(10))
@given(cases(), st.booleans())
@example((Case(((1, 0), (1, 16), (1, 77))), True, True, 0), False)
@example((Case(((1, 32), (0, 0), (1, 48)), head_dim=80, group=7, dtype=torch.bfloat16), True, True, 0), True)
@example((Case(((1, 31), (0, 0), (1, 300)), head_dim=96, group=3, dtype=torch.bfloat16), False, True, 0), True)
@example((Case(((1, 31), (0, 0), (1, 300)), head_dim=96, dtype=torch.bfloat16, float8=True), True, True, 0), True)
@example((Case(((1, 49), (1, 133)), window=18, block_size=48, float8=True, programs=12), False, True, 0), False)
@example((Case(((1, 31), (1, 64)), head_dim=64, group=1, num_kv_heads=3), False, False, 0), False)
@example((Case(((1, 31), (1, 40)), head_dim=15), False, False, 0), False)
@example((Case(((1, 49), (1, 32)), window=33, block_size=48), False, False, 0), False)
@example((Case(((1, 49), (1, 133)), window=18, block_size=48, head_dim=128, programs=12), False, True, 0), False)
@example((Case(((1, 48), (1, 64)), window=1, programs=12, num_kv_heads=1), True, True, 0), False)
def test_a_work_list_matches_separate_operations(
    device: torch.device, drawn: tuple[Case, bool, bool, int], defaults: bool
) -> None:
    """The work list has tiles of 16 keys, which are cut into pieces, or those that a GPU takes."""
    case, norm, rotary, _ = drawn
    if defaults:
        case = replace(case, tiles=None)
    decode = make_decode(case, device, norm, rotary)
    decode.check(decode.world.work().decode_only)


@settings(max_examples=examples(3))
@given(attention_cases(head_dims=(16, 80)), st.sampled_from([1, 2, 4, 16]), st.sampled_from([0, 2]))
@example(Case(((1, 40), (5, 0), (3, 30)), group=3, head_dim=80, dtype=torch.bfloat16), 4, 0)
@example(Case(((7, 60), (0, 0), (1, 33)), window=33, block_size=48), 2, 1)
@example(Case(((7, 60), (0, 0), (1, 33)), dtype=torch.bfloat16, float8=True), 2, 1)
def test_tokens_of_prompts_as_rows(device: torch.device, case: Case, pieces: int, spare: int) -> None:
    """The keys and values of the prompts are in the cache before, and stay as they are; tokens of no row stay
    unwritten."""
    check_prompts_as_rows(case, device, pieces, spare)


def check_prompts_as_rows(case: Case, device: torch.device, pieces: int, spare: int = 0) -> None:
    world = make_world(case, device)
    tokens, shape = max(1, case.num_tokens), case.shape
    step = to_device(allocate_step(8, world.step.slots.block_tables.shape[1], 8, tokens + spare, device), device)
    step = replace(step, slots=world.step.slots)
    heads = torch.full((len(world.q), shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim), math.nan).to(world.q)
    heads[:, : shape.num_heads] = world.q
    token = 0
    for row, (length, context) in enumerate(case.rows):
        step.positions[token : token + length] = context + torch.arange(length)
        step.token_slot[token : token + length] = world.step.row_slot[row]
        token += length
    out = torch.full((len(heads), shape.num_heads * shape.head_dim), math.nan).to(heads)
    work = counters(device, (tokens + spare) * shape.num_heads)
    before = world.k.clone(), world.v.clone()
    launch = few_launch(shape, tokens, pieces, stored=True)
    few_keys.run(launch, world.call(work, out, heads=heads, step=step))
    check(world, out.cpu())
    assert not work.arrivals.any()
    for cache, was in zip((world.k, world.v), before, strict=True):
        torch.testing.assert_close(cache.float(), was.float(), rtol=0, atol=0, equal_nan=True)


@settings(max_examples=examples(8))
@given(cases())
@example((Case(((1, 0), (1, 16), (1, 77), (1, 300)), programs=24), True, True, 0))
@example((Case(((1, 31), (0, 0), (1, 300)), head_dim=128, group=4, dtype=torch.bfloat16), False, True, 0))
@example((Case(((1, 49), (1, 133)), window=18, head_dim=64, programs=12), False, False, 0))
def test_units_cut_apart_match_separate_operations(device: torch.device, drawn: tuple[Case, bool, bool, int]) -> None:
    case, norm, rotary, _ = drawn
    programs = max(case.programs or 0, len(case.rows) * case.num_kv_heads)
    case = replace(case, whole_tokens=16, programs=programs, tiles=(SMALL[0], None))
    decode = make_decode(case, device, norm, rotary)
    decode.check(decode.world.work())


@pytest.mark.parametrize("softcap", [0.3, 50.0])
@pytest.mark.parametrize("way", ["few keys", "few keys, stored", "work list"])
def test_soft_caps(device: torch.device, way: str, softcap: float) -> None:
    """The new token's score is capped as well, alone and beside others."""
    case = Case(((1, 60), (0, 0), (1, 0), (1, 1)), softcap=softcap, head_dim=16)
    if way == "few keys, stored":
        stored = replace(case, rows=((1, 60), (3, 0)))
        check_prompts_as_rows(stored, device, pieces=2)
        return
    decode = make_decode(case, device)
    decode.heads.mul_(3)
    decode.check(decode.world.work().decode_only if way == "work list" else 2)


@pytest.mark.parametrize("way", ["few keys", "few keys, stored", "work list"])
def test_sinks_take_their_part_of_the_softmax(device: torch.device, way: str) -> None:
    sinks = torch.tensor([-3.0, 0.0, 1.5, 30.0], device=device)
    case = Case(((1, 60), (0, 0), (1, 0), (1, 1)), sinks=sinks, head_dim=16)
    if way == "few keys, stored":
        check_prompts_as_rows(replace(case, rows=((1, 60), (3, 0))), device, pieces=2)
        return
    decode = make_decode(case, device)
    decode.check(decode.world.work().decode_only if way == "work list" else 2)


@pytest.mark.parametrize("float8", [False, True])
def test_a_work_list_comes_to_what_separate_kernels_do(device: torch.device, float8: bool) -> None:
    """Keys, values and outputs in bfloat16, where every rounding shows; with keys and values in float8 as well."""
    rows = ((1, 130), (1, 16), (0, 0), (1, 47))
    case = Case(rows, group=4, head_dim=64, dtype=torch.bfloat16, tiles=None, float8=float8)
    decode = make_decode(case, device)
    step, work = decode.world.step, decode.world.work().decode_only
    k, v = decode.world.k.clone(), decode.world.v.clone()
    fused = decode.attend(k, v, work)
    heads, separate_k, separate_v = decode.heads.clone(), decode.world.k.clone(), decode.world.v.clone()
    for row, (length, context) in enumerate(case.rows):
        if length:
            step.positions[int(step.row_query_start[row])] = context
    heads = heads[: step.num_tokens]
    assert decode.norms is not None
    q_norm, k_norm, eps = decode.norms[:3]
    rotary_store_kv(
        heads, case.shape.num_heads, q_norm, k_norm, eps, decode.cos_sin, step.positions, step.slot_mapping, separate_k,
        separate_v, scales=decode.world.scales,
    )  # fmt: skip
    out = torch.empty(len(heads), case.shape.num_heads * case.head_dim, dtype=case.dtype, device=device)
    launch = Launch("paged", work.decode.tile, "one", stored=True)
    cache = LayerKVCache(separate_k, separate_v, decode.world.scales)
    paged.run(launch, decode.world.call(work, out, heads=heads, cache=cache))
    assert torch.equal(k.float().nan_to_num(), separate_k.float().nan_to_num())
    assert torch.equal(v.float().nan_to_num(), separate_v.float().nan_to_num())
    apart = (fused[: len(heads)].float() - out.cpu().float()).abs()
    assert (apart <= 2**-8 * (1 + out.cpu().float().abs())).all(), "more than the last bit of a weight"


@pytest.mark.parametrize("listed", [False, True])
def test_no_slot_is_no_write(device: torch.device, listed: bool) -> None:
    """A row without a slot writes nothing, and the new token is seen all the same."""
    decode = make_decode(Case(((1, 5), (1, 32))), device)
    decode.world.step.slot_mapping.fill_(-1)
    k, v = decode.world.k.clone(), decode.world.v.clone()
    out = decode.attend(k, v, decode.world.work().decode_only if listed else None)
    assert not out[:2].isnan().any()
    for after, before in ((k, decode.world.k), (v, decode.world.v)):
        assert torch.equal(after.nan_to_num(), before.nan_to_num())
        assert torch.equal(after.isnan(), before.isnan())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("listed", [False, True])
def test_results_do_not_depend_on_the_order_of_arrival(device: torch.device, listed: bool) -> None:
    decode = make_decode(Case(((1, 590), (1, 40)), head_dim=128, programs=12), device)
    way = decode.world.work().decode_only if listed else None
    once = decode.attend(decode.world.k.clone(), decode.world.v.clone(), way)
    with backwards(device):
        again = decode.attend(decode.world.k.clone(), decode.world.v.clone(), way)
    assert torch.equal(once.nan_to_num(), again.nan_to_num())


def test_a_long_row_is_cut_whatever_else_is_there() -> None:
    """Into as many pieces as have room at once, so that a longer context is for the work list."""
    sms = H200.multiprocessors
    for heads, kv_heads, dim in ((12, 12, 64), (16, 8, 128), (32, 8, 128), (64, 8, 64), (28, 4, 128), (14, 2, 80)):
        shape = AttentionShape(heads, kv_heads, dim, torch.bfloat16)
        limits = [few_keys_context(rows, shape, H200) for rows in range(1, 257)]
        assert limits == sorted(limits, reverse=True)
        assert limits[0] >= 4096
        assert (limits[-1] > 0) == (heads == kv_heads)
        for rows, limit in enumerate(limits, 1):
            pieces = few_keys_pieces(rows, heads, dim, sms)
            assert pieces == 1 or rows * heads * pieces <= 8 * sms
            assert limit in (0, pieces * limits[-1]) or heads != kv_heads
    assert few_keys_context(1, AttentionShape(2, 1, 33, torch.bfloat16), H200) == 0


def test_misuse_is_reported(device: torch.device) -> None:
    decode = make_decode(Case(((1, 20),)), device)
    world, shape = decode.world, decode.world.case.shape
    out = torch.empty(len(decode.heads), shape.num_heads * shape.head_dim, device=device)
    launch, enough = few_launch(shape, 1), counters(device, 8)

    def call(heads=decode.heads, norms=decode.norms, cos_sin=decode.cos_sin, work=enough):
        layer = decode.layer._replace(norms=norms, cos_sin=cos_sin)
        few_keys.run(launch, world.call(work, out, heads=heads, layer=layer))

    with pytest.raises(ValueError, match="heads"):
        call(decode.heads[:, :-1])
    with pytest.raises(ValueError, match="norms"):
        call(norms=HeadNorms(decode.norms.q[:-1], decode.norms.k, 1e-6))
    with pytest.raises(ValueError, match="cos_sin"):
        call(cos_sin=decode.cos_sin.double())
    with pytest.raises(ValueError, match="counters"):
        call(work=counters(device, 1))
    with pytest.raises(ConfigError, match="another kernel"):
        call(work=world.work())
    odd = make_decode(Case(((1, 20),), head_dim=15), device, rotary=False)
    with pytest.raises(ValueError, match="no halves"):
        odd.attend(odd.world.k, odd.world.v)


def test_misuse_with_a_work_list_is_reported(device: torch.device) -> None:
    decode = make_decode(Case(((1, 20),)), device)
    world, shape = decode.world, decode.world.case.shape
    out = torch.empty(len(decode.heads), shape.num_heads * shape.head_dim, device=device)
    right, fixed = world.work().decode_only, replace(world, case=replace(world.case, split_tokens=32)).work()
    launch = Launch("paged_decode", right.decode.tile, "one", stored=False)

    def call(work, window=0, heads=decode.heads):
        layer = decode.layer._replace(window=window)
        paged_decode.run(launch, world.call(work, out, heads=heads, layer=layer))

    call(right)
    with pytest.raises(ValueError, match="heads"):
        call(right, heads=decode.heads[:, :-1])
    with pytest.raises(ConfigError, match="window"):
        call(right, window=8)
    for work in (counters(device), fixed, replace(world.work(), shape=AttentionShape(2, 2, 32, torch.float32))):
        with pytest.raises(ConfigError, match="work list"):
            call(work)
