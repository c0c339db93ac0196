"""The server class that Ray Serve LLM runs: ``LLMConfig(server_cls="asyncengine.integrations.ray_llm:EngineServer")``.

Ray's ingress parses requests; here they go through the server's own routes, so that they are served as elsewhere.
``engine_kwargs`` of the LLMConfig are keywords of EngineConfig. Importing this needs no ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from copy import deepcopy
from importlib import import_module
from typing import Any

import msgspec

from asyncengine.engine.engine import AsyncEngine
from asyncengine.errors import ConfigError, EngineDeadError
from asyncengine.server.asgi import Message, Receive, Send, asgi_app
from asyncengine.server.config import ServerConfig

logger = logging.getLogger("asyncengine.server")
Application = Callable[[Message, Receive, Send], Awaitable[None]]


async def answered(app: Application, scope: Message, body: bytes) -> AsyncGenerator[list[Message], None]:
    """Yield the messages with which an ASGI application answers a request, those together that are ready.

    The request ends with the generator.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=64)
    bodies: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    left = asyncio.Event()

    async def receive() -> Message:
        if bodies:
            return bodies.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if left.is_set():
            raise ConnectionResetError("the consumer has left")
        await messages.put(message)

    async def run() -> None:
        try:
            await app(scope, receive, send)
        except Exception:
            logger.exception("a request failed")
        await messages.put(None)

    running = asyncio.create_task(run())
    try:
        more = True
        while more and (first := await messages.get()) is not None:
            ready = [first]
            while more and not messages.empty():
                following = messages.get_nowait()
                if following is None:
                    more = False
                else:
                    ready.append(following)
            yield ready
            more = more and ready[-1].get("more_body", True)
    finally:
        left.set()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def with_lifespan(serving: Application) -> Application:
    """An ASGI application whose start and end Ray may announce. The engine's life does not depend on them."""

    async def application(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            kind = ""
            while kind != "lifespan.shutdown":
                kind = (await receive())["type"]
                await send({"type": f"{kind}.complete"})
        else:
            await serving(scope, receive, send)

    return application


class EngineServer:
    """An engine behind the interface that Ray Serve LLM has for its servers. It is started when it is made."""

    async def __init__(self, llm_config: Any) -> None:  # type: ignore[misc]  # Ray awaits it
        """Load the model of a ``ray.serve.llm.LLMConfig``. Raises ConfigError and ModelError."""
        self._config = llm_config
        self._engine: AsyncEngine | None = None
        await self.start()

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """Return Ray's options of the deployment. A configuration with an accelerator takes one GPU for a replica."""
        options: dict[str, Any] = deepcopy(dict(llm_config.deployment_config))
        actor = options.setdefault("ray_actor_options", {})
        if llm_config.accelerator_type is not None:
            actor.setdefault("num_gpus", 1)
        if llm_config.runtime_env:
            actor["runtime_env"] = {**llm_config.runtime_env, **actor.get("runtime_env", {})}
        return options

    async def start(self) -> None:
        """Load the model. A second call does nothing."""
        if self._engine is not None:
            return
        source = self._config.model_loading_config.model_source or self._config.model_id
        if not isinstance(source, str):
            raise ConfigError("model_source must be a directory or a hub id: models in other stores are not served")
        self._engine = AsyncEngine.from_pretrained(source, **self._config.engine_kwargs)
        await self._engine.start()
        config = ServerConfig(page=False, served_model_name=self._config.model_id)
        self._app = asgi_app(self._engine, config)

    async def __serve_build_asgi_app__(self) -> Application:
        return with_lifespan(self._app)

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield lists of SSE events, or one ChatCompletionResponse, or an ErrorResponse."""
        async for piece in self._answers("/v1/chat/completions", "ChatCompletionResponse", request):
            yield piece

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield lists of SSE events, or one CompletionResponse, or an ErrorResponse."""
        async for piece in self._answers("/v1/completions", "CompletionResponse", request):
            yield piece

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield an EmbeddingResponse or an ErrorResponse."""
        async for piece in self._answers("/v1/embeddings", "EmbeddingResponse", request):
            yield piece

    async def score(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield a ScoreResponse or an ErrorResponse."""
        async for piece in self._answers("/v1/score", "ScoreResponse", request):
            yield piece

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield a TokenizeResponse or an ErrorResponse."""
        async for piece in self._answers("/tokenize", "TokenizeResponse", request):
            yield piece

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield a DetokenizeResponse or an ErrorResponse."""
        async for piece in self._answers("/detokenize", "DetokenizeResponse", request):
            yield piece

    async def check_health(self) -> None:
        """Raise EngineDeadError where Ray must replace the replica."""
        if self._engine is not None and self._engine.health == "dead":
            raise EngineDeadError("the engine is dead")

    async def is_sleeping(self) -> bool:
        """Return False: an engine does not sleep."""
        return False

    async def is_paused(self) -> bool:
        """Return False: an engine is not paused."""
        return False

    async def reset_prefix_cache(self) -> None:
        """Raise NotImplementedError, as ``sleep``, ``wakeup``, ``pause``, ``resume`` and the two of a profile do."""
        raise NotImplementedError("the engine has none of: reset_prefix_cache, sleep, pause, profiles")

    async def sleep(self, **kwargs: Any) -> None:
        await self.reset_prefix_cache()

    wakeup = pause = resume = start_profile = stop_profile = sleep

    async def llm_config(self) -> Any:
        """Return the LLMConfig."""
        return self._config

    async def aclose(self) -> None:
        """End the engine. Ray ends the process in place of this, once the requests are over."""
        if self._engine is not None:
            await self._engine.aclose()

    async def _answers(self, path: str, kind: str, request: Any) -> AsyncGenerator[Any, None]:
        body = msgspec.json.encode(request.model_dump(mode="json", exclude_unset=True))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        status, whole, streams = 0, b"", False
        async for messages in answered(self._app, scope, body):
            texts = []
            for message in messages:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    streams = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
                elif streams and message["body"]:
                    texts.append(message["body"].decode())
                else:
                    whole += message["body"]
            if texts:
                yield texts
        if not streams:
            models: Any = import_module("ray.serve.llm.openai_api_models")
            if status == 200:
                yield getattr(models, kind).model_validate_json(whole)
            else:
                error = msgspec.json.decode(whole)["error"]
                yield models.ErrorResponse(error={**error, "code": status})
