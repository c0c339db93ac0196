"""A chat on the command line: its commands, texts of several lines, a server in place of an engine, a terminal."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from asyncengine.cli.main import main
from asyncengine.errors import InvalidRequestError
from tests.server.fake_engine import FakeEngine
from tests.server.harness import serving

ROOT = Path(__file__).parents[2]
PATHS = str(ROOT)


class Chat:
    """A command with a fake engine, and what is typed into it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = FakeEngine("Once.", ends=True)
        self._patch = monkeypatch
        monkeypatch.setattr("asyncengine.cli.chat.engine_from", lambda args: self.engine)

    def type(self, *lines: str, options: tuple[str, ...] = ()) -> int:
        self.engine.health = "ready"
        self.engine.prompts.clear()
        self.engine.submitted.clear()
        self._patch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        return main(["chat", *options])

    @property
    def asked(self) -> list[list[str]]:
        """The texts of each conversation that was sent, without the roles."""
        return [[message["content"] for message in prompt] for prompt in self.engine.prompts]  # type: ignore[index, misc]


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Chat:
    return Chat(monkeypatch)


def test_commands_change_the_conversation(chat: Chat) -> None:
    assert (
        chat.type("/system Rhyme.", "a", "b", "/undo", "/regen", "/reset", "c", "/system", "d", "//e", "/quit", "f")
        == 0
    )
    assert chat.asked == [
        ["Rhyme.", "a"],
        ["Rhyme.", "a", "Once.", "b"],
        ["Rhyme.", "a"],  # /regen
        ["Rhyme.", "c"],
        ["c", "Once.", "d"],
        ["c", "Once.", "d", "Once.", "/e"],
    ]


def test_parameters_are_set_and_unset(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.type(
        "/set temperature 0.5", "/set max-tokens 3", "/set stop x", "/set ignore_eos true", "a",
        "/set stop", "/set", "b",
        options=("--top-k", "5"),
    )  # fmt: skip
    first, second = (params for _, params, _, _ in chat.engine.submitted)
    assert (first.temperature, first.max_tokens, first.top_k, first.stop, first.ignore_eos) == (0.5, 3, 5, ("x",), True)
    assert second.stop == ()
    shown = capsys.readouterr().err
    assert json.loads(shown) == {"top_k": 5, "temperature": 0.5, "max_tokens": 3, "ignore_eos": True}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/set temprature 1", "there is no parameter temprature; did you mean temperature?"),
        ("/set n 2", "there is no parameter n"),
        ("/set temperature hot", "invalid value 'hot' for temperature"),
        ("/set temperature 9", "temperature must be in [0, 2], got 9"),
        ("/rest", "there is no command /rest; did you mean /reset?"),
        ("/undo", "there is nothing to take back"),
        ("/regen", "there is nothing to answer yet"),
        ("/save", "a file is needed"),
        ("/load /nonexistent", "[Errno 2] No such file or directory: '/nonexistent'"),
    ],
)
def test_what_is_wrong_with_a_command(
    line: str, complaint: str, chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat.type(line, "a") == 0
    assert capsys.readouterr().err == f"[{complaint}]\n"
    assert chat.asked == [["a"]]
    ((_, params, _, _),) = chat.engine.submitted
    assert params.temperature == 1


def test_help_names_every_command(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.type("/help")
    shown = capsys.readouterr().err
    assert all(f"/{name}" in shown for name in ["system", "reset", "undo", "regen", "set", "save", "load", "quit"])


def test_a_conversation_is_saved_and_goes_on(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    chat.type("/set temperature 0.5", "/set logit_bias 66=1", "a", f"/save {file}", options=("--system", "Rhyme."))
    assert json.loads(file.read_text())["messages"] == [
        {"role": "system", "content": "Rhyme."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Once."},
    ]
    assert chat.type(f"/load {file}", "b") == 0
    assert chat.asked == [["Rhyme.", "a", "Once.", "b"]]
    ((_, params, _, _),) = chat.engine.submitted
    assert (params.temperature, params.logit_bias) == (0.5, {66: 1.0})


@pytest.mark.parametrize(
    "saved",
    [
        "[]",
        "{",
        '{"messages": 1}',
        '{"messages": [1]}',
        '{"messages": [{"role": "user", "content": 1}]}',
        '{"messages": [{"role": "assistant", "content": "a"}]}',
        '{"messages": [], "sampling": {"temprature": 1}}',
        '{"messages": [], "sampling": {"temperature": 9}}',
    ],
)
def test_a_file_that_is_no_conversation(saved: str, chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text(saved)
    chat.type("a", f"/load {file}", "b")
    assert chat.asked[-1] == ["a", "Once.", "b"]


def test_texts_of_several_lines(chat: Chat) -> None:
    chat.type("one \\", "two", '"""three', "", "  four", '"""', '"""five"""', '"""six', "seven")
    assert [texts[-1] for texts in chat.asked] == ["one \ntwo", "three\n\n  four", "five", "six\nseven"]


def test_a_refused_request_ends_a_piped_chat(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    async def refuse(*args: Any, **kwargs: Any) -> Any:
        raise InvalidRequestError("no template", param="messages")

    chat.engine.submit = refuse  # type: ignore[method-assign]
    assert chat.type("a", "b") == 2
    assert capsys.readouterr().err == "asyncengine: error: no template\n"


async def run_chat(url: str, lines: str, *options: str) -> tuple[int | None, str, str]:
    """A chat with a server, in a process of its own."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "asyncengine", "chat", "--url", url, *options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    out, err = await child.communicate(lines.encode())
    return child.returncode, out.decode(), err.decode()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["tcp", "uds"])
async def test_a_chat_with_a_server(where: str, tmp_path: Path) -> None:
    config = {"uds": str(tmp_path / "socket")} if where == "uds" else {}
    engine = FakeEngine("Once 😀.", ends=True)
    async with serving(engine, api_key="s3cret", **config) as site:
        options = ("--api-key", "s3cret", "--temperature", "0.5", "--system", "Rhyme.")
        suffix = "" if where == "uds" else "/v1/"
        code, out, err = await run_chat(site.url + suffix, "a\n/set seed 3\nb\n", *options)
        assert (code, out, err) == (0, "Once 😀.\nOnce 😀.\n", "")
        assert [[m["content"] for m in prompt] for prompt in engine.prompts] == [  # type: ignore[index]
            ["Rhyme.", "a"],
            ["Rhyme.", "a", "Once 😀.", "b"],
        ]
        assert [(p.temperature, p.seed, p.max_tokens) for _, p, _, _ in engine.submitted] == [
            (0.5, None, None),
            (0.5, 3, None),
        ]
        code, out, err = await run_chat(site.url, "a\n")
        assert (code, out) == (1, "")
        assert "does not say what model it serves: 401" in err


async def test_the_servers_words_reach_the_user() -> None:
    engine = FakeEngine(max_model_len=20)
    async with serving(engine, strict_model_names=True) as site:
        code, out, err = await run_chat(site.url, "far too long a message\n", "--model", "fake")
        assert (code, out) == (2, "")
        assert "the context has 20" in err
        code, out, err = await run_chat(site.url, "a\n", "--model", "other")
        assert code == 1
        assert "'other' does not exist" in err


class Terminal:
    """A chat at a terminal of its own, with a slow fake engine."""

    def __init__(self, state: Path, step_s: float) -> None:
        code = (
            "import sys, asyncengine.cli.chat as chat, asyncengine.cli.main as m\n"
            "from tests.server import fake_engine\n"
            f"chat.engine_from = lambda args: fake_engine.FakeEngine('ab', step_s={step_s}, max_model_len=10**6)\n"
            "sys.exit(m.main(['chat', '--max-tokens', '200']))"
        )
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=os.environ | {"PYTHONPATH": PATHS, "XDG_STATE_HOME": str(state), "TERM": "dumb"},
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(slave)
        self._seen = b""

    def expect(self, text: str) -> None:
        """Read up to it."""
        while text.encode() not in self._seen:
            assert select.select([self._master], [], [], 20)[0], self._seen
            self._seen += os.read(self._master, 65536)
        self._seen = self._seen.partition(text.encode())[2]

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def leave(self, text: str) -> None:
        """Type it, which ends the chat well."""
        self.type(text)
        assert self.process.wait(20) == 0


def test_at_a_terminal(tmp_path: Path) -> None:
    """An interruption ends the answer, or drops what is typed, and never the chat; lines typed come back next time."""
    with Terminal(tmp_path, 0.01) as terminal:
        terminal.expect("/help shows the commands")
        terminal.expect("> ")
        terminal.type("hello\n")
        terminal.expect("abab")
        terminal.interrupt()
        terminal.expect("[interrupted]")
        terminal.expect("> ")
        terminal.type("never sent")
        terminal.expect("never sent")  # readline shows it
        time.sleep(0.3)  # and waits for more: CPython misses a signal that comes just before that
        terminal.interrupt()
        terminal.expect("> ")
        terminal.type(f"/save {tmp_path / 'talk.json'}\n")
        terminal.expect("> ")
        terminal.leave("\x04")
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[1]["content"].startswith("abab")
    history = tmp_path / "asyncengine" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "hello" in history.read_text().splitlines()
    with Terminal(tmp_path, 0) as terminal:
        terminal.expect("> ")
        terminal.type("\x10\x10\n")  # two lines back
        terminal.expect("abab")
        terminal.expect("> ")
        terminal.leave("/quit\n")
