"""Statistics and recent history of an engine: its event loop, its step thread, its device and its blocks."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from asyncengine.api.stats import BlockChange, DebugStats, EngineSnapshot, EngineStats, WakeRecord
from asyncengine.engine.life import Life
from asyncengine.errors import ConfigError

MOST_WAKES = 32
"""Recorded after a snapshot. Each costs the loop another turn, some 5 µs, which shows when its tasks are done."""
_MOST_STEPS = 64


class Snapshots:
    """Statistics and snapshots of an engine. An engine that nobody asks records nothing."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._wakes: deque[WakeRecord] | None = None
        self._wakes_to_record = 0

    def stats(self) -> EngineStats:
        """See ``AsyncEngine.stats``."""
        step_loop = self._life.loaded().step_loop
        return EngineStats.of(step_loop.stats(), step_loop.step_tokens())

    def block_changes(self, most: int) -> list[BlockChange]:
        """See ``AsyncEngine.block_changes``."""
        if not self._life.config.kv_events:
            raise ConfigError("the engine records no changes of its prefix cache: start it with kv_events")
        step_loop = self._life.loaded().step_loop
        self._life.check_loop()
        return [BlockChange()] if step_loop.error else step_loop.block_changes(most)

    def debug_stats(self) -> DebugStats:
        """See ``AsyncEngine.debug_stats``."""
        life, streams = self._life, self._life.requests
        waiting = sum(stream.awaited for stream in streams)
        stats = life.loaded().step_loop.stats()
        return DebugStats.of(stats, life.config.max_num_seqs, len(streams), waiting, life.held_characters)

    def snapshot(self) -> EngineSnapshot:
        """See ``AsyncEngine.snapshot``."""
        step_loop = self._life.loaded().step_loop
        self._life.check_loop()
        if self._wakes is None:
            self._wakes = deque(maxlen=2 * MOST_WAKES)
        snapshot = EngineSnapshot(
            time_ns=time.monotonic_ns(),
            stats=self.stats(),
            steps=tuple(step_loop.last_steps(_MOST_STEPS)),
            wakes=tuple(self._wakes),
            blocks=step_loop.block_map(),
        )
        if self._wakes_to_record == 0:
            self._record(True)
        self._wakes_to_record = MOST_WAKES
        return snapshot

    def _record(self, on: bool) -> None:
        self._life.loaded().step_loop.watch(on)
        self._life.wake_by(self._timed_wake if on else self._life.deliver)

    def _timed_wake(self) -> None:
        begun = time.monotonic_ns()
        self._life.deliver()
        # Behind the tasks that this woke.
        asyncio.get_running_loop().call_soon(self._record_wake, begun, time.monotonic_ns())

    def _record_wake(self, begun_ns: int, delivered_ns: int) -> None:
        if self._wakes is None or self._wakes_to_record == 0 or self._life.health == "closed":
            return
        self._wakes.append(WakeRecord(begun_ns, delivered_ns, time.monotonic_ns()))
        self._wakes_to_record -= 1
        if self._wakes_to_record == 0:
            self._record(False)
