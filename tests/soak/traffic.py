"""Mixed traffic of clients that behave well, badly, or leave."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.soak.http import Answer, Fields, WrongAnswerError, exchange, get, post, post_bytes

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY: Fields = {"temperature": 0}
USAGE: Fields = {"stream": True, "stream_options": {"include_usage": True}}
PROMPTS = [f"{opening} {name}" for opening in ("Once upon a time", "One day", "The fox and") for name in
           ("Tom", "Mia", "a bear", "a girl", "the king", "a bird")]  # fmt: skip

BAD: list[tuple[bytes, int]] = [
    (post_bytes(COMPLETIONS, b"{"), 400),
    (post_bytes(COMPLETIONS, b"[" * 100_000), 413),
    (post_bytes(COMPLETIONS, b'{"prompt": "\\ud800"}'), 400),
    (post_bytes(COMPLETIONS, b'{"prompt": "\xff"}'), 400),
    (post(COMPLETIONS, {"prompt": "x", "n": 0}), 400),
    (post(COMPLETIONS, {"prompt": "x", "n": 10**30}), 400),
    (post(COMPLETIONS, {"prompt": [-1]}), 400),
    (post(COMPLETIONS, {"prompt": ["x"] * 3000}), 400),
    (post(COMPLETIONS, {"prompt": "many words " * 2000}), 400),
    (post(COMPLETIONS, {"prompt": "x" * 500_000}), 400),
    (post(COMPLETIONS, {"prompt": "x", "model": "m" * 100_000}), 400),
    (post(CHAT, {"messages": []}), 400),
    (post(CHAT, {"messages": [{"role": "robot", "content": "x"}]}), 400),
    (post(CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}), 400),
    (get("/nowhere"), 404),
    (get(COMPLETIONS), 405),
    (post("/v1/models", {}), 405),
    (b"HELLO\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: x\r\nA: \0\r\nConnection: close\r\n\r\n", 400),
]

#: Requests of each kind in a hundred.
KINDS = {"stream": 22, "whole": 14, "chat": 8, "chat stream": 8, "n": 8, "token ids": 8, "new token ids": 8,
         "long": 6, "bad": 12, "half-close": 4, "health": 2}  # fmt: skip


class Traffic:
    """Requests by ``clients`` at once. Faults are in ``failures``."""

    def __init__(self, address: tuple[str, int], seed: int, clients: int, leave: float = 0.2) -> None:
        self.requests: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.failures: list[str] = []
        self.num_failures = 0
        self.compared = 0
        self._address = address
        self._leave = leave
        self._first: dict[str, list[str]] = {}
        self._seeds = [f"{seed} {client}" for client in range(clients)]
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    def start(self) -> None:
        """Begin, or go on after ``stop``."""
        self._stopping = False
        self._tasks = [asyncio.create_task(self._client(random.Random(seed))) for seed in self._seeds]
        self._seeds = [seed + " more" for seed in self._seeds]

    async def stop(self) -> None:
        """Let every client finish its request."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _client(self, draw: random.Random) -> None:
        while not self._stopping:
            kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
            leaves = draw.random() < self._leave
            self.requests[f"{kind}, left" if leaves else kind] += 1
            try:
                if leaves:
                    await self._go_away(kind, draw)
                elif kind == "bad":
                    await self._bad(draw)
                else:
                    await self._good(kind, draw)
            except (AssertionError, LookupError, ValueError, OSError) as exc:
                self.num_failures += 1
                failure = f"{kind}: {type(exc).__name__}: {exc}"[:500]
                if len(self.failures) < 20 and failure not in self.failures:
                    self.failures.append(failure)
            await asyncio.sleep(draw.random() * 0.05)

    async def _ask(self, request: bytes, *, half_close: bool = False) -> Answer:
        answer = await exchange(self._address, request, half_close=half_close)
        self.statuses[answer.status] += 1
        return answer

    async def _bad(self, draw: random.Random) -> None:
        request, status = draw.choice(BAD)
        answer = await self._ask(request)
        if answer.status != status:
            raise WrongAnswerError(f"{request[:120]!r} got {answer.status}: {answer.body[:200]!r}")
        if set(json.loads(answer.body)["error"]) != {"message", "type", "param", "code"}:
            raise WrongAnswerError(f"{answer.body[:200]!r} has not the shape of an error")

    async def _good(self, kind: str, draw: random.Random) -> None:
        path, fields = _request(kind, draw)
        answer = await self._ask(_bytes(path, fields), half_close=kind == "half-close")
        if answer.status != 200:
            raise WrongAnswerError(f"{answer.status}: {answer.body[:300]!r}")
        if not fields:
            return
        n = fields.get("n", 1) * (len(fields["prompt"]) if kind == "n" else 1)
        if len(answer.texts) != n:
            raise WrongAnswerError(f"{len(answer.texts)} of {n} choices")
        if fields["ignore_eos"] and answer.completion_tokens != n * fields["max_tokens"]:
            raise WrongAnswerError(f"{answer.completion_tokens} tokens of {n} × {fields['max_tokens']}")
        if kind == "new token ids":
            return
        plain = {name: value for name, value in fields.items() if name not in USAGE}
        first = self._first.setdefault(json.dumps([path, plain]), answer.texts)
        self.compared += first is not answer.texts
        if first != answer.texts:
            raise WrongAnswerError(f"{plain} was answered with {answer.texts!r}, and with {first!r} before")

    async def _go_away(self, kind: str, draw: random.Random) -> None:
        request = draw.choice(BAD)[0] if kind == "bad" else _bytes(*_request(kind, draw))
        if draw.random() < 0.2:
            request = request[: draw.randrange(len(request))]
        elif draw.random() < 0.1:
            request *= 50  # pipelined
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(request)
            if draw.random() < 0.1:
                writer.write_eof()
            async with asyncio.timeout(draw.random() ** 2):
                await reader.readexactly(draw.randrange(1, 5000))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            pass  # it has waited, or read, for as long as it wanted to
        finally:
            if draw.random() < 0.5:
                writer.transport.abort()
            writer.close()


def _bytes(path: str, fields: Fields) -> bytes:
    return post(path, fields) if fields else get(path)


def _request(kind: str, draw: random.Random) -> tuple[str, Fields]:
    """Path and fields; without fields it is a GET. Few kinds of text, so that most answers can be compared."""
    text = draw.choice(PROMPTS)
    fields: dict[str, Any] = GREEDY | {"max_tokens": draw.choice((8, 24, 60)), "ignore_eos": draw.random() < 0.5}
    streamed = USAGE if draw.random() < 0.5 else {}
    match kind:
        case "health":
            return draw.choice(("/health", "/v1/models", "/metrics")), {}
        case "chat" | "chat stream":
            turns = [{"role": "user", "content": text}] * draw.choice((1, 3))
            return CHAT, fields | {"messages": turns} | (USAGE if kind == "chat stream" else {})
        case "n":
            prompts = [text, draw.choice(PROMPTS)][: draw.choice((1, 2))]
            return COMPLETIONS, fields | {"prompt": prompts, "n": 3} | streamed
        case "token ids":
            start = draw.randrange(20)
            return COMPLETIONS, fields | {"prompt": list(range(300 + start, 330 + start))} | streamed
        case "new token ids":
            return COMPLETIONS, fields | {"prompt": draw.choices(range(10, 1000), k=draw.randrange(1, 400))} | streamed
        case "long":
            return COMPLETIONS, fields | {"prompt": list(_long(draw.randrange(8)))} | streamed
        case "whole" | "half-close":
            return COMPLETIONS, fields | {"prompt": text}
    return COMPLETIONS, fields | {"prompt": text} | USAGE


def _long(number: int) -> Iterator[int]:
    return ((300 + number * 31 + i * 7) % 900 + 20 for i in range(440))
