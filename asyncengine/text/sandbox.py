"""The engine's end of a process that runs sandbox_program.py. It starts the process, gives it work, and ends it when it
takes too long.

No task, thread or asyncio transport is involved: the process is a state machine of callbacks on one event loop, which
works the same on every loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import marshal
import os
import socket
import subprocess
import sys
import time
import weakref
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncengine.api.request import LONG_TEXT, Kept
from asyncengine.errors import EngineClosedError, EngineError, InvalidRequestError
from asyncengine.text import sandbox_program, tool_turns
from asyncengine.text.awake import AwakeTimer

_PROGRAM = Path(sandbox_program.__file__).resolve()
_MEMORY_BYTES = 1 << 30
_PER_TOKENIZER_BYTE = 16
"""Memory that ``tokenizers`` takes for a byte of tokenizer.json, at most."""
_START_TIMEOUT_S = 60.0
"""A start takes a tenth of a second, and longer on a machine that is busy."""
_END_TIMEOUT_S = 5.0
_SMALL_IN_A_ROW = 8
_CHUNK = 1 << 18
_LOWERED = 8
"""Bytes of a lowered grammar for a character of its text, at most."""
_INHERITED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TZ")
"""Environment variables that the process gets: those the interpreter needs to start, and the time zone."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """A process that compiles grammars, and nothing else: for which vocabulary, and how much one may take."""

    program: str
    """Path of asyncengine.engine.constraints.compiling."""
    vocab_size: int
    ends: list[int]
    processor_s: float
    """Seconds of processor time."""
    memory_bytes: int


@dataclass(eq=False, slots=True)
class _Job:
    message: bytes
    reply_limit: int
    param: str
    subject: str
    """Name of the program that ran, for errors."""
    future: asyncio.Future[bytes]


class SandboxProcess:
    """One process, started when there is work, which does one job after the other; small jobs go first.

    A job that takes longer than ``timeout_s`` fails with InvalidRequestError and takes the process with it; the
    jobs behind it go to a new one. All methods belong to one event loop.
    """

    def __init__(self, tokenizer: str | None, timeout_s: float, grammars: GrammarLimits | None = None) -> None:
        """``tokenizer`` is the text of a tokenizer.json, None where the process only renders templates.

        With ``grammars`` the process only compiles grammars.
        """
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._timeout_s = timeout_s
        self._small: deque[_Job] = deque()
        self._large: deque[_Job] = deque()
        self._small_in_a_row = 0
        self._current: _Job | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: list[subprocess.Popen[bytes]] = []
        self._channel: socket.socket | None = None
        self._ready = False
        self._timer: AwakeTimer | None = None
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()
        self._closed = False
        self.num_starts = 0
        _sandboxes.add(self)

    async def render(self, message: bytes, limit: int) -> str:
        """The text of a template, for a ``render_message`` with the same ``limit``.

        Raises InvalidRequestError, EngineError if no process can be started, TooLongError past ``limit`` characters.
        """
        # A character has at most four bytes, and the last piece of the text may pass the limit.
        tag, body = await self._run(message, 4 * limit + _CHUNK, "messages", "the chat template")
        if tag != sandbox_program.TEXT:
            raise InvalidRequestError("the chat template failed", param="messages")
        try:
            return body.decode(errors="surrogatepass")
        except UnicodeDecodeError as e:
            raise InvalidRequestError(f"the chat template failed: {e}", param="messages") from e

    async def encode(self, text: str, add_special_tokens: bool, limit: int, kept: Kept | None = None) -> list[int]:
        """Token ids of ``text``, or those that are ``kept``. Raises InvalidRequestError, and TooLongError if all are
        wanted and there are far more than ``limit``."""
        truncation = (None,) if kept is None else (kept.count, kept.side)
        message = marshal.dumps(("encode", text, add_special_tokens, limit, *truncation))
        return await self._ids(message, 4 * max(sandbox_program.PIECE, 4 * limit), "prompt")

    async def encode_all(self, texts: Sequence[str], limit: int, param: str) -> list[list[int]]:
        """Token ids of each text, with ``limit`` in all. Raises InvalidRequestError that names ``param``."""
        found = await self._ids(marshal.dumps(("encode_all", list(texts))), limit + len(texts), param)
        words, start = [], 0
        while start < len(found):
            end = start + 1 + found[start]
            words.append(found[start + 1 : end])
            start = end
        return words

    async def _ids(self, message: bytes, limit: int, param: str) -> list[int]:
        ids = array("I")
        tag, body = await self._run(message, 1 + ids.itemsize * limit, param, "the tokenizer")
        if tag != sandbox_program.IDS or len(body) % ids.itemsize:
            raise InvalidRequestError("the tokenizer failed", param=param)
        ids.frombytes(body)
        return ids.tolist()

    async def compile(self, kind: str, source: str) -> tuple[str, int, int]:
        """A grammar in the library's form, and the bytes of its matcher and of a copy. Raises InvalidRequestError."""
        param = "structured_outputs"
        message = marshal.dumps((kind, source))
        reply_limit = _CHUNK + _LOWERED * len(source)
        tag, body = await self._run(message, reply_limit, param, f"{param}: the grammar's compilation")
        if tag == sandbox_program.WRONG:
            raise InvalidRequestError(f"{param}: {body.decode(errors='replace').strip()[:500]}", param=param)
        sizes, lowered = body[: sandbox_program.SIZES.size], body[sandbox_program.SIZES.size :]
        if tag != sandbox_program.GRAMMAR or len(sizes) < sandbox_program.SIZES.size:
            raise InvalidRequestError(f"{param}: the grammar's compilation failed", param=param)
        matcher_bytes, copy_bytes = sandbox_program.SIZES.unpack(sizes)
        return lowered.decode(errors="replace"), matcher_bytes, copy_bytes

    def release(self) -> None:
        """End the process if it has nothing to do; the next job starts another."""
        if self._current is None:
            self._end_process()

    async def aclose(self) -> None:
        """End the process; jobs that wait or run fail with EngineClosedError. Idempotent."""
        self._closed = True
        jobs = [*([self._current] if self._current else []), *self._small, *self._large]
        self._current = None
        self._small.clear()
        self._large.clear()
        self._end_process()
        for job in jobs:
            _fail(job, EngineClosedError("the engine was closed before the request was finished"))
        deadline = time.monotonic() + _END_TIMEOUT_S
        while self._ending and time.monotonic() < deadline:
            self._reap()
            await asyncio.sleep(0.001)

    def __del__(self) -> None:
        if getattr(self, "_process", None) is not None:
            self._end_process()
        for process in getattr(self, "_ending", ()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1.0)

    @property
    def _purpose(self) -> str:
        return "chat templates" if self._grammars is None else "grammars"

    @property
    def _why_ended(self) -> str:
        if self._grammars is None or not self._ready:
            return "ended without an answer, for lack of memory perhaps"
        limits = self._grammars
        memory = f"{limits.memory_bytes >> 20} MiB of memory"
        return f"takes more than {limits.processor_s:g} s of processor time or {memory}"

    # ---- jobs ----

    async def _run(self, message: bytes, reply_limit: int, param: str, subject: str) -> tuple[bytes, bytes]:
        if self._closed:
            raise EngineClosedError("the engine was closed before the request was finished")
        self._loop = asyncio.get_running_loop()
        job = _Job(message, reply_limit, param, subject, self._loop.create_future())
        (self._small if len(message) <= LONG_TEXT else self._large).append(job)
        self._advance()
        try:
            reply = await job.future
        except asyncio.CancelledError:  # it is left out, or finishes unobserved
            job.message = b""
            raise
        finally:
            del job  # an error's traceback has this frame: the job, and its text, would live until the next collection
        tag, body = reply[:1], reply[1:]
        if tag == sandbox_program.TOO_LONG:
            raise sandbox_program.TooLongError(int(body) if body.isdigit() and len(body) < 20 else reply_limit)
        if tag == sandbox_program.FAILED:
            raise InvalidRequestError(f"{subject} failed: {body.decode(errors='replace')}", param=param)
        return tag, body

    def _advance(self) -> None:
        while self._current is None and (job := self._next()) is not None:
            if job.future.done():
                continue
            self._current = job
            if self._ready and self._has_ended():  # killed while it was idle: no job's fault
                self._end_process()
            try:
                if self._process is None:
                    self._start()
                elif self._ready:
                    self._begin()
            except OSError as e:
                self._current = None
                self._end_process()
                _fail(job, EngineError(f"no process could be started for {self._purpose}: {e}"))

    def _has_ended(self) -> bool:
        assert self._channel is not None
        try:
            return not self._channel.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _next(self) -> _Job | None:
        if self._small and (self._small_in_a_row < _SMALL_IN_A_ROW or not self._large):
            self._small_in_a_row += 1
            return self._small.popleft()
        self._small_in_a_row = 0
        return self._large.popleft() if self._large else None

    def _begin(self) -> None:
        assert self._current is not None
        self._set_timer(self._timeout_s)
        self._send(self._current.message)

    def _finish(self, reply: bytes) -> None:
        job, self._current = self._current, None
        self._set_timer(None)
        if job is not None and not job.future.done():
            job.future.set_result(reply)
        self._advance()

    def _lose(self, reason: str) -> None:
        """The process has ended or must: fail its job, and give the others a new one."""
        job, self._current, started = self._current, None, self._ready
        self._end_process()
        if job is not None and not started:
            _fail(job, EngineError(f"the process for {self._purpose} did not start: it {reason}"))
        elif job is not None:
            _fail(job, InvalidRequestError(f"{job.subject} failed: it {reason}", param=job.param))
        self._advance()

    def _set_timer(self, seconds: float | None) -> None:
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None:
            late = functools.partial(self._lose, f"took longer than {seconds:g} s")
            self._timer = AwakeTimer(self._loop, seconds, late)

    # ---- the process ----

    def _start(self) -> None:
        if not sys.executable or getattr(sys, "frozen", False):  # a frozen program would start itself
            raise OSError("there is no Python interpreter to run it; sandbox=False does its work in this process")
        assert self._loop is not None
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_PROGRAM)],
                    stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    env=_environment(), cwd="/", start_new_session=True,
                )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        self._channel, self._ready = ours, False
        self.num_starts += 1
        self._loop.add_reader(ours.fileno(), self._on_readable)
        self._set_timer(_START_TIMEOUT_S)
        settings = {
            "parent": os.getpid(),
            "path": [os.path.abspath(p) for p in sys.path if p],
            "memory_bytes": _MEMORY_BYTES + _PER_TOKENIZER_BYTE * len(self._tokenizer or ""),
            "tokenizer": self._tokenizer,
            "timeout_s": self._timeout_s,
            "tool_turns": os.path.abspath(tool_turns.__file__),
            "grammars": None if self._grammars is None else dataclasses.asdict(self._grammars),
        }
        self._send(marshal.dumps(settings))

    def _end_process(self) -> None:
        """Kill it. The kernel takes a while to free its memory, so it is waited for later."""
        channel, process, self._channel, self._process = self._channel, self._process, None, None
        self._ready = False
        self._unsent.clear()
        self._received = bytearray()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if channel is not None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(channel.fileno())
                self._loop.remove_writer(channel.fileno())
            channel.close()
        if process is not None:
            process.kill()
            self._ending.append(process)
            self._reap()

    def _reap(self) -> None:
        self._ending = [process for process in self._ending if process.poll() is None]
        if self._ending and not self._closed and self._loop is not None and not self._loop.is_closed():
            self._loop.call_later(0.02, self._reap)

    def _send(self, message: bytes) -> None:
        self._unsent += (memoryview(sandbox_program.LENGTH.pack(len(message))), memoryview(message))
        self._on_writable()

    def _on_writable(self) -> None:
        if self._channel is None or self._loop is None:
            return
        try:
            while self._unsent:
                sent = self._channel.send(self._unsent[0])
                self._unsent[0] = self._unsent[0][sent:]
                if not self._unsent[0]:
                    self._unsent.popleft()
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(self._channel.fileno(), self._on_writable)
            return
        except OSError:  # it has ended; reading says so too
            self._unsent.clear()
        self._loop.remove_writer(self._channel.fileno())

    def _on_readable(self) -> None:
        if self._channel is None:
            return
        try:
            data = self._channel.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._lose(self._why_ended)
            return
        self._received += data
        if len(self._received) < sandbox_program.LENGTH.size:
            return
        (length,) = sandbox_program.LENGTH.unpack_from(self._received)
        if length > (self._current.reply_limit if self._current and self._ready else 1):
            self._lose("gave an answer that is too long")
        elif len(self._received) >= sandbox_program.LENGTH.size + length:
            reply = bytes(memoryview(self._received)[sandbox_program.LENGTH.size :][:length])
            self._received = bytearray()
            if self._ready:
                self._finish(reply)
            else:
                self._set_timer(None)
                self._ready = True
                if self._current is not None and not self._current.future.done():
                    self._begin()
                else:  # it was cancelled meanwhile
                    self._current = None
                    self._advance()


def render_message(source: str, variables: Mapping[str, Any], limit: int) -> bytes:
    """Make the message that asks the process to render a Jinja source; at most ``limit`` characters are wanted.

    Raises InvalidRequestError unless ``variables`` are text, numbers, lists and mappings.
    """
    try:
        return marshal.dumps(("render", source, variables, limit))  # type: ignore[arg-type]  # ValueError if it can't
    except ValueError:  # subclasses of the plain types, say, or any mapping
        pass
    try:
        return marshal.dumps(("render", source, _plain(variables), limit))
    except InvalidRequestError:
        raise
    except (RecursionError, ValueError):
        raise InvalidRequestError("messages are nested too deeply", param="messages") from None


def _plain(value: Any) -> Any:
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int(value)
        case float():
            return float(value)
        case Mapping():
            return {_plain(k): _plain(v) for k, v in value.items()}
        case list() | tuple():
            return [_plain(v) for v in value]
    raise InvalidRequestError(
        f"messages must hold text, numbers, lists and mappings, got {type(value).__name__}", param="messages"
    )


def _fail(job: _Job, error: Exception) -> None:
    if not job.future.done():
        job.future.set_exception(error)


def _environment() -> dict[str, str]:
    """No key, path or setting of the program that embeds the engine reaches the process."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return kept | {"TOKENIZERS_PARALLELISM": "false"}  # threads would take memory, and cannot be started there


_sandboxes: weakref.WeakSet[SandboxProcess] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Leave the processes to the parent, in a forked process: they must see the parent's end when it closes or dies."""
    for sandbox_process in list(_sandboxes):
        if sandbox_process._channel is not None:
            sandbox_process._channel.close()
        if sandbox_process._process is not None:
            sandbox_process._process.returncode = 0  # nothing to wait for here
        sandbox_process._channel = sandbox_process._process = None
        sandbox_process._ending.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_to_parent)
