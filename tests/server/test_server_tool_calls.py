"""Calls that are cut, empty or no JSON, in all three APIs that have tools, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from asyncengine import AsyncEngine, bundled_model
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, USER, Site, serving

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TEMPLATE = "{{ tools }}<tool_call>"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
WHOLE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
Outcome = tuple[str, list[tuple[str, Any]], str]
"""Content, names and arguments of calls, and why the output ended."""


def functions(names: Iterable[str] = ("weather", "now")) -> list[dict[str, Any]]:
    return [{"name": name} | ({"parameters": SCHEMA} if name == "weather" else {}) for name in names]


def scripted(text: str) -> FakeEngine:
    return FakeEngine(text, ends=True, max_model_len=4096, chat_template=TEMPLATE)


async def chat(site: Site, **fields: Any) -> list[Outcome]:
    asked: dict[str, Any] = {"messages": USER, "tools": [{"type": "function", "function": f} for f in functions()]}
    asked |= fields
    (choice,) = (await site.post(CHAT, **asked)).json["choices"]
    message = choice["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
    assert message["content"] is None or message["content"] or not (calls or fields.get("tool_choice"))
    content, names, arguments, reason = "", [], [], ""
    for event in await site.events(CHAT, **asked):
        (streamed,) = event["choices"]
        content += streamed["delta"].get("content") or ""
        for call in streamed["delta"].get("tool_calls", ()):
            if "id" in call:
                names.append(call["function"]["name"])
                arguments.append("")
            arguments[call["index"]] += call["function"]["arguments"]
        reason = streamed["finish_reason"] or reason
    return [
        (message["content"] or "", calls, choice["finish_reason"]),
        (content, list(zip(names, arguments, strict=True)), reason),
    ]


async def responses(site: Site, **fields: Any) -> list[Outcome]:
    asked: dict[str, Any] = {"input": "x", "tools": [{"type": "function"} | f for f in functions()]} | fields
    if isinstance(choice := asked.get("tool_choice"), dict):
        asked["tool_choice"] = {"type": "function", "name": choice["function"]["name"]}
    if "max_tokens" in asked:
        asked["max_output_tokens"] = asked.pop("max_tokens")
    whole = (await site.post(RESPONSES, **asked)).json
    raw = (await site.post(RESPONSES, stream=True, **asked)).body.decode()
    events = [json.loads(text.split("data: ")[1]) for text in raw.split("\n\n") if text]
    outcomes = []
    for response in (whole, events[-1]["response"]):
        texts = [item["content"][0]["text"] for item in response["output"] if item["type"] == "message"]
        calls = [(i["name"], i["arguments"]) for i in response["output"] if i["type"] == "function_call"]
        assert not (texts and fields.get("tool_choice"))
        last = response["output"][-1] if response["output"] else {}
        reason = "length" if response["status"] == "incomplete" else "tool_calls" if calls else "stop"
        assert last.get("status", "incomplete") == ("incomplete" if reason == "length" else "completed")
        outcomes.append(("".join(texts), calls, reason))
    deltas = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == "".join(arguments for _, arguments in outcomes[1][1])
    return outcomes


async def messages(site: Site, **fields: Any) -> list[Outcome]:
    tools = [{"name": f["name"], "input_schema": f.get("parameters", {"type": "object"})} for f in functions()]
    asked: dict[str, Any] = {"messages": USER, "tools": tools, "max_tokens": 1000} | fields
    if choice := asked.pop("tool_choice", None):
        named = isinstance(choice, dict)
        asked["tool_choice"] = {"type": "tool", "name": choice["function"]["name"]} if named else {"type": "any"}
    whole = (await site.post(MESSAGES, **asked)).json
    raw = (await site.post(MESSAGES, stream=True, **asked)).body.decode()
    events = [json.loads(text.split("data: ")[1]) for text in raw.split("\n\n") if text]
    reasons = {"max_tokens": "length", "tool_use": "tool_calls", "end_turn": "stop"}
    calls = [(b["name"], json.dumps(b["input"])) for b in whole["content"] if b["type"] == "tool_use"]
    texts = [b["text"] for b in whole["content"] if b["type"] == "text"]
    names = [e["content_block"]["name"] for e in events if e.get("content_block", {}).get("type") == "tool_use"]
    pieces: dict[int, str] = {}
    text = ""
    for event in events:
        delta = event.get("delta", {})
        if delta.get("type") == "input_json_delta":
            pieces[event["index"]] = pieces.get(event["index"], "") + delta["partial_json"]
        text += delta.get("text", "")
    streamed = list(zip(names, [*pieces.values(), *[""] * len(names)], strict=False))
    assert [name for name, _ in streamed] == [name for name, _ in calls]
    reason = next(e["delta"]["stop_reason"] for e in events if e["type"] == "message_delta")
    return [("".join(texts), streamed, reasons[whole["stop_reason"]]), (text, streamed, reasons[reason])]


APIS = [chat, responses, messages]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("api", APIS)
async def test_a_call_cut_by_max_tokens_is_a_partial_call(api: Any) -> None:
    async with serving(scripted(WHOLE)) as site:
        for choice in ({}, {"tool_choice": "required"}, {"tool_choice": NAMED}):
            for arguments in ("", '{"ci', '{"city": ', '{"city": "Ro'):
                end = WHOLE.index('{"city"') + len(arguments)
                for outcome in await api(site, max_tokens=end, **choice):
                    assert outcome == ("", [("weather", arguments)], "length")
        for outcome in await api(site, max_tokens=14, tool_choice=NAMED):
            assert outcome == ("", [("weather", "")], "length")
        for outcome in await api(site, max_tokens=14, tool_choice="required"):
            assert outcome == ("", [], "length")


@pytest.mark.parametrize("api", APIS)
async def test_arguments_that_are_no_json_make_the_call_content(api: Any) -> None:
    for wrong in ("NaN", "-Infinity", "True", "'Rome'", "01"):
        text = WHOLE.replace('"Rome"', wrong)
        async with serving(scripted(text)) as site:
            for outcome in await api(site):
                assert outcome == (text, [], "stop")


@pytest.mark.parametrize("api", APIS)
async def test_empty_and_absent_arguments_are_an_empty_object(api: Any) -> None:
    for written in ('{"name": "now"}', '{"name": "now", "arguments": ""}', '{"name": "now", "arguments": null}'):
        async with serving(scripted(f"<tool_call>{written}\n{written}</tool_call>")) as site:
            for outcome in await api(site):
                assert outcome == ("", [("now", "{}"), ("now", "{}")], "tool_calls")


async def test_arguments_of_a_tool_without_parameters_are_empty() -> None:
    """Arguments are empty whatever the model would write, and also where a grammar holds it."""
    for parameters in ({}, {"parameters": None}, {"parameters": {}}, {"parameters": {"properties": {}}}):
        tool = {"type": "function", "function": {"name": "now"} | parameters}
        text = '<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
        async with serving(scripted(text)) as site:
            for outcome in await chat(site, tools=[tool]):
                assert outcome == ("", [("now", "{}")], "tool_calls")
    async with AsyncEngine.from_pretrained(bundled_model(), progress=False) as engine, serving(engine) as site:  # type: ignore[arg-type]
        for seed in range(3):
            asked = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
            for outcome in await chat(site, temperature=1.5, seed=seed, max_tokens=200, **asked):
                assert outcome == ("", [("now", "{}")], "tool_calls")
