"""The real server on a real port, and small HTTP clients to talk to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from asyncengine.server.config import ServerConfig
from asyncengine.server.http_server import HttpServer
from tests.server.fake_engine import FakeEngine

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Tell me a story"}]


@dataclass
class Reply:
    """A response read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, after checking its shape."""
        assert self.headers["Content-Type"].startswith("application/json"), self.body
        assert set(self.json) == {"error"}
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["type"]
        return error


@dataclass
class Site:
    """A running server with a client session."""

    server: HttpServer
    session: aiohttp.ClientSession
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    async def request(self, method: str, path: str, **options: Any) -> Reply:
        async with self.session.request(method, self.url + path, **options) as r:
            return Reply(r.status, r.headers, await r.read())

    async def get(self, path: str, **options: Any) -> Reply:
        return await self.request("GET", path, **options)

    async def post(self, path: str, **fields: Any) -> Reply:
        return await self.request("POST", path, json=fields)

    async def events(self, path: str, **fields: Any) -> list[Any]:
        """The JSON events of a stream that must end with [DONE]."""
        reply = await self.post(path, stream=True, **fields)
        assert reply.status == 200, reply.body
        assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        *events, done, rest = reply.body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert all(e.startswith("data: ") and "\n" not in e for e in events)
        return [json.loads(e.removeprefix("data: ")) for e in events]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.address)

    async def metric(self, name: str) -> dict[str, float]:
        """Samples of one metric by their labels, as text."""
        reply = await self.get("/metrics", headers=self.headers)
        samples = (line.rpartition(" ") for line in reply.body.decode().splitlines() if line[0] != "#")
        return {k.removeprefix(name): float(v) for k, _, v in samples if k.partition("{")[0] == name}


@asynccontextmanager
async def serving(engine: FakeEngine | None, **config: Any) -> AsyncIterator[Site]:
    """Serve ``engine`` (None: still loading) through the real runner on a free port."""
    server = HttpServer(ServerConfig(**{"port": 0, **config}))
    await server.start()
    server.app.engine = engine  # type: ignore[assignment]
    try:
        async with aiohttp.ClientSession() as session:
            yield Site(server, session)
    finally:
        await server.aclose()


async def read_all(content: aiohttp.StreamReader, into: bytearray) -> None:
    """Append the rest of a body to ``into``; what arrived before an error stays there."""
    while piece := await content.readany():
        into += piece


def raw_post(path: str, fields: dict[str, Any]) -> bytes:
    """An HTTP/1.1 request as bytes."""
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
