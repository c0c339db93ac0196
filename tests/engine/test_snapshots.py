"""Snapshots of an engine at work: what they tell, and that nothing is recorded for nobody."""

from __future__ import annotations

import asyncio
import time

import pytest

from asyncengine import EngineClosedError, EngineDeadError, SamplingParams, WrongLoopError
from asyncengine.engine.snapshots import MOST_WAKES
from asyncengine.testing import SimulatedEngine, no_leaks, settle

PARAMS = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


async def run_some(engine: SimulatedEngine, count: int = 4, params: SamplingParams = PARAMS) -> None:
    prompts = [[300 + i] * 40 for i in range(count)]
    outputs = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == engine.expected_token_ids(prompt, params)
    await settle(engine)


async def test_a_snapshot_tells_when_steps_and_wake_ups_began_and_ended() -> None:
    async with SimulatedEngine(step_latency_us=200) as engine, no_leaks(engine):
        await run_some(engine)
        first = engine.snapshot()
        assert (first.steps, first.wakes) == ((), ())  # nobody had asked
        before = time.monotonic_ns()
        await run_some(engine)
        snapshot = engine.snapshot()
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
        assert snapshot.stats.num_requests_running == 0


async def test_recording_ends_by_itself() -> None:
    async with SimulatedEngine(step_latency_us=2000) as engine:  # so long that a wake seldom has two steps
        engine.snapshot()
        many = SamplingParams(max_tokens=6 * MOST_WAKES, temperature=0, ignore_eos=True)
        stream = await engine.submit([300] * 8, many)
        async for _ in stream:
            pass
        snapshot = engine.snapshot()
        assert len(snapshot.wakes) == MOST_WAKES
        assert len(snapshot.steps) < 2 * MOST_WAKES < engine.stats().num_steps
        assert snapshot.steps[-1].committed_ns < snapshot.time_ns
        await run_some(engine)  # and begins anew
        assert engine.snapshot().steps[-1].step > snapshot.steps[-1].step + 10


async def test_the_map_shows_who_has_the_blocks() -> None:
    async with SimulatedEngine(num_kv_blocks=256) as engine:

        async def count() -> tuple[int, int, int]:
            """Blocks held, shared and cached."""
            engine.snapshot()
            await asyncio.sleep(0.05)
            blocks = engine.snapshot().blocks
            assert blocks.blocks_per_cell == 1
            kinds = (blocks.held, blocks.shared, blocks.cached)
            assert {len(kind) for kind in kinds} == {256}
            held, shared, cached = (kind.count(255) for kind in kinds)
            return held, shared, cached

        assert await count() == (0, 0, 0)
        await run_some(engine, 1)
        assert await count() == (0, 0, engine.debug_stats().cached_blocks)
        assert engine.debug_stats().cached_blocks > 0
        engine.device.hang_at(1)
        request = await engine.submit([7] * 100, PARAMS)
        held, shared, _ = await count()
        assert held + shared == engine.debug_stats().held_blocks > 0
        engine.device.resume()
        await request.collect()


async def test_snapshots_belong_to_a_running_engine_and_its_loop() -> None:
    engine = SimulatedEngine()
    with pytest.raises(EngineClosedError):
        engine.snapshot()
    async with engine:
        engine.snapshot()
        with pytest.raises(WrongLoopError):
            await asyncio.to_thread(engine.snapshot)
        await run_some(engine)
        engine.snapshot()
    with pytest.raises(EngineClosedError):
        engine.snapshot()


async def test_a_dead_engine_tells_what_it_did_last() -> None:
    async with SimulatedEngine(step_latency_us=200) as engine:
        engine.snapshot()
        engine.device.fail_at(6)
        with pytest.raises(EngineDeadError):
            await engine.generate([300] * 8, PARAMS)
        assert engine.health == "dead"
        await asyncio.sleep(0)  # a wake-up is recorded after those whom it woke have run
        assert engine.snapshot().steps
        assert engine.snapshot().wakes
