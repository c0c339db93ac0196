"""Bodies within the limits of every route that cost a server as much as they can, each sent by one client.

Each puts the most that a limit allows into one field. Which fields those are is the point: a field that is read,
checked, copied, counted or written back on the event loop shows in the processor time of its thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hostile_requests import CHAT, COMPLETIONS, Load, at_once, request

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
_LETTERS = 30_000_000
"""Characters of one long text: a body has up to 32 MiB."""
_VALUES = 480_000
"""Numbers of one long array: a body has up to 500,000 values."""
_STRINGS = _VALUES // 2
"""Strings of one long array: each counts twice. So does each key of an object, and the object itself."""
_SMALL_OBJECTS = _VALUES // 10
"""Objects of two keys with a string each."""
_PROMPTS = 1024
_HELLO = [{"role": "user", "content": "hi"}]
_OK = frozenset({"200"})
_REFUSED = frozenset({"400", "413"})


@dataclass(frozen=True)
class Body:
    """A request that ``path`` gets."""

    name: str
    path: str
    make: Callable[[], bytes]
    """The JSON; made when its turn comes, since all of them together take much memory."""
    statuses: frozenset[str] = _OK | _REFUSED
    """Any other status is a fault. Whether a body is served or refused is the business of other tests."""


def load_of(body: Body) -> Load:
    return at_once([request(body.path, body.make())], 1)


def _body(name: str, path: str, statuses: frozenset[str] = _OK | _REFUSED, **fields: Callable[[], Any]) -> Body:
    """The fields are functions of nothing, so that a long one is made late."""
    whole = _REQUIRED[path]

    def make() -> bytes:
        return json.dumps(whole | {name: value() for name, value in fields.items()}, separators=(",", ":")).encode()

    return Body(f"{path}: {name}", path, make, statuses)


_REQUIRED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x", "max_tokens": 1},
    CHAT: {"messages": _HELLO, "max_tokens": 1},
    RESPONSES: {"input": "hi", "max_output_tokens": 1},
    f"{RESPONSES}/input_tokens": {"input": "hi"},
    MESSAGES: {"messages": _HELLO, "max_tokens": 1},
    f"{MESSAGES}/count_tokens": {"messages": _HELLO},
    "/v1/embeddings": {"input": "x"},
    "/score": {"text_1": "x", "text_2": "y"},
    "/rerank": {"query": "x", "documents": ["y"]},
    "/classify": {"input": "x"},
    "/tokenize": {},
    "/detokenize": {},
}


# ---- values ----


def letters() -> str:
    return "a" * _LETTERS


def text_of_json() -> str:
    """An object of 240,000 members, as text."""
    return json.dumps({f"k{i}": i for i in range(_VALUES // 2)})


def long_text_of_json() -> str:
    return json.dumps({"text": "a" * (_LETTERS - 1000)})


def long_list_as_text() -> str:
    """A list of 15 million numbers in an object, as text: one value of the body, many of the text."""
    return '{"a":[' + ",".join(["1"] * (_LETTERS // 2 - 100)) + "]}"


def deep_text_of_json() -> str:
    """Arrays in arrays, as text: deeper than Python's own parser can follow."""
    return '{"a":' + "[" * 5000 + "]" * 5000 + "}"


def wide_schema() -> dict[str, Any]:
    """4 MB of properties."""
    return {"type": "object", "properties": {f"field{i:032}": {"type": "string"} for i in range(60_000)}}


def long_schema() -> dict[str, Any]:
    """10 MB in few values."""
    return {"type": "string", "enum": ["a" * 1_000_000 + str(i) for i in range(10)]}


def small_items() -> list[dict[str, Any]]:
    return [{"role": "user", "content": "a"}] * _SMALL_OBJECTS


def grammars_of_tools() -> list[dict[str, Any]]:
    """Lark grammars of almost as many characters as a request's may have, each with many alternatives."""
    rules = "start: " + " | ".join(f'"word{i}"' for i in range(600))
    format_ = {"type": "grammar", "syntax": "lark", "definition": rules}
    return [{"type": "custom", "name": f"tool{i}", "format": format_} for i in range(16_384 // len(rules))]


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "parameters": parameters}}


def function_tool(parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool as /v1/responses knows it."""
    return {"type": "function", "name": "look", "parameters": parameters}


def many_tools() -> list[dict[str, Any]]:
    small = {"type": "object", "properties": {"a": {"type": "string"}}}
    return [{"type": "function", "function": {"name": f"tool{i}", "parameters": small}} for i in range(_VALUES // 40)]


def called(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "done"}
    return [*_HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, answer]


def called_items(arguments: str) -> list[dict[str, Any]]:
    call = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": arguments}
    return [*_HELLO, call, {"type": "function_call_output", "call_id": "call_1", "output": ""}]


def used(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "done"}
    return [*_HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


def members(count: int = _VALUES // 2) -> dict[str, Any]:
    return {f"k{i}": 1 for i in range(count)}


def words(count: int, length: int) -> list[str]:
    """Different ones."""
    return [f"{i:0{length}}" for i in range(count)]


def ids(count: int) -> list[int]:
    """Token ids of the bundled model, with repetitions."""
    return [5 + i % 200 for i in range(count)]


# ---- bodies ----

_SCHEMA_FORMATS: dict[str, Callable[[], Any]] = {
    "wide": lambda: {"type": "json_schema", "json_schema": {"name": "a", "schema": wide_schema()}},
    "long": lambda: {"type": "json_schema", "json_schema": {"name": "a", "schema": long_schema()}},
}

BODIES: list[Body] = [
    # words, ids and biases
    _body("a prompt of 30 MB", COMPLETIONS, prompt=letters),
    _body("allowed ids × 1,024 prompts", COMPLETIONS, prompt=lambda: ["x"] * _PROMPTS,
          allowed_token_ids=lambda: ids(_VALUES)),
    _body("logit biases", COMPLETIONS, logit_bias=lambda: members(_VALUES // 2)),
    _body("logit biases of ids × 1,024 prompts", COMPLETIONS, prompt=lambda: ["x"] * _PROMPTS,
          logit_bias=lambda: {str(i): 1 for i in range(300)}),
    _body("many bad words", COMPLETIONS, bad_words=lambda: words(_STRINGS, 8)),
    _body("long bad words", COMPLETIONS, bad_words=lambda: words(30, 1_000_000)),
    _body("bad words × 1,024 prompts", COMPLETIONS, prompt=lambda: ["x"] * _PROMPTS,
          bad_words=lambda: words(100, 60)),
    _body("many stop strings", COMPLETIONS, stop=lambda: words(_STRINGS, 8)),
    _body("long stop strings", COMPLETIONS, stop=lambda: words(4, 7_000_000)),
    _body("stop ids", COMPLETIONS, stop_token_ids=lambda: ids(_VALUES)),
    _body("prompts of ids", COMPLETIONS, prompt=lambda: [ids(450)] * _PROMPTS),
    _body("a salt of 30 MB", COMPLETIONS, cache_salt=letters),
    # log probabilities
    _body("128 outputs × 20 log probabilities", COMPLETIONS, max_tokens=lambda: 100, n=lambda: 128,
          logprobs=lambda: 20, ignore_eos=lambda: True, seed=lambda: 1),
    _body("echo of 40 prompts × 20 log probabilities", COMPLETIONS, prompt=lambda: [ids(450)] * 40,
          logprobs=lambda: 20, echo=lambda: True, max_tokens=lambda: 1),
    _body("prompt log probabilities", COMPLETIONS, prompt=lambda: [ids(450)] * 40, prompt_logprobs=lambda: 20),
    _body("128 outputs × 20 log probabilities", CHAT, max_tokens=lambda: 100, n=lambda: 128,
          logprobs=lambda: True, top_logprobs=lambda: 20, ignore_eos=lambda: True, seed=lambda: 1),
    _body("the best of 128 outputs × 20 log probabilities", COMPLETIONS, max_tokens=lambda: 100, best_of=lambda: 128,
          logprobs=lambda: 20, ignore_eos=lambda: True, seed=lambda: 1),
    _body("the best 2 of 8 × 128 prompts", COMPLETIONS, prompt=lambda: ["x"] * 128, max_tokens=lambda: 20,
          best_of=lambda: 8, n=lambda: 2, ignore_eos=lambda: True),
    # gaps
    _body("a suffix of 30 MB", COMPLETIONS, _REFUSED, suffix=letters),
    _body("a suffix of 1 MB × 1,024 prompts", COMPLETIONS, _REFUSED, prompt=lambda: ["x"] * _PROMPTS,
          suffix=lambda: "word " * 200_000),
    # structures
    _body("a schema as text of 240,000 members", COMPLETIONS, guided_json=text_of_json),
    _body("a schema as text of 15 million numbers", COMPLETIONS, guided_json=long_list_as_text),
    _body("a deep schema as text", COMPLETIONS, _REFUSED, guided_json=deep_text_of_json),
    _body("a schema as text in structured_outputs", COMPLETIONS,
          structured_outputs=lambda: {"json": long_list_as_text()}),
    _body("a regex of 30 MB", COMPLETIONS, guided_regex=letters),
    _body("a grammar of 30 MB", COMPLETIONS, guided_grammar=letters),
    _body("27 MB of choices", COMPLETIONS, guided_choice=lambda: words(27, 1_000_000)),
    _body("240,000 choices", COMPLETIONS, guided_choice=lambda: words(_STRINGS, 8)),
    _body("a wide schema", COMPLETIONS, response_format=_SCHEMA_FORMATS["wide"]),
    _body("a long schema × 1,024 prompts", COMPLETIONS, prompt=lambda: ["x"] * _PROMPTS,
          response_format=_SCHEMA_FORMATS["long"]),
    # tools and messages
    _body("arguments of 240,000 members", CHAT, messages=lambda: called(text_of_json())),
    _body("arguments of 15 million numbers", CHAT, messages=lambda: called(long_list_as_text())),
    _body("arguments of one long string", CHAT, messages=lambda: called(long_text_of_json())),
    _body("deep arguments", CHAT, messages=lambda: called(deep_text_of_json())),
    _body("a tool with a wide schema", CHAT, tools=lambda: [tool(wide_schema())]),
    _body("a tool with a long schema", CHAT, tools=lambda: [tool(long_schema())]),
    _body("a long schema beside a long tool", CHAT, tools=lambda: [tool(long_schema())],
          response_format=_SCHEMA_FORMATS["long"]),
    _body("12,000 tools that must be called", CHAT, tools=many_tools, tool_choice=lambda: "required"),
    _body("12,000 functions", CHAT, functions=lambda: [each["function"] for each in many_tools()]),
    _body("a function with a wide schema", CHAT, functions=lambda: [tool(wide_schema())["function"]],
          function_call=lambda: {"name": "look"}),
    _body("arguments of 240,000 members in the older form", CHAT, messages=lambda: [
        *_HELLO, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": text_of_json()}}]),
    _body("48,000 results in the older form", CHAT, messages=lambda: [
        {"role": "function", "name": "f", "content": "a"}] * (_SMALL_OBJECTS // 2)),
    _body("an echo of 128 outputs", CHAT, echo=lambda: True, n=lambda: 128, ignore_eos=lambda: True, messages=lambda: [
        *_HELLO, {"role": "assistant", "content": "word " * 60}]),
    _body("a message of 30 MB", CHAT, messages=lambda: [{"role": "user", "content": letters()}]),
    _body("48,000 parts", CHAT, messages=lambda: [
        {"role": "user", "content": [{"type": "text", "text": "a"}] * _SMALL_OBJECTS}]),
    _body("values for the template", CHAT, chat_template_kwargs=members),
    _body("documents for the template", CHAT, documents=lambda: [{"title": "a", "text": "b"}] * _SMALL_OBJECTS),
    _body("arguments of 15 million numbers", RESPONSES, input=lambda: called_items(long_list_as_text())),
    _body("deep arguments", RESPONSES, input=lambda: called_items(deep_text_of_json())),
    _body("48,000 items", RESPONSES, input=small_items),
    _body("48,000 items to count", f"{RESPONSES}/input_tokens", input=small_items),
    _body("48,000 items of which the oldest may go", RESPONSES, input=small_items, truncation=lambda: "auto"),
    _body("grammars of custom tools", RESPONSES, tools=grammars_of_tools),
    _body("a tool with a wide schema", RESPONSES, tools=lambda: [function_tool(wide_schema())]),
    _body("a long schema", RESPONSES, text=lambda: {
        "format": {"type": "json_schema", "name": "a", "schema": long_schema()}}),
    _body("instructions of 30 MB", RESPONSES, instructions=letters),
    _body("a user of 30 MB", RESPONSES, user=letters),
    _body("a summary of 30 MB", RESPONSES, reasoning=lambda: {"summary": letters()}),
    _body("metadata", RESPONSES, metadata=lambda: {f"k{i}": "v" for i in range(_VALUES // 4)}),
    _body("arguments of 240,000 members", MESSAGES, messages=lambda: used(members())),
    _body("a tool with a wide schema", MESSAGES, tools=lambda: [{"name": "look", "input_schema": wide_schema()}]),
    _body("240,000 members in an example of a tool's input", MESSAGES, tools=lambda: [
        {"name": "look", "input_schema": {"type": "object"}, "input_examples": [members()]}]),
    _body("a long schema in the older form", MESSAGES, output_format=lambda: {
        "type": "json_schema", "schema": long_schema()}),
    _body("48,000 blocks that say nothing", MESSAGES, messages=lambda: [
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "a"}] * _SMALL_OBJECTS}]),
    _body("48,000 blocks", MESSAGES, messages=lambda: [
        {"role": "user", "content": [{"type": "text", "text": "a"}] * _SMALL_OBJECTS}]),
    _body("a system prompt of 30 MB", MESSAGES, system=letters),
    _body("stop sequences", MESSAGES, stop_sequences=lambda: words(_STRINGS, 8)),
    _body("arguments of 240,000 members", f"{MESSAGES}/count_tokens", messages=lambda: used(members())),
    # vectors
    _body("prompts of ids", "/v1/embeddings", input=lambda: [ids(450)] * _PROMPTS),
    _body("one prompt of 480,000 ids", "/v1/embeddings", input=lambda: ids(_VALUES)),
    _body("1,024 texts of 29 kB", "/v1/embeddings", input=lambda: ["word " * 5800] * _PROMPTS),
    _body("1,024 texts", "/v1/embeddings", input=lambda: ["word " * 80] * _PROMPTS),
    _body("1,024 pairs of 29 kB", "/score", text_2=lambda: ["word " * 5800] * _PROMPTS),
    _body("1,024 pairs", "/score", text_2=lambda: ["word " * 80] * _PROMPTS),
    _body("1,024 documents of 29 kB", "/rerank", documents=lambda: ["word " * 5800] * _PROMPTS),
    _body("120,000 documents", "/rerank", documents=lambda: [{"text": "a"}] * 120_000),
    _body("480,000 ids", "/classify", input=lambda: ids(_VALUES)),
    # tokens and texts
    _body("a text of 30 MB", "/tokenize", prompt=letters),
    _body("a text of words", "/tokenize", prompt=lambda: "a word " * 4_000_000),
    _body("token strings", "/tokenize", prompt=lambda: "a word " * 100, return_token_strs=lambda: True),
    _body("arguments of 15 million numbers", "/tokenize", messages=lambda: called(long_list_as_text())),
    _body("480,000 ids", "/detokenize", tokens=lambda: ids(_VALUES)),
]  # fmt: skip
