"""Attention over latents: kernels of real shapes against torch, and whole engines against the CPU's tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.kernels.cuda.attention import expanded
from asyncengine.kernels.cuda.attention.context import ContextPlan
from asyncengine.kernels.cuda.attention.latent import LatentPlan, choose_plan, latent_attention
from asyncengine.kernels.cuda.attention.latent_decode import fits_decode
from asyncengine.kernels.cuda.attention.latent_run import LatentPlans, attend, by_head, choose_plans
from asyncengine.kernels.cuda.step.tensors import allocate_step
from asyncengine.kernels.cuda.trials import examine
from asyncengine.kernels.float8 import FLOAT8
from asyncengine.kernels.float8_cache import with_inverses
from asyncengine.kernels.latent import LatentLayer
from asyncengine.kernels.ops import LayerLatentCache
from asyncengine.models.rotary import RopeConfig, rotary_table
from asyncengine.text.tokenizer import placeholder_tokenizer
from tests.models import tiny

RANK, ROPE, BLOCK_SIZE, CONTEXT = 512, 64, 16, 5000
PROMPTS = [[(7 * i + 3 * n) % tiny.VOCAB_SIZE for i in range(20 + 9 * n)] for n in range(4)]
COUNT = 8


class Rows:
    """A step of rows [tokens before, tokens], of real sizes, and its attention by torch in float32."""

    def __init__(
        self, heads: int, rows: list[tuple[int, int]], dtype: torch.dtype = torch.bfloat16, *, float8: bool = False
    ) -> None:
        self.device, self.rows, blocks = torch.device("cuda"), rows, -(-CONTEXT // BLOCK_SIZE)
        tokens = sum(length for _, length in rows)
        self.step = allocate_step(len(rows), blocks, len(rows), tokens, self.device)
        table = torch.randperm(len(rows) * blocks, device=self.device).view(len(rows), blocks)
        self.step.slots.block_tables.copy_(table)
        slots = torch.cat([torch.full((length,), row) for row, (_, length) in enumerate(rows)]).to(self.device)
        positions = torch.cat([torch.arange(before, before + length) for before, length in rows]).to(self.device)
        self.step.token_slot.copy_(slots)
        before, lengths = (torch.tensor(values, device=self.device) for values in zip(*rows, strict=True))
        self.step.row_query_start.copy_(lengths.cumsum(0) - lengths)
        self.step.row_query_len.copy_(lengths)
        self.step.row_context_len.copy_(before)
        self.step.positions.copy_(positions)
        self.step.slot_mapping.copy_(table[slots, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)
        self.cos_sin = rotary_table(RopeConfig(dim=ROPE), ROPE, CONTEXT).to(self.device)
        scale = 256**-0.5
        gains = self.random(RANK, dtype=dtype)
        self.layer = LatentLayer(heads, RANK, ROPE, gains, 1e-6, self.cos_sin, scale, up=None)
        latents = self.random(table.numel(), BLOCK_SIZE, RANK + ROPE, dtype=dtype)
        scales = with_inverses(torch.tensor([[2.0**-4], [2.0**-6]])).to(self.device) if float8 else None
        self.cache = LayerLatentCache((16 * latents).to(FLOAT8) if float8 else latents, scales)
        self.q = self.random(tokens, heads, RANK, dtype=dtype)
        self.q_rope = self.random(tokens, heads, 256, dtype=dtype)[..., -ROPE:]
        self.new = self.random(tokens, 1344, dtype=dtype)[:, -(RANK + ROPE) :]

    def random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def plan(self) -> LatentPlan:
        gpu = examine(self.device)
        return choose_plan(
            self.step.num_rows, self.step.num_tokens, self.layer.num_heads, self.q.dtype, gpu.multiprocessors,
            float8=self.cache.scales is not None,
            transposed=self.step.num_tokens == self.step.num_rows and fits_decode(self.layer, self.q.dtype, gpu),
        )  # fmt: skip

    def run(self, plan: LatentPlan) -> Tensor:
        pdl = examine(self.device).dependent_launch
        return latent_attention(
            self.q, self.q_rope.clone(), self.new, self.layer, self.cache, self.step, plan, pdl=pdl
        )  # fmt: skip

    def known(self) -> Tensor:
        """float32 [blocks, BLOCK_SIZE, RANK + ROPE]: the vectors that the cache holds."""
        known = self.cache.latents.float()
        if self.cache.scales is not None:
            known[..., :RANK] *= self.cache.scales[0, 0]
            known[..., RANK:] *= self.cache.scales[1, 0]
        return known

    def by_torch(self) -> Tensor:
        """float32 [T, heads, RANK], of what ``run`` has stored; queries are rotated here."""
        positions = self.step.positions.long()
        cos, sin = self.cos_sin[positions][:, None].split(ROPE // 2, -1)
        a, b = self.q_rope.float().split(ROPE // 2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(self.q.dtype)
        q, out, at, stored = torch.cat((self.q, turned), -1).float(), [], 0, self.known()
        for row, (before, length) in enumerate(self.rows):
            known = stored[self.step.slots.block_tables[row].long()].flatten(0, 1)[: before + length]
            scores = torch.einsum("qhw,kw->hqk", q[at : at + length], known) * self.layer.scale
            hidden = torch.ones(length, before + length, dtype=torch.bool, device=self.device).triu(before + 1)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out.append(torch.einsum("hqk,kr->qhr", weights, known[:, :RANK]))
            at += length
        return torch.cat(out)

    def check_stored(self) -> None:
        """Latents are normed and keys rotated where the step says."""
        x, half = self.new.float(), ROPE // 2
        cos, sin = self.cos_sin[self.step.positions.long()].split(half, -1)
        a, b = x[:, RANK:].split(half, -1)
        normed = torch.nn.functional.rms_norm(x[:, :RANK], (RANK,), self.layer.norm_weight.float(), 1e-6)
        expected = torch.cat((normed, a * cos - b * sin, b * cos + a * sin), -1)
        stored = self.known().view(-1, RANK + ROPE)[self.step.slot_mapping]
        float8 = self.cache.scales is not None
        torch.testing.assert_close(stored, expected, atol=2e-2, rtol=1 / 15 if float8 else 1e-2)


needs_float8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="float8 needs 8.9"
)
STEPS = {
    "a row": [(1000, 1)],
    "an empty row": [(0, 1)],
    "a long row": [(4900, 1)],
    "long rows": [(1237 * i % 4999, 1) for i in range(8)],
    "rows": [(17 * i % 1000, 1) for i in range(64)],
    "a prompt": [(0, 700)],
    "chunks and rows": [(500, 1), (3, 1), (900, 1), (128, 200), (0, 33)],
}


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("heads", [16, 20, 128])
@pytest.mark.parametrize("name", STEPS)
@torch.inference_mode()
def test_attention_of_real_shapes(name: str, heads: int) -> None:
    rows = Rows(heads, STEPS[name])
    got = rows.run(rows.plan())
    rows.check_stored()
    expected = rows.by_torch()
    error = float((got.float() - expected).std() / expected.std())
    assert error < 0.01, (str(rows.plan()), error)


@pytest.mark.parametrize("float8", [False, pytest.param(True, marks=needs_float8)], ids=["", "float8"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("heads", "key_dim", "value_dim"), [(16, 128, 128), (20, 192, 256), (128, 128, 128)])
@torch.inference_mode()
def test_expanded_prompts_of_real_shapes(heads: int, key_dim: int, value_dim: int, parts: int, float8: bool) -> None:
    """Chunks that begin their text, of one token and of several tiles, beside later chunks, of which one has less
    tokens than expanding takes for some heads, and rows of one token."""
    rows = Rows(heads, [(500, 1), (900, 1), (0, 1), (128, 200), (0, 33), (0, 700), (300, 450)], float8=float8)
    up = rows.random(heads, key_dim + value_dim, RANK, dtype=torch.bfloat16) / 16
    layer = rows.layer._replace(up=up)
    gpu, q = examine(rows.device), rows.random(len(rows.q), heads, key_dim + ROPE, dtype=torch.bfloat16)
    plans = choose_plans(q, layer, rows.step, gpu, single_token_rows=False, float8=float8)
    assert plans.expanded is not None
    assert plans.expanded.context is not None
    assert plans.expanded.context.least <= 450
    if parts > 1:  # of less tokens than the contexts have
        small = plans.expanded.context._replace(tokens=256, parts=parts)
        plans = plans._replace(expanded=plans.expanded._replace(context=small))
    made, new = [], rows.new.clone()
    for own in (plans, LatentPlans(plans.absorbed, None)):
        rows.new.copy_(new)
        made.append(attend(q.clone(), rows.new, layer, rows.cache, rows.step, own, pdl=gpu.dependent_launch).float())
    rows.new.copy_(new)
    rows.check_stored()
    keys, values = up.float().split([key_dim, value_dim], 1)
    rows.q, rows.q_rope = torch.einsum("thk,hkr->thr", q[..., :key_dim].float(), keys), q[..., key_dim:]
    expected = torch.einsum("thr,hvr->thv", rows.by_torch(), values).flatten(1)
    for name, got in zip(("expanded", "absorbed"), made, strict=True):
        for begin, end in ((0, 2), (2, 3), (3, 203), (203, 236), (236, 936), (936, 1386)):
            part = expected[begin:end]
            error = float((got[begin:end] - part).norm() / part.norm())
            assert error < 0.02, (name, str(plans.expanded), begin, end, error)


@needs_float8
@pytest.mark.parametrize("heads", [20, 128])
@pytest.mark.parametrize("name", STEPS)
@torch.inference_mode()
def test_attention_of_real_shapes_over_float8(name: str, heads: int) -> None:
    """Attention is exact over the stored numbers, but for the roundings of queries and weights to 16 bits."""
    rows = Rows(heads, STEPS[name], float8=True)
    got = rows.run(rows.plan())
    rows.check_stored()
    expected = rows.by_torch()
    error = float((got.float() - expected).std() / expected.std())
    assert error < 0.01, (str(rows.plan()), error)


@torch.inference_mode()
def test_attention_in_float32_is_exact() -> None:
    for rows in (Rows(20, STEPS["chunks and rows"], torch.float32), Rows(20, STEPS["a row"], torch.float32)):
        torch.testing.assert_close(rows.run(rows.plan()), rows.by_torch(), atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_products_by_head_of_real_shapes() -> None:
    """The matrices of GLM-4.7-Flash as they lie in a checkpoint, and rows that are parts of others."""
    device = torch.device("cuda")
    up = torch.randn(20, 192 + 256, RANK, device=device).bfloat16()
    keys, values = up[:, :192].transpose(1, 2), up[:, 192:]
    for rows in (1, 3, 64, 700):
        q = torch.randn(rows, 20, 256, device=device).bfloat16()[..., :192]
        absorbed = by_head(q, keys)
        exact = torch.einsum("thn,hnr->thr", q.float(), up[:, :192].float())
        assert float((absorbed.float() - exact).std() / exact.std()) < 0.01
        made = by_head(absorbed, values)
        exact = torch.einsum("thr,hvr->thv", absorbed.float(), up[:, 192:].float())
        assert float((made.float() - exact).std() / exact.std()) < 0.01
        assert made.is_contiguous()


@pytest.fixture(scope="module", params=["deepseek-v3", "deepseek-v3-yarn", "deepseek-v2-groups", "glm4-moe-lite"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    tiny.build_model(request.param).save_pretrained(path)
    placeholder_tokenizer(tiny.VOCAB_SIZE).backend.save(str(path / "tokenizer.json"))
    return path


async def generate(path: Path, **config: Any) -> list[Any]:
    """Results of prompts that run together in a pool that is too small, one of them again, and two samples."""
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_kv_blocks": 9, "max_model_len": 96} | config
    greedy: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "logprobs": 3}
    async with AsyncEngine.from_pretrained(path, progress=False, **settings) as engine:
        together = await asyncio.gather(*(engine.generate(prompt, SamplingParams(**greedy)) for prompt in PROMPTS))
        again = await engine.generate(PROMPTS[0], SamplingParams(**greedy, n=2))
    return [completion for output in (*together, again) for completion in output.outputs]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_tokens_in_float32_are_those_of_the_cpu(checkpoint: Path, eager: bool) -> None:
    expected = asyncio.run(generate(checkpoint, device="cpu", dtype="float32"))
    got = asyncio.run(generate(checkpoint, device="cuda", dtype="float32", enforce_eager=eager))
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]


def test_tokens_of_expanded_prompts_are_those_of_the_cpu(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanded, "LEAST_TOKENS", 8)
    monkeypatch.setattr(expanded, "choose_context", lambda *_: ContextPlan(3, 16, 6, 16, 4, 1))
    expected, got = (asyncio.run(generate(checkpoint, device=device, dtype="float32")) for device in ("cpu", "cuda"))
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]


@needs_float8
def test_tokens_of_latents_in_float8_are_those_of_the_cpu(checkpoint: Path) -> None:
    """In float32, where only float8 rounds; scales are made by the device."""
    float8 = {"dtype": "float32", "kv_cache_dtype": "fp8"}
    expected, got = (asyncio.run(generate(checkpoint, device=device, **float8)) for device in ("cpu", "cuda"))
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]


def test_the_first_tokens_in_bfloat16_are_as_probable_as_on_the_cpu(checkpoint: Path) -> None:
    ours, theirs = [asyncio.run(generate(checkpoint, device=device, dtype="bfloat16")) for device in ("cuda", "cpu")]
    for one, other in zip(ours, theirs, strict=True):
        if one.token_ids[0] == other.token_ids[0]:
            near = one.logprobs[0].logprob, other.logprobs[0].logprob
            assert near[0] == pytest.approx(near[1], abs=0.5)
    assert sum(one.token_ids[0] == other.token_ids[0] for one, other in zip(ours, theirs, strict=True)) >= 4
