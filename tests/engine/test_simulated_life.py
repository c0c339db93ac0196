"""Starting, closing, cancelling and aborting; loops and threads; processes that end without a word."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref

import pytest

from asyncengine import (
    EngineClosedError,
    RequestAbortedError,
    RequestDelta,
    RequestStream,
    SamplingParams,
    WrongLoopError,
)
from asyncengine.engine.engine import AsyncEngine
from asyncengine.testing import SimulatedEngine, no_leaks, settle

from .support import BOTH_LOOPS, CANARY, Job, check_canary, check_jobs, check_output, random_jobs, run_script

LONG = SamplingParams(max_tokens=1000, temperature=0.0)
SHORT = SamplingParams(max_tokens=5, temperature=0.0)
SLOW = {"step_latency_us": 2000.0}


async def begun(engine: AsyncEngine, tokens: int = 1) -> None:
    """Wait until the engine has generated so many tokens."""
    while engine.stats().generation_tokens < tokens:  # noqa: ASYNC110  # nothing to wait for: that is the point
        await asyncio.sleep(0.001)


async def collect(stream: RequestStream) -> list[RequestDelta]:
    return [delta async for delta in stream]


# ---- cancellation ----


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loop_name", BOTH_LOOPS)
async def test_thousands_of_cancelled_tasks_leave_nothing_behind(loop_name: str) -> None:
    rng = random.Random(6)
    jobs = random_jobs(50, seed=7, longest_output=200)
    async with SimulatedEngine(num_kv_blocks=200, max_num_seqs=32, step_latency_us=300) as engine:
        async with no_leaks(engine):
            cancelled = 0
            while cancelled < 5000:
                picked = [rng.choice(jobs) for _ in range(250)]
                tasks = [asyncio.create_task(engine.generate(job.prompt, job.params)) for job in picked]
                order = list(tasks)
                rng.shuffle(order)
                for task in order:
                    if rng.random() < 0.1:
                        await asyncio.sleep(rng.choice([0, 0, 0.0005, 0.003]))
                    task.cancel()
                for job, result in zip(picked, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
                    if isinstance(result, asyncio.CancelledError):
                        cancelled += 1
                    else:
                        assert not isinstance(result, BaseException), result
                        check_output(engine, job, result)
                await asyncio.sleep(0)
        await check_canary(engine)
        assert engine.stats().num_free_blocks == 200


async def test_leaving_a_stream_aborts() -> None:
    async with SimulatedEngine(**SLOW) as engine, no_leaks(engine):
        async for _ in engine.stream(CANARY, LONG):
            break
        await settle(engine)
        async with await engine.submit(CANARY, LONG) as stream:
            await anext(stream)
        await settle(engine)
        stream = await engine.submit(CANARY, LONG)
        await anext(stream)
        await stream.aclose()
        await stream.aclose()
        await settle(engine)
        task = asyncio.create_task(anext(await engine.submit(CANARY, LONG)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle(engine)
        assert engine.stats().generation_tokens < 1000
        await check_canary(engine)


async def test_a_closed_stream_never_looks_like_one_that_ended() -> None:
    async with SimulatedEngine(**SLOW) as engine, no_leaks(engine):
        stream = await engine.submit(CANARY, LONG)
        await stream.aclose()
        with pytest.raises(RequestAbortedError):
            await anext(stream)
        with pytest.raises(RequestAbortedError):
            await stream.collect()
        for read in (RequestStream.collect, anext):  # a reader that waits when another task closes
            engine.device.hang_at(0)
            stream = await engine.submit(CANARY, LONG)
            reader = asyncio.ensure_future(read(stream))
            await asyncio.sleep(0.01)
            await stream.aclose()
            with pytest.raises(RequestAbortedError):
                await reader
            engine.device.resume()
            await settle(engine)
        done = await engine.submit(CANARY, SHORT)
        output = await done.collect()
        await done.aclose()  # after the end there is nothing to abort
        assert await done.collect() == output


async def test_a_second_consumer_gets_an_error_and_the_first_its_tokens() -> None:
    async with SimulatedEngine(**SLOW) as engine, no_leaks(engine):
        params = SamplingParams(max_tokens=100, temperature=0.0)
        expected = engine.expected_token_ids(CANARY, params)
        stream = await engine.submit(CANARY, params)
        first = asyncio.create_task(collect(stream))
        await asyncio.sleep(0)
        for read in (RequestStream.collect, anext):
            with pytest.raises(RuntimeError, match="another task is reading"):
                await read(stream)
        deltas = await asyncio.wait_for(first, 10)
        assert [t for d in deltas for t in d.token_ids] == expected
        assert len(deltas) > 1  # collect() did not make the first one wait for the end
        assert list((await stream.collect()).token_ids) == expected  # one after the other is fine


async def test_abort_by_id() -> None:
    async with SimulatedEngine(**SLOW) as engine, no_leaks(engine):
        task = asyncio.create_task(engine.generate(CANARY, LONG, request_id="mine"))
        other = asyncio.create_task(engine.generate(CANARY, SHORT, request_id="other"))
        await begun(engine)
        assert engine.abort("mine")
        assert not engine.abort("mine")
        assert not engine.abort("nobody's")
        with pytest.raises(RequestAbortedError, match="mine"):
            await task
        check_output(engine, Job(CANARY, SHORT), await other)
        stream = await engine.submit(CANARY, LONG, request_id="mine")  # the name is free again
        await anext(stream)
        engine.abort("mine")
        with pytest.raises(RequestAbortedError):
            async for _ in stream:
                pass


# ---- life ----


async def test_before_start_and_after_close() -> None:
    engine = SimulatedEngine()
    assert engine.health == "loading"
    for call in (engine.stats, lambda: engine.model_info, lambda: engine.tokenizer):
        with pytest.raises(EngineClosedError):
            call()
    with pytest.raises(EngineClosedError, match="loading"):
        await engine.generate(CANARY, SHORT)
    await engine.start()
    assert engine.health == "ready"
    with pytest.raises(EngineClosedError, match="started before"):
        await engine.start()
    await check_canary(engine)
    await engine.aclose()
    await engine.aclose()
    assert engine.health == "closed"
    with pytest.raises(EngineClosedError, match="closed"):
        await engine.generate(CANARY, SHORT)
    with pytest.raises(EngineClosedError):
        engine.stats()
    with pytest.raises(EngineClosedError):
        await engine.start()
    unused = SimulatedEngine()
    await unused.aclose()
    with pytest.raises(EngineClosedError):
        await unused.start()


@pytest.mark.parametrize("loop_name", BOTH_LOOPS)
async def test_aclose_drains(loop_name: str) -> None:
    async with no_leaks():
        engine = SimulatedEngine(step_latency_us=500)
        await engine.start()
        jobs = random_jobs(30, seed=8)
        tasks = [asyncio.create_task(engine.generate(job.prompt, job.params)) for job in jobs]
        await begun(engine)
        closing = asyncio.create_task(engine.aclose())
        await asyncio.sleep(0)
        assert engine.health == "draining"
        with pytest.raises(EngineClosedError, match="draining"):
            await engine.generate(CANARY, SHORT)
        await engine.aclose()  # waits like the first
        assert engine.health == "closed"
        await closing
        for job, task in zip(jobs, tasks, strict=True):
            assert list((await task).token_ids) == engine.expected_token_ids(job.prompt, job.params)


async def test_aclose_without_drain_ends_requests_with_an_error() -> None:
    async with no_leaks():
        for drain, timeout_s in ((False, 30.0), (True, 0.01)):
            engine = SimulatedEngine(**SLOW)
            await engine.start()
            task = asyncio.create_task(engine.generate(CANARY, LONG))
            await begun(engine)
            await engine.aclose(drain=drain, timeout_s=timeout_s)
            with pytest.raises(EngineClosedError, match="before the request was finished"):
                await task


async def test_a_body_that_raises_closes_at_once() -> None:
    async with no_leaks():
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with SimulatedEngine(**SLOW) as engine:
                task = asyncio.create_task(engine.generate(CANARY, LONG))
                await begun(engine)
                raise ZeroDivisionError
        with pytest.raises(EngineClosedError):
            await task
        assert engine.health == "closed"


async def test_aclose_that_is_cancelled_still_closes() -> None:
    async with no_leaks():
        engine = SimulatedEngine(**SLOW)
        await engine.start()
        task = asyncio.create_task(engine.generate(CANARY, LONG))
        await begun(engine)
        closing = asyncio.create_task(engine.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(EngineClosedError):
            await task
        await engine.aclose()
        assert engine.health == "closed"


async def test_aclose_while_loading() -> None:
    loading = threading.Event()
    engine = SimulatedEngine()
    load = engine._life.load

    def slow_load(config: object) -> object:
        loading.wait(10)
        return load(config)  # type: ignore[arg-type]

    engine._life.load = slow_load  # type: ignore[assignment]
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0.01)
    await engine.aclose()
    loading.set()
    with pytest.raises(EngineClosedError, match="while it was loading"):
        await starting
    assert engine.health == "closed"


async def test_a_load_that_fails_closes_the_engine() -> None:
    engine = SimulatedEngine()

    def no_load(config: object) -> object:
        raise RuntimeError("no such model")

    engine._life.load = no_load  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="no such model"):
        await engine.start()
    assert engine.health == "closed"
    await engine.aclose()
    with pytest.raises(EngineClosedError):
        await engine.generate(CANARY)


async def test_two_engines_in_one_loop() -> None:
    async with SimulatedEngine(ends=True) as one, no_leaks(one):
        async with SimulatedEngine(ends=True, num_kv_blocks=16, max_model_len=128) as two, no_leaks(two):
            await asyncio.gather(check_jobs(one, random_jobs(60, 9)), check_jobs(two, random_jobs(60, 10)))
        await check_canary(one)
        with pytest.raises(EngineClosedError):
            await two.generate(CANARY)


# ---- loops and threads ----


async def test_another_loop_gets_a_typed_error() -> None:
    async with SimulatedEngine(**SLOW) as engine, no_leaks(engine):
        stream = await engine.submit(CANARY, LONG)
        errors: list[BaseException] = []

        async def elsewhere() -> None:
            async def close() -> None:
                await engine.aclose()

            for call in (engine.generate(CANARY, SHORT), anext(stream), close()):
                try:
                    await call  # type: ignore[misc]
                except WrongLoopError as e:
                    errors.append(e)
            try:
                engine.abort(stream.request_id)
            except WrongLoopError as e:
                errors.append(e)

        await asyncio.to_thread(asyncio.run, elsewhere())
        assert len(errors) == 4

        def without_loop() -> None:
            with pytest.raises(WrongLoopError):
                engine.abort(stream.request_id)

        await asyncio.to_thread(without_loop)
        assert engine.health == "ready"
        await stream.aclose()
        await check_canary(engine)


def test_an_engine_per_asyncio_run() -> None:
    async def main() -> tuple[int, ...]:
        async with SimulatedEngine() as engine, no_leaks(engine):
            return (await engine.generate(CANARY, SHORT)).token_ids

    assert asyncio.run(main()) == asyncio.run(main())


def test_an_engine_in_a_thread() -> None:
    results: list[bool] = []

    async def main() -> None:
        async with SimulatedEngine() as engine:
            await check_canary(engine)
            results.append(True)

    threads = [threading.Thread(target=lambda: asyncio.run(main())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [True] * 3


# ---- processes ----


def test_a_script_needs_no_main_guard() -> None:
    code = """
        import asyncio, signal, multiprocessing
        from asyncengine import SamplingParams
        from asyncengine.testing import SimulatedEngine
        async def main():
            before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
            async with SimulatedEngine() as engine:
                out = await engine.generate([300, 301], SamplingParams(max_tokens=4, temperature=0))
                assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
                assert not multiprocessing.active_children()
                return len(out.token_ids)
        print(asyncio.run(main()))
    """
    assert run_script(code).strip() == "4"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["return", "sys.exit(0)", "os._exit(0)", "while True: await asyncio.sleep(9)"])
def test_a_process_may_end_without_aclose(how: str) -> None:
    code = f"""
        import asyncio, os, sys
        from asyncengine import SamplingParams
        from asyncengine.testing import SimulatedEngine
        async def main():
            global engine
            engine = SimulatedEngine(step_latency_us=500)
            await engine.start()
            tasks = [await engine.submit([300, 301], SamplingParams(max_tokens=2000)) for _ in range(8)]
            await anext(tasks[0])
            print("under way", flush=True)
            asyncio.get_running_loop().call_later(0.2, asyncio.get_running_loop().stop)
            {how}
        try:
            asyncio.new_event_loop().run_until_complete(main())
        except RuntimeError as e:
            assert "stopped before" in str(e)
    """
    assert run_script(code, "-W", "ignore").strip() == "under way"


def test_a_process_ends_although_a_kernel_hangs() -> None:
    code = """
        import asyncio
        from asyncengine import EngineDeadError, SamplingParams
        from asyncengine.testing import SimulatedEngine
        async def main():
            async with SimulatedEngine(step_timeout_s=0.2) as engine:
                engine.device.hang_at(4)
                try:
                    await engine.generate([300, 301], SamplingParams(max_tokens=2000))
                except EngineDeadError as e:
                    assert "did not finish within" in str(e)
                    print(engine.health)
        asyncio.run(main())
    """
    assert run_script(code).strip() == "dead"


async def test_an_engine_that_nobody_closed_says_so() -> None:
    async with no_leaks():
        engine = SimulatedEngine()
        await engine.start()
        asyncio.get_running_loop().remove_reader(engine._life.loaded().step_loop.wake_fd)  # what closing the loop does
        with pytest.warns(ResourceWarning, match="unclosed <AsyncEngine simulated ready>"):  # noqa: PT031
            left = weakref.ref(engine)
            del engine
            while left() is not None:  # the thread that loaded it may still be letting go
                gc.collect()
                await asyncio.sleep(0.001)
