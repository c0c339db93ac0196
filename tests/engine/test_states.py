"""Sequences whose layers keep a state: it is reset, copied for siblings and prefixes, and never another sequence's."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncengine import AsyncEngine, ConfigError, InvalidRequestError, RequestOutput, SamplingParams, testing
from asyncengine.config import EngineConfig
from asyncengine.kernels.ops import LayerStates
from asyncengine.runner.describe import describe_model
from asyncengine.runner.steps.model_runner import CpuModelRunner
from tests.models import stateful, tiny

Jobs = list[tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {name: tmp_path_factory.mktemp(name) for name in ("full", "window", "lfm2", "hybrid")}
    stateful.save(paths["full"])
    stateful.save(paths["window"], window=20)
    stateful.save_lfm2(paths["lfm2"])
    stateful.save_hybrid(paths["hybrid"])
    return paths


@pytest.fixture(autouse=True)
def family() -> Iterator[None]:
    with stateful.registered():
        yield


def greedy(count: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, n=n)


def engine_of(path: Path, **config: Any) -> AsyncEngine:
    sizes = {"max_num_seqs": 4, "max_model_len": 256, "num_kv_blocks": 64}
    return AsyncEngine.from_pretrained(str(path), device="cpu", cpu_threads=1, progress=False, **{**sizes, **config})


def poison(engine: AsyncEngine) -> None:
    """Fill the states of all slots with NaN, but not the snapshots. The engine is at rest."""
    runner: Any = engine._life.loaded().keep_alive
    for layer in runner._cache.layers:
        if isinstance(layer, LayerStates):
            layer.states[: engine.config.max_num_seqs] = 255


def tokens_of(outputs: list[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[sequence.token_ids for sequence in output.outputs] for output in outputs]


def run(path: Path, jobs: Jobs, *, alone: bool = False, **config: Any) -> tuple[list[Any], dict[str, int]]:
    async def main() -> tuple[list[Any], dict[str, int]]:
        async with engine_of(path, **config) as engine:
            poison(engine)
            async with testing.no_leaks(engine):
                if alone:
                    outputs = []
                    for job in jobs:
                        outputs.append(await engine.generate(*job))
                        await testing.settle(engine)
                        poison(engine)
                else:
                    outputs = list(await asyncio.gather(*(engine.generate(*job) for job in jobs)))
            return tokens_of(outputs), engine._life.loaded().step_loop.stats()

    return asyncio.run(main())


def mixed_jobs() -> Jobs:
    rng = random.Random(8)
    jobs = []
    for i in range(14):
        prompt = [(i % 3 + 5 * j) % tiny.VOCAB_SIZE for j in range(rng.choice([3, 16, 17, 33, 80, 120]))]
        if i % 2:
            prompt[-1] = rng.randrange(tiny.VOCAB_SIZE)
        sampling = {"temperature": 0.0} if i % 3 else {"temperature": 1.0, "seed": i}
        params = SamplingParams(max_tokens=rng.randint(1, 70), ignore_eos=True, n=rng.choice([1, 1, 3]), **sampling)
        jobs.append((prompt, params))
    return jobs


ALONE = {"enable_prefix_caching": False, "steps_in_flight": 1}
MACHINERY = {
    "as a rule": {},
    "serial": {"steps_in_flight": 1},
    "chunks of seven": {"prefill_chunk_size": 7, "max_num_batched_tokens": 32},
    "little room": {"num_kv_blocks": 12, "max_model_len": 192, "max_num_batched_tokens": 40},
    "little room, no prefix cache": {"num_kv_blocks": 12, "max_model_len": 192, "enable_prefix_caching": False},
    "host tier": {"num_kv_blocks": 12, "max_model_len": 192, "host_kv_memory_bytes": 1 << 22},
    "one slot": {"max_num_seqs": 1},
    "snapshots within prompts": {"state_snapshot_tokens": 16, "max_num_batched_tokens": 64},
}


@pytest.fixture(scope="module")
def expected(paths) -> dict[str, list[Any]]:
    with stateful.registered():
        return {name: run(path, mixed_jobs(), alone=True, **ALONE)[0] for name, path in paths.items()}


CASES = [
    *((kind, name) for name in MACHINERY for kind in ("full", "window")),
    *(("lfm2", name) for name in ("as a rule", "chunks of seven", "little room")),
    *(("hybrid", name) for name in ("as a rule", "chunks of seven", "little room")),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_outputs_do_not_depend_on_the_machinery(paths, expected, kind, name):
    """Batches, chunks, prefix hits, forks, preemption and what others left behind: bit for bit as alone."""
    outputs, stats = run(paths[kind], mixed_jobs(), **MACHINERY[name])
    assert outputs == expected[kind]
    if name == "little room" and kind == "full":
        assert stats["num_preemptions"] > 0
    if "no prefix" not in name:
        assert stats["cached_snapshots"] > 0


def test_a_step_from_the_start_gives_the_same_tokens(paths):
    """Each token equals the first that comes of all tokens before it as one prompt."""
    prompt = [7 * i % tiny.VOCAB_SIZE for i in range(40)]
    [[tokens]], _ = run(paths["full"], [(prompt, greedy(8))])
    jobs = [([*prompt, *tokens[:i]], greedy(1)) for i in range(8)]
    firsts, _ = run(paths["full"], jobs, alone=True, **ALONE)
    assert [first for [[first]] in firsts] == list(tokens)


def test_a_hit_reaches_as_far_as_a_snapshot(paths):
    """A prompt is found again up to the last whole block before its last token, an answer is not."""
    prompt = [3 * i % tiny.VOCAB_SIZE for i in range(70)]

    async def main() -> None:
        async with engine_of(paths["full"]) as engine, testing.no_leaks(engine):
            first = await engine.generate(prompt, greedy(40))
            again = await engine.generate(prompt, greedy(40))
            shorter = await engine.generate(prompt[:50], greedy(1))
            longer = await engine.generate([*prompt, *first.token_ids], greedy(40))
            further = await engine.generate([*prompt, *first.token_ids, 5, 6, 7], greedy(1))
            other = await engine.generate(prompt, greedy(40), cache_salt="another")
            cached = [o.usage.cached_tokens for o in (first, again, shorter, longer, further, other)]
            assert cached == [0, 64, 0, 64, 96, 0]
            assert first.token_ids == again.token_ids == other.token_ids
            assert longer.token_ids == (await engine.generate([*prompt, *first.token_ids], greedy(40))).token_ids

    asyncio.run(main())


def test_long_prompts_keep_snapshots_within(paths):
    prompt = [3 * i % tiny.VOCAB_SIZE for i in range(150)]

    async def main() -> None:
        async with engine_of(paths["full"], state_snapshot_tokens=40) as engine, testing.no_leaks(engine):
            await engine.generate(prompt, greedy(1))
            shared = await engine.generate([*prompt[:100], 1, 2, 3], greedy(9))
            assert shared.usage.cached_tokens == 96  # 40 tokens are 48 in whole blocks
            other = await engine.generate([*prompt[:100], 1, 2, 3], greedy(9), cache_salt="another")
            assert other.token_ids == shared.token_ids

    asyncio.run(main())
    with pytest.raises(ConfigError, match="state_snapshot_tokens must be in"):
        EngineConfig.from_kwargs("m", {"state_snapshot_tokens": -1})


def test_siblings_begin_with_a_copy(paths):
    """Each of n sequences goes on from the prompt's snapshot, with and without a prefix cache."""
    prompt = [11 * i % tiny.VOCAB_SIZE for i in range(90)]
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True, n=4)
    seeds = [SamplingParams(max_tokens=12, temperature=1.0, seed=5 + i, ignore_eos=True) for i in range(4)]
    expected, _ = run(paths["full"], [(prompt, seed) for seed in seeds], alone=True, **ALONE)
    for caching in (True, False):
        [outputs], stats = run(paths["full"], [(prompt, params)], enable_prefix_caching=caching)
        assert outputs == [tokens for [tokens] in expected]
        # The prompt is computed once: in the steps of one sequence and a few more.
        assert stats["num_steps"] <= 12 + 6
        assert stats["pinned_snapshots"] == 0


def test_snapshots_go_with_the_blocks_and_by_least_recent_use(paths):
    prompts = [[i, *range(60, 100)] for i in range(9)]

    async def main() -> None:
        sizes = {"max_num_seqs": 2, "num_kv_blocks": 200, "state_snapshot_tokens": 0}
        async with engine_of(paths["full"], **sizes) as engine, testing.no_leaks(engine):
            room = engine._life.loaded().step_loop.stats()["num_snapshots"]
            assert room == 4
            for prompt in prompts:
                await engine.generate(prompt, greedy(2))
            assert engine._life.loaded().step_loop.stats()["cached_snapshots"] == room
            hits = [(await engine.generate(prompt, greedy(2))).usage.cached_tokens for prompt in reversed(prompts[5:])]
            assert hits == [32] * 4
            assert (await engine.generate(prompts[0], greedy(2))).usage.cached_tokens == 0
        async with engine_of(paths["full"], num_kv_blocks=16) as engine:  # where blocks are evicted sooner
            for i in range(8):
                await engine.generate([i] * 200, greedy(2))
            assert engine._life.loaded().step_loop.stats()["cached_snapshots"] <= 2

    asyncio.run(main())


def test_aborted_sequences_leave_nothing(paths):
    async def main() -> None:
        async with engine_of(paths["full"], max_num_batched_tokens=16) as engine, testing.no_leaks(engine):
            prompt = [2 * i % tiny.VOCAB_SIZE for i in range(100)]
            tasks = [asyncio.create_task(engine.generate([i, *prompt], greedy(50, n=2))) for i in range(8)]
            for task in tasks:
                await asyncio.sleep(0.01)
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await testing.settle(engine)
            assert engine.debug_stats().held == {}
            poison(engine)
            outputs = [await engine.generate(prompt, greedy(5)) for _ in range(2)]
            assert outputs[0].token_ids == outputs[1].token_ids

    asyncio.run(main())


def test_what_needs_to_go_back_is_refused_by_name(paths, tmp_path, caplog):
    async def main() -> None:
        structured = SamplingParams(max_tokens=4, structured_outputs={"choice": ["a", "b"]})
        async with engine_of(paths["full"], hybrid_attention="always", host_kv_memory_bytes=1 << 20) as engine:
            with pytest.raises(InvalidRequestError, match="not served for a model whose layers keep a state yet"):
                await engine.generate([5, 6], structured)
            assert len((await engine.generate([5, 6], greedy(3))).token_ids) == 3

    asyncio.run(main())
    assert "as it has layers that keep a state" in caplog.text
    disk = {"host_kv_memory_bytes": 1 << 20, "disk_kv_path": str(tmp_path)}
    with pytest.raises(ConfigError, match="keep a state, which disk_kv_path does not"):
        CpuModelRunner.load(EngineConfig.from_kwargs(str(paths["full"]), disk))


def test_states_in_bfloat16_are_half_as_large_and_rounded_behind_each_token(paths):
    """Tokens do not depend on the machinery either, and states are stored in half the bytes."""
    jobs, half = mixed_jobs()[:8], {"state_dtype": "bfloat16"}
    expected, _ = run(paths["hybrid"], jobs, alone=True, **ALONE, **half)
    assert run(paths["hybrid"], jobs, **MACHINERY["chunks of seven"], **half)[0] == expected
    path = str(paths["hybrid"])
    whole, halved = (
        describe_model(EngineConfig.from_kwargs(path, {"state_dtype": dtype}), "cpu").state_bytes_per_sequence or 0
        for dtype in ("float32", "bfloat16")
    )
    of_convolutions = 2 * 3 * (96 + 2 * 2 * 10) * 4
    assert (halved - of_convolutions) * 2 == whole - of_convolutions
    with pytest.raises(ConfigError, match="state_dtype=bfloat16 needs layers with a recurrence, and Lfm2ForCausalLM"):
        CpuModelRunner.load(EngineConfig.from_kwargs(str(paths["lfm2"]), half))


def test_states_on_the_host_count_in_a_description(paths, monkeypatch):
    """A description names what an engine refuses: states that take more than half of this machine's memory."""
    config = EngineConfig.from_kwargs(str(paths["hybrid"]), {"max_num_seqs": 64})
    size = describe_model(config, "cuda", memory_bytes=1 << 30).state_bytes_per_sequence or 0
    monkeypatch.setattr("asyncengine.runner.steps.model_runner.total_memory", lambda: 2 * 64 * size)
    on_host = describe_model(config, "cpu", memory_bytes=1 << 30)
    assert on_host.obstacle is not None
    assert on_host.obstacle.startswith("max_num_seqs")
    assert on_host.state_bytes_per_sequence == size
    on_gpu = describe_model(config, "cuda", memory_bytes=1 << 30)
    assert (on_gpu.way, on_gpu.obstacle) == ("native", None)


@pytest.mark.parametrize("given", [{"kv_cache_memory_bytes": 1 << 20}, {"num_kv_blocks": 100}, {}])
def test_snapshots_have_a_share_of_the_memory(paths, given):
    """Two for each sequence and those of a cache full of prompts, as far as they fit an eighth of the memory."""
    config = EngineConfig.from_kwargs(str(paths["hybrid"]), {"max_num_seqs": 64, **given})
    counts, wanted = {}, {}
    for room in (1 << 14, 1 << 20, 16 << 30):
        report = describe_model(config, "cuda", memory_bytes=room)
        size, every = report.state_bytes_per_sequence or 0, report.state_snapshot_tokens or 0
        assert every % config.block_size == 0 < every
        counts[room], left = report.state_snapshots, max(0, room - (report.weight_bytes or 0))
        tokens = 64 * (report.context or 0)
        if given:
            tokens = min(tokens, report.kv_tokens or 0)
        else:
            tokens = min(tokens, left // 16 // (report.kv_bytes_per_token or 0) * 16)
        wanted[room] = min(128 - -tokens // every, max(1, left // 8 // size))
    assert counts == wanted
    assert len(set(counts.values())) == 3, counts


SHAPES = Path(__file__).parents[2] / "bench/shapes"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", ["qwen3.5-9b", "qwen3.6-35b-a3b", "granite-4-h-small", "nemotron-3-nano-30b"])
@pytest.mark.parametrize(
    "setting", [{}, {"state_dtype": "bfloat16"}, {"prefill_chunk_size": None, "max_model_len": 8192}]
)
def test_snapshots_within_a_prompt_take_an_eighth_of_its_keys_and_values(shape, setting):
    """The distance is the least power of two for which they do, and a cache full of prompts has room for all."""
    kwargs = {"load_format": "dummy", "dtype": "bfloat16", "max_num_seqs": 16, **setting}
    report = describe_model(EngineConfig.from_kwargs(str(SHAPES / shape), kwargs), "cuda", memory_bytes=141 * 10**9)
    size, every = report.state_bytes_per_sequence or 0, report.state_snapshot_tokens or 0
    per_token = report.kv_bytes_per_token or 0
    assert every.bit_count() == 1
    assert every * per_token >= 8 * size > every // 2 * per_token
    room = (report.state_snapshots or 0) * every
    assert room >= min(report.kv_tokens or 0, 16 * (report.context or 0)), "snapshots of a full cache do not fit"


def test_snapshots_are_never_closer_than_chunks(paths):
    """Chunks end where a snapshot is taken: small states do not make prompts slow."""
    for setting, every in (
        ({}, 512), ({"prefill_chunk_size": None}, 2048), ({"prefill_chunk_size": 300}, 512),
        ({"max_num_batched_tokens": 256}, 256), ({"prefill_chunk_size": 100, "block_size": 48}, 144),
        ({"state_snapshot_tokens": 40}, 48), ({"state_snapshot_tokens": 0}, 0),
    ):  # fmt: skip
        config = EngineConfig.from_kwargs(str(paths["lfm2"]), {"max_num_seqs": 4, **setting})
        assert describe_model(config, "cuda", memory_bytes=1 << 30).state_snapshot_tokens == every, setting


def test_an_engine_tells_its_snapshots(paths):
    """Statistics and the model's properties say how many there are and how far apart."""

    async def main() -> None:
        for path, room, every in ((paths["full"], 8 + 32, 32), (paths["full"], 8, 0)):
            async with engine_of(path, state_snapshot_tokens=every) as engine:
                info, stats = engine.model_info, engine.debug_stats()
                assert (info.num_snapshots, info.num_state_slots) == (room, 4 + room)
                assert (stats.num_snapshots, stats.state_snapshot_tokens) == (room, every)
                assert info.state_snapshot_tokens == every
                assert ("32 tokens within" in info.snapshot_places) == (every > 0)
                assert f"{room} are snapshots, kept at the end of each prompt" in info.states_in_words
                assert stats.held == {}

    asyncio.run(main())


def test_a_gpu_runs_such_models_alone(paths):
    """One GPU runs them. Several that hold the model together do not, and say so."""
    for name in ("full", "lfm2", "hybrid"):
        config = EngineConfig.from_kwargs(str(paths[name]), {"max_num_seqs": 4})
        report = describe_model(config, "cuda", memory_bytes=16 << 30)
        assert (report.way, report.device) == ("native", "cuda")
        assert report.state_bytes_per_sequence
        with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: .* has layers other than attention"):
            describe_model(replace(config, tensor_parallel_size=2), "cuda", memory_bytes=16 << 30)
