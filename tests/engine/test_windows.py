"""A model whose layers all have a window lets go of blocks that it sees no more, and computes what it did before."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncengine import AsyncEngine, SamplingParams, testing
from asyncengine.config import EngineConfig
from asyncengine.kernels.ops import LayerKVCache
from asyncengine.models.config import ModelConfig
from asyncengine.runner.steps.model_runner import CpuModelRunner, cpu_ops
from asyncengine.text.tokenizer import placeholder_tokenizer
from tests.kernels.simulated_cuda import make_engine
from tests.models import tiny

WINDOW = 7
Jobs = list[tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("mistral")
    model = tiny.build_model("mistral-window", max_position_embeddings=512, num_hidden_layers=2)
    model.save_pretrained(path)
    placeholder_tokenizer(tiny.VOCAB_SIZE).backend.save(str(path / "tokenizer.json"))
    return path, model


def on_cpu(path: str, **config: Any) -> AsyncEngine:
    return AsyncEngine.from_pretrained(path, device="cpu", cpu_threads=1, progress=False, **config)


def run(path: Path, jobs: Jobs, make: Any = on_cpu, **config: Any) -> tuple[list[Any], dict[str, int]]:
    """The tokens of all sequences of the jobs, which run together, and statistics at the end."""

    async def main() -> tuple[list[Any], dict[str, int]]:
        async with make(str(path), **config) as engine:
            async with testing.no_leaks(engine):
                outputs = await asyncio.gather(*(engine.generate(*job) for job in jobs))
            return [[c.token_ids for c in output.outputs] for output in outputs], engine._life.backend.step_loop.stats()

    return asyncio.run(main())


def without_release(path: Path, jobs: Jobs, **config: Any) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelConfig, "longest_window", 0)
        return run(path, jobs, **config)[0]


def many_jobs() -> Jobs:
    """Prompts below and far above the window, some that begin alike, greedy and not, one sequence and several."""
    rng = random.Random(4)
    jobs = []
    for i in range(12):
        prompt = [(i % 3 + j) % tiny.VOCAB_SIZE for j in range(rng.choice([5, 30, 64, 130]))]
        prompt[-1] = rng.randrange(tiny.VOCAB_SIZE)
        sampling = {"temperature": 0.0} if i % 2 else {"temperature": 1.0, "seed": i}
        params = SamplingParams(max_tokens=rng.randint(1, 60), ignore_eos=True, n=rng.choice([1, 1, 3]), **sampling)
        jobs.append((prompt, params))
    return jobs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("caching", [True, False])
def test_a_long_generation_holds_the_blocks_of_its_window(mistral, caching):
    path, model = mistral
    prompt, count = list(range(40, 90)), 400

    async def main() -> tuple[list[int], list[int]]:
        held: list[int] = []
        tokens: list[int] = []
        config = {
            "num_kv_blocks": 32,
            "enable_prefix_caching": caching,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 4,
        }
        async with on_cpu(str(path), **config) as engine, testing.no_leaks(engine):
            params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
            async for delta in engine.stream(prompt, params):
                tokens += delta.token_ids
                stats = engine._life.backend.step_loop.stats()
                held.append(stats["num_kv_blocks"] - stats["num_free_blocks"])
        return tokens, held

    tokens, held = asyncio.run(main())
    assert tokens == tiny.generate(model, prompt, count)
    # The window, the block that is written, one that is about to be published, and one that a step in flight may see.
    assert 1 <= max(held) <= 5 < count // 16
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    assert without_release(path, [(prompt, params)]) == [[tuple(tokens)]]


MACHINERY = {
    "as a rule": {},
    "serial": {"steps_in_flight": 1},
    "little room": {"num_kv_blocks": 16, "max_model_len": 192, "max_num_batched_tokens": 40, "max_num_seqs": 8},
    "no prefix cache": {"enable_prefix_caching": False, "num_kv_blocks": 16, "max_model_len": 192},
    "chunks of seven": {"prefill_chunk_size": 7, "num_kv_blocks": 20, "max_model_len": 192},
    "host tier": {"host_kv_memory_bytes": 1 << 22, "num_kv_blocks": 14, "max_model_len": 192},
    "host rows": {
        "host_kv_memory_bytes": 1 << 22, "num_kv_blocks": 14, "max_model_len": 192, "hybrid_attention": "always",
        "hybrid_workers": 1,
    },
    "prompts by sdpa": {"prefill_attention": "sdpa", "num_kv_blocks": 20, "max_model_len": 192},
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(mistral) -> list[Any]:
    return without_release(mistral[0], many_jobs())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MACHINERY)
def test_outputs_are_those_of_before(mistral, expected, name):
    outputs, stats = run(mistral[0], many_jobs(), **MACHINERY[name])
    if name == "prompts by sdpa":  # whose last bits depend on the cut of prompts
        assert [[len(tokens) for tokens in job] for job in outputs] == [[len(t) for t in job] for job in expected]
    else:
        assert outputs == expected
    if name == "little room":
        assert stats["num_preemptions"] > 0
    if name == "host rows":
        assert stats["moved_to_host"] > 0


def test_sequences_that_together_do_not_fit_run_beside_each_other(mistral):
    """Three sequences of 20 blocks go on at once in 24, as none holds more than a few: nobody gives way."""
    jobs = [([9 + i] * 150, SamplingParams(max_tokens=170, temperature=0, ignore_eos=True)) for i in range(3)]
    config = {"num_kv_blocks": 24, "max_model_len": 320, "max_num_batched_tokens": 32, "max_num_seqs": 3}
    outputs, stats = run(mistral[0], jobs, **config)
    assert stats["num_preemptions"] == 0
    assert stats["num_steps"] < 2 * 170
    assert outputs == without_release(mistral[0], jobs)


@pytest.mark.parametrize("attention", ["native", "sdpa"])
def test_nothing_reads_behind_the_window(mistral, attention):
    """Entries of the block table that are seen no more name a block of NaN, for chunks and for decode rows."""
    config = EngineConfig.from_kwargs(
        str(mistral[0]), {"num_kv_blocks": 16, "device": "cpu", "cpu_threads": 1, "prefill_attention": attention}
    )
    runner = CpuModelRunner.load(config, ops=cpu_ops(config))
    driver = tiny.Driver(runner, native=True)
    poison = driver.free.pop()
    for layer in runner._cache.layers:
        assert isinstance(layer, LayerKVCache)
        layer.k[poison] = layer.v[poison] = torch.nan
    prompt = [(7 * i) % tiny.VOCAB_SIZE for i in range(70)]
    sequence = driver.add(prompt, 110)
    while len(sequence.generated) < 40:
        holes = max(0, sequence.computed - WINDOW + 1) // 16
        sequence.table[:holes] = poison
        driver.step([(sequence, min(11, len(sequence.tokens) - sequence.computed))])
    assert holes >= 5
    assert sequence.generated == tiny.generate(mistral[1], prompt, 40)


def test_kernels_of_the_device_compute_the_same(mistral):
    """Two prompts that have room side by side only because they let go of blocks."""
    path, model = mistral
    prompts = [[5 + i, *range(3, 47)] for i in range(2)]
    jobs = [(prompt, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)) for prompt in prompts]
    config = {
        "num_kv_blocks": 4, "max_model_len": 64, "max_num_batched_tokens": 16, "max_num_seqs": 2, "dtype": "float32",
        "step_timeout_s": 600.0,
    }  # fmt: skip
    outputs, _ = run(path, jobs, make_engine, **config)
    assert outputs == [[tuple(tiny.generate(model, prompt, 3))] for prompt in prompts]
