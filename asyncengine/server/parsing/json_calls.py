"""Tool calls that are JSON objects: ``{"name": ..., "arguments": {...}}``."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from asyncengine.server.parsing.machine import Machine, State, clean

_LONGEST_OBJECT = 1 << 16
"""Characters of a call whose name does not come first: it is held back as a whole."""
_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rf'\s*\{{\s*(?:"(?:id|type)"\s*:\s*{_STRING}\s*,\s*)*"name"\s*:\s*(?P<name>{_STRING})\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
_FIRST_KEY = re.compile(r'\s*\{\s*(?:"((?:[^"\\]|\\.)*)"|[^\s"])', re.DOTALL)
_KEYS = {"name", "arguments", "parameters", "id", "type", "function"}
_OUTSIDE = re.compile(r'["{}\[\]]|[^\s:,\d.eE+\-truefalsnIiy]')  # of a string; the letters are those of constants
_INSIDE = re.compile(r'["\\]')


class Extent:
    """Finds the end of a JSON value, an object or an array, without looking at what it holds."""

    def __init__(self, depth: int = 0) -> None:
        """``depth``: brackets that are open at the beginning."""
        self._depth = depth
        self._in_string = False
        self._escaped = False
        self.broken = False
        """The value has ended with a character that JSON does not have in this place."""

    def feed(self, text: str, at: int) -> int:
        """``text`` from ``at`` goes on with it. Where the value ends, or -1 if it does not yet."""
        end = len(text)
        while at < end:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                return -1
            char, at = found.group(), found.end()
            if char == '"':
                self._in_string = not self._in_string
            elif char == "\\" and self._in_string:
                self._escaped = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at
            else:
                self.broken = True
                return at - 1
        return -1


class JsonCalls(Machine):
    """Reads one object after the other; a format says when it calls ``expect``."""

    names: Collection[str] | None = None
    """Of the request's tools. Given, an object with another name is no call."""

    def expect(self, no_call: State, after: State) -> None:
        """A call begins, perhaps after white space. If it does not, nothing is taken and ``no_call`` is called.

        ``after`` is the state when it has ended.
        """
        self._no_call, self._after = no_call, after
        self._object = Extent()
        self._scanned = 0
        self._known = False
        self._state = self._in_head

    def argue_value(self, after: State) -> None:
        """The arguments of the call begin with the next character, and nothing is around them."""
        self._value = Extent()
        self._state, self._after = self._in_value, after

    def _in_head(self) -> bool:
        head = self.head()
        if not self._known:
            first = _FIRST_KEY.match(head)
            if first is None and not self.head_is_whole() and head.lstrip()[:1] in ("", "{"):
                return False
            if first is None or first.group(1) not in _KEYS:
                return self._no_call()
            self._known = True
        found = _HEAD.match(head)
        if found is not None:
            name = _name(found["name"])
            if not self._takes(name):
                return self._no_call()
            self.open_call(name)
            self._at += found.end()
            self._value = Extent()
            self._state = self._in_arguments
            return True
        return self._in_object()

    def _in_object(self) -> bool:
        """The name does not come first: the object is read as a whole."""
        limit = self._at + _LONGEST_OBJECT
        text = self._text[:limit] if len(self._text) > limit else self._text
        end = self._object.feed(text, self._at + self._scanned)
        if end < 0 and not self._ended and len(text) < limit:
            self._scanned = len(text) - self._at
            return False
        call = None if end < 0 or self._object.broken else _call_in(text[self._at : end])
        if call is None or not self._takes(call[0]):
            return self._no_call()
        self.open_call(call[0])
        self.argue(call[1])
        self._at = end
        self._state = self._after
        return True

    def _takes(self, name: str) -> bool:
        return bool(name) and (self.names is None or name in self.names)

    def _in_arguments(self) -> bool:
        """Of a call within an object."""
        if not self._take_value():
            return False
        self._rest = Extent(depth=1)
        self._scanned = 0
        self._state = self._in_rest
        return True

    def _in_value(self) -> bool:
        """Of a call without anything around them."""
        if not self._take_value():
            return False
        self._state = self._after
        return True

    def _take_value(self) -> bool:
        end = self._value.feed(self._text, self._at)
        stop = end if end >= 0 else len(self._text)
        self.argue(self._text[self._at : stop])
        self._at = stop
        return end >= 0 or self._ended

    def _in_rest(self) -> bool:
        """Between the arguments and the end of their object: further members, if anything."""
        limit = self._at + _LONGEST_OBJECT
        text = self._text[:limit] if len(self._text) > limit else self._text
        end = self._rest.feed(text, self._at + self._scanned)
        if end < 0 and not self._ended and len(text) < limit:
            self._scanned = len(text) - self._at
            return False
        stop = end if end >= 0 else len(text)
        rest = text[self._at : stop]
        if rest.strip() not in ("", "}") and _loaded('{"_":0' + rest) is None:
            self.say(rest)
        self._at = stop
        self._state = self._after
        return True


def _name(quoted: str) -> str:
    name = _loaded(quoted)
    return name if isinstance(name, str) else ""


def _loaded(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _call_in(text: str) -> tuple[str, str] | None:
    """Name and arguments, if the object is a call."""
    call = _loaded(text)
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    for key in ("arguments", "parameters"):
        if key in call:
            return call["name"], as_arguments(call[key])
    return None


def as_arguments(value: Any) -> str:
    """A string is taken for JSON that is written already."""
    return clean(value if isinstance(value, str) else json.dumps({} if value is None else value, ensure_ascii=False))
