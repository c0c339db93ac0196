"""The Codex CLI: a loop of calls, their results and a final text. It knows /v1/responses alone."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import KEY, ROOT, Server, checkpoint, scripted, serving

CODEX = ROOT / "tests" / "clients" / "node" / "node_modules" / ".bin" / "codex"
CONFIG = """
model_provider = "local"
model_instructions_file = "{instructions}"
[model_providers.local]
name = "local"
base_url = "{url}"
wire_api = "responses"
env_key = "LOCAL_KEY"
request_max_retries = 0
stream_max_retries = 0
"""

pytestmark = pytest.mark.skipif(not CODEX.exists(), reason="npm ci has not been run in tests/clients/node")


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def codex(folder: Path, server: Server, *options: str) -> subprocess.CompletedProcess[str]:
    """One run in a folder of its own."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    (home / "instructions.md").write_text("You are a coding agent.")
    (home / "config.toml").write_text(CONFIG.format(url=server.v1, instructions=home / "instructions.md"))
    command = [str(CODEX), "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", *options, "Make a file."]
    environment = os.environ | {"CODEX_HOME": str(home), "LOCAL_KEY": KEY}
    return subprocess.run(
        command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )


def test_codex_runs_commands_and_reads_their_results(tmp_path: Path) -> None:
    replies = (
        ("Make a file.", call("exec_command", cmd="echo fox-$((40 + 2)) | tee made.txt")),
        ("fox-42", call("multi_agent_v1__close_agent", target="nobody")),
        ("invalid agent id", "<think>Fine.</think>The file says fox-42."),
    )
    with scripted(tmp_path, *replies) as server:
        run = codex(tmp_path, server, "--model", "stories")
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().endswith("The file says fox-42."), run.stdout + run.stderr
    assert (tmp_path / "work" / "made.txt").read_text() == "fox-42\n"


def test_codex_applies_patches_that_are_the_input_of_a_custom_tool(tmp_path: Path) -> None:
    patch = '*** Begin Patch\n*** Add File: made.txt\n+a "fox" \\ 😀\n*** End Patch\n'
    replies = (("Make a file.", call("apply_patch", input=patch)), ("made.txt", "It is done."))
    with scripted(tmp_path, *replies) as server:
        run = codex(tmp_path, server, "--model", "gpt-5.5")
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().endswith("It is done."), run.stdout + run.stderr
    assert (tmp_path / "work" / "made.txt").read_text() == 'a "fox" \\ 😀\n'


def test_codex_is_answered_by_the_bundled_model(tmp_path: Path) -> None:
    """The bundled model calls nothing of its own accord: its first answer is a text, and ends the run.

    So far from what it was trained for it would not end at all, so that some tokens more than its own end it.
    """
    (tmp_path / "model").mkdir()
    model = checkpoint(tmp_path / "model", 32768)
    (model / "generation_config.json").unlink()
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, *range(8, 1024, 20)]}))
    with serving(str(model)) as server:
        run = codex(tmp_path, server, "--model", "stories")
    assert run.returncode == 0, run.stderr
    assert "tokens used" in run.stderr, run.stderr
