"""Parts of the integration of Ray that need no Ray: routing, the number of replicas, and the server class."""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from asyncengine import AsyncEngine, ConfigError, bundled_model, testing
from asyncengine.engine.warmth import Pieces, Warmth
from asyncengine.integrations.ray_llm import EngineServer, answered
from asyncengine.integrations.ray_routing import order, pieces_of_body, replicas_wanted
from asyncengine.server.asgi import Message, Receive, Send, asgi_app

LONG = "Once upon a time there was a fox. " * 20


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_pieces_of_bodies() -> None:
    pieces = pieces_of_body(body(prompt=LONG, max_tokens=4))
    assert pieces == pieces_of_body(body(prompt=LONG, temperature=0))
    assert pieces.tokens == len(LONG) // 4
    assert pieces.keys != pieces_of_body(body(prompt=LONG, cache_salt="tenant")).keys
    assert pieces_of_body(body(messages=[{"role": "user", "content": LONG}])).keys
    for wrong in (b"", b"[1]", b"{", b"[" * 100_000, body(prompt=5), body(prompt=[[[1]], {}]), body(messages=[3])):
        assert isinstance(pieces_of_body(wrong), Pieces)


def test_requests_go_where_their_first_token_comes_soonest() -> None:
    pieces = pieces_of_body(body(prompt=LONG))
    warm = Warmth(100)
    warm.add(pieces)
    idle = {"a": (0.0, 0), "b": (0.0, 0)}
    assert order(idle, {"b": warm}, pieces) == ["b", "a"]
    assert order({"a": (0.0, 0), "b": (0.0, 9)}, {"b": warm}, pieces)[0] == "a"  # warm, but nine requests run there
    assert order({"a": (500.0, 0), "b": (0.0, 0)}, {}, pieces)[0] == "b"
    assert order(idle, {}, Pieces([], 0)) == ["a", "b"]


def test_replicas_follow_what_waits_and_what_is_kept() -> None:
    assert replicas_wanted([], [], 1000, 0.5) == 1
    assert replicas_wanted([1500, 1200], [0.1, 0.1], 1000, 0.5) == 3
    assert replicas_wanted([0, 0], [0.9, 0.7], 1000, 0.5) == 4


class Request(SimpleNamespace):
    def model_dump(self, mode: str, exclude_unset: bool) -> dict[str, Any]:
        return vars(self)


class Response(SimpleNamespace):
    @classmethod
    def model_validate_json(cls, text: bytes) -> Response:
        return cls(**json.loads(text))


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    kinds = ("ChatCompletion", "Completion", "Embedding", "Score", "Tokenize", "Detokenize", "Error")
    module = SimpleNamespace(**{f"{kind}Response": type(kind, (Response,), {}) for kind in kinds})
    monkeypatch.setitem(sys.modules, "ray.serve.llm.openai_api_models", module)  # type: ignore[arg-type]
    return SimpleNamespace(
        model_id="tales",
        model_loading_config=SimpleNamespace(model_source=str(bundled_model())),
        engine_kwargs={"device": "cpu", "cpu_threads": 1, "num_kv_blocks": 64, "max_model_len": 256},
        deployment_config={"autoscaling_config": {"max_replicas": 2}},
        accelerator_type="H100",
        runtime_env={"env_vars": {"A": "1"}},
    )


async def test_the_server_class(config: SimpleNamespace) -> None:
    """Streams, whole answers, errors and tokens come through the server's routes."""
    options = EngineServer.get_deployment_options(config)
    assert options["ray_actor_options"] == {"num_gpus": 1, "runtime_env": {"env_vars": {"A": "1"}}}
    assert "ray_actor_options" not in config.deployment_config
    server = EngineServer.__new__(EngineServer)
    await EngineServer.__init__(server, config)
    asked = {"model": "tales", "max_tokens": 5, "temperature": 0}
    [whole] = [piece async for piece in server.completions(Request(prompt="Once upon", **asked))]
    assert (type(whole).__name__, whole.model, whole.usage["completion_tokens"]) == ("Completion", "tales", 5)
    streamed = [piece async for piece in server.completions(Request(prompt="Once upon", stream=True, **asked))]
    events = "".join(text for texts in streamed for text in texts).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    text = "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2])
    assert text == whole.choices[0]["text"]
    chat = Request(messages=[{"role": "user", "content": "Tell me."}], **asked)
    assert [type(piece).__name__ async for piece in server.chat(chat)] == ["ChatCompletion"]
    [wrong] = [piece async for piece in server.completions(Request(prompt="x", model="tales", max_tokens=-3))]
    assert (type(wrong).__name__, wrong.error["code"], wrong.error["param"]) == ("Error", 400, "max_tokens")
    [tokens] = [piece async for piece in server.tokenize(Request(prompt="Once upon", model="tales"))]
    [detokenized] = [piece async for piece in server.detokenize(Request(tokens=tokens.tokens, model="tales"))]
    assert detokenized.prompt.endswith("Once upon")
    await server.check_health()
    assert (await server.is_sleeping(), await server.is_paused(), await server.llm_config()) == (False, False, config)
    with pytest.raises(NotImplementedError, match="sleep"):
        await server.sleep(level=1)
    await server.aclose()
    config.model_loading_config.model_source = {"bucket_uri": "s3://x"}
    with pytest.raises(ConfigError, match="model_source"):
        await EngineServer.__init__(EngineServer.__new__(EngineServer), config)


async def test_a_consumer_that_leaves_ends_its_request() -> None:
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    async with (
        AsyncEngine.from_pretrained(
            str(bundled_model()), device="cpu", cpu_threads=1, num_kv_blocks=64, max_model_len=256
        ) as engine,
        testing.no_leaks(engine),
    ):
        asked = body(prompt="Once", max_tokens=200, stream=True, ignore_eos=True)
        messages = answered(asgi_app(engine), scope, asked)
        assert (await anext(messages))[0]["status"] == 200
        await messages.aclose()


async def test_an_application_that_fails_in_the_middle_ends_its_answer() -> None:
    async def application(scope: Message, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("failed behind its headers")

    async with asyncio.timeout(60):
        messages = [message["type"] async for some in answered(application, {}, b"") for message in some]
    assert messages == ["http.response.start"]
