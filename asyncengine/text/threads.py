"""Threads for long work on text, which nobody waits for: small work is never behind large, and none is joined at exit.

asyncio's default executor is the program's: others would wait behind our texts, and ``asyncio.run`` joins its threads,
so that a signal would end the program only when the last long text is tokenized.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from asyncengine.errors import EngineClosedError

T = TypeVar("T")

SMALL_TEXT = 65536
"""Characters of work that counts as small: it takes some 20 ms."""


class TextThreads:
    """Two daemon threads, started when there is work: one takes work in order of arrival, one takes small work only.

    So a small text waits for small ones alone, and a large one for those that came before it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._small: deque[_Work] = deque()
        self._large: deque[_Work] = deque()
        self._threads: dict[bool, threading.Thread] = {}  # by whether it takes small work only
        self._arrivals = 0
        self._wanted = True
        self._closed = False

    async def run(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """``function(*arguments)``, on a thread, for a text of ``size`` characters.

        Cancelled, it is dropped where it has not begun, and finishes unobserved where it has. Raises
        EngineClosedError if ``close`` comes first.
        """
        if self._closed:
            raise _closed()
        work = _Work(partial(function, *arguments))
        with self._changed:
            self._arrivals += 1
            work.number = self._arrivals
            small = size <= SMALL_TEXT
            (self._small if small else self._large).append(work)
            self._wanted = True
            for small_only in (True, False) if small else (False,):
                if small_only not in self._threads:
                    self._start(small_only)
            self._changed.notify_all()
        try:
            result: T = await asyncio.wrap_future(work.future)
            return result
        except asyncio.CancelledError:
            work.call = None
            raise
        finally:
            del work  # an error's traceback has this frame: the text would live until the next collection

    def release(self) -> None:
        """Let the threads end when they have nothing to do; the next work starts others."""
        with self._changed:
            self._wanted = False
            self._changed.notify_all()

    def close(self) -> None:
        """Fail work that has not begun, and let the threads end. Idempotent."""
        self._closed = True
        with self._changed:
            waiting = [*self._small, *self._large]
            self._small.clear()
            self._large.clear()
        self.release()
        for work in waiting:
            if work.future.set_running_or_notify_cancel():
                work.future.set_exception(_closed())

    def _start(self, small_only: bool) -> None:
        name = "asyncengine-text-small" if small_only else "asyncengine-text"
        thread = threading.Thread(target=self._serve, args=(small_only,), name=name, daemon=True)
        self._threads[small_only] = thread
        thread.start()

    def _serve(self, small_only: bool) -> None:
        while (work := self._wait(small_only)) is not None:
            work.run()
            del work  # it holds the text

    def _wait(self, small_only: bool) -> _Work | None:
        """The next work; None when the thread is to end."""
        with self._changed:
            while True:
                if (work := self._take(small_only)) is not None:
                    return work
                if not self._wanted:
                    del self._threads[small_only]
                    return None
                self._changed.wait()

    def _take(self, small_only: bool) -> _Work | None:
        small, large = self._small, self._large
        if large and not small_only and not (small and small[0].number < large[0].number):
            return large.popleft()
        return small.popleft() if small else None


class _Work:
    """A call to be made."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self.number = 0
        self.call: Callable[[], Any] | None = call
        """The call, which holds the text; None when nobody waits for it any more."""

    def run(self) -> None:
        call = self.call
        if call is None or not self.future.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as e:
            self.future.set_exception(e)
        else:
            self.future.set_result(result)


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine was closed before the request was finished")
