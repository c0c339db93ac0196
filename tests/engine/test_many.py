"""Any number of prompts through one engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from asyncengine import EngineOverloadedError, InvalidRequestError, SamplingParams
from asyncengine.errors import ContextLengthError, EngineDeadError
from asyncengine.testing import SimulatedEngine, no_leaks

PARAMS = SamplingParams(max_tokens=3, temperature=0)


def prompts(count: int) -> list[list[int]]:
    return [[5 + i % 900, 7, 9] for i in range(count)]


async def test_thousands_of_prompts_meet_no_overload() -> None:
    asked, counts = prompts(3000), []
    limits = {"max_num_seqs": 64, "max_queued_requests": 32}
    async with SimulatedEngine(step_latency_us=200_000, **limits) as engine, no_leaks(engine):
        with pytest.raises(EngineOverloadedError, match=r"max_queued_requests \(32\).*generate_many"):
            await asyncio.gather(*(engine.generate(prompt, PARAMS) for prompt in asked[:200]))
    async with SimulatedEngine(**limits) as engine, no_leaks(engine):
        found = {}
        async for position, output, error in engine.generate_many(asked, PARAMS, progress=counts.append):
            assert error is None
            assert output is not None
            found[position] = output.outputs[0].token_ids
        assert sorted(found) == list(range(3000))
        for position in (0, 77, 2999):
            assert list(found[position]) == engine.expected_token_ids(asked[position], PARAMS)
    assert counts == list(range(1, 3001))


@pytest.mark.parametrize("in_order", [False, True])
async def test_prompts_are_taken_as_there_is_room(in_order: bool) -> None:
    taken = 0

    def endless() -> Iterator[list[int]]:
        nonlocal taken
        while True:
            taken += 1
            yield [taken % 900 + 5]

    async def endless_async() -> AsyncGenerator[list[int], None]:
        for prompt in endless():
            yield prompt

    async with SimulatedEngine(step_latency_us=200) as engine, no_leaks(engine):
        for source in (endless(), asynchronous := endless_async()):
            taken, positions = 0, []
            # The first one takes longest, so that results in order wait for it.
            params = [SamplingParams(max_tokens=200 if i == 0 else 2, temperature=0) for i in range(1000)]
            async with aclosing(engine.generate_many(source, params, concurrency=4, in_order=in_order)) as results:
                async for finished in results:
                    positions.append(finished.position)
                    assert taken <= len(positions) + 16 + 4
                    if len(positions) == 50:
                        break
            assert positions == list(range(50)) or not in_order
            assert (positions[0] == 0) == in_order
        await asynchronous.aclose()


async def test_an_error_ends_the_loop_or_is_a_result() -> None:
    bad = [[5], [1] * 4000, [6], [10**9]]
    async with SimulatedEngine() as engine, no_leaks(engine):
        with pytest.raises(InvalidRequestError):
            async for _ in engine.generate_many(bad, PARAMS):
                pass
        results = [r async for r in engine.generate_many(bad, PARAMS, errors="return", in_order=True)]
    assert [r.output is not None for r in results] == [True, False, True, False]
    assert [type(r.error) for r in results] == [type(None), ContextLengthError, type(None), InvalidRequestError]


async def test_a_dead_engine_ends_the_loop_whatever_is_asked() -> None:
    async with SimulatedEngine() as engine:
        engine.device.fail_at(20)
        with pytest.raises(EngineDeadError):
            async for _ in engine.generate_many(prompts(1000), PARAMS, errors="return"):
                pass


async def test_a_source_that_fails() -> None:
    def source() -> Iterator[list[int]]:
        yield [5]
        raise OSError("the file is gone")

    async with SimulatedEngine() as engine, no_leaks(engine):
        with pytest.raises(OSError, match="the file is gone"):
            async for _ in engine.generate_many(source(), PARAMS, errors="return"):
                pass


async def test_cancelling_aborts_the_rest() -> None:
    async with SimulatedEngine(step_latency_us=1000) as engine, no_leaks(engine):

        async def consume() -> None:
            async for _ in engine.generate_many(prompts(1000), SamplingParams(max_tokens=500)):
                pass

        task = asyncio.ensure_future(consume())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.debug_stats().streams == 0


@pytest.mark.parametrize(
    "wrong", [{"concurrency": 0}, {"concurrency": True}, {"concurrency": 10**9}, {"concurrency": 1.5}, {"errors": "no"}]
)
async def test_wrong_arguments(wrong: dict[str, Any]) -> None:
    async with SimulatedEngine() as engine:
        with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
            async for _ in engine.generate_many([[5]], PARAMS, **wrong):
                pass
        with pytest.raises(InvalidRequestError, match="there are 1 params and more prompts"):
            async for _ in engine.generate_many([[5], [6]], [PARAMS]):
                pass
