"""Layers before the routes: names, keys with classes, pages of other origins, proxies, pings and timeouts."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asyncengine import AsyncEngine, bundled_model
from asyncengine.cli import flags, serve
from asyncengine.errors import ConfigError
from asyncengine.server.config import ServerConfig
from asyncengine.testing import SimulatedEngine, settle
from tests.cli.test_cli import parse
from tests.models import tiny
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, COMPLETIONS, USER, raw_post, read_all, serving

REQUEST: dict[str, Any] = {"prompt": "x", "max_tokens": 2}
SLOW: dict[str, Any] = {"prompt": [300, 301], "max_tokens": 2000, "ignore_eos": True, "temperature": 0}
ROUTES = pytest.mark.parametrize("stream", [False, True])


# ---- names ----


async def test_several_names() -> None:
    async with serving(FakeEngine(), served_model_name=["org/a", "b"], strict_model_names=True) as site:
        assert [card["id"] for card in (await site.get("/v1/models")).json["data"]] == ["org/a", "b"]
        for name in ("org/a", "b"):
            assert (await site.get(f"/v1/models/{name}/")).json["id"] == name
            assert (await site.post(COMPLETIONS, model=name, **REQUEST)).json["model"] == "org/a"
            (first, *_) = await site.events(CHAT, model=name, messages=USER, max_tokens=1)
            assert first["model"] == "org/a"
        reply = await site.post(COMPLETIONS, model="fake", **REQUEST)
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")
        assert "'org/a', 'b'" in reply.error["message"]


async def test_any_name_means_the_served_model_unless_names_are_strict() -> None:
    async with serving(FakeEngine()) as site:
        assert (await site.post(COMPLETIONS, model="gpt-4o", **REQUEST)).json["model"] == "fake"
        assert (await site.get("/v1/models/gpt-4o")).status == 404
    async with serving(FakeEngine(), strict_model_names=True) as site:
        assert (await site.post(COMPLETIONS, model="gpt-4o", **REQUEST)).status == 404


async def test_routes_without_v1() -> None:
    async with serving(FakeEngine()) as site:
        for path in ("/models", "/models/fake"):
            assert (await site.get(path)).json == (await site.get(f"/v1{path}")).json
        assert (await site.post("/completions", **REQUEST)).json["object"] == "text_completion"
        assert (await site.post("/chat/completions", messages=USER)).json["object"] == "chat.completion"
        assert (await site.post("/messages", messages=USER)).json["type"] == "error"  # in Anthropic's form
        assert (await site.get("/nowhere")).status == 404


def parse_serve(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(argv)
    flags.read_environment(parser, args)
    return args


def test_names_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in (["dir", "--served-model-name", "a", "b"], ["--served-model-name", "a", "--served-model-name", "b"]):
        assert parse_serve(*argv).served_model_name == ["a", "b"]
    with pytest.raises(ConfigError, match="before --served-model-name"):
        serve.run(parse_serve("--served-model-name", "a", "path/to/model"))  # which would be a name
    monkeypatch.setenv("ASYNCENGINE_SERVED_MODEL_NAME", "c d")
    assert parse_serve("dir").served_model_name == ["c", "d"]
    assert ServerConfig(served_model_name=["a", "b", "a"]).model_names == ("a", "b")
    assert ServerConfig(served_model_name="a").model_names == ("a",)
    assert ServerConfig().model_names == ()
    for wrong in ("", ["a", ""], 3):
        with pytest.raises(ConfigError):
            ServerConfig(served_model_name=wrong)  # type: ignore[arg-type]
    parsed = parse("--cors-origins", "https://a", "--cors-origins", "*", cls=ServerConfig)
    assert ServerConfig(**parsed).cors_origins == ["https://a", "*"]


# ---- keys ----


async def test_every_route_but_health_needs_a_key(tmp_path: Path) -> None:
    async with serving(FakeEngine(), api_key="key") as site:
        app = site.server.app
        assert {path for path in app._public if not path.startswith("/page/")} <= {
            "/health", "/ready", "/live", "/", "/docs",
        }  # fmt: skip
        for path in [*app._routes.keys() - app._public, "/nowhere", "/v1/completions/", "/health/x"]:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "key"}):
                for method in ("GET", "POST", "OPTIONS"):
                    reply = await site.request(method, path, headers=headers)
                    assert reply.status == 401, path
                    assert "a valid API key is needed" in reply.json["error"]["message"]
        assert (await site.get("/health")).status == 200
        reply = await site.get("/version", headers={"Authorization": "Bearer key", "X-Request-Id": "mine"})
        assert reply.status == 200
        assert reply.headers["X-Request-Id"] == "mine"


async def test_keys_have_classes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("plain\nurgent priority=high\nmedium  priority=normal\nidle\tpriority=low\nexact priority=-77\n")
    engine = FakeEngine()
    async with serving(engine, api_key_file=str(file), allow_priority=True) as site:
        for key, asked, given in (
            ("plain", None, 0), ("plain", -5, -5), ("urgent", None, -10), ("urgent", -20, -10), ("urgent", 3, 3),
            ("medium", None, 0), ("idle", None, 10), ("idle", 0, 10), ("exact", None, -77),
        ):  # fmt: skip
            headers = {"Authorization": f"Bearer {key}"}
            body = REQUEST | {"priority": asked}
            reply = await site.request("POST", COMPLETIONS, json=body, headers=headers)
            assert reply.status == 200
            assert engine.submitted[-1][2] == given, (key, asked)


def test_wrong_attributes_of_keys_are_named_and_keys_are_not(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    for attributes in ("priority=urgent", "priority=", "priority=1001", "priority=1.5", "rate=3", "low", "priority",
                       "priority=low priority=low"):  # fmt: skip
        file.write_text(f"fine\nsecret {attributes}\n")
        with pytest.raises(ConfigError, match="line 2") as wrong:
            ServerConfig(api_key_file=str(file))
        assert "secret" not in str(wrong.value)


# ---- pages of other origins ----

PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-os"}


async def test_preflights_of_configured_origins() -> None:
    async with serving(FakeEngine(), cors_origins=["https://a.example"], api_key="key") as site:
        for path in (COMPLETIONS, "/v1/models"):
            reply = await site.request("OPTIONS", path, headers=PREFLIGHT | {"Origin": "https://a.example"})
            assert (reply.status, reply.body) == (204, b"")
            assert reply.headers["Access-Control-Allow-Origin"] == "https://a.example"
            assert "POST" in reply.headers["Access-Control-Allow-Methods"]
            assert reply.headers["Access-Control-Allow-Headers"] == PREFLIGHT["Access-Control-Request-Headers"]
            assert reply.headers["Vary"] == "Origin"
        methods = {method for allowed, _ in site.server.app._routes.values() for method in allowed.split(", ")}
        assert methods | {"HEAD"} == set(reply.headers["Access-Control-Allow-Methods"].split(", "))
        assert "DELETE" in methods
        other = await site.request("OPTIONS", COMPLETIONS, headers=PREFLIGHT | {"Origin": "https://b.example"})
        assert other.status == 401
        assert not [name for name in other.headers if name.startswith("Access-Control")]
        no_preflight = await site.request("OPTIONS", COMPLETIONS, headers={"Origin": "https://a.example"})
        assert no_preflight.status == 401
        headers = {"Authorization": "Bearer key", "Origin": "https://a.example"}
        for body in (REQUEST, REQUEST | {"stream": True}, REQUEST | {"n": 0}):
            reply = await site.request("POST", COMPLETIONS, json=body, headers=headers)
            assert reply.headers["Access-Control-Allow-Origin"] == "https://a.example"
            assert "X-Request-Id" in reply.headers["Access-Control-Expose-Headers"]


async def test_without_configuration_there_is_no_cors() -> None:
    async with serving(FakeEngine()) as site:
        reply = await site.request("OPTIONS", COMPLETIONS, headers=PREFLIGHT | {"Origin": "https://a.example"})
        assert reply.status == 405
        ok = await site.get("/v1/models", headers={"Origin": "https://a.example"})
        for answer in (reply, ok):
            assert not [name for name in answer.headers if name.startswith("Access-Control") or name == "Vary"]
    async with serving(FakeEngine(), cors_origins=["*"]) as site:
        reply = await site.request("OPTIONS", COMPLETIONS, headers=PREFLIGHT | {"Origin": "https://any.example"})
        assert (reply.status, reply.headers["Access-Control-Allow-Origin"]) == (204, "*")


@pytest.mark.parametrize(
    "wrong",
    [
        {"cors_origins": ["example.org"]}, {"cors_origins": ["https://a.example/"]}, {"cors_origins": "https://a"},
        {"cors_origins": [3]}, {"root_path": "llm"}, {"root_path": "/llm/"}, {"root_path": "/a b"},
        {"ssl_keyfile": "key.pem"}, {"ping_interval_s": 0},
    ],
)  # fmt: skip
def test_wrong_configuration(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServerConfig(**wrong)


async def test_a_proxy_may_strip_the_root_path_or_not() -> None:
    async with serving(FakeEngine(), root_path="/llm/v2") as site:
        for path in ("/health", "/llm/v2/health", "/llm/v2/health/", "/llm/v2/v1/models/fake"):
            assert (await site.get(path)).status == 200
        for path in ("/llm/health", "/llm/v2health", "/llm/v2/llm/v2/health"):
            assert (await site.get(path)).status == 404


# ---- pings ----


async def test_a_stream_that_waits_gets_pings() -> None:
    engine = FakeEngine("abc")
    engine.hold(at=0)
    async with serving(engine, ping_interval_s=0.05) as site:
        async with site.session.post(site.url + COMPLETIONS, json=REQUEST | {"stream": True}) as reply:
            assert reply.status == 200
            assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert reply.headers["X-Accel-Buffering"] == "no"
            for _ in range(3):
                assert await reply.content.readuntil(b"\n\n") == b": ping\n\n"
            engine.release()
            rest = (await reply.read()).replace(b": ping\n\n", b"").decode()
        *events, done, _ = rest.split("\n\n")
        assert done == "data: [DONE]"
        texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
        assert "".join(texts) == "ab"
        engine.hold(at=1)  # none after the first event
        async with site.session.post(site.url + COMPLETIONS, json=REQUEST | {"stream": True}) as reply:
            await reply.content.readuntil(b"\n\n")
            await asyncio.sleep(0.2)
            engine.release()
            assert b"ping" not in await reply.read()


async def test_errors_after_a_ping_are_events_and_before_it_responses() -> None:
    engine = FakeEngine()
    engine.hold(at=0)
    async with serving(engine, ping_interval_s=0.05) as site:
        async with site.session.post(site.url + CHAT, json={"messages": USER, "stream": True}) as reply:
            assert await reply.content.readuntil(b"\n\n") == b": ping\n\n"
            engine.fail(RuntimeError("injected"))
            body = bytearray()
            with pytest.raises(aiohttp.ClientPayloadError):
                await read_all(reply.content, body)
        event = body.replace(b": ping\n\n", b"").removeprefix(b"data: ")
        assert json.loads(event)["error"]["type"] == "server_error"
        await engine.wait_for(open=0)
    async with serving(engine) as site:
        asking = asyncio.create_task(site.post(CHAT, messages=USER, stream=True))
        await engine.wait_for(open=1)
        engine.fail(RuntimeError("injected"))
        assert (await asking).error["type"] == "server_error"
        assert (await asking).status == 500


async def test_a_client_that_leaves_between_pings_is_noticed() -> None:
    engine = FakeEngine()
    engine.hold(at=0)
    async with serving(engine, ping_interval_s=0.05) as site:
        async with site.session.post(site.url + COMPLETIONS, json=REQUEST | {"stream": True}) as reply:
            await reply.content.readuntil(b"\n\n")
        await engine.wait_for(open=0, aborted=1)


# ---- load ----


@ROUTES
async def test_overload_is_503_with_retry_after(stream: bool) -> None:
    async with (
        SimulatedEngine(step_latency_us=1000, max_num_seqs=1, max_queued_requests=2, fair_share_s=0) as engine,
        serving(engine) as site,  # type: ignore[arg-type]
    ):
        running: list[asyncio.Task[Any]] = []
        for count in range(1, 4):
            running.append(asyncio.create_task(site.post(COMPLETIONS, **SLOW)))
            while (stats := engine.stats()).num_requests_waiting + 1 < count or not stats.num_requests_running:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        for _ in range(5):
            reply = await site.post(COMPLETIONS, stream=stream, **SLOW)
            assert (reply.status, reply.error["code"]) == (503, "overloaded")
            assert int(reply.headers["Retry-After"]) >= 1
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await settle(engine)
        assert (await site.post(COMPLETIONS, **SLOW | {"max_tokens": 2})).status == 200


async def test_a_timeout_ends_with_what_is_there() -> None:
    async with (
        SimulatedEngine(step_latency_us=1000, read_kv=False) as engine,
        serving(engine) as site,  # type: ignore[arg-type]
    ):
        whole = (await site.post(COMPLETIONS, **SLOW | {"max_tokens": 500})).json["choices"][0]["text"]
        await site.post(CHAT, messages=USER, max_tokens=1)  # starts the process that renders chat templates
        reply = (await site.post(COMPLETIONS, timeout=0.4, **SLOW)).json
        choice = reply["choices"][0]
        assert choice["finish_reason"] == "timeout"
        assert choice["text"]
        assert whole.startswith(choice["text"])
        assert 0 < reply["usage"]["completion_tokens"] < 1000
        events = await site.events(COMPLETIONS, timeout=0.4, **SLOW)
        assert events[-1]["choices"][0]["finish_reason"] == "timeout"
        assert whole.startswith("".join(event["choices"][0]["text"] for event in events))
        chat = {"messages": USER, "timeout": 0.4, "ignore_eos": True}
        assert (await site.post(CHAT, **chat)).json["choices"][0]["finish_reason"] == "timeout"
        assert (await site.events(CHAT, **chat))[-1]["choices"][0]["finish_reason"] == "timeout"
        response = (await site.post("/v1/responses", input="a", timeout=0.4, ignore_eos=True)).json
        assert response["incomplete_details"] == {"reason": "timeout"}
        message = {"messages": USER, "max_tokens": 1900, "timeout": 0.4, "ignore_eos": True}
        assert (await site.post("/v1/messages", **message)).json["stop_reason"] == "max_tokens"
        success = await site.metric("asyncengine:request_success_total")
        assert success['{finished_reason="timeout",model_name="simulated"}'] == 6
        for wrong in (0, -1, 1e9, "soon"):
            reply = await site.post(COMPLETIONS, timeout=wrong, **SLOW)
            assert (reply.status, reply.error["param"]) == (400, "timeout")
        await settle(engine)


@ROUTES
async def test_a_timeout_before_the_first_token_is_504(stream: bool) -> None:
    async with (
        SimulatedEngine(step_latency_us=20_000, max_num_seqs=1) as engine,
        serving(engine) as site,  # type: ignore[arg-type]
    ):
        running = asyncio.create_task(site.post(COMPLETIONS, **SLOW))
        while not engine.stats().num_requests_running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for path, fields in ((COMPLETIONS, SLOW), (CHAT, {"messages": USER})):
            reply = await site.post(path, timeout=0.05, stream=stream, **fields)
            assert (reply.status, reply.error["code"], reply.error["param"]) == (504, "timeout", "timeout")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await settle(engine)


# ---- classes ----


async def test_classify(tmp_path: Path) -> None:
    import torch
    import transformers

    _, shape = tiny.VARIANTS["llama"]
    labels = {0: "good", 1: "bad", 2: "neither"}
    config = transformers.LlamaConfig(
        **shape | {"vocab_size": 4096}, id2label=labels, eos_token_id=None, bos_token_id=None, pad_token_id=0
    )
    torch.manual_seed(1)
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    settings: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 40, "tokenizer": str(bundled_model())}
    async with (
        AsyncEngine.from_pretrained(tmp_path, progress=False, **settings) as engine,
        serving(engine, served_model_name="classes") as site,  # type: ignore[arg-type]
    ):
        answer = (await site.post("/classify", input=["the cat", "a dog"])).json
        assert (answer["object"], answer["model"]) == ("list", "classes")
        for i, entry in enumerate(answer["data"]):
            assert (entry["index"], entry["num_classes"]) == (i, 3)
            assert sum(entry["probs"]) == pytest.approx(1, abs=1e-5)
            assert entry["label"] == labels[entry["probs"].index(max(entry["probs"]))]
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
        for path, fields in (
            (COMPLETIONS, {"prompt": "a"}),
            ("/v1/embeddings", {"input": "a"}),
            ("/score", {"text_1": "a", "text_2": "b"}),
        ):
            reply = await site.post(path, **fields)
            assert reply.status == 400
            assert "LlamaForSequenceClassification" in reply.error["message"]


async def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    async with (
        serving(FakeEngine(), uds=path),
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session,
        session.post("http://localhost" + COMPLETIONS, json=REQUEST) as reply,
    ):
        assert reply.status == 200


# ---- connections ----


async def test_a_half_closed_client_gets_its_answer() -> None:
    async with serving(FakeEngine("abc")) as site:
        for fields in (REQUEST, REQUEST | {"stream": True}):
            reader, writer = await site.connect()
            writer.write(raw_post(COMPLETIONS, fields))
            writer.write_eof()
            answer = await reader.read()
            assert b" 200 OK\r\n" in answer
            assert b"length" in answer
            writer.close()


async def test_a_pipelining_client_that_goes_away_is_noticed() -> None:
    engine = FakeEngine()
    engine.hold(at=1)
    async with serving(engine) as site:
        _, writer = await site.connect()
        writer.write(raw_post(COMPLETIONS, REQUEST | {"max_tokens": 200}) * 200)
        await engine.wait_for(open=1)
        writer.transport.abort()
        await engine.wait_for(open=0, aborted=1)


async def test_a_bad_chunk_size_gets_400_at_once() -> None:
    async with serving(FakeEngine()) as site:
        reader, writer = await site.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        assert b" 400 " in await reader.readuntil(b"\r\n")
        writer.close()


async def test_a_failure_in_mid_stream_is_an_error_frame_and_a_cut() -> None:
    engine = FakeEngine()
    engine.hold(at=1)
    async with serving(engine) as site:
        async with site.session.post(site.url + COMPLETIONS, json=REQUEST | {"stream": True}) as reply:
            body = bytearray(await reply.content.readuntil(b"\n\n"))
            engine.fail(RuntimeError("injected"))
            with pytest.raises(aiohttp.ClientPayloadError):
                await read_all(reply.content, body)
        assert b'data: {"error":' in body
        assert b"[DONE]" not in body
