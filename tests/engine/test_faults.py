"""A fault in each stage of a request's life, at the k-th step: it costs what it must, typed, and nothing else.

Stages of the step thread (schedule, pack, deliver) are in tests/native/test_core_faults.cpp.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from asyncengine import (
    AsyncEngine,
    EngineDeadError,
    InternalError,
    NonFiniteLogitsError,
    RequestOutput,
    SamplingParams,
    StepFailedError,
    bundled_model,
    testing,
)
from asyncengine.text.detokenizer import IncrementalDetokenizer
from tests.engine.support import check_canary, check_jobs, random_jobs, run_script

LIMIT_S = 20.0  # nothing hangs: generous, for a busy machine
PROMPTS = [[10 + 3 * i + j for j in range(5 + 7 * i)] for i in range(8)]
PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


@asynccontextmanager
async def cpu_engine(**config: Any) -> AsyncIterator[AsyncEngine]:
    """The bundled model. At the end nothing may be left, and a request gives what it gave at first."""
    config = {"max_num_seqs": 8, "num_kv_blocks": 256, "max_model_len": 256} | config
    async with AsyncEngine.from_pretrained(bundled_model(), **config) as engine:
        golden = await engine.generate(PROMPTS[0], PARAMS)
        async with testing.no_leaks(engine):
            yield engine
            if engine.health != "dead":
                assert (await engine.generate(PROMPTS[0], PARAMS)).token_ids == golden.token_ids


async def run_all(engine: AsyncEngine) -> list[RequestOutput | BaseException]:
    async with asyncio.timeout(LIMIT_S):
        return await asyncio.gather(*(engine.generate(p, PARAMS) for p in PROMPTS), return_exceptions=True)


def at_call(k: int, function: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, but for its k-th call from now."""
    calls = 0

    def wrapper(*args: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        return instead(*args, **keywords) if calls == k else function(*args, **keywords)

    return wrapper


def raises(error: BaseException) -> Callable[..., Any]:
    def wrapper(*args: Any, **keywords: Any) -> Any:
        raise error

    return wrapper


@pytest.mark.sampled(5)
@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("k", [1, 2, 7])
@pytest.mark.parametrize("error", [RuntimeError("the weights melted"), MemoryError("no memory for activations")])
async def test_an_exception_in_a_forward_fails_that_steps_requests(
    error: Exception, k: int, steps_in_flight: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with cpu_engine(steps_in_flight=steps_in_flight, max_num_seqs=4) as engine:
        expected = [(await engine.generate(p, PARAMS)).token_ids for p in PROMPTS]
        model = engine._life.loaded().keep_alive._model  # type: ignore[attr-defined]
        monkeypatch.setattr(model, "run", at_call(k, model.run, raises(error)))
        outputs = await run_all(engine)
        failed = [o for o in outputs if isinstance(o, StepFailedError)]
        assert 1 <= len(failed) <= 4  # those that ran; the others waited
        for output, tokens in zip(outputs, expected, strict=True):
            assert output in failed or output.token_ids == tokens  # type: ignore[union-attr]
        assert engine.health == "ready"
        assert all(str(error) not in str(f) for f in failed)
        assert any(str(error) in record.getMessage() for record in caplog.records)
        assert engine._life.loaded().step_loop.stats()["failed_steps"] == 1


async def test_a_forward_that_always_raises_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "asyncengine.engine.life")
    async with AsyncEngine.from_pretrained(bundled_model(), max_num_seqs=1, num_kv_blocks=64) as engine:
        model = engine._life.loaded().keep_alive._model  # type: ignore[attr-defined]
        monkeypatch.setattr(model, "run", raises(RuntimeError("the weights melted")))
        failures = []
        while engine.health == "ready":
            with pytest.raises((StepFailedError, EngineDeadError)) as info:
                await engine.generate(PROMPTS[0], PARAMS)
            failures.append(info.type)
        assert failures[0] is StepFailedError
        assert len(failures) <= 17


@pytest.mark.parametrize("k", [1, 5])
async def test_logits_that_are_not_finite_fail_their_request(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cpu_engine() as engine:
        model = engine._life.loaded().keep_alive._model  # type: ignore[attr-defined]
        of_residual = model.logits

        def spoilt(*args: Any) -> Any:
            logits = of_residual(*args)
            logits[0, 0] = float("nan")
            return logits

        monkeypatch.setattr(model, "logits", at_call(k, of_residual, spoilt))
        outputs = await run_all(engine)
        assert [type(o) for o in outputs].count(NonFiniteLogitsError) == 1
        assert [type(o) for o in outputs].count(RequestOutput) == len(outputs) - 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("k", [0, 1, 9])
@pytest.mark.parametrize("call", ["graph_launch", "copy", "wait_event"])
async def test_a_launch_without_memory_fails_that_steps_requests(call: str, k: int) -> None:
    async with testing.SimulatedEngine(step_latency_us=300, max_num_seqs=4) as engine, testing.no_leaks(engine):
        jobs = random_jobs(40, seed=k)
        engine.device.fail_call(call, k)
        async with asyncio.timeout(LIMIT_S):
            outputs = await asyncio.gather(
                *(engine.generate(job.prompt, job.params) for job in jobs), return_exceptions=True
            )
        failed = [o for o in outputs if isinstance(o, BaseException)]
        assert 1 <= len(failed) <= 4
        assert {type(o) for o in failed} == {StepFailedError}
        await check_jobs(engine, jobs)
        await check_canary(engine)


@pytest.mark.parametrize("call", ["graph_launch", "copy", "event_record"])
async def test_any_other_error_of_a_launch_ends_the_engine(call: str) -> None:
    async with testing.SimulatedEngine(step_latency_us=300) as engine:
        engine.device.fail_call(call, 3, 999)
        async with asyncio.timeout(LIMIT_S):
            outputs = await asyncio.gather(*(engine.generate(p, PARAMS) for p in PROMPTS), return_exceptions=True)
        assert {type(o) for o in outputs} == {EngineDeadError}
        assert engine.health == "dead"


@pytest.mark.parametrize("k", [1, len(PROMPTS)])  # each sequence calls it once at least, all its tokens in one delivery
async def test_a_fault_while_detokenizing_fails_its_request(
    k: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "asyncengine.engine.life")
    async with testing.SimulatedEngine(step_latency_us=300) as engine, testing.no_leaks(engine):
        push = IncrementalDetokenizer.push
        monkeypatch.setattr(IncrementalDetokenizer, "push", at_call(k, push, raises(ValueError("not text"))))

        async def consume(prompt: list[int]) -> int:
            return len([delta async for delta in engine.stream(prompt, PARAMS)])

        async with asyncio.timeout(LIMIT_S):
            outcomes = await asyncio.gather(*(consume(p) for p in PROMPTS), return_exceptions=True)
        assert [type(o) for o in outcomes].count(InternalError) == 1
        assert [type(o) for o in outcomes].count(int) == len(outcomes) - 1
        await check_canary(engine)


async def test_a_python_forward_that_waits_for_the_interpreter_is_not_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of C that keeps the interpreter's lock for longer than a step may take."""
    async with cpu_engine(step_timeout_s=0.5) as engine:
        model = engine._life.loaded().keep_alive._model  # type: ignore[attr-defined]
        run, began = model.run, threading.Event()

        def slow(*args: Any) -> Any:
            began.set()
            time.sleep(0.05)  # lets the loop's thread take the lock
            return run(*args)

        monkeypatch.setattr(model, "run", at_call(3, run, slow))
        values = np.random.default_rng(1).random(6_000_000).tolist()
        task = asyncio.ensure_future(engine.generate(PROMPTS[1], PARAMS))
        await asyncio.to_thread(began.wait, LIMIT_S)
        start = time.monotonic()
        values.sort()  # one call: Python's own switching does not interrupt it
        assert time.monotonic() - start > 0.7, "too short to show anything"
        assert len((await task).token_ids) == PARAMS.max_tokens
        assert engine.health == "ready"


def test_a_process_that_was_stopped_goes_on() -> None:
    """SIGSTOP for longer than a step may take, in the middle of one."""
    script = """
        import asyncio, os, signal, subprocess, time
        from asyncengine import AsyncEngine, SamplingParams, bundled_model

        async def main():
            async with AsyncEngine.from_pretrained(bundled_model(), step_timeout_s=4.0, num_kv_blocks=64) as engine:
                model = engine._life.loaded().keep_alive._model
                run = model.run

                def slow(*args):
                    end = time.process_time() + 0.1  # time that stands still while the process does
                    while time.process_time() < end:
                        time.sleep(0.001) if time.process_time() % 0.01 < 0.001 else None
                    return run(*args)

                model.run = slow
                params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
                task = asyncio.ensure_future(engine.generate([1, 2, 3], params))
                await asyncio.sleep(0.05)
                subprocess.Popen(["sh", "-c", f"sleep 6; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
                assert len((await task).token_ids) == 3
                print(engine.health)

        asyncio.run(main())
    """
    assert run_script(script) == "ready\n"
