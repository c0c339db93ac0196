"""Every field of the server's configuration changes something that a client can see.

A probe takes keywords of the configuration and returns what it saw. Each field has one, with two values of the field.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from asyncengine import SamplingParams, testing
from asyncengine.errors import ConfigError, EngineDeadError
from asyncengine.server.config import ServerConfig
from asyncengine.server.http_server import serve
from asyncengine.server.kv_events import published
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, COMPLETIONS, USER, raw_post, serving
from tests.server.test_server_connections import deaf_socket
from tests.server.test_server_tls import make_certificate

RESPONSES = "/v1/responses"
JSON = {"Content-Type": "application/json"}


async def url(**config: Any) -> str:
    async with serving(FakeEngine(), **config) as site:
        return site.url


async def mode(**config: Any) -> int:
    """Permissions of the socket's file."""
    async with serving(FakeEngine(), **config):
        return stat.S_IMODE(os.stat(config["uds"]).st_mode)


async def health(path: str = "/health", **config: Any) -> int:
    async with serving(FakeEngine(), **config) as site:
        return (await site.get(path)).status


async def page(**config: Any) -> int:
    return await health("/", **config)


async def below_root(**config: Any) -> int:
    return await health("/llm/health", **config)


async def models(**config: Any) -> Any:
    async with serving(FakeEngine(), **config) as site:
        return [model["id"] for model in (await site.get("/v1/models")).json["data"]]


async def keys(**config: Any) -> tuple[int, ...]:
    """Return the statuses of a request without a key, and of the metrics."""
    async with serving(FakeEngine(), **config) as site:
        return (await site.get("/v1/models")).status, (await site.get("/metrics")).status


async def metric_names(**config: Any) -> list[str]:
    async with serving(FakeEngine(), **config) as site:
        lines = (await site.get("/metrics")).body.decode().splitlines()
    return [line for line in lines if line.startswith("# TYPE")]


async def origin(**config: Any) -> str | None:
    async with serving(FakeEngine(), **config) as site:
        reply = await site.get("/health", headers={"Origin": "https://example.org"})
        return reply.headers.get("Access-Control-Allow-Origin")


async def certificate(**config: Any) -> str:
    """The kind of address, or why the server does not start."""
    try:
        return (await url(**config)).partition(":")[0]
    except ConfigError as e:
        return type(e).__name__


def completion(**fields: Any) -> Callable[..., Any]:
    """A probe: status and usage of a completion with these fields."""

    async def see(**config: Any) -> Any:
        async with serving(FakeEngine(max_model_len=300_000), **config) as site:
            reply = await site.post(COMPLETIONS, **{"prompt": "x", "model": "fake"} | fields)
            return reply.status, reply.json.get("usage")

    return see


async def held(**config: Any) -> int:
    """Status of a request whose body comes while another one's prompt is held."""
    engine = FakeEngine(max_model_len=300_000)
    engine.hold(at=0)
    async with serving(engine, **config) as site:
        running = asyncio.create_task(site.post(COMPLETIONS, prompt="x" * 200_000, max_tokens=1))
        await engine.wait_for(open=1)
        asyncio.get_running_loop().call_later(0.2, engine.release)
        reply = await site.post(COMPLETIONS, prompt="x" * 120_000, max_tokens=1)
        await running
        return reply.status


async def stored(**config: Any) -> list[int]:
    """Statuses of two stored responses when they are asked for again."""
    async with serving(FakeEngine(ends=True), **config) as site:
        made = [(await site.post(RESPONSES, input="x", model="fake")).json["id"] for _ in range(2)]
        return [(await site.get(f"{RESPONSES}/{name}")).status for name in made]


async def message(answer: str, **config: Any) -> Any:
    async with serving(FakeEngine(answer, ends=True), **config) as site:
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        reply = await site.post(CHAT, messages=USER, max_tokens=100, tools=[tool])
        return {name: bool(value) for name, value in reply.json["choices"][0]["message"].items()}


async def tool_calls(**config: Any) -> Any:
    return await message('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', **config)


async def reasoning(**config: Any) -> Any:
    return await message("<think>why</think>because", **config)


async def template(**config: Any) -> int:
    async with serving(FakeEngine(), **config) as site:
        return (await site.post(CHAT, messages=USER, max_tokens=1, chat_template="{{ messages }}")).status


async def half_a_body(**config: Any) -> bytes:
    """Return the answer to a body that stays away for a second."""
    async with serving(FakeEngine(), **config) as site:
        reader, writer = await site.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n{")
        asyncio.get_running_loop().call_later(1.0, writer.write, b'"prompt": "x"}')
        status = (await reader.readuntil(b"\r\n")).split()[1]
        writer.close()
        return status


async def idle_connection(**config: Any) -> bool:
    """Return True if a connection without a request is open after a second."""
    async with serving(FakeEngine(), **config) as site:
        reader, writer = await site.connect()
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"}")
        try:
            async with asyncio.timeout(1.0):
                return await reader.read() != b""
        except TimeoutError:
            return True
        finally:
            writer.close()


async def deaf_client(**config: Any) -> bool:
    """Return True if the request of a client that does not read is aborted within a second."""
    engine = FakeEngine(repeat=65536, max_model_len=100_000)
    async with serving(engine, **config) as site:
        with deaf_socket(site.address) as client:
            client.sendall(raw_post(COMPLETIONS, {"prompt": "x", "max_tokens": 90_000, "stream": True}))
            await engine.wait_for(open=1)
            try:
                async with asyncio.timeout(1.0):
                    await engine.wait_for(aborted=1)
            except TimeoutError:
                return False
            return True


async def first_line(**config: Any) -> bytes:
    """Return the first bytes of a stream whose request waits for a second."""
    engine = FakeEngine()
    engine.hold(at=0)
    async with serving(engine, **config) as site:
        asyncio.get_running_loop().call_later(1.0, engine.release)
        async with site.session.post(site.url + COMPLETIONS, json={"prompt": "x", "stream": True}) as reply:
            return (await reply.content.readuntil(b"\n\n"))[:6]


async def drained(**config: Any) -> bool:
    """Return True if a request that takes half a second more ends before the server does."""
    engine = FakeEngine()
    engine.hold(at=1)
    async with serving(engine, **config) as site:
        running = asyncio.create_task(site.post(COMPLETIONS, prompt="x", max_tokens=2))
        await engine.wait_for(open=1)
        asyncio.get_running_loop().call_later(0.5, engine.release)
        done = await site.server.drain()
        await running
        return done


async def death(**config: Any) -> Any:
    """Return the end of a server that has a dead engine, and is told to stop after a second."""
    engine: Any = FakeEngine()
    engine.die()

    async def load() -> Any:
        return engine

    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(1.0, stop.set)
    try:
        await serve(ServerConfig(port=0, **config), load, stop)
    except EngineDeadError as e:
        return type(e)
    return None


async def events(**config: Any) -> Any:
    """Return the addresses that events are published at, and the topic of the first."""
    async with (
        testing.SimulatedEngine(num_kv_blocks=8, max_model_len=64, kv_events=True) as engine,
        published(ServerConfig(**config), engine) as publisher,
    ):
        if publisher is None:
            return None
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as subscriber:
            subscriber.subscribe("")
            subscriber.connect(publisher.addresses()[0])
            async with asyncio.timeout(30):
                while not await subscriber.poll(50):  # until the subscription has arrived
                    await engine.generate([3 + byte for byte in os.urandom(40)], SamplingParams(max_tokens=2))
                return publisher.addresses(), (await subscriber.recv_multipart())[0]


@dataclasses.dataclass(frozen=True)
class Change:
    """A field's two values, and where the difference is seen. {} stands for the test's folder."""

    see: Callable[..., Any]
    one: Any
    other: Any
    beside: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Other fields, the same for both."""


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


EVENTS: dict[str, Any] = {"kv_events_endpoint": "ipc://{}/events"}
LIMITED: dict[str, Any] = {"max_request_bytes": 250_000}
PORT: dict[str, Any] = {"port": free_port()}

CHANGES = {
    "host": Change(url, "127.0.0.1", "127.0.0.2", PORT),
    "port": Change(url, PORT["port"], free_port()),
    "uds": Change(url, "{}/a", "{}/b"),
    "uds_mode": Change(mode, "600", "660", {"uds": "{}/a"}),
    "served_model_name": Change(models, None, ["one", "two"]),
    "strict_model_names": Change(completion(model="another"), False, True),
    "api_key": Change(keys, None, "secret"),
    "api_key_file": Change(keys, None, "{}/keys"),
    "cors_origins": Change(origin, (), ("https://example.org",)),
    "ssl_certfile": Change(certificate, None, "{}/both.pem"),
    "ssl_keyfile": Change(certificate, "{}/one.key", None, {"ssl_certfile": "{}/one.pem"}),
    "default_max_tokens": Change(completion(), 16, 3),
    "root_path": Change(below_root, "", "/llm"),
    "public_metrics": Change(keys, False, True, {"api_key": "secret"}),
    "metrics_prefix": Change(metric_names, "asyncengine", "vllm"),
    "kv_events_endpoint": Change(events, None, "ipc://{}/events"),
    "kv_events_replay_endpoint": Change(events, None, "ipc://{}/again", EVENTS),
    "kv_events_topic": Change(events, "", "kv@pod", EVENTS),
    "max_request_bytes": Change(completion(prompt="x" * 1000), 1000_000, 500),
    "max_request_values": Change(completion(logit_bias={"65": 1}), 1000, 5),
    "max_inflight_body_bytes": Change(held, 500_000, 250_000, LIMITED),
    "max_sequences_per_request": Change(completion(n=5), 5, 4),
    "max_stored_responses": Change(stored, 2, 1),
    "max_stored_response_bytes": Change(stored, 1 << 20, 1),
    "allow_priority": Change(completion(priority=1), False, True),
    "tool_call_parser": Change(tool_calls, None, "hermes"),
    "reasoning_parser": Change(reasoning, "none", "think"),
    "trust_request_chat_template": Change(template, False, True),
    "read_timeout_s": Change(half_a_body, 60.0, 0.1),
    "write_timeout_s": Change(deaf_client, 60.0, 0.1),
    "ping_interval_s": Change(first_line, 60.0, 0.05),
    "keep_alive_s": Change(idle_connection, 60.0, 0.1),
    "shutdown_timeout_s": Change(drained, 60.0, 0.05),
    "exit_on_death": Change(death, True, False),
    "page": Change(page, True, False),
}


def test_every_field_has_an_entry() -> None:
    assert CHANGES.keys() == {field.name for field in dataclasses.fields(ServerConfig)}


@pytest.mark.parametrize("field", CHANGES)
async def test_a_change_is_seen(field: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    if field.startswith("ssl"):
        chain, key = make_certificate(tmp_path, "one")
        (tmp_path / "both.pem").write_bytes(chain.read_bytes() + key.read_bytes())

    def value(given: Any) -> Any:
        return given.replace("{}", str(tmp_path)) if isinstance(given, str) else given

    change = CHANGES[field]
    beside = {name: value(given) for name, given in change.beside.items()}
    seen = [await change.see(**beside, **{field: value(given)}) for given in (change.one, change.one, change.other)]
    assert seen[0] == seen[1]
    assert seen[2] != seen[0]
