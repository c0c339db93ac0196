"""A server process from the outside: its log, its signals, its exit codes."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
from pathlib import Path

import aiohttp
import pytest

from tests.server.harness import COMPLETIONS, read_all
from tests.server.server_process import FAKE, REAL, process

HAS_ENGINE = importlib.util.find_spec("asyncengine._core") is not None
SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
ENGINES = pytest.mark.parametrize("command", [FAKE, REAL] if HAS_ENGINE else [FAKE])


@pytest.mark.sampled(3)
@ENGINES
@SIGNALS
async def test_signal_drains(command: list[str], number: signal.Signals) -> None:
    options = ["--step-s", "0.01"] if command is FAKE else []
    async with process(command, *options) as server, aiohttp.ClientSession() as session:
        log = await server.read_log(r"ready on (http://\S+)")
        assert log[1] == server.url
        start_up = "".join(server.log)
        assert re.search(r"asyncengine \S+", start_up)
        assert re.search(r"KV cache: \d+ tokens, [\d.]+ sequences", start_up)
        body = {"prompt": "Once", "max_tokens": 250, "stream": True, "ignore_eos": True}
        async with session.post(server.url + COMPLETIONS, json=body) as reply:
            text = await reply.content.readuntil(b"\n\n")
            server.process.send_signal(number)
            await server.read_log("shutting down")
            if command is FAKE:  # the real engine may have finished by now, and with it the process
                async with session.get(server.url + "/health") as health:
                    assert health.status == 503
                    assert (await health.json())["error"]["code"] == "draining"
            text += await reply.content.read()
        *events, done, _ = text.decode().split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(events[-1].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert await server.process.wait() == 0


async def test_drain_that_takes_too_long_cuts_and_exits_cleanly() -> None:
    async with (
        process(FAKE, "--step-s", "0.01", "--shutdown-timeout-s", "0.2") as server,
        aiohttp.ClientSession() as session,
    ):
        await server.read_log("ready on")
        body = {"prompt": "x", "max_tokens": 90_000, "stream": True}
        async with session.post(server.url + COMPLETIONS, json=body) as reply:
            text = bytearray(await reply.content.readuntil(b"\n\n"))
            server.process.terminate()
            with pytest.raises(aiohttp.ClientPayloadError):
                await read_all(reply.content, text)
        assert b'"error"' in text
        assert b"[DONE]" not in text
        assert await server.process.wait() == 0


async def test_second_signal_ends_at_once() -> None:
    async with process(FAKE, "--step-s", "0.01") as server, aiohttp.ClientSession() as session:
        await server.read_log("ready on")
        body = {"prompt": "x", "max_tokens": 90_000, "stream": True}
        async with session.post(server.url + COMPLETIONS, json=body) as reply:
            await reply.content.readuntil(b"\n\n")
            server.process.terminate()
            await server.read_log("shutting down")
            server.process.terminate()
            assert await server.process.wait() == -signal.SIGTERM


async def test_health_answers_while_the_model_loads() -> None:
    async with process(FAKE, "--load-s", "60") as server, aiohttp.ClientSession() as session:
        async with session.get(server.url + "/health") as reply:
            assert reply.status == 503
            assert (await reply.json())["error"]["code"] == "loading"
        server.process.terminate()
        assert await server.process.wait() == -signal.SIGTERM


def sockets_of(pid: int) -> tuple[set[int], set[int]]:
    """Local ports on which a process listens, and those of its other TCP sockets."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    listening, others = set(), set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                port = int(fields[1].rpartition(":")[2], 16)
                (listening if fields[3] == "0A" else others).add(port)
    return listening, others


async def test_serving_listens_on_one_socket_and_opens_none_outward() -> None:
    async with process(REAL) as server:
        await server.read_log("ready on")
        port = int(server.url.rpartition(":")[2])
        seen: set[int] = set()
        async with aiohttp.ClientSession() as session:
            for path, body in (
                ("/v1/completions", {"prompt": "Once", "max_tokens": 30, "stream": True}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A fox"}], "max_tokens": 30}),
            ):
                async with session.post(server.url + path, json=body) as response:
                    assert response.status == 200
                    seen |= sockets_of(server.process.pid)[1]
                    await response.read()
        listening, others = sockets_of(server.process.pid)
        assert listening == {port}
        assert others | seen <= {port}  # accepted, not opened
