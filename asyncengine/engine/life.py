"""The life of an engine: a backend that is loaded, woken by its core, and stopped; and what the engine is meanwhile."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from asyncengine._core import StepLoop
from asyncengine.config import EngineConfig
from asyncengine.engine.constraints.requests import StructuredRequests
from asyncengine.engine.live_requests import LiveRequests
from asyncengine.engine.stream import warn_unclosed
from asyncengine.errors import ConfigError, EngineClosedError, EngineDeadError, EngineError, InternalError
from asyncengine.runner.backend import Backend, stop_at_exit
from asyncengine.text.prompts import Prompts

if TYPE_CHECKING:
    from asyncengine.api.model_info import ModelInfo
    from asyncengine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_HOW_TO_START = "write 'async with AsyncEngine.from_pretrained(...) as engine:', or 'await engine.start()' before"
Health = Literal["loading", "ready", "draining", "closed", "dead"]


async def _drive(step_loop: StepLoop) -> None:
    """Drive the step loop in place of the step thread, a round at a time between the event loop's other callbacks."""
    while not step_loop.error:
        moved = step_loop.advance()
        await asyncio.sleep(0 if moved or not step_loop.quiescent else 0.0005)


class Life:
    """One engine's backend and requests, from ``start`` to ``aclose``. The engine's parts share it."""

    def __init__(self, config: EngineConfig, load: Callable[[EngineConfig], Backend]) -> None:
        """``load`` runs on a thread when the engine starts."""
        self.config = config
        self.load = load
        self.requests = LiveRequests(config.fair_share_s)
        self.backend: Backend | None = None
        self._prompts: Prompts | None = None
        self._constraints: StructuredRequests | None = None
        self._health: Health = "loading"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death: str = ""
        self._stopping: asyncio.Future[bool] | None = None
        self._driver: asyncio.Future[None] | None = None
        self.after_news: Callable[[], None] | None = None
        """Called whenever news of the core was handed out, also that of its end."""

    async def start(self) -> None:
        """See ``AsyncEngine.start``."""
        if self._health != "loading" or self._loop is not None:
            raise EngineClosedError("the engine was started before; create a new one for each start")
        self._loop = self.requests.loop = asyncio.get_running_loop()
        try:
            self.backend = await asyncio.to_thread(self.load, self.config)
        except BaseException:
            self._health = "closed"
            raise
        if self.health != "loading":  # aclose() came first
            self.backend = None
            raise EngineClosedError("the engine was closed while it was loading")
        tokenizer, model = self.backend.tokenizer, self.backend.model_info
        self._prompts = Prompts(self.config, tokenizer, model)
        self._constraints = StructuredRequests(tokenizer, model, sandbox=self.config.sandbox)
        step_loop = self.requests.step_loop = self.backend.step_loop
        self.wake_by(self.deliver)
        if self.config.step_driver == "loop":
            self._driver = asyncio.ensure_future(_drive(step_loop))
        else:
            cpu = self.config.cpu_affinity
            step_loop.start(-1 if cpu is None else cpu)
        stop_at_exit(self.backend)
        self._health = "ready"

    async def aclose(self, drain: bool, timeout_s: float) -> None:
        """See ``AsyncEngine.aclose``."""
        if self.backend is None or self.backend.forked:
            self._health = "closed"  # never started, still loading, closed before, or the parent process's
            return
        self.check_loop()
        self.refuse_requests()
        try:
            if drain and self._health == "draining":
                async with asyncio.timeout(timeout_s):
                    await self.requests.idle.wait()
        except TimeoutError:
            pass
        finally:
            await self._shut_down()

    def refuse_requests(self) -> None:
        """Take no more requests. Those under way go on."""
        if self._health == "ready":
            self._health = "draining"

    async def _shut_down(self) -> None:
        if self.backend is None or self._loop is None:
            return
        self._health = "closed"
        if self._stopping is None:
            for stream in self.requests:
                stream.fail(EngineClosedError("the engine was closed before the request was finished"))
            self._loop.remove_reader(self.backend.step_loop.wake_fd)
            if self._driver is not None:
                self._driver.cancel()
            self._stopping = asyncio.ensure_future(self._stop(self.backend))
        if await asyncio.shield(self._stopping) and self.backend is not None:
            with self.backend.on_device():
                self.backend = self.requests.step_loop = None

    async def _stop(self, backend: Backend) -> bool:
        if self._prompts is not None:
            await self._prompts.aclose()
        if self._constraints is not None:
            await self._constraints.aclose()
        return await asyncio.to_thread(backend.stop, 5.0)

    def __del__(self) -> None:
        if self._health in ("ready", "draining"):
            warn_unclosed(self)
            backend = self.loaded()
            if backend.process == os.getpid():
                self.prompts.release()
                self.constraints.release()
            backend.stop(5.0)

    def __repr__(self) -> str:
        return f"<AsyncEngine {self.config.model} {self._health}>"

    # ---- what the engine is now ----

    @property
    def health(self) -> Health:
        """See ``AsyncEngine.health``."""
        return self._health

    @property
    def prompts(self) -> Prompts:
        """The way from prompts to token ids. There once the engine has started."""
        assert self._prompts is not None
        return self._prompts

    @property
    def constraints(self) -> StructuredRequests:
        """Grammars and logits processors of requests. There once the engine has started."""
        assert self._constraints is not None
        return self._constraints

    @property
    def held_characters(self) -> int:
        """Characters of prompts that wait for their token ids; 0 before the start."""
        return 0 if self._prompts is None else self._prompts.held_characters

    @property
    def model(self) -> ModelInfo:
        """See ``AsyncEngine.model_info``."""
        return self.loaded().model_info

    @property
    def tokenizer(self) -> Tokenizer:
        """See ``AsyncEngine.tokenizer``."""
        tokenizer = self.loaded().tokenizer
        if tokenizer is None:
            raise ConfigError("the engine was created with skip_tokenizer_init: it has no tokenizer")
        return tokenizer

    def check_loop(self) -> None:
        """Raise WrongLoopError unless the caller runs in the engine's event loop."""
        self.requests.check_loop()

    def loaded(self) -> Backend:
        """The backend. Raises EngineClosedError before the start and after the end."""
        if self.backend is None:
            raise self.dead_or_closed()
        return self.backend

    def serving(self) -> Backend:
        """The backend, if it takes requests. Raises EngineClosedError, EngineDeadError, WrongLoopError."""
        if self._loop is not None:
            self.check_loop()
        if self._health != "ready" or self.backend is None:
            raise self.dead_or_closed()
        return self.backend

    def dead_or_closed(self) -> EngineError:
        """The error that says why the engine takes no request."""
        if self.backend is not None and (self._health == "dead" or self.backend.step_loop.error):
            reason = self._death or self.backend.step_loop.error
            return EngineDeadError(f"the engine is dead: {reason}")
        if self._health == "loading" and self._loop is None:
            return EngineClosedError(f"the engine is loading: it was not started; {_HOW_TO_START}")
        if self._health == "loading":
            return EngineClosedError("the engine is loading: wait until start() has returned")
        if self._health == "draining":
            return EngineClosedError("the engine takes no requests: it is draining, since aclose() was called")
        return EngineClosedError(f"the engine is closed: it cannot start again, create a new one; {_HOW_TO_START}")

    # ---- news of the core ----

    def wake_by(self, callback: Callable[[], None]) -> None:
        """Have the event loop call this when the core has news. It is ``deliver``, or calls it."""
        assert self._loop is not None
        self._loop.add_reader(self.loaded().step_loop.wake_fd, callback)

    def deliver(self) -> None:
        """Hand the core's news to the requests that wait for them."""
        if self.backend is None:
            return
        news, alive = self.backend.step_loop.drain()
        for fresh in news:
            stream = self.requests.get(fresh.request)
            if stream is None:
                continue  # aborted; its last tokens were under way
            try:
                stream.feed(fresh)
            except Exception as e:  # a bug while handling one request must not cost the others theirs
                logger.exception("request %s failed", stream.request_id)
                error = InternalError(f"request {stream.request_id} failed: {e!r}")
                error.__cause__ = e
                self.requests.fail(fresh.request, error)
        for line in self.backend.step_loop.take_step_error().splitlines():
            logger.error("a step failed, and its requests with it: %s", line)
        if not alive:
            self._die(self.backend.step_loop.error)
        if self.after_news is not None:
            self.after_news()

    def _die(self, reason: str) -> None:
        if self._health == "dead":
            return
        self._health = "dead"
        self._death = reason
        logger.error("the engine is dead: %s", reason)
        for stream in self.requests:
            stream.fail(self.dead_or_closed())
