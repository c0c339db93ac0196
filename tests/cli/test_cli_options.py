"""Options from other places than the command line, and the command line's words about help and models."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncengine.cli.flags import integer
from asyncengine.cli.main import main
from asyncengine.cli.parser import COMMANDS, parse
from asyncengine.cli.wrap import Wrap


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", 12), ("8k", 8000), ("8K", 8192), ("8Ki", 8192), ("25.6k", 25_600), ("4GiB", 4 * 2**30),
        ("4G", 4 * 2**30), ("4GB", 4 * 10**9), ("1.5MiB", 3 * 2**19), ("2TiB", 2**41), ("-3", -3),
    ],
)  # fmt: skip
def test_integers_may_have_units(text: str, number: int) -> None:
    assert integer(text) == number


@pytest.mark.parametrize("text", ["", "k", "8kk", "1.5", "0.0001k", "8 k", "8X", "-1k", "GiB", "1e3", "٣k"])
def test_no_integers(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|^" + text):
        integer(text)


def options(*argv: str) -> dict[str, Any]:
    return {name: value for name, value in vars(parse(["serve", *argv])[0]).items() if not name.startswith("_")}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def test_a_file_stands_behind_command_line_and_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(
        'model = "from/file"\nmax-model-len = "8k"\nmax_num_seqs = 3\nport = 1\nenable_prefix_caching = false\n'
        'served_model_name = ["a b", "c"]\ntarget_itl_ms = 12.5\nprefill_chunk_size = "none"\n'
    )
    monkeypatch.setenv("ASYNCENGINE_MAX_NUM_SEQS", "2")
    assert options("--port", "4", "--config", str(file)) == {
        "model": "from/file", "max_model_len": 8000, "max_num_seqs": 2, "port": 4, "enable_prefix_caching": False,
        "served_model_name": ["a b", "c"], "target_itl_ms": 12.5, "prefill_chunk_size": None, "config": str(file),
    }  # fmt: skip
    monkeypatch.setenv("ASYNCENGINE_CONFIG", str(file))
    assert options("m")["max_model_len"] == 8000


def test_mappings_and_structures_in_a_file(file: Path) -> None:
    file.write_text('logit_bias = {5 = 1, 7 = -2.5}\nstructured_outputs = {regex = "a+"}\nstop = "x"\n')
    args, _ = parse(["generate", "p", "--config", str(file)])
    assert (args.logit_bias, args.structured_outputs, args.stop) == ({5: 1.0, 7: -2.5}, {"regex": "a+"}, ["x"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("max_modle_len = 5", "unknown key 'max_modle_len'; did you mean max_model_len?"),
        ("help = 1", "unknown key 'help'"),
        ('max_model_len = "x"', "invalid value 'x' for max_model_len"),
        ("max_model_len = true", "invalid value True for max_model_len"),
        ("max_model_len = [1]", "invalid value [1] for max_model_len"),
        ('dtype = "int4"', "invalid value 'int4' for dtype"),
        ("page = 3", "invalid value 3 for page"),
        ("a = ", "is no TOML"),
        ("a = " + "[" * 100_000, "is no TOML"),
        ("#" * (1 << 21), "is longer than"),
    ],
)
def test_wrong_files(text: str, problem: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(text)
    assert main(["serve", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1
    assert str(file) in error


def test_a_file_that_is_not_there(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", str(file)]) == 2
    assert "the configuration file cannot be read" in capsys.readouterr().err


def test_unknown_variables_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ASYNCENGINE_MAX_MODLE_LEN", "5")
    monkeypatch.setenv("ASYNCENGINE_NUM_PROMPTS", "5")  # an option of another command
    monkeypatch.setenv("ASYNCENGINE_CACHE", "/tmp")
    parse(["serve"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "asyncengine: warning: environment variable ASYNCENGINE_MAX_MODLE_LEN is not known; did you mean "
        "ASYNCENGINE_MAX_MODEL_LEN?"
    )


def help_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as exit:
        main([*argv])
    assert exit.value.code == 0
    return capsys.readouterr().out


def test_a_bare_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert help_of(capsys) == help_of(capsys, "--help")


def test_help_is_short_and_says_where_the_rest_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    short, whole = help_of(capsys, "serve", "--help"), help_of(capsys, "serve", "--help=all")
    assert "--max-model-len" in short
    assert "--step-timeout-s" in whole
    assert "--step-timeout-s" not in short
    hidden = whole.count("\n  --") - short.count("\n  --")
    assert f"{hidden} more options: asyncengine serve --help=all" in short
    assert "--port N                     TCP port; 0 takes a free one (default: 8000)\n" in short
    assert "--enable-prefix-caching" in whole.replace("[no-]", "")


BENCHMARKS = [["bench", name] for name in ("core", "latency", "throughput", "serve")]


@pytest.mark.parametrize("command", [[], *([name] for name, _, _ in COMMANDS), *BENCHMARKS], ids=" ".join)
def test_help_fits_a_screen(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = help_of(capsys, *command, "--help").splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80


def test_help_on_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "serve", "--help=kv_cache")
    assert re.findall(r"^  --([\w-]+)", text, re.MULTILINE) == ["kv-cache-memory-bytes", "kv-cache-dtype"]
    assert "fp8 keeps them in float8" in " ".join(text.split())
    assert "MODEL  " not in text
    group = help_of(capsys, "serve", "--help=server")
    assert "--uds-mode" in group
    assert "--dtype" not in group
    with pytest.raises(SystemExit) as exit:
        main(["serve", "--help=nothing-such"])
    assert exit.value.code == 2
    assert "no option has 'nothing-such' in its name" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve"], ["chat"], ["run-batch"], ["costs"], ["plan"], ["bench", "latency"]])
def test_the_model_is_an_argument_or_an_option(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["a"], ["--model", "a"], ["--model", "a", "a"]):
        assert parse([*command, *argv])[0].model == "a"
    assert "model" not in parse(command)[0]
    for argv in (["--model", "b", "a"], ["a", "--model", "b"]):
        with pytest.raises(SystemExit) as exit:
            parse([*command, *argv])
        assert exit.value.code == 2
        assert "two models are given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "model", "prompt"),
    [
        (["p"], None, "p"),
        (["m", "p"], "m", "p"),
        (["m", "--seed", "1", "p"], "m", "p"),
        (["--seed", "1", "m", "p", "--max-tokens", "2"], "m", "p"),
        (["p", "--model", "m"], "m", "p"),
        (["--model", "m", "-"], "m", "-"),
        (["m", "--seed", "1", "-"], "m", "-"),
        (["-i", "f", "-o", "g"], None, None),
        (["m", "-i", "f", "-o", "g"], "m", None),
        (["-i", "f", "-o", "g", "m", "p"], "m", "p"),
    ],
)
def test_generate_tells_model_and_prompt_apart(argv: list[str], model: str | None, prompt: str | None) -> None:
    args, _ = parse(["generate", *argv])
    assert (getattr(args, "model", None), getattr(args, "prompt", None)) == (model, prompt)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["Once", "upon", "a"], "a prompt of several words needs quotes"),
        (["a", "p", "--model", "b"], "two models are given: b and a"),
        (["a", "--seeed", "1", "p"], "unrecognized arguments: --seeed 1 p; did you mean --seed?"),
    ],
)
def test_words_that_generate_cannot_place(argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        parse(["generate", *argv])
    assert exit.value.code == 2
    assert problem in capsys.readouterr().err


def test_the_command_line_names_the_model_before_environment_and_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text('model = "from/file"\n')
    monkeypatch.setenv("ASYNCENGINE_MODEL", "from/environment")
    assert parse(["generate", "m", "p", "--config", str(file)])[0].model == "m"
    assert parse(["generate", "p", "--config", str(file)])[0].model == "from/environment"


def test_a_model_in_place_of_a_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").touch()
    assert main(["generate", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"asyncengine: error: {tmp_path} is a model: a PROMPT is needed behind it, or --input FILE\n"
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("command", [["generate", "p"], ["chat"], ["costs"], ["plan"], ["bench", "latency"]])
def test_a_wrong_model_is_told_before_torch_is_there(command: list[str]) -> None:
    code = (
        "import sys, asyncengine.cli.main as m\n"
        f"assert m.main({[*command, '--model', '/none']}) == 1\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("asyncengine: error: there is no directory '/none'")


@pytest.mark.parametrize("model", ["/there/is/none", "./none", "none/of/these"])
def test_a_wrong_model_is_told_before_the_port_opens(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", model, "--port", "0"]) == 1
    assert capsys.readouterr().err == (
        f"asyncengine: error: there is no directory {model!r}, nor can that be a hub id (owner/name)\n"
    )


def test_a_directory_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path), "--port", "0"]) == 1
    assert capsys.readouterr().err.endswith("has no config.json: it is not a model directory\n")


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "wrapped"),
    [
        ("one two three", "one two\nthree"),
        ("one two  three ", "one two\nthree "),
        ("a longerthantenletters b", "a\nlongerthantenletters\nb"),
        ("one\n two three", "one\n two three"),
        ("一二三四五六", "一二三四五\n六"),
        ("e\u0301" * 10 + " x", "e\u0301" * 10 + "\nx"),
    ],
)
def test_lines_break_between_words(text: str, wrapped: str, size: int) -> None:
    wrap = Wrap(10)
    pieces = [wrap.feed(text[start : start + size]) for start in range(0, len(text), size)]
    assert "".join(pieces) + wrap.flush() == wrapped
