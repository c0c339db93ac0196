"""The routes inside another program's aiohttp application, beside routes of its own.

The program's connections are aiohttp's own, so nothing here needs ``runner`` or ``connection``. aiohttp leaves a
handler running when its client goes; here it is cancelled, which aborts the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import Protocol

from aiohttp import web

from asyncengine.server.app import ROUTE_PATH, App
from asyncengine.server.config import ServerConfig
from asyncengine.server.engine_api import Engine
from asyncengine.server.errors import ApiError

_LOOKS_S = 0.1
_CLIENT_LEFT = 499
"""Status of a response that nobody gets, as nginx has it in its logs."""


class MountedEngine(Engine, Protocol):
    """An engine that the application may be told to start."""

    async def start(self) -> None: ...


class Mounted:
    """The routes with the program's engine behind them. They answer 503 until it is started."""

    def __init__(self, engine: MountedEngine, config: ServerConfig | None, routes: Iterable[str] | None) -> None:
        self.app = App(config if config is not None else ServerConfig(page=False))
        self.paths = self.app.keep([routes] if isinstance(routes, str) else routes)
        self._engine = engine

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """``App.handle``."""
        if self.app.engine is None and self._engine.health != "loading":
            self.app.engine = self._engine
        return await self.app.handle(request)

    async def start(self) -> None:
        await self._engine.start()

    async def aclose(self) -> None:
        await self._engine.aclose()


def create_app(
    engine: MountedEngine,
    config: ServerConfig | None = None,
    *,
    routes: Iterable[str] | None = None,
    manage_engine: bool = False,
) -> web.Application:
    """An aiohttp application with the server's routes, to be run, extended or mounted by ``add_subapp``.

    The engine must run in the application's event loop. It belongs to the program: the application starts and closes it
    only with ``manage_engine``. ``routes`` are the paths to serve, each with all below it: ["/v1"] serves all of /v1.
    None: all. ``config`` has the keys, limits and names of the server; fields for the listening socket and the life of
    the process have no effect. None: the defaults without the page at /. Raises ConfigError for an unknown route.
    """
    mounted = Mounted(engine, config, routes)
    departures = _Departures()
    application = web.Application(middlewares=[_unknown_routes])

    async def answer(path: str, request: web.Request) -> web.StreamResponse:
        request[ROUTE_PATH] = path + request.match_info.get("name", "")
        return await departures.guard(request, mounted.handle(request))

    for path in mounted.paths:
        patterns = [path + "{name:.+}"] if path.endswith("/") and path != "/" else [path]
        patterns += [path + "/"] if not path.endswith("/") else []
        for pattern in patterns:
            application.router.add_route("*", pattern, partial(answer, path), expect_handler=_no_continue)

    async def life(_: web.Application) -> AsyncIterator[None]:
        if manage_engine:
            await mounted.start()
        yield
        if manage_engine:
            await mounted.aclose()

    async def drain(_: web.Application) -> None:
        mounted.app.draining = True

    application.cleanup_ctx.append(life)
    application.on_shutdown.append(drain)
    return application


async def _no_continue(request: web.Request) -> None:
    """``Bodies`` answers Expect: 100-continue, when it has looked at the headers."""


@web.middleware
async def _unknown_routes(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer a path that neither these routes nor the program's in this application have as the server does."""
    error = request.match_info.http_exception
    if error is None or error.status != 404:
        return await handler(request)
    return ApiError(404, f"there is no route {request.path[:200]!r}", code="not_found").response()


class _Departures:
    """Cancels the handlers of clients that have left. One timer looks after all of them."""

    def __init__(self) -> None:
        self._running: set[tuple[Callable[[], bool], asyncio.Future[web.StreamResponse]]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def guard(self, request: web.BaseRequest, handling: Awaitable[web.StreamResponse]) -> web.StreamResponse:
        """The response, or one that nobody gets if the client leaves before it."""
        work = asyncio.ensure_future(handling)
        entry = (partial(_has_left, request), work)
        self._running.add(entry)
        if self._timer is None:
            self._look()
        try:
            return await work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not _has_left(request) or (task is not None and task.cancelling()):
                raise
            return web.Response(status=_CLIENT_LEFT)
        finally:
            self._running.discard(entry)

    def _look(self) -> None:
        self._timer = None
        for has_left, work in self._running:
            if has_left():
                work.cancel()
        if self._running:
            self._timer = asyncio.get_running_loop().call_later(_LOOKS_S, self._look)


def _has_left(request: web.BaseRequest) -> bool:
    transport = request.transport
    return transport is None or transport.is_closing()
