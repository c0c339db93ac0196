"""A conversation from the items of /v1/responses and the blocks of /v1/messages, as chat templates take it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from asyncengine.server.errors import ApiError, bad_request

MAX_PARTS = 16_384
"""Items, messages and parts of their contents, together at most."""


class Turns:
    """Messages in the making. What an assistant says without being interrupted is one message.

    Reasoning comes before the text of a message, and the text before its calls of tools: anything that comes in another
    order begins the next message.
    """

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        """``messages`` are those of earlier requests, which this adds to."""
        self.messages = messages
        self._called = {call["id"] for message in messages for call in message.get("tool_calls", ())}

    def text(self, role: str, text: str) -> None:
        """``role`` is that of a chat: developer, system, user or assistant."""
        turn = self._assistant() if role == "assistant" else None
        if turn is not None and not turn["content"] and "tool_calls" not in turn and "reasoning_content" in turn:
            turn["content"] = text
        else:
            self.messages.append({"role": role, "content": text})

    def reasoning(self, text: str) -> None:
        if not text:
            return
        turn = self._assistant()
        if turn is not None and not turn["content"] and "tool_calls" not in turn:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text
        else:
            self.messages.append({"role": "assistant", "content": None, "reasoning_content": text})

    def call(self, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        """Arguments that are no JSON object stay the text that they are."""
        turn = self._assistant()
        if turn is None:
            turn = {"role": "assistant", "content": None}
            self.messages.append(turn)
        function = {"name": name, "arguments": arguments}
        turn.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        self._called.add(call_id)

    def result(self, call_id: str, text: str, path: str) -> None:
        """Add the result of a tool. Raises ApiError 400 that names ``path`` if no such call came before."""
        if call_id not in self._called:
            raise bad_request(f"{path}: the conversation has no call of a tool with the id {call_id!r:.80}", path)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _assistant(self) -> dict[str, Any] | None:
        """The last message, if it is the assistant's."""
        return self.messages[-1] if self.messages and self.messages[-1]["role"] == "assistant" else None


def check_count(name: str, contents: Iterable[object]) -> None:
    """Raises ApiError 400 if there are more than MAX_PARTS of ``contents`` and their parts."""
    count = sum([1 + len(content) if isinstance(content, list) else 1 for content in contents])
    if count > MAX_PARTS:
        raise bad_request(f"{name}: at most {MAX_PARTS} items and parts of their contents, got {count}", name)


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """About a field of chat completions, as the same about the field of another API."""
    error.message, error.param = as_called(names, error.message), error.param and as_called(names, error.param)
    return error


def as_called(names: Mapping[str, str], text: str) -> str:
    """Return the text with one name in place of another."""
    for name, other in names.items():
        text = text.replace(name, other)
    return text


def required(value: str | None, path: str) -> str:
    """Raises ApiError 400 that names ``path`` if there is no value."""
    if not value:
        raise bad_request(f"{path} is required", path)
    return value
