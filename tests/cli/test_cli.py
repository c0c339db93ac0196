"""The command line: flags from the configuration, the environment, errors in one line."""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncengine._core import CpuKernels
from asyncengine.api.request import SamplingParams
from asyncengine.cli import flags
from asyncengine.cli.main import main
from asyncengine.cli.parser import COMMANDS
from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError
from asyncengine.server.config import ServerConfig
from asyncengine.testing import SimulatedEngine
from tests.server.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]


def with_fake_engine() -> dict[str, str]:
    """The environment of a process that imports it."""
    return os.environ | {"PYTHONPATH": str(ROOT)}


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
        takes_a_function = field.name == "logits_processor"
        assert (f"--{field.name.replace('_', '-')}" in text) != takes_a_function


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


def test_mappings_are_given_by_entries(capsys: pytest.CaptureFixture[str]) -> None:
    given = parse("--logit-bias", "5=1", "--logit-bias", "7=-2.5", cls=SamplingParams)
    assert given == {"logit_bias": {5: 1.0, 7: -2.5}}
    with pytest.raises(SystemExit):
        parse("--logit-bias", "5", cls=SamplingParams)
    assert "--logit-bias" in capsys.readouterr().err


def test_structures_are_given_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    given = parse("--structured-outputs", '{"regex": "a+"}', cls=SamplingParams)
    assert given == {"structured_outputs": {"regex": "a+"}}
    with pytest.raises(SystemExit):
        parse("--structured-outputs", "[1]", cls=SamplingParams)
    assert "invalid json_object value: '[1]'" in capsys.readouterr().err


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


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """A fake engine in place of the one that generate and chat would load."""
    engine = FakeEngine("Once upon a time.", ends=True)
    for module in ("generate", "chat"):
        monkeypatch.setattr(f"asyncengine.cli.{module}.engine_from", lambda args: engine)
    return engine


def test_generate(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Story: ", "--temperature", "0", "--seed", "3"]) == 0
    assert capsys.readouterr().out == "Story: Once upon a time.\n"
    assert engine.health == "closed"
    ((_, params, _, _),) = engine.submitted
    assert (params.max_tokens, params.temperature, params.seed) == (None, 0, 3)
    engine.health = "ready"
    monkeypatch.setattr("sys.stdin", io.StringIO("piped "))
    assert main(["generate", "-", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out == "piped Once\n"


def test_text_that_a_stream_cannot_encode(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 "), "utf-8"))
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "ascii"))
    assert main(["generate", "-"]) == 0
    assert engine.prompts == ["caf\udce9 "]  # which a real one refuses
    sys.stdout.flush()
    assert written.getvalue() == b"caf? Once upon a time.\n"


def test_chat_over_a_pipe_keeps_the_conversation(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nand then?\n/clear\nagain\n"))
    assert main(["chat", "--system", "Be brief."]) == 0
    assert capsys.readouterr().out == "Once upon a time.\n" * 3
    system = {"role": "system", "content": "Be brief."}
    hello = {"role": "user", "content": "hello"}
    answer = {"role": "assistant", "content": "Once upon a time."}
    assert engine.prompts == [
        [system, hello],
        [system, hello, answer, {"role": "user", "content": "and then?"}],
        [system, {"role": "user", "content": "again"}],
    ]


def test_a_message_that_the_cache_cannot_hold_does_not_end_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated = SimulatedEngine(num_kv_blocks=2)
    monkeypatch.setattr("asyncengine.cli.chat.engine_from", lambda args: simulated)
    monkeypatch.setattr("sys.stdin", io.StringIO("too much" * 9 + "\nhello\n"))
    assert main(["chat"]) == 0
    captured = capsys.readouterr()
    assert "the cache holds 32" in captured.err
    assert len(captured.out.split()) == 32 - len("user: hello\nassistant:")


def test_interrupt_ends_the_answer_and_not_the_chat() -> None:
    code = (
        "import signal, sys, asyncengine.cli.chat as chat, asyncengine.cli.main as m\n"
        "from tests.server import fake_engine\n"
        # Whoever runs the tests in the background has it ignored, and children inherit that.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "chat.engine_from = lambda args: fake_engine.FakeEngine('ab', step_s=0.01, max_model_len=1000000)\n"
        "sys.exit(m.main(['chat']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=with_fake_engine(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"hello\n")
            process.stdin.flush()
            assert process.stdout.read(2) == b"ab"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(b"/clear\n", timeout=20)
        finally:
            process.kill()
    assert set(out) <= set(b"ab")
    assert err == b"\n[interrupted]\n"
    assert process.returncode == 0


@pytest.mark.sampled(5)
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("argv", [["generate", "x"], ["generate", "-"], ["chat"]])
def test_standard_streams_may_be_closed(argv: list[str], closed: str) -> None:
    code = (
        f"import sys, asyncengine.cli.{argv[0]} as command, asyncengine.cli.main as m\n"
        "from tests.server import fake_engine\n"
        "command.engine_from = lambda args: fake_engine.FakeEngine('ab')\n"
        f"sys.exit(m.main({[*argv, '--max-tokens', '2']}))"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code],
        env=with_fake_engine(),
        input=b"hello\n",
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("argv", [["generate", "x"], ["chat"], ["bench", "latency"]])
def test_interrupt_ends_a_start_at_once(argv: list[str]) -> None:
    module = ".".join(["asyncengine.cli", "benchmarks.latency" if argv[0] == "bench" else argv[0]])
    code = (
        f"import asyncio, signal, sys, time, {module} as command, asyncengine.cli.main as m\n"
        "from tests.server import fake_engine\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def load(): print('loading', flush=True); time.sleep(60)\n"
        "class Slow(fake_engine.FakeEngine):\n"
        "    async def start(self): await asyncio.to_thread(load)\n"
        "command.engine_from = lambda args: Slow()\n"
        f"sys.exit(m.main({argv}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=with_fake_engine(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"loading\n"
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=20) == (b"", b"")
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("keywords", [{"port": "80"}, {"port": 80.5}, {"host": None}, {"write_timeout_s": [1]}])
def test_server_configuration_of_wrong_types(keywords: dict[str, Any]) -> None:
    """Wrong types are refused as by EngineConfig: no TypeError of a comparison, and nothing that fails only when it is
    used."""
    with pytest.raises(ConfigError, match=next(iter(keywords))):
        ServerConfig(**keywords)


def test_the_model_is_no_keyword_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="'model'"):
        EngineConfig.from_kwargs("a", {"model": "b"})


def test_port_in_use_is_one_line_without_traceback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("-m", "asyncengine.cli.main", "serve", "--port", str(port))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "in use" in done.stderr.splitlines()[-1]


def test_help_and_server_import_nothing_heavy() -> None:
    code = (
        "import sys, contextlib, asyncengine.cli.main as m, asyncengine.server.http_server\n"
        "with contextlib.suppress(SystemExit): m.main(['serve', '--help'])\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
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
    kernels = CpuKernels(1)
    assert facts["CPU kernels"].strip() == f"{kernels.isa}, for blocks of GGUF {kernels.block_kernels}"
