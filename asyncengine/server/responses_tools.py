"""Tools of /v1/responses: functions, custom tools, namespaces of both, and hosted tools, which are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncengine.api.checks import quoted
from asyncengine.server.errors import ApiError, bad_request
from asyncengine.server.tools import (
    AllowedTools,
    CustomBody,
    FunctionBody,
    GrammarBody,
    InputFormat,
    NamedFunction,
    NamedTool,
    ToolBody,
    ToolReference,
    ToolUse,
    tool_use,
)
from asyncengine.server.turns import renamed
from asyncengine.server.unserved import pass_over

TOOL_FIELDS = {"].function": "]", "].custom": "]", ".format.grammar": ".format"}
"""Names that this API has for what chat completions have within a function or a custom tool."""
_HOSTED = (
    "web_search", "web_search_preview", "file_search", "computer", "computer_use", "computer_use_preview",
    "code_interpreter", "image_generation", "mcp", "local_shell", "shell", "apply_patch", "tool_search",
    "programmatic_tool_calling",
)  # fmt: skip
"""Types of tools that OpenAI's own server runs or describes to its models. Some also come with a date behind."""
_JOINT = "__"
"""Text between a namespace and the name of a tool in it, for the model."""


class ToolFormat(msgspec.Struct, omit_defaults=True):
    """The form of a custom tool's input."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class FunctionTool(msgspec.Struct, omit_defaults=True):
    """A function or a custom tool. Only the type of other tools is read."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: ToolFormat | None = None


class ResponsesTool(FunctionTool, omit_defaults=True):
    """Any tool, or a namespace of tools."""

    tools: list[FunctionTool] | None = None


class ChosenName(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None
    namespace: str | None = None


class ChosenTool(ChosenName, omit_defaults=True):
    """A tool that must be called, or those that may be."""

    mode: str | None = None
    tools: list[ChosenName] | None = None


@dataclass(slots=True)
class _Flat:
    """The tools that the model may get, one after the other."""

    bodies: list[ToolBody] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    spaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Namespace and name in it, by the model's name of a tool."""
    hosted: dict[str, str] = field(default_factory=dict)
    """Paths of hosted tools by their types."""


def hosted_type(kind: str) -> str | None:
    """The name of a type of hosted tools without its date; None for any other type."""
    bare = kind.partition("_20")[0]
    return bare if bare in _HOSTED else None


def tools_of(
    tools: Sequence[ResponsesTool] | None, choice: str | ChosenTool | None, parallel: bool | None
) -> tuple[ToolUse | None, dict[str, tuple[str, str]]]:
    """Return the tool use that a body asks for (None: no tools), and the namespace and name of each tool in a
    namespace, by the model's name for it.

    Raises ApiError 400.
    """
    flat = _flattened(tools or ())
    if choice == "required" and flat.hosted and not flat.bodies:
        kind, path = next(iter(flat.hosted.items()))
        raise _not_served(kind, f"{path}.type")
    for kind in flat.hosted:
        pass_over(f"tools of type {kind}")
    asked = _choice(choice) if isinstance(choice, ChosenTool) else choice
    try:
        return tool_use(flat.bodies, asked, parallel, flat.paths), flat.spaces
    except ApiError as exc:
        raise renamed(exc, TOOL_FIELDS) from None


def model_name(namespace: str | None, name: str | None) -> str | None:
    """The name by which the model knows a tool."""
    return f"{namespace}{_JOINT}{name}" if namespace and name else name


def _flattened(tools: Sequence[ResponsesTool]) -> _Flat:
    flat = _Flat()
    for i, tool in enumerate(tools):
        path = f"tools[{i}]"
        if (kind := hosted_type(tool.type)) is not None:
            flat.hosted.setdefault(kind, path)
        elif tool.type == "namespace":
            if not tool.name:
                raise bad_request(f"{path}.name is required", f"{path}.name")
            for k, inner in enumerate(tool.tools or ()):
                name = model_name(tool.name, inner.name)
                flat.bodies.append(_body(inner, name, _joined(tool.description, inner.description)))
                flat.paths.append(f"{path}.tools[{k}]")
                if name and inner.name:
                    flat.spaces[name] = tool.name, inner.name
        else:
            flat.bodies.append(_body(tool, tool.name, tool.description))
            flat.paths.append(path)
    return flat


def _joined(*descriptions: str | None) -> str | None:
    return "\n".join(filter(None, descriptions)) or None


def _body(tool: FunctionTool, name: str | None, description: str | None) -> ToolBody:
    if tool.type != "custom":
        return ToolBody(tool.type, FunctionBody(name, description, tool.parameters, tool.strict))
    form = tool.format
    asked = None if form is None else InputFormat(form.type, GrammarBody(form.syntax, form.definition))
    return ToolBody(tool.type, None, CustomBody(name, description, asked))


def _choice(choice: ChosenTool) -> NamedTool | str:
    if choice.type != "allowed_tools":
        reference = _reference(choice)
        return NamedTool(reference.type, reference.function, reference.custom)
    allowed = choice.tools or []
    kinds = [hosted_type(each.type) for each in allowed]
    served = [_reference(each) for each, kind in zip(allowed, kinds, strict=True) if kind is None]
    if allowed and not served:  # all are hosted
        if choice.mode == "required":
            raise _not_served(kinds[0] or "", "tool_choice")
        return "none"
    return NamedTool(choice.type, allowed_tools=AllowedTools(choice.mode, served))


def _reference(chosen: ChosenName) -> ToolReference:
    """Return a reference with the model's name of the tool. Raises ApiError 400 for a hosted tool, which cannot be
    called."""
    if chosen.type not in ("function", "custom"):
        raise _not_served(chosen.type, "tool_choice")
    named = NamedFunction(model_name(chosen.namespace, chosen.name))
    return ToolReference("custom", custom=named) if chosen.type == "custom" else ToolReference("function", named)


def _not_served(kind: str, param: str) -> ApiError:
    return bad_request(f"{param}: {quoted(kind)} is not supported by this server", param, "unsupported_parameter")
