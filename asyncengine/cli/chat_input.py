"""Input of a chat: lines with editing and history, joined where one continues on the next."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

_HINT = "/help shows the commands, Ctrl-C interrupts an answer, Ctrl-D ends."
_QUOTES = '"""'
_MAX_HISTORY = 1000  # lines


def history_file() -> Path:
    """Return the file that keeps the lines typed into chats."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return base / "asyncengine" / "chat_history"


class Typed:
    """Messages and commands, without empty ones. A line that ends with a backslash goes on in the next one, and one
    that begins with three double quotes up to the next three.

    On a terminal, lines can be edited, earlier ones come back, and Ctrl-C drops what is typed. A context manager.
    """

    def __init__(self) -> None:
        self._interactive = sys.stdin.isatty()

    def __enter__(self) -> Self:
        if self._interactive:
            _load_history()
            print(_HINT, file=sys.stderr)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._interactive:
            _save_history()

    def __iter__(self) -> Iterator[str]:
        while True:
            try:
                text = self._text().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                print(file=sys.stderr)
                continue
            if text:
                yield text

    def _text(self) -> str:
        """Raises EOFError when there is none; the end of the input also ends a text that goes on."""
        line = self._line("> ")
        lines = []
        try:
            if line.lstrip().startswith(_QUOTES):
                line = line.lstrip().removeprefix(_QUOTES)
                while not line.rstrip().endswith(_QUOTES):
                    lines.append(line)
                    line = self._line(". ")
                lines.append(line.rstrip().removesuffix(_QUOTES))
            else:
                while line.endswith("\\"):
                    lines.append(line.removesuffix("\\"))
                    line = self._line(". ")
                lines.append(line)
        except EOFError:
            pass
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        return input(prompt if self._interactive else "")


def _load_history() -> None:
    with suppress(ImportError, OSError):  # no readline on this platform; no file yet, or another library's
        import readline  # which also gives input() its line editing

        readline.set_history_length(_MAX_HISTORY)
        readline.read_history_file(history_file())


def _save_history() -> None:
    with suppress(ImportError, OSError):
        import readline

        path = history_file()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.write_history_file(path)
