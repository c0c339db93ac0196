"""The memory and the cores of the machine that this process may use."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path


def num_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this platform
        return os.cpu_count() or 1


def total_memory() -> int:
    """Bytes that this process could have if nobody used any: the system's, or its control group's limit."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such control group, or its limit is "max"
            limits.append(int((Path("/sys/fs/cgroup") / limit).read_text()))
    return min(limits)


def available_memory() -> int:
    """Bytes that this process can still use: what the system has to give and the control group allows."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError):  # not Linux
        available = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        limits += [int(available[1]) * 1024] if available else []
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            group = Path("/sys/fs/cgroup")
            limits.append(int((group / limit).read_text()) - int((group / used).read_text()))
        except (OSError, ValueError):  # no such control group, or its limit is "max"
            continue
    return max(0, min(limits))
