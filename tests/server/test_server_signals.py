"""Signals to a server process under load: no client takes what was cut for an answer."""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import dataclass

import pytest

from tests.amounts import sample_of
from tests.server.harness import COMPLETIONS, raw_post
from tests.server.server_process import FAKE, REAL, Process, process

CLIENTS = 40
CUT = "cut"
REFUSED = "refused"


@dataclass
class Load:
    """Clients that send one request after another until they are told to stop, or the server is gone."""

    address: tuple[str, int]
    max_tokens: int
    complete: int = 0
    cut: int = 0
    refused: int = 0
    stop: bool = False

    async def client(self, number: int) -> None:
        while not self.stop:
            fields = {"prompt": "x", "max_tokens": self.max_tokens, "stream": number % 2 == 0, "ignore_eos": True}
            try:
                reader, writer = await asyncio.open_connection(*self.address)
            except OSError:
                return
            try:
                writer.write(raw_post(COMPLETIONS, fields))
                outcome = self._check(await read_answer(reader), number % 2 == 0)
            finally:
                writer.close()
            setattr(self, outcome, getattr(self, outcome) + 1)
            if outcome != "complete":
                return

    async def reach(self, complete: int) -> None:
        """Wait for so many complete answers."""
        while self.complete < complete:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def _check(self, answer: tuple[int, bytes] | None, streamed: bool) -> str:
        """Classify the end of a request; a response that ended cleanly must be whole."""
        if answer is None:
            return CUT
        status, body = answer
        if status == 503:
            assert json.loads(body)["error"]["code"] in ("draining", "closed", "aborted")
            return REFUSED
        assert status == 200, body
        if streamed:
            *events, done, rest = body.decode().split("\n\n")
            assert (done, rest) == ("data: [DONE]", "")
            choices = [json.loads(e.removeprefix("data: "))["choices"][0] for e in events]
            assert choices[-1]["finish_reason"] == "length"
        else:
            document = json.loads(body)
            assert document["choices"][0]["finish_reason"] == "length"
            assert document["usage"]["completion_tokens"] == self.max_tokens
        return "complete"


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes] | None:
    """Status and body; None if the connection ends before they do."""
    body = bytearray()
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"transfer-encoding: chunked" in head:
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        else:
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            body += await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        assert b"[DONE]" not in body
        return None
    return int(head.split(b" ")[1]), bytes(body)


def load_on(server: Process, max_tokens: int) -> tuple[Load, asyncio.Future[list[None]]]:
    host, port = server.url.removeprefix("http://").split(":")
    load = Load((host, int(port)), max_tokens)
    return load, asyncio.gather(*(load.client(i) for i in range(CLIENTS)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda n: n.name)
async def test_a_load_is_drained(number: signal.Signals) -> None:
    command, options = (REAL, []) if number == signal.SIGTERM else (FAKE, ["--step-s", "0.005"])
    async with process(command, *options) as server:
        await server.read_log("ready on")
        load, clients = load_on(server, sample_of(50, 25))
        await load.reach(CLIENTS)
        load.stop = True
        server.process.send_signal(number)
        await clients
        assert await server.process.wait() == 0
        assert load.cut == 0  # requests that were admitted are complete, others got 503


async def test_a_drain_that_ends_too_early_cuts_visibly() -> None:
    async with process(FAKE, "--step-s", "0.005", "--shutdown-timeout-s", "0.3") as server:
        await server.read_log("ready on")
        load, clients = load_on(server, 5000)
        await asyncio.sleep(0.5)
        server.process.terminate()
        await clients
        assert await server.process.wait() == 0
        assert (load.complete, load.cut + load.refused) == (0, CLIENTS)


async def test_kill_cuts_visibly_and_the_port_is_free_again() -> None:
    async with process(REAL) as first:
        await first.read_log("ready on")
        load, clients = load_on(first, 50)
        await load.reach(CLIENTS)
        first.process.kill()
        await clients
        assert load.cut > 0
        port = str(load.address[1])
        async with process(FAKE, "--port", port) as second:
            assert second.url == first.url
            await second.read_log("ready on")
            load, clients = load_on(second, 5)
            await load.reach(CLIENTS)
            load.stop = True
            await clients
            assert load.cut == load.refused == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", [FAKE, REAL], ids=["fake", "real"])
async def test_a_stopped_process_goes_on(command: list[str]) -> None:
    options = ["--step-s", "0.005"] if command is FAKE else []
    async with process(command, *options) as server:
        await server.read_log("ready on")
        load, clients = load_on(server, 50)
        for _ in range(3):
            await load.reach(load.complete + CLIENTS // 2)
            server.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.5)
            server.process.send_signal(signal.SIGCONT)
        load.stop = True
        await clients
        assert load.cut == load.refused == 0
        server.process.terminate()
        assert await server.process.wait() == 0
