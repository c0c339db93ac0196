"""TLS: certificates that change, and clients that do not do their part of the handshake."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from asyncengine.errors import ConfigError
from asyncengine.server import tls
from asyncengine.server.config import ServerConfig
from tests.server.fake_engine import FakeEngine
from tests.server.harness import COMPLETIONS, Site, serving

REQUEST: dict[str, Any] = {"prompt": "x", "max_tokens": 2}


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", key, "-out", certificate, "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


async def test_tls_with_a_certificate_that_changes(tmp_path: Path) -> None:
    first, first_key = make_certificate(tmp_path, "first")
    second, second_key = make_certificate(tmp_path, "second")
    used, used_key = tmp_path / "used.pem", tmp_path / "used.key"
    used.write_bytes(first.read_bytes())
    used_key.write_bytes(first_key.read_bytes())
    engine = FakeEngine()
    async with serving(engine, ssl_certfile=str(used), ssl_keyfile=str(used_key)) as site:
        assert site.url.startswith("https://")

        async def status(certificate: Path) -> int:
            connector = aiohttp.TCPConnector(ssl=trusting(certificate))
            async with aiohttp.ClientSession(connector=connector) as session:
                async with session.post(site.url + COMPLETIONS, json=REQUEST | {"stream": True}) as reply:
                    assert (await reply.read()).endswith(b"data: [DONE]\n\n")
                return reply.status

        assert await status(first) == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await status(second)
        used.write_bytes(second.read_bytes())  # whose key is not there yet
        os.utime(used, (1, 1))
        assert await status(first) == 200
        used_key.write_bytes(second_key.read_bytes())
        os.utime(used_key, (2, 2))
        assert await status(second) == 200
        engine.hold(at=1)  # a client that leaves is noticed here too
        connector = aiohttp.TCPConnector(ssl=trusting(second))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post(site.url + COMPLETIONS, json=REQUEST | {"stream": True}) as reply,
        ):
            await reply.content.readuntil(b"\n\n")
        await engine.wait_for(open=0, aborted=1)
        reader, writer = await asyncio.open_connection(*site.url.removeprefix("https://").split(":"))
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")  # no TLS
        assert b" 200 " not in await reader.read()
        writer.close()


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_handshakes_have_limits_of_time_and_number(loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients say nothing, or a byte at a time. Others are served meanwhile."""
    monkeypatch.setattr(tls, "HANDSHAKE_S", 1.5)
    monkeypatch.setattr(tls, "MAX_HANDSHAKES", 40)
    factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_handshakes_have_limits(tmp_path))


async def _handshakes_have_limits(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "first")

    async def silent(address: list[str]) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(*address)
        kept.append(writer)
        return reader

    async def slow(address: list[str]) -> bytes:
        """Send bytes slowly until the server closes."""
        reader, writer = await asyncio.open_connection(*address)
        kept.append(writer)
        hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)
        for i in range(len(hello)):
            writer.write(hello[i : i + 1])
            try:
                async with asyncio.timeout(0.1):
                    return await reader.read()
            except TimeoutError:
                continue
            except ConnectionError:
                return b""
        raise AssertionError("the server has waited for all of it")

    async def ask(site: Site) -> int:
        connector = aiohttp.TCPConnector(ssl=trusting(certificate))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post(site.url + COMPLETIONS, json=REQUEST) as reply,
        ):
            return reply.status

    kept: list[asyncio.StreamWriter] = []
    async with serving(FakeEngine(), ssl_certfile=str(certificate), ssl_keyfile=str(key)) as site:
        address = site.url.removeprefix("https://").split(":")
        readers = [await silent(address) for _ in range(100)]
        dribbling = asyncio.create_task(slow(address))
        assert await ask(site) == 200
        handshakes = site.server._handshakes
        assert handshakes is not None
        assert 0 < len(handshakes._under_way) <= 40
        async with asyncio.timeout(20):
            for reader in readers:
                with suppress(ConnectionError):
                    assert await reader.read() == b""
            assert await dribbling == b""
        assert not handshakes._under_way
        assert await ask(site) == 200
        for writer in kept:
            writer.close()


async def test_a_request_that_comes_with_the_end_of_the_handshake_is_read(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "first")
    async with serving(FakeEngine(), ssl_certfile=str(certificate), ssl_keyfile=str(key)) as site:
        host, port = site.url.removeprefix("https://").split(":")
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = trusting(certificate).wrap_bio(to_client, to_server, server_hostname=host)
        reader, writer = await asyncio.open_connection(host, port)
        done = False
        while not done:
            try:
                client.do_handshake()
                done = True
                client.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            except ssl.SSLWantReadError:
                pass
            writer.write(to_server.read())  # the last of the handshake and the request in one piece
            if not done:
                to_client.write(await reader.read(65536))
        answer = b""
        async with asyncio.timeout(10):
            while not answer.startswith(b"HTTP/1.1 200"):
                to_client.write(await reader.read(65536))
                with suppress(ssl.SSLWantReadError):
                    answer += client.read(65536)
        writer.close()


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    from asyncengine.server.http_server import HttpServer

    certificate, key = make_certificate(tmp_path, "first")
    _, other = make_certificate(tmp_path, "second")
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "pkey", "-in", key, "-aes128", "-passout", "pass:x", "-out", locked],
        check=True,
        capture_output=True,
    )
    for cert, private in ((tmp_path / "none", key), (certificate, other), (key, key), (certificate, locked)):
        with pytest.raises(ConfigError, match="ssl_certfile"):
            HttpServer(ServerConfig(ssl_certfile=str(cert), ssl_keyfile=str(private)))
