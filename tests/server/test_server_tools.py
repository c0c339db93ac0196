"""Tools and reasoning over HTTP: scripted outputs in each format, read by the openai package."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pydantic
import pytest

from asyncengine.api.conversation import Conversation
from asyncengine.errors import ConfigError
from asyncengine.server.config import ServerConfig
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, USER, Site, serving

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What the weather is.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
SEP, CALL, CALL_END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ARGUMENTS = '{"city": "Rom 😀"}'
#: The mark of the format in a template, text, content, reasoning
BOTH = f'[{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "now", "arguments": {{}}}}]'
SCRIPTS = [
    ("{{ tools }}<tool_call><think></think>",
     "<think>\nHm.\n</think>\n\nLet me see.\n"
     f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
     '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "Let me see.", "Hm."),
    ("{{ tools }}<|python_tag|>",
     f'{{"name": "weather", "parameters": {ARGUMENTS}}}; {{"name": "now", "parameters": {{}}}}', None, None),
    ("{{ tools }}<|python_start|>", '[weather(city="Rom 😀"), now()]', None, None),
    ("{{ tools }}[TOOL_CALLS]", f"[TOOL_CALLS] {BOTH}", None, None),
    ("{{ tools }}[TOOL_CALLS][ARGS][THINK][/THINK]",
     f"[THINK]Hm.[/THINK]Let me see.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}",
     "Let me see.", "Hm."),
    (f"{{{{ tools }}}}{CALL}",
     f"Let me see.{CALLS}{CALL}function{SEP}weather\n```json\n{ARGUMENTS}\n```{CALL_END}\n"
     f"{CALL}function{SEP}now\n```json\n{{}}\n```{CALL_END}{CALLS_END}", "Let me see.", None),
    ("{{ tools }}<|channel|><|message|>",
     f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
     f"<|constrain|>json<|message|>{ARGUMENTS}<|call|><|start|>assistant<|channel|>commentary to=functions.now"
     "<|message|>{}<|call|>", None, "Hm."),
    ("{{ messages }}", BOTH, None, None),
]  # fmt: skip
IDS = ["hermes", "llama3", "pythonic", "mistral", "mistral-new", "deepseek", "harmony", "json"]


@asynccontextmanager
async def client(engine: FakeEngine, **config: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, Site]]:
    async with (
        serving(engine, **config) as site,
        openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as api,
    ):
        yield api, site


def calls_of(message: Any) -> list[tuple[str, Any]]:
    assert all(call.id.startswith("call_") and call.type == "function" for call in message.tool_calls)
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("template", "text", "content", "reasoning"), SCRIPTS, ids=IDS)
async def test_calls(template: str, text: str, content: str | None, reasoning: str | None) -> None:
    engine = FakeEngine(text, ends=True, max_model_len=4096, chat_template=template)
    wanted = [("weather", {"city": "Rom 😀"}), ("now", {})]
    async with client(engine) as (api, site):
        answer = await api.chat.completions.create(model="fake", messages=USER, tools=TOOLS)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == content
        assert getattr(choice.message, "reasoning_content", None) == reasoning
        assert getattr(choice.message, "reasoning", None) == reasoning
        assert calls_of(choice.message) == wanted
        async with api.chat.completions.stream(model="fake", messages=USER, tools=TOOLS) as stream:
            async for _ in stream:
                pass
            final = (await stream.get_final_completion()).choices[0]
        assert final.finish_reason == "tool_calls"
        assert (final.message.content or None) == content
        assert calls_of(final.message) == wanted
        events = await site.events(CHAT, messages=USER, tools=TOOLS)
        deltas = [event["choices"][0]["delta"] for event in events]
        for name in ("reasoning_content", "reasoning"):
            assert "".join(d.get(name, "") for d in deltas) == (reasoning or "")
        first = [d["tool_calls"][0] for d in deltas if "tool_calls" in d and "id" in d["tool_calls"][0]]
        assert [(c["index"], c["function"]["name"]) for c in first] == [(0, "weather"), (1, "now")]
        assert [e["choices"][0]["finish_reason"] for e in events if e["choices"][0]["finish_reason"]] == ["tool_calls"]
        one = await site.post(CHAT, messages=USER, tools=TOOLS, parallel_tool_calls=False)
        assert [c["function"]["name"] for c in one.json["choices"][0]["message"]["tool_calls"]] == ["weather"]


class Weather(pydantic.BaseModel):
    city: str


async def test_the_synchronous_client_and_its_parsers() -> None:
    template, text, *_ = SCRIPTS[0]
    text = text.partition("</tool_call>")[0] + "</tool_call>"
    engine = FakeEngine(text, ends=True, max_model_len=4096, chat_template=template)
    tools: Any = [openai.pydantic_function_tool(Weather, name="weather")]

    def talk(url: str) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
            messages: Any = USER
            with api.chat.completions.stream(model="fake", messages=messages, tools=tools) as stream:
                kinds = [event.type for event in stream]
                choices = [stream.get_final_completion().choices[0]]
            assert "tool_calls.function.arguments.done" in kinds
            choices.append(api.chat.completions.parse(model="fake", messages=messages, tools=tools).choices[0])
            for choice in choices:
                assert choice.finish_reason == "tool_calls"
                assert choice.message.tool_calls
                assert choice.message.tool_calls[0].function.parsed_arguments == Weather(city="Rom 😀")

    async with serving(engine) as site:
        await asyncio.to_thread(talk, site.url)


async def test_without_tools_markers_are_text() -> None:
    template, text, *_ = SCRIPTS[1]
    engine = FakeEngine(text, ends=True, max_model_len=4096, chat_template=template)
    async with client(engine) as (_, site):
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
            reply = await site.post(CHAT, messages=USER, **fields)
            told = {name: value for name, value in reply.json["choices"][0]["message"].items() if value is not None}
            assert told == {"role": "assistant", "content": text}
            assert reply.json["choices"][0]["finish_reason"] == "stop"
        assert all(isinstance(prompt, list) for prompt in engine.prompts)


async def test_reasoning() -> None:
    text = "<think>\nLong\n\nthought\n</think>\n\nAnswer."
    engine = FakeEngine(text, ends=True, chat_template="<think></think>")
    async with client(engine) as (api, site):
        answer = (await site.post(CHAT, messages=USER)).json["choices"][0]
        assert answer["message"]["content"] == "Answer."
        assert answer["message"]["reasoning_content"] == "Long\n\nthought"
        assert answer["finish_reason"] == "stop"
        stream = await api.chat.completions.create(model="fake", messages=USER, stream=True, logprobs=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        assert "".join(c.delta.content or "" for c in chunks) == "Answer."
        assert "".join(getattr(c.delta, "reasoning_content", None) or "" for c in chunks) == "Long\n\nthought"
        tokens = [t for c in chunks if c.logprobs for t in c.logprobs.content or []]
        assert "".join(t.token for t in tokens).startswith(text)
        inside = await site.post(CHAT, messages=[{"role": "user", "content": "x<think>"}], max_tokens=9)
        assert inside.json["choices"][0]["message"]["reasoning_content"] == "<think>\nL"
    async with client(engine, reasoning_parser="none") as (_, site):
        assert (await site.post(CHAT, messages=USER)).json["choices"][0]["message"]["content"] == text
    async with client(FakeEngine(text, ends=True), reasoning_parser="qwen3") as (_, site):
        assert (await site.post(CHAT, messages=USER)).json["choices"][0]["message"]["content"] == "Answer."


async def test_what_the_template_gets() -> None:
    engine = FakeEngine("x", ends=True, max_model_len=4096, chat_template="{{ tools }}<tool_call>developer")
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "Weather?", "name": "Ann"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}},
            {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "{oops"}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sun"},
        {"role": "narrator", "content": "Rain"},
    ]  # fmt: skip
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rom 😀"}}},
        {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "{oops"}},
    ]
    wanted = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": "Weather?", "name": "Ann"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "Sun"},
        {"role": "narrator", "content": "Rain"},
    ]
    async with client(engine, trust_request_chat_template=True) as (_, site):

        async def prompt(**fields: Any) -> Conversation:
            reply = await site.post(CHAT, **{"messages": messages} | fields)
            assert reply.status == 200, reply.body
            made = engine.prompts[-1]
            return made if isinstance(made, Conversation) else Conversation(messages=made)

        made = await prompt(tools=TOOLS)
        assert made.messages == wanted
        described = NOW["function"] | {"parameters": {"type": "object", "properties": {}}}
        assert made.tools == [WEATHER, {"type": "function", "function": described}]
        assert not (await prompt(tools=TOOLS, tool_choice="none")).tools
        made = await prompt(documents=[{"text": "d"}], chat_template_kwargs={"enable_thinking": False})
        assert (made.documents, made.chat_template_kwargs) == ([{"text": "d"}], {"enable_thinking": False})
        assert (await prompt(add_generation_prompt=False)).add_generation_prompt is False
        made = await prompt(continue_final_message=True)
        assert (made.continue_final_message, made.add_generation_prompt) == (True, False)
        made = await prompt(chat_template="{{ messages }}", reasoning_effort="none")
        assert made.chat_template == "{{ messages }}"
        assert made.messages[0] == {"role": "system", "content": "Be brief"}
        made = await prompt(chat_template="reasoning_effort", reasoning_effort="high")
        assert made.chat_template_kwargs == {"reasoning_effort": "high"}


async def test_templates_with_ways_of_their_own() -> None:
    call = {"id": "call_1234567", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [
        *USER,
        {"role": "assistant", "tool_calls": [call], "reasoning": "Hm"},
        {"role": "tool", "tool_call_id": "call_1234567", "content": "1"},
    ]

    async def second(template: str) -> tuple[dict[str, Any], dict[str, Any]]:
        engine = FakeEngine("x", ends=True, chat_template=template)
        async with client(engine) as (_, site):
            assert (await site.post(CHAT, messages=messages)).status == 200
        made: Any = engine.prompts[0]
        return made[1], made[2]

    assistant, tool = await second("{{ tools }}[TOOL_CALLS]")
    assert len(assistant["tool_calls"][0]["id"]) == 9
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"]
    assistant, _ = await second("{{ tools + '```json' + tool['function']['arguments'] + '```' }}")
    assert assistant["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assistant, _ = await second("{% if message['content'] is none %}")
    assert assistant["content"] is None
    assistant, _ = await second("{{ tools }}<|channel|><|message|>")
    assert assistant["thinking"] == assistant["reasoning_content"] == "Hm"
    messages[1]["content"] = "So"
    assert "thinking" not in (await second("{{ tools }}<|channel|><|message|>"))[0]


async def test_a_template_without_tools_gets_them_listed() -> None:
    """A template without tools gets them listed where it is rendered, with a form of calls. A model with calls of its
    own gets them listed here, without a form."""
    engine = FakeEngine("x", ends=True, max_model_len=4096)
    async with client(engine) as (_, site):
        await site.post(CHAT, messages=USER, tools=TOOLS)
    plain: Any = engine.prompts[0]
    assert (plain.messages, [tool["function"]["name"] for tool in plain.tools]) == (USER, ["weather", "now"])
    deepseek = FakeEngine(SCRIPTS[5][1], ends=True, max_model_len=4096, chat_template=f"{CALL}")
    async with client(deepseek) as (_, site):  # it has calls, and no tools
        reply = await site.post(CHAT, messages=USER, tools=TOOLS)
        assert len(reply.json["choices"][0]["message"]["tool_calls"]) == 2
        await site.post(CHAT, messages=[{"role": "system", "content": "S"}, *USER], tools=TOOLS)
    first: Any = deepseek.prompts[0]
    second: Any = deepseek.prompts[1]
    assert first[0]["role"] == second[0]["role"] == "system"
    assert '"name": "weather"' in first[0]["content"]
    assert second[0]["content"] == "S\n\n" + first[0]["content"]
    assert first[1:] == second[1:] == USER


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | fields}


F, P = "tools[0].function", "tools[0].function.parameters"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, F),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [function(name="")]}, f"{F}.name"),
    ({"tools": [function(name="a b")]}, f"{F}.name"),
    ({"tools": [{"type": "function", "function": {}}]}, f"{F}.name"),
    ({"tools": [NOW, NOW]}, "tools[1].function.name"),
    ({"tools": [function(parameters={"type": "string"})]}, P),
    ({"tools": [function(parameters={"type": {}})]}, P),
    ({"tools": [function(parameters={"properties": []})]}, P),
    ({"tools": [function(parameters={"properties": {"a": {"type": "strin"}}})]}, P),
    ({"tools": [function(parameters={"properties": {"a": 5}})]}, P),
    ({"tools": [function(parameters={"properties": {"a": {"items": {"required": "x"}}}})]}, P),
    ({"tools": [function(parameters={"anyOf": {}})]}, P),
    ({"tools": [function(parameters={"enum": 1})]}, P),
    ({"tools": [function(parameters=[])]}, P),
    ({"tools": [function(parameters={"properties": {str(i): {} for i in range(30_000)}})]}, P),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ({"tools": TOOLS, "guided_regex": "a"}, "tools"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"documents": ["x"]}, "documents[0]"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]},
     "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "x", "function": {"name": "f"}}]}]},
     "messages[0].tool_calls[0].type"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0].function"),
]  # fmt: skip


async def test_what_is_wrong_is_named() -> None:
    engine = FakeEngine(max_model_len=4096)
    async with client(engine) as (_, site):
        for fields, param in WRONG:
            for stream in (False, True):
                reply = await site.post(CHAT, stream=stream, **{"messages": USER} | fields)
                assert (reply.status, reply.error["param"]) == (400, param), (fields, reply.body)
        error = (await site.post(CHAT, messages=USER, chat_template="x")).error
        assert "--trust-request-chat-template" in error["message"]
    assert engine.submitted == []
    unknown = FakeEngine("x", ends=True, max_model_len=4096, chat_template="{{ tools }}<tool_call><function=")
    async with client(unknown) as (_, site):
        error = (await site.post(CHAT, messages=USER, tools=TOOLS)).error
        assert (error["param"], "--tool-call-parser" in error["message"]) == ("tools", True)
    async with client(unknown, tool_call_parser="hermes") as (_, site):
        assert (await site.post(CHAT, messages=USER, tools=TOOLS)).status == 200


def test_names_of_parsers_are_checked() -> None:
    with pytest.raises(ConfigError, match="tool_call_parser must be one of hermes, json, llama3_json"):
        ServerConfig(tool_call_parser="nothing")
    with pytest.raises(ConfigError, match="reasoning_parser must be one of think, cohere, mistral, harmony, none"):
        ServerConfig(reasoning_parser="nothing")
    assert ServerConfig(reasoning_parser="deepseek_r1").reasoning_parser == "think"
