"""Processes that compile kernels while an engine starts, where threads would take turns.

Triton holds the interpreter's lock for a sixth of a compilation, and sixteen threads spend most of their time waiting
for it: the 69 kernels of an 8B take them 9 s. Processes leave what they compile in Triton's cache, where this one finds
it. They are forked from one that has imported the kernels and done nothing else, and never see a GPU.

They start where the cache is empty, or when something was not in it. Until they are there, after some 3 s, and wherever
they fail, this process compiles. Imports here must not take long: torch and Triton come later, while the processes
import them too.
"""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MAX_COMPILATIONS = 16
"""Compilations at once: there are some seventy to do."""
_LARGEST = 1 << 17
"""Bytes of a message; a kernel is described by two thousand."""
_COMMAND = (
    "import sys; sys.path[:] = sys.argv[4:]; from asyncengine.kernels.cuda.launch.compile_processes import serve; "
    "serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
)

_active: CompileProcesses | None = None


@contextmanager
def compile_processes(count: int, kernels: str) -> Iterator[CompileProcesses | None]:
    """Have kernels compiled by so many processes until this ends, if any have to be; None if it can't be done.

    ``kernels`` names the module whose import imports every kernel.
    """
    global _active
    interpreter = sys.executable and not getattr(sys, "frozen", False)  # a frozen program would start itself
    if count < 2 or _active is not None or not interpreter or not hasattr(socket, "SOCK_SEQPACKET"):
        yield None
        return
    _active = processes = CompileProcesses(min(count, MAX_COMPILATIONS), kernels)
    try:
        if _cache_is_empty():
            processes.start()
        yield processes
    finally:
        _active = None
        processes.close()


def _cache_is_empty() -> bool:
    """Triton's, where it is unless somebody says otherwise to Triton itself."""
    home = os.path.expanduser(os.environ.get("TRITON_HOME") or "~")
    directory = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache")
    try:
        return next(directory.iterdir(), None) is None
    except OSError:
        return not directory.exists()


def compile_kernel(compile_here: Callable[..., Any], source: Any, **arguments: Any) -> Any:
    """``compile_here(source, **arguments)``, which is ``triton.compile``; it finds what a process has compiled."""
    processes = _active
    if processes is None:
        return compile_here(source, **arguments)
    processes.compile(source, arguments)
    before = time.time() - 0.02  # the clock that files are dated by may be behind
    compiled = compile_here(source, **arguments)
    if any(os.path.getmtime(path) > before for path in _files(compiled)):  # it was not in the cache
        processes.start()
    return compiled


def _files(compiled: Any) -> list[str]:
    """Return a kernel's files in Triton's cache, as far as this Triton names them."""
    return [path for path in getattr(compiled, "metadata_group", {}).values() if os.path.exists(path)]


class CompileProcesses:
    """Processes that share a socket: whichever is idle takes the next kernel from it.

    A kernel comes with a socket of its own for the answer. Where no process is left to hold that, it is at its end, so
    nobody waits for one that has died.
    """

    def __init__(self, count: int, kernels: str) -> None:
        self._count = count
        self._kernels = kernels
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.compiled = 0

    def start(self) -> None:
        """Start the processes, unless they were started before, or are not wanted any more."""
        with self._lock:
            if self is not _active or self._socket is not None:
                return
            try:
                self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    arguments = [str(theirs.fileno()), str(self._count), self._kernels, *sys.path]
                    self._process = subprocess.Popen(
                        [sys.executable, "-c", _COMMAND, *arguments],
                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()], start_new_session=True,
                    )  # fmt: skip
            except OSError as e:
                logger.info("kernels are compiled in this process alone: %s", e)

    def ready(self, timeout: float = 0) -> bool:
        """Return whether the processes report within ``timeout`` seconds that they are there, and have not all
        ended."""
        if self._socket is None:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return [events for _, events in poll.poll(1000 * timeout)] == [select.POLLIN]  # ended: POLLHUP as well

    def compile(self, source: Any, arguments: dict[str, Any]) -> None:
        """Wait until a process has compiled it, or could not. Does nothing if none is there, or finds the function."""
        function = source.fn
        module, name = function.fn.__module__, function.fn.__name__
        if module == "__main__" or getattr(sys.modules[module], name, None) is not function:
            return
        with suppress(OSError, ValueError):  # they have ended, or been closed by another engine's start
            if not self.ready():
                return
            assert self._socket is not None
            kernel = type(source), module, name, source.signature, source.constants, source.attrs
            answer, theirs = socket.socketpair()
            with answer:
                with theirs:
                    socket.send_fds(self._socket, [pickle.dumps((kernel, arguments))], [theirs.fileno()])
                answered = len(answer.recv(1))
            with self._lock:
                self.compiled += answered

    def close(self) -> None:
        with self._lock:
            connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()
        if self._process is not None:
            with suppress(ProcessLookupError):  # a program that ignores SIGCHLD has no dead children
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


# ---- in the processes ----


def serve(connection: int, count: int, kernels: str) -> None:
    """Fork so many processes that compile what comes over a socket, until the other end is closed."""
    import_module(kernels)
    with socket.socket(fileno=connection) as shared:
        shared.send(b"ready")
        children = [child for _ in range(count) if (child := _fork(shared))]
    for _ in children:
        os.wait()


def _fork(shared: socket.socket) -> int:
    if child := os.fork():
        return child
    try:
        _work(shared)
    finally:
        os._exit(0)


def _work(shared: socket.socket) -> None:
    while (received := socket.recv_fds(shared, _LARGEST, 1))[0]:
        message, [answer], _, _ = received
        kernel, arguments = pickle.loads(message)
        try:
            _compile(*kernel, **arguments)
        except Exception:  # the other process tries, too, and raises it
            logger.debug("a kernel does not compile", exc_info=True)
        with socket.socket(fileno=answer) as theirs:
            theirs.send(b"1")


def _compile(
    kind: type[Any], module: str, name: str, signature: Any, constants: Any, attrs: Any, **arguments: Any
) -> None:
    import triton

    triton.compile(kind(getattr(import_module(module), name), signature, constants, attrs), **arguments)
