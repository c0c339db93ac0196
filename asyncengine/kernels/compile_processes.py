"""Processes that compile kernels while an engine starts, where threads would take turns.

Triton holds the interpreter's lock for a sixth of a compilation, and sixteen threads spend most of their time waiting
for it: the 69 kernels of an 8B take them 9 s. Processes leave what they compile in Triton's cache, where this one finds
it. They are forked from one that has imported the kernels and done nothing else, and never see a GPU.

They start where the cache is empty, or when something was not in it. Until they are there, after some 3 s, and wherever
they fail, this process compiles. What is imported here must not take long: torch and Triton come later, while the
processes import them too.
"""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import itertools
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MAX_COMPILATIONS = 16
"""At once: there are some seventy to do."""
_LARGEST = 1 << 17
"""Bytes of a message; a kernel is described by two thousand."""
_COMMAND = (
    "import sys; sys.path[:] = sys.argv[3:]; from asyncengine.kernels.compile_processes import serve; "
    "serve(int(sys.argv[1]), int(sys.argv[2]))"
)

_active: CompileProcesses | None = None


@contextmanager
def compile_processes(count: int) -> Iterator[CompileProcesses | None]:
    """Have kernels compiled by so many processes until this ends, if any have to be; None if it can't be done."""
    global _active
    interpreter = sys.executable and not getattr(sys, "frozen", False)  # a frozen program would start itself
    if count < 2 or _active is not None or not interpreter or not hasattr(socket, "SOCK_SEQPACKET"):
        yield None
        return
    _active = processes = CompileProcesses(min(count, MAX_COMPILATIONS))
    try:
        if _cache_is_empty():
            processes.start()
        yield processes
    finally:
        _active = None
        processes.close()


def _cache_is_empty() -> bool:
    """Triton's, where it is unless somebody says otherwise to Triton itself."""
    home = Path(os.environ.get("TRITON_HOME") or "~").expanduser()
    directory = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    try:
        return next(directory.iterdir(), None) is None
    except OSError:
        return not directory.exists()


def compile_kernel(compile_here: Callable[..., Any], source: Any, **arguments: Any) -> Any:
    """``compile_here(source, **arguments)``, which is ``triton.compile``; it finds what a process has compiled."""
    processes = _active
    if processes is None:
        return compile_here(source, **arguments)
    if processes.ready.is_set():
        processes.compile(source, arguments)
    before = time.time() - 0.02  # the clock that files are dated by may be behind
    compiled = compile_here(source, **arguments)
    if any(os.path.getmtime(path) > before for path in _files(compiled)):  # it was not in the cache
        processes.start()
    return compiled


def _files(compiled: Any) -> list[str]:
    """Those of a kernel in Triton's cache, as far as this Triton tells."""
    return [path for path in getattr(compiled, "metadata_group", {}).values() if os.path.exists(path)]


class CompileProcesses:
    """Processes that share a socket: whichever is idle takes the next kernel from it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[None]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._closed = False
        self._reader = threading.Thread(target=self._read, name="compile-processes", daemon=True)
        self.ready = threading.Event()
        """A process has said that it is there, and none has failed since."""
        self.compiled = 0

    def start(self) -> None:
        """Unless they were started before."""
        with self._lock:
            if self._closed or self._socket is not None:
                return
            try:
                self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    command = [sys.executable, "-c", _COMMAND, str(theirs.fileno()), str(self._count), *sys.path]
                    self._process = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()], start_new_session=True,
                    )  # fmt: skip
            except OSError as e:
                logger.info("kernels are compiled in this process alone: %s", e)
            if self._socket is not None:
                self._reader.start()  # without processes it is at its end at once

    def compile(self, source: Any, arguments: dict[str, Any]) -> None:
        """Wait until a process has compiled it, or could not. Does nothing if none is there, or finds the function."""
        function = source.fn
        module, name = function.fn.__module__, function.fn.__name__
        if module == "__main__" or getattr(sys.modules[module], name, None) is not function:
            return
        number, done = next(self._numbers), Future[None]()
        kernel = type(source), module, name, source.signature, source.constants, source.attrs
        message = pickle.dumps((number, kernel, arguments))
        with self._lock:
            if not self.ready.is_set():
                return
            self._waiting[number] = done
        assert self._socket is not None
        try:
            self._socket.send(message)
        except OSError:  # they are gone, which the reader notices too
            return
        done.result()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        if self._socket is None:
            return
        self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()
        if self._process is not None:
            with suppress(ProcessLookupError):  # a program that ignores SIGCHLD has no dead children
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _read(self) -> None:
        """What processes say: 0 that one is there, else the number of a kernel that one is done with."""
        assert self._socket is not None
        try:
            while message := self._socket.recv(_LARGEST):
                number = int.from_bytes(message)
                if number:
                    self.compiled += 1
                    self._waiting.pop(number).set_result(None)
                else:
                    self.ready.set()
        except OSError:  # reset by one that was killed
            pass
        self.ready.clear()
        with self._lock:
            for done in self._waiting.values():
                done.set_result(None)
            self._waiting.clear()


# ---- in the processes ----


def serve(connection: int, count: int) -> None:
    """Fork so many processes that compile what comes over a socket, until the other end is closed."""
    import_module("asyncengine.runner.device_steps")  # every kernel
    children = [child for _ in range(count) if (child := _fork(connection))]
    os.close(connection)
    for _ in children:
        _, status = os.wait()
        if status:  # killed by what it compiled, say: with all gone, nobody waits for its answer
            os.killpg(0, signal.SIGKILL)


def _fork(connection: int) -> int:
    if child := os.fork():
        return child
    status = 1
    try:
        _work(socket.socket(fileno=connection))
        status = 0
    finally:
        os._exit(status)


def _work(connection: socket.socket) -> None:
    connection.send((0).to_bytes(8))
    while message := connection.recv(_LARGEST):
        number, kernel, arguments = pickle.loads(message)
        try:
            _compile(*kernel, **arguments)
        except Exception:  # the other process tries, too, and raises it
            logger.debug("a kernel does not compile", exc_info=True)
        connection.send(number.to_bytes(8))


def _compile(
    kind: type[Any], module: str, name: str, signature: Any, constants: Any, attrs: Any, **arguments: Any
) -> None:
    import triton

    triton.compile(kind(getattr(import_module(module), name), signature, constants, attrs), **arguments)
