"""Tool calls that are a list of Python calls: ``[weather(city="Rome", days=3), now()]``, as Llama 4 writes them."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from asyncengine.server.parsing.arguments import written
from asyncengine.server.parsing.machine import Machine

_START, _END = "<|python_start|>", "<|python_end|>"
_LIST = re.compile(rf"\s*(?:{re.escape(_START)})?\s*\[\s*(?=[A-Za-z_][\w.]*\()")
_MAY_BE_LIST = re.compile(r"\s*(?:<[|\w]*>?)?\s*(?:\[\s*(?:[A-Za-z_][\w.]*)?)?\Z")
_NAME = re.compile(r"[A-Za-z_][\w.]*(?=\()")
_MAY_BE_NAME = re.compile(r"(?:[A-Za-z_][\w.]*)?\Z")
_BETWEEN = re.compile(r"\s*(?:,\s*|\])")
_MAY_BE_BETWEEN = re.compile(r"\s*\Z")
_OUTSIDE = re.compile(r"""["'()\[\]{},]""")  # of a string
_INSIDE = {quote: re.compile(rf"[{quote}\\]") for quote in "'\""}
_LONGEST_CALL = 1 << 16
_CONSTANTS = {"true": True, "false": False, "null": None}
"""Constants as a grammar made of a JSON Schema writes them."""


class Pythonic(Machine):
    """A call is given when it is complete: only then its arguments are JSON."""

    _scanned = 0

    triggers = (_END,)
    markers = (_START, _END)

    def triggered(self, marker: str) -> None:
        if not self._calls:
            self.say(marker)

    def _at_content(self) -> bool:
        head = self.head()
        if found := _LIST.match(head):
            self._prefix = found.group()
            self._at += found.end()
            return self._next_call()
        if _MAY_BE_LIST.match(head):
            if not self.head_is_whole():
                return False
            if self._is_cut and _START in head:
                return self.drop()
        return self.in_text()

    def _in_call(self) -> bool:
        head = self.head()
        found = _NAME.match(head)
        if found is None and _MAY_BE_NAME.match(head) and not self.head_is_whole():
            return False
        limit = self._at + _LONGEST_CALL
        text = self._text[:limit] if len(self._text) > limit else self._text
        end = -1 if found is None else self._brackets.feed(text, self._at + self._scanned)
        if found and end < 0 and not self._ended and len(text) < limit:
            self._scanned = len(text) - self._at
            return False
        if end < 0 and self._is_cut and len(text) < limit:
            return self._cut_call(found, text)
        arguments = None if found is None or end < 0 else _arguments(text[self._at : end])
        if found is None or arguments is None or not self._takes(found.group()):
            self.say(self._prefix)
            return self.in_text()
        self.open_call(found.group(), "")
        self.argue(arguments)
        self.close_call()
        self._at = end
        self._state = self._after_call
        return True

    def _takes(self, name: str) -> bool:
        return self.rules.names is None or name in self.rules.names

    def _cut_call(self, found: re.Match[str] | None, text: str) -> bool:
        """The output was cut in a call, of which the arguments before the last one are whole."""
        call = text[self._at :]
        brackets = _Brackets()
        brackets.feed(call, 0)
        comma = brackets.last_comma
        begun = "" if found is None or comma < 0 else _arguments(call[:comma] + ")")
        if found is None and self._calls:
            return self.drop()
        if found is None or begun is None or not self._takes(found.group()):
            self.say(self._prefix)
            return self.in_text()
        self.open_call(found.group(), self._prefix + call)
        self.argue(begun.removesuffix("}"))
        self.cut_call()
        self._at = len(self._text)
        return self.in_text()

    def _after_call(self) -> bool:
        head = self.head()
        found = _BETWEEN.match(head)
        if found is None:
            if _MAY_BE_BETWEEN.match(head) and not self.head_is_whole():
                return False
            return self.in_text()
        if found.end() == len(head) and not self.head_is_whole() and "]" not in found.group():
            return False  # more white space may come
        self._at += found.end()
        self._prefix = found.group()
        return self.in_text() if self._prefix.endswith("]") else self._next_call()

    def _next_call(self) -> bool:
        self._brackets = _Brackets()
        self._scanned = 0
        self._state = self._in_call
        return True


class _Brackets:
    """Finds where the first bracket of a text closes."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self.last_comma = -1
        """Offset of the last comma directly within the bracket, in the text that was fed."""

    def feed(self, text: str, at: int) -> int:
        """``text`` goes on from ``at``. Where the bracket closes, or -1 if it does not yet."""
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_INSIDE[self._quote] if self._quote else _OUTSIDE).search(text, at)
            if found is None:
                return -1
            char, at = found.group(), found.end()
            if char == "\\":
                self._escaped = True
            elif char in "\"'":
                self._quote = "" if self._quote else char
            elif char in "([{":
                self._depth += 1
            elif char == ",":
                self.last_comma = at - 1 if self._depth == 1 else self.last_comma
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return at
        return -1


def _arguments(call: str) -> str | None:
    """Keyword arguments as a JSON object; None if they are not literals."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in strings
            tree = ast.parse(call, mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            return None
        values = {_keyword(keyword): _value(keyword.value) for keyword in tree.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return written(values)


def _keyword(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise ValueError("**")
    return keyword.arg


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("no name")
