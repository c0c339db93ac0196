"""The Dockerfile and the unit of systemd fit the server: its flags, variables, routes and times.

No image is built here, and no unit is started.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from asyncengine.cli.parser import parse
from asyncengine.server.config import ServerConfig
from tests.server.fake_engine import FakeEngine
from tests.server.harness import serving

ROOT = Path(__file__).resolve().parents[2]
FOLDER = files("asyncengine.server.deploy")


def instructions() -> list[tuple[str, str]]:
    """Name and text of each instruction of the Dockerfile, lines that are continued as one."""
    text = re.sub(r"\\\n", " ", (FOLDER / "Dockerfile").read_text())
    return [(line.split()[0], line.partition(" ")[2]) for line in text.splitlines() if line and line[0] != "#"]


def said(name: str) -> list[str]:
    return [text for instruction, text in instructions() if instruction == name]


def unit() -> dict[str, str]:
    """The unit's settings by name, each of which stands there once."""
    lines = [line for line in (FOLDER / "asyncengine.service").read_text().splitlines() if re.match(r"\w+=", line)]
    found = dict(line.split("=", 1) for line in lines)
    assert len(found) == len(lines)
    return found


def variables(assignments: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(assignments))


def test_the_image_serves_on_every_interface(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [entry] = map(json.loads, said("ENTRYPOINT"))
    assert entry[:3] == ["tini", "--", "asyncengine"]
    for name, value in variables(" ".join(said("ENV"))).items():
        monkeypatch.setenv(name, value)
    args, _ = parse(entry[3:])
    assert (args.host, str(args.port)) == ("0.0.0.0", *said("EXPOSE"))
    assert capsys.readouterr().err == ""  # where unknown variables are named


def test_the_image_is_built_from_files_that_are_there() -> None:
    sources = [word for text in said("COPY") if not text.startswith("--from") for word in text.split()[:-1]]
    assert {"pyproject.toml", "CMakeLists.txt", "csrc", "asyncengine"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
    command = re.search(r"docker build (.*) \.$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    assert command is not None
    assert (ROOT / shlex.split(command[1])[1]).is_file()


def test_the_image_runs_as_a_user_that_owns_the_caches() -> None:
    [user], [volume] = said("USER"), said("VOLUME")
    assert user.isdecimal()
    [made] = [text for text in said("RUN") if "useradd" in text]
    assert f"--uid {user} " in made
    assert made.endswith(f"--owner=asyncengine {volume}")
    caches = [value for name, value in variables(" ".join(said("ENV"))).items() if value.startswith("/")]
    assert caches
    assert all(path.startswith(volume) for path in caches)


@pytest.mark.parametrize(("ready", "code"), [(True, 0), (False, 1)])
async def test_the_check_of_the_image_asks_whether_requests_are_served(ready: bool, code: int) -> None:
    [check] = said("HEALTHCHECK")
    _, *command = json.loads(check[check.index("[") :])
    async with serving(FakeEngine() if ready else None, api_key="secret") as site:
        here = [word.replace("http://127.0.0.1:8000", site.url) for word in command]
        done = await asyncio.to_thread(subprocess.run, [sys.executable, *here], stderr=subprocess.PIPE, check=False)
    assert done.returncode == code
    assert ready or b"HTTP Error 503" in done.stderr


def test_both_give_running_requests_the_time_to_finish() -> None:
    needed = ServerConfig().shutdown_timeout_s + 10
    stop = re.search(r"--stop-timeout (\d+)", (FOLDER / "Dockerfile").read_text())
    assert stop is not None
    assert int(stop[1]) >= needed
    settings = unit()
    assert int(settings["TimeoutStopSec"]) >= needed
    assert settings["KillMode"] == "mixed"  # processes of the engine's own get no SIGTERM
    assert settings["Restart"] == "on-failure"  # exit_on_death: code 1


def test_the_unit_names_a_command_that_parses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = unit()
    program, *words = shlex.split(settings["ExecStart"])
    assert program.endswith("/bin/asyncengine")
    options = tmp_path / "options.toml"
    options.write_text('model = "here"\nport = 80\n')
    for name, value in variables(settings["Environment"]).items():
        monkeypatch.setenv(name, value)
        assert value.startswith(f"%C/{settings['CacheDirectory']}")
    args, _ = parse([str(options) if word.startswith("/") else word for word in words])
    assert (args.model, args.port) == ("here", 80)
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_knows_the_settings_of_the_unit(tmp_path: Path) -> None:
    text = (FOLDER / "asyncengine.service").read_text()
    path = tmp_path / "asyncengine.service"
    path.write_text(text.replace(shlex.split(unit()["ExecStart"])[0], sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
