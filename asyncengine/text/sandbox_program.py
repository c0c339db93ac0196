"""Programs of strangers, and the process of their own that runs them: chat templates, odd tokenizers and grammars.

A chat template is a program: it may loop for hours, fill the memory, or spend minutes in one operation that holds the
interpreter's lock. A regular expression in a tokenizer may take exponential time, and so may the compilation of a
client's grammar. Only a process can be ended in the middle of one, so this file is also a program:
asyncengine.text.sandbox starts it by its path, in a bare interpreter, and talks to it through a socket that is its
standard input. It imports nothing of asyncengine, so that it starts in a tenth of a second.

Requests are ``marshal`` of our own values. Replies are text or numbers, never objects: the program that ran may have
broken out of Jinja's sandbox and written the reply itself.
"""

from __future__ import annotations

import functools
import json
import marshal
import os
import runpy
import signal
import socket
import struct
import sys
import time
from array import array
from collections.abc import Mapping
from datetime import datetime
from typing import Any

LENGTH = struct.Struct("<Q")
"""Precedes each message: its length in bytes."""
READY, TEXT, IDS, GRAMMAR, WRONG, FAILED, TOO_LONG = b"r", b"t", b"i", b"g", b"w", b"e", b"l"
"""First byte of a reply. FAILED and WRONG go with a message, TOO_LONG with a count of tokens or characters."""
SIZES = struct.Struct("<QQ")
"""Begins a GRAMMAR's reply: the bytes of its matcher and of a copy. The lowered grammar follows."""
PIECE = 65536
"""Characters that are tokenized at a time to see whether a long text fits."""
_MARGIN = 64
"""Tokens beyond those that are wanted, since a text's pieces have others than the whole at their ends."""
_LONGEST_WORD = 1024
_LONGEST_MESSAGE = 4000


class TooLongError(Exception):
    """The text exceeds the limit; ``count`` is a lower bound of its tokens or characters."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> Any:
    """A Jinja template in the environment that chat templates are written for.

    Sandboxed, since a template comes with the model: it reaches no attribute that starts with an underscore
    and changes no value that it was given.
    """
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what the assistant wrote, for training; here it is its content."""

        tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        """json.dumps; Jinja's own filter escapes HTML, which no model expects."""
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def render(source: str, variables: Mapping[str, Any], limit: int | None = None) -> str:
    """The template's text. Raises TooLongError past ``limit`` characters, and whatever the template raises."""
    parts: list[str] = []
    size = 0
    for part in compile_template(source).generate(variables):
        parts.append(part)
        size += len(part)
        if limit is not None and size > limit:
            raise TooLongError(size)
    return "".join(parts)


def failure(error: BaseException) -> str:
    """The message of an exception that a template raised."""
    return (str(error) or type(error).__name__)[:_LONGEST_MESSAGE]


def encode(
    backend: Any,
    text: str,
    add_special_tokens: bool,
    limit: int | None = None,
    kept: int | None = None,
    side: str = "left",
) -> list[int]:
    """Token ids of a text of any length by a ``tokenizers.Tokenizer``, without the interpreter's lock.

    Raises TooLongError if there are far more than ``limit``, before most of them are computed: a tokenizer holds some
    150 bytes for each character. The text's pieces may have a few tokens more than the whole, so a text whose pieces
    nearly fit is tokenized as a whole. With ``kept`` it is truncated instead: ``side`` left keeps the last so many
    tokens, right the first, and no more of a long text is tokenized than they need.
    """
    is_long = limit is not None and len(text) > max(PIECE, 4 * limit)
    if is_long and kept is not None:
        text = _needed(backend, text, kept, side)
    elif is_long and limit is not None:
        count = 0
        for start in range(0, len(text), PIECE):
            count += _count(backend, text[start : start + PIECE])
            if count > _MARGIN + limit * 5 // 4:
                raise TooLongError(count)
    # A single text is encoded under the interpreter's lock, a batch of one is not.
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    if kept is not None:
        ids = ids[-kept:] if side == "left" else ids[:kept]
    return ids


def encode_all(backend: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of short texts, without special tokens and without the interpreter's lock."""
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


def _count(backend: Any, text: str) -> int:
    return len(backend.encode_batch_fast([text], add_special_tokens=False)[0])


def _needed(backend: Any, text: str, kept: int, side: str) -> str:
    """The end or, with ``side`` right, the beginning of ``text`` that has ``kept`` tokens and some more: at the cut
    tokens differ from those of the whole text."""
    size = count = 0
    while size < len(text) and count <= _MARGIN + kept * 5 // 4:
        start = size if side == "right" else max(0, len(text) - size - PIECE)
        count += _count(backend, text[start : start + PIECE] if side == "right" else text[start : len(text) - size])
        size += PIECE
    if side == "right":
        return text[:size]
    start = max(0, len(text) - size)
    # Most tokenizers cut words apart first, at white space.
    return text[max(0, text.rfind(" ", max(0, start - _LONGEST_WORD), start)) or start :]


# ---- the process ----


def main() -> None:
    """Answer one request after the other until the engine closes its end of the socket."""
    channel = socket.socket(fileno=0)
    settings = marshal.loads(_receive(channel) or b"")
    _end_with(settings["parent"])
    _limit(settings["memory_bytes"])
    sys.path[:] = settings["path"]
    tokenizer, compiling, fitted = None, None, None
    if (grammars := settings["grammars"]) is not None:
        compiling = runpy.run_path(grammars["program"])
        tokenizer = compiling["make_tokenizer"](settings["tokenizer"], grammars["vocab_size"], grammars["ends"])
        _limit_growth(grammars["memory_bytes"])
    else:
        import jinja2.sandbox  # noqa: F401  # before the first request, whose time is limited

        fitted = runpy.run_path(settings["tool_turns"])["fitted"]
        if settings["tokenizer"] is not None:
            import tokenizers

            tokenizer = tokenizers.Tokenizer.from_str(settings["tokenizer"])
    _send(channel, READY)
    while request := _receive(channel):
        _limit_time(settings["timeout_s"])
        if compiling is None:
            answer = _answer(tokenizer, fitted, *marshal.loads(request))
        else:
            # The kernel ends the process, wherever it is, after so many seconds of processor time.
            signal.setitimer(signal.ITIMER_PROF, grammars["processor_s"])
            answer = _compile(compiling, tokenizer, *marshal.loads(request))
            signal.setitimer(signal.ITIMER_PROF, 0)
        _send(channel, answer)


def _answer(tokenizer: Any, fitted: Any, task: str, *arguments: Any) -> bytes:
    try:
        if task == "render":
            source, variables, limit = arguments
            return TEXT + render(source, fitted(render, source, variables), limit).encode(errors="surrogatepass")
        if task == "encode_all":
            found = encode_all(tokenizer, *arguments)
            return IDS + array("I", [n for ids in found for n in (len(ids), *ids)]).tobytes()
        return IDS + array("I", encode(tokenizer, *arguments)).tobytes()
    except TooLongError as e:
        return TOO_LONG + str(e.count).encode()
    except BaseException as e:  # a template may raise anything; tokenizers panics with a BaseException
        return FAILED + failure(e).encode(errors="replace")


def _compile(compiling: dict[str, Any], tokenizer: Any, kind: str, source: str) -> bytes:
    try:
        lowered, matcher_bytes, copy_bytes = compiling["try_grammar"](tokenizer, kind, source)
    except ValueError as e:
        return WRONG + failure(e).encode(errors="replace")
    except BaseException as e:  # the library panics with a BaseException
        return FAILED + failure(e).encode(errors="replace")
    text: str = lowered
    return GRAMMAR + SIZES.pack(matcher_bytes, copy_bytes) + text.encode(errors="surrogatepass")


def _receive(channel: socket.socket) -> bytes | None:
    """The next message; None when the engine has closed its end."""
    header = _receive_exactly(channel, LENGTH.size)
    return None if header is None else _receive_exactly(channel, LENGTH.unpack(header)[0])


def _receive_exactly(channel: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = channel.recv_into(view)
        if not count:
            return None
        view = view[count:]
    return bytes(data)


def _send(channel: socket.socket, message: bytes) -> None:
    channel.sendall(LENGTH.pack(len(message)))
    channel.sendall(message)


def _end_with(parent: int) -> None:
    """Have the kernel end this process with its parent: in the middle of a template nobody reads the socket."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def _limit(memory_bytes: int) -> None:
    """Bound this process's memory; it writes no file and starts no other process."""
    try:
        import resource
    except ImportError:  # not on this platform
        return
    for name, value in (("AS", memory_bytes), ("CORE", 0), ("FSIZE", 0), ("NPROC", 0)):
        if (kind := getattr(resource, f"RLIMIT_{name}", None)) is None:
            continue
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (OSError, ValueError):  # macOS refuses some of them
            continue


def _limit_growth(growth_bytes: int) -> None:
    """Bound this process's memory to what it has and ``growth_bytes`` more, where the system says what it has."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            has = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        _limit(has + growth_bytes)


def _limit_time(timeout_s: float) -> None:
    """End this process where a request computes longer and the engine, stopped or killed, cannot do it."""
    try:
        import resource
    except ImportError:
        return
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    seconds = int(time.process_time() + timeout_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard == resource.RLIM_INFINITY else min(seconds, hard), hard))


if __name__ == "__main__":
    main()
