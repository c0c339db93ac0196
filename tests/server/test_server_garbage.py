"""Memory of a failed request is freed at once, without the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import logging
import types
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from asyncengine.errors import EngineDeadError
from asyncengine.server.generation import Job
from asyncengine.testing import SimulatedEngine
from tests.server.harness import CHAT, COMPLETIONS, USER, Site, raw_post, serving

MESSAGES = USER * 50
PROMPTS = ["hello"] * 5
REFUSED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [*MESSAGES, {"role": "user", "content": 5}]}),
    (CHAT, {"messages": [*MESSAGES, {"role": "", "content": "x"}]}),
    (CHAT, {"messages": [*MESSAGES, {"role": "user", "content": [{"type": "image"}]}]}),
    (CHAT, {"messages": MESSAGES, "temperature": 9}),
    (CHAT, {"messages": MESSAGES, "tools": [{}]}),
    (CHAT, {"messages": MESSAGES, "priority": 1}),
    (CHAT, {"messages": MESSAGES, "model": "another"}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 10**6}),
    (CHAT, {"messages": MESSAGES * 20}),
    (CHAT, {"messages": MESSAGES, "user": [[]] * 255_000}),
    (COMPLETIONS, {"prompt": ["hello", "x" * 100_000]}),
    (COMPLETIONS, {"prompt": [*PROMPTS, "x" * 5000]}),
    (COMPLETIONS, {"prompt": [[1], [10**6], [2]]}),
]


async def refused(site: Site, engine: SimulatedEngine, stream: bool) -> None:
    for route, fields in REFUSED:
        reply = await site.post(route, stream=stream, **fields)
        assert 400 <= reply.status < 500, (fields, reply.body)


async def unforeseen(site: Site, engine: SimulatedEngine, stream: bool) -> None:
    async def submit(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("nobody foresaw this")

    real, engine.submit = engine.submit, submit  # type: ignore[method-assign]
    try:
        for fields in ({"prompt": PROMPTS}, {"prompt": "hello"}):
            assert (await site.post(COMPLETIONS, stream=stream, **fields)).status == 500
    finally:
        engine.submit = real  # type: ignore[method-assign]


async def cut_short(
    site: Site, engine: SimulatedEngine, stream: bool, cut: Callable[[asyncio.StreamWriter], object]
) -> None:
    """Requests that run when ``cut`` is called."""
    for route, fields, count in ((CHAT, {"messages": USER}, 1), (COMPLETIONS, {"prompt": PROMPTS}, 5)):
        reader, writer = await site.connect()
        writer.write(raw_post(route, fields | {"max_tokens": 3000, "stream": stream, "ignore_eos": True}))
        while len(engine._life.requests) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if stream:
            await reader.readuntil(b"data: ")
        cut(writer)
        while engine._life.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        writer.close()


async def disconnected(site: Site, engine: SimulatedEngine, stream: bool) -> None:
    await cut_short(site, engine, stream, lambda writer: writer.close())


async def aborted(site: Site, engine: SimulatedEngine, stream: bool) -> None:
    await cut_short(site, engine, stream, lambda writer: engine.abort(next(iter(engine._life.requests)).request_id))


async def failed(site: Site, engine: SimulatedEngine, stream: bool) -> None:
    def fail(writer: asyncio.StreamWriter) -> None:
        for request in engine._life.requests:
            engine._life.requests.drop(request._key)
            request.fail(EngineDeadError("it failed"))

    await cut_short(site, engine, stream, fail)


def jobs() -> set[int]:
    return {id(o) for o in gc.get_objects() if type(o) is Job}


Kind = Callable[[Site, SimulatedEngine, bool], Awaitable[None]]
HELD = (msgspec.Struct, Job, BaseException, asyncio.Task, types.FrameType, types.TracebackType)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [refused, unforeseen, disconnected, aborted, failed])
async def test_nothing_of_a_failed_request_stays(kind: Kind, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1, "asyncengine")  # pytest would keep what is logged, exceptions too
    async with (
        SimulatedEngine(max_num_seqs=8, step_latency_us=300, max_model_len=4096, num_kv_blocks=4096) as engine,
        serving(engine, strict_model_names=True) as site,
    ):
        await kind(site, engine, stream)  # what is made once is made
        gc.collect()
        before = jobs()
        gc.disable()
        try:
            for _ in range(3):
                await kind(site, engine, stream)
            await site.server.app.idle()
            await asyncio.sleep(0.05)  # closed connections end their tasks
            assert jobs() <= before
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = [repr(o)[:200] for o in gc.garbage if isinstance(o, HELD)]
            assert not left
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
