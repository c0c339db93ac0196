"""Fused decode attention against plain torch: the cache is NaN wherever no row looks, and where the new tokens go."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncengine.kernels.ops import HeadNorms
from asyncengine.kernels.triton_decode import choose_pieces, decode_attention, longest_context
from asyncengine.kernels.work_list import AttentionShape
from tests.kernels.test_triton_attention import TOLERANCE, Case, World, backwards, make_world


@dataclass(frozen=True)
class Decode:
    """A world whose rows' new keys and values are not in the cache yet."""

    world: World
    heads: Tensor
    norms: HeadNorms | None
    cos_sin: Tensor | None

    def attend(self, k: Tensor, v: Tensor, pieces: int | None = None) -> Tensor:
        case, step = self.world.case, self.world.step
        out = torch.full((len(self.heads), case.shape.num_heads * case.head_dim), math.nan, device=self.heads.device)
        out = out.to(case.dtype)
        before, arrivals = self.heads.clone(), torch.zeros(128, dtype=torch.int32, device=self.heads.device)
        decode_attention(
            self.heads, case.shape.num_heads, self.norms, self.cos_sin, k, v, step, case.head_dim**-0.5, case.window,
            out, arrivals, pieces=pieces,
        )  # fmt: skip
        assert torch.equal(self.heads, before)
        assert not arrivals.any()
        return out.cpu()

    def check(self, pieces: int | None = None) -> None:
        """Output and caches against those of separate operations in torch."""
        case, heads = self.world.case, self.heads.cpu()
        k, v = self.world.k.clone(), self.world.v.clone()
        out = self.attend(k, v, pieces)
        q, new_k, new_v = heads.split([case.shape.num_heads, case.num_kv_heads, case.num_kv_heads], 1)
        q, new_k = self._rotate(q, 0), self._rotate(new_k, 1)
        expected_k, expected_v = self.world.k.cpu().clone(), self.world.v.cpu().clone()
        slots = self.world.step.slot_mapping.cpu()
        for token in (slots >= 0).nonzero()[:, 0].tolist():
            block, offset = divmod(int(slots[token]), case.block_size)
            # Exactly where it belongs: the rest is compared bit by bit.
            tolerance = 1e-5 if case.dtype == torch.float32 else 1e-2
            written = k.cpu()[block, :, offset]
            torch.testing.assert_close(written, new_k[token], rtol=tolerance, atol=tolerance)
            expected_k[block, :, offset], expected_v[block, :, offset] = written, new_v[token]
        for after, expected in ((k.cpu(), expected_k), (v.cpu(), expected_v)):
            torch.testing.assert_close(after, expected, rtol=0, atol=0, equal_nan=True)
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
    for row, (length, context) in enumerate(case.rows):
        if not length:
            continue
        block, offset = context // case.block_size, context % case.block_size
        block = int(step.slots.block_tables[int(step.row_slot[row]), block])
        step.slot_mapping[int(step.row_query_start[row])] = block * case.block_size + offset
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
        seed=draw(st.integers(0, 99)),
    )
    return case, draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from([1, 2, 4, 16]))


@settings(max_examples=10)
@given(cases())
@example((Case(((1, 0), (1, 16), (1, 77))), True, True, 2))
@example((Case(((1, 31), (0, 0), (1, 48)), head_dim=80, group=7, dtype=torch.bfloat16), True, True, 4))
@example((Case(((1, 31), (0, 0), (1, 300)), head_dim=96, group=3, dtype=torch.bfloat16), False, True, 8))
@example((Case(((1, 49), (1, 33)), window=33, block_size=48), False, False, 1))
@example((Case(((1, 49), (1, 133)), window=18, block_size=48, head_dim=128), False, False, 8))
def test_matches_separate_operations(device: torch.device, drawn: tuple[Case, bool, bool, int]) -> None:
    case, norm, rotary, pieces = drawn
    make_decode(case, device, norm, rotary).check(pieces)


def test_no_slot_is_no_write(device: torch.device) -> None:
    """And the new token is seen all the same."""
    decode = make_decode(Case(((1, 5), (1, 32))), device)
    decode.world.step.slot_mapping.fill_(-1)
    k, v = decode.world.k.clone(), decode.world.v.clone()
    out = decode.attend(k, v)
    assert not out[:2].isnan().any()
    for after, before in ((k, decode.world.k), (v, decode.world.v)):
        assert torch.equal(after.nan_to_num(), before.nan_to_num())
        assert torch.equal(after.isnan(), before.isnan())


def test_results_do_not_depend_on_the_order_of_arrival(device: torch.device) -> None:
    decode = make_decode(Case(((1, 590), (1, 40)), head_dim=128), device)
    once = decode.attend(decode.world.k.clone(), decode.world.v.clone())
    with backwards(device):
        again = decode.attend(decode.world.k.clone(), decode.world.v.clone())
    assert torch.equal(once.nan_to_num(), again.nan_to_num())


def test_a_long_row_is_cut_whatever_else_is_there() -> None:
    """Into as many pieces as have room at once, so that a longer context is for the work list."""
    sms = 132
    for heads, kv_heads, dim in ((12, 12, 64), (16, 8, 128), (32, 8, 128), (64, 8, 64), (28, 4, 128), (14, 2, 80)):
        shape = AttentionShape(heads, kv_heads, dim, torch.bfloat16)
        limits = [longest_context(rows, shape, sms) for rows in range(1, 257)]
        assert limits == sorted(limits, reverse=True)
        assert limits[0] >= 4096
        assert (limits[-1] > 0) == (heads == kv_heads)
        for rows, limit in enumerate(limits, 1):
            pieces = choose_pieces(rows, heads, dim, sms)
            assert pieces == 1 or rows * heads * pieces <= 8 * sms
            assert limit in (0, pieces * limits[-1]) or heads != kv_heads
    assert longest_context(1, AttentionShape(2, 1, 33, torch.bfloat16), sms) == 0


def test_misuse_is_reported(device: torch.device) -> None:
    decode = make_decode(Case(((1, 20),)), device)
    world, shape = decode.world, decode.world.case.shape
    out = torch.empty(len(decode.heads), shape.num_heads * shape.head_dim, device=device)
    counters = torch.zeros(8, dtype=torch.int32, device=device)

    def call(heads=decode.heads, norms=decode.norms, cos_sin=decode.cos_sin, arrivals=counters):
        decode_attention(
            heads, shape.num_heads, norms, cos_sin, world.k, world.v, world.step, 1.0, 0, out, arrivals
        )

    with pytest.raises(ValueError, match="heads"):
        call(decode.heads[:, :-1])
    with pytest.raises(ValueError, match="norms"):
        call(norms=HeadNorms(decode.norms.q[:-1], decode.norms.k, 1e-6))
    with pytest.raises(ValueError, match="cos_sin"):
        call(cos_sin=decode.cos_sin.double())
    with pytest.raises(ValueError, match="counters"):
        call(arrivals=counters[:1])
