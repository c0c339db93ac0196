"""A crowd of clients, well and badly behaved, at a real engine: afterwards everything is back, and it still answers."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asyncengine import AsyncEngine, bundled_model, testing
from tests.coroutines import run
from tests.server.harness import COMPLETIONS, Site, raw_post, serving

CANARY = {"model": "stories", "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
LIMIT_S = 240.0


@pytest.fixture(params=["simulated device", "bundled model"])
def make_engine(request: pytest.FixtureRequest):
    if request.param == "bundled model":
        return lambda: AsyncEngine.from_pretrained(bundled_model(), num_kv_blocks=2048)
    return lambda: testing.SimulatedEngine(step_latency_us=500, num_kv_blocks=2048)


@asynccontextmanager
async def observed(engine: AsyncEngine) -> AsyncIterator[Site]:
    """Serve; at the end nothing may be left, the gauges are at zero and the canary's text is what it was."""
    async with engine, serving(engine, served_model_name="stories") as site:  # type: ignore[arg-type]
        golden = (await site.post(COMPLETIONS, **CANARY)).json["choices"][0]["text"]
        assert golden
        await testing.settle(engine)
        async with testing.no_leaks(engine):
            yield site
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "request_body_bytes"):
            assert set((await site.metric(f"asyncengine:{gauge}")).values()) == {0.0}, gauge
        assert (await site.post(COMPLETIONS, **CANARY)).json["choices"][0]["text"] == golden


async def stream_all(site: Site, fields: dict[str, Any]) -> tuple[str, int]:
    """Text and completion tokens of a stream that must end well, over a connection of its own."""
    reader, writer = await site.connect()
    try:
        writer.write(raw_post(COMPLETIONS, fields | {"stream": True, "stream_options": {"include_usage": True}}))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        text, tokens = "", 0
        while (line := await reader.readline()) != b"data: [DONE]\n":
            assert line, "the stream ended without [DONE]"
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                text += "".join(choice["text"] for choice in event["choices"])
                tokens = event["usage"]["completion_tokens"] if event.get("usage") else tokens
        return text, tokens
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.sampled(2)
def test_a_thousand_streams_at_once(make_engine):
    async def main() -> None:
        async with observed(make_engine()) as site:
            jobs = [CANARY | {"prompt": f"Once upon a time {i % 50}", "max_tokens": 8 + i % 9} for i in range(1000)]
            results = await asyncio.gather(*(stream_all(site, job) for job in jobs))
            expected: dict[tuple[Any, Any], tuple[str, int]] = {}
            for job, result in zip(jobs, results, strict=True):
                assert result[1] == job["max_tokens"]
                assert expected.setdefault((job["prompt"], job["max_tokens"]), result) == result

    run(main(), LIMIT_S)


@pytest.mark.sampled(2)
def test_two_thousand_disconnects(make_engine):
    async def leave(site: Site, seed: int) -> None:
        draw = random.Random(seed)
        n = draw.choice((1, 1, 3))
        fields = CANARY | {"prompt": f"Once {seed % 20}", "max_tokens": 400, "ignore_eos": True, "n": n}
        request = raw_post(COMPLETIONS, fields | {"stream": draw.random() < 0.7})
        if draw.random() < 0.1:
            request = request[: draw.randrange(len(request))]  # gone before the request is complete
        elif draw.random() < 0.1:
            request *= 400  # more than the server reads while the first runs
        reader, writer = await site.connect()
        try:
            writer.write(request)
            if draw.random() < 0.1:
                writer.write_eof()
            async with asyncio.timeout(draw.random() * 0.5):
                for _ in range(draw.randrange(4)):  # at once, after the headers, after some events
                    await reader.readuntil(b"\n\r\n" if draw.random() < 0.3 else b"\n\n")
        except (TimeoutError, asyncio.IncompleteReadError):
            pass  # out of patience
        finally:
            writer.transport.abort()
            writer.close()

    async def main() -> None:
        async with observed(make_engine()) as site:
            for wave in range(8):
                await asyncio.gather(*(leave(site, wave * 250 + i) for i in range(250)))

    run(main(), LIMIT_S)
