"""Threads for callables of the program, any of which may take long or never return."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from asyncengine.api.checks import said
from asyncengine.errors import AsyncEngineError, EngineOverloadedError, InternalError, LogitsProcessorError

TIME_LIMIT_S = 30.0
"""Seconds of one call. A call that takes longer is given up."""
MAX_THREADS = 64
"""Threads of one engine, with those that are stuck in calls that were given up."""
_BASE_THREADS = 2
"""Threads that stay when nothing waits."""
_LOOK_S = 0.1
"""Seconds between two looks at the calls under way. A call that has waited for as long gets a thread of its own."""

Fail = Callable[[AsyncEngineError], None]


class CallableThreads:
    """Makes calls in order of arrival, on daemon threads. Calls that hang take a thread each, and stop no others.

    A call that exceeds TIME_LIMIT_S fails, and one that nobody wants any more is dropped: its thread is left to it and
    ends with it. A thread cannot be ended from outside, so the number of such threads is bounded.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._changed = threading.Condition()
        self._waiting: deque[_Call] = deque()
        self._running: set[_Call] = set()
        self._alive = 0  # threads that take calls
        self._idle = 0  # of these
        self._stuck = 0  # threads in calls that were given up
        self._wanted = True
        self._timer: asyncio.TimerHandle | None = None  # while a call waits or runs

    def submit(self, work: Callable[[], None], fail: Fail, is_wanted: Callable[[], bool]) -> None:
        """Have ``work()`` called; ``fail`` is called in the event loop if it raises or takes too long."""
        with self._changed:
            self._wanted = True
            self._waiting.append(_Call(work, fail, is_wanted))
            if self._idle < len(self._waiting) and self._alive < _BASE_THREADS:
                self._start()
            self._changed.notify()
        if self._timer is None:
            self._timer = self._loop.call_later(_LOOK_S, self._look)

    def check_room(self) -> None:
        """Raises EngineOverloadedError if all threads are stuck."""
        if self._stuck >= MAX_THREADS:
            raise _overloaded()

    def close(self) -> None:
        """Let the threads end, and forget calls that have not begun. Idempotent; ``submit`` starts others."""
        with self._changed:
            self._wanted = False
            self._waiting.clear()
            self._changed.notify_all()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        """One more thread, if there may be one. Holds the lock."""
        if self._alive + self._stuck < MAX_THREADS:
            self._alive += 1
            threading.Thread(target=self._serve, name="asyncengine-logits", daemon=True).start()

    def _look(self) -> None:
        now = time.monotonic()
        failures: list[tuple[Fail, AsyncEngineError]] = []
        with self._changed:
            for call in [call for call in self._running if call.is_over(now)]:
                self._running.discard(call)
                call.given_up = True
                self._alive -= 1
                self._stuck += 1
                message = f"the logits_processor took longer than {TIME_LIMIT_S:g} s for one token"
                failures.append((call.fail, LogitsProcessorError(message)))
            self._waiting = deque(call for call in self._waiting if call.is_wanted())
            # One in place of each that was given up, and one more for each in a slow call: many short calls are no
            # reason for further threads.
            replaced = min(len(self._waiting), _BASE_THREADS - self._alive)
            added = min(self._older(self._waiting, now), self._older(self._running, now))
            for _ in range(max(replaced, added)):
                self._start()
            while self._waiting and (not self._alive or now - self._waiting[0].since > TIME_LIMIT_S):
                failures.append((self._waiting.popleft().fail, _overloaded()))
            goes_on = self._waiting or self._running
            self._timer = self._loop.call_later(_LOOK_S, self._look) if goes_on else None
        for fail, error in failures:
            fail(error)

    def _older(self, calls: Iterable[_Call], now: float) -> int:
        return sum(now - call.since >= _LOOK_S for call in calls)

    def _serve(self) -> None:
        while (call := self._next()) is not None:
            error = call.make()
            with self._changed:
                self._running.discard(call)
                if call.given_up:
                    self._stuck -= 1
                    return
            if error is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(call.fail, error)
            del call, error  # they hold logits, and what the program's exception holds

    def _next(self) -> _Call | None:
        """The next call, which begins; None when the thread is to end."""
        with self._changed:
            while not self._waiting:
                if not self._wanted or self._alive > _BASE_THREADS:
                    self._alive -= 1
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            call = self._waiting.popleft()
            call.since = time.monotonic()
            self._running.add(call)
            return call


class _Call:
    """A call to be made. ``since``: when it came, and then when it began."""

    def __init__(self, work: Callable[[], None], fail: Fail, is_wanted: Callable[[], bool]) -> None:
        self.fail = fail
        self.is_wanted = is_wanted
        self.since = time.monotonic()
        self.given_up = False
        self._work = work

    def is_over(self, now: float) -> bool:
        """Return whether the call has used up its time, which is short when nobody waits for the result."""
        return now - self.since > (TIME_LIMIT_S if self.is_wanted() else _LOOK_S)

    def make(self) -> AsyncEngineError | None:
        if not self.is_wanted():
            return None
        try:
            self._work()
        except AsyncEngineError as e:
            return e
        except BaseException as e:  # the event loop has to hear of it, whatever it is
            return InternalError(f"a call of a logits_processor failed: {said(e)}")
        return None


def _overloaded() -> EngineOverloadedError:
    return EngineOverloadedError(f"{MAX_THREADS} threads are stuck in calls of logits processors that do not return")
