"""Writing to clients that may read slowly, or never.

``StreamResponse.write`` of aiohttp waits for ever once the transport's buffer is full and the client
does not read. Here every wait for a client has a limit, and a client that exceeds it is cut.

A request comes through ``Connection``, or through a connection of a program that mounts the routes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import suppress
from typing import Any

from aiohttp import web
from aiohttp.http import HttpVersion11, StreamWriter

from asyncengine.server.connection import Connection

_PING = b": ping\n\n"
_TURN_S = 0.005
_WHOLE = 1 << 20
_WRITTEN_AT_ONCE = 1 << 16
_STOPPED_S = 1.0
"""A timer that is so late belongs to a process that was stopped: what a loop that runs does at once is far shorter."""


class ClientStalledError(ConnectionError):
    """The client did not read within the time limit; its connection has been aborted."""


async def _wait_for_client(
    writing: Coroutine[Any, Any, None], transport: asyncio.WriteTransport, limit_s: float
) -> None:
    """Run ``writing`` to its end, as long as the transport gets rid of something every ``limit_s``.

    A process that was stopped when that was over begins anew: meanwhile it was the one that sent nothing.
    """
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(writing)
    try:
        buffered, due = transport.get_write_buffer_size(), loop.time() + limit_s
        while not (await asyncio.wait({task}, timeout=limit_s))[0]:
            late, due = loop.time() - due, loop.time() + limit_s
            if late > _STOPPED_S:
                continue
            before, buffered = buffered, transport.get_write_buffer_size()
            if buffered >= before:
                transport.abort()  # close() would wait for the client to read what is buffered
                raise ClientStalledError(f"the client read nothing for {limit_s:g} s")
        task.result()
    finally:
        task.cancel()


def _transport(request: web.BaseRequest) -> asyncio.WriteTransport:
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client closed the connection")
    return transport


def _connection(request: web.BaseRequest) -> Connection | None:
    """Return the request's connection; None where a program has mounted the routes."""
    connection = request.protocol
    return connection if isinstance(connection, Connection) else None


def _ends(request: web.BaseRequest) -> bool:
    connection = _connection(request)
    return connection is not None and connection.ends


async def _finish(request: web.BaseRequest, response: web.StreamResponse, limit_s: float, last: bytes = b"") -> None:
    """End the response and wait until the kernel has all of it.

    With a high-water mark of 0 the wait covers every buffered byte, so a connection that goes back to
    idle holds no memory, and shutting down afterwards loses nothing.
    """
    transport = _transport(request)
    transport.set_write_buffer_limits(high=0)
    writing = response.write_eof(last) if last else response.write_eof()  # a Response has its own body
    await _wait_for_client(writing, transport, limit_s)
    transport.set_write_buffer_limits()


async def send_response(request: web.BaseRequest, response: web.StreamResponse, limit_s: float) -> None:
    """Send a whole response. Raises ConnectionError when the client is gone or stalls."""
    if _ends(request):
        response.force_close()
    await response.prepare(request)
    await _finish(request, response, limit_s)


async def in_turns(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The pieces, with a turn of the event loop for others after each few milliseconds' work."""
    began = time.perf_counter()
    for piece in pieces:
        yield piece
        if time.perf_counter() - began > _TURN_S:
            await asyncio.sleep(0)
            began = time.perf_counter()


async def send_pieces(
    request: web.BaseRequest, headers: dict[str, str], pieces: Iterator[bytes], limit_s: float, *, close: bool
) -> web.StreamResponse:
    """Answer with a JSON document that is made while it is sent. ``close``: the connection ends with it.

    A document of up to a megabyte is returned whole, not sent yet, so that it tells its length. Raises
    ConnectionError when the client is gone or stalls.
    """
    turns = in_turns(pieces)
    gathered = bytearray()
    async for piece in turns:
        gathered += piece
        if len(gathered) > _WHOLE:
            break
    else:
        return web.Response(body=bytes(gathered), content_type="application/json")
    response = web.StreamResponse(headers=headers)
    response.content_type = "application/json"
    if close or _ends(request) or request.version < HttpVersion11:
        response.force_close()
    writer = await response.prepare(request)
    assert isinstance(writer, StreamWriter)
    try:
        async for piece in turns:
            if len(gathered) >= _WRITTEN_AT_ONCE:
                await _wait_for_client(response.write(bytes(gathered)), _transport(request), limit_s)
                gathered.clear()
            gathered += piece
        await _finish(request, response, limit_s, bytes(gathered))
    except Exception as exc:  # nobody may take what was sent for all of it
        _transport(request).abort()
        if isinstance(exc, ConnectionError):
            raise
        raise ConnectionResetError(f"the response was cut: {exc!r}") from exc
    return response


class SseResponse:
    """A response of server-sent events. Its headers leave together with the first event."""

    def __init__(self, request: web.BaseRequest, headers: dict[str, str], limit_s: float) -> None:
        self.response = web.StreamResponse(headers=headers)
        self.response.content_type = "text/event-stream"
        self.response.charset = "utf-8"  # which some clients do not assume of text
        if request.version < HttpVersion11:
            self.response.force_close()  # the end of the connection is all that tells where the events end
        self.response.headers["Cache-Control"] = "no-cache"
        self.response.headers["X-Accel-Buffering"] = "no"  # nginx would hold events back
        self.request_id = headers["X-Request-Id"]
        self._request = request
        self._protocol = request.protocol
        self._connection = _connection(request)
        self._limit_s = limit_s
        self._writer: StreamWriter | None = None
        self._has_event = self._chunked = False
        self._opening = asyncio.Lock()
        self._pinging: asyncio.TimerHandle | asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        """True if the status line has been sent, so that errors must travel as events."""
        return self._writer is not None

    async def send(self, events: bytes) -> None:
        """Write; wait only when the transport's buffer is over its high-water mark.

        Raises ConnectionError when the client is gone or stalls.
        """
        if self._has_event or not await self._begin(events):
            transport = self._protocol.transport
            if transport is None or transport.is_closing():
                raise ConnectionResetError("the client closed the connection")
            if self._connection is None:  # no aiohttp transport may be there
                assert self._writer is not None
                await self._writer.write(events, drain=False)
            else:  # what the writer would do, without three calls per token
                transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)
        if self._protocol.writing_paused:
            assert self._writer is not None
            await _wait_for_client(self._writer.drain(), _transport(self._request), self._limit_s)

    async def _begin(self, first: bytes) -> bool:
        """The first event is there. False if the headers have left before it, and it remains to be sent."""
        self._has_event = True
        opened = await self._open(first)
        self.end_pings()
        return opened

    async def _open(self, first: bytes) -> bool:
        """Send the headers and ``first``. False if somebody else was about to send them, and has."""
        async with self._opening:
            if self._writer is not None:
                return False
            writer = await self.response.prepare(self._request)
            assert isinstance(writer, StreamWriter)
            self._writer, self._chunked = writer, writer.chunked
            await writer.write(first, drain=False)
            if self._connection is not None:
                self._connection.ping = b"%x\r\n%b\r\n" % (len(_PING), _PING) if writer.chunked else _PING
            return True

    def begin_pings(self, interval_s: float) -> None:
        """Send a comment every ``interval_s`` until the first event, the first one behind the headers."""
        self._pinging = asyncio.get_running_loop().call_later(interval_s, self._ping, interval_s)

    def end_pings(self) -> None:
        """Idempotent."""
        if self._pinging is not None:
            self._pinging.cancel()
            self._pinging = None

    def _ping(self, interval_s: float) -> None:
        if self._writer is None or self._connection is None:
            self._pinging = asyncio.ensure_future(self._write_ping(interval_s))
            return
        transport = self._connection.transport
        if transport is None or transport.is_closing():
            self._pinging = None
            return
        if self._connection.ping is not None and not transport.get_write_buffer_size():
            transport.write(self._connection.ping)
        self.begin_pings(interval_s)

    async def _write_ping(self, interval_s: float) -> None:
        with suppress(ConnectionError):  # whoever waits for events finds the same
            if not await self._open(_PING) and self._connection is None and not self._has_event:
                assert self._writer is not None
                await self._writer.write(_PING, drain=False)
            self.begin_pings(interval_s)

    async def done(self, last: bytes) -> None:
        """End the response cleanly, with the event ``last`` where there is one."""
        self._end_probes()
        await _finish(self._request, self.response, self._limit_s, last)

    async def fail(self, error: bytes) -> None:
        """Send an event that tells of an error and cut the connection, so that nobody takes this for a clean end."""
        await self.send(error)
        self._end_probes()
        transport = _transport(self._request)
        transport.close()
        asyncio.get_running_loop().call_later(self._limit_s, transport.abort)

    def _end_probes(self) -> None:
        if self._connection is not None:
            self._connection.ping = None
