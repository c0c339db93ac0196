"""Requests that cost a server more than they cost whoever sends them, for bench/hostile.py.

Clients are threads with plain sockets: most of their time is the kernel's, which needs neither the interpreter's lock
nor an event loop.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

Address = tuple[str, int]
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TIMEOUT_S = 120.0
LONG_MB = 31
MALFORMED = 5000


@dataclass
class Outcome:
    """Result of a load."""

    statuses: Counter[str] = field(default_factory=Counter)
    """Number of connections that ended with each status; "cut" is a connection that ended without one."""
    seconds: float = 0.0
    """Time from the first byte sent to the last answer."""


Load = Callable[[Address], Outcome]


def request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def completion(body: bytes) -> bytes:
    return request(COMPLETIONS, body)


def status_of(address: Address, data: bytes) -> str:
    """Send, read to the end, return the status code. A server may answer and close before it has read everything."""
    with socket.create_connection(address, timeout=TIMEOUT_S) as sock:
        with suppress(OSError):  # the answer is there, or the connection was cut
            sock.sendall(data)
        return _read_status(sock)


def _read_status(sock: socket.socket) -> str:
    received = b""
    try:
        while piece := sock.recv(1 << 16):
            received += piece[: 4096 - len(received)] if len(received) < 4096 else b""
    except TimeoutError:
        if not received:
            return "no answer"
    except OSError:
        pass
    match = re.match(rb"HTTP/1\.[01] (\d+)", received)
    return match[1].decode() if match else "cut"


def at_once(requests: Sequence[bytes], at_a_time: int) -> Load:
    """Send all, some at a time, each on a connection of its own."""

    def load(address: Address) -> Outcome:
        started = time.perf_counter()
        with ThreadPoolExecutor(at_a_time) as pool:
            statuses = Counter(pool.map(lambda data: status_of(address, data), requests))
        return Outcome(statuses, time.perf_counter() - started)

    return load


def half_sent(data: bytes, connections: int, hold_s: float) -> Load:
    """Send half of a request on each connection, hold them, and leave."""

    def load(address: Address) -> Outcome:
        started, sockets, outcome = time.perf_counter(), [], Outcome()
        try:
            for _ in range(connections):
                sock = socket.create_connection(address, timeout=TIMEOUT_S)
                sockets.append(sock)
                with suppress(OSError):  # refused before it was sent
                    sock.sendall(data[: len(data) // 2])
            time.sleep(hold_s)
            for sock in sockets:
                sock.settimeout(0.2)
                status = _read_status(sock)
                outcome.statuses["waiting" if status == "no answer" else status] += 1
        finally:
            for sock in sockets:
                sock.close()
        outcome.seconds = time.perf_counter() - started
        return outcome

    return load


def _filled(prefix: bytes, item: bytes, count: int, suffix: bytes) -> bytes:
    return prefix + b",".join([item] * count) + suffix


def _malformed() -> list[bytes]:
    posts = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    kinds = [
        b"HELLO\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        posts + b"Content-Length: nine\r\n\r\n",
        posts + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        posts + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        posts + b"A: \0\r\n\r\n",
        completion(b"{"),
        completion(b'{"prompt": "\xff"}'),
        completion(b'{"prompt": "x", "n": 0}'),
    ]
    return [kinds[i % len(kinds)] for i in range(MALFORMED)]


_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def _chat(**fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **fields}).encode()


def _called(arguments: str) -> bytes:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    return _chat(messages=messages)


def _schema_form(schema: object) -> object:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def loads() -> dict[str, Callable[[], Load]]:
    """Return the loads by name; bodies are made when their turn comes, as together they take a gigabyte."""
    size = LONG_MB * 1_000_000
    return {
        "30 MB of one letter": lambda: at_once([completion(b'{"prompt": "%b"}' % (b"a" * 30_000_000))], 1),
        "84 prompts of 4 MB": lambda: at_once([completion(b'{"prompt": "%b"}' % (b"word " * 800_000))] * 84, 84),
        "84 prompts of 4 MB in one alphabet": lambda: at_once(
            [completion(json.dumps({"prompt": chr(0x400 + i) * 2_000_000}, ensure_ascii=False).encode())
             for i in range(84)], 84),
        "31 MB of [] in an unknown field": lambda: at_once(
            [completion(_filled(b'{"prompt": "x", "user": [', b"[]", size // 3, b"]}"))], 1),
        "15 million stop_token_ids": lambda: at_once(
            [completion(_filled(b'{"prompt": "x", "stop_token_ids": [', b"5", 15_000_000, b"]}"))], 1),
        "a million empty messages": lambda: at_once(
            [request(CHAT, _filled(b'{"messages": [', b"{}", 1_000_000, b"]}"))], 1),
        "a million messages without text": lambda: at_once(
            [request(CHAT, _filled(b'{"messages": [', b'{"role":"user"}', 1_000_000, b"]}"))], 1),
        "16,000 short messages, four times": lambda: at_once(
            [request(CHAT, _filled(b'{"messages": [', b'{"role":"user","content":"hi"}', 16_000, b"]}"))] * 4, 4),
        "60 bodies of 31 MB, half sent": lambda: half_sent(completion(b" " * size), 60, 2.0),
        "2,048 prompts × n = 128": lambda: at_once(
            [completion(_filled(b'{"n": 128, "max_tokens": 400, "prompt": [', b'"x"', 2048, b"]}"))], 1),
        "1,024 sequences, three times": lambda: at_once(
            [completion(_filled(b'{"max_tokens": 30, "prompt": [', b'"One day"', 1024, b"]}"))] * 3, 3),
        "1,024 sequences, 16 times": lambda: at_once(
            [completion(_filled(b'{"max_tokens": 30, "prompt": [', b'"One day"', 1024, b"]}"))] * 16, 16),
        "1,000 prompts of 240 token ids, four times": lambda: at_once(
            [completion(json.dumps({"prompt": [[5] * 240] * 1000, "max_tokens": 1}).encode())] * 4, 4),
        "15 MB of [": lambda: at_once([completion(b"[" * 15_000_000)], 1),
        "depth 100,000 in an unknown field": lambda: at_once(
            [completion(b'{"prompt": "x", "user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")] * 50, 8),
        "a model's name of 1 MB": lambda: at_once(
            [completion(b'{"prompt": "x", "model": "%b"}' % (b"m" * 1_000_000))], 1),
        "30 MB of JSON in a call's arguments": lambda: at_once(
            [request(CHAT, _called(json.dumps({"a": [1] * 10_000_000})))], 1),
        "arguments at their limit, four times": lambda: at_once(
            [request(CHAT, _called(json.dumps({"a": [1] * 99_000})))] * 4, 4),
        "arguments nested 5,000 deep": lambda: at_once([request(CHAT, _called('{"a":' * 5000 + "1" + "}" * 5000))], 1),
        "a schema of 10 MB beside tools": lambda: at_once([request(CHAT, _chat(
            tools=[_TOOL], response_format=_schema_form({"enum": ["x" * 100] * 100_000})))], 1),
        "a schema of 15 MB": lambda: at_once([request(CHAT, _chat(guided_json={"enum": ["x" * 60] * 200_000}))], 1),
        "tools of 200,000 values": lambda: at_once([request(CHAT, _chat(tools=[
            {"type": "function", "function": {"name": "f", "parameters": {"enum": [[]] * 220_000}}}]))], 1),
        "27 MB of choices": lambda: at_once(
            [completion(json.dumps({"prompt": "x", "guided_choice": ["x" * 6600] * 4096}).encode())], 1),
        "480,000 allowed tokens × 1,024 prompts": lambda: at_once([completion(json.dumps(
            {"prompt": ["x"] * 1024, "max_tokens": 1, "allowed_token_ids": [i % 1000 for i in range(480_000)]}
        ).encode())], 1),
        "490,000 ids to text": lambda: at_once(
            [request("/detokenize", json.dumps({"tokens": [5] * 490_000}).encode())], 1),
        "128 × 300 × 20 log probabilities": lambda: at_once([request(CHAT, _chat(
            n=128, max_tokens=300, logprobs=True, top_logprobs=20, ignore_eos=True))], 1),
        "a user and a summary of 31 MB, 25 times each": lambda: at_once(
            [request(RESPONSES, json.dumps({"input": "x", **field}).encode())
             for field in ({"user": "u" * size}, {"reasoning": {"summary": "u" * size}})] * 25, 25),
        "5,000 malformed requests": lambda: at_once(_malformed(), 16),
    }  # fmt: skip


#: The loops would take hours; a renderer without a deadline would never come back.
NESTED_LOOPS = "{% for a in range(100000) %}{% for b in range(100000) %}{{ a * b }}{% endfor %}{% endfor %}"


def render_nested_loops() -> Load:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}).encode()
    return at_once([request(CHAT, body)] * 4, 4)
