"""best_of, functions, echo of chats and stop_reason: what older clients and clients of vLLM ask for and read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import openai
import pytest
from fake_engine import FakeEngine, ModelInfo
from harness import CHAT, COMPLETIONS, USER, Site, serving

from asyncengine import AsyncEngine, bundled_model
from asyncengine.conversation import Conversation
from asyncengine.server.model_cards import model_cards

TEMPLATE = "{{ tools }}<tool_call><think></think>"
WEATHER = {
    "name": "weather",
    "description": "What the weather is.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ARGUMENTS = '{"city": "Rom"}'
SAID = f'Hm.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.fixture(scope="module")
def asked() -> dict[str, Any]:
    return {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.5, "seed": 3}


@asynccontextmanager
async def bundled(**config: Any) -> AsyncIterator[Site]:
    async with (
        AsyncEngine.from_pretrained(bundled_model(), progress=False) as engine,
        serving(cast(FakeEngine, engine), **config) as site,
    ):
        yield site


# ---- best_of ----


def mean(choice: dict[str, Any]) -> float:
    told = choice["logprobs"]["token_logprobs"]
    return sum(told) / len(told)


async def test_the_best_of_several_are_those_with_the_highest_mean_log_probability(asked: dict[str, Any]) -> None:
    async with bundled() as site:
        every = (await site.post(COMPLETIONS, **asked, n=6, logprobs=0)).json["choices"]
        wanted = [choice["text"] for choice in sorted(every, key=mean, reverse=True)]
        assert len(set(wanted)) == 6
        for n in (1, 2, 6):
            whole = (await site.post(COMPLETIONS, **asked, n=n, best_of=6)).json
            told = [choice["text"] for choice in whole["choices"]]
            assert [choice["index"] for choice in whole["choices"]] == list(range(n))
            assert told == (wanted[:n] if n < 6 else [choice["text"] for choice in every])
            assert all(choice["logprobs"] is None for choice in whole["choices"])
            assert whole["usage"]["completion_tokens"] == 72
        (choice,) = (await site.post(COMPLETIONS, **asked, best_of=6, logprobs=2, echo=True)).json["choices"]
        assert choice["text"] == asked["prompt"] + wanted[0]
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        (choice,) = (await site.post(COMPLETIONS, **asked, best_of=6, return_token_ids=True)).json["choices"]
        assert len(choice["token_ids"]) == 12


async def test_each_prompt_has_its_best(asked: dict[str, Any]) -> None:
    async with bundled() as site:
        prompts = ["Once upon a time", "The fox"]
        whole = (await site.post(COMPLETIONS, **asked | {"prompt": prompts}, n=2, best_of=4, echo=True)).json
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        for i, choice in enumerate(whole["choices"]):
            assert choice["text"].startswith(prompts[i // 2])
        events = await site.events(COMPLETIONS, **asked, n=2, best_of=2)
        assert {event["choices"][0]["index"] for event in events} == {0, 1}


async def test_sequences_that_end_early_are_compared_by_their_means() -> None:
    async with bundled() as site:
        fields: dict[str, Any] = {"prompt": "x", "seed": 1, "max_tokens": 30, "stop": ["e", "."]}
        every = (await site.post(COMPLETIONS, **fields, n=8, logprobs=0, include_stop_str_in_output=True)).json
        assert len({len(choice["logprobs"]["tokens"]) for choice in every["choices"]}) > 1
        best = max(every["choices"], key=mean)
        (choice,) = (
            await site.post(COMPLETIONS, **fields, best_of=8, logprobs=0, include_stop_str_in_output=True)
        ).json["choices"]
        assert choice["text"] == best["text"]


async def test_best_of_counts_for_the_limit_of_sequences() -> None:
    engine = FakeEngine()
    async with serving(engine, max_sequences_per_request=8) as site:
        assert (await site.post(COMPLETIONS, prompt=["x", "y"], best_of=4)).status == 200
        reply = await site.post(COMPLETIONS, prompt=["x", "y"], best_of=5)
        assert (reply.status, reply.error["param"]) == (400, "best_of")
        assert "10 sequences" in reply.error["message"]


# ---- functions ----


async def test_functions_are_tools_under_an_older_name() -> None:
    engine = FakeEngine(SAID, ends=True, max_model_len=4096, chat_template=TEMPLATE)
    async with (
        serving(engine) as site,
        openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as api,
    ):
        fields: Any = {"model": "m", "messages": USER, "functions": [WEATHER], "max_tokens": 500}
        whole = await api.chat.completions.create(**fields)
        (choice,) = whole.choices
        assert choice.finish_reason == "function_call"
        assert choice.message.content == "Hm."
        assert choice.message.function_call is not None
        assert (choice.message.function_call.name, choice.message.function_call.arguments) == ("weather", ARGUMENTS)
        assert choice.message.tool_calls is None
        called = {"name": "", "arguments": ""}
        text, reasons = "", []
        async for chunk in await api.chat.completions.create(**fields, stream=True):
            delta = chunk.choices[0].delta
            assert delta.tool_calls is None
            text += delta.content or ""
            if delta.function_call is not None:
                called["name"] += delta.function_call.name or ""
                called["arguments"] += delta.function_call.arguments or ""
            reasons.append(chunk.choices[0].finish_reason)
        assert (text, called) == ("Hm.", {"name": "weather", "arguments": ARGUMENTS})
        assert [reason for reason in reasons if reason] == ["function_call"]
        prompt = engine.prompts[-1]
        assert isinstance(prompt, Conversation)
        assert prompt.tools == [{"type": "function", "function": WEATHER}]
        for choice_of in ("none", None):
            whole = await api.chat.completions.create(**fields | {"function_call": choice_of})
            assert (whole.choices[0].finish_reason == "function_call") == (choice_of is None)
        tools = await api.chat.completions.create(
            model="m", messages=cast(Any, USER), tools=cast(Any, [{"type": "function", "function": WEATHER}])
        )
        assert tools.choices[0].finish_reason == "tool_calls"
        assert tools.choices[0].message.function_call is None


async def test_an_output_has_one_function_call() -> None:
    twice = SAID + f'\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
    async with serving(FakeEngine(twice, ends=True, max_model_len=4096, chat_template=TEMPLATE)) as site:
        fields = {"messages": USER, "functions": [WEATHER]}
        (choice,) = (await site.post(CHAT, **fields)).json["choices"]
        assert choice["message"]["function_call"] == {"name": "weather", "arguments": ARGUMENTS}
        events = await site.events(CHAT, **fields)
        named = [c for e in events for c in e["choices"] if "name" in c["delta"].get("function_call", {})]
        assert len(named) == 1


async def test_a_function_that_must_be_called_is() -> None:
    async with bundled() as site:
        look = {"name": "look", "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}}}
        look["parameters"]["required"] = ["n"]  # type: ignore[index]
        fields = {"messages": USER, "functions": [look], "function_call": {"name": "look"}, "max_tokens": 60}
        (choice,) = (await site.post(CHAT, **fields)).json["choices"]
        call = choice["message"]["function_call"]
        assert (choice["finish_reason"], choice["message"]["content"], call["name"]) == ("function_call", None, "look")
        assert json.loads(call["arguments"])["n"] in (1, 2)
        events = await site.events(CHAT, **fields)
        pieces = [c["delta"]["function_call"] for e in events for c in e["choices"] if "function_call" in c["delta"]]
        assert pieces[0]["name"] == "look"
        assert json.loads("".join(piece["arguments"] for piece in pieces))["n"] in (1, 2)
        wrong = {
            "name": "look",
            "parameters": {"type": "object", "properties": {"a": {"pattern": "(", "type": "string"}}},
        }
        reply = await site.post(CHAT, **fields | {"functions": [wrong]})
        assert (reply.status, reply.error["param"]) == (400, "functions[0].parameters")
        assert "tool" not in reply.error["message"]


async def test_calls_and_results_in_the_older_form_are_those_of_tools() -> None:
    engine = FakeEngine(max_model_len=4096, chat_template=TEMPLATE)
    called = {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": ARGUMENTS}}
    result = {"role": "function", "name": "weather", "content": "22 degrees"}
    unasked = {"role": "function", "name": "clock", "content": None}
    async with serving(engine) as site:
        messages = [*USER, called, result, called, result, unasked]
        assert (await site.post(CHAT, messages=messages, functions=[WEATHER], max_tokens=1)).status == 200
        prompt: Any = engine.prompts[-1]
        function = {"name": "weather", "arguments": {"city": "Rom"}}
        for i, call_id in ((1, "call_1"), (3, "call_3")):
            call, told = prompt.messages[i : i + 2]
            assert call["tool_calls"] == [{"id": call_id, "type": "function", "function": function}]
            assert (told["role"], told["tool_call_id"], told["name"]) == ("tool", call_id, "weather")
            assert told["content"] == "22 degrees"
        assert prompt.messages[5] == {"role": "tool", "name": "clock", "content": ""}
    async with bundled() as site:
        short = [{"role": "user", "content": "x"}, called, result]
        assert (await site.post(CHAT, messages=short, max_tokens=1)).status == 200


# ---- echo ----


@pytest.mark.parametrize("details", [{}, {"return_token_ids": True}, {"logprobs": True}])
@pytest.mark.parametrize("template", ["{{ messages }}", TEMPLATE])
async def test_a_chat_echoes_what_it_continues(template: str, details: dict[str, Any]) -> None:
    parts = [{"type": "text", "text": "Once "}, {"type": "text", "text": "there"}]
    said = [*USER, {"role": "assistant", "content": parts}]
    async with serving(FakeEngine("abc", chat_template=template)) as site:
        for fields, wanted in (
            ({"messages": said}, "Once there"),
            ({"messages": said, "continue_final_message": True}, "Once there"),
            ({"messages": USER, "continue_final_message": True}, USER[0]["content"]),
            ({"messages": USER}, ""),
            ({"messages": said, "echo": False}, ""),
        ):
            body = {"echo": True, "max_tokens": 4, "n": 2, **details, **fields}
            whole = (await site.post(CHAT, **body)).json["choices"]
            assert [choice["message"]["content"] for choice in whole] == [wanted + "abca", wanted + "bcab"]
            events = await site.events(CHAT, **body)
            for index, text in ((0, "abca"), (1, "bcab")):
                deltas = [c["delta"] for e in events for c in e["choices"] if c["index"] == index]
                assert deltas[0] == {"role": "assistant", "content": ""}
                assert "".join(delta.get("content", "") for delta in deltas) == wanted + text


async def test_an_echo_stands_before_a_call() -> None:
    async with serving(FakeEngine(SAID, ends=True, max_model_len=4096, chat_template=TEMPLATE)) as site:
        messages = [*USER, {"role": "assistant", "content": "Well. "}]
        fields = {"messages": messages, "echo": True, "tools": [{"type": "function", "function": WEATHER}]}
        message = (await site.post(CHAT, **fields)).json["choices"][0]["message"]
        assert message["content"] == "Well. Hm."
        assert len(message["tool_calls"]) == 1


# ---- stop_reason ----


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
async def test_a_choice_says_what_stopped_it(route: str) -> None:
    async with bundled() as site:
        fields: dict[str, Any] = {"max_tokens": 20, "temperature": 0}
        fields |= {"prompt": "Once upon a time"} if route == COMPLETIONS else {"messages": USER}
        first = (await site.post(route, **fields, return_token_ids=True)).json["choices"][0]
        assert (first["finish_reason"], first["stop_reason"]) == ("length", None)
        text = first["text"] if route == COMPLETIONS else first["message"]["content"]
        token = first["token_ids"][5]
        end = 1
        for more, wanted in (
            ({"stop": [text[6:12], "no such text"]}, text[6:12]),
            ({"stop_token_ids": [token]}, token),
            ({"logit_bias": {str(end): 100}}, None),
        ):
            for details in ({}, {"logprobs": 1 if route == COMPLETIONS else True}):
                (choice,) = (await site.post(route, **fields, **more, **details)).json["choices"]
                assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", wanted)
                chunks = [e["choices"][0] for e in await site.events(route, **fields, **more, **details)]
                assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == ("stop", wanted)
                assert not any("stop_reason" in chunk for chunk in chunks[:-1])


async def test_stop_reasons_of_parsed_chats_and_of_messages() -> None:
    async with serving(FakeEngine(SAID, ends=True, max_model_len=4096, chat_template=TEMPLATE)) as site:
        events = await site.events(CHAT, messages=USER, tools=[{"type": "function", "function": WEATHER}])
        last = events[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"], last["delta"]) == ("tool_calls", None, {})
    async with bundled() as site:
        fields: dict[str, Any] = {"messages": USER, "max_tokens": 30, "temperature": 0}
        text = (await site.post("/v1/messages", **fields)).json["content"][0]["text"]
        whole = (await site.post("/v1/messages", **fields, stop_sequences=[text[8:12]])).json
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", text[8:12])
        whole = (await site.post("/v1/messages", **fields, stop_token_ids=list(range(1024)))).json
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)


# ---- cards of models ----


@pytest.mark.parametrize(
    ("name", "root"), [("org/name", "org/name"), ("/srv/models/fox", "fox"), ("../fox", "fox"), ("name", "name")]
)
def test_the_root_of_a_model_is_its_name_and_no_path(name: str, root: str) -> None:
    one, two = model_cards(ModelInfo(name=name), ["a", "b"], 86400)
    assert (one.id, one.root, one.parent, two.id, two.root) == ("a", root, None, "b", root)
    assert (one.created_at, one.permission[0].created) == ("1970-01-02T00:00:00Z", 86400)
