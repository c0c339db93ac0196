"""Bodies of requests to /v1/responses, and the conversation that their items make up."""

from __future__ import annotations

import uuid
from typing import Any, Literal

import msgspec

from asyncengine.api.checks import quoted
from asyncengine.api.json_text import JsonTexts
from asyncengine.server.errors import bad_request
from asyncengine.server.parsing.inputs import INPUT
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
from asyncengine.server.response_store import OwnResponses
from asyncengine.server.responses_tools import ChosenTool, ResponsesTool, model_name
from asyncengine.server.tools import parsed_arguments
from asyncengine.server.turns import Turns, check_count, required
from asyncengine.server.unserved import RESPONSES

#: Fields of GenerationBody that add to a response values for which this API has no place.
_NO_PLACE = ("n", "prompt_logprobs", "logprob_token_ids", "return_token_ids", "return_tokens_as_token_ids")
_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
}
"""Prefixes of the ids of items, by their types."""
_ROLES = ("system", "developer", "user", "assistant")
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_LOGPROBS = "message.output_text.logprobs"
#: Beside that, `include` may ask for data of things that responses do not have here: hosted tools, images, encryption.
_INCLUDABLE = (
    _LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_VERBOSITIES = ("low", "medium", "high")
_TRUNCATIONS = ("auto", "disabled")
_METADATA_LIMITS = (16, 64, 512)  # pairs, characters of a key, characters of a value


class Part(msgspec.Struct, omit_defaults=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct, omit_defaults=True):
    """Item of the input: a message, a call of a tool, its output, or reasoning."""

    id: str | None = None
    type: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
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
    tools: list[ResponsesTool] | None = None
    tool_choice: str | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    user: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Most probable tokens that are asked for at each place of the text; None without log probabilities."""
        return self.top_logprobs or (0 if _LOGPROBS in (self.include or ()) else None)


DECODER = BodyDecoder(ResponsesBody, RESPONSES)


def decode(raw: bytes | bytearray) -> ResponsesBody:
    """Decode a body, and fill in the fields of GenerationBody that this API has under other names. Raises ApiError
    400."""
    body = DECODER.decode(raw)
    for name in _NO_PLACE:
        if getattr(body, name) not in (None, False) and not (name == "n" and body.n == 1):
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
        if name not in _INCLUDABLE:
            raise bad_request(f"include: {quoted(name)} is not supported by this server", "include")
    if body.truncation not in (None, *_TRUNCATIONS):
        raise bad_request(f"truncation must be auto or disabled, got {quoted(body.truncation)}", "truncation")
    return body


def _read_text(body: ResponsesBody, text: TextConfig) -> None:
    if text.verbosity not in (None, *_VERBOSITIES):
        known = ", ".join(_VERBOSITIES)
        raise bad_request(f"text.verbosity must be one of {known}, got {quoted(text.verbosity)}", "text.verbosity")
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


def items_of(given: str | list[Item] | None, own: OwnResponses) -> list[Item]:
    """The input as items, each with its type and an id, and those it refers to in their place. Raises ApiError 400."""
    if not given:
        raise bad_request("input is required and must not be empty", "input")
    if isinstance(given, str):
        given = [Item(role="user", content=given)]
    check_count("input", given)  # before each of them gets an id; add_items counts their parts as well
    return [_whole(item, own, f"input[{i}]") for i, item in enumerate(given)]


def _whole(item: Item, own: OwnResponses, path: str) -> Item:
    if item.type == "item_reference" or (item.type is None and item.id is not None and item.role is None):
        stored = own.item(required(item.id, f"{path}.id"))
        if stored is None:
            raise bad_request(f"{path}.id: there is no stored item {quoted(item.id)}", f"{path}.id")
        return msgspec.json.decode(stored, type=Item)
    item.type = item.type or "message"
    item.id = item.id or f"{_PREFIXES.get(item.type, 'item_')}{uuid.uuid4().hex}"
    return item


def stored_item(item: Item) -> Item:
    """Return an item as the list of a response's items has it: contents are parts, and the item is complete."""
    kind = "output_text" if item.role == "assistant" else "input_text"
    content = [Part(kind, item.content)] if isinstance(item.content, str) else item.content
    return msgspec.structs.replace(item, content=content, status=item.status or "completed")


def add_items(turns: Turns, items: list[Item]) -> None:
    """Have ``turns`` go on with the items. Raises ApiError 400 that names the wrong one."""
    check_count("input", (each for item in items for each in (item.content, item.output, item.summary)))
    json_texts = JsonTexts()
    for i, item in enumerate(items):
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
                return  # of another model, for whose server alone it says anything
            texts = item.content or item.summary
            turns.reasoning(_joined(texts, f"{path}.content") if texts else "")
        case "function_call":
            arguments = parsed_arguments(item.arguments or "{}", json_texts, f"{path}.arguments")
            turns.call(*_called(item, path), arguments)
        case "custom_tool_call":
            turns.call(*_called(item, path), {INPUT: item.input or ""})
        case "function_call_output" | "custom_tool_call_output":
            call_id = required(item.call_id, f"{path}.call_id")
            turns.result(call_id, _joined(item.output, f"{path}.output", empty=True), f"{path}.call_id")
        case _:
            raise bad_request(
                f"{path}.type: {quoted(item.type)} is not supported by this server",
                f"{path}.type",
                "unsupported_parameter",
            )


def _called(item: Item, path: str) -> tuple[str, str]:
    """The id of a call, and the model's name of its tool."""
    call_id, name = required(item.call_id, f"{path}.call_id"), required(item.name, f"{path}.name")
    return call_id, model_name(item.namespace, name) or name


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
