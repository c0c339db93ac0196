"""Wrong input, full queues, dead devices: each a typed error of the right scope, and nothing left behind."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncengine import (
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
    KVCapacityError,
    SamplingParams,
    _core,
)
from asyncengine.testing import VOCAB_SIZE, SimulatedEngine, no_leaks, settle
from asyncengine.text.prompts import MAX_PRIORITY

from .support import BOTH_LOOPS, CANARY, Job, check_canary, check_output

LONG = SamplingParams(max_tokens=1000, temperature=0.0)
SHORT = SamplingParams(max_tokens=5, temperature=0.0)

# ---- bad input ----

PROMPTS: list[tuple[Any, str]] = [
    ("", "empty"),
    ([], "no tokens"),
    ((), "no tokens"),
    ([5, -1], "-1 at 1"),
    ([VOCAB_SIZE], f"{VOCAB_SIZE} at 0 is outside the vocabulary of {VOCAB_SIZE}"),
    ([10**30], "outside the vocabulary"),
    ([1, 2.5], "2.5 at 1"),
    ([1, True], "True at 1"),
    ([1, None], "None at 1"),
    (["a", "b"], "'a' at 0"),
    ([[1, 2]], "an object of type list at 0"),
    (list(np.array([[1, 2]])), "an object of type ndarray at 0"),
    (None, "NoneType"),
    (5, "int"),
    (b"bytes", "bytes"),
    ({"role": "user"}, "dict"),
    ([{}], "role"),
    ([{"role": "user", "content": "x"}, 5], "messages"),
    ([{"content": "x"}], "role"),
    ("\ud800", "Unicode"),
    ("\ud800" * 9000, "Unicode"),
]


@pytest.mark.parametrize(("prompt", "message"), PROMPTS, ids=[repr(p)[:30] for p, _ in PROMPTS])
async def test_bad_prompts(prompt: Any, message: str) -> None:
    async with SimulatedEngine() as engine, no_leaks(engine):
        for call in (engine.generate, engine.submit):
            with pytest.raises(InvalidRequestError, match=message) as error:
                await call(prompt, SHORT)
            assert error.value.param in ("prompt", "messages")
        with pytest.raises(InvalidRequestError, match=message):
            async for _ in engine.stream(prompt, SHORT):
                pass
        assert engine.stats().prompt_tokens == 0
        await check_canary(engine)


async def test_sizes_are_checked_and_both_numbers_stated() -> None:
    async with SimulatedEngine(max_model_len=64, num_kv_blocks=3) as engine, no_leaks(engine):
        with pytest.raises(ContextLengthError, match=r"maximum context length is 64 tokens.*64 tokens"):
            await engine.generate([300] * 64, SHORT)
        with pytest.raises(ContextLengthError, match=r"maximum context length is 64 tokens.*200 tokens"):
            await engine.generate([300] * 200, SamplingParams(max_tokens=None))
        with pytest.raises(ContextLengthError, match=r"maximum context length is 64 tokens.* 65 tokens: 40 .* 25 "):
            await engine.generate([300] * 40, SamplingParams(max_tokens=25))
        with pytest.raises(KVCapacityError, match=r"for 49 tokens.*holds 48"):
            await engine.generate([300] * 40, SamplingParams(max_tokens=9))
        fits = Job([300] * 40, SamplingParams(max_tokens=8, temperature=0.0))
        check_output(engine, fits, await engine.generate(fits.prompt, fits.params))
        stats = engine.stats()
        assert stats.prompt_tokens == 40  # the others were never let in


async def test_the_largest_requests_fit() -> None:
    async with SimulatedEngine(max_model_len=64, num_kv_blocks=4) as engine, no_leaks(engine):
        for prompt_len, max_tokens in ((63, 1), (1, 63), (62, 2)):
            for n in (1, 3):
                params = SamplingParams(max_tokens=max_tokens, n=n, seed=1)
                job = Job([300 + i for i in range(prompt_len)], params)
                check_output(engine, job, await engine.generate(job.prompt, job.params))


BAD_CALLS: list[tuple[dict[str, Any], str, str]] = [
    ({"params": {"temperature": 0}}, "SamplingParams, got dict", "params"),
    ({"priority": MAX_PRIORITY + 1}, f"-{MAX_PRIORITY}, {MAX_PRIORITY}.*{MAX_PRIORITY + 1}", "priority"),
    ({"priority": -MAX_PRIORITY - 1}, "priority", "priority"),
    ({"priority": 0.5}, "integer.*0.5", "priority"),
    ({"priority": True}, "integer.*True", "priority"),
    ({"request_id": 7}, "string, got 7", "request_id"),
    ({"request_id": ["x"]}, "string", "request_id"),
    ({"cache_salt": b"x"}, "string, got b'x'", "cache_salt"),
    ({"params": SamplingParams(stop_token_ids=[VOCAB_SIZE])}, str(VOCAB_SIZE), "stop_token_ids"),
]


@pytest.mark.parametrize(("keywords", "message", "param"), BAD_CALLS, ids=[str(k)[:40] for k, _, _ in BAD_CALLS])
async def test_bad_arguments(keywords: dict[str, Any], message: str, param: str) -> None:
    async with SimulatedEngine() as engine, no_leaks(engine):
        with pytest.raises(InvalidRequestError, match=message) as error:
            await engine.generate(CANARY, **keywords)
        assert error.value.param == param


BAD_PARAMS: list[dict[str, Any]] = [
    {"n": 0},
    {"n": 129},
    {"n": 1.0},
    {"n": True},
    {"max_tokens": -1},
    {"max_tokens": 2.0},
    {"temperature": -0.1},
    {"temperature": 2.1},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"temperature": "1"},
    {"temperature": None},
    {"temperature": 10**400},
    {"top_p": 0},
    {"top_p": 1.01},
    {"top_p": float("nan")},
    {"top_k": -2},
    {"top_k": 1.5},
    {"top_k": 2**31},
    {"min_p": -0.1},
    {"min_p": 1.1},
    {"seed": 2**63},
    {"seed": "x"},
    {"seed": -(10**400)},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": [5]},
    {"stop": 5},
    {"stop": b"bytes"},
    {"stop": ["x"] * 17},
    {"stop": "x" * 1025},
    {"stop": itertools.repeat("x")},
    {"stop_token_ids": [1] * 1025},
    {"stop_token_ids": range(2**40)},
    {"stop_token_ids": itertools.count()},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [1.5]},
    {"stop_token_ids": ["a"]},
    {"stop_token_ids": 7},
    {"stop_token_ids": "abc"},
    {"stop_token_ids": 0},
    {"stop_token_ids": ""},
    {"ignore_eos": "false"},
    {"skip_special_tokens": None},
    {"include_stop_str_in_output": 1},
]


@pytest.mark.parametrize("wrong", BAD_PARAMS, ids=str)
def test_bad_sampling_parameters(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(InvalidRequestError, match=name) as error:
        SamplingParams(**wrong)
    assert error.value.param == name


class Unprintable:
    def __repr__(self) -> str:
        raise AssertionError("nobody needs this text")


@pytest.mark.parametrize("value", ["x" * 10**6, b"x" * 10**6, [["x"] * 1000] * 1000, 10**5000, Unprintable()], ids=type)
@pytest.mark.parametrize("name", ["n", "temperature", "seed", "ignore_eos"])
def test_errors_shorten_the_values_that_they_quote(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name) as error:
        SamplingParams(**{name: value})
    assert len(str(error.value)) < 200


def test_stop_tokens_of_an_array() -> None:
    assert SamplingParams(stop_token_ids=np.array([3, 0])).stop_token_ids == (3, 0)  # type: ignore[arg-type]


def test_integers_that_python_does_not_print() -> None:
    with pytest.raises(InvalidRequestError, match=r"max_tokens must be in .* a number of 16610 bits"):
        SamplingParams(max_tokens=10**5000)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_num_seq": 3},
        {"block_size": 24},
        {"steps_in_flight": 0},
        {"max_num_seqs": 0},
        {"max_num_seqs": 8, "max_num_batched_tokens": 7},
        {"step_timeout_s": 0},
        {"gpu_memory_utilization": 1.5},
        {"cpu_affinity": 100_000},
        {"staging": "somehow"},
        {"quantization": "int3"},
        {"quantization": "fp8", "device": "cpu"},
        {"quantization": "fp8", "dtype": "float32"},
        {"step_driver": "nobody"},
        {"num_kv_blocks": 1.5},
        {"enable_prefix_caching": 1},
        {"late_launch": 1},
        {"max_num_batched_tokens": 2**31},
        {"prefill_chunk_size": 2**63 - 1},
        {"max_queued_tokens": 2**63},
        {"num_kv_blocks": 10**5000},
        {"kv_cache_memory_bytes": 2**63},
        {"cpu_threads": 100_000},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_bad_configuration(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SimulatedEngine(**wrong)


async def test_a_request_id_is_used_once_at_a_time() -> None:
    async with SimulatedEngine(step_latency_us=500) as engine, no_leaks(engine):
        task = asyncio.create_task(engine.generate(CANARY, SamplingParams(max_tokens=30), request_id="same"))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequestError, match="'same' is in use"):
            await engine.generate(CANARY, SHORT, request_id="same")
        assert (await task).request_id == "same"
        assert (await engine.generate(CANARY, SHORT, request_id="same")).request_id == "same"


async def test_ids_that_are_made_keep_clear_of_those_that_were_chosen() -> None:
    async with SimulatedEngine(step_latency_us=500) as engine, no_leaks(engine):
        for number in range(1, 6):
            chosen = f"req-{number}"
            task = asyncio.create_task(engine.generate(CANARY, SamplingParams(max_tokens=30), request_id=chosen))
            await asyncio.sleep(0)
            assert (await engine.generate(CANARY, SHORT)).request_id != chosen
            assert (await task).request_id == chosen


@pytest.mark.parametrize(
    ("result", "message"), [("unserved", "not served"), ("too_large", "more than a step has room for")]
)
async def test_what_the_core_refuses_is_the_requests_fault(
    monkeypatch: pytest.MonkeyPatch, result: str, message: str
) -> None:
    class Refusing:
        def __init__(self, step_loop: _core.StepLoop) -> None:
            self._step_loop = step_loop

        def submit(self, _: _core.RequestSpec) -> _core.SubmitResult:
            return getattr(_core.SubmitResult, result)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._step_loop, name)

    async with SimulatedEngine() as engine, no_leaks(engine):
        backend = engine._life.backend
        with monkeypatch.context() as patched:
            patched.setattr(engine._life, "backend", replace(backend, step_loop=Refusing(backend.step_loop)))
            with pytest.raises(InvalidRequestError, match=message):
                await engine.generate([1, 2, 3], SHORT)
        await engine.generate([1, 2, 3], SHORT)


# ---- full queues and priorities ----


async def test_queue_limits() -> None:
    for limits in ({"max_queued_requests": 3}, {"max_queued_tokens": 3 * len(CANARY)}):
        async with SimulatedEngine(max_num_seqs=1, step_latency_us=500, **limits) as engine, no_leaks(engine):
            running = await engine.submit(CANARY, LONG)
            await anext(running)  # it has left the queue
            queued = [asyncio.create_task(engine.generate(CANARY, SHORT)) for _ in range(3)]
            await asyncio.sleep(0)
            for _ in range(2):
                with pytest.raises(EngineOverloadedError, match="queue is full"):
                    await engine.generate(CANARY, SHORT)
            queued[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await queued.pop(0)
            while engine._life.loaded().step_loop.stats()["queued_requests"] > 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            queued.append(asyncio.create_task(engine.generate(CANARY, SHORT)))
            await running.aclose()
            for task in queued:
                check_output(engine, Job(CANARY, SHORT), await task)


async def test_a_prompt_longer_than_the_queue_waits_alone() -> None:
    limit = len(CANARY) // 2
    async with SimulatedEngine(max_num_seqs=1, step_latency_us=500, max_queued_tokens=limit) as engine:
        running = await engine.submit(CANARY, LONG)
        await anext(running)
        queued = asyncio.create_task(engine.generate(CANARY, SHORT))
        await asyncio.sleep(0)
        with pytest.raises(EngineOverloadedError, match="queue is full"):
            await engine.generate(CANARY[:1], SHORT)
        await running.aclose()
        check_output(engine, Job(CANARY, SHORT), await queued)


async def finishing_order(engine: SimulatedEngine, priorities: list[int]) -> list[int]:
    """Indices of requests in the order of their ends, on an engine with one slot, busy until all have arrived."""
    busy = await engine.submit([999], LONG)
    await anext(busy)
    order: list[int] = []

    async def one(i: int, priority: int) -> None:
        await engine.generate(CANARY, SHORT, priority=priority)
        order.append(i)

    tasks = [asyncio.create_task(one(i, p)) for i, p in enumerate(priorities)]
    await asyncio.sleep(0)
    await busy.aclose()
    await asyncio.gather(*tasks)
    return order


async def test_priorities_then_arrival() -> None:
    async with SimulatedEngine(max_num_seqs=1, step_latency_us=200) as engine, no_leaks(engine):
        assert await finishing_order(engine, [0, 5, -5, 0, -5, 5]) == [2, 4, 0, 3, 1, 5]


async def test_waiting_outweighs_priority() -> None:
    # A class is worth a microsecond of waiting: so it is first come, first served, whatever the class.
    async with SimulatedEngine(max_num_seqs=1, step_latency_us=200, priority_ageing_s=1e-9) as engine:
        assert await finishing_order(engine, [900, 0, 5, -900]) == [0, 1, 2, 3]


# ---- failures of the device ----


@pytest.mark.parametrize("loop_name", BOTH_LOOPS)
@pytest.mark.parametrize("fault", ["error", "hang"])
async def test_a_dead_device_fails_every_request(loop_name: str, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    async with no_leaks():
        engine = SimulatedEngine(step_latency_us=500, step_timeout_s=0.3 if fault == "hang" else 60, max_num_seqs=4)
        await engine.start()
        streams = [await engine.submit(CANARY, LONG) for _ in range(8)]  # half of them wait
        tasks = [asyncio.create_task(engine.generate(CANARY, LONG)) for _ in range(4)]
        await anext(streams[0])
        (engine.device.fail_at if fault == "error" else engine.device.hang_at)(5)
        reason = "illegal memory access" if fault == "error" else "did not finish within"
        for stream in streams:
            with pytest.raises(EngineDeadError, match=reason):  # noqa: PT012
                async for delta in stream:
                    assert delta.finish_reason is None  # never mistaken for an end
        for task in tasks:
            with pytest.raises(EngineDeadError, match=reason):
                await task
        assert engine.health == "dead"
        assert "dead" in caplog.text
        with pytest.raises(EngineDeadError, match=reason):
            await engine.submit(CANARY, SHORT)
        assert engine.stats().num_steps > 0
        assert engine.abort(streams[0].request_id) is False
        await streams[0].aclose()
        engine.device.resume()
        await engine.aclose()
        assert engine.health == "closed"
        with pytest.raises(EngineClosedError):
            await engine.submit(CANARY, SHORT)


async def test_a_device_that_dies_while_draining() -> None:
    async with no_leaks():
        engine = SimulatedEngine(step_latency_us=500)
        await engine.start()
        task = asyncio.create_task(engine.generate(CANARY, LONG))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(engine.aclose(timeout_s=60))
        await asyncio.sleep(0)
        engine.device.fail_at(3)
        with pytest.raises(EngineDeadError):
            await task
        await closing
        assert engine.health == "closed"


async def test_a_request_hears_of_a_death_that_the_loop_has_not_heard_of() -> None:
    async with SimulatedEngine() as engine:
        task = asyncio.create_task(engine.generate(CANARY, LONG))
        await asyncio.sleep(0)
        engine.device.fail_at(3)
        while not engine._life.loaded().step_loop.error:
            time.sleep(0.001)  # noqa: ASYNC251  # and the loop does not turn meanwhile
        with pytest.raises(EngineDeadError, match="illegal memory access"):
            await engine.generate(CANARY, LONG)
        assert engine.health == "dead"
        with pytest.raises(EngineDeadError):
            await task


async def test_an_idle_engine_does_not_mind_a_short_step_timeout() -> None:
    async with SimulatedEngine(step_timeout_s=1.0) as engine, no_leaks(engine):
        await check_canary(engine)
        await asyncio.sleep(1.2)
        await check_canary(engine)
        assert engine.health == "ready"


# ---- the leak checks themselves ----


async def test_no_leaks_catches_what_is_planted() -> None:
    async with SimulatedEngine(step_latency_us=1000) as engine:
        with pytest.raises(AssertionError, match=r"blocks.*slots.*requests"):  # noqa: PT012
            async with no_leaks(engine, timeout_s=0.2):
                stream = await engine.submit(CANARY, LONG)
                await anext(stream)
        await stream.aclose()
        await settle(engine)

        descriptors: list[int] = []
        with pytest.raises(AssertionError, match="2 file descriptors"):
            async with no_leaks(timeout_s=0.1):
                descriptors += os.pipe()
        for descriptor in descriptors:
            os.close(descriptor)

        end = threading.Event()
        await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.01) for _ in range(3)))  # threads of the loop's own
        with pytest.raises(AssertionError, match="1 threads"):
            async with no_leaks(timeout_s=0.1):
                threading.Thread(target=end.wait).start()
        end.set()

        with pytest.raises(AssertionError, match="1 tasks"):
            async with no_leaks(timeout_s=0.1):
                task = asyncio.create_task(asyncio.sleep(60))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_no_leaks_of_an_engine_that_the_block_closes() -> None:
    engine = SimulatedEngine()
    async with no_leaks(engine), engine:
        await engine.generate(CANARY, SamplingParams(max_tokens=2))
    async with SimulatedEngine() as engine, no_leaks(engine):
        await engine.generate(CANARY, SamplingParams(max_tokens=2))
        await engine.aclose()


async def test_no_leaks_lets_the_bodys_error_through() -> None:
    async with SimulatedEngine(step_latency_us=1000) as engine:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with no_leaks(engine):
                stream = await engine.submit(CANARY, LONG)
                raise ZeroDivisionError
        await stream.aclose()
