"""Parsers of outputs: each format, in whatever pieces its text comes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncengine.markers import REASONING
from asyncengine.server.parsing import OutputParser, ParsedOutput, parse
from asyncengine.server.parsing.formats import DeepSeek, Hermes, Json, Llama3Json, Mistral
from asyncengine.server.parsing.harmony import Harmony
from asyncengine.server.parsing.parser import join
from asyncengine.server.parsing.pythonic import Pythonic

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
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', '<tool_call>{"name": "now"}</tool_call>', "", []),
    ("hermes", "<tool_call>nothing", "<tool_call>nothing", "", []),
    ("hermes", "</tool_call>x<tool_cal", "</tool_call>x<tool_cal", "", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", "", [("f", '{"a": 1')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>x', "x", "", [("f", '{"a": 1')]),
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
]  # fmt: skip


def plain(output: ParsedOutput) -> tuple[str, str, list[tuple[str, str]]]:
    return output.content, output.reasoning, [(call.name, call.arguments) for call in output.tool_calls]


def in_pieces(parser: OutputParser, pieces: list[str]) -> ParsedOutput:
    """As a stream; the first piece of a call has its name and its id, and no other has."""
    deltas = [*map(parser.push, pieces), parser.finish()]
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
def test_22_formats(name: str, text: str, content: str, reasoning: str, calls: list[tuple[str, str]]) -> None:
    wanted = (content, reasoning, calls)
    assert plain(parse(PARSERS[name](), text)) == wanted
    assert plain(in_pieces(PARSERS[name](), list(text))) == wanted
    for seed in range(20):
        assert plain(in_pieces(PARSERS[name](), cut(text, seed))) == wanted


FRAGMENTS = [
    *(marker for parser in (Hermes, Llama3Json, Mistral, DeepSeek, Harmony, Pythonic) for marker in parser.triggers),
    *(marker for pair in REASONING.values() for marker in pair), *DS, "[ARGS]", "[CALL_ID]", "<|message|>", "analysis",
    " to=functions.f", "final", '{"name": "f", "arguments": ', '{"arguments": ', '{"a": 1}', '"', "\\", "{", "}", "[",
    "]", ", ", ";", "f(", "a=1", ")", "\n", "```json\n", "```", "function", "f", "x y", '"\\ud800"', "é", " " * 30, "'",
]  # fmt: skip


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=14), seed=st.integers(0, 9))
def test_22_any_text_in_any_pieces(name: str, parts: list[str], seed: int) -> None:
    text = "".join(parts)
    whole = parse(PARSERS[name](), text)
    assert plain(in_pieces(PARSERS[name](), cut(text, seed))) == plain(whole)
    assert plain(in_pieces(PARSERS[name](), list(text))) == plain(whole)
    json.dumps(plain(whole), ensure_ascii=False).encode()
    if not whole.tool_calls and not whole.reasoning and name not in ("harmony", "deepseek"):
        begins_and_ends = any(text.lstrip().startswith(pair.begin) for pair in REASONING.values())
        assert begins_and_ends or name == "hermes inside" or whole.content == text


@pytest.mark.parametrize("name", PARSERS)
def test_22_long_texts(name: str) -> None:
    """Limits of what is held back hold wherever the pieces end."""
    for filler in (" ", "x", '\\"', "a, ", "\n"):
        for head in ('<tool_call>{"name": "', "[TOOL_CALLS]", '{"arguments": {"a": "', "[f(a='", "<|channel|>", DS[1]):
            text = head + filler * 1500 + '"}, "name": "f"}' + "')]<|message|>"
            whole = plain(parse(PARSERS[name](), text))
            assert plain(in_pieces(PARSERS[name](), cut(text, 1))) == whole
            assert plain(in_pieces(PARSERS[name](), [text[:1024], text[1024:1025], text[1025:]])) == whole


def test_22_one_call_of_several() -> None:
    text = '[{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]'
    assert plain(parse(Json(most_calls=1), text)) == ("", "", [("a", '{"x": 1}')])
    assert plain(in_pieces(Json(most_calls=1), list(text))) == ("", "", [("a", '{"x": 1}')])
