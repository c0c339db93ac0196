"""The programs in README.md and in the server's README run as they are written."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

from tests.server.server_process import REAL, process

ROOT = Path(__file__).parents[2]
PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def programs(document: str) -> list[str]:
    return PROGRAM.findall((ROOT / document).read_text())


async def run(program: str, url: str) -> str:
    """Run a program and return its output, with the server's address in place of the one that `make serve` has."""
    assert "http://127.0.0.1:8000" in program or "AsyncEngine" in program
    command = [sys.executable, "-c", program.replace("http://127.0.0.1:8000", url)]
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


async def test_the_embedding_program_of_the_readme() -> None:
    embedding, _ = programs("README.md")
    lines = (await run(embedding, "")).splitlines()
    assert "Usage(prompt_tokens=5, completion_tokens=40" in "".join(lines)
    (answer,) = [line for line in lines if line.endswith("]") and '["' in line]
    assert set(json.loads(answer[answer.index('["') :])) <= {"fox", "bear"}
    assert lines[-1].startswith("prompt This model's maximum context length is 512 tokens")


async def test_the_clients_of_the_documents() -> None:
    _, tools = programs("README.md")
    story = programs("asyncengine/server/README.md")[0]
    async with process(REAL) as server:
        await server.read_log("ready on")
        call, answer = (await run(tools, server.url)).split("\n", 1)
        assert re.fullmatch(r"""Function\(arguments='\{"city": ?".*"\}', name='weather'\)""", call)
        assert answer.strip()
        assert (await run(story, server.url)).strip()
