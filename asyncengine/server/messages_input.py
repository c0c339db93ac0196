"""Bodies of requests to /v1/messages, and the conversation that their blocks make up."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from asyncengine.api.checks import quoted
from asyncengine.api.conversation import Conversation
from asyncengine.api.json_text import JsonTexts
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
from asyncengine.server.unserved import MESSAGES, pass_over

#: Fields of GenerationBody that add to a response values for which this API has no place.
_NO_PLACE = ("n", "prompt_logprobs", "logprob_token_ids", "return_token_ids", "return_tokens_as_token_ids")


TOOL_FIELDS = {"].function.parameters": "].input_schema", "].function": "]"}
"""Names that this API has for what chat completions have within a function."""


class Block(msgspec.Struct):
    """Block of a message or of a result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Schema = msgspec.field(default_factory=not_given)
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None


class Turn(msgspec.Struct):
    role: str
    content: str | list[Block]


class Tool(msgspec.Struct):
    """Tools with a type of their own are refused by it."""

    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[str] | None = None
    """The model is "direct"; other callers are programs on a server that this one is not."""


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None
    """omitted: thinking blocks have no text."""


class Thread(msgspec.Struct):
    """A conversation that the server would keep. No server of this project keeps one."""

    type: str | None = None


class OutputForm(msgspec.Struct):
    type: Literal["json_schema"]
    schema: Schema


class TaskBudget(msgspec.Struct):
    total: int | None = None


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: OutputForm | None = None
    task_budget: TaskBudget | None = None


class MessagesBody(GenerationBody, kw_only=True):
    messages: list[Turn] | None = None
    system: str | list[Block] | None = None
    stop_sequences: list[str] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputForm | None = None
    """``output_config.format`` in older clients."""
    thread: Thread | None = None


DECODER = BodyDecoder(MessagesBody, MESSAGES)


def decode(raw: bytes | bytearray, *, counts: bool = False) -> MessagesBody:
    """Decode a body, and fill in the fields of GenerationBody that this API has under other names. Raises ApiError 400.

    ``counts``: the request generates nothing, so that it needs no max_tokens.
    """
    body = DECODER.decode(raw)
    for name in _NO_PLACE:
        if getattr(body, name) not in (None, False) and not (name == "n" and body.n == 1):
            raise unsupported(name)
    body.stream_options = None
    if body.thread is not None:
        raise _no_thread(body.thread)
    if not counts and (body.max_tokens is None or body.max_tokens < 1):
        got = "" if body.max_tokens is None else f", got {body.max_tokens}"
        raise bad_request(f"max_tokens is required and must be at least 1{got}", "max_tokens")
    body.max_completion_tokens = None
    if body.stop_sequences is not None:
        body.stop = body.stop_sequences
    if body.output_config is not None:
        if body.output_config.task_budget is not None:
            pass_over("output_config.task_budget")
        _take_form(body, body.output_config.format, "output_config.format")
    _take_form(body, body.output_format, "output_format")
    return body


def _take_form(body: MessagesBody, form: OutputForm | None, path: str) -> None:
    if form is None:
        return
    form.schema = form.schema.copy()
    if schema_text(form.schema, f"{path}.schema") is None:
        raise bad_request(f"{path}.schema is required", f"{path}.schema")
    if body.response_format is not None:
        raise bad_request(f"{path} is not the only form of the output that is asked for", path)
    body.response_format = ResponseFormat("json_schema", JsonSchemaFormat(form.schema))


def _no_thread(thread: Thread) -> ApiError:
    """The 400 upon which Anthropic's clients send the whole conversation, without a thread."""
    if thread.type == "continue":  # the history is not in this request, so that no answer may be made from it
        code, details = "thread_not_found", {}
    else:
        code, details = "thread_unsupported_request", {"unsupported": ["thread"]}
    message = "thread is not supported by this server: send the whole conversation in messages"
    return ApiError(400, message, param="thread", code=code, details={"error_code": code, **details})


def tools_of(body: MessagesBody) -> ToolUse | None:
    """Return the tool use that a body asks for; None without tools. Raises ApiError 400."""
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    asked = body.tool_choice or ToolChoice("auto")
    choice: str | NamedTool = "required" if asked.type == "any" else asked.type
    if choice == "tool":
        choice = NamedTool("function", NamedFunction(asked.name))
    try:
        return tool_use(tools, choice, not asked.disable_parallel_tool_use)
    except ApiError as exc:
        raise renamed(exc, TOOL_FIELDS) from None


def _tool(tool: Tool, path: str) -> ToolBody:
    if tool.allowed_callers and "direct" not in tool.allowed_callers:
        raise unsupported(f"{path}.allowed_callers")
    description = tool.description
    if tool.input_examples:
        examples = "\n".join(
            ["Examples of the input:", *(msgspec.json.encode(each).decode() for each in tool.input_examples)]
        )
        description = examples if description is None else f"{description}\n\n{examples}"
    kind = "function" if tool.type in (None, "custom") else str(tool.type)
    return ToolBody(kind, FunctionBody(tool.name, description, tool.input_schema, tool.strict))


def conversation(body: MessagesBody) -> Conversation:
    """Return the conversation as chat templates take it. The output continues a final message of the assistant.

    Raises ApiError 400 that names what is wrong.
    """
    given = body.messages
    if not given:
        raise bad_request("messages is required and must not be empty", "messages")
    check_count("messages", (each for turn in given for each in (turn.content, *_nested(turn.content))))
    turns = Turns([])
    if body.system:
        turns.text("system", _joined(body.system, "system"))
    texts = JsonTexts()
    for i, turn in enumerate(given):
        path = f"messages[{i}]"
        match turn.role:
            case "user":
                _add_user(turns, turn.content, path)
            case "assistant":
                _add_assistant(turns, turn.content, path, texts)
            case "system":
                turns.text("system", _joined(turn.content, f"{path}.content"))
            case _:
                known = "user, assistant, system"
                raise bad_request(f"{path}.role must be one of {known}, got {quoted(turn.role)}", f"{path}.role")
    if not turns.messages:
        raise bad_request("messages: they have no text", "messages")
    continues = turns.messages[-1]["role"] == "assistant"
    if continues and "tool_calls" in turns.messages[-1]:
        raise bad_request("messages: the last one calls tools, whose results must follow", "messages")
    if continues and not turns.messages[-1]["content"]:
        raise bad_request("messages: the last one is the assistant's, and has no text to continue", "messages")
    return Conversation(messages=turns.messages, add_generation_prompt=not continues, continue_final_message=continues)


def _nested(content: str | list[Block]) -> list[str | list[Block] | None]:
    return [] if isinstance(content, str) else [block.content for block in content]


def _add_user(turns: Turns, content: str | list[Block], path: str) -> None:
    """Results of tools are messages of their own, in their place among the texts."""
    if isinstance(content, str):
        turns.text("user", content)
        return
    _check_some(content, f"{path}.content")
    texts: list[str] = []
    for k, block in enumerate(content):
        where = f"{path}.content[{k}]"
        if block.type != "tool_result":
            texts.append(_text(block, where))
            continue
        if texts:
            turns.text("user", "\n".join(texts))
            texts = []
        text = _joined(block.content or "", f"{where}.content")
        tool_use_id = required(block.tool_use_id, f"{where}.tool_use_id")
        # Templates have no other way to say that a tool has failed.
        turns.result(tool_use_id, f"Error: {text}" if block.is_error else text, f"{where}.tool_use_id")
    if texts:
        turns.text("user", "\n".join(texts))


def _add_assistant(turns: Turns, content: str | list[Block], path: str, texts: JsonTexts) -> None:
    if isinstance(content, str):
        turns.text("assistant", content)
        return
    _check_some(content, f"{path}.content")
    for k, block in enumerate(content):
        where = f"{path}.content[{k}]"
        match block.type:
            case "thinking":
                turns.reasoning(block.thinking or "")
            case "redacted_thinking" | "fallback":  # they say something to the server alone that wrote them
                pass
            case "tool_use":
                call_id, name = required(block.id, f"{where}.id"), required(block.name, f"{where}.name")
                given = schema_text(block.input, f"{where}.input")
                turns.call(call_id, name, parsed_arguments(given or "{}", texts, f"{where}.input"))
            case _:
                turns.text("assistant", _text(block, where))


def _joined(content: str | list[Block], path: str) -> str:
    """Texts of separate blocks are separate lines."""
    if isinstance(content, str):
        return content
    return "\n".join([_text(block, f"{path}[{k}]") for k, block in enumerate(content)])


def _text(block: Block, path: str) -> str:
    if block.type != "text":
        raise bad_request(
            f"{path}.type: {quoted(block.type)} is not supported here", f"{path}.type", "unsupported_parameter"
        )
    if block.text is None:
        raise bad_request(f"{path}.text is required", f"{path}.text")
    return block.text


def _check_some(content: list[Block], path: str) -> None:
    if not content:
        raise bad_request(f"{path} must have at least one block", path)
