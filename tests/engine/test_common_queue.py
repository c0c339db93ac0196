"""One queue in front of several engines: it serves as the queue of one engine does, and no engine idles beside it."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from asyncengine import (
    AsyncEngine,
    DataParallelEngine,
    EngineClosedError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
    RequestAbortedError,
    RequestOutput,
    RequestTimeoutError,
    SamplingParams,
    testing,
)
from asyncengine.engine.common_queue import ROW_TOKENS, CommonQueue, _best, _Load, _Place
from asyncengine.engine.live_requests import LiveRequests
from asyncengine.engine.warmth import Warmth, pieces_of

from .test_data_parallel import fail_next_step, front, generated, tokens

ONE: dict[str, Any] = {"max_num_seqs": 1, "step_driver": "loop"}
LONG = tokens(2000)


async def blocked(engine: DataParallelEngine) -> list[asyncio.Task[RequestOutput]]:
    """Fill the one slot of each engine."""
    tasks = [asyncio.create_task(engine.generate([300], LONG)) for _ in engine.engines]
    while not all(generated(engine)):  # noqa: ASYNC110 (no event tells of a first token)
        await asyncio.sleep(0)
    return tasks


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_short_requests_do_not_wait_behind_a_long_one() -> None:
    async with front(**ONE) as engine, testing.no_leaks(engine):
        long = asyncio.create_task(engine.generate([300], LONG))
        await asyncio.gather(*(engine.generate([400 + i], tokens(5)) for i in range(40)))
        assert not long.done()
        assert sorted(generated(engine))[1] >= 40 * 5
        await cancel(long)


async def test_requests_leave_the_queue_in_the_order_of_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Priorities and tenants have their say in the queue."""
    left: list[str] = []

    def note(queue: CommonQueue, key: int, other: LiveRequests) -> None:
        left.extend(stream.request_id for stream in queue if stream._key == key)
        give(queue, key, other)

    give = CommonQueue.give
    monkeypatch.setattr(CommonQueue, "give", note)

    async def begun(engine: AsyncEngine) -> list[str]:
        draw = random.Random(7)
        jobs = [{"priority": draw.randint(-3, 3), "tenant": draw.choice("aab")} for _ in range(60)]
        async with engine, testing.no_leaks(engine):
            first = [asyncio.create_task(engine.generate([300], tokens(200))) for _ in generated(engine)]
            while not all(generated(engine)):  # noqa: ASYNC110
                await asyncio.sleep(0)
            left.clear()
            work = [engine.generate([300], tokens(3), request_id=str(i), **job) for i, job in enumerate(jobs)]
            outputs = await asyncio.gather(*work)
            await asyncio.gather(*first)
            return [output.request_id for output in sorted(outputs, key=lambda output: output.timing.scheduled)]

    config = ONE | {"fair_share_s": 100.0, "priority_ageing_s": 1000.0}
    expected = await begun(testing.SimulatedEngine(**config))
    assert expected != sorted(expected, key=int)
    assert await begun(front(1, **config)) == expected
    assert left == expected
    await begun(front(2, **config))
    assert left == expected


async def test_a_request_in_the_queue_is_one_of_the_engine() -> None:
    async with front(**ONE) as engine, testing.no_leaks(engine):
        running = await blocked(engine)
        idle = engine.stats()
        held = engine.debug_stats()
        streams = [await engine.submit([300] * 7, tokens(5), request_id=f"name-{i}") for i in range(4)]
        late = await engine.submit([300] * 7, SamplingParams(max_tokens=5, timeout=0.001))
        stats, now = engine.stats(), engine.debug_stats()
        assert stats.num_requests_waiting == idle.num_requests_waiting + 5
        assert stats.queued_tokens == idle.queued_tokens + 5 * 7
        assert engine.load() == (stats.num_requests_running + stats.num_requests_waiting, stats.queued_tokens)
        assert sorted(each.num_requests_waiting for each in engine.engine_stats()) == [2, 3]
        assert (now.streams, now.queued_requests) == (held.streams + 5, held.queued_requests + 5)
        with pytest.raises(RequestTimeoutError):
            await late.collect()
        with pytest.raises(InvalidRequestError, match="'name-1' is in use"):
            await engine.submit([300], tokens(1), request_id="name-1")
        assert engine.has_request("name-1")
        assert engine.abort("name-1")
        assert not engine.has_request("name-1")
        with pytest.raises(RequestAbortedError):
            await streams[1].collect()
        await streams[2].aclose()
        waiting = asyncio.create_task(streams[3].collect())
        await asyncio.sleep(0)
        await cancel(waiting)
        assert engine.stats().num_requests_waiting == idle.num_requests_waiting + 1
        await cancel(*running)
        assert len((await streams[0].collect()).token_ids) == 5


async def test_what_cannot_be_served_is_refused_at_once_while_requests_wait() -> None:
    async with front(**ONE, max_model_len=512, num_kv_blocks=40) as engine, testing.no_leaks(engine):
        running = [asyncio.create_task(engine.generate([300], tokens(400))) for _ in range(4)]
        await asyncio.sleep(0.01)
        with pytest.raises(InvalidRequestError, match="context"):
            await engine.submit([300] * 600, tokens(1))
        with pytest.raises(InvalidRequestError, match="not served on this device"):
            await engine.embed([[300]])
        await cancel(*running)


@pytest.mark.parametrize("limits", [{"max_queued_requests": 4}, {"max_queued_tokens": 4 * 20}])
async def test_a_full_queue_keeps_a_reserve_for_other_tenants(limits: dict[str, int]) -> None:
    async with front(**ONE, **limits) as engine, testing.no_leaks(engine):
        running = await blocked(engine)
        queued = [await engine.submit([300] * 20, tokens(1), tenant="a") for _ in range(4)]
        for tenant in ("a", None):
            with pytest.raises(EngineOverloadedError, match="queue is full"):
                await engine.submit([300] * 20, tokens(1), tenant=tenant)
        few = [300] * (20 if "max_queued_requests" in limits else 10)
        queued.append(await engine.submit(few, tokens(1), tenant="b"))
        with pytest.raises(EngineOverloadedError, match="queue is full"):
            await engine.submit(few, tokens(1), tenant="b")
        await cancel(*running)
        await asyncio.gather(*(stream.collect() for stream in queued))


async def test_the_queue_of_an_engine_that_dies_goes_to_the_others() -> None:
    async with front(**ONE) as engine:
        running = await blocked(engine)
        waiting = [asyncio.create_task(engine.generate([400 + i], tokens(5))) for i in range(8)]
        await asyncio.sleep(0)
        first, second = engine.engines
        fail_next_step(first)
        await cancel(running[1])
        outputs = await asyncio.gather(*waiting)
        assert isinstance(second, testing.SimulatedEngine)
        for i, output in enumerate(outputs):
            assert list(output.token_ids) == second.expected_token_ids([400 + i], tokens(5))
        ends = await asyncio.gather(*running, return_exceptions=True)
        assert sum(isinstance(end, EngineDeadError) for end in ends) == 1
        assert [one.health for one in engine.engines] == ["dead", "ready"]
        running = [asyncio.create_task(engine.generate([300], LONG)) for _ in range(4)]
        while engine.stats().num_requests_waiting < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        fail_next_step(second)
        errors = await asyncio.gather(*running, return_exceptions=True)
        assert [type(error) for error in errors] == [EngineDeadError] * 4
        assert engine.health == "dead"


async def test_closing_serves_the_queue_or_ends_it() -> None:
    async with front(**ONE) as engine, testing.no_leaks(engine):
        tasks = [asyncio.create_task(engine.generate([400 + i], tokens(50))) for i in range(9)]
        await asyncio.sleep(0)
        closing = asyncio.create_task(engine.aclose())
        await asyncio.sleep(0)
        assert engine.health == "draining"
        with pytest.raises(EngineClosedError, match="draining"):
            await engine.submit([300], tokens(1))
        await closing
        assert [len((await task).token_ids) for task in tasks] == [50] * 9
    for options in ({"drain": False}, {"timeout_s": 0.01}):
        async with front(**ONE) as engine, testing.no_leaks(engine):
            tasks = [asyncio.create_task(engine.generate([400 + i], LONG)) for i in range(9)]
            await asyncio.sleep(0)
            await engine.aclose(**options)
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(error) for error in errors] == [EngineClosedError] * 9


def test_a_warm_engine_is_waited_for_only_while_it_is_hardly_behind() -> None:
    pieces = pieces_of(list(range(1024)), None)
    life = testing.SimulatedEngine()._life
    warm, cold = _Place(life), _Place(life)
    warm.warmth = Warmth(100)
    warm.warmth.add(pieces)

    def best(warm_rows: int, cold_rows: int, with_room: list[_Place]) -> _Place | None:
        loads = {cold: _Load(cold_rows, 0, 0, 0, 9), warm: _Load(warm_rows, 0, 0, 0, 9)}
        return _best(pieces, with_room, loads)

    most = 1024 // ROW_TOKENS  # so many sequences more outweigh the prompt
    both = [warm, cold]
    assert best(most - 1, 0, both) is warm
    assert best(most + 1, 0, both) is cold
    assert best(16, 12, [cold]) is None
    assert best(16, 11, [cold]) is cold  # fewer than three quarters
    assert best(4 * most - 4, 3 * most - 3, [cold]) is None
    assert best(4 * most + 4, 3 * most + 3, [cold]) is cold
    assert best(8, 0, [cold]) is cold
    assert best(12, 16, [warm]) is warm
