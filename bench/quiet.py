"""Waiting for a machine that does nothing else, so that figures from a shared one mean something."""

from __future__ import annotations

import time
from pathlib import Path

_IDLE_SHARE = 0.9
_WINDOW_S = 1.0


def wait_for_quiet(limit_s: float) -> bool:
    """Wait until the processors were idle for a second, ``limit_s`` at most; whether they were.

    Linux only: elsewhere it does not wait.
    """
    end = time.monotonic() + limit_s
    while limit_s > 0 and Path("/proc/stat").exists():
        if _idle_share() >= _IDLE_SHARE:
            return True
        if time.monotonic() > end:
            return False
    return False


def _idle_share() -> float:
    before = _jiffies()
    time.sleep(_WINDOW_S)
    after = _jiffies()
    total = sum(after) - sum(before)
    return (after[3] - before[3]) / total if total else 0.0


def _jiffies() -> list[int]:
    return [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
