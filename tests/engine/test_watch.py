"""Watching an engine: what it records while somebody looks, and that it records nothing otherwise."""

from __future__ import annotations

import asyncio
import time

import pytest

from asyncengine import EngineClosedError, SamplingParams, WrongLoopError
from asyncengine.testing import SimulatedEngine, no_leaks

PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


async def run_some(engine: SimulatedEngine, count: int = 4) -> None:
    prompts = [[300 + i] * 40 for i in range(count)]
    outputs = await asyncio.gather(*(engine.generate(prompt, PARAMS) for prompt in prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == engine.expected_token_ids(prompt, PARAMS)


async def test_steps_and_wakes_are_recorded_while_somebody_watches() -> None:
    async with SimulatedEngine(step_latency_us=200) as engine, no_leaks(engine):
        await run_some(engine)
        with engine.watch() as watch:
            assert watch.snapshot().steps == ()
            before = time.monotonic_ns()
            await run_some(engine)
            await asyncio.sleep(0.01)
            snapshot = watch.snapshot(256)
            assert len(snapshot.steps) > 10
            for step in snapshot.steps:
                times = step[1:6]
                assert before <= times[0]
                assert list(times) == sorted(times)
                assert times[-1] <= snapshot.time_ns
                assert 1 <= step.rows <= 4
                assert step.rows <= step.tokens
            numbers = [step.step for step in snapshot.steps]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            assert snapshot.wakes
            for wake in snapshot.wakes:
                assert before <= wake.begun_ns <= wake.delivered_ns <= wake.handled_ns <= snapshot.time_ns
            assert len(watch.snapshot(3).steps) == len(watch.snapshot(3).wakes) == 3
            last = numbers[-1]
        await run_some(engine)
        with engine.watch() as watch:
            assert watch.snapshot().steps[-1].step == last
            assert watch.snapshot().wakes == ()


async def test_the_map_shows_who_has_the_blocks() -> None:
    async with SimulatedEngine(num_kv_blocks=256) as engine:
        with engine.watch() as watch:

            async def count() -> tuple[int, int, int]:
                """Blocks held, shared and cached, after two sweeps."""
                for _ in range(2):
                    watch.snapshot()
                    await asyncio.sleep(0.02)
                blocks = watch.snapshot().blocks
                assert blocks.blocks_per_cell == 1
                assert len(blocks.held) == len(blocks.shared) == len(blocks.cached) == 256
                held, shared, cached = (kind.count(255) for kind in (blocks.held, blocks.shared, blocks.cached))
                return held, shared, cached

            assert await count() == (0, 0, 0)
            await run_some(engine, 1)
            held, shared, cached = await count()
            assert (held, shared) == (0, 0)
            assert cached == engine.debug_stats().cached_blocks > 0
            engine.device.hang_at(1)
            request = await engine.submit([7] * 100, SamplingParams(n=2, max_tokens=8, temperature=0, ignore_eos=True))
            held, shared, _ = await count()
            assert held + shared == engine.debug_stats().held_blocks > 0
            engine.device.resume()
            await request.collect()


async def test_watches_are_counted_and_may_outlive_the_engine() -> None:
    engine = SimulatedEngine()
    with pytest.raises(EngineClosedError):
        engine.watch()
    async with engine:
        first, second = engine.watch(), engine.watch()
        first.close()
        first.close()
        with pytest.raises(ValueError, match="closed"):
            first.snapshot()
        await run_some(engine)
        assert second.snapshot().steps
        with pytest.raises(WrongLoopError):
            await asyncio.to_thread(engine.watch)
    with pytest.raises(EngineClosedError):
        second.snapshot()
    second.close()
