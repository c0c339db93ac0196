"""A server process to look at from the outside."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

FAKE = [sys.executable, str(Path(__file__).with_name("serve_fake.py"))]
REAL = [sys.executable, "-m", "asyncengine.cli.main", "serve", "--port", "0"]


@dataclass
class Process:
    """A server process that listens."""

    process: asyncio.subprocess.Process
    url: str
    log: list[str] = field(default_factory=list)

    async def read_log(self, pattern: str) -> re.Match[str]:
        """The first line that matches, among those to come."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log.append(line.decode())
            if match := re.search(pattern, self.log[-1]):
                return match
        raise AssertionError(f"no {pattern!r} in: {''.join(self.log)}")


@asynccontextmanager
async def process(command: list[str], *options: str) -> AsyncIterator[Process]:
    root = Path(__file__).parents[2]
    child = await asyncio.create_subprocess_exec(
        *command,
        *options,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
    )
    server = Process(child, "")
    try:
        server.url = (await server.read_log(r"listening on (http://\S+),"))[1]
        yield server
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()
