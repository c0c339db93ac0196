"""Vercel's AI SDK (JavaScript): loops of ten turns through its OpenAI-compatible provider and OpenAI's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import Server
from walk import ASKED, TURNS, Walk

NODE = Path(__file__).with_name("node")
if shutil.which("node") is None or not (NODE / "node_modules" / "ai").is_dir():
    pytest.skip("needs Node and its packages", allow_module_level=True)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("provider", ["compatible", "chat", "responses"])
def test_a_loop_of_ten_turns(server: Server, provider: str, streams: bool) -> None:
    asked = {
        "baseURL": server.v1, "apiKey": server.key, "model": server.model, "provider": provider, "streams": streams,
        "prompt": ASKED, "turns": TURNS,
    }  # fmt: skip
    command = ["node", "walk.mjs", json.dumps(asked)]
    done = subprocess.run(command, cwd=NODE, capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    Walk(told["places"]).check(told["text"])
    assert told["reasons"] == ["tool-calls"] * TURNS + told["reasons"][-1:]
    assert told["reasons"][-1] in ("stop", "length")
