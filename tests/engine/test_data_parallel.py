"""Several engines behind one: where requests go, and what happens when one of the engines dies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncengine import (
    AsyncEngine,
    ConfigError,
    Conversation,
    DataParallelEngine,
    EngineClosedError,
    EngineConfig,
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
    ModelError,
    SamplingParams,
    StructuredOutputs,
    bundled_model,
    testing,
)
from asyncengine.engine.warmth import MOST_PIECES, PIECE_TOKENS, Warmth, pieces_of
from asyncengine.server.metrics import Metrics

SMALL: dict[str, Any] = {
    "device": "cpu", "cpu_threads": 1, "num_kv_blocks": 64, "max_model_len": 256, "max_num_seqs": 4,
    "max_num_batched_tokens": 64, "dtype": "float32", "progress": False,
}  # fmt: skip


def front(count: int = 2, **config: Any) -> DataParallelEngine:
    return DataParallelEngine([testing.SimulatedEngine(**config) for _ in range(count)])


def fail_next_step(engine: AsyncEngine) -> None:
    assert isinstance(engine, testing.SimulatedEngine)
    engine.device.fail_at(1)


def tokens(count: int, seed: int | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0 if seed is None else 1.0, seed=seed, ignore_eos=True)


def generated(engine: AsyncEngine) -> list[int]:
    return [stats.generation_tokens for stats in engine.engine_stats()]


def test_outputs_are_those_of_one_engine() -> None:
    draw = random.Random(1)
    prompts = [[draw.randrange(300, 900) for _ in range(draw.randrange(1, 120))] for _ in range(24)]

    async def run(size: int) -> tuple[list[Any], AsyncEngine]:
        made = AsyncEngine.from_pretrained(str(bundled_model()), data_parallel_size=size, **SMALL)
        async with made as engine, testing.no_leaks(engine):
            jobs = [engine.generate(prompt, tokens(5, i % 3 or None)) for i, prompt in enumerate(prompts)]
            outputs = [output.token_ids for output in await asyncio.gather(*jobs)]
            assert engine.stats().generation_tokens == 5 * len(prompts)
            assert engine.stats().step_tokens.total == sum(s.step_tokens.total for s in engine.engine_stats())
            assert all(count > 0 for count in (s.generation_tokens for s in engine.engine_stats()))
            vectors = (await engine.embed(prompts)).vectors
            score = await engine.score([300, 301], [302])
            many = [done.output.token_ids async for done in engine.generate_many(prompts, tokens(2), in_order=True)]
            text = await engine.detokenize(await engine.tokenize("Once upon a time"))
            return [outputs, vectors, score.logprobs[0].logprob, many, text], engine

    one, _ = asyncio.run(run(1))
    two, engine = asyncio.run(run(2))
    assert isinstance(engine, DataParallelEngine)
    assert [each.config.data_parallel_size for each in engine.engines] == [1, 1]
    assert engine.health == "closed"
    np.testing.assert_allclose(one.pop(1), two.pop(1), atol=1e-6)
    assert one.pop(1) == pytest.approx(two.pop(1))
    assert one == two


def test_requests_without_a_seed_draw_from_one_source() -> None:
    """Two engines with the same seed would answer equal prompts alike. Grammars are followed on both."""

    async def main() -> list[Any]:
        async with AsyncEngine.from_pretrained(str(bundled_model()), data_parallel_size=2, **SMALL) as engine:
            params = SamplingParams(max_tokens=8, temperature=2.0, ignore_eos=True)
            outputs = await asyncio.gather(*(engine.generate([300], params) for _ in range(8)))
            assert all(generated(engine))
            letters = SamplingParams(
                max_tokens=8, temperature=2.0, structured_outputs=StructuredOutputs(regex="[ab]{5}")
            )
            for follows in await asyncio.gather(*(engine.generate([300], letters) for _ in range(8))):
                assert len(follows.text) == 5
                assert set(follows.text) <= {"a", "b"}
            return [output.token_ids for output in outputs]

    assert len(set(asyncio.run(main()))) == 8


def test_equal_engines_take_turns_and_a_busy_one_is_spared() -> None:
    async def main() -> None:
        async with front(step_latency_us=2000, max_num_seqs=8) as engine, testing.no_leaks(engine):
            await asyncio.gather(*(engine.generate([400 + i], tokens(10)) for i in range(8)))
            before = generated(engine)
            assert sum(before) == 80
            assert min(before) >= 20  # a busy machine may finish some before the next is sent
            for one in engine.engines[:1]:  # somebody uses it beside the front
                streams = [await one.submit([500 + i], tokens(1500)) for i in range(6)]
            await asyncio.gather(*(engine.generate([600 + i], tokens(10)) for i in range(4)))
            assert generated(engine)[1] == before[1] + 40
            stats = engine.stats()
            assert engine.load() == (stats.num_requests_running + stats.num_requests_waiting, stats.queued_tokens)
            for stream in streams:
                await stream.aclose()

    asyncio.run(main())


def chat(*texts: str) -> Conversation:
    return Conversation(
        messages=[{"role": "assistant" if i % 2 else "user", "content": t} for i, t in enumerate(texts)]
    )


@pytest.mark.parametrize(
    "make",
    [lambda text: text, lambda text: [300 + ord(c) for c in text], lambda text: chat(text[:400], text[400:])],
    ids=["text", "ids", "chat"],
)
def test_a_warm_prefix_draws_its_prompts(make: Callable[[str], Any]) -> None:
    """Beginnings in common, of 700 characters, are computed by one engine; other prompts go to the other."""
    draw = random.Random(2)
    begins = ["".join(draw.choice("abcdefgh ") for _ in range(700)) for _ in range(2)]

    async def main() -> None:
        async with front() as engine, testing.no_leaks(engine):
            for turn in range(6):
                for begin in begins:
                    await engine.generate(make(begin + "x" * 40 * turn), tokens(2))
            stats = engine.engine_stats()
            assert [s.generation_tokens for s in stats] == [12, 12]
            assert all(s.prefix_cache_hits > 0.6 * s.prefix_cache_queries for s in stats)

    asyncio.run(main())


def test_pieces_of_prompts() -> None:
    ids = list(range(1000))
    whole, longer = pieces_of(ids, None), pieces_of([*ids, 7], None)
    assert whole.tokens == 1000
    assert whole.keys[:15] == longer.keys[:15]
    assert whole.keys[15] != longer.keys[15]
    assert not set(whole.keys) & set(pieces_of(ids, "salt").keys)
    assert len(pieces_of([1] * 10**6, None).keys) == MOST_PIECES
    strange: tuple[Any, ...] = (None, 7, [], [object()], {"a": 1}, b"bytes")
    for wrong in strange:
        assert pieces_of(wrong, None).tokens < 100
    warmth = Warmth(10)
    warmth.add(whole)
    assert warmth.matched(whole) == 10 * PIECE_TOKENS  # the beginning is kept
    warmth.add(pieces_of(list(range(5000, 6000)), None))
    assert warmth.matched(whole) == 0


def test_an_engine_that_dies_is_taken_out() -> None:
    """An engine's death ends its requests typed. The other one goes on and gets the new ones, until it is dead too."""

    async def main() -> None:
        async with front(step_latency_us=1000) as engine:
            running = [asyncio.ensure_future(engine.generate([300 + i], tokens(300))) for i in range(6)]
            while not all(generated(engine)):  # noqa: ASYNC110 (no event tells of an engine's first token)
                await asyncio.sleep(0.001)
            first, second = engine.engines
            fail_next_step(first)
            results: Sequence[Any] = await asyncio.gather(*running, return_exceptions=True)
            dead = [r for r in results if isinstance(r, EngineDeadError)]
            assert len(dead) == 3
            assert all(len(r.token_ids) == 300 for r in results if r not in dead)
            assert (first.health, second.health, engine.health) == ("dead", "ready", "ready")
            before = generated(engine)
            await asyncio.gather(*(engine.generate([500 + i], tokens(5)) for i in range(4)))
            assert generated(engine) == [before[0], before[1] + 20]
            assert len([done async for done in engine.generate_many([[300]] * 3, tokens(1))]) == 3
            text = Metrics(lambda: engine, lambda: "m", lambda: 0).render().decode()
            assert f'generation_tokens_total{{engine="1",model_name="m"}} {generated(engine)[1]:.1f}' in text
            fail_next_step(second)
            with pytest.raises(EngineDeadError):
                await engine.generate([300], tokens(5))
            assert engine.health == "dead"
            with pytest.raises(EngineDeadError):
                await engine.generate([300], tokens(5))
        with pytest.raises(EngineClosedError):
            await engine.generate([300], tokens(5))

    asyncio.run(main())


def test_queues_names_and_aborts() -> None:
    async def main() -> None:
        async with front(step_latency_us=5000, max_num_seqs=1, max_queued_requests=2) as engine:
            streams = []

            async def fill() -> None:
                while len(streams) < 20:
                    streams.append(await engine.submit([300], tokens(1000), request_id=f"name-{len(streams)}"))

            with pytest.raises(EngineOverloadedError, match="queue is full"):
                await fill()
            assert 2 <= len(streams) <= 4  # each engine runs one at most, and two are in the queue
            with pytest.raises(InvalidRequestError, match="'name-1' is in use"):
                await engine.submit([300], tokens(1), request_id="name-1")
            assert engine.has_request("name-1")
            assert engine.abort("name-1")
            assert not engine.abort("name-1")
            with pytest.raises(InvalidRequestError, match="priority"):
                await engine.submit([300], tokens(1), priority=10**6)
            for stream in streams:
                await stream.aclose()
            await testing.settle(engine)
            assert len({(await engine.submit([300], tokens(1))).request_id for _ in range(2)}) == 2

    asyncio.run(main())


def test_a_start_that_fails_closes_all(tmp_path: Path) -> None:
    async def main() -> None:
        engine = DataParallelEngine([testing.SimulatedEngine(), AsyncEngine.from_pretrained(str(tmp_path / "none"))])
        async with testing.no_leaks():
            with pytest.raises(ModelError):
                await engine.start()
            assert [one.health for one in engine.engines] == ["closed", "closed"]

    asyncio.run(main())


@pytest.mark.parametrize("size", [0, -1, 65, 2**40, True, "2", 1.5])
def test_sizes_that_are_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match="data_parallel_size"):
        EngineConfig(model="m", data_parallel_size=size)


def test_engines_share_cores_and_have_a_folder_each(tmp_path: Path) -> None:
    config: dict[str, Any] = SMALL | {
        "cpu_threads": None, "host_kv_memory_bytes": 1 << 20, "disk_kv_path": str(tmp_path),
    }  # fmt: skip

    async def main() -> None:
        async with AsyncEngine.from_pretrained(str(bundled_model()), data_parallel_size=2, **config) as engine:
            assert isinstance(engine, DataParallelEngine)
            assert sum(one.config.num_threads for one in engine.engines) <= max(2, engine.config.num_threads)
            await engine.generate([300], tokens(1))
            assert "DataParallelEngine of 2" in repr(engine)
            assert engine.snapshot().stats.generation_tokens == 1

    asyncio.run(main())
    assert {path.name for path in tmp_path.iterdir()} == {"engine-0", "engine-1"}
