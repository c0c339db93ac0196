"""The way from a conversation and its tools to the engine's request, and to the reading of its output."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from asyncengine.api.conversation import Conversation
from asyncengine.api.request import Prompt, SamplingParams
from asyncengine.api.structured_outputs import StructuredOutputs
from asyncengine.errors import InvalidRequestError
from asyncengine.server.chat_messages import adapt
from asyncengine.server.config import ServerConfig
from asyncengine.server.errors import bad_request
from asyncengine.server.parsing.choose import Formats, Parsing, formats_of
from asyncengine.server.parsing.grammars import call_grammar, content_grammar, form_in, lazy_grammar, serves
from asyncengine.server.parsing.names import HARMONY
from asyncengine.server.parsing.parser import CallRules
from asyncengine.server.tools import ToolUse
from asyncengine.text.tokenizer import Tokenizer
from asyncengine.text.tool_turns import with_tools_listed

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request for the engine."""

    prompt: Prompt
    params: SamplingParams
    parsing: Parsing | None = None
    """Reading of the output; None: the text is the content."""


def prepare(
    chat: Conversation, use: ToolUse | None, params: SamplingParams, tokenizer: Tokenizer | None, config: ServerConfig
) -> Prepared:
    """``chat`` has messages as server.messages makes them, and no tools. Raises ApiError 400, InvalidRequestError."""
    if chat.chat_template is not None and not config.trust_request_chat_template:
        raise bad_request(
            "chat_template is not allowed by this server: start it with --trust-request-chat-template", "chat_template"
        )
    use = None if use is None or use.choice == "none" else use
    template = chat.chat_template
    if template is None and tokenizer is not None:
        template = tokenizer.template(with_tools=use is not None)
    if template is None or tokenizer is None:
        return Prepared(chat, params)  # the engine refuses it
    formats = formats_of(template, config.tool_call_parser, config.reasoning_parser)
    chat = adapt(chat, template, formats.tools)
    parsing = Parsing(None, formats.reasoning, continued=chat.continued)
    if use is not None:
        chat = _with_tools(chat, use, formats)
        param = _param(use) if use.forced or params.structured_outputs is None else None
        chosen, params = _constrained(use, params, tokenizer, formats, template)
        parsing = replace(
            parsing,
            tools=chosen,
            calls=CallRules(
                most=None if use.parallel and use.choice != "function" else 1,
                names=frozenset(tool.name for tool in use.tools),
                bare=frozenset(tool.name for tool in use.tools if tool.takes_nothing),
                live=params.structured_outputs is not None,
                forced=frozenset(tool.name for tool in use.forced),
                inputs=frozenset(tool.name for tool in use.tools if tool.custom),
            ),
            param=param,
        )
    elif formats.reasoning == HARMONY and (schema := _schema(params)) is not None:
        params = _with_grammar(params, content_grammar(HARMONY, schema, tokenizer))
    prompt: Any = list(chat.messages) if chat.is_plain else chat
    if parsing.tools is None and parsing.reasoning is None:
        return Prepared(prompt, params)
    if params.skip_special_tokens and (kept := parsing.kept_tokens(tokenizer)):
        params = replace(params, kept_special_tokens=kept)
    return Prepared(prompt, params, parsing)


def _with_tools(chat: Conversation, use: ToolUse, formats: Formats) -> Conversation:
    """A template without tools gets them listed when it is rendered, with calls in JSON: not here, where the model has
    calls of another form."""
    tools = [tool.described() for tool in use.tools]
    if formats.shows_tools or formats.tools == "json":
        return replace(chat, tools=tools)
    return replace(chat, messages=with_tools_listed(chat.messages, tools, how_to_call=False))


def _constrained(
    use: ToolUse, params: SamplingParams, tokenizer: Tokenizer, formats: Formats, template: str
) -> tuple[str, SamplingParams]:
    """The format of the calls, and with a grammar where the output has to follow one."""
    tools = use.forced or use.tools
    schema = _schema(params)
    if params.structured_outputs is not None and (use.forced or schema is None):
        field = "tool_choice" if use.forced else "tools"
        raise bad_request(f"{field}: the request asks for another form of the output at the same time", field)
    if not use.forced and formats.tools is None:
        raise bad_request(
            "tools: this model's chat template has calls in a form that no parser here knows; tool_choice "
            "required or a function works, and so may a server started with --tool-call-parser",
            "tools",
        )
    if not use.forced and schema is None:
        form = formats.tools or "json"
        grammar = None
        if any(tool.strict for tool in tools):
            grammar = lazy_grammar(form_in(template, form), tools, single=not use.parallel, tokenizer=tokenizer)
        return form, params if grammar is None else _with_grammar(params, grammar)
    chosen = serves(formats.tools or "json", tools)
    single = use.choice == "function" or not use.parallel
    grammar = call_grammar(
        form_in(template, chosen),
        tools,
        single=single,
        tokenizer=tokenizer,
        blanks=formats.reasoning is not None,
        content=None if use.forced else schema,
    )
    return chosen, _with_grammar(params, grammar)


def _schema(params: SamplingParams) -> dict[str, Any] | None:
    """Return the schema of the JSON that the output must be; None if the output need not be JSON."""
    asked = params.structure
    if asked is None or asked.kind != "json":
        return None
    schema = json.loads(asked.source())
    return schema if isinstance(schema, dict) else _ANY_OBJECT


def _with_grammar(params: SamplingParams, grammar: str) -> SamplingParams:
    try:
        return replace(params, structured_outputs=StructuredOutputs(grammar=grammar))
    except InvalidRequestError as exc:  # what no grammar goes with
        raise bad_request(str(exc).replace("structured_outputs", "tool_choice", 1), "tool_choice") from None


def _param(use: ToolUse) -> str | None:
    """The part of the request that the grammar of the output was made of; None if there is no such grammar."""
    held = use.forced or [tool for tool in use.tools if tool.strict]
    if not held:
        return None
    return held[0].path if len(held) == 1 else "tools"
