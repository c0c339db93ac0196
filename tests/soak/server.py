"""The real ``asyncengine serve`` in a process of its own, and its memory and descriptors from outside."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Server:
    """A server that is ready."""

    process: asyncio.subprocess.Process
    address: tuple[str, int]
    log: deque[str]
    """The last lines that it wrote."""

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def resident_mb(self) -> float:
        """Resident memory of the process and of those that it started, in megabytes."""
        return sum(_resident_bytes(pid) for pid in _family(self.process.pid)) / 1e6


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (FileNotFoundError, ProcessLookupError):  # a child that has just ended
        return 0


def _family(pid: int) -> list[int]:
    family = [pid]
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                family += _family(int(child))
    except (FileNotFoundError, ProcessLookupError):
        pass
    return family


@asynccontextmanager
async def serving(*options: str) -> AsyncIterator[Server]:
    """Serve the bundled model on a free port. Afterwards SIGTERM must end it with code 0."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "asyncengine", "serve", "--port", "0", *options),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert child.stderr is not None
    log: deque[str] = deque(maxlen=200)
    reading: asyncio.Task[None] | None = None
    try:
        address: tuple[str, int] | None = None
        async for line in child.stderr:
            log.append(line.decode())
            if match := re.search(r" ready on http://(\S+):(\d+)", log[-1]):
                address = match[1], int(match[2])
                break
        if address is None:
            raise RuntimeError(f"the server did not start:\n{''.join(log)}")
        reading = asyncio.create_task(_read(child.stderr, log))
        yield Server(child, address, log)
        child.terminate()
        async with asyncio.timeout(60):
            if await child.wait() != 0:
                raise RuntimeError(f"the server ended with {child.returncode}:\n{''.join(log)}")
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        if reading is not None:
            await reading


async def _read(stderr: asyncio.StreamReader, log: deque[str]) -> None:
    async for line in stderr:
        log.append(line.decode())
