"""Replicas of the engine on Ray Serve, behind the server's routes; and the server class for Ray Serve LLM.

    serve run asyncengine.integrations.ray:build_app model=Qwen/Qwen3-8B

A front takes requests and hands each to a replica: where its prefix is warm, or where the least waits. Needs ray[serve]
(asyncengine[ray]).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any

import msgspec
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import RequestRouter

from asyncengine.bundled import path as bundled_path
from asyncengine.engine.engine import AsyncEngine
from asyncengine.engine.warmth import PIECE_TOKENS, Pieces, Warmth
from asyncengine.errors import ConfigError, EngineDeadError
from asyncengine.integrations.ray_llm import EngineServer as EngineServer
from asyncengine.integrations.ray_llm import answered, with_lifespan
from asyncengine.integrations.ray_routing import order, pieces_of_body, replicas_wanted
from asyncengine.server.asgi import Message, Receive, Send, asgi_app
from asyncengine.server.config import ServerConfig

_SCOPE = ("type", "http_version", "method", "scheme", "path", "root_path", "query_string", "headers")
_STATS_PERIOD_S = 1.0
_LARGE = 64 * 2**10
"""Bytes of a body from which on it is parsed beside the event loop."""

_Count = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
_Limit = Annotated[float, msgspec.Meta(gt=0)]


class Settings(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of ``build_app``."""

    model: str | None = None
    """Directory or hub id; None: the bundled model."""
    engine: dict[str, Any] = {}
    """Keywords of EngineConfig."""
    server: dict[str, Any] = {}
    """Keywords of ServerConfig."""
    min_replicas: Annotated[int, msgspec.Meta(ge=0)] = 1
    max_replicas: _Count = 1
    max_ongoing_requests: _Count = 512
    """Requests that a replica has at once; the others wait in the front."""
    most_queued_tokens: _Limit = 16384.0
    """Prompt tokens that wait at a replica on average before there are more replicas."""
    most_kv_usage: _Limit = 0.8
    """Share of a replica's KV cache that is used on average before there are more replicas."""
    drain_s: float = 60.0
    """Time that the requests of a replica get when it is taken away."""
    ray_actor_options: dict[str, Any] = {}
    """Options of Ray for a replica, such as num_gpus."""


class Ask:
    """A request on its way to a replica. ``pieces`` are for the router and stay behind."""

    def __init__(self, scope: Message, body: bytes, pieces: Pieces | None = None) -> None:
        self.scope = scope
        self.body = body
        self.pieces = pieces

    def __reduce__(self) -> tuple[type[Ask], tuple[Message, bytes]]:
        return Ask, (self.scope, self.body)


class EngineReplica:
    """An engine with the server's routes, in a process of Ray."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, model: str | None, engine: Mapping[str, Any], server: Mapping[str, Any]
    ) -> None:
        """Load the model. Raises ConfigError and ModelError."""
        self._engine = AsyncEngine.from_pretrained(model or str(bundled_path()), **engine)
        await self._engine.start()
        self._app = asgi_app(self._engine, ServerConfig(**{"page": False, **server}))

    async def answer(self, ask: Ask) -> AsyncGenerator[list[Message], None]:
        """Yield the messages of ASGI that answer a request. The request ends with the generator."""
        async for messages in answered(self._app, ask.scope, ask.body):
            yield messages

    def check_health(self) -> None:
        """Raise EngineDeadError where Ray must replace the replica."""
        if self._engine.health == "dead":
            raise EngineDeadError("the engine is dead")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Load of the replica, for ``Autoscaler``."""
        stats = self._engine.stats()
        return {"queued_tokens": stats.queued_tokens, "kv_cache_usage": stats.kv_cache_usage}

    def record_routing_stats(self) -> dict[str, float]:
        """Load of the replica, for ``PrefixRouter``."""
        info = self._engine.model_info
        pieces = info.kv_capacity_tokens // PIECE_TOKENS
        return {"queued_tokens": self._engine.load().queued_tokens, "pieces": pieces}


class Front:
    """Takes HTTP requests, and hands each to a replica."""

    def __init__(self, replicas: Any, max_request_bytes: int) -> None:
        self._replicas = replicas.options(stream=True)
        self._most = max_request_bytes

    async def __serve_build_asgi_app__(self) -> Any:
        return with_lifespan(self._serve)

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        received, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            received += message.get("body", b"")
            more = message.get("more_body", False)
            if len(received) > self._most:
                await _refuse(send, 413, "request_too_large", f"the body has more than {self._most} bytes")
                return
        body = bytes(received)
        del received
        large = len(body) > _LARGE
        pieces = await asyncio.to_thread(pieces_of_body, body) if large else pieces_of_body(body)
        ask = Ask({name: scope[name] for name in _SCOPE if name in scope}, body, pieces)
        answering = asyncio.ensure_future(self._relay(ask, send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _relay(self, ask: Ask, send: Send) -> None:
        begun, streams = False, False
        answer = self._replicas.answer.remote(ask)
        try:
            async for messages in answer:
                for message in messages:
                    begun = True
                    streams |= any(value.startswith(b"text/event-stream") for _, value in message.get("headers", ()))
                    await send(message)
        except asyncio.CancelledError:
            answer.cancel()
            raise
        except (RayError, RayServeException) as e:
            text = f"the replica of this request is gone: {type(e).__name__}"
            if not begun:
                await _refuse(send, 503, "replica_lost", text)
            elif streams:
                event = b"data: " + _error("replica_lost", text) + b"\n\n"
                await send({"type": "http.response.body", "body": event, "more_body": False})
            else:
                raise


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error(code: str, text: str) -> bytes:
    return json.dumps({"error": {"message": text, "type": "server_error", "param": None, "code": code}}).encode()


async def _refuse(send: Send, status: int, code: str, text: str) -> None:
    body = _error(code, text)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # the class is not known without ray
    """Sends a request where its prefix is warm or the least waits. Each front remembers what it sent."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._memories: dict[Any, Warmth] = {}

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return ranks of one replica each."""
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        loads = {
            id: (float(replica.routing_stats.get("queued_tokens", 0)), self.replica_queue_len_cache.get(id) or 0)
            for id, replica in by_id.items()
        }
        return [[by_id[id]] for id in order(loads, self._memories, _pieces(pending_request))]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Remember the prompt."""
        replicas = self.curr_replicas
        if replica_id not in self._memories and replica_id in replicas:
            self._memories[replica_id] = Warmth(int(replicas[replica_id].routing_stats.get("pieces", 4096)))
        for gone in self._memories.keys() - replicas.keys():
            del self._memories[gone]
        if replica_id in self._memories:
            self._memories[replica_id].add(_pieces(pending_request))


def _pieces(pending_request: Any) -> Pieces:
    asked = next((a for a in getattr(pending_request, "args", ()) if isinstance(a, Ask)), None)
    return asked.pieces if asked is not None and asked.pieces is not None else Pieces([], 0)


class Autoscaler:
    """Ray's policy of autoscaling, by the prompt tokens that wait and the use of KV caches."""

    def __init__(self, most_queued_tokens: float, most_kv_usage: float) -> None:
        self._limits = (most_queued_tokens, most_kv_usage)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        queued, usage = (metrics.get(name, {}).values() for name in ("queued_tokens", "kv_cache_usage"))
        wanted = replicas_wanted(queued, usage, *self._limits)
        return min(max(wanted, context.capacity_adjusted_min_replicas), context.capacity_adjusted_max_replicas), {}


def build_app(args: Mapping[str, Any]) -> Any:
    """Ray Serve's application for ``Settings``. Raises ConfigError for wrong ones."""
    try:
        settings = msgspec.convert(dict(args), Settings, strict=False)
        server = ServerConfig(**{"page": False, **settings.server})
    except (msgspec.ValidationError, TypeError) as e:
        raise ConfigError(f"the settings of the application are wrong: {e}") from None
    replicas = serve.deployment(EngineReplica).options(
        name="EngineReplica",
        max_ongoing_requests=settings.max_ongoing_requests,
        graceful_shutdown_timeout_s=settings.drain_s,
        ray_actor_options=settings.ray_actor_options,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_routing_stats_period_s=_STATS_PERIOD_S
        ),
        autoscaling_config=AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            policy=AutoscalingPolicy(
                policy_function=Autoscaler,
                policy_kwargs={
                    "most_queued_tokens": settings.most_queued_tokens,
                    "most_kv_usage": settings.most_kv_usage,
                },
            ),
        ),
    )
    front = serve.deployment(serve.ingress()(Front)).options(
        name="Front",
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=settings.drain_s,
        ray_actor_options={"num_cpus": 0},
    )
    bound = replicas.bind(settings.model, settings.engine, settings.server)
    return front.bind(bound, server.max_request_bytes)
