"""Request bodies on their way in: their size, their shape, and the memory that they take together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Container, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus

from aiohttp import web

from asyncengine._core import json_shape
from asyncengine.api.checks import quoted
from asyncengine.api.request import Prompt
from asyncengine.server.config import ServerConfig
from asyncengine.server.errors import ApiError, bad_request, unavailable
from asyncengine.server.limits import LONG_FIELD, check_fields
from asyncengine.server.sse import encode

ALWAYS_ADMITTED = 64 * 1024
"""Bodies of up to so many bytes are let in whatever the others hold, so that large ones do not lock out small ones."""
MAX_DEPTH = 64
"""Arrays and objects within each other; no request that means something needs ten."""
_SCANNED_AT_ONCE = 2**20
"""Larger bodies are scanned on a thread, without the interpreter's lock: one to five milliseconds a megabyte."""


class Bodies:
    """Receives bodies. ``held`` counts bytes: of bodies until they are parsed, and of prompts until their answers are
    sent."""

    def __init__(self, config: ServerConfig) -> None:
        self.held = 0
        self._parsing = asyncio.Lock()
        self._config = config

    @asynccontextmanager
    async def receive(self, request: web.BaseRequest, fields: Container[str]) -> AsyncIterator[bytearray]:
        """The whole body, which counts as held until the block is left. Raises ApiError 400, 408, 413, 415 or 503.

        ``fields`` are those that the route reads: none of them is longer than ``limits.FIELD_BYTES`` says.
        It may not be JSON, but a parser makes no more of it than the limits on values and depth allow.
        """
        _check_headers(request, self._config.max_request_bytes)
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the response proper has not begun
        body = bytearray()
        try:
            await self._read(request, body)
            await self._check_shape(body, fields)
            if len(body) <= ALWAYS_ADMITTED:
                yield body
                return
            async with self._parsing:  # in a turn of the event loop of its own: many at once would hold it up
                await asyncio.sleep(0)
                yield body
        finally:
            self.held -= len(body)

    @contextmanager
    def hold(self, size: int, *, made: bool = False) -> Iterator[None]:
        """Count bytes that a request keeps until its answer is sent. Raises ApiError 503 over the limit.

        ``made``: they are of an answer that is there, which is sent whatever the others hold.
        """
        if not made and size > ALWAYS_ADMITTED and self.held + size > self._config.max_inflight_body_bytes:
            raise unavailable("too many large requests are being answered", "overloaded")
        self.held += size
        try:
            yield
        finally:
            self.held -= size

    async def _read(self, request: web.BaseRequest, body: bytearray) -> None:
        config = self._config
        try:
            async with asyncio.timeout(config.read_timeout_s):
                async for chunk in request.content.iter_any():
                    body += chunk
                    self.held += len(chunk)
                    if len(body) > config.max_request_bytes:
                        raise _too_large(f"is larger than {config.max_request_bytes} bytes")
                    if len(body) > ALWAYS_ADMITTED and self.held > config.max_inflight_body_bytes:
                        raise unavailable("too many large requests are being received", "overloaded", close=True)
        except TimeoutError:
            raise ApiError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"the request body did not arrive within {config.read_timeout_s:g} s",
                code="request_timeout",
            ) from None
        except web.RequestPayloadError as exc:
            raise bad_request(f"the request body could not be read: {exc}") from None

    async def _check_shape(self, body: bytearray, fields: Container[str]) -> None:
        if len(body) <= _SCANNED_AT_ONCE:
            values, depth, long_members = json_shape(body, LONG_FIELD)
        else:
            values, depth, long_members = await asyncio.to_thread(json_shape, body, LONG_FIELD)
        if values > self._config.max_request_values:
            raise _too_large(f"has more than {self._config.max_request_values} values")
        if depth > MAX_DEPTH:
            raise _too_large(f"is nested more than {MAX_DEPTH} levels deep")
        check_fields(long_members, fields)


def kept_size(prompts: Sequence[Prompt]) -> int:
    """Bytes of the prompts that a request keeps: texts, token ids, and conversations with all that they hold."""
    return sum(len(prompt) if isinstance(prompt, str) else len(encode(prompt)) for prompt in prompts)


def _check_headers(request: web.BaseRequest, limit: int) -> None:
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"the request body must not be compressed, got Content-Encoding: {quoted(encoding)}",
            code="unsupported_media_type",
        )
    if (request.content_length or 0) > limit:
        raise _too_large(f"is larger than {limit} bytes")


def _too_large(how: str) -> ApiError:
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the request body {how}", code="request_too_large")
