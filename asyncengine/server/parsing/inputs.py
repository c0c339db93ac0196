"""Inputs of custom tools. A model calls such a tool with the JSON object ``{"input": text}``; clients read the text."""

from __future__ import annotations

import json
import re

from asyncengine.server.parsing.arguments import clean, loaded

INPUT = "input"
"""The name of the only argument."""
_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_WHOLE = re.compile(r'(?:[^"\\]|\\(?:[^u]|u[0-9a-fA-F]{4}))*', re.DOTALL)
_HALF = re.compile(r"(?<!\\)(?:\\\\)*(?P<half>\\u[dD][89abAB][0-9a-fA-F]{2})\Z")
"""The first half of a character that takes two escapes, at the end of a text."""


class InputReader:
    """Reads the input out of arguments that come in pieces. Arguments that are no such object have no input."""

    def __init__(self) -> None:
        self._text = ""
        self._inside = False
        self._ended = False

    def push(self, piece: str) -> str:
        """The part of the input that ``piece`` completes."""
        self._text += piece
        if not self._inside:
            found = _BEGIN.match(self._text)
            if found is None:
                return ""
            self._text, self._inside = self._text[found.end() :], True
        if self._ended:
            return ""
        found = _WHOLE.match(self._text)
        assert found is not None
        whole = found.group()
        self._ended = self._text.startswith('"', found.end())
        if not self._ended and (half := _HALF.search(whole)):
            whole = whole[: half.start("half")]
        self._text = self._text[len(whole) :]
        value = loaded(f'"{whole}"')
        return clean(value) if isinstance(value, str) else ""


def input_of(arguments: str) -> str:
    """The input in whole arguments: their only text, whatever its name, or all of what the model wrote."""
    value = loaded(arguments)
    if isinstance(value, dict):
        text = value.get(INPUT) if INPUT in value or len(value) != 1 else next(iter(value.values()))
        if isinstance(text, str):
            return clean(text)
    return "" if value == {} else arguments


def arguments_of(text: str) -> str:
    """The arguments that have this input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)
