"""Tenants share an engine: a small request goes before the rest of a large one, and a tenant alone notices nothing."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from typing import Any

import pytest

from asyncengine import RequestOutput, SamplingParams
from asyncengine.engine.fairness import FairShare, Place
from asyncengine.errors import EngineOverloadedError, InvalidRequestError
from asyncengine.testing import SimulatedEngine, no_leaks

from .support import Job, check_output, random_jobs

PROMPT = list(range(300, 320))
SHORT = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
SECOND = 10**9
STEPPED: dict[str, Any] = {"step_driver": "loop", "steps_in_flight": 1}  # no step before all are submitted


async def finish_in_order(engine: SimulatedEngine, requests: list[dict[str, Any]]) -> list[int]:
    """Submit all in one turn of the loop; indices in the order in which the requests ended."""
    ended: list[int] = []

    async def run(i: int, options: dict[str, Any]) -> None:
        await engine.generate(options.pop("prompt", PROMPT), options.pop("params", SHORT), **options)
        ended.append(i)

    tasks = [asyncio.create_task(run(i, dict(options))) for i, options in enumerate(requests)]
    await asyncio.gather(*tasks)
    return ended


@pytest.mark.sampled(2)
@pytest.mark.parametrize("n", [1, 4])
async def test_a_small_request_ends_while_anothers_large_one_runs(n: int) -> None:
    async with SimulatedEngine(max_num_seqs=16, num_kv_blocks=4096, **STEPPED) as engine, no_leaks(engine):
        large: list[dict[str, Any]] = [
            {"tenant": "a", "params": SamplingParams(n=n, max_tokens=4, temperature=0.0, ignore_eos=True)}
        ] * 2048
        ended = await finish_in_order(engine, [*large, {"tenant": "b"}])
        assert len(ended) == 2049
        assert ended.index(2048) < 200
        assert len(engine._life.requests.fair_share) == 0


async def test_without_tenants_or_with_the_switch_off_requests_are_served_as_they_come() -> None:
    for share, tenants in ((1.0, (None, None)), (0.0, ("a", "b"))):
        async with SimulatedEngine(max_num_seqs=4, fair_share_s=share, **STEPPED) as engine, no_leaks(engine):
            ended = await finish_in_order(engine, [{"tenant": tenants[0]}] * 200 + [{"tenant": tenants[1]}])
            assert ended.index(200) >= 196


async def test_a_tenant_alone_is_served_as_if_there_were_no_fairness() -> None:
    rng = random.Random(5)
    jobs = [
        (
            rng.randint(1, 60),
            SamplingParams(n=rng.choice([1, 1, 3]), max_tokens=rng.randint(1, 40), temperature=0.0, ignore_eos=True),
        )
        for _ in range(300)
    ]

    async def order(share_s: float) -> tuple[Any, ...]:
        """The requests by the step that began them, and by the step that ended them, and all preemptions."""
        config = {"max_num_seqs": 4, "num_kv_blocks": 10, "fair_share_s": share_s, **STEPPED}
        async with SimulatedEngine(**config) as engine, no_leaks(engine):
            work = (engine.generate(PROMPT[:1] * length, params, tenant="a") for length, params in jobs)
            timings = [output.timing for output in await asyncio.gather(*work)]
            assert engine.stats().num_preemptions > 0
            return (
                in_steps([t.scheduled for t in timings]),
                in_steps([t.finished for t in timings]),
                engine.stats().num_preemptions,
            )

    assert await order(1.0) == await order(0.0)


def in_steps(times: list[float]) -> list[list[int]]:
    """Indices in the order of their times, those of the same time together."""
    ordered = sorted((t, i) for i, t in enumerate(times))
    return [[i for _, i in group] for _, group in itertools.groupby(ordered, key=lambda item: item[0])]


def big(n: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=max_tokens, temperature=1.0, seed=5, ignore_eos=True)


@pytest.mark.parametrize("share_s", [1.0, 0.0])
async def test_one_token_takes_few_steps_beside_a_tenant_that_holds_all_slots(share_s: float) -> None:
    async with SimulatedEngine(num_kv_blocks=16384, fair_share_s=share_s, **STEPPED) as engine, no_leaks(engine):
        large = [asyncio.create_task(engine.generate(PROMPT[:length], big(128, 450), tenant="a")) for length in (9, 17)]
        while engine.stats().num_requests_running < 256:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for tenant in ("b", "c"):
            before = engine.stats()
            await engine.generate(PROMPT, SamplingParams(max_tokens=1, temperature=0.0), tenant=tenant)
            after = engine.stats()
            if share_s:
                assert after.num_steps - before.num_steps <= 6
                assert after.num_preemptions - before.num_preemptions <= 1
            elif tenant == "b":
                assert after.num_steps - before.num_steps > 400
        for task, length in zip(large, (9, 17), strict=True):
            output = await task
            for i in (0, 63, 127):
                expected = engine.expected_token_ids(PROMPT[:length], big(128, 450), i)
                assert list(output.outputs[i].token_ids) == expected


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"steps_in_flight": 3},
        {"enable_prefix_caching": False},
        {"num_kv_blocks": 40},
        {"num_kv_blocks": 40, "host_kv_memory_bytes": 1 << 20},
        {"num_kv_blocks": 24, "prefill_chunk_size": 7, "steps_in_flight": 1},
    ],
)
async def test_outputs_do_not_depend_on_who_gives_way(config: dict[str, Any]) -> None:
    config = {"max_num_seqs": 8, "max_model_len": 160, "num_kv_blocks": 400, **config}
    jobs = random_jobs(90, seed=4)
    async with SimulatedEngine(**config, step_driver="loop") as engine, no_leaks(engine):

        def start(jobs: list[Job], tenants: str) -> list[asyncio.Task[RequestOutput]]:
            work = zip(jobs, itertools.cycle(tenants))
            return [asyncio.create_task(engine.generate(job.prompt, job.params, tenant=t)) for job, t in work]

        tasks = start(jobs[:30], "a")
        while engine.stats().num_steps < 4:  # noqa: ASYNC110
            await asyncio.sleep(0)
        tasks += start(jobs[30:], "bca")
        for job, output in zip(jobs, await asyncio.gather(*tasks), strict=True):
            check_output(engine, job, output)
        assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("limits", [{"max_queued_requests": 8}, {"max_queued_tokens": 8 * len(PROMPT)}])
async def test_a_queue_that_one_tenant_filled_still_admits_another(limits: dict[str, int]) -> None:
    async with SimulatedEngine(max_num_seqs=1, step_latency_us=500, **limits) as engine, no_leaks(engine):
        long = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
        running = await engine.submit(PROMPT, long, tenant="a")
        await anext(running)  # it has left the queue
        queued = [await engine.submit(PROMPT, SHORT, tenant="a") for _ in range(8)]
        for tenant in ("a", None):
            with pytest.raises(EngineOverloadedError):
                await engine.submit(PROMPT, SHORT, tenant=tenant)
        other = await engine.submit(PROMPT, SHORT, tenant="b")
        with pytest.raises(EngineOverloadedError):
            await engine.submit(PROMPT, SHORT, tenant="b")  # which has something now
        assert len(engine._life.requests.fair_share) == 2
        for stream in (running, *queued):
            await stream.aclose()
        assert len((await other.collect()).token_ids) == 4
        assert len(engine._life.requests.fair_share) == 0


async def test_records_vanish_however_requests_end() -> None:
    async with SimulatedEngine(max_num_seqs=2, step_latency_us=500) as engine, no_leaks(engine):
        tasks = [
            asyncio.create_task(engine.generate(PROMPT, SHORT, tenant=f"tenant {i}", request_id=str(i)))
            for i in range(30)
        ]
        await asyncio.sleep(0)
        assert len(engine._life.requests.fair_share) == 30
        for i in range(0, 10):
            tasks[i].cancel()
        for i in range(10, 20):
            engine.abort(str(i))
        await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(InvalidRequestError):
            await engine.submit([], SHORT, tenant="wrong")
        with pytest.raises(InvalidRequestError) as error:
            await engine.submit(PROMPT, SHORT, tenant=b"bytes")  # type: ignore[arg-type]
        assert error.value.param == "tenant"
        assert len(engine._life.requests.fair_share) == 0
        await engine.submit(PROMPT, SHORT, tenant="left")
        assert len(engine._life.requests.fair_share) == 1
    assert len(engine._life.requests.fair_share) == 0  # closing ended it


def test_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays by the clock: live sequences times the share, and never before the tenant's last of the same priority."""
    now = 0
    monkeypatch.setattr("time.monotonic_ns", lambda: now)
    fair = FairShare(1.0)
    a, b = (fair.place(tenant, 0).tenant for tenant in "ab")
    assert len({0, a, b}) == 3
    assert (fair.place(None, 0), FairShare(0.0).place("a", 0)) == (Place(), Place())
    arrivals = {}
    for key, (at, priority, sequences, expected) in enumerate(
        [
            (0, 0, 10, 0),
            (1, 0, 5, 11),  # behind ten sequences
            (2, 3, 1, 17),  # of another priority: behind all fifteen
            (3, 0, 1, 19),
        ]
    ):
        now = at * SECOND
        place = fair.place("a", priority)
        assert place == Place((expected - at) * SECOND, reserved=key == 0, tenant=a)
        fair.enter(key, "a", priority, sequences, place)
        arrivals[key] = now + place.delay_ns
    assert fair.place("b", 0) == Place(0, reserved=True, tenant=b)
    fair.leave(0)
    fair.leave(1)
    now = 4 * SECOND
    # Two are live, and the last one counts as arrived at 19.
    assert fair.place("a", 0) == Place(arrivals[3] - now, tenant=a)
    fair.leave(3)
    assert fair.place("a", 0) == Place(SECOND, tenant=a)
    fair.leave(2)
    fair.leave(2)
    assert (len(fair), fair.place("a", 0)) == (0, Place(0, reserved=True, tenant=a))


def test_a_tenant_keeps_its_order_whatever_the_clock_and_the_ends_of_requests() -> None:
    rng = random.Random(3)
    fair = FairShare(0.001)
    live: list[int] = []
    latest = 0
    for key in range(3000):
        place = fair.place("a", 0)
        core = time.monotonic_ns() + place.delay_ns  # what the core makes of it, a moment later
        assert core >= latest or not live
        fair.enter(key, "a", 0, rng.randint(1, 5), place)
        live.append(key)
        latest = core
        while live and rng.random() < 0.5:
            fair.leave(live.pop(0))
