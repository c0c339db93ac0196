"""Files of prompts and of OpenAI's batches on the command line."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncengine.cli.main import main
from asyncengine.errors import ConfigError, InvalidRequestError
from tests.server.fake_engine import FakeEngine

PROMPTS = """Once
{"prompt": "two", "custom_id": "b", "max_tokens": 2, "n": 2}

{broken
{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
{"prompt": "", "messages": []}
{"prompt": "x", "temperature": 9}
"""


class Folder:
    """Folder of a command's files."""

    def __init__(self, path: Path) -> None:
        self.source = path / "in.jsonl"
        self.target = path / "out.jsonl"

    def generate(self, *options: str) -> int:
        return main(["generate", "-i", str(self.source), "-o", str(self.target), *options])

    def run_batch(self, *options: str) -> int:
        return main(["run-batch", "-i", str(self.source), "-o", str(self.target), *options])

    def put(self, *lines: dict[str, Any]) -> None:
        self.source.write_text("".join(json.dumps(line) + "\n" for line in lines))

    @property
    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.target.read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """The engine of every command in the test; a command closes it, and the next one finds it ready."""
    engine = FakeEngine("Once upon a time.", ends=True)

    def engine_from(args: object) -> FakeEngine:
        engine.health = "ready"
        return engine

    monkeypatch.setattr("asyncengine.cli.batch.engine_from", engine_from)
    return engine


def test_every_line_gets_a_result_or_an_error(
    folder: Folder, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.source.write_text(PROMPTS)
    assert folder.generate("--temperature", "0.5") == 1
    first, second, broken, chat, both, wrong = folder.results
    assert first.pop("usage")["completion_tokens"] == 18  # to its end, as generate PROMPT goes
    assert first == {"custom_id": 1, "text": "Once upon a time.", "finish_reason": "stop"}
    assert (second["custom_id"], second["text"]) == ("b", "On")
    assert [choice["text"] for choice in second["choices"]] == ["On", "nc"]
    assert broken["custom_id"] == 4
    assert "line 4 is not valid" in broken["error"]["message"]
    assert (chat["custom_id"], chat["text"]) == (5, "Once")
    assert both["error"] == {"message": "either prompt or messages is needed", "code": "invalid_line"}
    assert wrong["custom_id"] == 7
    assert wrong["error"]["param"] == "temperature"
    assert {params.temperature for _, params, _, _ in engine.submitted} == {0.5}
    err = capsys.readouterr().err
    assert "6 of 6 requests have a result, 3 failed\n" in err
    assert "first failure: " in err


def test_log_probabilities_are_in_the_result(folder: Folder, engine: FakeEngine) -> None:
    folder.source.write_text('text\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    assert folder.generate("--logprobs", "2", "--max-tokens", "3") == 0
    completion, chat = folder.results
    assert completion["choices"][0]["logprobs"]["tokens"] == ["O", "n", "c"]
    assert [len(each["top_logprobs"]) for each in chat["choices"][0]["logprobs"]["content"]] == [2, 2, 2]


def test_a_second_run_goes_on_where_the_first_one_ended(
    folder: Folder, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.source.write_text("a\nb\nc\nd\n")
    assert folder.generate() == 0
    a, b, c, d = folder.target.read_text().splitlines(keepends=True)
    engine.prompts.clear()
    for left, missing in (
        (c + a + b[:9], ["b", "d"]),  # torn by the end of the process, in another order
        (a + b + c + d, []),
        (a + b + c + d.rstrip("\n"), ["d"]),
        (a + b + c + "{", ["d"]),
    ):
        folder.target.write_text(left)
        assert folder.generate() == 0
        assert folder.target.read_text() == a + b + c + d
        assert sorted(map(str, engine.prompts)) == missing
        engine.prompts.clear()
    assert "4 of 4 requests have a result, 3 of them in earlier runs, 0 failed" in capsys.readouterr().err


def test_failures_are_counted_again_and_retried_on_request(folder: Folder, engine: FakeEngine) -> None:
    folder.source.write_text("a\nb\nc\n")
    submit = engine.submit

    async def refuse(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if prompt == "b":
            raise InvalidRequestError("not that one", param="prompt")
        return await submit(prompt, *args, **kwargs)

    engine.submit = refuse  # type: ignore[method-assign]
    assert folder.generate() == 1
    engine.submit = submit  # type: ignore[method-assign]
    engine.prompts.clear()
    assert folder.generate() == 1
    assert engine.prompts == []
    assert folder.generate("--retry-failed") == 0
    assert engine.prompts == ["b"]
    assert [result["custom_id"] for result in folder.results] == [1, 2, 3]
    assert all("text" in result for result in folder.results)


def test_so_many_requests_are_in_flight_and_no_more(folder: Folder, engine: FakeEngine) -> None:
    folder.source.write_text("".join(f"prompt {i}\n" for i in range(40)))
    peak = 0
    step = engine.step

    async def watch(*args: Any) -> None:
        nonlocal peak
        peak = max(peak, len(engine.open))
        await step(*args)

    engine.step = watch  # type: ignore[method-assign, assignment]
    assert folder.generate("--max-in-flight", "7") == 0
    assert peak == 7
    assert [result["custom_id"] for result in folder.results] == list(range(1, 41))


def test_what_an_engine_that_dies_had_to_do_is_left_to_the_next_run(
    folder: Folder, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.source.write_text("a\nb\nc\nd\n")
    step = engine.step

    async def die(stream: Any, number: int) -> None:
        if engine.prompts[-1] == "c":
            engine.die()
        await step(stream, number)

    engine.step = die  # type: ignore[method-assign]
    assert folder.generate("--max-in-flight", "1") == 1
    assert [result["custom_id"] for result in folder.results] == [1, 2]
    err = capsys.readouterr().err
    assert "the same command goes on from here" in err
    assert "the engine has failed" in err
    engine.step = step  # type: ignore[method-assign]
    assert folder.generate() == 0
    assert [result["custom_id"] for result in folder.results] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ('{"custom_id": "x", "prompt": "a"}\n{"custom_id": "x", "prompt": "b"}\n', "", "'x' comes twice"),
        ('b\n{"custom_id": 1, "prompt": "b"}\n', "", "1 comes twice"),
        ("a\n", '{"custom_id": 5, "text": "of another file"}\n', "take another file"),
        ("a\n", '{"custom_id": 1, "text": ""}\n{"custom_id": 1, "text": ""}\n', "line 2"),
        ("a\n", "a letter that somebody wrote", "take another file"),
        ("a\n", None, "cannot write"),
    ],
)
def test_files_that_cannot_be_meant(
    source: str, target: str | None, message: str, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.source.write_text(source)
    if target is None:
        folder.target.mkdir()
    else:
        folder.target.write_text(target)
    assert folder.generate() == 2
    assert message in capsys.readouterr().err
    assert target is None or folder.target.read_text() == target


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate"], "a PROMPT, or --input FILE, is needed"),
        (["generate", "m", "x", "-i", "f", "-o", "g"], "exclude each other"),
        (["generate", "x", "-o", "g"], "--output goes with --input"),
        (["generate", "x", "--url", "http://h:1"], "--url goes with --input"),
        (["generate", "-i", "f"], "--output FILE is needed"),
        (["run-batch", "-o", "f"], "--input FILE is needed"),
        (["run-batch", "-i", "/nonexistent", "-o", "g"], "cannot read /nonexistent: No such file"),
        (["run-batch", "-i", __file__, "-o", __file__], "the same file"),
        (["generate", "-i", "f", "-o", "g", "--max-in-flight", "0"], "max_in_flight must be at least 1"),
    ],
)
def test_options_that_do_not_go_together(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_two_processes_do_not_write_one_file(folder: Folder) -> None:
    from asyncengine.cli.jsonl import Results

    with Results(str(folder.target), [1]), pytest.raises(ConfigError, match="another process writes"):
        Results(str(folder.target), [1])


def full_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes ``count`` lines, and then half of one."""
    write, taken = os.write, 0

    def fake(descriptor: int, data: bytes | memoryview) -> int:
        nonlocal taken
        if bytes(data[:1]) != b"{":
            if taken == count:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(descriptor, data)
        if taken == count:
            return write(descriptor, data[: len(data) // 2])
        taken += 1
        return write(descriptor, data)

    monkeypatch.setattr("asyncengine.cli.jsonl.os.write", fake)


@pytest.mark.parametrize("command", ["generate", "run_batch"])
def test_a_full_disk_is_said_and_loses_nothing(
    command: str,
    folder: Folder,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    if command == "generate":
        folder.put(*({"custom_id": f"{i}", "prompt": "a"} for i in range(4)))
    else:
        folder.put(*({"custom_id": f"{i}", "url": "/v1/chat/completions", "body": body} for i in range(4)))
    run = getattr(folder, command)
    with monkeypatch.context() as patched:
        full_after(2, patched)
        assert run("--max-in-flight", "1") == 1
    err = capsys.readouterr().err
    assert "2 of 4 requests have a result" in err
    assert "the same command goes on from here" in err
    assert "error: [Errno 28] cannot write the results: No space left on device" in err
    assert [result["custom_id"] for result in folder.results] == ["0", "1"]
    assert run() == 0
    assert [result["custom_id"] for result in folder.results] == ["0", "1", "2", "3"]


def test_a_disk_without_room_to_order_the_results_keeps_them(
    folder: Folder, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.put(*({"custom_id": f"{i}", "prompt": "a"} for i in range(3)))
    folder.target.write_text('{"custom_id": "2", "text": ""}\n')
    with monkeypatch.context() as patched:
        full_after(3, patched)
        assert folder.generate("--max-in-flight", "1") == 1
    assert "cannot put the results in order: No space left on device" in capsys.readouterr().err
    assert sorted(result["custom_id"] for result in folder.results) == ["0", "1", "2"]
    assert {path.name for path in folder.target.parent.iterdir()} == {"in.jsonl", "out.jsonl"}
    assert folder.generate() == 0
    assert [result["custom_id"] for result in folder.results] == ["0", "1", "2"]


def test_results_go_to_a_regular_file(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.put({"prompt": "a"})
    assert main(["generate", "-i", str(folder.source), "-o", "/dev/full"]) == 2
    assert "a regular file" in capsys.readouterr().err


def test_a_server_that_cannot_be_reached(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.source.write_text("a\n")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert folder.generate("--url", url, "--max-model-len", "64") == 1
    err = capsys.readouterr().err
    assert "without effect, as --url is given: --max-model-len" in err
    assert f"{url} does not say what model it serves" in err
    assert folder.results == []
    assert folder.generate("--url", "ftp://x") == 2
    assert "url must be" in capsys.readouterr().err


def test_a_batch_in_openais_format(folder: Folder) -> None:
    """Through the command and the bundled model."""
    chat = {"model": "stories", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
    folder.put(
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": {"model": "stories", "prompt": "A"}},
        {"custom_id": "wrong", "method": "POST", "url": "/v1/completions", "body": {"model": "other", "prompt": 7}},
        {"custom_id": "get", "method": "GET", "url": "/v1/models", "body": {}},
        {"custom_id": "stream", "method": "POST", "url": "/v1/completions", "body": {"prompt": "A", "stream": True}},
        {"custom_id": "nowhere", "method": "POST", "url": "/v1/nothing", "body": {}},
    )
    command = [sys.executable, "-m", "asyncengine", "run-batch", "-i", str(folder.source), "-o", str(folder.target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "6 of 6 requests have a result, 4 failed" in done.stderr
    results = {result["custom_id"]: result for result in folder.results}
    assert list(results) == ["chat", "text", "wrong", "get", "stream", "nowhere"]
    assert all(result.keys() == {"id", "custom_id", "response", "error"} for result in results.values())
    answer = results["chat"]["response"]
    assert (answer["status_code"], answer["body"]["object"]) == (200, "chat.completion")
    assert answer["body"]["usage"]["completion_tokens"] == 3
    assert answer["request_id"]
    assert results["text"]["response"]["body"]["choices"][0]["finish_reason"] == "length"
    for name, status in (("wrong", 400), ("nowhere", 404)):
        assert results[name]["response"]["status_code"] == status
        assert results[name]["response"]["body"]["error"]["message"]
        assert results[name]["error"] is None
    for name in ("get", "stream"):
        assert results[name]["response"] is None
        assert results[name]["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"custom_id": 7}'])
def test_a_batch_with_a_line_that_no_result_can_be_given_of(
    line: str, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.source.write_text(line)
    assert folder.run_batch() == 2
    assert "line 1 of the input" in capsys.readouterr().err
