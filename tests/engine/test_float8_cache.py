"""Engines whose keys and values are in float8: near the exact ones, and the same whatever the machinery does."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncengine import AsyncEngine, SamplingParams, _core, bundled_model, testing
from asyncengine.bundled.grammar import generate
from asyncengine.config import EngineConfig
from asyncengine.runner.steps.model_runner import CpuModelRunner
from asyncengine.text.tokenizer import Tokenizer

TOKENS = 64


def stories(count: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_pretrained(str(bundled_model()))
    rng = random.Random(0)
    texts = (tokenizer.encode(generate(rng)) for _ in range(100 * count))
    return [ids[:TOKENS] for ids in texts if len(ids) >= TOKENS][:count]


def logits_of(prompts: list[list[int]], **config: Any) -> Tensor:
    """float32 [prompts * TOKENS, V], of all prompts in one step."""
    settings = {"device": "cpu", "cpu_threads": 2, "num_kv_blocks": 64, "max_model_len": TOKENS, **config}
    runner = CpuModelRunner.load(EngineConfig.from_kwargs(str(bundled_model()), settings))
    count, blocks = len(prompts), TOKENS // 16
    positions = list(range(TOKENS)) * count
    slots = list(range(count * TOKENS))
    starts = [i * TOKENS for i in range(count + 1)]
    tables = [list(range(i * blocks, (i + 1) * blocks)) for i in range(count)]
    batch = _core.StepBatch([i for ids in prompts for i in ids], positions, slots, starts, [0] * count, tables, slots)
    logits = runner.forward(batch).logits
    assert logits is not None
    return logits.clone()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_near_the_exact_ones(dtype: str) -> None:
    """The bundled model's logits move by less than 2% of their norm, and 19 in 20 likeliest tokens stay."""
    prompts = stories(8)
    exact, other = (logits_of(prompts, dtype=dtype, kv_cache_dtype=kind) for kind in ("auto", "fp8"))
    error = float((other - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.02, error
    assert (exact.argmax(1) == other.argmax(1)).float().mean() > 0.95


def run(jobs: list[tuple[list[int], SamplingParams]], *, alone: bool = False, rounds: int = 1, **config: Any) -> Any:
    settings = {
        "device": "cpu", "cpu_threads": 2, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_kv_blocks": 96,
        "max_model_len": 160, "kv_cache_dtype": "fp8", **config,
    }  # fmt: skip

    async def main() -> tuple[list[list[tuple[int, ...]]], Any]:
        async with AsyncEngine.from_pretrained(str(bundled_model()), **settings) as engine:
            async with testing.no_leaks(engine):
                for _ in range(rounds):
                    outputs = []
                    if alone:
                        outputs = [await engine.generate(*job) for job in jobs]
                    else:
                        outputs = await asyncio.gather(*(engine.generate(*job) for job in jobs))
            return [[one.token_ids for one in output.outputs] for output in outputs], engine.stats()

    return asyncio.run(main())


MACHINERY: dict[str, dict[str, Any]] = {
    "together": {},
    "one step in flight": {"steps_in_flight": 1},
    "chunks of 1": {"prefill_chunk_size": 1},
    "chunks of 7": {"prefill_chunk_size": 7},
    "whole prompts": {"prefill_chunk_size": None, "max_num_batched_tokens": 2048},
    "no prefix cache": {"enable_prefix_caching": False},
    "prefix hits": {"rounds": 2},
    "large blocks": {"block_size": 48},
    "one thread": {"cpu_threads": 1},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtype", "half"), [("float32", 0), ("bfloat16", 1)])
def test_outputs_do_not_depend_on_the_machinery(dtype: str, half: int) -> None:
    """Bit for bit: what is stored of a token depends on that token alone. n > 1 copies blocks.

    Each type gets every other setting: the machinery does not know the type."""
    one, two = stories(2)
    ways: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 1.0, "seed": 7, "n": 3}, {"temperature": 1.3, "top_p": 0.8, "seed": 9},
    ]  # fmt: skip
    prompts = [one, one[:33] + two[:9], two[:50], one[:17], two[:3]]
    jobs = [
        (prompt, SamplingParams(max_tokens=12, ignore_eos=True, **ways[i % 3])) for i, prompt in enumerate(prompts * 2)
    ]
    expected, _ = run(jobs, alone=True, dtype=dtype)
    for name, config in list(MACHINERY.items())[half::2]:
        outputs, _ = run(jobs, dtype=dtype, **config)
        assert outputs == expected, name
    outputs, stats = run(jobs, dtype=dtype, num_kv_blocks=12)
    assert outputs == expected
    assert stats.num_preemptions > 0


def test_torch_attends_for_prompts_too() -> None:
    prompts = stories(2)
    native, sdpa = (logits_of(prompts, kv_cache_dtype="fp8", prefill_attention=how) for how in ("native", "sdpa"))
    assert float((sdpa - native).norm() / native.norm()) < 1e-5
    assert not torch.equal(native, logits_of(prompts))
