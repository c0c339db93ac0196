"""Formats of tool calls, as families of models write them."""

from __future__ import annotations

import re

from asyncengine.server.parsing.json_calls import JsonCalls


class Json(JsonCalls):
    """An object, several with commas or semicolons between them, or an array of them, as all of the content."""

    _ARRAY = re.compile(r"\s*\[\s*(?=\{)")
    _MAY_BE_ARRAY = re.compile(r"\s*\[\s*\Z")
    _BETWEEN = re.compile(r"\s*[;,]?\s*")
    _END = re.compile(r"\s*\]")
    _in_array = False

    def _at_content(self) -> bool:
        return self.series("")

    def series(self, marker: str) -> bool:
        """Calls begin, perhaps after white space; ``marker`` is the text before them."""
        self._prefix, self._in_array = marker, False
        self._state = self._in_series
        return True

    def after_series(self) -> bool:
        """The last of the calls has ended."""
        return self.in_text()

    def _in_series(self) -> bool:
        head = self.head()
        first = head.lstrip()[:1]
        if first == "{":
            self.expect(self._prefix, self._between)
            return True
        found = self._ARRAY.match(head)
        if found is not None:
            self._at += found.end()
            self._in_array = True
            self.expect(self._prefix + found.group(), self._between)
            return True
        if not first or self._MAY_BE_ARRAY.match(head):
            return self.no_call() if self.head_is_whole() else False
        self.say(self._prefix)
        return self.in_text()

    def _between(self) -> bool:
        """After a call there may be another one."""
        head = self.head()
        found = self._BETWEEN.match(head)
        assert found is not None
        rest = head[found.end() :]
        if not rest:
            if not self.head_is_whole():
                return False
            if self._is_cut:
                return self.drop()
        if rest.startswith("{"):
            self._at += found.end()
            self.expect(found.group(), self._between)
            return True
        if self._in_array and (end := self._END.match(head)):
            self._at += end.end()
            self._in_array = False
        return self.after_series()


class Hermes(Json):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3."""

    triggers = markers = ("<tool_call>", "</tool_call>")
    _is_open = False

    def _at_content(self) -> bool:
        return self.in_text()

    def triggered(self, marker: str) -> None:
        if marker == "<tool_call>":
            self.series(marker)
        elif self._is_open:
            self._is_open = False
        else:
            self.say(marker)

    def after_series(self) -> bool:
        self._is_open = True
        return self.in_text()


class Llama3Json(Json):
    """Llama 3.1 to 3.3: ``{"name": ..., "parameters": {...}}``, at times after ``<|python_tag|>``."""

    triggers = markers = ("<|python_tag|>",)

    def triggered(self, marker: str) -> None:
        self.series(marker)


class Mistral(Json):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``; since 2025 ``[TOOL_CALLS]name[ARGS]{...}`` for each call."""

    triggers = ("[TOOL_CALLS]",)
    markers = (*triggers, "[ARGS]", "[CALL_ID]")
    _NAMED = re.compile(
        r"\s*(?P<name>\w[\w.\-]*)\s*(?P<known>\[CALL_ID\]\s*\w*\s*)?(?P<begun>\[ARGS\])?\s*(?=\{|\[TOOL_CALLS\]|\Z)"
    )
    _MAY_BE_NAMED = re.compile(r"\s*(?:\w[\w.\-]*\s*(?:\[[A-Z_\]]*\s*\w*\s*(?:\[[A-Z_\]]*\s*){0,2})?)?\Z")
    _NAME = re.compile(r"\s*(\w[\w.\-]*)\s*\[")

    def _at_content(self) -> bool:
        return self.in_text()

    def triggered(self, marker: str) -> None:
        self._state = self._in_call

    def _in_call(self) -> bool:
        head = self.head()
        found = self._NAMED.match(head)
        if found is not None and found.end() < len(head):
            return self._named(found)
        if self._MAY_BE_NAMED.match(head):
            if not self.head_is_whole():
                return False
            if self._is_cut:
                return self._cut_name(head)
            if found is not None and self._ended:
                return self._named(found)
        return self.series("[TOOL_CALLS]")

    def _named(self, found: re.Match[str]) -> bool:
        """The head of a call, behind which its arguments begin, if it has any."""
        self.open_call(found["name"], "[TOOL_CALLS]" + found.group())
        self._at += found.end()
        if self._text.startswith("{", self._at):
            self.argue_value(self.in_text)
        else:
            self.close_call()
            self.in_text()
        return True

    def _cut_name(self, head: str) -> bool:
        if found := self._NAME.match(head):
            self.open_call(found[1], "")
            self.cut_call()
        return self.drop()


class DeepSeek(JsonCalls):
    """DeepSeek V3 and R1, with a block of code around the arguments; V3.1, without."""

    _CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    triggers = ("<｜tool▁calls▁begin｜>", _CALL, _CALL_END, "<｜tool▁calls▁end｜>")
    markers = (*triggers, _SEPARATOR)
    _HEADS = (
        re.compile(rf"\s*function{_SEPARATOR}\s*(?P<name>[^\s`{{<]+)\s*(?:```json)?\s*(?=\{{|(?:```\s*)?{_CALL_END})"),
        re.compile(rf"\s*(?P<name>[\w.\-]+)\s*{_SEPARATOR}\s*(?=\{{|{_CALL_END})"),
    )
    _NAMES = (
        re.compile(rf"\s*function{_SEPARATOR}\s*(?P<name>[^\s`{{<]+)[\s`]"),
        re.compile(rf"\s*(?!function{_SEPARATOR})(?P<name>[\w.\-]+)\s*{_SEPARATOR}"),
    )
    """Heads that are cut behind the name."""
    _FENCE_END = re.compile(rf"\s*(?:```)?\s*{_CALL_END}")
    _MAY_BE_FENCE_END = re.compile(r"\s*`{0,3}\s*(?:<[^>]*)?\Z")

    def triggered(self, marker: str) -> None:
        if marker == self._CALL:
            self._state = self._in_call

    def _in_call(self) -> bool:
        head = self.head()
        for pattern in self._HEADS:
            if found := pattern.match(head):
                self.open_call(found["name"], self._CALL + found.group())
                self._at += found.end()
                if self._text.startswith("{", self._at):
                    self.argue_value(self._end_of_call)
                else:
                    self.close_call()
                    self._state = self._end_of_call
                return True
        if self._CALL_END not in head:
            if not self.head_is_whole():
                return False
            if self._is_cut:
                return self._cut_name(head)
        self.say(self._CALL)
        return self.in_text()

    def _cut_name(self, head: str) -> bool:
        found = next((found for pattern in self._NAMES if (found := pattern.match(head))), None)
        if found is not None:
            self.open_call(found["name"], "")
            self.cut_call()
        return self.drop()

    def _end_of_call(self) -> bool:
        head = self.head()
        if found := self._FENCE_END.match(head):
            self._at += found.end()
        elif self._MAY_BE_FENCE_END.match(head):
            if not self.head_is_whole():
                return False
            if self._is_cut:
                return self.drop()
        return self.in_text()
