"""The real server and a simulated engine on an event loop of another thread, for clients that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvloop

from asyncengine import testing
from tests.server.harness import COMPLETIONS, Site, serving

_CANARY = {"prompt": [300, 301], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
_TIMEOUT_S = 60.0


@dataclass
class Threaded:
    """A running server."""

    site: Site
    engine: testing.SimulatedEngine
    golden: str
    _loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return self.site.url

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run ``coroutine`` on the server's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_TIMEOUT_S)

    def check(self) -> None:
        """The canary gets its golden text."""
        reply = self.run(self.site.post(COMPLETIONS, **_CANARY))
        assert reply.status == 200, reply.body
        assert reply.json["choices"][0]["text"] == self.golden


@contextmanager
def threaded(**config: Any) -> Iterator[Threaded]:
    """Serve; at the end nothing may be left."""
    ready, stop = threading.Event(), asyncio.Event()
    box: list[Threaded | BaseException] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with (
            testing.SimulatedEngine(read_kv=False, max_model_len=256, num_kv_blocks=1024) as engine,
            serving(engine, served_model_name="stories", **config) as site,  # type: ignore[arg-type]
        ):
            golden = (await site.post(COMPLETIONS, **_CANARY)).json["choices"][0]["text"]
            await site.post(COMPLETIONS, prompt="a", response_format={"type": "json_object"})  # begins its threads
            async with testing.no_leaks(engine):
                box.append(Threaded(site, engine, golden, loop))
                ready.set()
                await stop.wait()
                await testing.settle(engine)

    def body() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(main())
        except BaseException as exc:
            box.append(exc)
        finally:
            ready.set()

    thread = threading.Thread(target=body)
    thread.start()
    ready.wait(_TIMEOUT_S)
    try:
        if isinstance(box[0], BaseException):
            raise box[0]
        yield box[0]
    finally:
        if not isinstance(box[0], BaseException):
            box[0]._loop.call_soon_threadsafe(stop.set)
        thread.join(_TIMEOUT_S)
    assert not thread.is_alive()
    if isinstance(box[-1], BaseException):
        raise box[-1]
