"""Groups of layers with a window on a GPU: tokens of the CPU's engine, whatever the machinery does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncengine import AsyncEngine, SamplingParams, testing
from asyncengine.config import EngineConfig
from tests.gpu.test_no_hidden_sync import check_that_launches_never_wait
from tests.models import tiny
from tests.runner.stateful_engines import check_same, greedy, mixed_jobs, on_cpu, run, save

SIZES: dict[str, Any] = {
    "max_num_seqs": 6, "max_num_batched_tokens": 24, "num_kv_blocks": 80, "max_model_len": 400, "dtype": "float32",
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {"gemma3": {}, "gpt-oss": {}, "cohere2": {}}
JOBS = mixed_jobs(10, (3, 16, 33, 90, 170), 60)


def on_gpu(path: str, **config: Any) -> AsyncEngine:
    return AsyncEngine.from_pretrained(path, device="cuda", progress=False, tune_linear=False, **config)


@pytest.fixture(scope="module", params=VARIANTS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save(request.param, path, **VARIANTS[request.param])
    return path


@pytest.fixture(scope="module")
def expected(saved: Path) -> Any:
    """Greedy tokens of the CPU, and sampled ones of the GPU alone: a number drawn may lie between two tokens."""
    both = [run(make, saved, JOBS, alone=True, **SIZES)[0] for make in (on_cpu, on_gpu)]
    return [on_card if params.temperature else exact for exact, on_card, (_, params) in zip(*both, JOBS, strict=True)]


MACHINERY: dict[str, dict[str, Any]] = {
    "together": {},
    "kernel by kernel": {"enforce_eager": True},
    "serial": {"steps_in_flight": 1},
    "chunks of one": {"prefill_chunk_size": 1},
    "chunks of seven": {"prefill_chunk_size": 7},
    "little room": {"num_kv_blocks": 12, "max_model_len": 240},
    "no prefix cache": {"enable_prefix_caching": False, "num_kv_blocks": 12, "max_model_len": 240},
    "a second round, with hits": {"rounds": 2},
    "batch invariant": {"batch_invariant": True},
    "mapped": {"staging": "mapped"},
    "pageable": {"staging": "pageable"},
}


@pytest.mark.parametrize("name", MACHINERY)
def test_outputs_equal_those_of_the_cpu(saved: Path, expected: Any, name: str) -> None:
    outputs, stats = run(on_gpu, saved, JOBS, **(SIZES | MACHINERY[name]))
    check_same(outputs, expected, JOBS, (saved.name, name))
    if name == "little room":
        assert stats["num_preemptions"] > 0, "the case must preempt"


def test_one_group_and_several_give_the_same_tokens(saved: Path) -> None:
    jobs = [([(5 * j + i) % tiny.VOCAB_SIZE for j in range(150)], greedy(40)) for i in range(3)]
    several, _ = run(on_gpu, saved, jobs, **SIZES)
    one, _ = run(on_gpu, saved, jobs, **SIZES, window_groups=False)
    check_same(several, one, jobs, saved.name)


def test_a_long_prompt_holds_the_windows_of_its_groups(saved: Path) -> None:
    held = []

    async def main() -> tuple[int, int, int]:
        async with on_gpu(str(saved), **SIZES | {"num_kv_blocks": 25}) as engine, testing.no_leaks(engine):
            async for _ in engine.stream([3 + i % 40 for i in range(340)], greedy(50)):
                stats = engine._life.loaded().step_loop.stats()
                held.append(stats["num_kv_blocks"] - stats["num_free_blocks"])
            info = engine.model_info
            return info.window_groups, info.window_blocks, info.num_kv_blocks

    groups, window_blocks, num_blocks = asyncio.run(main())
    assert groups >= 1
    assert num_blocks == 25 * (1 + groups)
    assert max(held) <= 25 + groups * window_blocks < num_blocks, f"{max(held)} blocks of {num_blocks}"


def test_a_prefix_is_found_again_and_gives_the_same_tokens(saved: Path) -> None:
    prompt = [(5 * j) % tiny.VOCAB_SIZE for j in range(150)]
    jobs = [(prompt, greedy(12)), (prompt[:90], greedy(12))]

    async def main() -> tuple[list[Any], int]:
        async with on_gpu(str(saved), **SIZES) as engine, testing.no_leaks(engine):
            outputs = [await engine.generate(*jobs[i]) for i in (0, 0, 1)]
            return [[list(output.token_ids)] for output in outputs], engine.stats().prefix_cache_hits

    tokens, hits = asyncio.run(main())
    expected, _ = run(on_cpu, saved, jobs, alone=True, **SIZES)
    check_same(tokens, [expected[0], *expected], [jobs[0], *jobs], saved.name)
    assert hits == 144 + 80


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_a_step_in_bfloat16_gives_finite_tokens_of_the_same_begin(saved: Path, kv_cache_dtype: str) -> None:
    """Few tokens of one group and of several, in bfloat16 over a cache of either type, are the same."""
    jobs = [([(3 * j + i) % tiny.VOCAB_SIZE for j in range(120)], greedy(8)) for i in range(4)]
    config = SIZES | {"dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype, "batch_invariant": True}
    several, _ = run(on_gpu, saved, jobs, **config)
    one, _ = run(on_gpu, saved, jobs, **config, window_groups=False)
    check_same(several, one, jobs, (saved.name, kv_cache_dtype))


@pytest.mark.alone
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_launching_never_waits(saved: Path, eager: bool) -> None:
    config = EngineConfig(
        model=str(saved), dtype="float32", device="cuda", max_num_seqs=8, max_num_batched_tokens=24, num_kv_blocks=10,
        max_model_len=160, enforce_eager=eager,
    )  # fmt: skip
    check_that_launches_never_wait(config, "num_preemptions")


def test_memory_for_blocks_is_that_of_groups(saved: Path) -> None:
    """The cache that a start sizes by itself holds more sequences than one of a block for all layers."""
    sizes: dict[str, Any] = SIZES | {"num_kv_blocks": None, "kv_cache_memory_bytes": 1 << 22}
    sequences = []
    for groups in (True, False):

        async def main(groups: bool = groups) -> float:
            async with on_gpu(str(saved), **sizes, window_groups=groups) as engine:
                await engine.generate([5] * 100, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
                return engine.model_info.kv_capacity_sequences

        sequences.append(asyncio.run(main()))
    assert sequences[0] > 1.2 * sequences[1], sequences
