"""Looking at an engine while it works: what its event loop, its step thread and its device did last, and its blocks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Self

from asyncengine.stats import BlockMap, EngineSnapshot, EngineStats, StepRecord, WakeRecord

if TYPE_CHECKING:
    import asyncio

    from asyncengine.backend import Backend

_WAKES = 256


class WatchMethods(ABC):
    """The engine's method that lets somebody watch it. An engine that nobody watches does none of this work."""

    _loop: asyncio.AbstractEventLoop | None
    _num_watches = 0
    _wakes: deque[WakeRecord]

    @property
    @abstractmethod
    def health(self) -> str:
        """See AsyncEngine."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """See AsyncEngine."""

    @abstractmethod
    def check_loop(self) -> None:
        """See AsyncEngine."""

    @abstractmethod
    def _loaded(self) -> Backend:
        """See AsyncEngine."""

    @abstractmethod
    def _on_wake(self) -> None:
        """See AsyncEngine."""

    def watch(self) -> Watch:
        """Have the engine record what it does, until the watch is closed; it tells with ``snapshot``.

            with engine.watch() as watch:
                ...
                print(watch.snapshot().steps[-1])

        Several may be open at once. Raises EngineClosedError like ``model_info``, and WrongLoopError.
        """
        step_loop = self._loaded().step_loop
        self.check_loop()
        assert self._loop is not None
        if self._num_watches == 0:
            self._wakes = deque(maxlen=_WAKES)
            step_loop.watch(True)
            self._loop.add_reader(step_loop.wake_fd, self._timed_wake)
        self._num_watches += 1
        return Watch(self)

    def _end_watch(self) -> None:
        self._num_watches -= 1
        if self._num_watches == 0 and self.health != "closed":
            step_loop = self._loaded().step_loop
            step_loop.watch(False)
            assert self._loop is not None
            self._loop.add_reader(step_loop.wake_fd, self._on_wake)

    def _timed_wake(self) -> None:
        begun = time.monotonic_ns()
        self._on_wake()
        # Behind the tasks that this woke.
        assert self._loop is not None
        self._loop.call_soon(self._record_wake, begun, time.monotonic_ns())

    def _record_wake(self, begun_ns: int, delivered_ns: int) -> None:
        self._wakes.append(WakeRecord(begun_ns, delivered_ns, time.monotonic_ns()))

    def _snapshot(self, most: int) -> EngineSnapshot:
        step_loop = self._loaded().step_loop
        return EngineSnapshot(
            time_ns=time.monotonic_ns(),
            stats=self.stats(),
            steps=tuple(StepRecord(*fields) for fields in step_loop.last_steps(most)),
            wakes=tuple(self._wakes)[-most:],
            blocks=BlockMap(*step_loop.block_map()),
        )


class Watch:
    """Keeps an engine recording until it is closed, which leaving it as a context manager does."""

    def __init__(self, engine: WatchMethods) -> None:
        """Use ``AsyncEngine.watch``."""
        self._engine: WatchMethods | None = engine

    def snapshot(self, most: int = 64) -> EngineSnapshot:
        """What the engine does now, and its last steps and wake-ups: ``most`` of each, up to 256.

        The map of blocks is of the time of the snapshot before. Raises EngineClosedError like ``model_info``, and
        ValueError once the watch is closed.
        """
        if self._engine is None:
            raise ValueError("the watch is closed")
        return self._engine._snapshot(most)

    def close(self) -> None:
        """Idempotent; also after the engine was closed."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine._end_watch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
