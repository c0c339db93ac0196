"""Layers with a window beside layers that see all: each group has blocks of its own, and tokens stay as they are."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from asyncengine import AsyncEngine, SamplingParams, testing
from asyncengine.text.tokenizer import placeholder_tokenizer
from tests.models import tiny

CONTEXT = 400
SMALL = {"max_model_len": CONTEXT, "max_num_batched_tokens": 24, "max_num_seqs": 6, "num_kv_blocks": 80}
Jobs = list[tuple[list[int], SamplingParams]]
Checkpoint = tuple[Path, Any]


@pytest.fixture(scope="module", params=["gemma3", "gpt-oss"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp(request.param)
    model = tiny.build_model(request.param, max_position_embeddings=512)
    model.save_pretrained(path)
    placeholder_tokenizer(tiny.VOCAB_SIZE).backend.save(str(path / "tokenizer.json"))
    return path, model


def opened(path: Path, **config: Any) -> AsyncEngine:
    settings = {"device": "cpu", "cpu_threads": 1, "dtype": "float32", "progress": False, **SMALL, **config}
    return AsyncEngine.from_pretrained(str(path), **settings)


def run(path: Path, jobs: Jobs, **config: Any) -> tuple[list[Any], dict[str, int]]:
    """The tokens of all sequences of the jobs, which run together, and statistics at the end."""

    async def main() -> tuple[list[Any], dict[str, int]]:
        async with opened(path, **config) as engine:
            async with testing.no_leaks(engine):
                outputs = await asyncio.gather(*(engine.generate(*job) for job in jobs))
            return [[c.token_ids for c in output.outputs] for output in outputs], engine._life.backend.step_loop.stats()

    return asyncio.run(main())


def in_one_group(path: Path, jobs: Jobs, **config: Any) -> list[Any]:
    return run(path, jobs, window_groups=False, **config)[0]


def many_jobs() -> Jobs:
    """Prompts below and far above the window, some that begin alike, greedy and not, one sequence and several."""
    rng = random.Random(4)
    jobs = []
    for i in range(10):
        prompt = [(i % 3 + j) % tiny.VOCAB_SIZE for j in range(rng.choice([5, 30, 64, 130]))]
        prompt[-1] = rng.randrange(tiny.VOCAB_SIZE)
        sampling = {"temperature": 0.0} if i % 2 else {"temperature": 1.0, "seed": i}
        params = SamplingParams(max_tokens=rng.randint(1, 50), ignore_eos=True, n=rng.choice([1, 1, 3]), **sampling)
        jobs.append((prompt, params))
    return jobs


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> list[Any]:
    return in_one_group(checkpoint[0], many_jobs())


MACHINERY = {
    "as a rule": {},
    "serial": {"steps_in_flight": 1},
    "little room": {"num_kv_blocks": 9, "max_model_len": 192},
    "no prefix cache": {"enable_prefix_caching": False, "num_kv_blocks": 9, "max_model_len": 192},
    "chunks of one": {"prefill_chunk_size": 1, "max_num_seqs": 3},
    "chunks of seven": {"prefill_chunk_size": 7, "num_kv_blocks": 20, "max_model_len": 192},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MACHINERY)
def test_outputs_are_those_of_one_group(checkpoint, expected, name):
    outputs, stats = run(checkpoint[0], many_jobs(), **MACHINERY[name])
    assert outputs == expected
    if name == "little room":
        assert stats["num_preemptions"] > 0


@pytest.mark.sampled(2)
def test_tokens_beyond_the_window_equal_transformers(checkpoint):
    path, model = checkpoint
    prompts = [[(7 * i + j) % tiny.VOCAB_SIZE for j in range(length)] for i, length in enumerate((3, 40, 150))]
    greedy = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    outputs, _ = run(path, [(prompt, greedy) for prompt in prompts])
    assert outputs == [[tuple(tiny.generate(model, prompt, 40))] for prompt in prompts]


def test_a_prefix_is_found_again_and_gives_the_same_tokens(checkpoint):
    path, model = checkpoint
    prompt = [(5 * j) % tiny.VOCAB_SIZE for j in range(150)]
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)

    async def main() -> tuple[list[Any], int]:
        async with opened(path) as engine, testing.no_leaks(engine):
            outputs = [await engine.generate(tokens, greedy) for tokens in (prompt, prompt, prompt[:90])]
            return [output.outputs[0].token_ids for output in outputs], engine.stats().prefix_cache_hits

    tokens, hits = asyncio.run(main())
    assert tokens == [tuple(tiny.generate(model, begin, 12)) for begin in (prompt, prompt, prompt[:90])]
    assert hits == 144 + 80


def test_a_long_prompt_holds_the_windows_of_its_groups(checkpoint):
    """While the prompt is computed and behind it, only the group that sees all has blocks of all tokens."""
    path, _ = checkpoint
    held = []

    async def main() -> tuple[int, int, int]:
        async with opened(path, num_kv_blocks=25) as engine, testing.no_leaks(engine):
            params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
            async for _ in engine.stream([3 + i % 40 for i in range(340)], params):
                stats = engine._life.backend.step_loop.stats()
                held.append(stats["num_kv_blocks"] - stats["num_free_blocks"])
            info = engine.model_info
            return info.window_groups, info.window_blocks, info.num_kv_blocks

    groups, window_blocks, num_blocks = asyncio.run(main())
    assert groups >= 1
    assert num_blocks == 25 * (1 + groups)
    assert max(held) >= 340 // 16
    assert max(held) <= 25 + groups * window_blocks < num_blocks


def test_a_request_may_be_as_long_as_the_cache_says(checkpoint):
    """The windows leave room: the longest request takes more than a share of the blocks for each group."""
    path, model = checkpoint

    async def main() -> tuple[int, list[Any]]:
        async with opened(path, num_kv_blocks=15) as engine, testing.no_leaks(engine):
            capacity = min(CONTEXT, engine.model_info.kv_capacity_tokens)
            prompt = [9 + i % 50 for i in range(capacity - 8)]
            params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
            outputs = await asyncio.gather(*(engine.generate(prompt, params) for _ in range(2)))
            assert [tuple(tiny.generate(model, prompt, 8))] * 2 == [o.outputs[0].token_ids for o in outputs]
            return capacity, prompt

    capacity, _ = asyncio.run(main())
    assert capacity == CONTEXT > 15 * 16


@pytest.mark.parametrize("config", [{"host_kv_memory_bytes": 1 << 22}, {"tensor_parallel_size": 2}])
def test_what_knows_one_table_keeps_one_group(checkpoint, config, caplog):
    path, _ = checkpoint
    if "tensor_parallel_size" in config and path.name.startswith("gpt-oss"):
        pytest.skip("gpt-oss has sinks, which ranks refuse")
    with caplog.at_level(logging.INFO):
        greedy = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        jobs = [([4, 5, 6] * 20, greedy)]
        assert run(path, jobs, **config)[0] == in_one_group(path, jobs)
    assert "layers with a window keep all tokens" in caplog.text
