"""Tool calls of the bundled model under constraints, in every format, over HTTP by the openai package."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from tokenizers import AddedToken

from asyncengine import AsyncEngine, bundled_model
from asyncengine.api.structured_outputs import StructuredOutputs
from asyncengine.engine.constraints.grammars import Grammars
from asyncengine.server.parsing import CallRules, parse
from asyncengine.server.parsing.choose import Parsing, ReasoningTokens
from asyncengine.server.parsing.grammars import call_grammar, content_grammar, lazy_grammar
from asyncengine.server.parsing.names import HARMONY, TOOL_PARSERS
from asyncengine.server.tools import Tool
from asyncengine.text.tokenizer import Tokenizer
from tests.models import tiny
from tests.server.harness import serving

MODEL = "bundled"
USER: Any = [{"role": "user", "content": "Tell me a story"}]
MOVE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "steps": {"type": "integer", "minimum": 1, "maximum": 9},
        "where": {"enum": ["up", "down"]},
        "note": {"$ref": "#/$defs/note"},
    },
    "required": ["steps", "where"],
    "additionalProperties": False,
    "$defs": {"note": {"anyOf": [{"type": "string", "maxLength": 8}, {"type": "null"}]}},
}
STOP: dict[str, Any] = {
    "type": "object",
    "properties": {"why": {"type": "string", "pattern": "^[a-z]{2,6}$"}},
    "additionalProperties": False,
}
SCHEMAS = {"move": MOVE, "stop": STOP}
TOOLS: Any = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
SAY = (
    "{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>{{ m.content }}{% for c in m.tool_calls %}"
)
CALLED = "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}<|assistant|>"
TEMPLATES = {
    "hermes": "{# <tool_call> #}",
    "llama3_json": "{# <|python_tag|> #}",
    "pythonic": "{# <|python_start|> #}",
    "mistral": "{# [TOOL_CALLS] #}",
    "mistral new": "{# [TOOL_CALLS][ARGS] #}",
    "deepseek_v3": "{# <｜tool▁call▁begin｜>```json #}",
    "deepseek_v3 new": "{# <｜tool▁call▁begin｜> #}",
}


@asynccontextmanager
async def client(template: str | None = None, **config: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        AsyncEngine.from_pretrained(bundled_model(), progress=False, chat_template=template) as engine,
        serving(engine, served_model_name=MODEL, **config) as site,  # type: ignore[arg-type]
        openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as api,
    ):
        yield api


def check(calls: Sequence[Any]) -> None:
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TEMPLATES)
async def test_required_calls_validate(name: str, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + TEMPLATES[name] + SAY + CALLED)
    async with client(str(file)) as api:
        asked: dict[str, Any] = {
            "model": MODEL,
            "messages": USER,
            "tools": TOOLS,
            "max_tokens": 350,
            "temperature": 1.0,
        }
        for choice in ("required", {"type": "function", "function": {"name": "stop"}}):
            options = asked | {"tool_choice": choice, "parallel_tool_calls": False, "n": 4, "seed": 1}
            answer = await api.chat.completions.create(**options)
            whole = [c for c in answer.choices if c.finish_reason != "length"]
            assert whole
            for c in whole:
                assert c.finish_reason == "tool_calls"
                assert not c.message.content
                assert len(c.message.tool_calls or ()) == 1
                check(c.message.tool_calls or ())
                assert choice == "required" or c.message.tool_calls[0].function.name == "stop"  # type: ignore
            async with api.chat.completions.stream(**options | {"n": 1}) as stream:
                async for _ in stream:
                    pass
                streamed = (await stream.get_final_completion()).choices[0]
            alone = (await api.chat.completions.create(**options | {"n": 1})).choices[0]
            assert calls_of(streamed.message) == calls_of(alone.message)
        strict: Any = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
        free = {"model": MODEL, "messages": USER, "temperature": 0.0, "max_tokens": 40}
        texts = [(await api.chat.completions.create(**free, tools=t)).choices[0] for t in (TOOLS[:1], strict)]
        assert texts[0].message.content == texts[1].message.content


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


async def test_several_calls_and_plain_json(tmp_path: Path) -> None:
    """The template has no tools: a system message lists them."""
    schema: dict[str, Any] = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "additionalProperties": False}
    add = {"type": "function", "function": {"name": "a", "parameters": schema}}
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>")
    async with client(str(file)) as api:
        asked: dict[str, Any] = {
            "model": MODEL,
            "messages": USER,
            "tools": [add],
            "temperature": 1.0,
            "n": 6,
            "seed": 1,
        }
        answer = await api.chat.completions.create(tool_choice="required", **asked)
        assert any(len(c.message.tool_calls or ()) > 1 for c in answer.choices)
        for c in answer.choices:
            assert c.message.tool_calls
            for call in c.message.tool_calls[: -1 if c.finish_reason == "length" else None]:
                jsonschema.validate(json.loads(call.function.arguments), schema)
        form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["a", "b"]}}}
        either = await api.chat.completions.create(response_format=form, **asked)
        for c in either.choices:
            assert (
                c.message.tool_calls or c.finish_reason == "length" or json.loads(c.message.content or "") in ("a", "b")
            )
        wrong = [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "http://a.example/x"}}}]
        with pytest.raises(openai.BadRequestError) as error:
            await api.chat.completions.create(**asked | {"tools": wrong}, tool_choice="required")
        assert error.value.param == "tools[0].function.parameters"
        with pytest.raises(openai.BadRequestError) as error:
            await api.chat.completions.create(**asked, tool_choice="required", extra_body={"min_tokens": 3})
        assert error.value.param == "tool_choice"


async def test_an_agent_of_twenty_calls(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{# tools <tool_call> #}{% for m in messages[-3:] %}" + SAY.partition("%}")[2] + CALLED)
    messages: list[Any] = list(USER)
    place = 0
    async with client(str(file)) as api:
        for turn in range(21):
            last = turn == 20
            choice: Any = {"type": "function", "function": {"name": "stop"}} if last else "required"
            answer = await api.chat.completions.create(
                model=MODEL, messages=messages, tools=TOOLS[1:] if last else TOOLS[:1], tool_choice=choice,
                parallel_tool_calls=False, temperature=1.0, seed=turn, max_tokens=150,
            )  # fmt: skip
            (made,) = answer.choices
            assert made.finish_reason == "tool_calls"
            assert made.message.tool_calls
            check(made.message.tool_calls)
            (call,) = made.message.tool_calls
            messages.append(made.message.model_dump(exclude_none=True))
            if call.function.name == "move":
                asked = json.loads(call.function.arguments)
                place += asked["steps"] if asked["where"] == "up" else -asked["steps"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"You are at {place}"})
        answer = await api.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=20
        )
    assert call.function.name == "stop"
    assert sum(m["role"] == "tool" for m in messages) == 21
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


DS = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
MARKERS = [*dict.fromkeys(m for name in TOOL_PARSERS for m in Parsing(name, "mistral").markers)]


def tokenizer_with_markers(*, special: bool) -> Tokenizer:
    """A small one, in which all markers are single tokens, special or not."""
    backend = tiny.byte_level_tokenizer(bos=False)
    add = backend.add_special_tokens if special else backend.add_tokens
    add([AddedToken(marker, special=special, normalized=False) for marker in [*MARKERS, "<|other|>"]])
    backend.add_tokens(["analysis"])
    return Tokenizer(backend, specials={"eos_token": "</s>"})


@pytest.mark.parametrize("special", [True, False])
async def test_grammars_allow_what_parsers_read(special: bool) -> None:
    """Grammars allow these texts whatever kind of tokens the markers are."""
    tokenizer = tokenizer_with_markers(special=special)
    tools = [Tool("move", parameters=MOVE), Tool("now")]
    arguments = '{"steps": 5, "where": "up"}'
    texts = {
        "hermes": f'<tool_call>\n{{"name": "move", "arguments": {arguments}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "json": f'[{{"name": "move", "arguments": {arguments}}}, {{"name": "now", "arguments": {{}}}}]',
        "llama3_json": f'{{"name": "move", "parameters": {arguments}}}; {{"name": "now", "parameters": {{}}}}',
        "pythonic": '[move(steps=5, where="up"), now()]',
        "mistral": f'[TOOL_CALLS][{{"name": "move", "arguments": {arguments}}}, {{"name": "now", "arguments": {{}}}}]',
        "mistral named": f"[TOOL_CALLS]move[ARGS]{arguments}[TOOL_CALLS]now[ARGS]{{}}",
        "deepseek_v3": f"{DS[0]}{DS[1]}function{DS[2]}move\n```json\n{arguments}\n```{DS[3]}\n"
        f"{DS[1]}function{DS[2]}now\n```json\n{{}}\n```{DS[3]}{DS[4]}",
        "deepseek_v3 named": f"{DS[0]}{DS[1]}move{DS[2]}{arguments}{DS[3]}{DS[1]}now{DS[2]}{{}}{DS[3]}{DS[4]}",
        "harmony": "<|channel|>analysis<|message|>Hm, so be it.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.move <|constrain|>json<|message|>{arguments}",
    }
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id or 0])
    try:
        for form, text in texts.items():
            grammar = call_grammar(form, tools, single=False, tokenizer=tokenizer, blanks=False)
            matcher = (await grammars.compile(StructuredOutputs(grammar=grammar))).deep_copy()
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert matcher.validate_tokens([*ids, tokenizer.eos_token_id or 0]) == len(ids) + 1, form
            rules = CallRules(names=frozenset({"move", "now"}))
            parsed = parse(Parsing(form.split()[0], None, rules).parser(tokenizer, [1]), text)
            calls = [("move", arguments)] if form == "harmony" else [("move", arguments), ("now", "{}")]
            assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls
    finally:
        grammars.close()


async def test_structured_content_of_harmony_is_on_its_channel() -> None:
    tokenizer = tokenizer_with_markers(special=True)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    alone = content_grammar(HARMONY, schema, tokenizer)
    either = call_grammar(HARMONY, [Tool("now")], single=True, tokenizer=tokenizer, blanks=False, content=schema)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    final = '<|channel|>final<|message|>{"a": 5}'
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id or 0])
    try:
        for grammar, texts in (
            (alone, {final: True, thought + final: True, call: False, '{"a": 5}': False}),
            (either, {final: True, thought + final: True, call: True, thought + call: True, '{"a": 5}': False}),
        ):
            matcher = await grammars.compile(StructuredOutputs(grammar=grammar))
            for text, right in texts.items():
                ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id or 0]
                assert (matcher.deep_copy().validate_tokens(ids) == len(ids)) is right, text
    finally:
        grammars.close()
    assert parse(Parsing(None, HARMONY).parser(tokenizer, [1]), thought + final).content == '{"a": 5}'


@pytest.mark.parametrize("special", [True, False, None])
async def test_strict_tools_hold_calls_in_free_text_to_their_schemas(special: bool | None) -> None:
    """``special``: None where the markers are no tokens of their own."""
    plain = Tokenizer(tiny.byte_level_tokenizer(bos=False), specials={"eos_token": "</s>"})
    tokenizer = plain if special is None else tokenizer_with_markers(special=special)
    anything = {"type": "object", "properties": {"q": {}}}
    tools = [Tool("move", parameters=MOVE, strict=True), Tool("now", parameters=anything), Tool("stop")]
    arguments = '{"steps": 5, "where": "up"}'
    texts = {
        "hermes": f'I [x] <b\n<tool_call>\n{{"name": "move", "arguments": {arguments}}}\n</tool_call> and '
        '<tool_call>\n{"name": "now", "arguments": {"q": [1]}}\n</tool_call>',
        "mistral": f'I[TOOL_CALLS][{{"name": "move", "arguments": {arguments}}}]',
        "mistral named": f"I[TOOL_CALLS]move[ARGS]{arguments}[TOOL_CALLS]now[ARGS]{{}}",
        "deepseek_v3": f"I{DS[0]}{DS[1]}function{DS[2]}move\n```json\n{arguments}\n```{DS[3]}{DS[4]}",
    }
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id or 0])
    try:
        for form, text in texts.items():
            grammar = lazy_grammar(form, tools, single=False, tokenizer=tokenizer)
            matcher = await grammars.compile(StructuredOutputs(grammar=grammar))
            for written in (text, text.replace("5", "0"), text.replace("move", "more"), "5 or more"):
                ids = [*tokenizer.encode(written, add_special_tokens=False), tokenizer.eos_token_id or 0]
                allowed = matcher.deep_copy().validate_tokens(ids)
                assert (allowed == len(ids)) == (written in (text, "5 or more")), (form, written)
    finally:
        grammars.close()
    assert lazy_grammar("json", tools, single=False, tokenizer=tokenizer) is None


def test_markers_stay_in_the_text_and_other_special_tokens_do_not() -> None:
    from asyncengine.text.detokenizer import IncrementalDetokenizer

    tokenizer = tokenizer_with_markers(special=True)
    ids = tokenizer.encode("<|other|>[THINK]a[/THINK]<|other|>b[TOOL_CALLS]f[ARGS]{}</s>", add_special_tokens=False)
    kept = Parsing("mistral", "mistral").kept_tokens(tokenizer)
    assert IncrementalDetokenizer(tokenizer, True, kept).push(ids) == "[THINK]a[/THINK]b[TOOL_CALLS]f[ARGS]{}"
    assert IncrementalDetokenizer(tokenizer, True).push(ids) == "abf{}"
    assert Parsing("mistral", "mistral").kept_tokens(tokenizer_with_markers(special=False)) == ()


def test_reasoning_tokens_are_counted() -> None:
    tokenizer = tokenizer_with_markers(special=True)

    def count(reasoning: str, prompt: str, text: str) -> int:
        ids = [tokenizer.encode(t, add_special_tokens=False) for t in (prompt, text)]
        whole = Parsing(None, reasoning).reasoning_tokens(tokenizer, ids[0])
        pieces = Parsing(None, reasoning).reasoning_tokens(tokenizer, ids[0])
        assert isinstance(whole, ReasoningTokens)
        assert isinstance(pieces, ReasoningTokens)
        whole.push(ids[1])
        for token in ids[1]:
            pieces.push([token])
        assert whole.count == pieces.count
        return whole.count

    size = len(tokenizer.encode("a cat", add_special_tokens=False))
    assert count("mistral", "Hi", "[THINK]a cat[/THINK]a dog") == size + 2
    assert count("mistral", "Hi[THINK]", "a cat[/THINK]a dog") == size + 1
    assert count("mistral", "Hi [THINK] no", "a dog") == 0
    assert count("harmony", "Hi", "<|channel|>analysis<|message|>a cat<|end|><|start|>x<|channel|>y") == size + 4
    assert Parsing(None, "think").reasoning_tokens(tokenizer, [1]) is None
