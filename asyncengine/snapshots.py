"""Recent history of an engine: its event loop, its step thread and its device, and its blocks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING

from asyncengine.stats import BlockMap, EngineSnapshot, EngineStats, StepRecord, WakeRecord

if TYPE_CHECKING:
    import asyncio

    from asyncengine.backend import Backend

MOST_WAKES = 32
"""Recorded after a snapshot. Each costs the loop another turn, some 5 µs, which shows when its tasks are done."""
_MOST_STEPS = 64


class SnapshotMethods(ABC):
    """The engine's method that tells what it does. An engine that nobody asks records nothing."""

    _loop: asyncio.AbstractEventLoop | None
    _wakes: deque[WakeRecord] | None = None
    _wakes_to_record = 0

    @property
    @abstractmethod
    def health(self) -> str:
        """See AsyncEngine."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """See AsyncEngine."""

    @abstractmethod
    def _check_loop(self) -> None:
        """See AsyncEngine."""

    @abstractmethod
    def _loaded(self) -> Backend:
        """See AsyncEngine."""

    @abstractmethod
    def _on_wake(self) -> None:
        """See AsyncEngine."""

    def snapshot(self) -> EngineSnapshot:
        """Return the counts that the engine holds now, and the recorded times of its last steps and wake-ups.

        Each call has the engine record its next 32 wake-ups, and its steps meanwhile, for the next call to tell: it is
        to be called again and again, about four times a second, and costs nothing once it is not. The map of the blocks
        is of the time of the call before. Raises EngineClosedError like ``model_info``, and WrongLoopError.
        """
        step_loop = self._loaded().step_loop
        self._check_loop()
        if self._wakes is None:
            self._wakes = deque(maxlen=2 * MOST_WAKES)
        snapshot = EngineSnapshot(
            time_ns=time.monotonic_ns(),
            stats=self.stats(),
            steps=tuple(StepRecord(*fields) for fields in step_loop.last_steps(_MOST_STEPS)),
            wakes=tuple(self._wakes),
            blocks=BlockMap(*step_loop.block_map()),
        )
        if self._wakes_to_record == 0:
            self._record(True)
        self._wakes_to_record = MOST_WAKES
        return snapshot

    def _record(self, on: bool) -> None:
        step_loop = self._loaded().step_loop
        step_loop.watch(on)
        assert self._loop is not None
        self._loop.add_reader(step_loop.wake_fd, self._timed_wake if on else self._on_wake)

    def _timed_wake(self) -> None:
        begun = time.monotonic_ns()
        self._on_wake()
        # Behind the tasks that this woke.
        assert self._loop is not None
        self._loop.call_soon(self._record_wake, begun, time.monotonic_ns())

    def _record_wake(self, begun_ns: int, delivered_ns: int) -> None:
        if self._wakes is None or self._wakes_to_record == 0 or self.health == "closed":
            return
        self._wakes.append(WakeRecord(begun_ns, delivered_ns, time.monotonic_ns()))
        self._wakes_to_record -= 1
        if self._wakes_to_record == 0:
            self._record(False)
