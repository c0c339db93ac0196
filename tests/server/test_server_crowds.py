"""A thousand clients at once, a queue too small for them, and a hundred that do not read."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from typing import Any

import pytest

from asyncengine import SamplingParams, testing
from tests.coroutines import run
from tests.server.harness import COMPLETIONS, Site, raw_post, serving

LIMIT_S = 120.0
PAGE = os.sysconf("SC_PAGE_SIZE")


def fields(number: int, max_tokens: int) -> dict[str, Any]:
    prompt = [300 + number % 97, 301, 302 + number % 31]
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}


def expected(engine: testing.SimulatedEngine, number: int, max_tokens: int) -> str:
    """The text in series, which the simulated device's own hash gives."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return engine.tokenizer.decode(engine.expected_token_ids(fields(number, max_tokens)["prompt"], params))


async def answer_of(site: Site, number: int, max_tokens: int) -> tuple[int, bytes, str]:
    """Status, headers and text; a stream must end with [DONE], and its connection in order."""
    reader, writer = await site.connect()
    try:
        writer.write(raw_post(COMPLETIONS, fields(number, max_tokens)))
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head.split(b" ")[1])
        if status != 200:
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            return status, head, ""
        body = bytearray()
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        *events, done, rest = body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return 200, head, "".join(json.loads(e.removeprefix("data: "))["choices"][0]["text"] for e in events)
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.exhaustive  # tests/server/test_server_soak.py has as many streams
def test_a_thousand_streams_are_as_in_series() -> None:
    async def main() -> None:
        async with testing.SimulatedEngine(read_kv=False) as engine, serving(engine) as site:
            answers = await asyncio.gather(*(answer_of(site, i, 50) for i in range(1000)))
            for i, (status, _, text) in enumerate(answers):
                assert (status, text) == (200, expected(engine, i, 50))
            await testing.settle(engine)

    run(main(), LIMIT_S)


def test_a_thousand_streams_at_a_queue_of_a_hundred_are_served_or_refused() -> None:
    async def main() -> None:
        # 32 answers a second: a slow machine too reads requests faster than that.
        engine = testing.SimulatedEngine(
            read_kv=False, step_latency_us=100_000, max_num_seqs=64, max_queued_requests=100
        )
        async with engine, serving(engine) as site:
            answers = await asyncio.gather(*(answer_of(site, i, 20) for i in range(1000)))
            for i, (status, head, text) in enumerate(answers):
                assert status in (200, 503)
                if status == 200:
                    assert text == expected(engine, i, 20)
                else:
                    assert b"retry-after: " in head
            statuses = Counter(status for status, _, _ in answers)
            assert statuses[200] >= 100
            assert statuses[503] > 0
            await testing.settle(engine)

    run(main(), LIMIT_S)


def test_a_hundred_stalled_readers_cost_the_others_nothing() -> None:
    async def stall(site: Site, number: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*site.address, limit=1024)  # and it stops reading there
        writer.write(raw_post(COMPLETIONS, fields(number, 1500)))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        return reader, writer

    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * PAGE

    async def main() -> None:
        engine = testing.SimulatedEngine(read_kv=False, step_latency_us=2000, max_num_seqs=256)
        # A long name makes long events, which fill the kernel's buffers with few tokens.
        async with engine, serving(engine, write_timeout_s=1.0, served_model_name="m" * 10_000) as site:
            stalled = await asyncio.gather(*(stall(site, i) for i in range(100)))
            before = resident()
            answers = await asyncio.gather(*(answer_of(site, i, 100) for i in range(100)))
            for i, (status, _, text) in enumerate(answers):
                assert (status, text) == (200, expected(engine, i, 100))
            await testing.settle(engine)  # the stalled were cut: they were far from their end
            assert (await site.metric("asyncengine:request_success_total"))[
                f'{{finished_reason="abort",model_name="{"m" * 10_000}"}}'
            ] == 100
            # Without a limit they would have 1.5 GB. Memory of the others' answers comes and goes, some 70 MB of it.
            assert resident() - before < 256 << 20
            for reader, writer in stalled:
                received = bytearray()
                try:
                    while piece := await reader.read(1 << 20):
                        received = (received + piece)[-200:]
                except ConnectionResetError:
                    pass
                assert b"[DONE]" not in received
                assert not received.endswith(b"0\r\n\r\n")
                writer.close()

    run(main(), LIMIT_S)
