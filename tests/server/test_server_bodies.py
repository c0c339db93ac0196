"""Request bodies that are large, deep or numerous: refused before they cost more than their bytes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import tracemalloc
from typing import Any

import pytest

from asyncengine.server.chat import Chat
from asyncengine.server.completions import Completions
from asyncengine.server.config import ServerConfig
from asyncengine.server.errors import ApiError
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, COMPLETIONS, USER, Site, serving

JSON = {"Content-Type": "application/json"}
VALID = {
    COMPLETIONS: b'"prompt":"x","max_tokens":1',
    CHAT: b'"messages":[{"role":"user","content":"x"}],"max_tokens":1',
}
ENDPOINTS = {COMPLETIONS: Completions(), CHAT: Chat()}


async def send(site: Site, route: str, body: bytes) -> Any:
    return await site.request("POST", route, data=io.BytesIO(body), headers=JSON)


def nested(depth: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return opening * depth + b"1" + closing * depth


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
async def test_depth_and_count_of_values_are_limited(route: str) -> None:
    engine = FakeEngine()
    async with serving(engine, max_request_values=1000) as site:
        for field in (b"user", b"response_format", b"messages", b"prompt"):
            for value in (
                nested(64),
                nested(200_000),
                nested(100_000, b'{"a":', b"}"),
                b"[" * 200_000,
                b"[" + b"[]," * 600 + b"1]",
                b"[" + b'{"role":"","content":""},' * 600 + b"1]",
                b"{" + b'"a":1,' * 1200 + b'"b":2}',
                b"[" + b"{}," * (1 << 20),  # a large one is scanned elsewhere
            ):
                reply = await send(site, route, b'{"%b":%b,%b}' % (field, value, VALID[route]))
                assert (reply.status, reply.error["code"]) == (413, "request_too_large"), (field, value[:20])
        assert engine.submitted == []
        for value in (nested(63), b"[" + b"1," * 900 + b"1]", b'"' + b'[{,\\"' * 100_000 + b'"'):
            reply = await send(site, route, b'{"user":%b,%b}' % (value, VALID[route]))
            assert reply.status == 200, reply.body
        await wait_until_released(site)


TOO_LONG: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": ["x"] * 1025}, "prompt"),
    (COMPLETIONS, {"prompt": [[1]] * 1025}, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 400_000}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "stop": ["x"] * 150_000}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [1] * 1025}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [1] * 400_000}, "stop_token_ids"),
    (CHAT, {"messages": USER * 16_385}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 16_384}]}, "messages"),
    (CHAT, {"messages": USER, "tools": [{}] * 100_000}, "tools"),
    (CHAT, {"messages": [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 16_384}]},
     "messages"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("route", "fields", "param"), TOO_LONG, ids=[f"{p}-{i}" for i, (_, _, p) in enumerate(TOO_LONG)]
)
async def test_lists_are_limited(route: str, fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    async with serving(engine) as site:
        for stream in (False, True):
            reply = await send(site, route, json.dumps(fields | {"stream": stream}).encode())
            assert (reply.status, reply.error["param"]) == (400, param), reply.body
        assert engine.open == {}


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_what_is_not_read_costs_no_objects(route: str) -> None:
    many = b"[" + b"[]," * 200_000 + b"1]"
    for field in (b"user", b"logit_bias", b"tools"):
        body = bytearray(b'{%b,"%b":%b}' % (VALID[route], field, many))
        tracemalloc.start()
        try:
            with contextlib.suppress(ApiError):
                ENDPOINTS[route].parse(body, ServerConfig())
            assert tracemalloc.get_traced_memory()[1] < 100_000
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_what_is_parsed_does_not_hold_the_bytes(route: str) -> None:
    neutral = b'"echo":false,"response_format":{"type":"text"},"logit_bias":{},"bad_words":[],"user":"me",'
    turn = b'"messages":[{"role":"user","content":[{"type":"text","text":"x"}],"tool_calls":[ ],"function_call":null}]'
    body = bytearray(b"{" + neutral + (turn if route == CHAT else VALID[route]) + b"}")
    parsed = ENDPOINTS[route].parse(body, ServerConfig())
    body.clear()  # BufferError if something refers to it
    assert len(parsed[1]) == 1


async def test_prompts_count_until_their_answer_is_sent() -> None:
    engine = FakeEngine(max_model_len=300_000)
    engine.hold(at=0)
    async with serving(engine, max_inflight_body_bytes=300_000, max_request_bytes=300_000) as site:
        running = asyncio.create_task(site.post(COMPLETIONS, prompt="x" * 200_000, max_tokens=1))
        await engine.wait_for(open=1)
        bodies = site.server.app.bodies
        assert bodies.held == 200_000
        small = asyncio.create_task(site.post(COMPLETIONS, prompt="x", max_tokens=1))
        await engine.wait_for(open=2)
        large = await site.post(COMPLETIONS, prompt="x" * 120_000, max_tokens=1)
        assert (large.status, large.error["code"]) == (503, "overloaded")
        engine.release()
        assert (await running).status == (await small).status == 200
        await wait_until_released(site)
        padded = await site.post(COMPLETIONS, prompt="x", max_tokens=1, something="y" * 250_000)
        assert padded.status == 200


async def test_what_a_response_repeats_is_limited_and_kept_as_text() -> None:
    engine = FakeEngine(max_model_len=4096, chat_template="{{ tools }}<tool_call>")
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "enum": [[]] * 100_000}}
    async with serving(engine) as site:
        for fields in (
            {"user": "x" * 70_000},
            {"reasoning": {"summary": "x" * 70_000}},
            {"tools": [tool | {"description": "x" * (2 << 20)}]},
        ):
            reply = await send(site, "/v1/responses", json.dumps({"input": "x", **fields}).encode())
            assert (reply.status, reply.error["param"]) == (400, next(iter(fields)))
        reply = await site.post("/v1/responses", input="x", tools=[tool], max_output_tokens=1)
        assert reply.status == 200
        assert reply.json["tools"][0]["parameters"] == tool["parameters"]
        await wait_until_released(site)


def half_sent(total: int, part: int) -> bytes:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {total}\r\n\r\n".encode()
    return head + b'{"prompt":"' + b"x" * (part - 11)


async def test_half_sent_bodies_hold_no_more_than_the_budget() -> None:
    budget, size = 4 * 2**20, 3 * 2**20
    async with serving(FakeEngine(), max_inflight_body_bytes=budget, max_request_bytes=budget) as site:
        bodies = site.server.app.bodies
        connections = [await site.connect() for _ in range(20)]
        refused: list[tuple[bytes, Any]] = []

        async def push(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                writer.write(half_sent(size + 1000, size))
                await writer.drain()
            refused.append(await read_reply(reader))

        peak = 0
        tasks = [asyncio.create_task(push(*c)) for c in connections]
        while len(refused) < 19:
            peak = max(peak, bodies.held)
            await asyncio.sleep(0.001)
        assert size <= peak <= budget + 2**20  # a chunk has arrived when it is counted
        for head, body in refused:
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nRetry-After: 1" in head
            assert b"\r\nConnection: close" in head
            assert body["error"]["code"] == "overloaded"
        while bodies.held < size:  # noqa: ASYNC110 - the one that is let in
            await asyncio.sleep(0.001)
        # Small ones are served meanwhile, and the one that is let in as well, once it is complete.
        assert (await site.post(COMPLETIONS, prompt="x", max_tokens=1)).status == 200
        (left,) = [i for i, task in enumerate(tasks) if not task.done()]
        connections[left][1].write(b"y" * 998 + b'"}')
        await tasks[left]
        assert refused[-1][1]["error"]["code"] == "context_length_exceeded"
        assert bodies.held == 0
        for _, writer in connections:
            writer.close()


async def read_reply(reader: asyncio.StreamReader) -> tuple[bytes, Any]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return head, json.loads(await reader.readexactly(length))


async def wait_until_released(site: Site) -> None:
    while site.server.app.bodies.held:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("how", ["disconnect", "time limit"])
async def test_bytes_of_a_body_that_never_ends_are_released(how: str) -> None:
    limits = {"read_timeout_s": 0.3} if how == "time limit" else {}
    async with serving(FakeEngine(), **limits) as site:
        reader, writer = await site.connect()
        writer.write(half_sent(2**20, 2**19))
        while site.server.app.bodies.held < 2**19:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if how == "disconnect":
            writer.close()
        else:
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 408 ")
        async with asyncio.timeout(10):
            await wait_until_released(site)
        writer.close()
