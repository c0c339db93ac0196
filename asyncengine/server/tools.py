"""Tools of a request: what may be called, and whether something must be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncengine.api.checks import quoted
from asyncengine.api.json_text import JsonTexts, JsonTooLargeError
from asyncengine.server.errors import bad_request
from asyncengine.server.parsing.inputs import INPUT

_NAME = re.compile(r"[A-Za-z0-9_][\w.\-]{0,127}", re.ASCII)
_TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}
_MAX_TOOLS = 1024
_MAX_SCHEMA_NODES = 20_000
"""Schemas and lists of all tools' parameters, together: checking them takes some 10 ms at most."""
_MAX_GRAMMARS = 16_384
"""Characters of the grammars of all custom tools together: making grammars of calls takes some 20 ms at most."""
_EMPTY_KEYS = {"type", "properties", "required", "additionalProperties", "title", "description", "$schema", "$defs",
               "definitions", "strict"}  # fmt: skip
"""Members of a schema that add no parameter to those in its properties."""
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "$defs", "definitions", "patternProperties")


_INPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class InputGrammar:
    """Grammar that the input of a custom tool must follow."""

    syntax: str
    """lark or regex."""
    definition: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. A custom tool is one with a single text, its input."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """A JSON Schema of an object."""
    strict: bool = False
    path: str = "tools"
    """Place in the request of the schema or definition from which a grammar of the arguments is made."""
    custom: bool = False
    grammar: InputGrammar | None = None
    """Grammar of a custom tool's input; None: the input is any text."""

    @property
    def takes_nothing(self) -> bool:
        """True if the tool has no parameters, so that its arguments are ``{}``."""
        rest = self.parameters.keys() - _EMPTY_KEYS
        return not rest and self.parameters.get("properties") == {} and not self.parameters.get("additionalProperties")

    @property
    def schema(self) -> dict[str, Any]:
        """The parameters as a grammar takes them: nothing where there are none."""
        if self.grammar is not None and self.grammar.syntax == "regex":
            return self.parameters | {
                "properties": {INPUT: {"type": "string", "pattern": f"^(?:{self.grammar.definition})$"}}
            }
        return self.parameters | {"additionalProperties": False} if self.takes_nothing else self.parameters

    def described(self) -> dict[str, Any]:
        """Return the tool as templates take it."""
        function: dict[str, Any] = {"name": self.name}
        said = [] if self.description is None else [self.description]
        if self.grammar is not None:
            said.append(f"The {INPUT} follows this grammar ({self.grammar.syntax}):\n{self.grammar.definition}")
        if said:
            function["description"] = "\n\n".join(said)
        return {"type": "function", "function": function | {"parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and how they may be used."""

    tools: tuple[Tool, ...]
    choice: str = "auto"
    """none, auto, required, or "function"."""
    named: str | None = None
    """The tool that must be called, with choice "function"."""
    parallel: bool = True
    """True if one output may have several calls."""

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


class GrammarBody(msgspec.Struct):
    syntax: str | None = None
    definition: str | None = None


class InputFormat(msgspec.Struct):
    type: str = "text"
    grammar: GrammarBody | None = None


class CustomBody(msgspec.Struct):
    name: str | None = None
    description: str | None = None
    format: InputFormat | None = None


class ToolBody(msgspec.Struct):
    type: str = "function"
    function: FunctionBody | None = None
    custom: CustomBody | None = None


class NamedFunction(msgspec.Struct):
    name: str | None = None


class ToolReference(msgspec.Struct):
    type: str
    function: NamedFunction | None = None
    custom: NamedFunction | None = None


class AllowedTools(msgspec.Struct):
    mode: str | None = None
    tools: list[ToolReference] | None = None


class NamedTool(ToolReference):
    """A tool that must be called, or some that may be."""

    allowed_tools: AllowedTools | None = None


def tool_use(
    tools: Sequence[ToolBody] | None,
    choice: str | NamedTool | None,
    parallel: bool | None,
    paths: Sequence[str] | None = None,
) -> ToolUse | None:
    """Return the tool use that a body asks for; None without tools. Raises ApiError 400.

    ``paths``: where the request has each of the tools, if not as the members of ``tools``.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return None
    if len(tools) > _MAX_TOOLS:
        raise bad_request(f"tools: at most {_MAX_TOOLS} are allowed, got {len(tools)}", "tools")
    checked: dict[str, Tool] = {}
    count = length = 0
    for body, path in zip(tools, paths or [f"tools[{i}]" for i in range(len(tools))], strict=True):
        tool = _tool(body, path)
        if tool.name in checked:
            path = f"{path}.{body.type}.name"
            raise bad_request(f"{path}: {quoted(tool.name)} is the name of an earlier tool", path)
        checked[tool.name] = tool
        count = check_schema(tool.parameters, tool.path, count)
        length += 0 if tool.grammar is None else len(tool.grammar.definition)
        if length > _MAX_GRAMMARS:
            raise bad_request(f"{tool.path}: grammars may have {_MAX_GRAMMARS} characters in all", tool.path)
    kind, chosen = _choice(choice, checked)
    named = chosen[0] if kind == "function" else None
    allowed = tuple(checked[name] for name in chosen) if chosen and named is None else tuple(checked.values())
    return ToolUse(allowed, kind, named, parallel is not False)


def _tool(body: ToolBody, path: str) -> Tool:
    if body.type not in ("function", "custom"):
        path = f"{path}.type"
        raise bad_request(f"{path}: only functions and custom tools are supported, got {quoted(body.type)}", path)
    path = f"{path}.{body.type}"
    given = body.function if body.type == "function" else body.custom
    if given is None:
        raise bad_request(f"{path} is required", path)
    if given.name is None or not _NAME.fullmatch(given.name):
        path = f"{path}.name"
        raise bad_request(
            f"{path} must consist of at most 128 letters, digits, '_', '-' and '.', got {quoted(given.name)}", path
        )
    if isinstance(given, CustomBody):
        grammar = _input_grammar(given.format, f"{path}.format")
        strict, path = grammar is not None, f"{path}.format"
        return Tool(given.name, given.description, _INPUT_SCHEMA, strict, path, custom=True, grammar=grammar)
    path = f"{path}.parameters"
    parameters = given.parameters or {"type": "object", "properties": {}}
    if parameters.get("type", "object") != "object":
        raise bad_request(f"{path} must be the schema of an object, got type {quoted(parameters['type'])}", path)
    return Tool(given.name, given.description, {"type": "object"} | parameters, bool(given.strict), path)


def _input_grammar(form: InputFormat | None, path: str) -> InputGrammar | None:
    if form is None or form.type == "text":
        return None
    if form.type != "grammar":
        raise bad_request(f"{path}.type must be text or grammar, got {quoted(form.type)}", f"{path}.type")
    path = f"{path}.grammar"
    if form.grammar is None:
        raise bad_request(f"{path} is required", path)
    syntax, definition = form.grammar.syntax, form.grammar.definition
    if syntax not in ("lark", "regex"):
        raise bad_request(f"{path}.syntax must be lark or regex, got {quoted(syntax)}", f"{path}.syntax")
    if not definition:
        raise bad_request(f"{path}.definition is required", f"{path}.definition")
    return InputGrammar(syntax, definition)


def _choice(choice: str | NamedTool | None, tools: dict[str, Tool]) -> tuple[str, list[str]]:
    """The kind of choice, and the names of the tool that must be called or of those that may be; none: of all."""
    if choice is None:
        return "auto", []
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise bad_request(
                f"tool_choice must be none, auto, required or a function, got {quoted(choice)}", "tool_choice"
            )
        return choice, []
    if choice.type != "allowed_tools":
        return "function", [_named(choice, tools)]
    allowed = choice.allowed_tools
    if allowed is None or not allowed.tools:
        raise bad_request("tool_choice: allowed_tools must have tools", "tool_choice")
    if allowed.mode not in ("auto", "required"):
        raise bad_request(f"tool_choice: mode must be auto or required, got {quoted(allowed.mode)}", "tool_choice")
    names = {_named(reference, tools) for reference in allowed.tools}
    return allowed.mode, [name for name in tools if name in names]


def _named(reference: ToolReference, tools: dict[str, Tool]) -> str:
    given = {"function": reference.function, "custom": reference.custom}.get(reference.type)
    if given is None or given.name is None:
        raise bad_request("tool_choice: a function or a custom tool and its name are needed", "tool_choice")
    tool = tools.get(given.name)
    if tool is None or tool.custom != (reference.type == "custom"):
        raise bad_request(f"tool_choice: {quoted(given.name)} is not one of tools", "tool_choice")
    return given.name


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

    Arguments that are no JSON object, as a model may well have written them, stay text. Raises ApiError 400 that names
    ``path`` for JSON that is over the limits of ``texts``.
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
