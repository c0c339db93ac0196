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
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http import HttpVersion10, HttpVersion11

from asyncengine.api.checks import number, quoted
from asyncengine.api.request import Prompt
from asyncengine.errors import ConfigError, InvalidRequestError, RequestTimeoutError
from asyncengine.server.access import CLIENT_LEFT, Account, log_request
from asyncengine.server.bodies import ALWAYS_ADMITTED, Bodies, kept_size
from asyncengine.server.calls import Call, CallBody, Context, tokenizer_of
from asyncengine.server.chat import Chat
from asyncengine.server.completions import Completions
from asyncengine.server.config import ServerConfig
from asyncengine.server.cors import Cors
from asyncengine.server.engine_api import Engine
from asyncengine.server.errors import SERVER, ApiError, bad_request, failure, unavailable
from asyncengine.server.generation import Endpoint, Job, generate, send_sse, system_fingerprint
from asyncengine.server.keys import ApiKey, digest_of
from asyncengine.server.logprobs import JobLogProbs
from asyncengine.server.messages_api import Messages
from asyncengine.server.metrics import Metrics, load_of
from asyncengine.server.model_cards import ModelCard, ModelList, model_cards
from asyncengine.server.page.routes import Page
from asyncengine.server.protocol import GenerationBody, check_model
from asyncengine.server.response_routes import PARTS, RESPONSE, Handler, StoredResponses
from asyncengine.server.response_store import OwnResponses, ResponseStore
from asyncengine.server.responses import Responses
from asyncengine.server.texts import Detokenize, Tokenize
from asyncengine.server.vectors import Classify, Embeddings, Rerank, Scores
from asyncengine.server.wire import SseResponse, send_pieces, send_response
from asyncengine.version import VERSION

logger = logging.getLogger("asyncengine.server")

_MODEL = "/v1/models/"  # and the rest of the path is the model's name
_MESSAGES = "/v1/messages"
_CALLS: dict[str, Call[Any]] = {
    "/v1/embeddings": Embeddings(),
    **dict.fromkeys(("/score", "/v1/score"), Scores()),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), Rerank()),
    "/classify": Classify(),
    "/tokenize": Tokenize(),
    "/detokenize": Detokenize(),
}
_ACCOUNT = web.RequestKey("account", Account)
ROUTE_PATH = web.RequestKey("route_path", str)
"""The path among these routes, of a request that reached them through a program's own router."""
_PROBES = ("/metrics", "/ping", "/live", "/ready", "/load")
"""Routes that machines ask for all the time, beside the public ones: their lines are for debugging."""
_MAX_REQUEST_ID = 256


class App:
    """The HTTP application. ``engine`` is None while the model loads."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.engine: Engine | None = None
        self.draining = False
        self.bodies = Bodies(config)
        self.metrics = Metrics(
            lambda: self.engine, lambda: self.model_name, lambda: self.bodies.held, config.metrics_prefix
        )
        self._responses = ResponseStore(config.max_stored_responses, config.max_stored_response_bytes)
        self._keys = [(digest_of(key.key), key) for key in config.api_keys]
        self._created = int(time.time())
        self._in_progress = 0
        self._admission = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._routes: dict[str, tuple[str, Handler]] = {
            "/health": ("GET", self._health),
            "/ready": ("GET", self._health),
            "/live": ("GET", self._live),
            "/metrics": ("GET", self._metrics),
            "/load": ("GET", self._load),
            "/v1/models": ("GET", self._models),
            _MODEL: ("GET", self._model),
            "/v1/completions": ("POST", partial(self._generate, Completions())),
            "/v1/chat/completions": ("POST", partial(self._generate, Chat())),
            "/v1/responses": ("POST", self._respond),
            f"{RESPONSE}input_tokens": ("POST", self._count_input),
            **StoredResponses(self._own_responses, self._path).routes,
            _MESSAGES: ("POST", partial(self._generate, Messages())),
            f"{_MESSAGES}/count_tokens": ("POST", self._count_tokens),
            "/ping": ("GET", self._health),
            "/version": ("GET", self._tell_version),
            "/openapi.json": ("GET", self._openapi),
            "/docs": ("GET", self._docs),
            **{path: ("POST", partial(self._call, call)) for path, call in _CALLS.items()},
        }
        self._public = {"/health", "/ready", "/live", "/docs"}
        if config.public_metrics:
            self._public.add("/metrics")
        self._description: asyncio.Future[bytes] | None = None
        if config.page:
            page = Page(lambda: self.engine, lambda: self.model_name, lambda: self.health, self.metrics)
            self._routes |= page.routes
            self._public |= page.public
        methods = {method for allowed, _ in self._routes.values() for method in allowed.split(", ")}
        self._cors = Cors(config.cors_origins, methods | {"HEAD"})

    def keep(self, routes: Iterable[str] | None) -> list[str]:
        """Serve ``routes`` alone, each with all below it; None: all. Raises ConfigError for an unknown one.

        Returns the paths that are served. A path with a slash at its end has a name behind it.
        """
        kept: dict[str, tuple[str, Handler]] = {}
        for route in self._routes if routes is None else routes:
            top = route.rstrip("/") + "/"
            below = {path: each for path, each in self._routes.items() if f"{path}/".startswith(top)}
            if not below:
                raise ConfigError(f"routes: there is no route {route!r}; there are {', '.join(self._routes)}")
            kept |= below
        self._routes = kept
        return list(kept)

    @property
    def model_name(self) -> str:
        """The model's name in answers."""
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names that requests may use."""
        return self.config.model_names or (self.engine.model_info.name if self.engine is not None else "",)

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
        started, status = time.monotonic(), CLIENT_LEFT
        headers = _base_headers(request) | self._cors.headers(request)
        response: web.StreamResponse
        try:
            try:
                response = await self._dispatch(request, headers)
            except Exception as exc:
                anthropic = f"{self._path(request)}/".startswith(f"{_MESSAGES}/")
                response = _failed(exc, headers).response(headers["X-Request-Id"], anthropic=anthropic)
            if not response.prepared:
                response.headers.update(headers)
                if self.draining:
                    response.force_close()
                whole = response.body if isinstance(response, web.Response) else None
                size = len(whole) if isinstance(whole, bytes) else 0
                with self.bodies.hold(size, made=True):
                    await send_response(request, response, self.config.write_timeout_s)
            status = response.status
        except ConnectionError as exc:  # aiohttp closes its side when it finds the connection gone
            logger.debug("%s %s: %s", request.method, request.path, exc)
        finally:
            self._in_progress -= 1
            if not self._in_progress:
                self._idle.set()
            self._log(request, status, time.monotonic() - started, headers["X-Request-Id"])
        return response

    def _log(self, request: web.BaseRequest, status: int, seconds: float, request_id: str) -> None:
        path = self._path(request)
        prefix = self._route_of(path)
        route = prefix if prefix in self._routes else quoted(path)
        quiet = path in self._public or path in _PROBES
        log_request(request.method, route, status, seconds, request_id, request.get(_ACCOUNT), quiet=quiet)

    async def _dispatch(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        if request._version not in (HttpVersion10, HttpVersion11):
            # aiohttp answers in the version of the request, and keeps the one that it is asked for first.
            request._version = HttpVersion11
            raise ApiError(
                HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "only HTTP/1.0 and HTTP/1.1 are spoken here", close=True
            )
        if (preflight := self._cors.preflight(request)) is not None:
            return preflight
        path = self._path(request)
        if path not in self._public and self._keys:
            self._check_key(request)
        route = self._routes.get(self._route_of(path))
        if route is None:
            raise ApiError(HTTPStatus.NOT_FOUND, f"there is no route {quoted(path)}", code="not_found")
        methods, handler = route
        asked = "GET" if request.method == "HEAD" else request.method
        if asked not in methods.split(", "):
            allowed = methods.replace("GET", "GET, HEAD")
            raise ApiError(
                HTTPStatus.METHOD_NOT_ALLOWED,
                f"{quoted(path)} allows {allowed}, not {quoted(request.method)}",
                code="method_not_allowed",
                headers={"Allow": allowed},
            )
        return await handler(request, headers)

    def _route_of(self, path: str) -> str:
        """The key of a path in the table of routes."""
        return path if path in self._routes else _prefix(path)

    def _path(self, request: web.BaseRequest) -> str:
        """Return the path, without a proxy's root path or a slash at the end, and with /v1 where that was left out."""
        path, root = request.get(ROUTE_PATH, request.path), self.config.root_path
        if root and (path == root or path.startswith(root + "/")):
            path = path.removeprefix(root)
        path = path.rstrip("/") or "/"
        whole = f"/v1{path}"
        return whole if _prefix(path) not in self._routes and _prefix(whole) in self._routes else path

    def _check_key(self, request: web.BaseRequest) -> tuple[bytes, ApiKey]:
        """The key that the request brings, and its digest. Raises ApiError 401 if it brings none of ours."""
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        # Clients of Anthropic's API have a header of their own.
        for given in (bearer if scheme.lower() == "bearer" else "", request.headers.get("X-Api-Key", "")):
            # surrogateescape: a header may hold any byte
            digest = digest_of(given.strip(" \t").encode(errors="surrogateescape"))
            # All of them, so that the time it takes tells nothing.
            same = [key for known, key in self._keys if hmac.compare_digest(digest, known)]
            if same:
                return digest, same[0]
        raise ApiError(
            HTTPStatus.UNAUTHORIZED,
            "a valid API key is needed: send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _terms(self, request: web.BaseRequest, priority: int | None) -> tuple[int, str]:
        """Priority and tenant of a request: clients with keys share the engine by key, others by connection.

        A key's class bounds what its requests may ask for. Raises ApiError 400 for a priority that is not allowed.
        """
        if priority and not self.config.allow_priority:
            raise bad_request("priority is not allowed by this server: start it with --allow-priority", "priority")
        if not self._keys:
            return priority or 0, f"connection {id(request.protocol):x}"
        digest, key = self._check_key(request)
        if key.priority is None:
            return priority or 0, f"key {digest.hex()}"
        return max(key.priority, priority if priority is not None else key.priority), f"key {digest.hex()}"

    def _owner(self, request: web.BaseRequest) -> str:
        """Owner of stored responses: the clients that share a key, or without keys all clients."""
        return self._check_key(request)[0].hex() if self._keys else ""

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

    async def _live(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        """Answer 200 while a supervisor should leave the process alone, also while the server loads or drains."""
        if self.health == "dead":
            raise unavailable("the engine is dead", "dead")
        return _json({"status": self.health})

    async def _metrics(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        return web.Response(
            body=self.metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def _load(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        """Answer what a router weighs servers by, while requests are served."""
        return _json(load_of(self._ready_engine().stats()))

    async def _models(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        cards = self._cards()
        return _json(ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id))

    async def _model(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        cards = {card.id: card for card in self._cards()}
        name = self._path(request).removeprefix(_MODEL)
        check_model(name, list(cards))
        return _json(cards[name])

    async def _tell_version(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        return _json({"version": VERSION})

    async def _openapi(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        if self._description is None:  # made when it is first asked for, which takes a tenth of a second
            self._description = asyncio.ensure_future(asyncio.to_thread(self._describe))
        body = await asyncio.shield(self._description)
        return web.Response(body=body, content_type="application/json")

    def _describe(self) -> bytes:
        from asyncengine.server.openapi import document

        return document(keys=bool(self._keys), root_path=self.config.root_path)

    async def _docs(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        from asyncengine.server.docs import docs_page

        return docs_page()

    def _cards(self) -> list[ModelCard]:
        if self.engine is None:
            raise unavailable("the model is still loading", "loading")
        return model_cards(self.engine.model_info, self.model_names, self._created)

    async def _respond(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        return await self._generate(Responses(self._own_responses(request)), request, headers)

    def _own_responses(self, request: web.BaseRequest) -> OwnResponses:
        return self._responses.of(self._owner(request))

    async def _count_input(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        count = await self._count(Responses(self._own_responses(request)), request)
        return _json({"object": "response.input_tokens", "input_tokens": count})

    async def _count_tokens(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        return _json({"input_tokens": await self._count(Messages(counts=True), request)})

    async def _count(self, endpoint: Endpoint, request: web.BaseRequest) -> int:
        """The tokens of the only prompt of a request."""
        engine = self._ready_engine()
        body, prompts = await self._parse(endpoint, request)
        with self.bodies.hold(kept_size(prompts)):
            try:
                prompts, _, _ = endpoint.prepare(body, prompts, tokenizer_of(engine), self.config)
                async with _time_limit(body.timeout):
                    (prompt,) = await endpoint.fit(engine, body, prompts)
                    return len(await engine.tokenize(prompt))
            except InvalidRequestError as exc:
                endpoint.name_as_asked(exc, body)
                raise

    async def _generate(
        self, endpoint: Endpoint, request: web.BaseRequest, headers: dict[str, str]
    ) -> web.StreamResponse:
        self._ready_engine()
        body, prompts = await self._parse(endpoint, request)
        with self.bodies.hold(kept_size(prompts)):
            return await self._answer(endpoint, body, prompts, request, headers)

    async def _answer(
        self,
        endpoint: Endpoint,
        body: GenerationBody,
        prompts: list[Prompt],
        request: web.BaseRequest,
        headers: dict[str, str],
    ) -> web.StreamResponse:
        engine = self._ready_engine()
        tokenizer, parsing = tokenizer_of(engine), None
        try:
            prompts, params, parsing = endpoint.prepare(body, prompts, tokenizer, self.config)
            prompts = await endpoint.fit(engine, body, prompts)
            by_number = bool(body.return_tokens_as_token_ids)
            priority, tenant = self._terms(request, body.priority)
            wants_logprobs = params.wants_logprobs or params.prompt_logprobs is not None
            job = Job(
                id=endpoint.id_prefix + uuid.uuid4().hex,
                created=int(time.time()),
                model=self.model_name,
                fingerprint=system_fingerprint(engine.model_info),
                prompts=prompts,
                params=params,
                body=body,
                priority=priority,
                tenant=tenant,
                admission=self._admission,
                logprobs=JobLogProbs(tokenizer, params, by_number) if wants_logprobs else None,
                tokenizer=tokenizer,
                parsing=parsing,
            )
            request[_ACCOUNT] = job.account
            self._check_allowed(job)
            if not body.stream:
                pieces = endpoint.pieces(job, await generate(engine, job, self.metrics))
                limit_s = self.config.write_timeout_s
                return await send_pieces(request, headers, pieces, limit_s, close=self.draining)
            events = SseResponse(request, headers, self.config.write_timeout_s)
            chunks = endpoint.chunks(job)
            await send_sse(engine, job, self.metrics, events, chunks, self.config.ping_interval_s)
            return events.response
        except InvalidRequestError as exc:
            endpoint.name_as_asked(exc, body, None if parsing is None else parsing.param)
            raise

    async def _parse(self, endpoint: Endpoint, request: web.BaseRequest) -> tuple[GenerationBody, list[Prompt]]:
        """Parse the body in a frame of its own: it ends, and the bytes are freed."""
        async with self.bodies.receive(request, endpoint.fields) as raw:
            body, prompts = endpoint.parse(raw, self.config)
            large = len(raw) > ALWAYS_ADMITTED
        if large:  # parsing has had its turn of the event loop, and the request's checks have another one
            await asyncio.sleep(0)
        self._check_model(body.model)
        return body, prompts

    async def _call(self, call: Call[Any], request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        engine = self._ready_engine()
        body = await self._parse_call(call, request)
        priority, tenant = self._terms(request, body.priority)
        terms = {"priority": priority, "cache_salt": body.cache_salt, "tenant": tenant}
        context = Context(uuid.uuid4().hex, int(time.time()), self.model_name, terms, self.config)
        request[_ACCOUNT] = context.account
        try:
            async with _time_limit(body.timeout):
                return _json(await call.answer(engine, body, context))
        except InvalidRequestError as exc:
            call.name_as_asked(exc)
            raise

    async def _parse_call(self, call: Call[Any], request: web.BaseRequest) -> CallBody:
        async with self.bodies.receive(request, call.fields) as raw:
            body: CallBody = call.parse(raw, self.config)
        self._check_model(body.model)
        return body

    def _check_model(self, asked: str | None) -> None:
        if self.config.strict_model_names:
            check_model(asked, self.model_names)

    def _check_allowed(self, job: Job) -> None:
        limit, n = self.config.max_sequences_per_request, job.params.n
        if job.num_choices > limit:
            field = "n" if n == (job.body.n or 1) else "best_of"
            raise bad_request(
                f"{field}: {len(job.prompts)} prompts with {field} = {n} are {job.num_choices} sequences, "
                f"and a request may ask for {limit}",
                field,
            )


@asynccontextmanager
async def _time_limit(seconds: float | None) -> AsyncIterator[None]:
    """Limit the time of a request that has no part of an answer to end with. Raises RequestTimeoutError,
    InvalidRequestError."""
    if seconds is None:
        yield
        return
    limit = asyncio.timeout(number("timeout", seconds, 0, 1e6, open_low=True))
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise RequestTimeoutError(f"there was no answer within the timeout of {seconds:g} s") from None


def _prefix(path: str) -> str:
    """The key of a path with an id in the table of routes."""
    if path.startswith(RESPONSE):
        return RESPONSE + next((part for part in PARTS if path.endswith(part)), "")
    return _MODEL if path.startswith(_MODEL) else path


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _failed(exc: Exception, headers: dict[str, str]) -> ApiError:
    if isinstance(exc, ConnectionError):
        return bad_request("the connection was lost")  # nobody is left to read this
    return failure(exc, headers["X-Request-Id"])


def _base_headers(request: web.BaseRequest) -> dict[str, str]:
    """Headers of every response: X-Request-Id comes back when it can be sent back unchanged; else one is made."""
    given = request.headers.get("X-Request-Id", "")
    if not (0 < len(given) <= _MAX_REQUEST_ID and given.isascii() and given.isprintable()):
        given = uuid.uuid4().hex
    return SERVER | {"X-Request-Id": given}
