"""The routes as an ASGI application, for programs that run under uvicorn, Starlette or FastAPI.

A request of ASGI becomes aiohttp's: ``receive`` fills its body, and its writer sends the messages of the response. The
program's server speaks HTTP, so headers that concern a connection are left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import quote

from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpVersion11, RawRequestMessage, StreamWriter
from aiohttp.streams import StreamReader
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from asyncengine.server.config import ServerConfig
from asyncengine.server.mounting import Mounted, MountedEngine

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_OF_CONNECTIONS = {b"transfer-encoding", b"connection", b"keep-alive"}


class _Transport(asyncio.Transport):
    """Tells whether the client is there, and holds back its body. Nothing is written here."""

    def __init__(self) -> None:
        self._closing = False
        self.reading = asyncio.Event()
        self.reading.set()

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    abort = close

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """``send`` returns when its message has left."""

    def get_write_buffer_size(self) -> int:
        return 0


class _Protocol(BaseProtocol):
    ssl_context = peername = sockname = None

    def __init__(self, transport: _Transport) -> None:
        super().__init__(asyncio.get_running_loop())
        self.transport = transport
        self.pause_reading = transport.reading.clear  # type: ignore[method-assign]
        self.resume_reading = lambda resume_parser=True: transport.reading.set()  # type: ignore[method-assign]


class _Writer(StreamWriter):
    """The messages of one response."""

    def __init__(self, protocol: BaseProtocol, send: Send, limit_s: float) -> None:
        super().__init__(protocol, asyncio.get_running_loop())
        self._to_server, self._limit_s = send, limit_s

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        pairs = [(name.lower().encode(), value.encode(errors="surrogateescape")) for name, value in headers.items()]
        status, kept = int(status_line.split()[1]), [pair for pair in pairs if pair[0] not in _OF_CONNECTIONS]
        await self._send({"type": "http.response.start", "status": status, "headers": kept})

    async def write(self, chunk: Any, *, drain: bool = True, LIMIT: int = 0) -> None:
        await self._send({"type": "http.response.body", "body": bytes(chunk), "more_body": True})

    async def write_eof(self, chunk: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": bytes(chunk), "more_body": False})

    async def _send(self, message: Message) -> None:
        try:
            await asyncio.wait_for(self._to_server(message), self._limit_s)
        except TimeoutError:
            if self.transport is not None:
                self.transport.close()
            raise ConnectionResetError(f"the client read nothing for {self._limit_s:g} s") from None


def asgi_app(
    engine: MountedEngine, config: ServerConfig | None = None, *, routes: Iterable[str] | None = None
) -> Callable[[Message, Receive, Send], Awaitable[None]]:
    """An ASGI application with the server's routes: ``app.mount("/llm", asgi_app(engine))``.

    The program starts and closes the engine, in the event loop of its server. Arguments and errors are those of
    ``create_app``. A scope of another type than http raises NotImplementedError.
    """
    mounted = Mounted(engine, config, routes)

    async def application(scope: Message, receive: Receive, send: Send) -> None:
        if (kind := scope["type"]) != "http":
            raise NotImplementedError(f"this application serves http, not {kind}")
        await _answer(mounted, scope, receive, send)

    return application


async def _answer(mounted: Mounted, scope: Message, receive: Receive, send: Send) -> None:
    transport = _Transport()
    protocol = _Protocol(transport)
    body = StreamReader(protocol, 2**16, loop=asyncio.get_running_loop())
    writer = _Writer(protocol, send, mounted.app.config.write_timeout_s)
    task: Any = asyncio.current_task()
    request = web.BaseRequest(_message(scope), body, protocol, writer, task, task.get_loop())  # type: ignore[arg-type]
    working = asyncio.ensure_future(mounted.handle(request))
    receiving = asyncio.ensure_future(_receive(receive, body, transport))
    receiving.add_done_callback(lambda _: working.cancel())
    try:
        await asyncio.wait({working})  # it raises nothing
    finally:
        for task in (working, receiving):
            task.cancel()
        await asyncio.gather(working, receiving, return_exceptions=True)


async def _receive(receive: Receive, body: StreamReader, transport: _Transport) -> None:
    """Fill the body, then wait until the client leaves."""
    while (message := await receive())["type"] == "http.request":
        body.feed_data(message.get("body", b""))
        if not message.get("more_body", False):
            body.feed_eof()
        await transport.reading.wait()
    body.set_exception(ConnectionResetError("the client closed the connection"))
    transport.close()


def _message(scope: Message) -> RawRequestMessage:
    """The request's head, with the path behind the one that the application is mounted at."""
    root, path = scope.get("root_path", ""), scope["path"]
    if root and (path == root or path.startswith(root + "/")):
        path = path.removeprefix(root) or "/"
    query = scope.get("query_string", b"").decode("latin-1")
    target = quote(path, safe="/:@!$&'()*+,;=~-._") + (f"?{query}" if query else "")
    raw = tuple((name, value) for name, value in scope["headers"] if name not in {b"expect", *_OF_CONNECTIONS})
    headers = CIMultiDict((name.decode("latin-1"), value.decode("utf-8", "surrogateescape")) for name, value in raw)
    return RawRequestMessage(
        scope["method"], target, HttpVersion11, CIMultiDictProxy(headers), raw, False, None, False, False, URL(target)
    )
