"""Rights of clients: access, decisions for others, and what a response tells of the server and of the request."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from asyncengine.errors import ConfigError
from asyncengine.server.config import ServerConfig
from asyncengine.testing import SimulatedEngine, settle
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, COMPLETIONS, USER, Site, raw_post, serving

REQUEST = {"prompt": "x", "max_tokens": 1}


async def raw(site: Site, request: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer to bytes after which the client waits for the end of the connection."""
    reader, writer = await site.connect()
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    body = await reader.readexactly(length)
    writer.close()
    return head, body


def with_key(key: bytes) -> bytes:
    return b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + key + b"\r\n\r\n"


async def test_a_key_file_holds_several_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"first\r\n\n  second-\xff\xfe  \nthird-\xc3\xbc")
    async with serving(FakeEngine(), api_key="fourth", api_key_file=str(file)) as site:
        for key in (b"first", b"second-\xff\xfe", b"third-\xc3\xbc", b"fourth", b" first "):
            assert (await raw(site, with_key(key)))[0].startswith(b"HTTP/1.1 200 "), key
        for key in (b"", b"firs", b"firstsecond", b"first second-", b"second-\xff", b"third-\xfc", b"\xff" * 3000):
            assert (await raw(site, with_key(key)))[0].startswith(b"HTTP/1.1 401 "), key


async def test_a_key_that_is_not_utf_8() -> None:
    async with serving(FakeEngine(), api_key=os.fsdecode(b"key-\xff")) as site:
        assert (await raw(site, with_key(b"key-\xff")))[0].startswith(b"HTTP/1.1 200 ")
        for key in (b"key-", b"key-\xfe", b"key-\xc3\xbf"):
            assert (await raw(site, with_key(key)))[0].startswith(b"HTTP/1.1 401 ")


def test_keys_that_cannot_be_used(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_bytes(b"\n \n")
    for file in (tmp_path / "missing", tmp_path, empty, "a\0b"):
        with pytest.raises(ConfigError, match="api_key_file"):
            ServerConfig(api_key_file=str(file))
    for key in ("", " key", "key\t", "ke\ny", "ke\x7fy", "\ud800"):
        with pytest.raises(ConfigError, match="api_key"):
            ServerConfig(api_key=key)
    assert "secret" not in repr(ServerConfig(api_key="secret"))
    assert ServerConfig().api_keys == ()


async def test_keys_make_tenants(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    engine = FakeEngine()
    async with serving(engine, api_key_file=str(file)) as site:
        for key in ("one", "two", "one"):
            headers = {"Authorization": f"Bearer {key}", "Connection": "close"}
            reply = await site.request("POST", COMPLETIONS, json=REQUEST, headers=headers)
            assert reply.status == 200
    first, second, third = engine.tenants
    assert first == third != second
    assert all(tenant is not None and "one" not in tenant and "two" not in tenant for tenant in engine.tenants)


async def test_without_keys_a_connection_is_a_tenant() -> None:
    engine = FakeEngine()
    async with serving(engine) as site:
        connections = [await site.connect() for _ in range(2)]
        for reader, writer in [*connections, *connections]:
            writer.write(raw_post(COMPLETIONS, REQUEST))
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        for _, writer in connections:
            writer.close()
    assert engine.tenants[:2] == engine.tenants[2:]
    assert len(set(engine.tenants)) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_small_request_does_not_wait_for_anothers_large_one(stream: bool) -> None:
    async with (
        SimulatedEngine(max_num_seqs=16, num_kv_blocks=4096, step_latency_us=2000) as engine,
        serving(engine, max_sequences_per_request=2048) as site,
    ):
        _, writer = await site.connect()
        # Slots free up every 2 s, so that a slow machine too queues prompts faster than they end.
        large = {"prompt": [[300, 301]] * 512, "n": 4, "max_tokens": 1000, "ignore_eos": True, "stream": stream}
        writer.write(raw_post(COMPLETIONS, large))
        while len(engine._life.requests) < 400:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        small = await site.post(COMPLETIONS, prompt=[302], max_tokens=4, ignore_eos=True)
        assert small.status == 200
        assert len(engine._life.requests) > 100  # the large one is far from its end
        writer.close()
        await settle(engine)
        assert len(engine._life.requests.fair_share) == 0


async def test_a_client_that_holds_all_slots_does_not_hold_up_another() -> None:
    async with (
        SimulatedEngine(num_kv_blocks=32768, read_kv=False, step_latency_us=2000) as engine,
        serving(engine) as site,
    ):
        _, writer = await site.connect()
        large = {"prompt": [[300, 301], [302]], "n": 128, "max_tokens": 1900, "ignore_eos": True}
        writer.write(raw_post(COMPLETIONS, large))
        while engine.stats().num_requests_running < 256:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for word in (303, 304):
            small = await site.post(COMPLETIONS, prompt=[word], max_tokens=1, ignore_eos=True)
            assert small.json["usage"]["completion_tokens"] == 1
        assert len(engine._life.requests) == 2, "the large request was served first"
        stats = engine.stats()
        # The second one may find the slot of the first one free.
        assert 1 <= stats.num_preemptions <= 2, "a short request costs the other client one sequence"
        assert stats.num_requests_running + stats.num_requests_waiting == 256
        writer.close()
        await settle(engine)
        assert len(engine._life.requests.fair_share) == 0


async def test_priority_only_where_the_operator_allows_it() -> None:
    engine = FakeEngine()
    async with serving(engine) as site:
        reply = await site.post(COMPLETIONS, **REQUEST, priority=-5)
        assert (reply.status, reply.error["param"]) == (400, "priority")
        assert "--allow-priority" in reply.error["message"]
        for nothing in ({}, {"priority": 0}, {"priority": None}):
            assert (await site.post(COMPLETIONS, **REQUEST, **nothing)).status == 200
    async with serving(engine, allow_priority=True) as site:
        assert (await site.post(COMPLETIONS, **REQUEST, priority=-5)).status == 200
    assert [priority for _, _, priority, _ in engine.submitted] == [0, 0, 0, -5]


async def test_prompts_times_n_are_limited() -> None:
    engine = FakeEngine()
    async with serving(engine, max_sequences_per_request=6) as site:
        for fields, param in (
            ({"prompt": ["x"] * 3, "n": 3}, "n"),
            ({"prompt": "x", "n": 7}, "n"),
            ({"prompt": ["x"] * 7}, "prompt"),
            ({"prompt": [[1]] * 7, "n": 2}, "prompt"),
        ):
            for stream in (False, True):
                reply = await site.post(COMPLETIONS, max_tokens=1, stream=stream, **fields)
                assert (reply.status, reply.error["param"]) == (400, param)
        reply = await site.post(CHAT, messages=USER, n=7)
        assert (reply.status, reply.error["param"]) == (400, "n")
        assert engine.submitted == []
        reply = await site.post(COMPLETIONS, prompt=["x"] * 3, n=2, max_tokens=1)
        assert len(reply.json["choices"]) == 6
        reply = await site.post(COMPLETIONS, prompt=[7] * 20, max_tokens=1)  # one prompt of twenty tokens
        assert reply.status == 200


VERSIONS = [
    (b"GET /health HTTP/0.9\r\n\r\n", b"505"),
    (b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n", b"505"),
    (b"POST /v1/completions HTTP/2.0\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", b"505"),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"4"),
    (b"GET /health HTTP/3.0\r\nHost: x\r\n\r\n", b"4"),
    (b"GET /health\r\n\r\n", b"505"),
    (b"GET /health HTTP/1.0\r\n\r\n", b"200"),
    (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
]


@pytest.mark.parametrize(("request_", "status"), VERSIONS, ids=[v[0].partition(b"\r")[0].decode() for v in VERSIONS])
async def test_versions_of_http(request_: bytes, status: bytes) -> None:
    async with serving(FakeEngine()) as site:
        head, body = await raw(site, request_)
        version, code = head.split(b" ")[:2]
        assert code.startswith(status), head
        if code != b"200":
            assert version == b"HTTP/1.0" or (version == b"HTTP/1.1" and b"\r\nConnection: close" in head), head
            assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


async def test_no_response_names_versions() -> None:
    engine = FakeEngine()
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    body = json.dumps(REQUEST).encode()
    sized = b"Content-Length: %d\r\n" % len(body)
    requests = [
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\r\n\r\n",
        b"GET /health HTTP/1.1\r\nBad Header: y\r\n\r\n",
        post + b"Content-Length: 100\r\n\r\n{",  # until the time limit
        post + b"Content-Length: 99999999999\r\n\r\n",
        post + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        post + b"Content-Encoding: gzip\r\n" + sized + b"\r\n" + body,
        post + sized + b"\r\n" + body,
        post + b"Expect: 100-continue\r\n" + sized + b"\r\n" + body,
        post + b"Expect: the impossible\r\n" + sized + b"\r\n" + body,
        post + b"Upgrade: websocket\r\nConnection: Upgrade\r\n" + sized + b"\r\n" + body,
        raw_post(COMPLETIONS, REQUEST | {"stream": True}),
        raw_post(COMPLETIONS, REQUEST | {"n": 0}),
    ]
    async with serving(engine, read_timeout_s=0.2) as site:

        async def check(request: bytes) -> bytes:
            reader, writer = await site.connect()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 100 " in head:
                head = await reader.readuntil(b"\r\n\r\n")
            writer.close()
            assert head.count(b"\r\nServer: asyncengine\r\n") == 1, (request, head)
            assert b"aiohttp" not in head
            assert b"python" not in head.lower()
            return head

        for request in requests:
            await check(request)
        site.server.app._dispatch = None  # type: ignore[assignment, method-assign]
        assert b" 500 " in await check(requests[0])
        site.server.app._in_progress = None  # type: ignore[assignment]  # a fault outside of every handler
        assert b" 500 " in await check(requests[0])
        site.server.app._in_progress = 0


LONG = "m" * 1_000_000


async def test_errors_do_not_send_back_all_that_was_sent() -> None:
    async with serving(FakeEngine(), strict_model_names=True) as site:
        bodies: list[tuple[str, dict[str, Any]]] = [
            (COMPLETIONS, REQUEST | {"model": LONG}),
            (COMPLETIONS, REQUEST | {"stop": LONG}),
            (COMPLETIONS, REQUEST | {LONG: 1, "n": "x"}),
            (COMPLETIONS, REQUEST | {"n": LONG}),
            (COMPLETIONS, {"prompt": {LONG: 1}}),
            (CHAT, {"messages": [{"role": LONG, "content": "x"}]}),
            (CHAT, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
            (CHAT, {"messages": USER, "tools": [{LONG: 1}]}),
            (CHAT, {"messages": USER, "response_format": {"type": LONG}}),
        ]
        replies = [await site.post(route, **fields) for route, fields in bodies]
        name = LONG[:6000]
        replies += [
            await site.get(f"/{name}"),
            await site.get(f"/v1/models/{name}"),
            await site.request("POST", f"/v1/models/{name}"),
            await site.request("POST", COMPLETIONS, data=b"{}", headers={"Content-Encoding": name}),
        ]
        for reply in replies:
            assert 400 <= reply.status < 500
            assert len(reply.body) < 1500, reply.body[:200]
            assert reply.error["message"]
        served = await site.post(COMPLETIONS, **REQUEST | {"model": "quite-another"})
        assert "quite-another" in served.error["message"]  # what is short is shown


async def test_answers_name_what_made_them() -> None:
    async with serving(FakeEngine()) as site:
        for route, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})):
            whole = (await site.post(route, **prompt, max_tokens=2)).json["system_fingerprint"]
            assert whole.startswith("fp_")
            events = await site.events(route, **prompt, max_tokens=2)
            assert {event["system_fingerprint"] for event in events} == {whole}


async def test_the_chunk_of_the_role_counts_no_token() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving(FakeEngine()) as site:
        for details in ({}, {"logprobs": True}):
            events = await site.events(CHAT, messages=USER, max_tokens=2, stream_options=options, **details)
            assert "role" in events[0]["choices"][0]["delta"]
            assert [e["usage"]["completion_tokens"] for e in events] == [0, 1, 2, 2, 2]
            assert len({e["usage"]["prompt_tokens"] for e in events}) == 1


async def test_usage_only_where_it_is_asked_for() -> None:
    async with serving(FakeEngine()) as site:
        for include in (False, None):
            options = {"include_usage": include, "continuous_usage_stats": True}
            for event in await site.events(COMPLETIONS, prompt="x", max_tokens=3, stream_options=options):
                assert "usage" not in event
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await site.events(COMPLETIONS, prompt="x", max_tokens=3, stream_options=options)
        assert [e["usage"]["completion_tokens"] for e in events] == [1, 2, 3, 3]
