"""A cheap HTTP/1.1 client for server-sent events, so that a benchmark measures the server and not itself.

One request per connection, one callback per read of the socket, and of every event only the fields that are counted:
about a tenth of what a general client costs per token.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode
_DONE = b"[DONE]"


@dataclass(slots=True)
class SseResult:
    """The server's response to one request. Times are of time.perf_counter()."""

    started: float
    text_times: list[float] = field(default_factory=list)
    """Times at which the events with text arrived."""
    texts: list[str] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    done: bool = False
    """True if [DONE] was the last event."""
    error: str | None = None

    @property
    def failure(self) -> str | None:
        """The reason why this stream does not count as complete; None for a good one."""
        if self.error is not None:
            return self.error
        if not self.done:
            return "the connection was lost before [DONE]"
        if self.finish_reason is None:
            return "the stream has no finish_reason"
        return None if self.completion_tokens else "the stream has no usage"


@dataclass(frozen=True, slots=True)
class Target:
    """Server and route to which requests are sent."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None = None
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, path: str, api_key: str | None = None) -> Target:
        """``url`` with ``path`` below it. Raises ValueError if it is not a URL of HTTP."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not a URL of an HTTP server: {url!r}")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        return cls(parts.hostname, parts.port or (443 if tls else 80), parts.path.rstrip("/") + path, tls, api_key)

    def request(self, fields: dict[str, object]) -> bytes:
        """The HTTP request that posts ``fields`` as JSON."""
        body = msgspec.json.encode(fields)
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nConnection: close\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


async def read_sse(target: Target, request: bytes, timeout_s: float) -> SseResult:
    """Send ``request`` and read the events to the end. Never raises for what a server may do: see ``failure``."""
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[None] = loop.create_future()
    result = SseResult(perf_counter())
    transport: asyncio.BaseTransport | None = None
    try:
        async with asyncio.timeout(timeout_s):
            transport, _ = await loop.create_connection(
                lambda: _EventReader(request, result, finished), target.host, target.port, ssl=target.tls
            )
            await finished
    except TimeoutError:
        result.error = f"the stream did not end within {timeout_s:g} s"
    except OSError as exc:
        result.error = str(exc)
    finally:
        if transport is not None:
            transport.close()
    result.ended = result.ended or perf_counter()
    return result


class _EventReader(asyncio.Protocol):
    """Status line, chunked encoding and events of one response."""

    def __init__(self, request: bytes, result: SseResult, finished: asyncio.Future[None]) -> None:
        self._request = request
        self._result = result
        self._finished = finished
        self._unread = b""
        self._event = b""  # the beginning of an event that the chunk before ended in
        self._read: Callable[[bytes], bytes] = self._read_head

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.WriteTransport", transport).write(self._request)  # uvloop's does not derive from it

    def data_received(self, data: bytes) -> None:
        try:
            self._unread = self._read(self._unread + data if self._unread else data)
        except (ValueError, LookupError, msgspec.MsgspecError) as exc:
            self._result.error = f"the response is malformed: {exc}"
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish()

    def _finish(self) -> None:
        self._read = lambda data: b""
        if not self._finished.done():
            self._result.ended = perf_counter()
            self._finished.set_result(None)

    def _read_head(self, data: bytes) -> bytes:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            return data
        head = data[:end].lower()
        status = int(head.split(b" ", 2)[1])
        if status != 200:
            self._result.error = f"HTTP status {status}: {data[end + 4 :][:500].decode(errors='replace')}"
            self._finish()
        elif b"transfer-encoding: chunked" in head:
            self._read = self._read_chunks
        else:  # to the end of the connection
            self._read = self._read_plain
        return self._read(data[end + 4 :])

    def _read_plain(self, data: bytes) -> bytes:
        self._events(data)
        return b""

    def _read_chunks(self, data: bytes) -> bytes:
        place = 0
        while (line_end := data.find(b"\r\n", place)) >= 0:
            size = int(data[place:line_end].partition(b";")[0], 16)
            end = line_end + 2 + size
            if len(data) < end + 2:
                break
            if size == 0:
                self._finish()
                return b""
            self._events(data[line_end + 2 : end])
            place = end + 2
        return data[place:]

    def _events(self, data: bytes) -> None:
        """Take in a piece of the body; mostly it is one whole event."""
        *events, self._event = (self._event + data).replace(b"\r\n", b"\n").split(b"\n\n")
        now = perf_counter()
        for event in events:
            if event.startswith(b"data:"):  # else a comment
                self._take(event[5:].strip(), now)

    def _take(self, payload: bytes, now: float) -> None:
        result = self._result
        if result.done:
            raise ValueError("an event after [DONE]")
        if payload == _DONE:
            result.done = True
            return
        chunk = _decode(payload)
        if chunk.error is not None:
            result.error = f"error event: {chunk.error}"
        for choice in chunk.choices:
            text = choice.text if choice.delta is None else choice.delta.content
            if text:
                result.text_times.append(now)
                result.texts.append(text)
            if choice.finish_reason is not None:
                result.finish_reason = choice.finish_reason
        if chunk.usage is not None:
            result.prompt_tokens = chunk.usage.prompt_tokens
            result.completion_tokens = chunk.usage.completion_tokens
