"""Clients that leave, or seem to leave, in unusual ways; and requests that no client should send."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import pytest
import uvloop

from asyncengine.server.wire import ClientStalledError, _wait_for_client
from tests.coroutines import run
from tests.server.fake_engine import FakeEngine
from tests.server.harness import COMPLETIONS, Site, raw_post, serving

LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
PLACES = pytest.mark.parametrize(("loop", "unix"), [("asyncio", False), ("uvloop", False), ("uvloop", True)])
STREAMED = pytest.mark.parametrize("streamed", [False, True])
FACTORIES = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}
LONG = {"prompt": "x", "max_tokens": 200}
LIMIT_S = 30.0


class Client:
    """A socket without a library in between."""

    opened: ClassVar[list[socket.socket]] = []

    def __init__(self, site: Site, path: str | None) -> None:
        if path is not None:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.connect(path)
        else:
            self.sock = socket.socket()
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
            self.sock.connect(site.address)
        self.sock.settimeout(0.2)
        self.opened.append(self.sock)

    async def send(self, data: bytes) -> None:
        await asyncio.to_thread(self.sock.sendall, data)

    async def flood(self, data: bytes, limit: int = 16 << 20) -> int:
        """Send until nothing is taken for a while; the number of bytes that were."""

        def send() -> int:
            sent = 0
            try:
                while sent < limit:
                    sent += self.sock.send(data[sent % len(data) :])
            except TimeoutError:
                pass
            return sent

        return await asyncio.to_thread(send)

    async def read(self) -> bytes:
        """Read all bytes that come until the server closes."""

        def receive() -> bytes:
            self.sock.settimeout(LIMIT_S)
            received = bytearray()
            while piece := self.sock.recv(1 << 20):
                received += piece
            return bytes(received)

        return await asyncio.to_thread(receive)


@pytest.fixture(autouse=True)
def close_clients() -> Iterator[None]:
    yield
    while Client.opened:
        Client.opened.pop().close()


def answers(received: bytes) -> list[tuple[int, bytes]]:
    """Status and body of each response; interim ones must be 100 and are left out."""
    found = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status == 100:
            continue
        assert status >= 200
        fields = {k.lower(): v for k, _, v in (line.partition(b": ") for line in head.split(b"\r\n")[1:])}
        if fields.get(b"transfer-encoding") == b"chunked":
            body = b""
            while True:
                size, _, received = received.partition(b"\r\n")
                length = int(size, 16)
                body += received[:length]
                assert received[length : length + 2] == b"\r\n"
                received = received[length + 2 :]
                if not length:
                    break
        else:
            length = int(fields[b"content-length"])
            body, received = received[:length], received[length:]
            assert len(body) == length
        found.append((status, body))
    return found


def text_of(body: bytes, streamed: bool) -> str:
    if not streamed:
        return str(json.loads(body)["choices"][0]["text"])
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    choices = [json.loads(e.removeprefix("data: "))["choices"][0] for e in events[:-2] if not e.startswith(":")]
    return "".join(choice["text"] for choice in choices)


@pytest.mark.sampled(5)
@PLACES
@STREAMED
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_half_closes_gets_its_answer(
    loop: str, streamed: bool, unix: bool, begun: bool, tmp_path: Path
) -> None:
    path = str(tmp_path / "socket") if unix else None

    async def main() -> None:
        engine = FakeEngine("abc")
        engine.hold(at=2 if begun else 0)
        async with serving(engine, uds=path) as site:
            client = Client(site, path)
            await client.send(raw_post(COMPLETIONS, {"prompt": "x", "max_tokens": 6, "stream": streamed}))
            if begun:
                await engine.wait_for(open=1)
            client.sock.shutdown(socket.SHUT_WR)
            await engine.wait_for(open=1)
            await asyncio.sleep(0.7)  # it is probed, at once and again
            assert not engine.aborted
            engine.release()
            received = await client.read()
            [(status, body)] = answers(received)
            assert status == 200
            assert text_of(body, streamed) == "abcabc"
            assert received.count(b": ping") + received.count(b"100 Continue") >= 2

    run(main(), LIMIT_S, FACTORIES[loop])


@LOOPS
def test_pipelined_requests_before_a_half_close_are_all_answered(loop: str) -> None:
    async def main() -> None:
        async with serving(FakeEngine("abc")) as site:
            for version in (b"1.1", b"1.0"):
                client = Client(site, None)
                health = b"GET /health HTTP/%b\r\nHost: x\r\nConnection: keep-alive\r\n\r\n" % version
                count = 40 if version == b"1.1" else 1
                await client.send(health * count)
                client.sock.shutdown(socket.SHUT_WR)
                received = (await client.read()).replace(b"HTTP/1.0", b"HTTP/1.1")
                assert [status for status, _ in answers(received)] == [200] * count
            client = Client(site, None)
            await client.send(raw_post(COMPLETIONS, LONG) + raw_post(COMPLETIONS, LONG)[:-1])
            client.sock.shutdown(socket.SHUT_WR)
            assert [status for status, _ in answers(await client.read())] == [200, 400]
            client = Client(site, None)
            client.sock.shutdown(socket.SHUT_WR)
            assert await client.read() == b""

    run(main(), LIMIT_S, FACTORIES[loop])


@PLACES
@STREAMED
def test_a_client_that_half_closes_and_then_leaves_is_noticed(
    loop: str, streamed: bool, unix: bool, tmp_path: Path
) -> None:
    path = str(tmp_path / "socket") if unix else None

    async def main() -> None:
        engine = FakeEngine()
        engine.hold(at=2)
        async with serving(engine, uds=path) as site:
            client = Client(site, path)
            await client.send(raw_post(COMPLETIONS, LONG | {"stream": streamed}))
            await engine.wait_for(open=1)
            client.sock.shutdown(socket.SHUT_WR)
            await asyncio.sleep(0.1)
            assert not engine.aborted
            client.sock.close()
            await engine.wait_for(open=0, aborted=1)

    run(main(), LIMIT_S, FACTORIES[loop])


@STREAMED
async def test_a_generation_over_http_1_0_ends_with_the_client_data(streamed: bool) -> None:
    engine = FakeEngine()
    engine.hold(at=0)
    async with serving(engine) as site:
        client = Client(site, None)
        await client.send(raw_post(COMPLETIONS, LONG | {"stream": streamed}).replace(b"HTTP/1.1", b"HTTP/1.0"))
        await engine.wait_for(open=1)
        client.sock.close()
        await engine.wait_for(open=0, aborted=1)


@pytest.mark.sampled(5)
@PLACES
@STREAMED
@pytest.mark.parametrize("abruptly", [False, True])
def test_a_client_that_pipelines_without_end_and_leaves_is_noticed(
    loop: str, streamed: bool, unix: bool, abruptly: bool, tmp_path: Path
) -> None:
    path = str(tmp_path / "socket") if unix else None

    async def main() -> None:
        engine = FakeEngine()
        engine.hold(at=1)
        async with serving(engine, uds=path) as site:
            client = Client(site, path)
            fields = {"prompt": ["a", "b", "c"], "max_tokens": 50, "stream": streamed}
            await client.send(raw_post(COMPLETIONS, fields))
            await engine.wait_for(open=3)
            assert await client.flood(raw_post(COMPLETIONS, fields) * 100) < 8 << 20
            if abruptly:
                client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.sock.close()
            await engine.wait_for(open=0, aborted=3)

    run(main(), LIMIT_S, FACTORIES[loop])


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
async def test_an_upgrade_is_declined_and_reading_stays_limited(protocol: str) -> None:
    engine = FakeEngine("abc")
    engine.hold(at=0)
    upgrade = f"Host: test\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\n".encode()
    request = raw_post(COMPLETIONS, {"prompt": "x", "max_tokens": 3}).replace(b"Host: test\r\n", upgrade)
    async with serving(engine) as site:
        client = Client(site, None)
        count = 2 if protocol == "websocket" else 1  # behind other upgrades the parser drops what came along
        await client.send(request * count)
        client.sock.shutdown(socket.SHUT_WR)
        await engine.wait_for(open=1)
        engine.release()
        statuses = answers(await client.read())
        assert [status for status, _ in statuses] == [200] * count
        assert text_of(statuses[-1][1], False) == "abc"

        engine.hold(at=0)
        client = Client(site, None)
        await client.send(request)
        await engine.wait_for(open=1)
        assert await client.flood(b"x" * 65536) < 4 << 20
        client.sock.close()
        await engine.wait_for(open=0)


@pytest.mark.parametrize("size", [0, 1000, 120_000, 140_000, 300_000, 3_000_000])
@pytest.mark.parametrize("half_closed", [False, True])
async def test_a_malformed_chunk_is_answered_at_once_and_closes(size: int, half_closed: bool) -> None:
    async with serving(FakeEngine()) as site:
        client = Client(site, None)
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(0.05)
        body = b"%x\r\n%b\r\n" % (size, b" " * size) if size else b""
        await client.send(body + b"zz\r\n" + b"x" * 300_000)  # and goes on sending
        if half_closed:
            client.sock.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(10):
            [(status, answer)] = answers(await client.read())
        assert status == 400
        assert json.loads(answer)["error"]["type"] == "invalid_request_error"
        client.sock.close()
        async with asyncio.timeout(10):
            while any(c.transport is not None for c in site.server._server.connections):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("rest", [b"", b"helloworld"])
async def test_an_answered_request_whose_body_ends_early_is_no_fault(
    rest: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(FakeEngine()) as site:
        client = Client(site, None)
        await client.send(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n")
        await asyncio.sleep(0.1)  # it has been answered; the server lingers for the body
        await client.send(rest)
        if not rest:
            client.sock.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(5):
            assert [status for status, _ in answers(await client.read())] == [404]
    assert not caplog.text


async def test_a_body_that_does_not_come_closes_the_connection_in_its_time() -> None:
    async with serving(FakeEngine(), read_timeout_s=0.2) as site:
        client = Client(site, None)
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        async with asyncio.timeout(5):  # aiohttp lingers for 10 s
            assert [status for status, _ in answers(await client.read())] == [408]
        client = Client(site, None)
        await client.send(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        async with asyncio.timeout(5):
            assert [status for status, _ in answers(await client.read())] == [404]


BODY = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
HOSTILE: dict[str, tuple[bytes, list[int]]] = {
    "garbage behind the body": (POST + b"Content-Length: %d\r\n\r\n%bHELLO\r\n\r\n" % (len(BODY), BODY), [400]),
    "length and chunks": (
        POST + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % len(BODY),
        [400],
    ),
    "two lengths": (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + BODY, [400]),
    "a length with a sign": (POST + b"Content-Length: +5\r\n\r\n" + BODY, [400]),
    "chunked twice": (POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", [400]),
    "line feeds alone": (b"GET /health HTTP/1.1\nHost: x\n\n", [400]),
    "a folded header": (b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n", [400]),
    "a header with NUL": (b"GET /health HTTP/1.1\r\nHost: x\r\nA: \0\r\n\r\n", [400]),
    "many headers": (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 5000 + b"\r\n", [400]),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", [400]),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_ambiguous_http_is_refused(name: str) -> None:
    request, expected = HOSTILE[name]
    async with serving(FakeEngine()) as site:
        client = Client(site, None)
        await client.send(request)
        async with asyncio.timeout(10):
            received = answers((await client.read()).replace(b"HTTP/1.0", b"HTTP/1.1"))
        assert [status for status, _ in received] == expected
        if expected[-1] == 400:
            assert set(json.loads(received[-1][1])["error"]) == {"message", "type", "param", "code"}
        assert (await site.get("/health")).status == 200


async def test_a_header_without_end_is_refused() -> None:
    async with serving(FakeEngine()) as site:
        client = Client(site, None)
        with contextlib.suppress(ConnectionError):  # closed while it was sending
            await client.flood(b"GET /" + b"x" * 60_000)
        assert (await site.get("/health")).status == 200


async def test_requests_are_served_beside_many_idle_connections() -> None:
    async with serving(FakeEngine("abc"), keep_alive_s=1.0) as site:
        idle = [await site.connect() for _ in range(500)]
        before = len(os.listdir("/proc/self/fd"))
        assert (await site.post(COMPLETIONS, prompt="x", max_tokens=3)).json["choices"][0]["text"] == "abc"
        for reader, writer in idle:
            assert await reader.read() == b""
            writer.close()
        while len(os.listdir("/proc/self/fd")) > before - 900:  # noqa: ASYNC110 - both ends are in this process
            await asyncio.sleep(0.05)


async def test_a_client_gets_its_time_anew_after_the_process_was_stopped() -> None:
    """A client can read nothing while the process is stopped. One that reads nothing afterwards either is cut."""
    transport = Mock(get_write_buffer_size=Mock(return_value=1000))
    task = asyncio.ensure_future(_wait_for_client(asyncio.Event().wait(), transport, 0.5))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    time.sleep(2)  # noqa: ASYNC251  # the loop stands, as if the process were stopped
    await asyncio.sleep(0.1)
    assert not task.done()
    transport.abort.assert_not_called()
    with pytest.raises(ClientStalledError):
        await task
    transport.abort.assert_called_once_with()
