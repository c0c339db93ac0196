"""Conversations with tools, as chat templates take them that do not know tools, or only some of their uses.

A template is asked by rendering short conversations with it. Words that do not come out show the parts that it leaves
out. The parts that it leaves out are written as turns that it has: calls as the assistant's JSON, results as the user's
text.

This file imports nothing of asyncengine: the process of asyncengine.text.sandbox_program loads it by its path.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Render = Callable[[str, Mapping[str, Any], int], str]
"""Function from a template's source and its variables to its text. Raises an exception past a number of characters."""
Message = Mapping[str, Any]

_USER, _SYSTEM, _TEXT, _TOOL, _ROLE = "ulmuser", "ulmsystem", "ulmtext", "ulmtool", "ulmrole"
_VALUES, _RESULTS, _IDS = ("ulmvalue", "ulmother"), ("ulmresult", "ulmending"), ("ulmcall01", "ulmcall02")
_LONGEST = 1 << 20
"""Characters of a text that a template makes of a few words."""
_ASKS: Message = {"role": "user", "content": _USER}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "A tool.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
        },
    }
]
_HOW_TO_CALL = (
    'To call one, answer with nothing but {"name": its name, "arguments": {its arguments}}, '
    "to call several with an array of these. Results come in the next message."
)


class Support(NamedTuple):
    """The parts of a conversation that a template shows."""

    system: bool
    """A system message at the beginning."""
    tools: bool
    calls: bool
    calls_with_text: bool
    """Calls of a message that also has content."""
    several_calls: bool
    """Several calls of one message, with their results."""
    no_content: str | None
    """The content with which a message's calls are shown."""
    results: bool
    """Messages with the role tool, other than as those of any role."""


def fitted(render: Render, source: str, variables: Mapping[str, Any]) -> Mapping[str, Any]:
    """``variables`` of a template with messages that it shows, if they need a change. A template that fails on the
    simplest conversation gets what it was given."""
    messages, tools = variables.get("messages", ()), variables.get("tools")
    if not tools and not any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
        return variables
    tokens = [(k, v) for k, v in variables.items() if k.endswith("_token") and isinstance(v, str)]
    support = _support(render, source, bool(tools), tuple(sorted(tokens)))
    if support is None:
        return variables
    changed = {**variables}
    if tools and not support.tools:
        messages, changed["tools"] = with_tools_listed(messages, tools, how_to_call=not support.calls), None
    changed["messages"] = _Turns(support).of(messages)
    return changed


def with_tools_listed(messages: Sequence[Message], tools: Iterable[Message], *, how_to_call: bool) -> list[Message]:
    """A system message, or the one that is there, says which ``tools`` there are, and how to call them in JSON."""
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    text = "\n".join(["You can call these functions:", *lines, *([_HOW_TO_CALL] if how_to_call else [])])
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


# ---- asking a template ----


@functools.lru_cache(maxsize=32)
def _support(
    render: Render, source: str, with_tools: bool, special_tokens: tuple[tuple[str, str], ...]
) -> Support | None:
    """``special_tokens``: names and values. None: the template does not show a user's message."""
    tools: Any = _TOOLS if with_tools else None

    def text(*messages: Message) -> str:
        """The template's text of a conversation, or none if the template refuses it."""
        values = {"messages": [*messages], "tools": tools, "documents": None, "add_generation_prompt": True}
        try:
            return render(source, {**values, **dict(special_tokens)}, _LONGEST)
        except Exception:  # a template may raise anything
            return ""

    shows_tools = _TOOL in text(_ASKS)
    if not shows_tools:
        tools = None
    if _USER not in text(_ASKS):
        return None
    system = _has(text({"role": "system", "content": _SYSTEM}, _ASKS), _SYSTEM, _USER)
    for content in (None, ""):
        for as_text in (False, True):
            call, other = _call(0, as_text), _call(1, as_text)
            shown = text(_ASKS, _calls(content, call), _result(0))
            # A template may know calls and refuse results.
            if not (_VALUES[0] in shown or _VALUES[0] in text(_ASKS, _calls(content, call))):
                continue
            with_text = text(_ASKS, _calls(_TEXT, call), _result(0)) or text(_ASKS, _calls(_TEXT, call))
            several = text(_ASKS, _calls(content, call, other), _result(0), _result(1))
            return Support(
                system=system,
                tools=shows_tools,
                calls=True,
                calls_with_text=_VALUES[0] in with_text,
                several_calls=_has(several, *_VALUES, *(_RESULTS if _RESULTS[0] in shown else ())),
                no_content=content,
                results=_RESULTS[0] in shown,
            )
    said: Message = {"role": "assistant", "content": _TEXT}
    shown = text(_ASKS, said, _result(0))
    strange = text(_ASKS, said, {**_result(0), "role": _ROLE})
    results = _RESULTS[0] in shown and strange.replace(_ROLE, "tool") != shown
    return Support(system, shows_tools, False, False, False, None, results)


def _has(text: str, *words: str) -> bool:
    return all(word in text for word in words)


def _call(i: int, as_text: bool) -> Message:
    """``as_text``: with arguments as JSON, which some templates join to other text."""
    arguments: Any = {"key": _VALUES[i]}
    function = {"name": _TOOL, "arguments": json.dumps(arguments) if as_text else arguments}
    return {"id": _IDS[i], "type": "function", "function": function}


def _calls(content: str | None, *calls: Message) -> Message:
    return {"role": "assistant", "content": content, "tool_calls": [*calls]}


def _result(i: int) -> Message:
    return {"role": "tool", "tool_call_id": _IDS[i], "name": _TOOL, "content": _RESULTS[i]}


# ---- writing the turns ----


class _Turns:
    """Messages in the making. One that is made here joins its neighbours of the same role, since many templates demand
    that user and assistant take turns."""

    def __init__(self, support: Support) -> None:
        self._support = support
        self._names: dict[str, str] = {}
        self._messages: list[Message] = []
        self._is_made = False

    def of(self, messages: Sequence[Message]) -> list[Message]:
        i = 0
        while i < len(messages):
            message, results = messages[i], []
            i += 1
            calls = message.get("tool_calls") if message["role"] == "assistant" else None
            while calls and i < len(messages) and messages[i]["role"] == "tool":
                results.append(messages[i])
                i += 1
            if calls:
                self._add_calls(message, list(calls), results)
            elif message["role"] == "tool":
                self._add_result(message)
            elif message["role"] == "system" and not self._support.system:
                self._add({**message, "role": "user"}, made=True)
            else:
                self._add(message)
        return self._messages

    def _add_calls(self, message: Message, calls: list[Any], results: list[Message]) -> None:
        support, content = self._support, message.get("content")
        self._names |= {str(_id(call)): _function(call)[0] for call in calls if _id(call) is not None}
        if not support.calls:
            said = json.dumps(made[0] if len(made := [*map(_as_json, calls)]) == 1 else made, ensure_ascii=False)
            bare = {name: value for name, value in message.items() if name != "tool_calls"}
            self._add({**bare, "content": f"{content}\n{said}" if content else said}, made=True)
            for result in _in_order(calls, results):
                self._add_result(result)
            return
        if content and not support.calls_with_text:
            self._add({name: value for name, value in message.items() if name != "tool_calls"})
            message = {"role": message["role"], "content": support.no_content, "tool_calls": calls}
        if len(calls) == 1 or support.several_calls:
            self._add(message)
            left = results if support.results else _in_order(calls, results)
        else:
            left = self._add_one_by_one(message, calls, results)
        for result in left:
            self._add_result(result)

    def _add_one_by_one(self, message: Message, calls: list[Any], results: list[Message]) -> list[Message]:
        """Add each call in a message of its own, with its result behind it. Returns the results of no call."""
        left = results
        for k, call in enumerate(calls):
            head = message if k == 0 else {"role": message["role"], "content": self._support.no_content}
            self._add({**head, "tool_calls": [call]})
            others = []
            for result in left:
                if _id(call) is not None and result.get("tool_call_id") == _id(call):
                    self._add_result(result)
                else:
                    others.append(result)
            left = others
        return left

    def _add_result(self, message: Message) -> None:
        if self._support.results:
            self._add(message)
            return
        name = message.get("name") or self._names.get(str(message.get("tool_call_id")))
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        self._add({"role": "user", "content": f"Result of {name}: {text}" if name else f"Result: {text}"}, made=True)

    def _add(self, message: Message, *, made: bool = False) -> None:
        last = self._messages[-1] if self._messages else None
        joins = last is not None and last["role"] == message["role"] and (made or self._is_made)
        self._is_made = made
        if joins and last is not None and not last.get("tool_calls") and not message.get("tool_calls"):
            texts = [last.get("content"), message.get("content")]
            if all(isinstance(text, str) for text in texts):
                self._messages[-1] = {**last, **message, "content": "\n\n".join(filter(None, texts))}
                self._is_made = True
                return
        self._messages.append(message)


def _in_order(calls: Sequence[Any], results: Iterable[Message]) -> list[Message]:
    """Results in the order of their calls, whose ids no text shows."""
    places = {str(_id(call)): i for i, call in enumerate(calls)}
    return sorted(results, key=lambda result: places.get(str(result.get("tool_call_id")), len(places)))


def _id(call: Any) -> Any:
    return call.get("id") if isinstance(call, Mapping) else None


def _function(call: Mapping[str, Any]) -> tuple[str, Any]:
    """Name and arguments of a call."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        function = call
    return str(function.get("name")), function.get("arguments")


def _as_json(call: Any) -> Any:
    """A call as asyncengine.server.parsing reads it from an output in plain JSON."""
    if not isinstance(call, Mapping):
        return call
    name, arguments = _function(call)
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {"name": name, "arguments": {} if arguments is None else arguments}
