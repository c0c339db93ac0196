"""Outputs of the engine: the same tokens and texts whatever the machinery does."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import time

import pytest

from asyncengine import KVCapacityError, SamplingParams
from asyncengine.api.outputs import FinishReason
from asyncengine.testing import EOS_TOKEN_ID, SimulatedEngine, no_leaks, settle
from asyncengine.text.detokenizer import IncrementalDetokenizer

from .support import BOTH_LOOPS, CANARY, Job, check_canary, check_jobs, check_output, join, random_jobs

MACHINERY = {
    "default": {},
    "alone": {"max_num_seqs": 1},
    "serial": {"steps_in_flight": 1},
    "three in flight": {"steps_in_flight": 3},
    "chunks of 1": {"prefill_chunk_size": 1},
    "chunks of 7": {"prefill_chunk_size": 7},
    "whole prompts": {"prefill_chunk_size": None},
    "small steps": {"max_num_seqs": 8, "max_num_batched_tokens": 8},
    "no prefix cache": {"enable_prefix_caching": False},
    "tiny pool": {"num_kv_blocks": 12, "max_num_seqs": 16, "max_model_len": 128},
    "tiny pool, serial, no cache": {
        "num_kv_blocks": 9,
        "max_model_len": 128,
        "steps_in_flight": 1,
        "enable_prefix_caching": False,
    },
    "large blocks": {"block_size": 64},
    "with latency": {"step_latency_us": 300},
    "with latency, launched at once": {"step_latency_us": 300, "late_launch": False},
    "stepped by the event loop": {"step_driver": "loop"},
    "step thread on a core": {"cpu_affinity": min(os.sched_getaffinity(0))},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("machinery", MACHINERY)
async def test_outputs_do_not_depend_on_the_machinery(machinery: str) -> None:
    async with SimulatedEngine(ends=True, **MACHINERY[machinery]) as engine, no_leaks(engine):
        await check_jobs(engine, random_jobs(150, seed=1))
        if "tiny" in machinery:
            assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stop_string_ends_the_sequence_in_the_core(n: int) -> None:
    """The tokens that follow are not computed, whoever waits for the other sequences."""
    params = SamplingParams(n=n, max_tokens=1500, temperature=1.0, seed=3, ignore_eos=True)
    async with SimulatedEngine(step_driver="loop") as engine, no_leaks(engine):
        words = [engine.tokenizer.decode(engine.expected_token_ids(CANARY, params, i)[:40]).split() for i in range(n)]
        stops = [own[20] for own in words]
        output = await engine.generate(CANARY, dataclasses.replace(params, stop=stops))
        await settle(engine)
        assert all(s.finish_reason is FinishReason.STOP for s in output.outputs)
        delivered = sum(len(s.token_ids) for s in output.outputs)
        assert engine.stats().generation_tokens <= delivered + 8 * n


async def test_a_tenth_of_the_kv_with_priorities_loses_nobody() -> None:
    """200 requests at once. Their tokens are what the model says of each alone, as those of a roomy engine are."""
    jobs = random_jobs(200, seed=11, longest_prompt=90, longest_output=60)
    rng = random.Random(12)
    needed = 32 * 2 * 150 // 16  # blocks of as many sequences as may run, siblings counted
    async with SimulatedEngine(num_kv_blocks=needed // 10, max_num_seqs=32, max_model_len=160) as engine:
        async with no_leaks(engine):
            outputs = await asyncio.gather(
                *(engine.generate(job.prompt, job.params, priority=rng.randint(-3, 3)) for job in jobs)
            )
        for job, output in zip(jobs, outputs, strict=True):
            check_output(engine, job, output)
        assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("loop_name", BOTH_LOOPS)
async def test_one_after_the_other(loop_name: str) -> None:
    async with SimulatedEngine(ends=True) as engine, no_leaks(engine):
        for job in random_jobs(20, seed=2):
            check_output(engine, job, await engine.generate(job.prompt, job.params))
        await check_canary(engine)


async def test_sequences_of_a_request_differ_by_seed_alone() -> None:
    async with SimulatedEngine() as engine:
        several = await engine.generate(CANARY, SamplingParams(n=4, seed=11, max_tokens=10))
        for i, sequence in enumerate(several.outputs):
            alone = await engine.generate(CANARY, SamplingParams(seed=11 + i, max_tokens=10))
            assert alone.token_ids == sequence.token_ids
        assert len({s.token_ids for s in several.outputs}) == 4
        unseeded = [await engine.generate(CANARY, SamplingParams(max_tokens=10)) for _ in range(2)]
        assert unseeded[0].token_ids != unseeded[1].token_ids


# ---- ends ----


@pytest.mark.parametrize("include", [False, True])
async def test_stop_strings_cut_exactly(include: bool) -> None:
    rng = random.Random(5)
    async with SimulatedEngine() as engine, no_leaks(engine):
        free = SamplingParams(max_tokens=30, temperature=0.0)
        text = (await engine.generate(CANARY, free)).text
        tokens = engine.expected_token_ids(CANARY, free)
        for _ in range(40):
            begin = rng.randrange(len(text) - 12)
            stop = text[begin : begin + rng.randint(1, 12)]  # words have 3 to 9 characters: most span two or three
            first = text.index(stop)
            output = await engine.generate(
                CANARY,
                SamplingParams(
                    max_tokens=30, temperature=0.0, stop=["never there", stop], include_stop_str_in_output=include
                ),
            )
            assert output.text == text[: first + len(stop) * include]
            assert output.finish_reason == FinishReason.STOP
            assert output.outputs[0].stop_reason == stop
            completing = next(i for i in range(31) if len(engine.tokenizer.decode(tokens[:i])) >= first + len(stop))
            assert list(output.token_ids) == tokens[:completing]
            assert output.usage.completion_tokens == completing


async def test_a_stop_string_ends_one_sequence_of_several() -> None:
    async with SimulatedEngine(step_latency_us=200) as engine, no_leaks(engine):
        free = SamplingParams(n=3, seed=5, max_tokens=60)
        texts = [s.text for s in (await engine.generate(CANARY, free)).outputs]
        stop = texts[1][30:60]
        output = await engine.generate(CANARY, SamplingParams(n=3, seed=5, max_tokens=60, stop=stop))
        assert [s.text for s in output.outputs] == [texts[0], texts[1][:30], texts[2]]
        assert [s.finish_reason for s in output.outputs] == ["length", "stop", "length"]


async def test_a_stop_string_across_the_end_that_max_tokens_sets() -> None:
    async with SimulatedEngine() as engine:
        text = (await engine.generate(CANARY, SamplingParams(max_tokens=5, temperature=0.0))).text
        for stop in (text[-3:], text[-3:] + "x"):  # complete with the last token; never complete
            output = await engine.generate(CANARY, SamplingParams(max_tokens=5, temperature=0.0, stop=stop))
            ended = stop == text[-3:]
            assert output.text == (text[:-3] if ended else text)
            assert output.finish_reason == ("stop" if ended else "length")
            assert len(output.token_ids) == 5


async def test_end_of_sequence_and_stop_tokens() -> None:
    async with SimulatedEngine(ends=True, steps_in_flight=3) as engine, no_leaks(engine):
        # A prompt whose greedy continuation ends before 100 tokens.
        to_end = SamplingParams(max_tokens=100, temperature=0.0)
        prompt = next(
            [i, i + 1] for i in range(300, 1000) if engine.expected_token_ids([i, i + 1], to_end)[-1] == EOS_TOKEN_ID
        )
        ended = await engine.generate(prompt, to_end)
        check_output(engine, Job(prompt, to_end), ended)
        assert ended.token_ids[-1] == EOS_TOKEN_ID
        assert ended.outputs[0].stop_reason is None
        on = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
        output = await engine.generate(prompt, on)
        check_output(engine, Job(prompt, on), output)
        assert len(output.token_ids) == 100
        for position in range(5):
            token = output.token_ids[position]
            stop = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True, stop_token_ids=[token])
            stopped = await engine.generate(prompt, stop)
            assert stopped.token_ids == output.token_ids[: output.token_ids.index(token) + 1]
            assert stopped.outputs[0].stop_reason == token
            check_output(engine, Job(prompt, stop), stopped)


async def test_without_max_tokens_the_context_is_the_limit() -> None:
    async with SimulatedEngine(max_model_len=64) as engine:
        output = await engine.generate(CANARY, SamplingParams(max_tokens=None, temperature=0.0))
        assert len(output.token_ids) == 64 - len(CANARY)
        assert output.finish_reason == FinishReason.LENGTH


async def test_without_max_tokens_a_cache_smaller_than_the_context_is_the_limit() -> None:
    async with SimulatedEngine(max_model_len=64, num_kv_blocks=3) as engine, no_leaks(engine):
        for length in (1, 47):
            output = await engine.generate([300] * length, SamplingParams(max_tokens=None, temperature=0.0, n=2))
            assert [len(sequence.token_ids) for sequence in output.outputs] == [48 - length] * 2
            assert output.finish_reason == FinishReason.LENGTH
        with pytest.raises(KVCapacityError, match=r"for 49 tokens.*holds 48"):
            await engine.generate([300] * 48, SamplingParams(max_tokens=None))


async def test_prompts_of_all_kinds() -> None:
    async with SimulatedEngine() as engine:
        params = SamplingParams(max_tokens=3, temperature=0.0)
        by_text = await engine.generate("abc", params)
        assert by_text.prompt_token_ids == tuple(engine.tokenizer.encode("abc"))
        assert (await engine.generate(by_text.prompt_token_ids, params)).token_ids == by_text.token_ids
        long = "x" * 2000  # tokenized on a thread beyond 8,192 characters
        assert (await engine.generate(long, params)).usage.prompt_tokens == 2000
        messages = [{"role": "user", "content": "hello"}]
        by_chat = await engine.generate(messages, params)
        assert by_chat.prompt_token_ids == tuple(engine.tokenizer.encode_chat(messages))


# ---- counts and times ----


async def test_cached_tokens_and_salts() -> None:
    async with SimulatedEngine() as engine, no_leaks(engine):
        params = SamplingParams(max_tokens=2)
        assert (await engine.generate(CANARY, params)).usage.cached_tokens == 0
        assert (await engine.generate(CANARY, params)).usage.cached_tokens == (len(CANARY) - 1) // 16 * 16
        assert (await engine.generate(CANARY[:32], params)).usage.cached_tokens == 16  # one token is always computed
        other = await engine.generate(CANARY, params, cache_salt="other tenant")
        assert other.usage.cached_tokens == 0
        again = await engine.generate(CANARY, params, cache_salt="other tenant")
        assert again.usage.cached_tokens == 32
        stats = engine.stats()
        assert stats.prefix_cache_hits == 32 + 16 + 32
        assert stats.prefix_cache_queries == stats.prompt_tokens == 4 * len(CANARY) + 32
        assert stats.generation_tokens == 10
        assert stats.num_steps >= 10


async def test_timing() -> None:
    async with SimulatedEngine(step_latency_us=2000, max_num_seqs=1) as engine:
        before = time.monotonic()
        first, second = await asyncio.gather(
            *(engine.generate(CANARY, SamplingParams(max_tokens=10, temperature=0.0)) for _ in range(2))
        )
        after = time.monotonic()
        for timing in (first.timing, second.timing):
            assert before <= timing.arrived <= timing.scheduled <= timing.first_token <= timing.finished <= after
            assert timing.e2e >= timing.ttft >= timing.queue_time >= 0
            assert timing.e2e >= 10 * 0.002
            assert timing.tpot >= 0.002 * 0.9
        # One slot: it waited for what the first had left, which on a busy machine began before this one arrived.
        assert second.timing.queue_time >= 5 * 0.002


# ---- streams ----


@pytest.mark.parametrize("loop_name", BOTH_LOOPS)
async def test_streams_say_what_generate_says(loop_name: str) -> None:
    async with SimulatedEngine(ends=True, step_latency_us=100) as engine, no_leaks(engine):

        async def check(job: Job) -> None:
            deltas = [delta async for delta in engine.stream(job.prompt, job.params)]
            output = await engine.generate(job.prompt, job.params)
            check_output(engine, job, output)
            for sequence in output.outputs:
                assert join(deltas, sequence.index) == (sequence.text, list(sequence.token_ids))
                mine = [d for d in deltas if d.index == sequence.index]
                assert [d.finish_reason for d in mine] == [None] * (len(mine) - 1) + [sequence.finish_reason]
                assert mine[-1].stop_reason == sequence.stop_reason
            assert all(d.usage is None and d.timing is None for d in deltas[:-1])
            usage = deltas[-1].usage
            assert usage is not None
            assert usage.completion_tokens == output.usage.completion_tokens
            assert deltas[-1].timing is not None
            assert len({d.request_id for d in deltas}) == 1

        await asyncio.gather(*map(check, random_jobs(40, seed=3)))


async def test_a_slow_consumer_gets_one_bigger_delta() -> None:
    async with SimulatedEngine() as engine, no_leaks(engine):
        params = SamplingParams(max_tokens=50, temperature=0.0)
        slow = await engine.submit(CANARY, params)
        await check_jobs(engine, random_jobs(10, seed=4))  # the others are not held up
        await settle(engine)  # nor is the engine: the slow one's request is over, and holds nothing
        deltas = [delta async for delta in slow]
        assert len(deltas) == 1
        assert deltas[0].token_ids == engine.expected_token_ids(CANARY, params)
        assert deltas[0].finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 100])
async def test_collect_after_some_deltas_returns_everything(tokens: int) -> None:
    """Nobody looks at the text before the end, so it is made of 32 tokens at a time; the last may be fewer."""
    async with SimulatedEngine(step_latency_us=100) as engine:
        job = Job(CANARY, SamplingParams(max_tokens=tokens, temperature=0.0))
        stream = await engine.submit(job.prompt, job.params)
        await anext(stream)
        check_output(engine, job, await stream.collect())


async def test_a_bug_in_one_requests_handling_fails_that_request_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with SimulatedEngine(step_latency_us=200) as engine, no_leaks(engine):
        original, victims = IncrementalDetokenizer.push, set()

        def push(self: IncrementalDetokenizer, ids: list[int]) -> str:
            if id(self) in victims:
                raise ZeroDivisionError("planted")
            return original(self, ids)

        monkeypatch.setattr(IncrementalDetokenizer, "push", push)
        params = SamplingParams(max_tokens=30, temperature=0.0)
        good = asyncio.create_task(engine.generate(CANARY, params))
        bad = await engine.submit(CANARY, params)
        victims.add(id(bad._sequences[0]._detokenizer))
        with pytest.raises(Exception, match="planted") as failure:
            await bad.collect()
        assert isinstance(failure.value.__cause__, ZeroDivisionError)
        assert "failed" in caplog.text
        check_output(engine, Job(CANARY, params), await good)
        assert engine.health == "ready"
