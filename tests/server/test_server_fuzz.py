"""Bodies and bytes of any kind: an answer in OpenAI's shape or a closed connection, and the canary answers after each.

More raw HTTP is in test_server_connections.py and test_server_departures.py: TLS, wrong versions, lengths that are no
number, length together with chunks, two lengths, folded headers, NUL in a header, pipelining. Compressed bodies are in
test_server_errors.py, large ones in test_server_bodies.py.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.amounts import examples
from tests.server.harness import CHAT, COMPLETIONS, USER
from tests.server.threaded import Threaded, threaded

EXAMPLES = settings(
    max_examples=examples(80),
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
ROUTES = st.sampled_from([COMPLETIONS, CHAT])
TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def server() -> Iterator[Threaded]:
    with threaded(keep_alive_s=1.0, read_timeout_s=1.0) as running:
        yield running


def exchange(server: Threaded, *pieces: bytes) -> tuple[int | None, bytes]:
    """Status (None: closed without an answer) and body of the last response on a connection of its own."""
    received = b""
    with socket.create_connection(server.site.address, timeout=TIMEOUT_S) as sock:
        with contextlib.suppress(ConnectionError):  # it may answer and close before it has read everything
            for piece in pieces:
                sock.sendall(piece)
        with contextlib.suppress(ConnectionError):
            while piece := sock.recv(1 << 16):
                received += piece
    while received.startswith(b"HTTP/1.1 1"):
        received = received.partition(b"\r\n\r\n")[2]
    status = re.match(rb"HTTP/1\.[01] (\d{3}) ", received)
    return int(status[1]) if status else None, received.partition(b"\r\n\r\n")[2]


def head(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", "Connection: close", *headers, "", ""]).encode()


def post(server: Threaded, path: str, body: bytes) -> tuple[int | None, bytes]:
    return exchange(server, head(path, f"Content-Length: {len(body)}"), body)


def check_answer(server: Threaded, status: int | None, body: bytes) -> None:
    """A success, or a client's fault in OpenAI's shape; and the server is well."""
    assert status is not None
    assert status < 500
    if status != 200:
        check_error(body)
    server.check()


def check_error(body: bytes) -> None:
    document = json.loads(body)
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    assert document["error"]["type"] == "invalid_request_error"
    assert document["error"]["message"]


#: With surrogates, which json.dumps escapes, and with numbers of any size.
TEXT = st.text(st.characters(), max_size=20)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5), max_leaves=20
)
NUMBERS = st.sampled_from([-(2**64), -1, -0.0, 0, 1e-320, 0.5, 1, 2**31, 2**53 + 1, 2**63, 2**64, 10**40, 1e308])
VALUES = JSON | NUMBERS | st.lists(NUMBERS, max_size=4) | st.lists(st.lists(NUMBERS, max_size=3), max_size=3)
VALID: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": [300, 301], "max_tokens": 4},
    CHAT: {"messages": USER, "max_tokens": 4},
}
FIELDS = [
    "prompt", "messages", "model", "stream", "stream_options", "n", "best_of", "max_tokens", "max_completion_tokens",
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "include_stop_str_in_output", "priority", "cache_salt", "logit_bias", "logprobs", "tools", "response_format",
    "echo", "suffix", "user", "presence_penalty", "functions", "function_call", "verbosity",
]  # fmt: skip


def encoded(value: object) -> bytes:
    return json.dumps(value).encode()


@EXAMPLES
@given(route=ROUTES, value=JSON)
def test_any_json(server: Threaded, route: str, value: object) -> None:
    check_answer(server, *post(server, route, encoded(value)))


@EXAMPLES
@given(route=ROUTES, field=st.sampled_from(FIELDS), value=VALUES, stream=st.booleans())
def test_a_valid_body_with_one_field_of_anything(
    server: Threaded, route: str, field: str, value: object, stream: bool
) -> None:
    check_answer(server, *post(server, route, encoded(VALID[route] | {"stream": stream, field: value})))


@EXAMPLES
@given(role=VALUES, content=VALUES, part=VALUES)
def test_turns_of_anything(server: Threaded, role: object, content: object, part: object) -> None:
    for turn in ({"role": role, "content": content}, {"role": "user", "content": [{"type": "text", "text": part}]}):
        check_answer(server, *post(server, CHAT, encoded({"messages": [turn], "max_tokens": 2})))


@EXAMPLES
@given(route=ROUTES, data=st.data())
def test_a_valid_body_with_damaged_bytes(server: Threaded, route: str, data: st.DataObject) -> None:
    body = bytearray(encoded(VALID[route]))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    check_answer(server, *post(server, route, bytes(body)))


@EXAMPLES
@given(first=st.binary(max_size=200), second=st.binary(max_size=50))
def test_any_bytes_instead_of_http(server: Threaded, first: bytes, second: bytes) -> None:
    with socket.create_connection(server.site.address, timeout=TIMEOUT_S) as sock:
        sock.sendall(first)
        sock.sendall(second + b"\r\n\r\n")
        with contextlib.suppress(ConnectionError, TimeoutError):
            sock.settimeout(0.05)  # what looks like the beginning of a request is waited for
            received = sock.recv(1 << 16)
            assert not re.match(rb"HTTP/1\.[01] 5(?!05)", received), received
    server.check()


DEEP = 100_000
PROMPT = b'"prompt":[300],"max_tokens":1'
BODIES: dict[str, tuple[bytes, set[int]]] = {
    "arrays, 100,000 deep": (b"[" * DEEP + b"]" * DEEP, {413}),
    "arrays, 100,000 deep, without an end": (b"[" * DEEP, {413}),
    "objects, 100,000 deep, in an unknown field": (
        b'{%b,"user":%b1%b}' % (PROMPT, b'{"a":' * DEEP, b"}" * DEEP), {413}),
    "arrays, 100,000 deep, as the prompt": (b'{"prompt":%b%b}' % (b"[" * DEEP, b"]" * DEEP), {413}),
    "ends of arrays": (b"]" * DEEP, {400}),
    "NUL between tokens": (b'{%b,\0"user":1}' % PROMPT, {400}),
    "NUL in a string": (b'{%b,"user":"\0"}' % PROMPT, {200, 400}),
    "NUL behind the document": (b"{%b}\0" % PROMPT, {400}),
    "an escaped NUL in the prompt": (b'{"prompt":"a\\u0000b","max_tokens":1}', {200}),
    "an escaped NUL in a stop string": (b'{%b,"stop":"\\u0000"}' % PROMPT, {200}),
    "an escaped NUL in the model": (b'{%b,"model":"\\u0000"}' % PROMPT, {200}),
    "a lone high surrogate, escaped": (b'{"prompt":"\\ud800"}', {400}),
    "a lone low surrogate, escaped": (b'{"prompt":"\\udc00x"}', {400}),
    "two high surrogates, escaped": (b'{"prompt":"\\ud800\\ud800"}', {400}),
    "a surrogate in an escaped name": (b'{%b,"\\ud800":1}' % PROMPT, {200, 400}),
    "a surrogate in a stop string": (b'{%b,"stop":"\\udfff"}' % PROMPT, {400}),
    "a surrogate in a salt": (b'{%b,"cache_salt":"\\udfff"}' % PROMPT, {400}),
    "a pair of surrogates": (b'{"prompt":"\\ud83d\\ude00","max_tokens":1}', {200}),
    "a surrogate as bytes": (b'{"prompt":"\xed\xa0\x80"}', {400}),
    "a pair of surrogates as bytes": (b'{"prompt":"\xed\xa0\xbd\xed\xb8\x80"}', {400}),
    "an overlong slash": (b'{"prompt":"\xc0\xaf"}', {400}),
    "a character beyond Unicode": (b'{"prompt":"\xf4\x90\x80\x80"}', {400}),
    "a mark of byte order": (b"\xef\xbb\xbf{%b}" % PROMPT, {400}),
    "UTF-16": ((b"{%b}" % PROMPT).decode().encode("utf-16"), {400}),
    "a field twice, the second right": (b'{"prompt":5,%b}' % PROMPT, {200, 400}),
    "a field twice, the second wrong": (b'{%b,"prompt":5}' % PROMPT, {400}),
    "a field twice, both right": (b'{%b,"max_tokens":2}' % PROMPT, {200}),
    "a field twice, by an escape": (b'{%b,"max_token\\u0073":0}' % PROMPT, {400}),
    "a name of 100,000 characters": (b'{%b,"%b":1}' % (PROMPT, b"a" * DEEP), {200}),
    "100,000 digits": (b'{%b,"seed":%b}' % (PROMPT, b"1" * DEEP), {400}),
    "an exponent without limit": (b'{%b,"temperature":1e%b}' % (PROMPT, b"9" * 1000), {400}),
    "white space alone": (b" \n" * DEEP, {400}),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_strange_bodies(server: Threaded, name: str) -> None:
    body, expected = BODIES[name]
    status, answer = post(server, COMPLETIONS, body)
    assert status in expected, answer
    check_answer(server, status, answer)


GOOD = encoded(VALID[COMPLETIONS])
GZIP = gzip.compress(GOOD)
CHUNKED = "Transfer-Encoding: chunked"
FRAMES: dict[str, tuple[list[bytes], set[int | None]]] = {
    "a length with white space in it": ([head(COMPLETIONS, "Content-Length: 1 0"), GOOD], {400}),
    "a hexadecimal length": ([head(COMPLETIONS, "Content-Length: 0x10"), GOOD], {400}),
    "a length of 30 digits": ([head(COMPLETIONS, "Content-Length: " + "9" * 30), GOOD], {400, 413}),
    "a length beyond 64 bits": ([head(COMPLETIONS, f"Content-Length: {2**64 + len(GOOD)}"), GOOD], {400, 413}),
    "a list of lengths": ([head(COMPLETIONS, f"Content-Length: {len(GOOD)}, {len(GOOD)}"), GOOD], {400}),
    "no length": ([head(COMPLETIONS)], {400}),
    "an empty length": ([head(COMPLETIONS, "Content-Length:"), GOOD], {400}),
    "a length that is too small": ([head(COMPLETIONS, "Content-Length: 5"), GOOD], {400}),
    "a length that is too large": ([head(COMPLETIONS, f"Content-Length: {len(GOOD) + 1}"), GOOD], {408}),
    "chunks, then a length": (
        [head(COMPLETIONS, CHUNKED, f"Content-Length: {len(GOOD)}"), b"0\r\n\r\n", GOOD], {400}),
    "chunked, and something else first": ([head(COMPLETIONS, "Transfer-Encoding: gzip, chunked"), b"0\r\n\r\n"],
                                          {400, 415}),
    "a coding that is unknown": ([head(COMPLETIONS, "Transfer-Encoding: xchunked"), GOOD], {400}),
    "a coding with a trailing character": ([head(COMPLETIONS, "Transfer-Encoding: chunked\x0b"), b"0\r\n\r\n"], {400}),
    "a negative chunk": ([head(COMPLETIONS, CHUNKED), b"-1\r\n\r\n"], {400}),
    "a chunk of 2**64 bytes": ([head(COMPLETIONS, CHUNKED), b"1" + b"0" * 16 + b"\r\n", GOOD], {400, 408, 413}),
    "a chunk with an endless extension": ([head(COMPLETIONS, CHUNKED), b"1;" + b"a" * DEEP], {400, 408, None}),
    "chunks of one byte": (
        [head(COMPLETIONS, CHUNKED), b"".join(b"1\r\n%c\r\n" % byte for byte in GOOD) + b"0\r\n\r\n"], {200}),
    "an end of chunks with a field": ([head(COMPLETIONS, CHUNKED), b"0\r\nA: b\r\n\r\n"], {400}),
    "gzip": ([head(COMPLETIONS, "Content-Encoding: gzip", f"Content-Length: {len(GZIP)}"), GZIP], {415}),
    "gzip twice": ([head(COMPLETIONS, "Content-Encoding: gzip, gzip", f"Content-Length: {len(GZIP)}"), GZIP], {415}),
    "Brotli that is none": ([head(COMPLETIONS, "Content-Encoding: br", f"Content-Length: {len(GOOD)}"), GOOD], {415}),
    "zstd in chunks": ([head(COMPLETIONS, "Content-Encoding: zstd", CHUNKED), b"0\r\n\r\n"], {415}),
    "NUL in the path": ([b"POST /v1/\0 HTTP/1.1\r\nHost: x\r\n\r\n"], {400, 404}),
    "NUL escaped in the path": ([b"GET /v1/models/%00 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"], {404}),
    "a surrogate in the path": ([b"GET /v1/models/\xed\xa0\x80 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"],
                                {400, 404}),
    "headers that stop": ([b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nA"], {None, 408}),
    "a carriage return in a header": ([head(COMPLETIONS, "A: b\rc", f"Content-Length: {len(GOOD)}"), GOOD], {400}),
    "a space before the colon": ([head(COMPLETIONS, f"Content-Length : {len(GOOD)}"), GOOD], {400}),
}  # fmt: skip


@pytest.mark.parametrize("name", FRAMES)
def test_strange_frames(server: Threaded, name: str) -> None:
    pieces, expected = FRAMES[name]
    status, answer = exchange(server, *pieces)
    assert status in expected, (status, answer)
    if status is not None:
        check_answer(server, status, answer)
    server.check()


def test_headers_that_come_slowly_are_timed(server: Threaded) -> None:
    """One byte at a time, each well before the limit: the limit is of all of them together."""
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 1000
    with socket.create_connection(server.site.address, timeout=0.1) as sock:
        sent = 0
        for byte in request[:300]:  # 30 s in all
            try:
                sock.sendall(bytes([byte]))
                sent += 1
                if not sock.recv(1 << 16):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert sent < 200
    server.check()
