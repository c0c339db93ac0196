"""Time in which the process runs: limits on work of others are counted in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_S = 0.25
"""Seconds between two looks of a loop that runs. The loop did not see time beyond twice as long."""


class AwakeTimer:
    """Calls ``callback`` once the event loop has run for ``seconds``, unless it is cancelled before.

    Time in which the process is stopped (SIGSTOP), or its machine sleeps, counts for half a second at most: whoever
    is waited for may have been stopped as well, or has answered meanwhile and was not heard.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._left = seconds
        self._callback = callback
        self._looked = loop.time()
        self._handle = loop.call_later(min(seconds, LOOK_S), self._look)

    def cancel(self) -> None:
        self._handle.cancel()

    def _look(self) -> None:
        before, self._looked = self._looked, self._loop.time()
        self._left -= min(self._looked - before, 2 * LOOK_S)
        if self._left <= 0:
            self._callback()
        else:
            self._handle = self._loop.call_later(min(self._left, LOOK_S), self._look)
