"""OpenAI's older names for tools in chat completions: ``functions`` and ``function_call``. One output has one call."""

from __future__ import annotations

from collections.abc import Sequence

from asyncengine.errors import InvalidRequestError
from asyncengine.server.errors import ApiError, bad_request
from asyncengine.server.tools import FunctionBody, NamedFunction, NamedTool, ToolBody, ToolUse, tool_use
from asyncengine.server.turns import as_called, renamed

_NAMES = {"].function.": "].", "tool_choice": "function_call", "tools:": "functions:"}
"""Names that this form has for what tools have."""


def check_functions(functions: Sequence[FunctionBody] | None, choice: object, tools: Sequence[ToolBody] | None) -> None:
    """Raises ApiError 400 for what goes with neither form."""
    if functions and tools:
        raise bad_request("functions is the older form of tools: a request may have one of them", "functions")
    if isinstance(choice, str) and choice not in ("none", "auto"):
        raise bad_request("function_call must be none, auto or the name of a function in an object", "function_call")
    if isinstance(choice, NamedFunction) and not functions:
        raise bad_request("function_call needs functions", "function_call")


def function_use(functions: Sequence[FunctionBody], choice: str | NamedFunction | None) -> ToolUse | None:
    """The same as tools. Raises ApiError 400."""
    tools = [ToolBody("function", function) for function in functions]
    asked = NamedTool("function", choice) if isinstance(choice, NamedFunction) else choice
    try:
        return tool_use(tools, asked, False, [f"functions[{i}]" for i in range(len(tools))])
    except ApiError as exc:
        raise as_functions(exc) from None


def as_functions(error: ApiError) -> ApiError:
    """About tools, as the same about functions."""
    made = renamed(error, _NAMES)
    made.param = "functions" if made.param == "tools" else made.param
    return made


def name_as_functions(exc: InvalidRequestError) -> None:
    """``as_functions`` for an error of the engine."""
    if exc.param is not None:
        exc.param = "functions" if exc.param == "tools" else as_called(_NAMES, exc.param)
    exc.args = (as_called(_NAMES, str(exc)),)
