"""Tool calls that are JSON objects: ``{"name": ..., "arguments": {...}}``."""

from __future__ import annotations

import re
from collections.abc import Collection

from asyncengine.server.parsing.arguments import checked, loaded, written
from asyncengine.server.parsing.inputs import INPUT, arguments_of
from asyncengine.server.parsing.machine import Machine, State

_LONGEST_OBJECT = 1 << 16
"""Characters of a call whose name does not come first: it is held back as a whole."""
_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rf'\s*\{{\s*(?:"(?:id|type)"\s*:\s*{_STRING}\s*,\s*)*"name"\s*:\s*(?P<name>{_STRING})\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
_CUT_HEAD = re.compile(
    rf'\s*\{{\s*(?:"(?:id|type)"\s*:\s*{_STRING}\s*,\s*)*(?:"function"\s*:\s*\{{\s*)?"name"\s*:\s*(?P<name>{_STRING})'
    r'(?:\s*,\s*"(?:arguments|parameters)"\s*:\s*(?P<arguments>\{.*))?',
    re.DOTALL,
)
"""An object that was cut behind its name."""
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

    def expect(self, prefix: str, after: State) -> None:
        """A call begins, perhaps after white space. If it does not, ``prefix``, which was taken already, is content.

        ``after`` is the state when it has ended.
        """
        self._prefix, self._after = prefix, after
        self._object = Extent()
        self._scanned = 0
        self._known = False
        self._state = self._in_head

    def argue_value(self, after: State) -> None:
        """The arguments of the call begin with the next character."""
        self._value = Extent()
        self._state, self._after_value = self._in_value, after

    def is_announced(self) -> bool:
        """Return whether only a call can follow: the text is behind a marker, or behind a call."""
        return self._calls > 0 or any(map(self._prefix.startswith, self.triggers))

    def no_call(self) -> bool:
        """Treat the held text as no call, since the expected text did not come."""
        if self._is_cut and self.is_announced():
            return self.drop()
        self.say(self._prefix)
        return self.in_text()

    def _in_head(self) -> bool:
        head = self.head()
        if not self._known:
            first = _FIRST_KEY.match(head)
            may_come = first is None and head.lstrip()[:1] in ("", "{")
            if may_come and not self.head_is_whole():
                return False
            if first is None or first.group(1) not in _KEYS:
                return self.no_call() if may_come else self._other()
            self._known = True
        found = _HEAD.match(head)
        if found is not None:
            name = _name(found["name"])
            if not self._takes(name):
                return self._other()
            self.open_call(name, self._prefix + found.group())
            self._at += found.end()
            self.argue_value(self._begin_rest)
            return True
        return self._in_object()

    def _other(self) -> bool:
        """The object is no call."""
        self.say(self._prefix)
        return self.in_text()

    def _in_object(self) -> bool:
        """The arguments do not come behind the name: the object is read as a whole."""
        limit = self._at + _LONGEST_OBJECT
        text = self._text[:limit] if len(self._text) > limit else self._text
        end = self._object.feed(text, self._at + self._scanned)
        if end < 0 and not self._ended and len(text) < limit:
            self._scanned = len(text) - self._at
            return False
        if end < 0 and self._is_cut and len(text) < limit:
            return self._in_cut_object(text[self._at :])
        call = None if end < 0 or self._object.broken else _call_in(text[self._at : end], self.rules.inputs)
        if call is None or not self._takes(call[0]):
            return self._other()
        self.open_call(call[0], "")
        self.argue(call[1])
        self.close_call()
        self._at = end
        self._state = self._after
        return True

    def _in_cut_object(self, text: str) -> bool:
        found = _CUT_HEAD.match(text)
        name = "" if found is None else _name(found["name"])
        if found is None or not self._takes(name):
            return self.no_call()
        arguments = found["arguments"] or ""
        end = Extent().feed(arguments, 0)
        self._at = len(self._text)
        self.open_call(name, self._prefix + text[: len(text) - len(arguments)])
        self.argue(arguments[:end] if end >= 0 else arguments)
        if end >= 0:
            self.close_call()
        else:
            self.cut_call()
        return self.in_text()

    def _takes(self, name: str) -> bool:
        return bool(name) and (self.rules.names is None or name in self.rules.names)

    def _in_value(self) -> bool:
        end = self._value.feed(self._text, self._at)
        stop = end if end >= 0 else len(self._text)
        self.argue(self._text[self._at : stop])
        self._at = stop
        if end >= 0:
            self._state = self._after_value if self.close_call() else self._in_content
            return True
        if self._ended:
            self.cut_call()
            return self.in_text()
        return False

    def _begin_rest(self) -> bool:
        """The arguments within an object have ended."""
        self._rest = Extent(depth=1)
        self._scanned = 0
        self._state = self._in_rest
        return True

    def _in_rest(self) -> bool:
        """Read the text between the arguments and the end of their object: further members, if anything."""
        limit = self._at + _LONGEST_OBJECT
        text = self._text[:limit] if len(self._text) > limit else self._text
        end = self._rest.feed(text, self._at + self._scanned)
        if end < 0 and not self._ended and len(text) < limit:
            self._scanned = len(text) - self._at
            return False
        stop = end if end >= 0 else len(text)
        rest = text[self._at : stop]
        if rest.strip() not in ("", "}") and not (self._is_cut and end < 0) and loaded('{"_":0' + rest) is None:
            self.say(rest)
        self._at = stop
        self._state = self._after
        return True


def _name(quoted: str) -> str:
    name = loaded(quoted)
    return name if isinstance(name, str) else ""


def _call_in(text: str, inputs: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments, if the object is a call. ``inputs``: names of tools that may have a text as arguments."""
    call = loaded(text)
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    if call["name"] in inputs:
        given = next((call[key] for key in ("arguments", "parameters", INPUT) if isinstance(call.get(key), str)), None)
        if given is not None:
            return call["name"], checked(given) or arguments_of(given)
    key = next((key for key in ("arguments", "parameters") if key in call), None)
    if key is None and not call.keys() <= _KEYS:
        return None
    arguments = written(None if key is None else call[key])
    return None if arguments is None else (call["name"], arguments)
