"""Parsers of outputs: each format, in whatever pieces its text comes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncengine.server.parsing import CallRules, OutputParser, ParsedOutput, parse
from asyncengine.server.parsing.formats import DeepSeek, Hermes, Json, Llama3Json, Mistral
from asyncengine.server.parsing.harmony import Harmony
from asyncengine.server.parsing.machine import Machine
from asyncengine.server.parsing.parser import join
from asyncengine.server.parsing.pythonic import Pythonic
from asyncengine.text.markers import REASONING

THINK = REASONING["think"]
PARSERS: dict[str, Callable[[], OutputParser]] = {
    "hermes": lambda: Hermes(THINK),
    "hermes inside": lambda: Hermes(THINK, True),
    "json": Json,
    "llama3_json": Llama3Json,
    "mistral": lambda: Mistral(REASONING["mistral"]),
    "deepseek": lambda: DeepSeek(THINK),
    "pythonic": lambda: Pythonic(THINK),
    "harmony": Harmony,
}
ONE, TWO = ("weather", '{"city": "R\\u00f6m \\"}] </tool_call>", "days": [1, {"a": "}"}]}'), ("now", "{}")
ARGS = ONE[1]
DS = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
CASES: list[tuple[str, str, str, str, list[tuple[str, str]]]] = [
    # parser, text, content, reasoning, calls
    ("hermes", "Just text.\n", "Just text.\n", "", []),
    ("hermes", "  <think>\nHm\n\nok\n</think>\n\nText\n", "Text\n", "Hm\n\nok", []),
    ("hermes", "a <think>b</think>", "a <think>b</think>", "", []),
    ("hermes", "<think>cut", "", "cut", []),
    ("hermes inside", "deep\n</think>\n\nshallow", "shallow", "deep", []),
    (
        "hermes",
        f'<think>x</think>\n\nLet me see.\n<tool_call>\n{{"name": "weather", "arguments": {ARGS}}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>',
        "Let me see.", "x", [ONE, TWO],
    ),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call> done', "done", "", [TWO]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", "", [TWO]),
    ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', "", "", [TWO]),
    ("hermes", '<tool_call>{"arguments": null, "name": "now"}</tool_call>', "", "", [TWO]),
    ("hermes", '<tool_call>{"name": "now", "city": 1}</tool_call>',
     '<tool_call>{"name": "now", "city": 1}</tool_call>', "", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\n"}}</tool_call>', "", "", [("f", '{"a": "x\\n"}')]),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {ARGS}}}\n{{"name": "now", "arguments": {{}}}}'
     "</tool_call>", "", "", [ONE, TWO]),
    ("hermes", f'<tool_call>[{{"name": "weather", "arguments": {ARGS}}}, {{"name": "now"}}]</tool_call>x',
     "x", "", [ONE, TWO]),
    ("hermes", "<tool_call>nothing", "<tool_call>nothing", "", []),
    ("hermes", "</tool_call>x<tool_cal", "</tool_call>x<tool_cal", "", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1',
     '<tool_call>{"name": "f", "arguments": {"a": 1', "", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>x',
     '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>x', "", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "id": 3}</tool_call>', "", "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, oops}</tool_call>', ", oops}", "", [("f", "{}")]),
    ("json", f'{{"name": "weather", "arguments": {ARGS}}}', "", "", [ONE]),
    ("json", f'[{{"name": "weather", "arguments": {ARGS}}}, {{"name": "now", "parameters": {{}}}}]',
     "", "", [ONE, TWO]),
    ("json", '{"answer": 5}', '{"answer": 5}', "", []),
    ("json", '[{"answer": 5}]', '[{"answer": 5}]', "", []),
    ("json", "[1, 2]", "[1, 2]", "", []),
    ("json", " {}", " {}", "", []),
    ("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {ARGS}}}; {{"name": "now", "parameters": {{}}}}',
     "", "", [ONE, TWO]),
    ("llama3_json", '{"type": "function", "function": {"name": "now", "parameters": {}}}', "", "", [TWO]),
    ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}; and', "; and", "", [TWO]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGS}, "id": "a"}}, {{"name": "now", '
     '"arguments": {}}]', "", "", [ONE, TWO]),
    ("mistral", f"[THINK]hm[/THINK]Well[TOOL_CALLS]weather[ARGS]{ARGS}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{{}}",
     "Well", "hm", [ONE, TWO]),
    ("mistral", f"[TOOL_CALLS]weather{ARGS}", "", "", [ONE]),
    ("mistral", "[TOOL_CALLS] what [TOOL", "[TOOL_CALLS] what [TOOL", "", []),
    ("mistral", '[TOOL_CALLS] [{"nam": 1}]', '[TOOL_CALLS] [{"nam": 1}]', "", []),
    ("deepseek", f"<think>x</think>Ok{DS[0]}{DS[1]}function{DS[2]}weather\n```json\n{ARGS}\n```{DS[3]}\n{DS[1]}function"
     f"{DS[2]}now\n```json\n{{}}\n```{DS[3]}{DS[4]}", "Ok", "x", [ONE, TWO]),
    ("deepseek", f"{DS[0]}{DS[1]}weather{DS[2]}{ARGS}{DS[3]}{DS[1]}now{DS[2]}{{}}{DS[3]}{DS[4]}", "", "", [ONE, TWO]),
    ("deepseek", f"{DS[1]}what is{DS[3]}", f"{DS[1]}what is", "", []),
    ("pythonic", '[weather(city="Röm \\"}] </tool_call>", days=[1, {"a": "}"}]), now()]', "", "",
     [("weather", '{"city": "Röm \\"}] </tool_call>", "days": [1, {"a": "}"}]}'), TWO]),
    ("pythonic", "<think>a</think><|python_start|>[f(a=-1, b=None, c=true, d=(1, 'x'))]<|python_end|>", "", "a",
     [("f", '{"a": -1, "b": null, "c": true, "d": [1, "x"]}')]),
    ("pythonic", "[f(a=1), 2, g(x)]", ", 2, g(x)]", "", [("f", '{"a": 1}')]),
    ("pythonic", "[f(open('x'))]", "[f(open('x'))]", "", []),
    ("pythonic", "[1, 2] and", "[1, 2] and", "", []),
    ("harmony", f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
     f"<|constrain|>json<|message|>{ARGS}<|call|>", "", "Hm", [ONE]),
    ("harmony", "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>",
     "Hi.", "Hm", []),
    ("harmony", "<|channel|>commentary<|message|>First.<|end|><|start|>assistant to=functions.now<|channel|>commentary"
     "<|message|>{}", "First.", "", [TWO]),
    ("harmony", "plain text", "plain text", "", []),
    ("harmony", "<|channel|>ana", "", "", []),
    ("harmony", "<|channel|>commentary to=functions.now<|message|>", "", "", [TWO]),
    ("mistral", "[TOOL_CALLS]now[ARGS]", "", "", [TWO]),
    ("mistral", f"[TOOL_CALLS]now[TOOL_CALLS]weather[ARGS]{ARGS}", "", "", [TWO, ONE]),
    ("deepseek", f"{DS[0]}{DS[1]}function{DS[2]}now\n```json\n\n```{DS[3]}{DS[1]}now{DS[2]}{DS[3]}{DS[4]}", "", "",
     [TWO, TWO]),
    ("pythonic", "[f(a=NaN)]", "[f(a=NaN)]", "", []),
    ("pythonic", "[f(a=1e999)]", "[f(a=1e999)]", "", []),
]  # fmt: skip


def plain(output: ParsedOutput) -> tuple[str, str, list[tuple[str, str]]]:
    return output.content, output.reasoning, [(call.name, call.arguments) for call in output.tool_calls]


def in_pieces(parser: OutputParser, pieces: list[str], *, cut: bool = False) -> ParsedOutput:
    """Parse as a stream; the first piece of a call has its name and its id, and no other has."""
    deltas = [*map(parser.push, pieces), parser.finish(cut=cut)]
    known: set[int] = set()
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        assert (piece.index in known) == (piece.name is None) == (piece.id is None)
        assert piece.id is None or piece.id.startswith("call_")
        known.add(piece.index)
    return join(deltas)


def cut(text: str, seed: int) -> list[str]:
    draw = random.Random(seed)
    at, pieces = 0, []
    while at < len(text):
        size = draw.choice([1, 1, 2, 3, 5, 9, 30])
        pieces.append(text[at : at + size])
        at += size
    return pieces


@pytest.mark.parametrize(("name", "text", "content", "reasoning", "calls"), CASES)
def test_formats(name: str, text: str, content: str, reasoning: str, calls: list[tuple[str, str]]) -> None:
    wanted = (content, reasoning, calls)
    assert plain(parse(PARSERS[name](), text)) == wanted
    assert plain(in_pieces(PARSERS[name](), list(text))) == wanted
    for seed in range(20):
        assert plain(in_pieces(PARSERS[name](), cut(text, seed))) == wanted


TO_F = "<|channel|>commentary to=functions.f<|message|>"
AROUND = {
    # Calls of f with these arguments in each format, and the part of the text that is no content even if it is no call.
    "hermes": ('<tool_call>{"name": "f", "arguments": %s}</tool_call>', "%s"),
    "hermes inside": ('</think><tool_call>{"name": "f", "arguments": %s}</tool_call>', "</think>%s"),
    "json": ('[{"name": "f", "arguments": %s}]', "%s"),
    "llama3_json": ('{"name": "f", "parameters": %s}', "%s"),
    "mistral": ("[TOOL_CALLS]f[ARGS]%s", "%s"),
    "deepseek": (f"{DS[1]}f{DS[2]}%s", "%s"),
    "harmony": (f"{TO_F}%s", f"{TO_F}%s"),
}


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize(
    "wrong", ["NaN", "-Infinity", "True", "None", "'x'", "1e999", "01", "+1", ".5", "0x1", '"\\x"', "{1: 2}", "[1,]"]
)
def test_a_call_with_arguments_that_are_no_json_is_content(name: str, wrong: str) -> None:
    text = AROUND[name][0] % f'{{"a": {wrong}, "b": 1}}'
    shown = text.removeprefix(AROUND[name][1] % "")
    for cut_off in (False, True):
        assert plain(parse(PARSERS[name](), text, cut=cut_off)) == (shown, "", [])
        assert plain(in_pieces(PARSERS[name](), list(text), cut=cut_off)) == (shown, "", [])


#: Text that max_tokens cut, content, calls
CUT: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", 'Hm <tool_call>\n{"na', "Hm", []),
    ("hermes", '<tool_call>{"name": "f"', "", [("f", "")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tr', "", [("f", '{"a": tr')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\u00', "", [("f", '{"a": "\\u00')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN, "b',
     '<tool_call>{"name": "f", "arguments": {"a": NaN, "b', []),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}\n<tool_call>{"n', "", [TWO]),
    ("json", '{"na', '{"na', []),
    ("json", '[{"name": "now", "arguments": {}}, {"na', "", [TWO]),
    ("llama3_json", '{"type": "function", "function": {"name": "f", "parameters": {"a": [', "", [("f", '{"a": [')]),
    ("llama3_json", '<|python_tag|>{"na', "", []),
    ("mistral", "[TOOL_CALLS]weath", "", []),
    ("mistral", "[TOOL_CALLS]weather[ARGS]", "", [("weather", "")]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"a": -', "", [("weather", '{"a": -')]),
    ("deepseek", f"{DS[0]}{DS[1]}func", "", []),
    ("deepseek", f"{DS[0]}{DS[1]}function{DS[2]}weather\n``", "", [("weather", "")]),
    ("deepseek", f'{DS[0]}{DS[1]}weather{DS[2]}{{"city": "R', "", [("weather", '{"city": "R')]),
    ("pythonic", "[f(a=1, b='x', c=[1, 2", "", [("f", '{"a": 1, "b": "x"')]),
    ("pythonic", "[f(", "", [("f", "")]),
    ("pythonic", "[f(x, y", "[f(x, y", []),
    ("pythonic", "<|python_start|>[we", "", []),
    ("harmony", "<|channel|>commentary to=functions.weather <|con", "", [("weather", "")]),
    ("harmony", '<|channel|>commentary to=functions.weather<|message|>{"a', "", [("weather", '{"a')]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), CUT)
def test_a_call_that_is_cut_is_a_partial_call(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    whole = parse(PARSERS[name](), text, cut=True)
    assert plain(whole) == (content, "", calls)
    assert whole.unfinished is (bool(calls) and calls != [TWO])
    assert plain(in_pieces(PARSERS[name](), list(text), cut=True)) == (content, "", calls)


WRITTEN = [
    '{"name": "f", "arguments": {"a": 1, "b": "x \\"{"}}',
    '{"name": "f", "arguments": {"a": [true, null, -1.5e3, {}], "b": {"c": "\\u00e9 }"}}}',
    '{"arguments": {"a": 1}, "name": "f"}',
    '{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}',
    '{"name": "f", "arguments": "{\\"a\\": 1}"}',
    '{"name": "f"}',
    '{"name": "f", "arguments": {"a": NaN}}',
]
RAW = ['{"a": 1, "b": "x \\"{ é"}', '{"a": [true, null, -1.5e3, {}], "b": {"c": "}"}}', "{}", "", '{"a": Infinity}']
OUTPUTS: dict[str, list[str]] = {
    "hermes": [
        f"<think>a</think>b <tool_call>{one}\n{two}</tool_call>\n<tool_call>{two}</tool_call>"
        for one in WRITTEN for two in WRITTEN
    ],
    "json": [f"[{one}, {two}]" for one in WRITTEN for two in WRITTEN],
    "llama3_json": [
        f"<|python_tag|>{one}; {two}".replace("arguments", "parameters") for one in WRITTEN for two in WRITTEN
    ],
    "mistral": [f"a[TOOL_CALLS]f[ARGS]{one}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{two}" for one in RAW for two in RAW]
    + [f"[TOOL_CALLS][{one}, {two}]" for one in WRITTEN for two in WRITTEN],
    "deepseek": [
        f"a{DS[0]}{DS[1]}function{DS[2]}f\n```json\n{one}\n```{DS[3]}\n{DS[1]}g{DS[2]}{two}{DS[3]}{DS[4]}"
        for one in RAW for two in RAW
    ],
    "pythonic": [
        f"<|python_start|>[f({one}), g.h({two})]<|python_end|>"
        for one in ("", "a=1, b='x, y'", "a=[1, {'b': None}], c=(True,)", "a=NaN") for two in ("", 'a="\\"", b=-2')
    ],
    "harmony": [
        f"<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        f"<|constrain|>json<|message|>{one}<|call|><|start|>assistant to=functions.g<|channel|>commentary<|message|>"
        f"{two}"
        for one in RAW for two in RAW
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_cut_anywhere_in_any_pieces(name: str) -> None:
    """Whole calls have arguments that are JSON objects, and only the last call of an output that was cut is partial."""
    draw = random.Random(1)
    for text in OUTPUTS[name]:
        ends = range(len(text) + 1) if text == OUTPUTS[name][0] else draw.sample(range(len(text) + 1), 10)
        for end in ends:
            was_cut = draw.random() < 0.8
            whole = parse(PARSERS[name](), text[:end], cut=was_cut)
            pieces = in_pieces(PARSERS[name](), cut(text[:end], draw.randrange(1000)), cut=was_cut)
            assert plain(pieces) == plain(whole)
            assert not (whole.unfinished and not was_cut)
            calls = whole.tool_calls[:-1] if whole.unfinished else whole.tool_calls
            assert all(isinstance(strict(call.arguments), dict) for call in calls)
            if whole.unfinished:
                with pytest.raises(json.JSONDecodeError):
                    strict(whole.tool_calls[-1].arguments)


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("name", OUTPUTS)
def test_forced_outputs_have_no_content(name: str) -> None:
    draw = random.Random(2)
    for text in [text for text in OUTPUTS[name] if "NaN" not in text and "Infinity" not in text]:
        for end in draw.sample(range(len(text) + 1), 10):
            for live in (True, False):
                parser = PARSERS[name]()
                assert isinstance(parser, Machine)
                parser.rules = CallRules(live=live, forced=("f", "g"))
                whole = parse(parser, text[:end], cut=True)
                assert whole.content == ""
                parser = PARSERS[name]()
                assert isinstance(parser, Machine)
                parser.rules = CallRules(live=live, forced=("f", "g"))
                assert plain(in_pieces(parser, cut(text[:end], end), cut=True)) == plain(whole)


def test_a_forced_call_of_one_tool_is_known_before_its_name() -> None:
    rules = CallRules(live=True, forced=("weather",), most=1)
    for make, text in ((Hermes, '<tool_call>\n{"na'), (Json, '{"name": "weat'), (Mistral, "[TOOL_CALLS]we")):
        whole = parse(make(rules=rules), text, cut=True)
        assert plain(whole) == ("", "", [("weather", "")])
        assert whole.unfinished
        assert plain(parse(make(rules=rules), "", cut=True)) == ("", "", [])
    assert plain(parse(Json(rules=CallRules(forced=("a", "b"))), '{"na', cut=True)) == ("", "", [])


def test_a_stop_string_within_a_call_does_not_complete_it() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "'
    forced = parse(Hermes(rules=CallRules(live=True, forced=("f",))), text)
    assert plain(forced) == ("", "", [("f", '{"a": "')])
    assert forced.unfinished
    assert plain(parse(Hermes(), text)) == (text, "", [])


def test_pieces_of_calls_that_a_grammar_holds_are_given_as_they_come() -> None:
    parser = Hermes(rules=CallRules(live=True))
    pieces = [parser.push(char) for char in '<tool_call>{"name": "f", "arguments": {"a": "long"}}</tool_call>']
    assert sum(bool(piece.tool_calls) for piece in pieces) > 10
    assert plain(join([*pieces, parser.finish()])) == ("", "", [("f", '{"a": "long"}')])
    held = Hermes()
    pieces = [held.push(char) for char in '<tool_call>{"name": "f", "arguments": {"a": "long"']
    assert not any(pieces)


def test_tools_without_parameters_get_none() -> None:
    for written in ('{"a": 1}', "{}", ""):
        parser = Mistral(rules=CallRules(bare=("f",)))
        assert plain(parse(parser, f"[TOOL_CALLS]f[ARGS]{written}")) == ("", "", [("f", "{}")])


FRAGMENTS = [
    *(marker for parser in (Hermes, Llama3Json, Mistral, DeepSeek, Harmony, Pythonic) for marker in parser.triggers),
    *(marker for pair in REASONING.values() for marker in pair), *DS, "[ARGS]", "[CALL_ID]", "<|message|>", "analysis",
    " to=functions.f", "final", '{"name": "f", "arguments": ', '{"arguments": ', '{"a": 1}', '"', "\\", "{", "}", "[",
    "]", ", ", ";", "f(", "a=1", ")", "\n", "```json\n", "```", "function", "f", "x y", '"\\ud800"', "é", " " * 30, "'",
]  # fmt: skip


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=14), seed=st.integers(0, 9))
def test_any_text_in_any_pieces(name: str, parts: list[str], seed: int) -> None:
    text = "".join(parts)
    shortened = parse(PARSERS[name](), text, cut=True)
    assert plain(in_pieces(PARSERS[name](), cut(text, seed), cut=True)) == plain(shortened)
    whole = parse(PARSERS[name](), text)
    assert plain(in_pieces(PARSERS[name](), cut(text, seed))) == plain(whole)
    assert plain(in_pieces(PARSERS[name](), list(text))) == plain(whole)
    json.dumps(plain(whole), ensure_ascii=False).encode()
    assert all(isinstance(strict(call.arguments), dict) for call in whole.tool_calls)
    if not whole.tool_calls and not whole.reasoning and name not in ("harmony", "deepseek"):
        begins_and_ends = any(text.lstrip().startswith(pair.begin) for pair in REASONING.values())
        assert begins_and_ends or name == "hermes inside" or whole.content == text


@pytest.mark.parametrize("name", PARSERS)
def test_long_texts(name: str) -> None:
    """Limits of what is held back hold wherever the pieces end."""
    for filler in (" ", "x", '\\"', "a, ", "\n"):
        for head in ('<tool_call>{"name": "', "[TOOL_CALLS]", '{"arguments": {"a": "', "[f(a='", "<|channel|>", DS[1]):
            text = head + filler * 1500 + '"}, "name": "f"}' + "')]<|message|>"
            whole = plain(parse(PARSERS[name](), text))
            assert plain(in_pieces(PARSERS[name](), cut(text, 1))) == whole
            assert plain(in_pieces(PARSERS[name](), [text[:1024], text[1024:1025], text[1025:]])) == whole


def test_one_call_of_several() -> None:
    text = '[{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]'
    assert plain(parse(Json(rules=CallRules(most=1)), text)) == ("", "", [("a", '{"x": 1}')])
    assert plain(in_pieces(Json(rules=CallRules(most=1)), list(text))) == ("", "", [("a", '{"x": 1}')])
