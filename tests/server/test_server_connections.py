"""Clients that leave, stall, send garbage or half a request, and engines that fail in mid-stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asyncengine.errors import EngineDeadError, RequestAbortedError
from asyncengine.server.config import ServerConfig
from asyncengine.server.http_server import HttpServer
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, COMPLETIONS, USER, raw_post, read_all, serving

LONG = {"prompt": "x", "max_tokens": 200}


async def open_stream(address: tuple[str, int], fields: dict[str, Any]) -> tuple[Any, Any]:
    """A raw connection that has read the headers and the first event of a stream."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(raw_post(COMPLETIONS, fields | {"stream": True}))
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"data: " in await reader.readuntil(b"\n\n")
    return reader, writer


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("abruptly", [False, True])
async def test_disconnect_aborts(streamed: bool, abruptly: bool) -> None:
    engine = FakeEngine()
    engine.hold(at=1)
    async with serving(engine) as site:
        if streamed:
            _, writer = await open_stream(site.address, LONG)
        else:
            _, writer = await asyncio.open_connection(*site.address)
            writer.write(raw_post(COMPLETIONS, LONG))
        await engine.wait_for(open=1)
        if abruptly:
            writer.transport.abort()
        await close(writer)
        await engine.wait_for(open=0, aborted=1)
        success = await site.metric("asyncengine:request_success_total")
        assert success['{finished_reason="abort",model_name="fake"}'] == 1
        engine.release()
        assert (await site.post(COMPLETIONS, prompt="x")).status == 200


@pytest.mark.parametrize("streamed", [False, True])
async def test_disconnect_aborts_every_prompt_and_sample(streamed: bool) -> None:
    engine = FakeEngine()
    engine.hold(at=1)
    async with serving(engine) as site:
        _, writer = await asyncio.open_connection(*site.address)
        fields = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 50, "stream": streamed}
        writer.write(raw_post(COMPLETIONS, fields))
        await engine.wait_for(open=3)
        await close(writer)
        await engine.wait_for(open=0, aborted=3)


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
async def test_streams_over_http_1_0_end_with_the_connection(connection: str) -> None:
    async with serving(FakeEngine()) as site:
        reader, writer = await site.connect()
        request = raw_post(COMPLETIONS, {"prompt": "x", "max_tokens": 3, "stream": True})
        head, body = request.split(b"\r\n\r\n", 1)
        head = head.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\nConnection: " + connection.encode()
        writer.write(head + b"\r\n\r\n" + body)
        reply = await asyncio.wait_for(reader.read(), 30)
        assert b"chunked" not in reply
        assert reply.endswith(b"data: [DONE]\n\n")
        await close(writer)


async def test_many_disconnects_leave_nothing_behind() -> None:
    engine = FakeEngine()
    async with serving(engine) as site:
        golden = (await site.post(COMPLETIONS, **LONG)).json["choices"]
        engine.hold(at=3)
        for _ in range(5):
            streams = [await open_stream(site.address, LONG) for _ in range(20)]
            await engine.wait_for(open=20)
            for _, writer in streams:
                writer.transport.abort()
                await close(writer)
            await engine.wait_for(open=0)
        engine.release()
        assert len(engine.aborted) == 100
        assert (await site.post(COMPLETIONS, **LONG)).json["choices"] == golden
        assert engine.stats().num_requests_running == 0


def deaf_socket(address: tuple[str, int]) -> socket.socket:
    """A client socket with a small buffer that nobody will read from."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(address)
    return sock


def drain_socket(sock: socket.socket) -> bytes:
    """Return the bytes that the kernel still held for a client when its connection was cut."""
    sock.settimeout(20)
    received = bytearray()
    try:
        while piece := sock.recv(1 << 20):
            received += piece
    except ConnectionResetError:
        pass
    return bytes(received)


async def test_stalled_stream_is_cut_and_others_are_not() -> None:
    engine = FakeEngine(repeat=65536, max_model_len=100_000)
    async with serving(engine, write_timeout_s=0.3) as site:
        with deaf_socket(site.address) as stalled:
            stalled.sendall(raw_post(COMPLETIONS, {"prompt": "x", "max_tokens": 90_000, "stream": True}))
            await engine.wait_for(open=1)
            events = await site.events(COMPLETIONS, prompt="x", max_tokens=20)
            assert sum(len(e["choices"][0]["text"]) for e in events) == 20 * 65536
            await engine.wait_for(open=0, aborted=1)
            await site.server.app.idle()
            received = await asyncio.to_thread(drain_socket, stalled)
            assert b"[DONE]" not in received
            assert not received.endswith(b"0\r\n\r\n")


async def test_stalled_reader_of_a_whole_response_is_cut() -> None:
    engine = FakeEngine(repeat=1 << 20, max_model_len=1000)
    async with serving(engine, write_timeout_s=0.3) as site:
        with deaf_socket(site.address) as stalled:
            stalled.sendall(raw_post(COMPLETIONS, {"prompt": "x", "max_tokens": 16}))
            await engine.wait_for(open=1)
            await engine.wait_for(open=0)
            await site.server.app.idle()
            received = await asyncio.to_thread(drain_socket, stalled)
            assert received.startswith(b"HTTP/1.1 200 OK\r\n")
            assert len(received) < 16 << 20


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineDeadError("dead"), "engine_dead"),
        (RequestAbortedError("gone"), "aborted"),
        (ValueError("x"), None),
    ],
)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
async def test_failure_in_mid_stream(error: Exception, code: str | None, route: str) -> None:
    engine = FakeEngine()
    engine.hold(at=3)
    async with serving(engine) as site:
        prompt = {"prompt": ["x", "y"]} if route == COMPLETIONS else {"messages": USER}
        body = bytearray()
        async with site.session.post(site.url + route, json=prompt | {"stream": True}) as reply:
            while b'"content":"c' not in body and b'"text":"c' not in body:
                body += await reply.content.readany()
            engine.fail(error)
            with pytest.raises(aiohttp.ClientPayloadError):  # chunked encoding without its end
                await read_all(reply.content, body)
        assert b"[DONE]" not in body
        *_, last, rest = body.decode().split("\n\n")
        assert rest == ""
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == code
        await engine.wait_for(open=0)
        success = await site.metric("asyncengine:request_success_total")
        assert success['{finished_reason="error",model_name="fake"}'] == len(engine.submitted)


async def test_failure_before_the_first_token_is_a_status() -> None:
    engine = FakeEngine()
    engine.hold(at=0)
    async with serving(engine) as site:
        reply = asyncio.create_task(site.post(COMPLETIONS, stream=True, **LONG))
        await engine.wait_for(open=1)
        engine.fail(EngineDeadError("dead"))
        assert (await reply).status == 500
        assert (await reply).error["code"] == "engine_dead"


GARBAGE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client
    b"HELLO\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nBad Header: y\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nLong: " + b"y" * 20_000 + b"\r\n\r\n",
    b"GET /" + b"y" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: nine\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=[g[:24].decode("latin1") for g in GARBAGE])
async def test_malformed_http_is_answered_in_json(garbage: bytes) -> None:
    async with serving(FakeEngine()) as site:
        reader, writer = await site.connect()
        writer.write(garbage)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.split(b" ")[1] == b"400"
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        error = json.loads(await reader.readexactly(length))["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        await close(writer)
        assert (await site.get("/health")).status == 200


async def test_unfinished_headers_are_timed() -> None:
    async with serving(FakeEngine(), keep_alive_s=0.2) as site:
        reader, writer = await site.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost:")
        assert await reader.read() == b""
        await close(writer)


async def test_unfinished_body_is_timed() -> None:
    async with serving(FakeEngine(), read_timeout_s=0.2) as site:
        reader, writer = await site.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        await close(writer)


async def test_expect_continue() -> None:
    body = json.dumps({"prompt": "x"}).encode()
    async with serving(FakeEngine()) as site:
        reader, writer = await site.connect()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
        await close(writer)


async def test_pipelined_and_kept_alive_requests() -> None:
    async with serving(FakeEngine("abc")) as site:
        reader, writer = await site.connect()
        writer.write(raw_post(COMPLETIONS, {"prompt": "x", "max_tokens": 3}) * 3)
        for _ in range(3):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            assert json.loads(await reader.readexactly(length))["choices"][0]["text"] == "abc"
        await close(writer)


async def test_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    for _ in range(2):  # a socket file that is left over must not hinder the next start
        async with (
            serving(FakeEngine(), uds=path) as site,
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session,
        ):
            assert site.url == f"unix:{path}"
            async with session.get("http://localhost/health") as reply:
                assert reply.status == 200
            with pytest.raises(OSError, match="in use"):  # and a server that listens keeps its socket
                await HttpServer(ServerConfig(uds=path)).start()
            async with session.get("http://localhost/health") as reply:
                assert reply.status == 200


async def test_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    engine = FakeEngine()
    engine.hold(at=2)
    async with serving(engine) as site:
        running = asyncio.create_task(site.events(COMPLETIONS, **LONG))
        await engine.wait_for(open=1)
        draining = asyncio.create_task(site.server.drain())
        await asyncio.sleep(0)
        for reply in (await site.get("/health"), await site.post(COMPLETIONS, prompt="x")):
            assert (reply.status, reply.error["code"]) == (503, "draining")
            assert reply.headers["Connection"] == "close"
        engine.release()
        assert await draining
        assert (await running)[-1]["choices"][0]["finish_reason"] == "length"


async def test_drain_gives_up_after_its_time() -> None:
    engine = FakeEngine()
    engine.hold(at=2)
    async with serving(engine, shutdown_timeout_s=0.2) as site:
        reader, writer = await open_stream(site.address, LONG)
        assert not await site.server.drain()
        await engine.aclose(drain=False)
        rest = await reader.read()
        assert b'"error"' in rest
        assert b"[DONE]" not in rest
        assert not rest.endswith(b"0\r\n\r\n")
        await close(writer)
