"""Each program of asyncengine.examples runs with the bundled model and prints what it promises."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from openai import OpenAI

import asyncengine.examples

FOLDER = Path(asyncengine.examples.__file__).parent
NAMES = {path.stem for path in FOLDER.glob("[!_]*.py")}
STORY = "Once upon a time there was a little "


def run(name: str, *arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        patch.delitem(sys.modules, f"asyncengine.examples.{name}", raising=False)
        runpy.run_module(f"asyncengine.examples.{name}", run_name="__main__")


def test_batch(capsys: pytest.CaptureFixture[str]) -> None:
    run("batch")
    out, err = capsys.readouterr()
    lines = dict(re.findall(r"^(\d): (.+)", out, re.MULTILINE))
    assert sorted(lines) == list("0123456")
    assert "maximum context length" in lines["6"]
    assert err.splitlines() == [f"{n} results" for n in range(1, 8)]


def test_two_engines(capsys: pytest.CaptureFixture[str]) -> None:
    run("two_engines")
    scores = [float(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert len(scores) == 4
    assert scores == sorted(scores, reverse=True)


def test_logits_processor(capsys: pytest.CaptureFixture[str]) -> None:
    run("logits_processor", "--letters", "eo")
    story = capsys.readouterr().out
    assert len(story) > 20
    assert not set("eEoO") & set(story)


def test_pydantic_model(capsys: pytest.CaptureFixture[str]) -> None:
    run("pydantic_model")
    assert re.fullmatch(r"[A-Z][a-z]+ is a (fox|bear|hen), \d+ years old; friends: [\w, ]+\n", capsys.readouterr().out)


def test_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    run("nearest")
    first, *others = capsys.readouterr().out.splitlines()
    assert first.endswith(" The fox lost her red kite.")
    assert len(others) == 3


def test_fastapi_app() -> None:
    """Under uvicorn: the application's route and the mounted ones share the engine, and SIGTERM ends both."""
    command = [sys.executable, "-m", "asyncengine.examples.fastapi_app", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=FOLDER.parents[1]) as process:
        assert process.stderr is not None
        try:
            log = iter(process.stderr)
            url = next(match[1] for line in log if (match := re.search(r"running on (http://\S+)", line)))
            with urllib.request.urlopen(f"{url}/story?animal=bear") as reply:
                told = reply.read().decode()
            client = OpenAI(base_url=f"{url}/llm/v1", api_key="none")
            options = {"model": "stories", "prompt": f"{STORY}bear", "max_tokens": 40, "temperature": 0}
            text = client.completions.create(**options).choices[0].text
            pieces = [chunk.choices[0].text for chunk in client.completions.create(**options, stream=True)]
            assert text == "".join(pieces) != ""
            assert (STORY + "bear" + text).split()[:8] == told.removeprefix('{"text":"').split()[:8]
            client.close()
        finally:
            process.terminate()
        assert "Application shutdown complete" in "".join(log)


def test_one_that_lacks_a_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, package in (("fastapi_app", "fastapi"), ("pydantic_model", "pydantic")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(SystemExit, match=f"pip install {package}"):
            run(name)


def test_the_list_has_each(capsys: pytest.CaptureFixture[str]) -> None:
    run("__main__")
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[2].rpartition(".")[2] for line in lines} == NAMES
    assert all(len(line) <= 120 for line in lines)
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert tested >= NAMES
    assert max(len((FOLDER / f"{name}.py").read_text().splitlines()) for name in NAMES) <= 60
