"""Reasoning and tools in /v1/responses and /v1/messages: scripted outputs, read by the packages of both APIs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest

from asyncengine import AsyncEngine, bundled_model
from asyncengine.api.conversation import Conversation
from tests.server.fake_engine import FakeEngine
from tests.server.harness import Site, serving

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TEMPLATE = "{{ tools }}<tool_call><think></think>"
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom 😀"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
SCRIPT = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALLS}"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS: Any = [
    {"type": "function", "name": "weather", "description": "The weather.", "parameters": SCHEMA, "strict": True},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
TOOLS: Any = [
    {"name": "weather", "description": "The weather.", "input_schema": SCHEMA},
    {"name": "now", "input_schema": {"type": "object"}, "type": "custom"},
]
USER: Any = [{"role": "user", "content": "How is it in Rome?"}]


def scripted(text: str = SCRIPT, template: str = TEMPLATE) -> FakeEngine:
    return FakeEngine(text, ends=True, max_model_len=4096, chat_template=template)


@asynccontextmanager
async def clients(
    engine: Any, **config: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic, Site]]:
    async with (
        serving(engine, served_model_name="fake", **config) as site,
        openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as api,
        anthropic.AsyncAnthropic(base_url=site.url, api_key="none", max_retries=0) as other,
    ):
        yield api, other, site


def events_of(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(text.split("data: ")[1]) for text in body.decode().split("\n\n") if text]


def chat_of(engine: FakeEngine) -> Conversation:
    """The last prompt."""
    prompt = engine.prompts[-1]
    return prompt if isinstance(prompt, Conversation) else Conversation(messages=prompt)  # type: ignore[arg-type]


async def test_responses_items() -> None:
    engine = scripted()
    async with clients(engine) as (api, _, site):
        raw = events_of((await site.post(RESPONSES, input="x", tools=FUNCTIONS, stream=True)).body)
        whole = await api.responses.create(model="fake", input="How is it in Rome?", tools=FUNCTIONS)
        assert [tool["function"]["name"] for tool in chat_of(engine).tools] == ["weather", "now"]
        assert chat_of(engine).tools[0]["function"]["parameters"] == SCHEMA
        async with api.responses.stream(model="fake", input="x", tools=FUNCTIONS) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
    for response in (whole, final):
        output: Any = response.output
        reasoning, message, weather, now = output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Hm.")
        assert (message.type, message.content[0].text) == ("message", "Let me see.")
        assert (weather.type, weather.name, json.loads(weather.arguments)) == (
            "function_call",
            "weather",
            {"city": "Rom 😀"},
        )
        assert (now.name, json.loads(now.arguments), now.status) == ("now", {}, "completed")
        assert weather.call_id != now.call_id
        assert response.status == "completed"
        assert [tool.name for tool in response.tools] == ["weather", "now"]
        assert len({item.id for item in response.output}) == 4
    types = [e.type.removeprefix("response.") for e in events]
    row = [t for i, t in enumerate(types) if i == 0 or t != types[i - 1]]
    part = ["output_item.added", "content_part.added"]
    done = ["content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert row == [
        "created", "in_progress",
        *part, "reasoning_text.delta", "reasoning_text.done", *done,
        *part, "output_text.delta", "output_text.done", *done,
        *call, *call, "completed",
    ]  # fmt: skip
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e["item"] for e in raw if e["type"] == "response.output_item.done"] == raw[-1]["response"]["output"]


async def test_responses_go_on_after_a_call() -> None:
    engine = scripted()
    result = {"type": "function_call_output", "output": "22 degrees"}
    async with clients(engine) as (api, _, _):
        first = await api.responses.create(model="fake", input="How is it in Rome?", tools=FUNCTIONS)
        calls = [item for item in first.output if item.type == "function_call"]
        results: Any = [result | {"call_id": call.call_id} for call in calls]
        await api.responses.create(model="fake", input=results, tools=FUNCTIONS, previous_response_id=first.id)
        stored = chat_of(engine)
        replayed: Any = [*USER, *[item.to_dict() for item in first.output], *results]
        await api.responses.create(model="fake", input=replayed, tools=FUNCTIONS, store=False)
        assert chat_of(engine) == stored
    user, assistant, *tools = stored.messages
    assert user == USER[0]
    assert assistant["content"] == "Let me see."
    assert assistant["reasoning_content"] == "Hm."
    assert [c["function"] for c in assistant["tool_calls"]] == [
        {"name": "weather", "arguments": {"city": "Rom 😀"}},
        {"name": "now", "arguments": {}},
    ]
    assert [(t["role"], t["content"], t["name"]) for t in tools] == [
        ("tool", "22 degrees", "weather"),
        ("tool", "22 degrees", "now"),
    ]
    assert [t["tool_call_id"] for t in tools] == [c["id"] for c in assistant["tool_calls"]]


async def test_responses_choices_and_efforts() -> None:
    switch = TEMPLATE + "{{ enable_thinking }}"
    engine = scripted(template=switch)
    async with clients(engine) as (api, _, site):
        ask = {"input": "x", "tools": FUNCTIONS}
        one = (await site.post(RESPONSES, **ask, parallel_tool_calls=False)).json
        assert [item["name"] for item in one["output"] if item["type"] == "function_call"] == ["weather"]
        assert one["parallel_tool_calls"] is False
        none = (await site.post(RESPONSES, **ask, tool_choice="none")).json
        assert not chat_of(engine).tools
        assert none["tool_choice"] == "none"
        named = await site.post(RESPONSES, **ask, tool_choice={"type": "function", "name": "now"})
        assert named.json["tool_choice"] == {"type": "function", "name": "now"}
        assert engine.submitted[-1][1].structured_outputs is not None
        for effort, enabled in (("none", False), ("high", True)):
            reply = await api.responses.create(model="fake", input="x", reasoning={"effort": effort})  # type: ignore
            assert reply.reasoning.effort == effort
            assert chat_of(engine).chat_template_kwargs == {"enable_thinking": enabled}
        for fields, param in (
            ({"tools": [{"type": "web_serch"}]}, "tools[0].type"),
            ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools[0].type"),
            ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
            ({"tools": [{"type": "function", "name": "a", "parameters": {"type": "x"}}]}, "tools[0].parameters"),
            ({"tools": FUNCTIONS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
            ({"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
            ({"tools": FUNCTIONS, "tool_choice": "always"}, "tool_choice"),
        ):
            reply = await site.post(RESPONSES, input="x", **fields)
            assert (reply.status, reply.error["param"]) == (400, param), reply.error
            assert ".function" not in reply.error["message"]
    async with clients(scripted(template="plain")) as (_, _, site):
        reply = await site.post(RESPONSES, input="x", reasoning={"effort": "high"})
        assert (reply.status, reply.json["reasoning"]["effort"]) == (200, "high")


async def test_messages_blocks() -> None:
    engine = scripted()
    async with clients(engine) as (_, api, site):
        whole = await api.messages.create(model="fake", messages=USER, tools=TOOLS, max_tokens=400)
        assert chat_of(engine).tools[0]["function"]["parameters"] == SCHEMA
        async with api.messages.stream(model="fake", messages=USER, tools=TOOLS, max_tokens=400) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_message()
        events = events_of((await site.post(MESSAGES, messages=USER, tools=TOOLS, max_tokens=400, stream=True)).body)
    for message in (whole, final):
        thinking, text, weather, now = message.content
        assert (thinking.type, thinking.thinking, text.text) == ("thinking", "Hm.", "Let me see.")
        assert (weather.type, weather.name, weather.input) == ("tool_use", "weather", {"city": "Rom 😀"})
        assert (now.name, now.input) == ("now", {})
        assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    blocks = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert blocks[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert blocks[2] | {"id": None} == {"type": "tool_use", "id": None, "name": "weather", "input": {}}
    deltas = [e for e in events if e["type"] == "content_block_delta"]
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1, 2, 3]
    assert {(e["index"], e["delta"]["type"]) for e in deltas} == {
        (0, "thinking_delta"),
        (1, "text_delta"),
        (2, "input_json_delta"),
        (3, "input_json_delta"),
    }


async def test_messages_go_on_after_a_call() -> None:
    engine = scripted()
    async with clients(engine) as (_, api, site):
        first = await api.messages.create(model="fake", messages=USER, tools=TOOLS, max_tokens=400)
        calls = [block for block in first.content if block.type == "tool_use"]
        results: Any = [
            {"type": "tool_result", "tool_use_id": calls[0].id, "content": [{"type": "text", "text": "22 degrees"}]},
            {"type": "tool_result", "tool_use_id": calls[1].id, "content": "no clock", "is_error": True},
            {"type": "text", "text": "So?"},
        ]
        talk: Any = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        await api.messages.create(model="fake", messages=talk, tools=TOOLS, max_tokens=400)
        user, assistant, *tools, question = chat_of(engine).messages
        unanswered = await site.post(
            MESSAGES, messages=[*USER, {"role": "assistant", "content": [b.to_dict() for b in calls]}], max_tokens=4
        )
    assert (user, question) == (USER[0], {"role": "user", "content": "So?"})
    assert (assistant["content"], assistant["reasoning_content"]) == ("Let me see.", "Hm.")
    assert [c["function"]["arguments"] for c in assistant["tool_calls"]] == [{"city": "Rom 😀"}, {}]
    assert [(t["role"], t["content"], t["tool_call_id"]) for t in tools] == [
        ("tool", "22 degrees", calls[0].id),
        ("tool", "Error: no clock", calls[1].id),
    ]
    assert unanswered.status == 400
    assert "results must follow" in unanswered.json["error"]["message"]


async def test_messages_choices_and_thinking() -> None:
    engine = scripted(template=TEMPLATE + "{{ enable_thinking }}")
    async with clients(engine) as (_, api, site):
        ask: dict[str, Any] = {"model": "fake", "messages": USER, "tools": TOOLS, "max_tokens": 400}
        one = await api.messages.create(**ask, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert [block.name for block in one.content if block.type == "tool_use"] == ["weather"]
        await api.messages.create(**ask, tool_choice={"type": "none"})
        assert not chat_of(engine).tools
        for choice in ({"type": "any"}, {"type": "tool", "name": "now"}):
            await api.messages.create(**ask, tool_choice=choice)
            assert engine.submitted[-1][1].structured_outputs is not None
        for thinking, enabled in (({"type": "enabled", "budget_tokens": 99}, True), ({"type": "disabled"}, False)):
            await api.messages.create(**ask, thinking=thinking)
            assert chat_of(engine).chat_template_kwargs == {"enable_thinking": enabled}
        await api.messages.create(**ask, output_config={"effort": "high"})
        assert chat_of(engine).chat_template_kwargs == {"enable_thinking": True}
        for fields, says in (
            ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
            ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
            ({"tools": [{"name": "a", "input_schema": {"type": "x"}}]}, "tools[0].input_schema"),
            ({"tool_choice": {"type": "tool", "name": "other"}}, "tool_choice: 'other'"),
            ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ):
            reply = await site.post(MESSAGES, **ask | fields)
            assert reply.status == 400
            assert says in reply.json["error"]["message"]


async def test_messages_continue_the_assistants_last() -> None:
    engine = scripted("on.")
    async with clients(engine) as (_, api, _):
        await api.messages.create(
            model="fake", messages=[*USER, {"role": "assistant", "content": "It goes "}], max_tokens=40
        )
        chat = chat_of(engine)
        assert (chat.add_generation_prompt, chat.continue_final_message, chat.continued) == (False, True, "It goes ")
        with pytest.raises(anthropic.BadRequestError, match="no text to continue"):
            await api.messages.create(
                model="fake", messages=[*USER, {"role": "assistant", "content": ""}], max_tokens=4
            )


async def test_an_output_that_is_cut_in_a_call() -> None:
    cut = SCRIPT.index("Rom") + 3
    async with clients(scripted()) as (api, other, site):
        response = await api.responses.create(model="fake", input="x", tools=FUNCTIONS, max_output_tokens=cut)
        assert [(item.type, item.status) for item in response.output] == [
            ("reasoning", "completed"),
            ("message", "completed"),
            ("function_call", "incomplete"),
        ]
        assert response.output[-1].arguments == '{"city": "Rom'
        assert response.status == "incomplete"
        message = await other.messages.create(model="fake", messages=USER, tools=TOOLS, max_tokens=cut)
        assert message.stop_reason == "max_tokens"
        assert (message.content[-1].name, message.content[-1].input) == ("weather", {})
        events = events_of((await site.post(MESSAGES, messages=USER, tools=TOOLS, max_tokens=cut, stream=True)).body)
    pieces = [e["delta"]["partial_json"] for e in events if e.get("index") == 2 and e["type"] == "content_block_delta"]
    assert "".join(pieces) == '{"city": "Rom'


async def test_the_bundled_model_is_made_to_call() -> None:
    """The bundled model knows no tools: a grammar has it call one."""
    async with (
        AsyncEngine.from_pretrained(bundled_model(), progress=False) as engine,
        clients(engine) as (api, other, _),
    ):
        choices = {**SCHEMA, "properties": {"city": {"enum": ["Rome"]}}, "additionalProperties": False}
        tools: Any = [{"type": "function", "name": "weather", "parameters": choices, "strict": True}]
        parsed = await api.responses.parse(
            model="fake", input="x", tools=tools, tool_choice="required", max_output_tokens=200
        )
        assert parsed.output[0].parsed_arguments == {"city": "Rome"}
        forced: Any = {"type": "tool", "name": "weather"}
        enum: Any = [{"name": "weather", "input_schema": choices}]
        async with other.messages.stream(
            model="fake", messages=USER, tools=enum, tool_choice=forced, max_tokens=100
        ) as stream:
            message = await stream.get_final_message()
        assert message.content[0].input == {"city": "Rome"}
        assert message.stop_reason == "tool_use"
        wrong: Any = [{"name": "weather", "input_schema": {"type": "object", "properties": {"a": {"$ref": "#/b"}}}}]
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.input_schema"):
            await other.messages.create(model="fake", messages=USER, tools=wrong, tool_choice=forced, max_tokens=9)
        continued = await other.messages.create(
            model="fake", messages=[*USER, {"role": "assistant", "content": "Once upon a"}], max_tokens=3
        )
        assert continued.content[0].text.startswith(" ")
        counted = await other.messages.count_tokens(model="fake", messages=USER, tools=TOOLS)
        assert counted.input_tokens > (await other.messages.count_tokens(model="fake", messages=USER)).input_tokens
