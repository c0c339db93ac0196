"""Services of the command line to its user: it guesses what was meant, completes words and shows a request."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from asyncengine.cli.main import main
from asyncengine.errors import ConfigError
from asyncengine.server.example import example_request
from tests.server.fake_engine import FakeEngine
from tests.server.harness import serving
from tests.server.server_process import REAL, process

NEEDS_CURL = pytest.mark.skipif(shutil.which("curl") is None, reason="the example is a command of curl")


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["serve", "--prot", "80"], "--port"),
        (["serve", "--max-model-length=5"], "--max-model-len"),
        (["generate", "x", "--temprature", "0.5"], "--temperature"),
        (["run-batch", "--ouptut", "x"], "--output"),
        (["bench", "serve", "--num-promtps", "3"], "--num-prompts"),
        (["sevre"], "serve"),
        (["bench", "sevre"], "serve"),
        (["serve", "--dtype", "bflaot16"], "bfloat16"),
    ],
)
def test_a_mistyped_word_gets_the_nearest_one(argv: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(argv)
    assert exit.value.code == 2
    assert capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")


def test_a_word_that_is_near_to_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--qqq"])
    assert capsys.readouterr().err.endswith("asyncengine serve: error: unrecognized arguments: --qqq\n")


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_completion_in_bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a file.jsonl").touch()
    file = tmp_path / "completion"
    cases = {
        "asyncengine ser": ["serve"],
        "asyncengine serve --api-": ["--api-key", "--api-key-file"],
        "asyncengine serve --dtype ": ["auto", "float32", "float16", "bfloat16"],
        "asyncengine serve --port ": [],
        "asyncengine bench ": ["core", "latency", "throughput", "serve", "-h", "--help"],
        "asyncengine bench serve --num-p": ["--num-prompts"],
        "asyncengine run-batch -i a": ["a file.jsonl"],
        "asyncengine completion f": ["fish"],
    }
    calls = "".join(
        f"COMP_WORDS=({' '.join(line.split(' ')[:-1])} '{line.split(' ')[-1]}'); COMP_CWORD={line.count(' ')}\n"
        "_asyncengine; printf '%s|' \"${COMPREPLY[@]}\"; echo\n"
        for line in cases
    )
    file.write_text(script("bash", capsys) + calls)
    done = subprocess.run(["bash", str(file)], cwd=tmp_path, capture_output=True, text=True, timeout=20, check=True)
    assert done.stderr == ""
    assert [line.split("|")[:-1] for line in done.stdout.splitlines()] == [words or [""] for words in cases.values()]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_of_other_shells_parse(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert "max-model-len" in text
    if shutil.which(shell) is not None:
        (tmp_path / "completion").write_text(text)
        subprocess.run([shell, "-n", str(tmp_path / "completion")], timeout=20, check=True)


def test_a_shell_that_there_is_no_script_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["completion", "fihs"])
    assert exit.value.code == 2
    assert "did you mean fish?" in capsys.readouterr().err


class WithoutTokenizer(FakeEngine):  # type: ignore[misc,unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        del self.tokenizer

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(f"there is no {name}")


def plain() -> FakeEngine:
    engine = FakeEngine()
    engine.tokenizer.has_chat_template = False
    return engine


@NEEDS_CURL
@pytest.mark.parametrize(
    ("make", "config", "kind"),
    [
        (FakeEngine, {}, "chat.completion"),
        (plain, {"host": "0.0.0.0"}, "text_completion"),
        (FakeEngine, {"api_key": "s3cret", "served_model_name": 'it\'s "mine"'}, "chat.completion"),
        (FakeEngine, {"uds": "a socket"}, "chat.completion"),
        (WithoutTokenizer, {}, "text_completion"),
    ],
)
async def test_the_example_of_a_request_works(
    make: Any, config: dict[str, Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = make()
    async with serving(engine, **config) as site:
        needs_key = "api_key" in config
        command = example_request(site.url, site.server.app.model_name, engine, needs_key=needs_key)
        assert "s3cret" not in command
        assert ("$ASYNCENGINE_API_KEY" in command) == needs_key
        assert "0.0.0.0" not in command
        assert await answer_of(command, ASYNCENGINE_API_KEY="s3cret") == kind


@NEEDS_CURL
async def test_a_server_that_starts_shows_a_request_that_works() -> None:
    async with process(REAL) as server:
        await server.read_log("a request to try")
        command = (await server.read_log(r"curl .*"))[0]
        assert await answer_of(command) == "chat.completion"


async def answer_of(command: str, **environment: str) -> str:
    """Run a command line and return the kind of object that it prints."""
    child = await asyncio.create_subprocess_shell(
        f"{command} --silent --show-error",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | environment,
    )
    out, err = await child.communicate()
    assert child.returncode == 0, err.decode()
    body = json.loads(out)
    assert body["choices"][0]["finish_reason"] == "length", body
    return str(body["object"])
