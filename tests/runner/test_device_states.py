"""Models with a state on the CUDA path give the tokens of the CPU and of transformers, whatever the machinery does.

Without a GPU the kernels are interpreted and run on the simulated device: few and short cases.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncengine import testing
from tests.kernels.simulated_cuda import make_engine
from tests.models import tiny
from tests.runner.stateful_engines import (
    HOST_STATES,
    SIZES,
    check_same,
    greedy,
    mixed_jobs,
    on_cpu,
    run,
    saving,
    visit_host,
)

VARIANTS = ["lfm2-moe", "falcon-h1-normed", "qwen3-next-biased"]
"""One of each kind of state; tests/gpu/test_states.py has all families."""
KINDS = ["lfm2", "mamba2", "qwen3.5"]
"""A model of each kind of state: beside attention, alone, and beside attention behind a gate."""
JOBS = mixed_jobs(4, (3, 17, 33), 4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    return saving(tmp_path_factory)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_equal_transformers(saved, variant):
    path, model = saved(variant)
    prompts = [[5, 9, 2, 7, 7, 1, 30, 2, 17, 40, 41, 42, 3, 3, 8, 11, 12, 19], [5], [100, 3, 77]]
    outputs, _ = run(make_engine, path, [(prompt, greedy(3)) for prompt in prompts], max_num_batched_tokens=24)
    for prompt, [tokens] in zip(prompts, outputs, strict=True):
        assert tokens == tiny.followers(model, prompt, tokens), f"{variant}, a prompt of {len(prompt)} tokens"


CHUNKS: dict[str, Any] = {"prefill_chunk_size": 7, "max_num_batched_tokens": 32}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("variant", "config"), [("lfm2", {}), ("mamba2", CHUNKS), ("qwen3.5", CHUNKS)], ids=str)
def test_outputs_equal_those_of_the_cpu(saved, variant, config):
    """Batches, forks and chunks, over slots that hold what others left."""
    path, _ = saved(variant)
    expected, _ = run(on_cpu, path, JOBS, alone=True)
    outputs, _ = run(make_engine, path, JOBS, **config)
    check_same(outputs, expected, JOBS, variant)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", ["lfm2", "mamba2"])
def test_preemption_changes_nothing(saved, variant):
    """The blocks do not do for all: a sequence gives its own back and begins once more, with a state of zeros."""
    path, model = saved(variant)
    prompts, little = [[5] * 29, [6] * 10], {"num_kv_blocks": 3, "max_model_len": 40}
    outputs, stats = run(make_engine, path, [(prompt, greedy(5)) for prompt in prompts], **little)
    assert stats["num_preemptions"] > 0
    for prompt, [tokens] in zip(prompts, outputs, strict=True):
        assert tokens == tiny.followers(model, prompt, tokens)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", KINDS)
def test_a_prompt_goes_on_from_a_snapshot(saved, variant):
    """The next turn begins with a copy of the state as it was at the end of the shared prefix."""
    path, model = saved(variant)
    prompt = [7 * i % tiny.VOCAB_SIZE for i in range(37)]

    async def main() -> None:
        async with make_engine(str(path), **SIZES) as engine, testing.no_leaks(engine):
            first = await engine.generate(prompt, greedy(2))
            longer = [*prompt, *first.token_ids, 4]
            second = await engine.generate(longer, greedy(3))
            assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 32)
            assert list(second.token_ids) == tiny.followers(model, longer, second.token_ids)

    asyncio.run(main())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("variant", "blocks"),
    [pytest.param("qwen3.5", 64, marks=pytest.mark.exhaustive), ("qwen3.5", 6), ("mamba2", 6)],
    ids=["blocks stay", "leave", "hold nothing"],
)
def test_an_evicted_state_comes_back_from_the_host(saved, variant, blocks):
    """Copies out and in on streams of their own: the tokens are those of transformers, also behind the state."""
    path, model = saved(variant)

    async def main() -> None:
        sizes = {**SIZES, **HOST_STATES, "num_kv_blocks": blocks, "max_model_len": 64}
        async with make_engine(str(path), **sizes) as engine, testing.no_leaks(engine):
            assert engine.model_info.num_host_states >= 4
            prompt, first, again = await visit_host(engine, 37, 2)
            assert first == again == tiny.followers(model, prompt, first)
            assert (engine.stats().blocks_from_host > 0) == (blocks == 6)

    asyncio.run(main())
