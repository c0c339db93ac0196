"""Attention over latents: the kernels of a GPU against the operations of the CPU, and whole engines of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncengine.kernels.cuda.attention import latent_decode
from asyncengine.kernels.cuda.attention.latent import LatentPlan, choose_plan, latent_attention
from asyncengine.kernels.cuda.gpu import H200, L40S
from asyncengine.kernels.cuda.step.tensors import DeviceStep, allocate_step
from asyncengine.kernels.float8 import FLOAT8
from asyncengine.kernels.float8_cache import quantize_heads, with_inverses
from asyncengine.kernels.latent import LatentLayer
from asyncengine.kernels.ops import LayerLatentCache
from asyncengine.models.rotary import RopeConfig, rotary_table
from tests.kernels.gluon_twin import AsyncCopy, mma_of_shared, run_in_torch
from tests.kernels.poison import poison_new_memory

BLOCK_SIZE = 4
ROWS = ((5, 1), (0, 7), (9, 3), (17, 1))
"""Tokens before each row, and tokens of the row."""


def random(*shape: int, seed: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


class Case:
    """A step with rows of one token and of several, and tokens of no row behind them."""

    def __init__(
        self, heads: int, rank: int, rope: int, device: torch.device, dtype: torch.dtype, *, float8: bool = False
    ) -> None:
        self.count = sum(length for _, length in ROWS)
        tokens = self.count + 3
        table = rotary_table(RopeConfig(dim=rope), rope, 64).to(device)
        weight = random(rank, seed=1, device=device, dtype=dtype)
        self.layer = LatentLayer(heads, rank, rope, weight, 1e-6, table, 0.3, up=None)
        latents = random(40, BLOCK_SIZE, rank + rope, seed=2, device=device, dtype=dtype)
        # A power of two, and another number with which some numbers saturate.
        scales = with_inverses(torch.tensor([[2.0**-6], [0.005]])).to(device) if float8 else None
        self.cache = LayerLatentCache(latents.to(FLOAT8) if float8 else latents, scales)
        self.step = self._step(tokens, device)
        self.q = random(heads, tokens, rank, seed=3, device=device, dtype=dtype).transpose(0, 1)
        self.q_rope = random(tokens, heads, 2 * rope, seed=4, device=device, dtype=dtype)[..., rope:]
        self.rows = random(tokens, rank + rope + 8, seed=5, device=device, dtype=dtype)[:, 8:]

    def _step(self, tokens: int, device: torch.device) -> DeviceStep:
        step = allocate_step(len(ROWS), 8, len(ROWS), tokens, device)
        step.slots.block_tables.copy_(torch.randperm(32, generator=torch.Generator().manual_seed(6)).view(4, 8))
        at = 0
        for row, (context, length) in enumerate(ROWS):
            slot = len(ROWS) - 1 - row
            for position in range(context, context + length):
                block = int(step.slots.block_tables[slot, position // BLOCK_SIZE])
                step.token_slot[at], step.positions[at] = slot, position
                step.slot_mapping[at] = block * BLOCK_SIZE + position % BLOCK_SIZE
                at += 1
        return step

    def stored(self) -> Tensor:
        """float32 [blocks, BLOCK_SIZE, width]: what is in the cache."""
        latents = self.cache.latents.float().clone()
        if self.cache.scales is not None:
            latents[..., : self.layer.rank] *= self.cache.scales[0, 0]
            latents[..., self.layer.rank :] *= self.cache.scales[1, 0]
        return latents

    def by_torch(self) -> Tensor:
        """float32 [count, heads, rank]"""
        layer, latents = self.layer, self.stored().flatten(0, 1)
        rows, count, half = self.rows[: self.count].float(), self.count, layer.rope // 2
        cos, sin = layer.cos_sin[self.step.positions[:count].long()].split(half, 1)

        def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            a, b = x.split(half, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(self.q.dtype).float()

        normed = torch.nn.functional.rms_norm(rows[:, : layer.rank], (layer.rank,), layer.norm_weight.float(), 1e-6)
        keys = rotated(rows[:, layer.rank :], cos, sin)
        normed = normed.to(self.q.dtype).float()
        if self.cache.scales is not None:
            normed, keys = (
                quantize_heads(x[:, None], scale)[:, 0].float() * scale[0]
                for x, scale in zip((normed, keys), self.cache.scales, strict=True)
            )
        latents[self.step.slot_mapping[:count]] = torch.cat((normed, keys), 1)
        turned = rotated(self.q_rope[:count].float(), cos[:, None], sin[:, None])
        q = torch.cat((self.q[:count].float(), turned), 2)
        out = []
        for token in range(count):
            table = self.step.slots.block_tables[self.step.token_slot[token]].long()
            seen = latents.view(-1, BLOCK_SIZE, layer.width)[table].flatten(0, 1)
            seen = seen[: int(self.step.positions[token]) + 1]
            out.append((q[token] @ seen.t() * layer.scale).softmax(-1) @ seen[:, : layer.rank])
        return torch.stack(out)


PLANS = {
    "one token": LatentPlan(1, 16, 16, 4, 1, 1),
    "pieces": LatentPlan(1, 16, 16, 4, 1, 4),
    "several tokens": LatentPlan(4, 16, 16, 4, 1, 1),
    "several tokens in pieces": LatentPlan(2, 16, 16, 4, 1, 2),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(3, 24, 8), (20, 32, 16)], ids=["3 heads", "20 heads"])
@pytest.mark.parametrize("name", PLANS)
@torch.inference_mode()
def test_attention_is_that_of_torch(
    device: torch.device, name: str, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    case = Case(*sizes, device, dtype)
    expected = case.by_torch()
    untouched = case.cache.latents.clone()
    got = latent_attention(case.q, case.q_rope, case.rows, case.layer, case.cache, case.step, PLANS[name])
    exact = dtype == torch.float32
    torch.testing.assert_close(got[: case.count].float(), expected, atol=1e-5 if exact else 3e-2, rtol=1e-5)
    changed = (case.cache.latents != untouched).any(-1).flatten().nonzero().flatten()
    assert set(changed.tolist()) == set(case.step.slot_mapping[: case.count].tolist())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", PLANS)
@torch.inference_mode()
def test_attention_over_float8_is_that_of_torch(device: torch.device, name: str, dtype: torch.dtype) -> None:
    """The numbers in the cache are those that torch rounds, and attention is exact over them."""
    case = Case(20, 32, 16, device, dtype, float8=True)
    expected, before = case.by_torch(), case.stored()
    got = latent_attention(case.q, case.q_rope, case.rows, case.layer, case.cache, case.step, PLANS[name])
    assert got.dtype == dtype
    exact = dtype == torch.float32
    torch.testing.assert_close(got[: case.count].float(), expected, atol=1e-3 if exact else 5e-2, rtol=1e-3)
    changed = (case.stored() != before).any(-1).flatten().nonzero().flatten()
    assert set(changed.tolist()) == set(case.step.slot_mapping[: case.count].tolist())


@pytest.mark.parametrize("pieces", [1, 4, 32])
@pytest.mark.parametrize("heads", [3, 20])
@torch.inference_mode()
def test_attention_by_transposed_products_is_that_of_torch(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, heads: int, pieces: int
) -> None:
    """Tokens with fewer pieces than the plan has, and behind what others left in the memory of sums."""
    if device.type == "cpu":
        monkeypatch.setattr(latent_decode, "KEYS", 4)
        monkeypatch.setattr(latent_decode, "LEAST_KEYS", 6)
        run_in_torch(
            monkeypatch, "latent_decode_kernel", latent_decode, async_copy=AsyncCopy, warpgroup_mma=mma_of_shared,
            warpgroup_mma_wait=lambda count, deps: deps[0], fence_async_shared=lambda: None,
            _piece_count=lambda end, PIECES, LEAST: min(max(int(end) // LEAST, 1), PIECES),
        )  # fmt: skip
    poison_new_memory(monkeypatch)
    case = Case(heads, 128, 16, device, torch.bfloat16)
    expected = case.by_torch()
    plan = choose_plan(1 << 20, 1, heads, torch.bfloat16, pieces, transposed=True)
    assert plan.transposed
    assert plan.pieces == pieces
    got = latent_attention(case.q, case.q_rope, case.rows, case.layer, case.cache, case.step, plan)
    torch.testing.assert_close(got[: case.count].float(), expected, atol=3e-2, rtol=1e-2)


def test_which_layers_have_the_kernel_of_transposed_products(device: torch.device) -> None:
    """Layers of few heads in 16 bits have it, on a card with the instructions of Hopper."""
    of_glm = Case(20, 512, 64, device, torch.bfloat16).layer
    assert latent_decode.fits_decode(of_glm, torch.bfloat16, H200)
    assert not latent_decode.fits_decode(of_glm, torch.float32, H200)
    assert not latent_decode.fits_decode(of_glm, torch.bfloat16, L40S)
    assert not latent_decode.fits_decode(of_glm._replace(num_heads=128), torch.bfloat16, H200)
    assert not latent_decode.fits_decode(of_glm._replace(rank=24), torch.bfloat16, H200)


@pytest.mark.parametrize("name", PLANS)
@torch.inference_mode()
def test_a_row_without_numbers_spoils_no_other_row(device: torch.device, name: str) -> None:
    """Tokens of two rows share a tile, and latents of one row that are NaN do not reach the other."""
    case = Case(3, 24, 8, device, torch.float32)
    expected = case.by_torch()
    spoilt = 2
    slot, (context, _) = len(ROWS) - 1 - spoilt, ROWS[spoilt]
    blocks = case.step.slots.block_tables[slot, : context // BLOCK_SIZE].long()
    case.cache.latents[blocks] = float("nan")
    got = latent_attention(case.q, case.q_rope, case.rows, case.layer, case.cache, case.step, PLANS[name])
    own = case.step.token_slot[: case.count] == slot
    torch.testing.assert_close(got[: case.count][~own], expected[~own], atol=1e-5, rtol=1e-5)
    assert got[: case.count][own].isnan().any()


def test_caches_and_scales_that_do_not_fit_are_refused(device: torch.device) -> None:
    exact, float8 = (Case(3, 24, 8, device, torch.float32, float8=float8) for float8 in (False, True))
    for latents, scales, message in (
        (exact.cache.latents, float8.cache.scales, "^latents must be"),
        (float8.cache.latents, None, "^latents must be"),
        (float8.cache.latents, torch.ones(2, 2, 3, device=device), "^scales must be"),
    ):
        with pytest.raises(ValueError, match=message):
            latent_attention(
                exact.q, exact.q_rope, exact.rows, exact.layer, LayerLatentCache(latents, scales), exact.step,
                PLANS["one token"],
            )  # fmt: skip


def test_tensors_that_do_not_fit_are_refused(device: torch.device) -> None:
    case = Case(3, 24, 8, device, torch.float32)
    good: dict[str, Any] = {"q": case.q, "q_rope": case.q_rope, "rows": case.rows}
    for name, tensor in good.items():
        with pytest.raises(ValueError, match=f"^{name} must be"):
            latent_attention(
                **good | {name: tensor[1:]}, layer=case.layer, cache=case.cache, step=case.step,
                plan=PLANS["one token"],
            )  # fmt: skip

    odd = Case(3, 24, 6, device, torch.float32)
    with pytest.raises(ValueError, match="must be of 8s, got 24 and 6"):
        latent_attention(odd.q, odd.q_rope, odd.rows, odd.layer, odd.cache, odd.step, PLANS["one token"])


def test_plans_fill_the_card_and_share_latents_among_heads() -> None:
    """A lone row is cut into pieces, many rows are not; prompts have several tokens a program."""
    of = [choose_plan(rows, tokens, 20, torch.bfloat16, 132) for rows, tokens in ((1, 1), (256, 256), (256, 2048))]
    assert [plan.pieces for plan in of] == [16, 1, 1]
    assert [plan.heads for plan in of] == [32, 32, 32]
    assert [plan.tokens for plan in of] == [1, 1, 2]
    assert choose_plan(8, 8, 128, torch.bfloat16, 132).heads == 64
    assert choose_plan(8, 2048, 16, torch.bfloat16, 132, float8=True)[:2] == (2, 16)
    few, many = (choose_plan(rows, rows, 20, torch.bfloat16, 132, transposed=True) for rows in (1, 64))
    assert (few.pieces, many.pieces) == (64, 4)
    assert few.transposed
    assert (
        str(many)
        == "latent [1 tokens of 32 heads x 64, 8 warps, 2 stages, 4 pieces, transposed] for all rows (formula)"
    )
    assert not choose_plan(8, 64, 20, torch.bfloat16, 132, transposed=True).transposed, "prompts have the other kernel"
    assert str(of[0]) == "latent [1 tokens of 32 heads x 32, 8 warps, 3 stages, 16 pieces] for all rows (formula)"
