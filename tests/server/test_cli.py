"""The command line: flags from the configuration, the environment, errors in one line."""

from __future__ import annotations

import argparse
import dataclasses
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncengine.cli import flags
from asyncengine.cli.main import COMMANDS, main
from asyncengine.config import EngineConfig
from asyncengine.request import SamplingParams
from asyncengine.server.config import ServerConfig

ROOT = Path(__file__).parents[2]


def parse(*argv: str, cls: type = EngineConfig) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    flags.add_dataclass(parser, cls, "title")
    args = parser.parse_args(argv)
    flags.read_environment(parser, args)
    return flags.values(args, cls)


@pytest.mark.parametrize("cls", [EngineConfig, ServerConfig, SamplingParams])
def test_every_field_is_a_flag(cls: type, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help", cls=cls)
    text = capsys.readouterr().out
    for field in dataclasses.fields(cls):
        assert f"--{field.name.replace('_', '-')}" in text


def test_only_given_values_are_passed_on() -> None:
    assert parse() == {}
    argv = [
        "--model", "dir", "--dtype", "bfloat16", "--max-model-len", "128", "--step-timeout-s", "1.5",
        "--no-enable-prefix-caching", "--prefill-chunk-size", "none",
    ]  # fmt: skip
    given = parse(*argv)
    assert given == {
        "model": "dir",
        "dtype": "bfloat16",
        "max_model_len": 128,
        "step_timeout_s": 1.5,
        "enable_prefix_caching": False,
        "prefill_chunk_size": None,
    }
    EngineConfig(**given)


def test_sequences_may_be_repeated() -> None:
    assert parse("--stop", "a", "--stop", "b", "--stop-token-ids", "7", cls=SamplingParams) == {
        "stop": ["a", "b"],
        "stop_token_ids": [7],
    }


def test_environment_stands_in_for_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCENGINE_MAX_NUM_SEQS", "8")
    monkeypatch.setenv("ASYNCENGINE_DTYPE", "float32")
    monkeypatch.setenv("ASYNCENGINE_ENABLE_PREFIX_CACHING", "false")
    monkeypatch.setenv("ASYNCENGINE_PREFILL_CHUNK_SIZE", "none")
    assert parse("--dtype", "bfloat16") == {
        "max_num_seqs": 8,
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        "prefill_chunk_size": None,
    }


@pytest.mark.parametrize(
    ("name", "value"), [("MAX_NUM_SEQS", "x"), ("DTYPE", "int4"), ("ENABLE_PREFIX_CACHING", "maybe")]
)
def test_wrong_environment_is_named(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"ASYNCENGINE_{name}", value)
    with pytest.raises(SystemExit) as exit:
        parse()
    assert exit.value.code == 2
    assert f"ASYNCENGINE_{name}: invalid value {value!r}" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name, _, _ in COMMANDS])
def test_help_of_every_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main([name, "--help"])
    assert exit.value.code == 0
    assert f"usage: asyncengine {name}" in capsys.readouterr().out.replace("__main__.py", "asyncengine")


def test_configuration_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "70000"]) == 2
    assert capsys.readouterr().err == "asyncengine: error: port must be in [0, 65535], got 70000\n"
    assert main(["generate", "x", "--temperature", "3"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_port_in_use_is_one_line_without_traceback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("-m", "asyncengine.cli.main", "serve", "--port", str(port))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "in use" in done.stderr.splitlines()[-1]


def test_help_and_server_import_nothing_heavy() -> None:
    code = (
        "import sys, contextlib, asyncengine.cli.main as m, asyncengine.server.runner\n"
        "with contextlib.suppress(SystemExit): m.main(['serve', '--help'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr


def test_collect_env_tells_versions_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASYNCENGINE_API_KEY", "s3cret")
    monkeypatch.setenv("ASYNCENGINE_PORT", "8123")
    assert main(["collect-env"]) == 0
    out = capsys.readouterr().out
    assert "s3cret" not in out
    facts = dict(line.split(":", 1) for line in out.splitlines())
    assert facts["ASYNCENGINE_PORT"].strip() == "8123"
    assert {"python", "torch", "processor", "cores", "native module"} <= facts.keys()
