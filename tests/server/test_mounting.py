"""The routes in programs of others: under aiohttp's own runner beside its routes, and as an ASGI application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from asyncengine.errors import ConfigError
from asyncengine.server import ServerConfig, asgi_app, create_app
from tests.server.fake_engine import FakeEngine

COMPLETIONS = "/v1/completions"


@asynccontextmanager
async def running(app: web.Application) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    """The application behind aiohttp's own runner, as by ``web.run_app``."""
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        async with aiohttp.ClientSession() as session:
            yield f"http://{host}:{port}", session
    finally:
        await runner.cleanup()


async def hello(request: web.Request) -> web.Response:
    return web.Response(text="hello")


async def test_a_sub_application_answers_beside_the_programs_routes() -> None:
    engine = FakeEngine(answer="abc", ends=True)
    program = web.Application()
    program.router.add_get("/hello", hello)
    program.add_subapp("/llm", create_app(engine))
    async with running(program) as (url, session):
        async with session.get(url + "/hello") as r:
            assert await r.text() == "hello"
        async with session.post(url + "/llm" + COMPLETIONS, json={"prompt": "x", "max_tokens": 9}) as r:
            assert (r.status, (await r.json())["choices"][0]["text"]) == (200, "abc")
        async with session.get(url + "/llm/v1/models/fake") as r:
            assert (await r.json())["id"] == "fake"
        async with session.get(url + "/llm/nowhere") as r:
            assert (r.status, (await r.json())["error"]["code"]) == (404, "not_found")
        async with session.get(url + "/llm/") as r:
            assert r.status == 404  # the page is not in it
        async with session.get(url + "/llm" + COMPLETIONS) as r:
            assert (r.status, r.headers["Allow"]) == (405, "POST")
    assert engine.health == "ready"  # it belongs to the program


async def test_a_stream_ends_with_done_and_passes_the_programs_hooks() -> None:
    async def mark(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["X-Program"] = "mine"

    app = create_app(FakeEngine(answer="abc", ends=True))
    app.on_response_prepare.append(mark)
    async with running(app) as (url, session):
        fields = {"prompt": "x", "max_tokens": 9, "stream": True}
        async with session.post(url + COMPLETIONS, json=fields) as r:
            assert r.headers["X-Program"] == "mine"
            *events, done, rest = (await r.text()).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert "".join(json.loads(e[6:])["choices"][0]["text"] for e in events) == "abc"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_request(stream: bool) -> None:
    engine = FakeEngine(answer="abc")
    engine.hold(2)
    async with running(create_app(engine)) as (url, session):
        fields = {"prompt": "x", "max_tokens": 99, "stream": stream}
        request = asyncio.ensure_future(session.post(url + COMPLETIONS, json=fields))
        await engine.wait_for(open=1)
        if stream:
            (await request).close()
        else:
            request.cancel()
        await engine.wait_for(open=0, aborted=1)


async def test_a_subset_of_routes_with_keys() -> None:
    app = create_app(FakeEngine(), ServerConfig(api_key="secret"), routes=["/v1/models", COMPLETIONS])
    app.router.add_get("/mine", hello)
    async with running(app) as (url, session):
        async with session.get(url + "/mine") as r:
            assert await r.text() == "hello"
        async with session.get(url + "/v1/models") as r:
            assert r.status == 401
        async with session.get(url + "/v1/models/", headers={"Authorization": "Bearer secret"}) as r:
            assert r.status == 200
        async with session.get(url + "/metrics") as r:
            assert r.status == 404
    with pytest.raises(ConfigError, match=r"no route '/v2/models'"):
        create_app(FakeEngine(), routes=["/v2/models"])


async def test_an_engine_that_is_managed_starts_and_closes_with_the_application() -> None:
    engine = FakeEngine()
    started: list[bool] = []

    async def start() -> None:
        started.append(True)
        engine.health = "ready"

    engine.health, engine.start = "loading", start  # type: ignore[method-assign]
    async with running(create_app(engine)) as (url, session), session.get(url + "/health") as r:
        assert (r.status, started) == (503, [])
    async with running(create_app(engine, manage_engine=True)) as (url, session), session.get(url + "/health") as r:
        assert (r.status, started) == (200, [True])
    assert engine.health == "closed"


class Asgi:
    """One request to an ASGI application, by plain messages."""

    def __init__(self, path: str, fields: dict[str, Any] | None = None, root: str = "") -> None:
        body = b"" if fields is None else json.dumps(fields).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        self.scope = {
            "type": "http", "method": "GET" if fields is None else "POST", "path": path, "root_path": root,
            "query_string": b"", "headers": headers,
        }  # fmt: skip
        half = len(body) // 2
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for piece, more in ((body[:half], True), (body[half:], False)):
            self.incoming.put_nowait({"type": "http.request", "body": piece, "more_body": more})
        self.sent: list[Any] = []
        self.enough, self.has_enough = 0, asyncio.Event()

    async def run(self, app: Any) -> None:
        async def send(message: Any) -> None:
            self.sent.append(message)
            if len(self.sent) == self.enough:
                self.has_enough.set()

        await app(self.scope, self.incoming.get, send)

    @property
    def status(self) -> int:
        assert self.sent[0]["type"] == "http.response.start"
        return self.sent[0]["status"]

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])


@pytest.mark.parametrize(("path", "root"), [(COMPLETIONS, ""), ("/llm" + COMPLETIONS, "/llm"), (COMPLETIONS, "/llm")])
async def test_asgi_answers_wherever_it_is_mounted(path: str, root: str) -> None:
    call = Asgi(path, {"prompt": "x", "max_tokens": 9}, root)
    await call.run(asgi_app(FakeEngine(answer="abc", ends=True)))
    assert (call.status, json.loads(call.body)["choices"][0]["text"]) == (200, "abc")
    names = [name for name, _ in call.sent[0]["headers"]]
    assert b"x-request-id" in names
    assert b"transfer-encoding" not in names
    assert [message["more_body"] for message in call.sent[1:]][-1] is False


async def test_asgi_streams_each_event_as_a_message() -> None:
    call = Asgi(COMPLETIONS, {"prompt": "x", "max_tokens": 9, "stream": True})
    await call.run(asgi_app(FakeEngine(answer="abc", ends=True)))
    assert (b"content-type", b"text/event-stream; charset=utf-8") in call.sent[0]["headers"]
    assert len(call.sent) >= 5  # the head, three tokens and the end
    assert call.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_asgi_client_that_leaves_aborts_its_request(stream: bool) -> None:
    engine = FakeEngine(answer="abc")
    engine.hold(2)
    call = Asgi(COMPLETIONS, {"prompt": "x", "max_tokens": 99, "stream": stream})
    answering = asyncio.ensure_future(call.run(asgi_app(engine)))
    await engine.wait_for(open=1)
    call.incoming.put_nowait({"type": "http.disconnect"})
    await answering
    assert len(engine.aborted) == 1
    assert not any(message.get("more_body") is False for message in call.sent)


async def test_an_asgi_client_that_does_not_read_is_cut() -> None:
    engine = FakeEngine(answer="abc")
    call = Asgi(COMPLETIONS, {"prompt": "x", "max_tokens": 99, "stream": True})

    async def never(message: Any) -> None:
        await asyncio.Event().wait()

    await asgi_app(engine, ServerConfig(page=False, write_timeout_s=0.05))(call.scope, call.incoming.get, never)
    assert (len(engine.open), len(engine.aborted)) == (0, 1)


async def test_asgi_serves_a_subset_and_pings() -> None:
    engine = FakeEngine(answer="abc", ends=True)
    for path, status in (("/v1/models/fake/", 200), ("/metrics", 404), ("/v1/modelsx", 404)):
        call = Asgi(path)
        await call.run(asgi_app(engine, routes=["/v1/models"]))
        assert call.status == status, path
    engine.hold(0)
    call = Asgi(COMPLETIONS, {"prompt": "x", "max_tokens": 9, "stream": True})
    call.enough = 4
    app = asgi_app(engine, ServerConfig(page=False, ping_interval_s=0.01))
    answering = asyncio.ensure_future(call.run(app))
    await call.has_enough.wait()
    engine.release()
    await answering
    assert [message["body"] for message in call.sent[1:3]] == [b": ping\n\n"] * 2
    assert call.body.endswith(b"data: [DONE]\n\n")
    with pytest.raises(NotImplementedError, match="not lifespan"):  # uvicorn takes that for an answer
        await app({"type": "lifespan"}, call.incoming.get, call.run)  # type: ignore[arg-type]
