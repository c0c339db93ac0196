"""What a request to /v1/responses may hold, and the conversation that its items make up."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from asyncengine.checks import quoted
from asyncengine.json_text import JsonTexts
from asyncengine.server.errors import ApiError, bad_request
from asyncengine.server.protocol import (
    BodyDecoder,
    GenerationBody,
    JsonSchemaFormat,
    ResponseFormat,
    Schema,
    not_given,
    schema_text,
    unsupported,
)
from asyncengine.server.tools import (
    FunctionBody,
    NamedFunction,
    NamedTool,
    ToolBody,
    ToolUse,
    parsed_arguments,
    tool_use,
)
from asyncengine.server.turns import Turns, check_count, renamed, required
from asyncengine.server.unserved import RESPONSES

#: Of GenerationBody: they add to a response what this API has no place for.
_NO_PLACE = ("n", "best_of", "prompt_logprobs", "logprob_token_ids", "return_token_ids", "return_tokens_as_token_ids")
_ROLES = ("system", "developer", "user", "assistant")
TOOL_FIELDS = {"].function": "]"}
"""Names that this API has for what chat completions have within a function."""
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
#: What `include` may ask for: the rest belongs to tools that are refused. Reasoning is never encrypted here.
_INCLUDABLE = "reasoning.encrypted_content"
_METADATA_LIMITS = (16, 64, 512)  # pairs, characters of a key, characters of a value


class Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct):
    """One of the input: a message, a call of a function, its output, or reasoning."""

    type: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None


class TextFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    schema: Schema = msgspec.field(default_factory=not_given)
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    def described(self) -> dict[str, Any]:
        """The fields that were given, as a response repeats them."""
        members = msgspec.structs.asdict(self)
        return {name: value for name, value in members.items() if value is not None and value != msgspec.Raw()}


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class FunctionTool(msgspec.Struct):
    """Tools of other types are refused by their name."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(msgspec.Struct):
    type: str
    name: str | None = None


class ResponsesBody(GenerationBody, kw_only=True):
    input: str | list[Item] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    user: str | None = None


DECODER = BodyDecoder(ResponsesBody, RESPONSES)


def decode(raw: bytes | bytearray) -> ResponsesBody:
    """With the fields of GenerationBody filled in that this API has under other names. Raises ApiError 400."""
    body = DECODER.decode(raw)
    for name in _NO_PLACE:
        if getattr(body, name) not in (None, False) and not (name in ("n", "best_of") and getattr(body, name) == 1):
            raise unsupported(name)
    body.stream_options = None  # include_obfuscation: nothing is padded here
    if body.max_output_tokens is not None:
        if body.max_output_tokens < 1:
            raise bad_request(
                f"max_output_tokens must be at least 1, got {body.max_output_tokens}", "max_output_tokens"
            )
        body.max_tokens, body.max_completion_tokens = body.max_output_tokens, None
    if body.text is not None:
        _read_text(body, body.text)
    _check_metadata(body.metadata or {})
    for name in body.include or ():
        if name != _INCLUDABLE:
            raise bad_request(f"include: {quoted(name)} is not supported by this server", "include")
    return body


def _read_text(body: ResponsesBody, text: TextConfig) -> None:
    if text.verbosity not in (None, "medium"):
        raise unsupported("text.verbosity")
    form = text.format
    if form is None:
        return
    form.schema = form.schema.copy()
    if schema_text(form.schema, "text.format.schema") is None and form.type == "json_schema":
        raise bad_request("text.format.schema is required", "text.format.schema")
    if form.type != "text" and body.response_format is not None:
        raise bad_request("text.format and response_format ask for the form of the output", "response_format")
    body.response_format = ResponseFormat(form.type, JsonSchemaFormat(form.schema))


def _check_metadata(metadata: dict[str, str]) -> None:
    pairs, key, value = _METADATA_LIMITS
    if len(metadata) > pairs or any(len(k) > key or len(v) > value for k, v in metadata.items()):
        raise bad_request(
            f"metadata: at most {pairs} pairs, of keys of {key} and values of {value} characters", "metadata"
        )


def tools_of(body: ResponsesBody) -> ToolUse | None:
    """None without tools. Raises ApiError 400."""
    functions = [FunctionBody(tool.name, tool.description, tool.parameters, tool.strict) for tool in body.tools or ()]
    tools = [ToolBody(tool.type, function) for tool, function in zip(body.tools or (), functions, strict=True)]
    asked = body.tool_choice
    if isinstance(asked, ChosenTool) and asked.type != "function":
        wrong = f"tool_choice: {quoted(asked.type)} is not supported by this server"
        raise bad_request(wrong, "tool_choice", "unsupported_parameter")
    choice = NamedTool("function", NamedFunction(asked.name)) if isinstance(asked, ChosenTool) else asked
    try:
        return tool_use(tools, choice, body.parallel_tool_calls)
    except ApiError as exc:
        raise renamed(exc, TOOL_FIELDS) from None


def add_input(turns: Turns, given: str | list[Item] | None) -> None:
    """Have ``turns`` end with the input. Raises ApiError 400 that names the wrong item."""
    if not given:
        raise bad_request("input is required and must not be empty", "input")
    if isinstance(given, str):
        turns.text("user", given)
        return
    check_count("input", (each for item in given for each in (item.content, item.output, item.summary)))
    json_texts = JsonTexts()
    for i, item in enumerate(given):
        _add(turns, item, f"input[{i}]", json_texts)
    if not turns.messages:
        raise bad_request("input holds no text", "input")


def _add(turns: Turns, item: Item, path: str, json_texts: JsonTexts) -> None:
    match item.type:
        case None | "message":
            if item.role not in _ROLES:
                known = ", ".join(_ROLES)
                raise bad_request(f"{path}.role must be one of {known}, got {quoted(item.role)}", f"{path}.role")
            turns.text(item.role, _joined(item.content, f"{path}.content"))
        case "reasoning":
            if item.encrypted_content is not None and not item.content:
                raise unsupported(f"{path}.encrypted_content")
            texts = item.content or item.summary
            turns.reasoning(_joined(texts, f"{path}.content") if texts else "")
        case "function_call":
            call_id, name = required(item.call_id, f"{path}.call_id"), required(item.name, f"{path}.name")
            arguments = parsed_arguments(item.arguments or "{}", json_texts, f"{path}.arguments")
            turns.call(call_id, name, arguments)
        case "function_call_output":
            call_id = required(item.call_id, f"{path}.call_id")
            turns.result(call_id, _joined(item.output, f"{path}.output", empty=True), f"{path}.call_id")
        case _:
            raise bad_request(
                f"{path}.type: {quoted(item.type)} is not supported by this server",
                f"{path}.type",
                "unsupported_parameter",
            )


def _joined(content: str | list[Part] | None, path: str, *, empty: bool = False) -> str:
    """The text of a content. Raises ApiError 400 unless it has parts, and of nothing but text."""
    if isinstance(content, str):
        return content
    if content is None or not (content or empty):
        raise bad_request(f"{path} is required and must not be empty", path)
    texts = []
    for k, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in _TEXTS and part.type != "refusal":
            where = f"{path}[{k}].type"
            raise bad_request(f"{where}: only text is supported, got {quoted(part.type)}", where)
        if text is None:
            where = f"{path}[{k}].{'refusal' if part.type == 'refusal' else 'text'}"
            raise bad_request(f"{where} is required", where)
        texts.append(text)
    return "".join(texts)
