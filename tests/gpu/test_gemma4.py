"""Gemma 4 on a GPU: tokens of transformers alone, together and in chunks, by graphs and kernel by kernel."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.kernels.cuda.attention.choose import Limits
from asyncengine.kernels.cuda.attention.plan import LayerKind
from asyncengine.kernels.cuda.attention.run import StepAttention
from asyncengine.kernels.cuda.step.bucket import Bucket
from asyncengine.kernels.cuda.trials import examine
from asyncengine.kernels.ops import LayerKVCache
from tests.kernels.test_paged_attention import Case, check, make_world
from tests.models import tiny

WIDE: dict[str, Any] = {"head_dim": 256, "global_head_dim": 512, "sliding_window": 20}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "keys are values": ("gemma4", {}),
    "shared": ("gemma4-shared", {}),
    "experts": ("gemma4-experts", {}),
    "keys are values, real heads": ("gemma4", WIDE),
    "shared, real heads": ("gemma4-shared", WIDE),
}
PROMPTS = [[(7 * i + 3 * n) % tiny.VOCAB_SIZE for i in range(n)] for n in (1, 15, 17, 70, 130)]
COUNT = 24


def outputs_of(path: Path, *, together: bool = True, logprobs: int | None = None, **config: Any) -> list[Any]:
    async def main() -> list[Any]:
        params = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True, logprobs=logprobs)
        settings = {
            "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 192, "num_kv_blocks": 96,
            "dtype": "float32", "tune_linear": False, "skip_tokenizer_init": True,
        } | config  # fmt: skip
        async with AsyncEngine.from_pretrained(str(path), device="cuda", progress=False, **settings) as engine:
            if together:
                return list(await asyncio.gather(*(engine.generate(prompt, params) for prompt in PROMPTS)))
            return [await engine.generate(prompt, params) for prompt in PROMPTS]

    return asyncio.run(main())


@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_equal_transformers(tmp_path: Path, name: str) -> None:
    variant, changes = VARIANTS[name]
    model = tiny.build_model(variant, max_position_embeddings=192, **changes)
    model.save_pretrained(tmp_path)
    ways: dict[str, dict[str, Any]] = {
        "alone": {"together": False},
        "together": {},
        "in chunks of 7 tokens": {"prefill_chunk_size": 7},
        "kernel by kernel": {"enforce_eager": True},
        "with fixed splits": {"batch_invariant": True},
    }
    for way, config in ways.items():
        for prompt, output in zip(PROMPTS, outputs_of(tmp_path, **config), strict=True):
            tokens = list(output.token_ids)
            assert tokens == tiny.followers(model, prompt, tokens), f"{way}, a prompt of {len(prompt)} tokens"


@pytest.mark.parametrize("name", VARIANTS)
def test_log_probabilities_in_bfloat16_are_near_those_of_float32(tmp_path: Path, name: str) -> None:
    """Errors of log probabilities, root of their mean square, are at most twice those of transformers in bfloat16."""
    variant, changes = VARIANTS[name]
    model = tiny.build_model(variant, initializer_range=0.1, max_position_embeddings=192, **changes).bfloat16()
    model.save_pretrained(tmp_path)
    exact = copy.deepcopy(model).float()
    ours, theirs = [], []
    for prompt, output in zip(PROMPTS, outputs_of(tmp_path, dtype="bfloat16", logprobs=0), strict=True):
        ids, chosen = torch.tensor([[*prompt, *output.token_ids]]), torch.tensor(output.token_ids)[:, None]
        with torch.inference_mode():
            wanted, rounded = (
                which(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).gather(1, chosen)[:, 0]
                for which in (exact, model)
            )
        ours.append(torch.tensor([logprobs.logprob for logprobs in output.outputs[0].logprobs]) - wanted)
        theirs.append(rounded - wanted)
    apart, bound = (float(torch.cat(errors).square().mean().sqrt()) for errors in (ours, theirs))
    assert apart < max(0.05, 2 * bound), [
        f"{len(prompt)} tokens: {mine.abs().max():.3f}, transformers {other.abs().max():.3f}"
        for prompt, mine, other in zip(PROMPTS, ours, theirs, strict=True)
    ]


@pytest.mark.parametrize("window", [0, 1000])
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(2, 8, 512), (1, 8, 512), (8, 2, 256)])
def test_attention_of_the_real_heads(kv_heads: int, group: int, dim: int, window: int) -> None:
    """Prompts and rows of one token over long contexts, which many programs share."""
    device = torch.device("cuda")
    gpu = examine(device)
    for rows in (((1, 3000), (1, 5), (1, 900)), ((300, 200), (1, 2500), (70, 0))):
        case = Case(rows, kv_heads, group, dim, torch.bfloat16, window=window, tiles=None)
        world = make_world(case, device, spare_tokens=0)
        single = all(length == 1 for length, _ in rows)
        bucket = Bucket(3, case.num_tokens, single)
        kind = LayerKind(case.shape, window, prepared=True)
        limits = Limits(3, case.num_tokens, case.max_context, case.block_size)
        attention = StepAttention([kind], limits, gpu, device).of(bucket)
        attention.build(world.step, pdl=gpu.dependent_launch)
        attend = attention.of(case.layer, kv_heads, dim)
        layer = case.layer._replace(shares=True)  # keys and values are in the cache
        heads, cache = world.q.flatten(1).clone(), LayerKVCache(world.k, world.v)
        out = attend(heads, layer, cache, world.step, pdl=gpu.dependent_launch)
        check(world, out.cpu())
