"""Custom tools: their grammars within a call, their inputs out of it, and both over chat completions and responses."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from asyncengine import AsyncEngine, bundled_model
from asyncengine.api.conversation import Conversation
from asyncengine.server.parsing.inputs import InputReader, arguments_of, input_of
from asyncengine.server.parsing.quoting import QuotingError, quoted_lark, quoted_text
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, USER, Site, serving

RESPONSES = "/v1/responses"
HERMES = "{{ tools }}<tool_call>"
PATCH = """start: begin hunk+ end // as coding agents have it
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Add File: " /(.+)/ LF added+
added: "+" /(.*)/ LF -> line
%import common.LF
"""
TEXT = '*** Begin Patch\n*** Add File: a "b".txt\n+tab\there, back\\slash, 😀\n*** End Patch\n'
GRAMMARS = {
    PATCH: [TEXT, TEXT.replace("tab", "h"), "*** Begin Patch\n*** End Patch\n"],
    r'start: /[^ax\n]+/ "x"i': ["bbX", 'b"\\x', "ax"],
    r'start: "\t\"q\\" /\s\S/': ['\t"q\\ x', '\t"q\\\n"', '\t"q\\x '],
    r'start: ("a".."c" | /\d\D/)+': ["abc", 'a1"b', "1\\", "12"],
    'start: expr\nexpr: INT (SIGN INT)*\nSIGN: "+"|"-"\n%import common (INT, WS)\n%ignore WS': ["1 + 2", "1-", "12-3"],
    r"start: /(?s)a.b/": ["a\nb", 'a"b', "a\\b", "ab"],
    r"start: /a.b{2,3}|\x41\u{1F600}\W?/i": ['a"BB', "a😀", "A😀\\", "a\\b"],
    "start: ESCAPED_STRING\n%import common.ESCAPED_STRING": ['"abc"', '"a\\"b"', '"a'],
    r'start: /[\x00-\x20"\\\]]+/': [' "\\]\t', "a", "\x1f"],
    r"start: /\/[\/\-a]+\.\[/": ["/-a.[", "/.["],
    'start: "\\"" /[^"\\\\]*/ "\\""': ['"ab"', '"a"b"', '""'],
}


def accepts(model: Any, grammar: str, text: str) -> bool:
    """Return whether llguidance takes a text under a grammar in Lark."""
    import llguidance

    matcher = llguidance.LLMatcher(model, llguidance.grammar_from("grammar", grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(token) for token in model.tokenize_str(text)) and matcher.is_accepting()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_a_quoted_grammar_takes_the_escaped_texts_and_no_others(grammar: str) -> None:
    import llguidance

    model = llguidance.LLTokenizer((Path(bundled_model()) / "tokenizer.json").read_text())
    quoted = f'start: "\\"" %lark {{\n{quoted_lark(grammar)}\n}} "\\""\n'
    rng = random.Random(45)
    taken = []
    for text in GRAMMARS[grammar] * 12:
        chars = list(text)
        for _ in range(rng.choice((0, 1, 2))):
            at = rng.randrange(len(chars) + 1)
            chars[at : at + rng.choice((0, 1))] = rng.choice(["", "a", "x", '"', "\\", "\n", "1", " ", "\t", "😀", "/"])
        changed = "".join(chars)
        taken.append(accepts(model, grammar, changed))
        assert accepts(model, quoted, f'"{quoted_text(changed)}"') == taken[-1], changed
    assert {True, False} == set(taken)


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ("start: %json {}", "%json"),
        ("start: <[3]>", "<"),
        ("start: /(?=a)/", "(?=a"),
        ("start: /a$/", "$"),
        ("start: /[a/", "does not end"),
        ("start: /a)/", "unbalanced"),
        (r"start: /\pL/", "\\pL"),
        ("start: /a/x", "flag x"),
        ('start: "ab".."c"', "range"),
        ("start: X\n%import common.NOTHING", "NOTHING"),
        ('start: "\\"" /[^"]*/ "\\""', "followed by"),
        ('start: Q T Q\nQ: "\\""\nT: /[^"]+/', "followed by"),
        ('start: "a', "unexpected"),
    ],
)
def test_grammars_that_cannot_be_quoted_are_refused(grammar: str, says: str) -> None:
    with pytest.raises(QuotingError, match=None) as refused:
        quoted_lark(grammar)
    assert says in str(refused.value)


def test_inputs_come_out_of_any_pieces() -> None:
    text = 'a "b" \\ \n\t😀 é \u2028'
    for arguments in (arguments_of(text), json.dumps({"input": text}), ' {\n"input" : "' + quoted_text(text) + '"}'):
        assert input_of(arguments) == text
        for size in (1, 2, 3, 7, 1000):
            reader = InputReader()
            pieces = [arguments[i : i + size] for i in range(0, len(arguments), size)]
            assert "".join(map(reader.push, pieces)) == text
    assert InputReader().push('{"input": "ab\\ud83d') == "ab"
    assert InputReader().push('{"inp') == ""
    assert input_of('{"patch": "x"}') == "x"
    assert input_of("{}") == ""
    assert input_of('{"a": 1}') == '{"a": 1}'
    assert input_of("plain") == "plain"


@asynccontextmanager
async def client(engine: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, Site]]:
    async with (
        serving(engine, served_model_name="fake") as site,
        openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as api,
    ):
        yield api, site


def scripted(text: str, template: str = HERMES) -> FakeEngine:
    return FakeEngine(text, ends=True, max_model_len=8192, chat_template=template)


def call(text: str) -> str:
    return f'<tool_call>\n{{"name": "edit", "arguments": {arguments_of(text)}}}\n</tool_call>'


EDIT: dict[str, Any] = {"name": "edit", "description": "Change files."}
LARK: dict[str, Any] = {"syntax": "lark", "definition": PATCH}
CUSTOM: Any = {"type": "custom", "custom": EDIT | {"format": {"type": "grammar", "grammar": LARK}}}
SAME: Any = {"type": "custom", **EDIT, "format": {"type": "grammar", **LARK}}


def chat_of(engine: FakeEngine) -> Conversation:
    prompt = engine.prompts[-1]
    return prompt if isinstance(prompt, Conversation) else Conversation(messages=prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "output"),
    [
        (HERMES, call(TEXT)),
        (HERMES, f'<tool_call>{{"name": "edit", "input": {json.dumps(TEXT)}}}</tool_call>'),
        (HERMES, f'<tool_call>{{"name": "edit", "arguments": {json.dumps(TEXT)}}}</tool_call>'),
        ("{{ messages }}", f'{{"name": "edit", "arguments": {{"patch": {json.dumps(TEXT)}}}}}'),
        ("{{ tools }}<|python_start|>", f"[edit(input={TEXT!r})]"),
        ("{{ tools }}<|channel|><|message|>", f"<|channel|>commentary to=functions.edit<|message|>{TEXT}<|call|>"),
    ],
    ids=["hermes", "input", "text", "json", "pythonic", "harmony"],
)
async def test_custom_calls_in_chat_completions(template: str, output: str) -> None:
    engine = scripted(output, template)
    free: Any = {"type": "custom", "custom": EDIT}
    async with client(engine) as (api, site):
        whole = await api.chat.completions.create(model="fake", messages=USER, tools=[free])  # type: ignore[arg-type]
        chunks = await site.events(CHAT, messages=USER, tools=[free])
        [made] = whole.choices[0].message.tool_calls or []
        assert whole.choices[0].finish_reason == "tool_calls"
        assert (made.type, made.custom.name, made.custom.input) == ("custom", "edit", TEXT)  # type: ignore[union-attr]
        pieces = [piece for c in chunks for piece in c["choices"][0]["delta"].get("tool_calls", ())]
        assert (pieces[0]["type"], pieces[0]["custom"]["name"]) == ("custom", "edit")
        assert "".join(piece["custom"]["input"] for piece in pieces) == TEXT
        told: Any = [
            *USER,
            whole.choices[0].message.to_dict(),
            {"role": "tool", "tool_call_id": made.id, "content": "ok"},
        ]
        await api.chat.completions.create(model="fake", messages=told, tools=[free])
    asked = next(message["tool_calls"] for message in chat_of(engine).messages if "tool_calls" in message)
    assert [each["function"] for each in asked] == [{"name": "edit", "arguments": {"input": TEXT}}]


async def test_a_cut_custom_call_has_the_beginning_of_its_input() -> None:
    engine = scripted(call(TEXT))
    async with client(engine) as (_, site):
        asked = {"messages": USER, "tools": [{"type": "custom", "custom": EDIT}], "max_tokens": len(call(TEXT)) - 40}
        choice = (await site.post(CHAT, **asked)).json["choices"][0]
        assert choice["finish_reason"] == "length"
        (made,) = choice["message"]["tool_calls"]
        assert made["custom"]["input"]
        assert TEXT.startswith(made["custom"]["input"])


async def test_custom_calls_in_responses() -> None:
    engine = scripted("Well.\n" + call(TEXT))
    async with client(engine) as (api, _):
        asked: dict[str, Any] = {"model": "fake", "input": "Go.", "tools": [SAME]}
        whole = await api.responses.create(**asked)
        async with api.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        result: Any = {"type": "custom_tool_call_output", "call_id": whole.output[1].call_id, "output": "Done."}  # type: ignore
        await api.responses.create(**asked | {"input": [result]}, previous_response_id=whole.id)
    for response in (whole, final):
        message, made = response.output
        assert (message.type, made.type, made.name, made.input) == ("message", "custom_tool_call", "edit", TEXT)  # type: ignore
        assert made.id.startswith("ctc_")  # type: ignore
        assert response.tools[0].format.definition == PATCH  # type: ignore
    of_call = [e for e in events if "custom_tool_call_input" in e.type]
    assert [e.type.rpartition(".")[2] for e in of_call[-2:]] == ["delta", "done"]
    assert "".join(e.delta for e in of_call[:-1]) == of_call[-1].input == TEXT  # type: ignore
    _, assistant, tool = chat_of(engine).messages
    assert assistant["tool_calls"][0]["function"] == {"name": "edit", "arguments": {"input": TEXT}}
    assert (tool["role"], tool["content"]) == ("tool", "Done.")
    function = chat_of(engine).tools[0]["function"]
    assert function["parameters"]["required"] == ["input"]
    assert PATCH in function["description"]
    assert engine.submitted[-1][1].structured_outputs is not None  # the calls follow the grammar


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("api", "tool", "choice", "param"),
    [
        (CHAT, {"type": "custom"}, "auto", "tools[0].custom"),
        (CHAT, {"type": "custom", "custom": {"name": "a b"}}, "auto", "tools[0].custom.name"),
        (CHAT, {"type": "custom", "custom": EDIT | {"format": {"type": "x"}}}, "auto", "tools[0].custom.format.type"),
        (CHAT, {"type": "custom", "custom": EDIT | {"format": {"type": "grammar"}}}, "auto",
         "tools[0].custom.format.grammar"),
        (CHAT, {"type": "custom", "custom": EDIT}, {"type": "function", "function": {"name": "edit"}}, "tool_choice"),
        (RESPONSES, {"type": "custom"}, "auto", "tools[0].name"),
        (RESPONSES, SAME | {"format": {"type": "grammar", "syntax": "ebnf"}}, "auto", "tools[0].format.syntax"),
        (RESPONSES, SAME | {"format": {"type": "grammar", "syntax": "lark"}}, "auto", "tools[0].format.definition"),
        (RESPONSES, SAME | {"format": {"type": "grammar", "syntax": "lark", "definition": "start: %json {}"}},
         "required", "tools[0].format"),
        (RESPONSES, SAME | {"format": {"type": "grammar", "syntax": "lark", "definition": "start: %json {}"}},
         "auto", "tools[0].format"),
        (RESPONSES, SAME | {"format": {"type": "grammar", "syntax": "lark", "definition": "start: " + "a " * 9000}},
         "auto", "tools[0].format"),
        (RESPONSES, {"type": "namespace", "tools": [SAME]}, "auto", "tools[0].name"),
        (RESPONSES, {"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}, "auto",
         "tools[0].tools[0].name"),
    ],
)  # fmt: skip
async def test_wrong_custom_tools_are_named(api: str, tool: Any, choice: Any, param: str) -> None:
    engine = scripted("x")
    async with client(engine) as (_, site):
        asked = {"messages": USER} if api == CHAT else {"input": "x"}
        reply = await site.post(api, **asked, tools=[tool], tool_choice=choice)
        assert (reply.status, reply.error["param"]) == (400, param), reply.error
    assert engine.submitted == []


REGEX: Any = {
    "type": "custom",
    "name": "when",
    "format": {"type": "grammar", "syntax": "regex", "definition": r"\d\d:\d\d"},
}
SHORT: Any = {"type": "custom", "name": "say", "format": {"type": "grammar", "syntax": "lark", "definition": (
    'start: "SAY" LF line\nline: "\\"" /[a-z]{1,4}/ "\\"" LF?\n%import common.LF'
)}}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "template", [None, "{# <tool_call> #}", "{# <|python_start|> #}"], ids=["json", "hermes", "py"]
)
async def test_the_bundled_model_writes_inputs_by_their_grammar(template: str | None, tmp_path: Path) -> None:
    path = None
    if template is not None:
        path = tmp_path / "template.jinja"
        path.write_text("{# tools #}" + template + "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|end|>")
    async with (
        AsyncEngine.from_pretrained(bundled_model(), progress=False, chat_template=path and str(path)) as engine,
        client(engine) as (_, site),
    ):
        for tool in (REGEX, SHORT):
            asked = {"input": "Now?", "tools": [tool], "temperature": 1.0, "seed": 3, "max_output_tokens": 70}
            choice = {"type": "custom", "name": tool["name"]}
            reply = await site.post(RESPONSES, **asked, tool_choice=choice)
            assert reply.status == 200, reply.body
            made = reply.json["output"][0]
            assert (made["type"], made["name"], made["status"]) == ("custom_tool_call", tool["name"], "completed")
            if tool is REGEX:
                assert len(made["input"]) == 5
                assert made["input"][2] == ":"
            else:
                assert made["input"].startswith('SAY\n"')
                assert made["input"].rstrip("\n").endswith('"')
            events = (await site.post(RESPONSES, **asked, tool_choice=choice, stream=True)).body.decode().split("\n\n")
            deltas = [json.loads(e.split("data: ")[1]) for e in events if "custom_tool_call_input.delta" in e]
            assert "".join(e["delta"] for e in deltas) == made["input"]
            assert deltas
            free = (await site.post(RESPONSES, **asked | {"max_output_tokens": 8})).json
            assert free["usage"]["output_tokens"] == 8  # the grammar of calls that may come is one
        wrong = SHORT | {"format": SHORT["format"] | {"definition": "start: unknown"}}
        reply = await site.post(RESPONSES, input="x", tools=[wrong], tool_choice="required")
        assert (reply.status, reply.error["param"]) == (400, "tools[0].format"), reply.error
