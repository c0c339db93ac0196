"""A step is planned just before the one in flight ends. The order of steps is what is looked at, never a clock."""

from __future__ import annotations

import pytest

from asyncengine import SamplingParams
from asyncengine.testing import SimulatedEngine, no_leaks

from .support import CANARY, check_canary, check_jobs, random_jobs

FIRST_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


async def tokens_until_the_first(engine: SimulatedEngine, trials: int) -> list[int]:
    """Count, per trial, the tokens that the engine made from the arrival of a request until its first was delivered.

    One other sequence runs, a token per step; each request arrives when a token of that one does, so that a step has
    just begun. Had in the step after that one, the request sees three tokens: two of the other's, and its own.
    """
    running = await engine.submit(CANARY, SamplingParams(max_tokens=1500, temperature=0.0))
    for _ in range(8):  # as many steps as are remembered
        await anext(running)
    counts = []
    for _ in range(trials):
        await anext(running)
        before = engine.stats().generation_tokens
        await engine.generate([300, 301, 302], FIRST_TOKEN)
        counts.append(engine.stats().generation_tokens - before)
    await running.aclose()
    return counts


async def test_what_arrives_while_a_step_runs_is_in_the_next() -> None:
    # Only a machine that stalls for most of a step, every time, could keep all of them out of it.
    async with SimulatedEngine(step_latency_us=10_000) as engine, no_leaks(engine):
        assert min(await tokens_until_the_first(engine, 20)) == 3


@pytest.mark.parametrize("steps_in_flight", [2, 3])
async def test_launched_at_once_the_next_step_is_closed_already(steps_in_flight: int) -> None:
    config = {"late_launch": False, "steps_in_flight": steps_in_flight}
    async with SimulatedEngine(step_latency_us=5_000, **config) as engine, no_leaks(engine):
        assert min(await tokens_until_the_first(engine, 10)) == 2 + steps_in_flight
        assert engine.stats().num_late_launches == 0


@pytest.mark.parametrize("late_launch", [True, False])
async def test_outputs_do_not_depend_on_when_steps_are_launched(late_launch: bool) -> None:
    # Steps of 1.6, 4 and 14 ms, by the size of their graph.
    latency = {"step_latency_us": 800, "token_latency_us": 6.4}
    async with SimulatedEngine(ends=True, late_launch=late_launch, **latency) as engine, no_leaks(engine):
        await check_jobs(engine, random_jobs(120, seed=7, longest_prompt=300))
        await check_canary(engine)
