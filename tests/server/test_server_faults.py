"""Faults of a server process: an engine that dies, an event loop that hangs, a log that nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from typing import Any

import aiohttp
import pytest

from tests.amounts import sample_of
from tests.server.harness import COMPLETIONS, raw_post, read_all
from tests.server.server_process import FAKE, Process, process

LONG = {"prompt": "x", "max_tokens": 1500, "stream": True, "ignore_eos": True}


@pytest.mark.parametrize("fault", ["fail", "hang"])
async def test_a_dead_engine_fails_requests_and_ends_the_process(fault: str) -> None:
    async with process(FAKE, "--fault", fault, "--step-s", "0.001") as server, aiohttp.ClientSession() as session:
        await server.read_log("ready on")
        body = bytearray()
        headers = {"X-Request-Id": "number-7"}
        async with session.post(server.url + COMPLETIONS, json=LONG, headers=headers) as reply:
            with pytest.raises(aiohttp.ClientPayloadError):
                await read_all(reply.content, body)
        *_, last, rest = body.decode().split("\n\n")
        assert rest == ""
        check_error(json.loads(last.removeprefix("data: "))["error"], "engine_dead", "number-7")
        await server.read_log(
            r"request number-7 failed: EngineDeadError: .*(illegal memory access|hung|longer|within|finish)"
        )
        await server.read_log("CRITICAL .*the engine is dead")
        assert await server.process.wait() == 1


def check_error(error: dict[str, Any], code: str, request_id: str) -> None:
    """A fixed text with the request's id; how the engine died is for the log."""
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert request_id in error["message"]
    assert not re.search(r"/|\.py|kernel|injected|launch|simulated", error["message"])


async def test_a_dead_engine_may_be_kept_for_inspection() -> None:
    command = "--fault", "fail", "--step-s", "0.001", "--no-exit-on-death"
    async with process(FAKE, *command) as server, aiohttp.ClientSession() as session:
        await server.read_log("ready on")
        fields = LONG | {"stream": False}
        for _ in range(2):  # the one that was under way, and a later one
            async with session.post(server.url + COMPLETIONS, json=fields) as reply:
                assert reply.status == 500
                check_error((await reply.json())["error"], "engine_dead", reply.headers["X-Request-Id"])
            await asyncio.sleep(1)
            async with session.get(server.url + "/health") as reply:
                assert reply.status == 503
                assert (await reply.json())["error"]["code"] == "dead"
        server.process.terminate()
        assert await server.process.wait() == 0


@pytest.mark.parametrize("hang", ["python", "gil"])
async def test_a_second_signal_ends_a_process_whose_loop_hangs(hang: str) -> None:
    async with process(FAKE, "--hang", hang) as server:
        await server.read_log("ready on")
        await asyncio.sleep(1)
        server.process.terminate()
        await asyncio.sleep(0.5)
        assert server.process.returncode is None
        server.process.terminate()
        assert await server.process.wait() == -signal.SIGTERM


@contextlib.asynccontextmanager
async def unread(*options: str):
    """A server whose stderr is a pipe that nobody reads once it is ready, and the pipe's end."""
    reader, writer = os.pipe()
    pipe = os.fdopen(reader, "rb", buffering=0)
    command = [*FAKE, *options]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = await asyncio.create_subprocess_exec(*command, stderr=writer, env=env)
    os.close(writer)
    try:
        log = b""
        while b"ready on" not in log:
            log += await asyncio.to_thread(pipe.read, 65536)
        match = re.search(rb"ready on (http://\S+)", log)
        assert match is not None
        yield Process(child, match[1].decode()), pipe
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
        pipe.close()


async def disconnect(url: str, count: int) -> None:
    """Let so many clients leave in mid-stream; the server logs each."""
    host, port = url.removeprefix("http://").split(":")
    for _ in range(count):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(raw_post(COMPLETIONS, LONG))
        await reader.readuntil(b"\n\n")
        writer.transport.abort()
        writer.close()


async def test_a_log_that_nobody_reads_holds_up_nobody() -> None:
    async with unread("--step-s", "0.005", "--log-level", "debug", "--chatter", "20000") as (server, pipe):
        await disconnect(server.url, sample_of(600, 200))
        async with aiohttp.ClientSession() as session, session.get(server.url + "/health") as reply:
            assert reply.status == 200

        def read_until(pattern: bytes) -> bytes:
            log = b""
            while not re.search(pattern, log):
                log += pipe.read(65536)
            return log

        log = await asyncio.to_thread(read_until, rb"\d+ lines were dropped")
        kept, dropped = len(re.findall(rb"chatter \d", log)), re.search(rb"(\d+) lines were dropped", log)
        assert dropped is not None
        assert kept + int(dropped[1]) >= 20_000
        server.process.terminate()
        assert b"stopped" in await asyncio.to_thread(read_until, rb"stopped")
        assert await server.process.wait() == 0


async def test_a_log_that_nobody_reads_does_not_keep_the_process_from_its_end() -> None:
    async with unread("--chatter", "20000") as (server, _):
        await disconnect(server.url, 5)
        server.process.terminate()
        assert await server.process.wait() == 0


async def test_repeated_lines_are_limited_and_counted() -> None:
    async with process(FAKE, "--chatter", "3000", "--alike") as server:
        await server.read_log("ready on")
        counted = 0
        while counted < 3000 - sum("chatter: chatter" in line for line in server.log):
            counted += int((await server.read_log(r"left out (\d+) more lines like 'chatter %d'"))[1])
        assert 20 <= sum("chatter: chatter" in line for line in server.log) <= 200
