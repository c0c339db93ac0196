"""Arguments of tool calls: what leaves the server is a JSON object."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

import msgspec

_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?P<end>")?|[{}\[\]]', re.DOTALL)
_PARTIAL_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?\Z")
_PARTIAL_WORD = re.compile(r"\b(?:t(?:ru?)?|f(?:a(?:ls?)?)?|n(?:ul?)?)\Z")
_TAILS = ("", "0", ":0", '"":0')
"""Ends for the beginning of a JSON object: one of them completes it, beside the brackets that it has opened."""


def checked(text: str) -> str | None:
    """``text`` if it is a JSON object, ``{}`` if it is empty; None if it is anything else.

    Control characters within its strings, which JSON forbids and models write, come out as escapes.
    """
    if not text.strip():
        return "{}"
    try:
        msgspec.json.decode(text, type=dict)
    except (ValueError, RecursionError):
        value = loaded(text)
        return written(value) if isinstance(value, dict) else None
    return text


def written(value: Any) -> str | None:
    """Arguments that were read as a part of their call. A string is taken for JSON that is written already."""
    if value is None:
        return "{}"
    if isinstance(value, str):
        return checked(value)
    if not isinstance(value, dict):
        return None
    try:
        return clean(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError):
        return None


def loaded(text: str) -> Any:
    """A JSON value, whose strings may hold control characters; None for other text and for numbers beyond floats."""
    try:
        return json.loads(text, strict=False, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits} is too large")
    return value


def is_beginning(text: str) -> bool:
    """Return whether a JSON object may begin with ``text``."""
    opened: list[str] = []
    in_string = False
    for found in _BRACKETS.finditer(text):
        token = found.group()
        in_string = token[0] == '"' and found["end"] is None
        if token in ("{", "["):
            opened.append("}" if token == "{" else "]")
        elif token in ("}", "]") and opened:
            opened.pop()
    begun = _PARTIAL_ESCAPE.sub(r"\1", text) + '"' if in_string else _PARTIAL_WORD.sub("0", text)
    closing = "".join(reversed(opened))
    return not text.strip() or any(isinstance(loaded(begun + tail + closing), dict) for tail in _TAILS)


def clean(text: str) -> str:
    """Return the text without lone surrogates, which escapes in JSON can make and UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
