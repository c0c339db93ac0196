"""A client of an OpenAI-compatible server: one that runs already, or this process's own engine behind a Unix socket."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import msgspec

from asyncengine.errors import ConfigError, InvalidRequestError
from asyncengine.server.config import ServerConfig
from asyncengine.server.engine_api import Engine
from asyncengine.server.http_server import HttpServer

_CONNECT_S = 30.0
_ATTEMPTS = 6
_LONGEST_WAIT_S = 30.0
_BUSY = (429, 503)


class ServerGoneError(OSError):
    """The server cannot be reached, or serves nobody any more. A request may be sent again."""


@dataclass(frozen=True)
class Reply:
    """A response read to its end."""

    status: int
    request_id: str
    body: Any
    """JSON of any kind."""


class Remote:
    """One server. Use as an asynchronous context manager."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """``url`` is http://HOST:PORT, with or without /v1, or unix:PATH. Raises ConfigError."""
        scheme, _, rest = url.partition(":")
        if scheme not in ("http", "https", "unix") or not rest.strip("/"):
            raise ConfigError(f"url must be http://HOST:PORT or unix:PATH, got {url!r}")
        self.url = url
        self._path = rest if scheme == "unix" else None
        self._base = "http://localhost" if scheme == "unix" else url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        unlimited = 0
        connector = (
            aiohttp.TCPConnector(limit=unlimited)
            if self._path is None
            else aiohttp.UnixConnector(self._path, limit=unlimited)
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def first_model(self) -> str:
        """The name of the model that the server lists first. Raises OSError."""
        assert self._session is not None
        try:
            async with self._session.get(f"{self._base}/v1/models") as response:
                response.raise_for_status()
                return str((await response.json())["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, LookupError, TypeError, ValueError) as exc:
            raise OSError(f"{self.url} does not say what model it serves: {exc}") from None

    async def post(self, path: str, fields: Mapping[str, Any]) -> Reply:
        """The response, once the server has room for the request. Raises ServerGoneError."""
        data = json.dumps(fields).encode()
        for attempt in range(_ATTEMPTS):
            wait_s = float(min(2**attempt, _LONGEST_WAIT_S))
            try:
                reply, after = await self._try(path, data)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as exc:
                problem = str(exc) or type(exc).__name__
            except aiohttp.ClientError as exc:
                raise ServerGoneError(f"{self.url} does not answer in HTTP: {exc}") from None
            else:
                if reply.status not in _BUSY:
                    _check_alive(reply)
                    return reply
                problem = error_text(reply.body)
                wait_s = max(wait_s, after)
            if attempt + 1 < _ATTEMPTS:
                await asyncio.sleep(min(wait_s, _LONGEST_WAIT_S))
        raise ServerGoneError(f"{self.url} does not serve: {problem}")

    async def _try(self, path: str, data: bytes) -> tuple[Reply, float]:
        """The response, and the seconds that it asks to wait."""
        assert self._session is not None
        async with self._session.post(self._base + path, data=data) as response:
            raw = await response.read()
            after = response.headers.get("Retry-After", "")
            reply = Reply(response.status, response.headers.get("X-Request-Id", ""), _json_or_text(raw))
            return reply, float(after) if after.isdecimal() else 0.0

    async def chat(self, fields: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        """The text of a streamed chat completion, piece by piece. Raises InvalidRequestError, OSError."""
        assert self._session is not None
        data = json.dumps({**fields, "stream": True}).encode()
        try:
            async with self._session.post(f"{self._base}/v1/chat/completions", data=data) as response:
                if response.status != 200:
                    text = error_text(_json_or_text(await response.read()))
                    raise InvalidRequestError(text) if response.status == 400 else OSError(text)
                async for event in _events(response.content):
                    if "error" in event:
                        raise OSError(error_text(event))
                    for choice in event.get("choices", ()):
                        yield choice.get("delta", {}).get("content") or ""
        except aiohttp.ClientError as exc:
            raise ServerGoneError(f"{self.url}: {str(exc) or type(exc).__name__}") from None


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """JSON of server-sent events, up to [DONE]. Raises OSError if the stream ends without it."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield msgspec.json.decode(data)
    raise ServerGoneError("the stream was cut")


def error_text(body: Any) -> str:
    """The message of an error response."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)


def _json_or_text(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except ValueError:
        return raw.decode(errors="replace")


def _check_alive(reply: Reply) -> None:
    error = reply.body.get("error") if isinstance(reply.body, dict) else None
    if reply.status >= 500 and isinstance(error, dict) and error.get("code") == "engine_dead":
        raise ServerGoneError(error_text(reply.body))


@asynccontextmanager
async def served_here(engine: Engine, serving: Mapping[str, Any]) -> AsyncIterator[Remote]:
    """A started engine behind the server's own endpoints, on a socket that only this user's processes can open.

    ``serving`` has keywords of ServerConfig."""
    with tempfile.TemporaryDirectory(prefix="asyncengine-") as folder:
        config = ServerConfig(uds=os.path.join(folder, "socket"), **serving)
        server = HttpServer(config)
        await server.start()
        try:
            server.app.engine = engine
            async with Remote(server.url) as remote:
                yield remote
        finally:
            await server.aclose()
