"""Grammars of outputs that call tools: in the model's own format, with arguments by their schema.

They are in llguidance's form of Lark.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from keyword import iskeyword
from typing import Any

from asyncengine.server.errors import bad_request
from asyncengine.server.parsing.inputs import arguments_of
from asyncengine.server.parsing.names import HARMONY
from asyncengine.server.parsing.quoting import QuotingError, quoted_lark
from asyncengine.server.tools import Tool
from asyncengine.text.tokenizer import Tokenizer

MOST_CALLS = 16
"""Calls in one output where a grammar says how many there may be."""
_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as json.dumps and Jinja's tojson write it, which is the form that models were shown."""
_SIMPLE = {"type", "properties", "required", "additionalProperties", "title", "description", "$schema", "$defs",
           "definitions", "strict"}  # fmt: skip
"""Members of a schema that calls in Python can follow."""

Atom = Callable[[str], str]


def call_grammar(
    form: str,
    tools: Sequence[Tool],
    *,
    single: bool,
    tokenizer: Tokenizer,
    blanks: bool,
    content: dict[str, Any] | None = None,
) -> str:
    """One call of one of the tools, or several in a row. ``content``: a schema that the output may follow instead.

    With ``blanks`` the output may begin with new lines, as it does after reasoning.
    """

    atom = _atoms(tokenizer)
    rules, several = _RULES[form](tools, single, atom)
    most = "" if single else f"{{0,{MOST_CALLS - 1}}}"
    calls = several.format(most=most)
    either = f"calls | {_content(form, content, atom)}" if content is not None else "calls"
    start = ["start: BLANKS? (either)", "BLANKS: /\\n{1,2}/"] if blanks else ["start: either"]
    lines = [*start, f"either: {either}", f"calls: {calls}", *rules]
    return "\n".join(lines) + "\n"


_TRIGGERS = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "mistral named": "[TOOL_CALLS]",
    "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "deepseek_v3 named": "<｜tool▁calls▁begin｜>",
}
"""The text that no output has but where calls begin."""


def lazy_grammar(form: str, tools: Sequence[Tool], *, single: bool, tokenizer: Tokenizer) -> str | None:
    """Any text, in which calls follow the schemas of strict tools; None in a format whose calls nothing announces."""
    trigger = _TRIGGERS.get(form)
    if trigger is None:
        return None
    atom = _atoms(tokenizer)
    free = {"type": "object"}
    held = [tool.strict or tool.custom or tool.takes_nothing for tool in tools]
    loose = [tool if keeps else replace(tool, parameters=free) for tool, keeps in zip(tools, held, strict=True)]
    rules, several = _RULES[form](loose, single or form == "hermes", lambda text: "" if text == trigger else atom(text))
    calls = several.format(most=f"{{0,{MOST_CALLS - 1}}}")
    marker = atom(trigger)
    if marker.startswith("<["):
        begins = [f"tagged: TEXT {marker} calls"]
    else:
        begins = [f"announced[lazy]: TEXT {marker}", "tagged: announced calls"]
    lines = ["start: tagged* rest", "rest: TEXT", "TEXT: /(.|\\n)*/", *begins, f"calls: {calls}", *rules]
    return "\n".join(lines) + "\n"


def content_grammar(form: str | None, content: dict[str, Any], tokenizer: Tokenizer) -> str:
    """Content that follows a schema, where the format has more around it than the content."""
    atom = _atoms(tokenizer)
    return "\n".join([f"start: {_content(form, content, atom)}", *_analysis(atom)]) + "\n"


def _content(form: str | None, schema: dict[str, Any], atom: Atom) -> str:
    rule = _json_rule(schema)
    return f'analysis? {atom("<|channel|>")} "final" {atom("<|message|>")} {rule}' if form == HARMONY else rule


def serves(form: str, tools: Sequence[Tool]) -> str:
    """``form``, or plain JSON where that has no grammar for the tools' arguments."""
    return form if form != "pythonic" or all(map(_is_simple, tools)) else "json"


def _atom(added: Mapping[str, int], text: str) -> str:
    """A marker: an added token that the model has by its number, since llguidance takes few of them for text, anything
    else as text."""
    return _text(text) if (token := added.get(text)) is None else f"<[{token}]>"


def _atoms(tokenizer: Tokenizer) -> Atom:
    tokens = tokenizer.backend.get_added_tokens_decoder().items()
    added = {token.content: i for i, token in tokens if i < tokenizer.num_rows}
    return partial(_atom, added)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_rule(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps(schema | {"x-guidance": _FORM}, ensure_ascii=False)


def _arguments(tool: Tool) -> str:
    if tool.grammar is None or tool.grammar.syntax != "lark":
        return _json_rule(tool.schema)
    try:
        rules = quoted_lark(tool.grammar.definition)
    except QuotingError as exc:
        raise bad_request(f"{tool.path}: {exc}", tool.path) from None
    begin, end = arguments_of("").split('""')
    return f"{_text(begin + chr(34))} %lark {{\n{rules}\n}} {_text(chr(34) + end)}"


def _call(tool: Tool, key: str = "arguments") -> str:
    head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
    return f"{_text(head)} {_arguments(tool)} {_text('}')}"


def _choice(bodies: Sequence[str]) -> list[str]:
    rules = [f"call_{i}: {body}" for i, body in enumerate(bodies)]
    return ["call: " + " | ".join(f"call_{i}" for i in range(len(bodies))), *rules]


Rules = tuple[list[str], str]


def _hermes(tools: Sequence[Tool], single: bool, atom: Atom) -> Rules:
    begin, end = atom("<tool_call>"), atom("</tool_call>")
    bodies = [f"{begin} {_text(chr(10))} {_call(tool)} {_text(chr(10))} {end}" for tool in tools]
    return _choice(bodies), "call" if single else "call (" + _text("\n") + " call){most}"


def _plain(tools: Sequence[Tool], single: bool, atom: Atom) -> Rules:
    if single:
        return _choice([_call(tool) for tool in tools]), "call"
    return _choice([_call(tool) for tool in tools]), '"[" call (", " call){most} "]"'


def _llama(tools: Sequence[Tool], single: bool, atom: Atom) -> Rules:
    return _choice([_call(tool, "parameters") for tool in tools]), "call" if single else 'call ("; " call){most}'


def _mistral(tools: Sequence[Tool], single: bool, atom: Atom) -> Rules:
    begin = atom("[TOOL_CALLS]")
    return _choice([_call(tool) for tool in tools]), f'{begin} "[" call' + (
        ' "]"' if single else ' (", " call){most} "]"'
    )


def _mistral_named(tools: Sequence[Tool], single: bool, atom: Atom) -> Rules:
    begin, arguments = atom("[TOOL_CALLS]"), atom("[ARGS]")
    bodies = [f"{begin} {_text(tool.name)} {arguments} {_arguments(tool)}" for tool in tools]
    return _choice(bodies), "call" if single else "call call{most}"


def _deepseek(tools: Sequence[Tool], single: bool, atom: Atom) -> Rules:
    begin, separator, end = map(atom, ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"))
    bodies = [
        f'{begin} "function" {separator} {_text(tool.name + chr(10) + "```json" + chr(10))} '
        f"{_arguments(tool)} {_text(chr(10) + '```')} {end}"
        for tool in tools
    ]
    several = "call" if single else "call (" + _text("\n") + " call){most}"
    return _choice(bodies), f"{atom('<｜tool▁calls▁begin｜>')} {several} {atom('<｜tool▁calls▁end｜>')}"


def _deepseek_named(tools: Sequence[Tool], single: bool, atom: Atom) -> Rules:
    begin, separator, end = map(atom, ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"))
    bodies = [f"{begin} {_text(tool.name)} {separator} {_arguments(tool)} {end}" for tool in tools]
    several = "call" if single else "call call{most}"
    return _choice(bodies), f"{atom('<｜tool▁calls▁begin｜>')} {several} {atom('<｜tool▁calls▁end｜>')}"


def _harmony(tools: Sequence[Tool], single: bool, atom: Atom) -> Rules:
    """Analysis may come first; a call is the end of the output, whatever the request allows."""
    channel, message = atom("<|channel|>"), atom("<|message|>")
    bodies = [
        f"{channel} {_text(f'commentary to=functions.{tool.name} ')} {atom('<|constrain|>')} "
        f'"json" {message} {_arguments(tool)}'
        for tool in tools
    ]
    return [*_choice(bodies), *_analysis(atom)], "analysis? call"


def _analysis(atom: Atom) -> list[str]:
    channel, message, end, start = map(atom, ("<|channel|>", "<|message|>", "<|end|>", "<|start|>"))
    return [f'analysis: {channel} "analysis" {message} ANY {end} {start} "assistant"', "ANY: /(.|\\n)*/"]


def _pythonic(tools: Sequence[Tool], single: bool, atom: Atom) -> Rules:
    bodies = [f"{_text(tool.name + '(')} {_keywords(tool.schema)} {_text(')')}" for tool in tools]
    return _choice(bodies), '"[" call "]"' if single else '"[" call (", " call){most} "]"'


def _is_simple(tool: Tool) -> bool:
    names = [*tool.name.split("."), *tool.parameters.get("properties", {})]
    if tool.grammar is not None and tool.grammar.syntax == "lark":  # Python has no new lines between quotes
        return False
    return tool.parameters.keys() <= _SIMPLE and all(n.isidentifier() and not iskeyword(n) for n in names)


def _keywords(schema: dict[str, Any]) -> str:
    """Make a rule for keyword arguments: the required ones, in the order of the schema, then any of the others."""
    properties: dict[str, Any] = schema.get("properties", {})
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = [name for name in properties if name in schema.get("required", ())]

    def one(name: str) -> str:
        each = properties[name]
        return f"{_text(name + '=')} {_json_rule({**each, **shared} if isinstance(each, dict) else shared)}"

    first = ' ", " '.join(one(name) for name in required)
    others = [one(name) for name in properties if name not in required]
    if required or not others:
        return first + "".join(f' (", " {other})?' for other in others)
    # Without required ones, whichever comes first has no comma before it.
    starts = [f"{other} " + " ".join(f'(", " {later})?' for later in others[i + 1 :]) for i, other in enumerate(others)]
    return "(" + " | ".join(f"({start})" for start in starts) + ")?"


_RULES: dict[str, Callable[[Sequence[Tool], bool, Atom], Rules]] = {
    "hermes": _hermes,
    "json": _plain,
    "llama3_json": _llama,
    "mistral": _mistral,
    "mistral named": _mistral_named,
    "deepseek_v3": _deepseek,
    "deepseek_v3 named": _deepseek_named,
    "pythonic": _pythonic,
    HARMONY: _harmony,
}


def form_in(template: str, tools: str) -> str:
    """Return the name of a format; if the format has two forms, the name of the form that the template shows."""
    if tools == "mistral" and "[ARGS]" in template:
        return "mistral named"
    if tools == "deepseek_v3" and "```json" not in template:
        return "deepseek_v3 named"
    return tools
