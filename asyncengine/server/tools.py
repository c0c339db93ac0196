"""Tools of a request: what may be called, and whether something must be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncengine.checks import quoted
from asyncengine.json_text import JsonTexts, JsonTooLargeError
from asyncengine.server.errors import bad_request

_NAME = re.compile(r"[A-Za-z0-9_][\w.\-]{0,127}", re.ASCII)
_TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}
_MAX_TOOLS = 1024
_MAX_SCHEMA_NODES = 20_000
"""Schemas and lists of all tools' parameters, together: checking them takes some 10 ms at most."""
_EMPTY_KEYS = {"type", "properties", "required", "additionalProperties", "title", "description", "$schema", "$defs",
               "definitions", "strict"}  # fmt: skip
"""Members of a schema that add no parameter to those in its properties."""
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "$defs", "definitions", "patternProperties")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """A JSON Schema of an object."""
    strict: bool = False

    @property
    def takes_nothing(self) -> bool:
        """Whether it has no parameters, so that its arguments are ``{}``."""
        rest = self.parameters.keys() - _EMPTY_KEYS
        return not rest and self.parameters.get("properties") == {} and not self.parameters.get("additionalProperties")

    @property
    def schema(self) -> dict[str, Any]:
        """The parameters as a grammar takes them: nothing where there are none."""
        return self.parameters | {"additionalProperties": False} if self.takes_nothing else self.parameters

    def described(self) -> dict[str, Any]:
        """As templates take it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and how they may be used."""

    tools: tuple[Tool, ...]
    choice: str = "auto"
    """none, auto, required, or "function"."""
    named: str | None = None
    """With choice "function": the tool that must be called."""
    parallel: bool = True
    """Whether one output may have several calls."""

    @property
    def forced(self) -> tuple[Tool, ...]:
        """The tools of which one must be called, if so."""
        if self.choice == "function":
            return tuple(tool for tool in self.tools if tool.name == self.named)
        return self.tools if self.choice == "required" else ()


class FunctionBody(msgspec.Struct):
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct):
    type: str = "function"
    function: FunctionBody | None = None


class NamedFunction(msgspec.Struct):
    name: str | None = None


class NamedTool(msgspec.Struct):
    type: str
    function: NamedFunction | None = None


def tool_use(tools: Sequence[ToolBody] | None, choice: str | NamedTool | None, parallel: bool | None) -> ToolUse | None:
    """What a body asks for; None without tools. Raises ApiError 400."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return None
    if len(tools) > _MAX_TOOLS:
        raise bad_request(f"tools: at most {_MAX_TOOLS} are allowed, got {len(tools)}", "tools")
    checked: dict[str, Tool] = {}
    count = 0
    for i, body in enumerate(tools):
        tool = _tool(i, body)
        if tool.name in checked:
            path = f"tools[{i}].function.name"
            raise bad_request(f"{path}: {quoted(tool.name)} is the name of an earlier tool", path)
        checked[tool.name] = tool
        count = check_schema(tool.parameters, f"tools[{i}].function.parameters", count)
    kind, named = _choice(choice, checked)
    return ToolUse(tuple(checked.values()), kind, named, parallel is not False)


def _tool(i: int, body: ToolBody) -> Tool:
    if body.type != "function":
        path = f"tools[{i}].type"
        raise bad_request(f"{path}: only functions are supported, got {quoted(body.type)}", path)
    function = body.function
    if function is None:
        raise bad_request(f"tools[{i}].function is required", f"tools[{i}].function")
    if function.name is None or not _NAME.fullmatch(function.name):
        path = f"tools[{i}].function.name"
        raise bad_request(
            f"{path} must consist of at most 128 letters, digits, '_', '-' and '.', got {quoted(function.name)}",
            path,
        )
    parameters = function.parameters or {"type": "object", "properties": {}}
    if parameters.get("type", "object") != "object":
        path = f"tools[{i}].function.parameters"
        raise bad_request(f"{path} must be the schema of an object, got type {quoted(parameters['type'])}", path)
    return Tool(function.name, function.description, {"type": "object"} | parameters, bool(function.strict))


def _choice(choice: str | NamedTool | None, tools: dict[str, Tool]) -> tuple[str, str | None]:
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise bad_request(
                f"tool_choice must be none, auto, required or a function, got {quoted(choice)}", "tool_choice"
            )
        return choice, None
    if choice.type != "function" or choice.function is None or choice.function.name is None:
        raise bad_request("tool_choice: a function and its name are needed", "tool_choice")
    if choice.function.name not in tools:
        raise bad_request(f"tool_choice: {quoted(choice.function.name)} is not one of tools", "tool_choice")
    return "function", choice.function.name


def check_schema(schema: object, path: str, count: int = 0) -> int:
    """Raises ApiError 400 that names ``path`` if a JSON Schema is malformed in its common keywords.

    ``count`` nodes were checked before; returns how many there are now. Depth is limited by that of bodies.
    """
    count += 1
    if count > _MAX_SCHEMA_NODES:
        raise bad_request(f"{path}: the parameters of all tools are too large", path)
    if isinstance(schema, bool):
        return count
    if not isinstance(schema, dict):
        raise _malformed(path, "a schema must be an object or a boolean")
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise _malformed(path, f"type must be one of {', '.join(sorted(_TYPES))}, got {quoted(kind)}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _malformed(path, "required must be a list of names")
    if not isinstance(schema.get("enum", []), list):
        raise _malformed(path, "enum must be a list")
    for key in _MAPS:
        if not isinstance(members := schema.get(key, {}), dict):
            raise _malformed(path, f"{key} must be an object")
        for member in members.values():
            count = check_schema(member, path, count)
    for key in _LISTS:
        if not isinstance(members := schema.get(key, []), list):
            raise _malformed(path, f"{key} must be a list")
        for member in members:
            count = check_schema(member, path, count)
    for key in _SCHEMAS:
        if key in schema:
            for member in schema[key] if isinstance(schema[key], list) else [schema[key]]:
                count = check_schema(member, path, count)
    return count


def parsed_arguments(text: str, texts: JsonTexts, path: str) -> str | dict[str, Any]:
    """Arguments of a call in a conversation, which templates print as an object.

    What is no JSON object, as a model may well have written it, stays text. Raises ApiError 400 that names ``path``
    for JSON that is over the limits of ``texts``.
    """
    try:
        made = texts.parse(text)
    except JsonTooLargeError as exc:
        raise bad_request(f"{path}: {exc}", path) from None
    except ValueError:
        return text
    return made if isinstance(made, dict) else text


def _malformed(path: str, message: str) -> Exception:
    return bad_request(f"{path} is no JSON Schema: {message}", path)
