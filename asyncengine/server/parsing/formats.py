"""Formats of tool calls, as families of models write them."""

from __future__ import annotations

import re

from asyncengine.server.parsing.json_calls import JsonCalls
from asyncengine.server.parsing.machine import State


class Hermes(JsonCalls):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3."""

    triggers = markers = ("<tool_call>", "</tool_call>")
    _is_open = False

    def triggered(self, marker: str) -> None:
        if marker == "<tool_call>":
            self.expect(self._no_call_here, self._close)
        elif self._is_open:
            self._is_open = False
        else:
            self.say(marker)

    def _no_call_here(self) -> bool:
        self.say("<tool_call>")
        return self._at_content()

    def _close(self) -> bool:
        self._is_open = True
        return self._at_content()


class Json(JsonCalls):
    """An object, several with commas or semicolons between them, or an array of them, as all of the content."""

    _ARRAY = re.compile(r"\s*\[\s*(?=\{)")
    _MAY_BE_ARRAY = re.compile(r"\s*\[\s*\Z")
    _BETWEEN = re.compile(r"\s*[;,]?\s*")
    _END = re.compile(r"\s*\]")
    _prefix = ""
    _in_array = False

    def _at_content(self) -> bool:
        first = self.head().lstrip()[:1]
        if not first and not self.head_is_whole():
            return False
        if first == "{":
            self._expect_after("")
            return True
        return self.array("", self._in_text) if first == "[" else self._in_text()

    def array(self, marker: str, no_array: State) -> bool:
        """An array of calls begins, perhaps after white space; ``marker`` is the text before it."""
        head = self.head()
        found = self._ARRAY.match(head)
        if found is not None:
            self._at += found.end()
            self._in_array = True
            self._expect_after(marker + found.group())
            return True
        if self._MAY_BE_ARRAY.match(head) and not self.head_is_whole():
            return False
        return no_array()

    def _expect_after(self, prefix: str) -> None:
        """A call begins; if not, ``prefix``, which was taken already, is content as well."""
        self._prefix = prefix
        self.expect(self._no_call_here, self._between)

    def _no_call_here(self) -> bool:
        self.say(self._prefix)
        return self._in_text()

    def _in_text(self) -> bool:
        self._state = self._in_content
        return True

    def _between(self) -> bool:
        """After a call there may be another one."""
        head = self.head()
        found = self._BETWEEN.match(head)
        assert found is not None
        rest = head[found.end() :]
        if not rest and not self.head_is_whole():
            return False
        if rest.startswith("{"):
            self._at += found.end()
            self._expect_after(found.group())
            return True
        if self._in_array and (end := self._END.match(head)):
            self._at += end.end()
            self._in_array = False
        return self._in_text()


class Llama3Json(Json):
    """Llama 3.1 to 3.3: ``{"name": ..., "parameters": {...}}``, at times after ``<|python_tag|>``."""

    triggers = markers = ("<|python_tag|>",)

    def triggered(self, marker: str) -> None:
        self._expect_after(marker)


class Mistral(Json):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``; since 2025 ``[TOOL_CALLS]name[ARGS]{...}`` for each call."""

    triggers = ("[TOOL_CALLS]",)
    markers = (*triggers, "[ARGS]", "[CALL_ID]")
    _NAMED = re.compile(r"\s*(\w[\w.\-]*)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?\s*(?=\{)")
    _MAY_BE_NAMED = re.compile(r"\s*(?:\w[\w.\-]*\s*(?:\[[A-Z_\]]*\s*\w*\s*(?:\[[A-Z\]]*\s*)?)?)?\Z")

    def _at_content(self) -> bool:
        return self._in_text()

    def triggered(self, marker: str) -> None:
        self._state = self._in_call

    def _in_call(self) -> bool:
        head = self.head()
        found = self._NAMED.match(head)
        if found is not None:
            self.open_call(found[1])
            self._at += found.end()
            self.argue_value(self._in_text)
            return True
        if self._MAY_BE_NAMED.match(head) and not self.head_is_whole():
            return False
        if head.lstrip().startswith("{"):
            self._expect_after("[TOOL_CALLS]")
            return True
        return self.array("[TOOL_CALLS]", self._no_array)

    def _no_array(self) -> bool:
        self.say("[TOOL_CALLS]")
        return self._in_text()


class DeepSeek(JsonCalls):
    """DeepSeek V3 and R1, with a block of code around the arguments; V3.1, without."""

    _CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    triggers = ("<｜tool▁calls▁begin｜>", _CALL, _CALL_END, "<｜tool▁calls▁end｜>")
    markers = (*triggers, _SEPARATOR)
    _HEADS = (
        re.compile(rf"\s*function{_SEPARATOR}\s*(?P<name>[^\s`{{<]+)\s*```json\s*(?=\{{)"),
        re.compile(rf"\s*(?P<name>[\w.\-]+)\s*{_SEPARATOR}\s*(?=\{{)"),
    )
    _FENCE_END = re.compile(rf"\s*(?:```)?\s*{_CALL_END}")
    _MAY_BE_FENCE_END = re.compile(r"\s*`{0,3}\s*(?:<[^>]*)?\Z")

    def triggered(self, marker: str) -> None:
        if marker == self._CALL:
            self._state = self._in_call

    def _in_call(self) -> bool:
        head = self.head()
        for pattern in self._HEADS:
            if found := pattern.match(head):
                self.open_call(found["name"])
                self._at += found.end()
                self.argue_value(self._end_of_call)
                return True
        if not self.head_is_whole() and self._CALL_END not in head:
            return False
        self.say(self._CALL)
        return self._at_content()

    def _end_of_call(self) -> bool:
        head = self.head()
        if found := self._FENCE_END.match(head):
            self._at += found.end()
        elif self._MAY_BE_FENCE_END.match(head) and not self.head_is_whole():
            return False
        return self._at_content()
