"""An HTTP client over plain sockets, which may leave, half-close or stop in the middle of a request."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

Fields = dict[str, Any]
CLIENT_TIMEOUT_S = 120.0


@dataclass
class Answer:
    """A response read to its end."""

    status: int
    content_type: str
    body: bytes
    texts: list[str] = field(default_factory=list)
    """Text of each choice."""
    completion_tokens: int = 0


class WrongAnswerError(AssertionError):
    """An answer that must not be."""


def post(path: str, fields: Fields) -> bytes:
    """A request after which the server closes."""
    return post_bytes(path, json.dumps(fields).encode())


def post_bytes(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: soak\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: soak\r\nConnection: close\r\n\r\n".encode()


async def exchange(address: tuple[str, int], request: bytes, *, half_close: bool = False) -> Answer:
    """Send ``request`` on a connection of its own and read what comes. Raises WrongAnswerError, OSError."""
    async with asyncio.timeout(CLIENT_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(*address, limit=1 << 24)
        try:
            writer.write(request)
            if half_close:
                writer.write_eof()
            return parse(await reader.read(-1))
        finally:
            writer.close()


def parse(received: bytes) -> Answer:
    """One whole response; raises WrongAnswerError for one that was cut."""
    head, end, body = received.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 1"):  # the server probes whether a client that half-closed still waits
        head, end, body = body.partition(b"\r\n\r\n")
    lines = head.decode("latin1").split("\r\n")
    if not end or not lines[0].startswith("HTTP/1."):
        raise WrongAnswerError(f"the response has no head: {received[:200]!r}")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    if headers.get("transfer-encoding") == "chunked":
        body = _joined(body)
    elif len(body) != int(headers["content-length"]):
        raise WrongAnswerError(f"{len(body)} bytes of a body of {headers['content-length']}")
    answer = Answer(int(lines[0].split(" ")[1]), headers["content-type"], body)
    if answer.status == 200 and answer.content_type.startswith("text/event-stream"):
        _read_events(answer)
    elif answer.status == 200 and b'"choices"' in body:
        document = json.loads(body)
        choices = sorted(document["choices"], key=lambda choice: choice["index"])
        answer.texts = [c["message"]["content"] if "message" in c else c["text"] for c in choices]
        answer.completion_tokens = document["usage"]["completion_tokens"]
    return answer


def _joined(body: bytes) -> bytes:
    joined, place = bytearray(), 0
    while True:
        end = body.find(b"\r\n", place)
        if end < 0:
            raise WrongAnswerError("the last chunk is missing")
        size = int(body[place:end], 16)
        place = end + 2 + size + 2
        if size == 0:
            return bytes(joined)
        joined += body[end + 2 : place - 2]


def _read_events(answer: Answer) -> None:
    *events, done, rest = answer.body.decode().split("\n\n")
    if (done, rest) != ("data: [DONE]", ""):
        raise WrongAnswerError(f"the stream ends with {answer.body[-200:]!r}")
    texts: dict[int, str] = {}
    for event in events:
        if event.startswith(":"):
            continue
        chunk = json.loads(event.removeprefix("data: "))
        if chunk.get("usage"):
            answer.completion_tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    answer.texts = [texts[index] for index in sorted(texts)]


async def metric(address: tuple[str, int], name: str) -> float:
    """Sum of a metric's samples."""
    lines = (await exchange(address, get("/metrics"))).body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name)
