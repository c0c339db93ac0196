"""A request's timeout: it ends with what it has, or with an error where it has nothing, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from asyncengine import InvalidRequestError, RequestTimeoutError, SamplingParams
from asyncengine.testing import SimulatedEngine, no_leaks, settle

from .support import BOTH_LOOPS, check_canary, join

PROMPT = [300, 301, 302]
LONG: dict[str, Any] = {"max_tokens": 2000, "temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize("loop_name", BOTH_LOOPS)
async def test_what_is_there_is_the_output(loop_name: str) -> None:
    async with SimulatedEngine(step_latency_us=1000) as engine:
        async with no_leaks(engine):
            params = SamplingParams(n=2, timeout=0.7, seed=4, **LONG)
            output = await engine.generate(PROMPT, params)
            for i, sequence in enumerate(output.outputs):
                count = len(sequence.token_ids)
                assert sequence.finish_reason == "timeout"
                assert 0 < count < 2000
                assert list(sequence.token_ids) == engine.expected_token_ids(PROMPT, params, i)[:count]
                assert sequence.text == engine.tokenizer.decode(sequence.token_ids)
            assert output.usage.completion_tokens == sum(len(s.token_ids) for s in output.outputs)
            deltas = [delta async for delta in engine.stream(PROMPT, params)]
            for i in range(2):
                text, tokens = join(deltas, i)
                assert text == engine.tokenizer.decode(tokens)
                assert [d.finish_reason for d in deltas if d.index == i][-1] == "timeout"
            assert deltas[-1].usage is not None
            assert deltas[-1].usage.completion_tokens == sum(len(d.token_ids) for d in deltas)
        await check_canary(engine)


async def test_a_request_that_ends_in_time_notices_nothing() -> None:
    async with SimulatedEngine() as engine:
        params = SamplingParams(max_tokens=20, temperature=0.0, timeout=1000)
        stream = await engine.submit(PROMPT, params)
        output = await stream.collect()
        assert list(output.token_ids) == engine.expected_token_ids(PROMPT, params)
        assert output.finish_reason == "length"
        gc.disable()
        try:
            gone = weakref.ref(stream)
            del stream
            assert gone() is None  # no timer holds it
        finally:
            gc.enable()


async def test_before_the_first_token_it_is_an_error() -> None:
    async with SimulatedEngine(step_latency_us=1000, max_num_seqs=1) as engine, no_leaks(engine):
        first = asyncio.create_task(engine.generate(PROMPT, SamplingParams(**LONG)))
        while not engine.stats().num_requests_running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        waiting = SamplingParams(timeout=0.05, max_tokens=3)
        with pytest.raises(RequestTimeoutError, match=r"within the timeout of 0\.05 s"):
            await engine.generate(PROMPT, waiting)
        with pytest.raises(RequestTimeoutError):
            async for _ in engine.stream(PROMPT, waiting):
                pass
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await settle(engine)


async def test_a_possible_stop_string_is_no_longer_held_back() -> None:
    async with SimulatedEngine(step_latency_us=1000) as engine:
        whole = await engine.generate(PROMPT, SamplingParams(**LONG | {"max_tokens": 1000}))
        stop = whole.text[:-1] + "#"  # the text could go on to be it until its last character
        params = SamplingParams(timeout=0.05, stop=stop[:1000], **LONG)
        output = await engine.generate(PROMPT, params)
        assert output.finish_reason == "timeout"
        assert output.text == engine.tokenizer.decode(output.token_ids)
        assert output.text


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e7, "1", True])
def test_wrong_values_are_refused(timeout: Any) -> None:
    with pytest.raises(InvalidRequestError, match="timeout") as refused:
        SamplingParams(timeout=timeout)
    assert refused.value.param == "timeout"
