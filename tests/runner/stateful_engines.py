"""Engines of small models with a state, on the CPU and on the CUDA path, and the same jobs for both."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncengine import AsyncEngine, SamplingParams, testing
from asyncengine.text.tokenizer import placeholder_tokenizer
from tests.models import tiny

Jobs = list[tuple[list[int], SamplingParams]]
Make = Callable[..., AsyncEngine]
SIZES: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 48, "num_kv_blocks": 64, "max_model_len": 192, "dtype": "float32",
    "step_timeout_s": 600.0,
}  # fmt: skip


def save(variant: str, path: Path, **changes: Any) -> Any:
    """Write a checkpoint of one of ``tiny.VARIANTS``, with a tokenizer, and return the model of transformers."""
    model = tiny.build_model(variant, max_position_embeddings=512, **changes)
    model.save_pretrained(path)
    placeholder_tokenizer(tiny.VOCAB_SIZE).backend.save(str(path / "tokenizer.json"))
    return model


def saving(factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Return a function that saves a variant once: its directory, and the model of transformers."""

    @functools.cache
    def saved(variant: str) -> tuple[Path, Any]:
        path = factory.mktemp(variant)
        return path, save(variant, path)

    return saved


def on_cpu(path: str, **config: Any) -> AsyncEngine:
    return AsyncEngine.from_pretrained(path, device="cpu", cpu_threads=1, progress=False, **config)


def greedy(count: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, n=n)


def mixed_jobs(count: int, lengths: tuple[int, ...], most: int) -> Jobs:
    """Prompts that share beginnings, greedy and sampled, some of several sequences."""
    draw = random.Random(8)
    jobs = []
    for i in range(count):
        prompt = [(i % 3 + 5 * j) % tiny.VOCAB_SIZE for j in range(draw.choice(lengths))]
        if i % 2:
            prompt[-1] = draw.randrange(tiny.VOCAB_SIZE)
        sampling = {"temperature": 0.0} if i % 3 else {"temperature": 1.0, "seed": i}
        params = SamplingParams(max_tokens=draw.randint(1, most), ignore_eos=True, n=draw.choice([1, 1, 3]), **sampling)
        jobs.append((prompt, params))
    return jobs


def run(
    make: Make, path: Path, jobs: Jobs, *, alone: bool = False, rounds: int = 1, **config: Any
) -> tuple[list[list[list[int]]], dict[str, Any]]:
    """Token ids of every sequence of every job, in the last round, and statistics; checks that nothing leaks."""

    async def main() -> tuple[list[list[list[int]]], dict[str, Any]]:
        async with make(str(path), **{**SIZES, **config}) as engine:
            async with testing.no_leaks(engine):
                for _ in range(rounds):
                    if alone:
                        outputs = [await engine.generate(prompt, params) for prompt, params in jobs]
                    else:
                        outputs = list(await asyncio.gather(*(engine.generate(*job) for job in jobs)))
            stats = engine._life.loaded().step_loop.stats()
            return [[list(sequence.token_ids) for sequence in output.outputs] for output in outputs], stats

    return asyncio.run(main())


def check_same(got: list[Any], expected: list[Any], jobs: Jobs, case: object) -> None:
    """Fail with the first job, sequence and place whose token is another."""
    for i, (prompt, params) in enumerate(jobs):
        for j, (ours, theirs) in enumerate(zip(got[i], expected[i], strict=True)):
            place = next((k for k, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
            assert place is None, (
                f"{case}: job {i} (a prompt of {len(prompt)} tokens, temperature {params.temperature}), sequence {j}: "
                f"token {place} is {ours[place]} and not {theirs[place]}"
            )


async def visit_host(engine: AsyncEngine, length: int, answer: int) -> tuple[list[int], list[int], list[int]]:
    """Generate for more prompts than there are snapshots, then for the first one once more, whose state and perhaps
    blocks come from the host by then.

    Returns the first prompt, and its tokens of the first time and of the second time.
    """
    step_loop = engine._life.loaded().step_loop
    prompts = [
        [(7 * i + j) % tiny.VOCAB_SIZE for i in range(length)] for j in range(step_loop.stats()["num_snapshots"] + 2)
    ]
    outputs = []
    for i, prompt in enumerate(prompts):
        outputs.append(await engine.generate(prompt, greedy(answer)))
        for _ in range(1000):
            if step_loop.stats()["snapshots_to_host"] > i:
                break
            await asyncio.sleep(0.01)
    assert step_loop.stats()["snapshots_to_host"] >= len(prompts), "snapshots must be copied out"
    again = await engine.generate(prompts[0], greedy(answer))
    assert [output.usage.cached_tokens for output in outputs] == [0] * len(prompts)
    assert again.usage.cached_tokens == (length - 1) // 16 * 16, "the state must come from the host"
    assert step_loop.stats()["snapshots_from_host"] == 1
    assert step_loop.stats()["failed_transfers"] == 0
    return prompts[0], list(outputs[0].token_ids), list(again.token_ids)


HOST_STATES: dict[str, Any] = {"max_num_seqs": 1, "state_snapshot_tokens": 0, "host_kv_memory_bytes": 1 << 23}
"""Two snapshots beside the one sequence, and more on the host."""
