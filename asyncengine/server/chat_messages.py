"""Messages of a request: their shapes are checked, and they are made into what the model's chat template takes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec

from asyncengine.api.checks import quoted
from asyncengine.api.conversation import Conversation
from asyncengine.api.json_text import JsonTexts
from asyncengine.server.errors import bad_request
from asyncengine.server.parsing.inputs import INPUT
from asyncengine.server.parsing.names import HARMONY
from asyncengine.server.tools import parsed_arguments

MAX_PARTS = 16_384
"""Messages of a conversation, parts of their contents, and their tool calls, together at most."""
_MAX_ROLE = 64
_TEXT_PARTS = ("text", "input_text", "output_text")


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class CalledCustom(msgspec.Struct):
    name: str
    input: str = ""


class MessageToolCall(msgspec.Struct):
    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    id: str | None = None
    type: str = "function"


class Message(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    function_call: CalledFunction | None = None
    """OpenAI's older form of a call, whose result is a message with the role "function"."""


def as_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as templates take them, arguments of calls as objects. Raises ApiError 400."""
    texts = JsonTexts()
    if not messages:
        raise bad_request("messages is required and must not be empty", "messages")
    parts = len(messages) + sum([len(m.content) for m in messages if type(m.content) is list])
    parts += sum([len(m.tool_calls) for m in messages if m.tool_calls])
    if parts > MAX_PARTS:
        raise bad_request(f"messages: at most {MAX_PARTS} messages, content parts and calls, got {parts}", "messages")
    made = [_message(i, message, texts) for i, message in enumerate(messages)]
    _give_ids(made)
    return made


def _give_ids(messages: Sequence[dict[str, Any]]) -> None:
    """Give results that name a function the id of the last call of it."""
    called: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            if "id" in call:
                called[call["function"]["name"]] = call["id"]
        if message["role"] == "tool" and "tool_call_id" not in message and message.get("name") in called:
            message["tool_call_id"] = called[message["name"]]


def _message(i: int, message: Message, texts: JsonTexts) -> dict[str, Any]:
    path = f"messages[{i}]"
    if not 0 < len(message.role) <= _MAX_ROLE:
        raise bad_request(
            f"{path}.role must have 1 to {_MAX_ROLE} characters, got {quoted(message.role)}", f"{path}.role"
        )
    content = message.content
    reasoning = message.reasoning_content or message.reasoning
    if content is None and message.role == "assistant":
        content = message.refusal
    if content is None and message.role == "function":
        content = ""
    said = message.role == "assistant" and (message.tool_calls or message.function_call or reasoning)
    if content is None and not said:
        raise bad_request(f"{path}.content is required", f"{path}.content")
    if isinstance(content, list):
        if not content:
            raise bad_request(f"{path}.content must have at least one part", f"{path}.content")
        content = "".join([_text(i, k, part) for k, part in enumerate(content)])
    made: dict[str, Any] = {"role": message.role, "content": content}
    if message.role == "function":
        if not message.name:
            raise bad_request(f"{path}.name is required: the function whose result this is", f"{path}.name")
        made["role"] = "tool"
    if message.name is not None:
        made["name"] = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if reasoning:
        made["reasoning_content"] = reasoning
    if calls := _calls(i, message, texts):
        made["tool_calls"] = calls
    return made


def _calls(i: int, message: Message, texts: JsonTexts) -> list[dict[str, Any]]:
    path, old = f"messages[{i}]", message.function_call
    field = f"{path}.function_call" if old is not None else f"{path}.tool_calls"
    if not message.tool_calls and old is None:
        return []
    if message.role != "assistant":
        raise bad_request(f"{field}: only an assistant calls tools", field)
    if old is None:
        return [_call(f"{field}[{k}]", call, texts) for k, call in enumerate(message.tool_calls or ())]
    if message.tool_calls:
        raise bad_request(f"{field} is the older form of tool_calls: a message may have one of them", field)
    return [{"id": f"call_{i}", **_function_call(field, old, texts)}]


def _function_call(path: str, called: CalledFunction, texts: JsonTexts) -> dict[str, Any]:
    arguments: Any = called.arguments or {}
    if isinstance(arguments, str):
        arguments = parsed_arguments(arguments, texts, f"{path}.arguments")
    return {"type": "function", "function": {"name": called.name, "arguments": arguments}}


def _text(i: int, k: int, part: ContentPart) -> str:
    path = f"messages[{i}].content[{k}]"
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type not in _TEXT_PARTS:
        raise bad_request(f"{path}.type: only text is supported, got {quoted(part.type)}", f"{path}.type")
    if part.text is None:
        raise bad_request(f"{path}.text is required", f"{path}.text")
    return part.text


def _call(path: str, call: MessageToolCall, texts: JsonTexts) -> dict[str, Any]:
    if call.type not in ("function", "custom"):
        wrong = f"{path}.type: only functions and custom tools are supported, got {quoted(call.type)}"
        raise bad_request(wrong, f"{path}.type")
    called = call.function if call.type == "function" else call.custom
    if called is None:
        raise bad_request(f"{path}.{call.type} is required", f"{path}.{call.type}")
    if isinstance(called, CalledCustom):
        made = {"type": "function", "function": {"name": called.name, "arguments": {INPUT: called.input}}}
    else:
        made = _function_call(f"{path}.function", called, texts)
    return made if call.id is None else {"id": call.id, **made}


# ---- what templates differ in ----

_TEXT_ARGUMENTS = re.compile(r"arguments['\"]?\]?\s*\+|\+\s*\w+\[['\"]function['\"]\]\[['\"]arguments['\"]\]\s*\+")
_NONE_CONTENT = re.compile(r"content['\"]?\]?\s+is\s+none")
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")


@lru_cache(maxsize=32)
def _traits(template: str) -> tuple[bool, bool]:
    """Return whether the template takes arguments of calls as text, and whether it asks for contents that are none."""
    return bool(_TEXT_ARGUMENTS.search(template)), bool(_NONE_CONTENT.search(template))


def adapt(chat: Conversation, template: str, tool_format: str | None) -> Conversation:
    """The messages as this template takes them. Ones that are as simple as most stay what they are."""
    messages = chat.messages
    if "developer" not in template and any(m["role"] == "developer" for m in messages):
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    if not any(len(m) > 2 for m in messages):
        return chat if messages is chat.messages else replace(chat, messages=messages)
    as_text, knows_none = _traits(template)
    names: dict[str, str] = {}
    adapted = []
    for message in messages:
        made = dict(message)
        if made["content"] is None and not knows_none:
            made["content"] = ""
        if calls := made.get("tool_calls"):
            names |= {call["id"]: call["function"]["name"] for call in calls if "id" in call}
            made["tool_calls"] = [_adapted_call(call, as_text, tool_format) for call in calls]
        if (call_id := made.get("tool_call_id")) is not None:
            if call_id in names:
                made.setdefault("name", names[call_id])
            made["tool_call_id"] = _call_id(call_id, tool_format)
        # The harmony template refuses a call after both reasoning and content.
        if tool_format == HARMONY and "reasoning_content" in made and not (calls and made["content"]):
            made["thinking"] = made["reasoning_content"]
        adapted.append(made)
    return replace(chat, messages=adapted)


def _adapted_call(call: dict[str, Any], as_text: bool, tool_format: str | None) -> dict[str, Any]:
    made = dict(call)
    if "id" in made:
        made["id"] = _call_id(made["id"], tool_format)
    arguments = made["function"]["arguments"]
    if isinstance(arguments, dict) and as_text:  # it joins them to other text
        made["function"] = made["function"] | {"arguments": json.dumps(arguments, ensure_ascii=False)}
    return made


def _call_id(call_id: str, tool_format: str | None) -> str:
    """Mistral's templates demand ids of nine letters and digits."""
    if tool_format != "mistral" or _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode(errors="surrogatepass"), digest_size=8).hexdigest()[:9]
