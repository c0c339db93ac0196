"""Routes, authentication and the one place where exceptions become responses.

Built on aiohttp's low-level server: a dozen fixed routes need no router, and every answer, also to a
wrong path, method or malformed HTTP, leaves through ``App.handle`` or ``Protocol.handle_error``.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus

import msgspec
from aiohttp import web

from asyncengine.errors import InvalidRequestError
from asyncengine.server.chat import Chat
from asyncengine.server.completions import Completions
from asyncengine.server.config import ServerConfig
from asyncengine.server.engine_api import Engine
from asyncengine.server.errors import ApiError, bad_request, from_engine, unavailable
from asyncengine.server.generation import Endpoint, Job, generate, stream
from asyncengine.server.metrics import Metrics
from asyncengine.server.protocol import (
    ModelCard,
    ModelList,
    check_model,
    decode_object,
    name_as_asked,
    sampling_params,
)
from asyncengine.server.wire import EventStream, send_response

logger = logging.getLogger("asyncengine.server")

Handler = Callable[[web.BaseRequest, dict[str, str]], Awaitable[web.StreamResponse]]

_MODEL = "/v1/models/"  # and the rest of the path is the model's name
_MAX_REQUEST_ID = 256


class App:
    """The HTTP application. ``engine`` is None while the model loads."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.engine: Engine | None = None
        self.draining = False
        self.metrics = Metrics(lambda: self.engine, lambda: self.model_name)
        self._created = int(time.time())
        self._in_progress = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._routes: dict[str, tuple[str, Handler]] = {
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
            "/v1/models": ("GET", self._models),
            _MODEL: ("GET", self._model),
            "/v1/completions": ("POST", partial(self._generate, Completions())),
            "/v1/chat/completions": ("POST", partial(self._generate, Chat())),
        }

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        if self.config.served_model_name is not None:
            return self.config.served_model_name
        return self.engine.model_info.name if self.engine is not None else ""

    @property
    def health(self) -> str:
        """loading, ready, draining, closed or dead."""
        if self.engine is None:
            return "loading"
        health = self.engine.health
        return "draining" if self.draining and health == "ready" else health

    async def idle(self) -> None:
        """Wait until no request is in progress."""
        await self._idle.wait()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. Raises nothing but CancelledError, which means that the client left."""
        self._in_progress += 1
        self._idle.clear()
        headers = _base_headers(request)
        response: web.StreamResponse
        try:
            try:
                response = await self._dispatch(request, headers)
            except Exception as exc:
                response = self._failed(request, exc).response()
            if not response.prepared:
                response.headers.update(headers)
                if self.draining:
                    response.force_close()
                await send_response(request, response, self.config.write_timeout_s)
        except ConnectionError as exc:  # aiohttp closes its side when it finds the connection gone
            logger.debug("%s %s: %s", request.method, request.path, exc)
        finally:
            self._in_progress -= 1
            if not self._in_progress:
                self._idle.set()
        return response

    async def _dispatch(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        path = request.path
        if path != "/health":
            self._authenticate(request)
        route = self._routes.get(_MODEL if path.startswith(_MODEL) else path)
        if route is None:
            raise ApiError(HTTPStatus.NOT_FOUND, f"there is no route {path!r}", code="not_found")
        method, handler = route
        asked = "GET" if request.method == "HEAD" else request.method
        if asked != method:
            allowed = "GET, HEAD" if method == "GET" else method
            raise ApiError(
                HTTPStatus.METHOD_NOT_ALLOWED,
                f"{path} allows {allowed}, not {request.method}",
                code="method_not_allowed",
                headers={"Allow": allowed},
            )
        return await handler(request, headers)

    def _authenticate(self, request: web.BaseRequest) -> None:
        key = self.config.api_key
        if key is None:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        # surrogateescape: a header may hold any byte, and compare_digest takes bytes or ASCII
        same = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), key.encode())
        if scheme.lower() != "bearer" or not same:
            raise ApiError(
                HTTPStatus.UNAUTHORIZED,
                "a valid API key is needed: send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _failed(self, request: web.BaseRequest, exc: Exception) -> ApiError:
        error = exc if isinstance(exc, ApiError) else from_engine(exc)
        if isinstance(exc, ConnectionError):
            return bad_request("the connection was lost")  # nobody is left to read this
        if error is None:
            logger.error("%s %s failed", request.method, request.path, exc_info=exc)
            error = ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal server error")
        return error

    def _ready_engine(self) -> Engine:
        if self.engine is None:
            raise unavailable("the model is still loading", "loading")
        if self.draining:
            raise unavailable("the server is shutting down", "draining")
        return self.engine

    async def _health(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        if self.health != "ready":
            raise unavailable(f"the engine is {self.health}", self.health)
        return _json({"status": "ready"})

    async def _metrics(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        return web.Response(
            body=self.metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def _models(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        return _json(ModelList(data=[self._card()]))

    async def _model(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        card = self._card()
        check_model(request.path.removeprefix(_MODEL), card.id)
        return _json(card)

    def _card(self) -> ModelCard:
        if self.engine is None:
            raise unavailable("the model is still loading", "loading")
        limit = self.engine.model_info.max_model_len
        return ModelCard(id=self.model_name, created=self._created, max_model_len=limit)

    async def _generate(
        self, endpoint: Endpoint, request: web.BaseRequest, headers: dict[str, str]
    ) -> web.StreamResponse:
        engine = self._ready_engine()
        body, prompts = endpoint.parse(decode_object(await self._body(request)))
        check_model(body.model, self.model_name)
        try:
            job = Job(
                id=endpoint.id_prefix + uuid.uuid4().hex,
                created=int(time.time()),
                model=self.model_name,
                prompts=prompts,
                params=sampling_params(body),
                body=body,
            )
            if not body.stream:
                return _json(endpoint.document(job, await generate(engine, job, self.metrics)))
            events = EventStream(request, headers, self.config.write_timeout_s)
            chunks = endpoint.chunks(job)
            await stream(engine, job, self.metrics, events, chunks)
            return events.response
        except InvalidRequestError as exc:
            name_as_asked(exc, body)
            raise

    async def _body(self, request: web.BaseRequest) -> bytearray:
        limit = self.config.max_request_bytes
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise ApiError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"the request body must not be compressed, got Content-Encoding: {encoding}",
                code="unsupported_media_type",
            )
        if (request.content_length or 0) > limit:
            raise _too_large(limit)
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the response proper has not begun
        body = bytearray()
        try:
            async with asyncio.timeout(self.config.read_timeout_s):
                async for chunk in request.content.iter_any():
                    body += chunk
                    if len(body) > limit:
                        raise _too_large(limit)
        except TimeoutError:
            raise ApiError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"the request body did not arrive within {self.config.read_timeout_s:g} s",
                code="request_timeout",
            ) from None
        except web.RequestPayloadError as exc:
            raise bad_request(f"the request body could not be read: {exc}") from None
        return body


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _too_large(limit: int) -> ApiError:
    return ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"the request body is larger than {limit} bytes",
        code="request_too_large",
    )


def _base_headers(request: web.BaseRequest) -> dict[str, str]:
    """Headers of every response: X-Request-Id comes back when it can be sent back unchanged."""
    headers = {"Server": "asyncengine"}
    given = request.headers.get("X-Request-Id", "")
    if 0 < len(given) <= _MAX_REQUEST_ID and given.isascii() and given.isprintable():
        headers["X-Request-Id"] = given
    return headers
