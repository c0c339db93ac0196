"""Agents over HTTP with chat templates that know no tools: each turn shows the model the calls and their results."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncengine import AsyncEngine, bundled_model
from tests.server.harness import CHAT, Site, serving

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ANY_ROLE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
TURNS = (
    "{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant'] or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must take turns') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
)
SKIPS = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] and m.content %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}<|assistant|>"
)
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "go", "parameters": SCHEMA}}]
ASKS = {"role": "user", "content": "Go."}


@asynccontextmanager
async def bundled(template: str | None, folder: Path) -> AsyncIterator[tuple[AsyncEngine, Site]]:
    file = folder / "template.jinja"
    file.write_text(template or "")
    async with (
        AsyncEngine.from_pretrained(
            bundled_model(), progress=False, chat_template=None if template is None else str(file)
        ) as engine,
        serving(engine) as site,  # type: ignore[arg-type]
    ):
        yield engine, site


async def shown(engine: AsyncEngine, site: Site, **body: Any) -> str:
    """The prompt of a chat completion."""
    reply = await site.post(CHAT, max_tokens=1, return_token_ids=True, **body)
    assert reply.status == 200, reply.body
    return engine.tokenizer.decode(reply.json["prompt_token_ids"], skip_special_tokens=False)


@pytest.mark.parametrize("template", [ANY_ROLE, TURNS, SKIPS], ids=["any role", "turns", "skips"])
async def test_results_reach_the_model_in_every_api(template: str, tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "go", "arguments": '{"n": 2}'}}
    chat = [
        {"role": "system", "content": "Be quick."}, ASKS, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "You are there."},
    ]  # fmt: skip
    items = [
        ASKS, {"type": "function_call", "call_id": "c1", "name": "go", "arguments": '{"n": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "You are there."},
    ]  # fmt: skip
    use = {"type": "tool_use", "id": "c1", "name": "go", "input": {"n": 2}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "You are there."}
    blocks = [ASKS, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    async with bundled(template, tmp_path) as (engine, site):
        text = await shown(engine, site, messages=chat, tools=TOOLS)
        called = '<|assistant|>{"name": "go", "arguments": {"n": 2}}<|end|>'
        assert text.endswith(f"{called}<|user|>Result of go: You are there.<|end|><|assistant|>")
        begin = "<|user|>" if template == TURNS else "<|system|>"
        assert text.startswith(f'{begin}Be quick.\n\nYou can call these functions:\n{{"name": "go", "parameters": ')
        assert '{"name": its name, "arguments": {its arguments}}' in text
        size = len(engine.tokenizer.encode(text, add_special_tokens=False))
        flat = [{"type": "function", **TOOLS[0]["function"]}]  # type: ignore[dict-item]
        reply = await site.post(RESPONSES, input=items, instructions="Be quick.", tools=flat, max_output_tokens=1)
        assert (reply.status, reply.json["usage"]["input_tokens"]) == (200, size), reply.body
        described = [{"name": "go", "input_schema": SCHEMA}]
        reply = await site.post(MESSAGES, messages=blocks, system="Be quick.", tools=described, max_tokens=1)
        usage = reply.json["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == size, reply.body
        # Also where the last turns of a loop may call nothing.
        assert "Result of go: You are there." in await shown(
            engine, site, messages=chat, tools=TOOLS, tool_choice="none"
        )


@pytest.mark.parametrize("template", [None, TURNS], ids=["bundled", "turns"])
async def test_the_bundled_model_goes_through_ten_turns(template: str | None, tmp_path: Path) -> None:
    """The context of the bundled model holds ten turns with the template that it has."""
    messages: list[dict[str, Any]] = [ASKS]
    turns = 10 if template is None else 4
    async with bundled(template, tmp_path) as (engine, site):
        for turn in range(turns):
            reply = await site.post(
                CHAT, messages=messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=1,
                seed=turn, max_tokens=40,
            )  # fmt: skip
            (choice,) = reply.json["choices"]
            (call,) = choice["message"]["tool_calls"]
            assert choice["finish_reason"] == "tool_calls"
            assert json.loads(call["function"]["arguments"])["n"] in (1, 2)
            result = {"role": "tool", "tool_call_id": call["id"], "content": f"place {turn}"}
            messages += [choice["message"], result]
        text = await shown(engine, site, messages=messages, tools=TOOLS)
        assert all(f"Result of go: place {turn}<|end|><|assistant|>" in text for turn in range(turns))
        reply = await site.post(CHAT, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=60)
        (choice,) = reply.json["choices"]
    assert choice["message"]["content"]
    assert "tool_calls" not in choice["message"]


async def test_the_bundled_template_has_calls_in_python(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    tools = [
        {"type": "function", "function": {"name": "weather", "description": "A forecast.", "parameters": schema}},
        {"type": "function", "function": {"name": "now"}},
    ]
    calls = [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "R\\"o", "days": 2}'}},
        {"id": "b", "type": "function", "function": {"name": "now", "arguments": ""}},
        {"id": "c", "type": "function", "function": {"name": "now", "arguments": "oops"}},
    ]
    messages = [
        {"role": "system", "content": "Be kind."}, ASKS,
        {"role": "assistant", "content": "Hm.", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": i, "content": f"<{i}>"} for i in "abc"), ASKS,
    ]  # fmt: skip
    async with bundled(None, tmp_path) as (engine, site):
        assert await shown(engine, site, messages=messages, tools=tools) == (
            "<|bos|><|system|>Be kind.\nCall tools as [func_name1(key=value), func_name2()]:\n"
            "weather(city, days): A forecast.\nnow()<|end|><|user|>Go.<|end|><|assistant|>Hm.\n"
            '[weather(city="R\\"o", days=2), now(), now(oops)]<|end|><|user|>Result of weather: <a><|end|>'
            "<|user|>Result of now: <b><|end|><|user|>Result of now: <c><|end|><|user|>Go.<|end|><|assistant|>"
        )
        named = {"type": "function", "function": {"name": "weather"}}
        reply = await site.post(CHAT, messages=[ASKS], tools=tools, tool_choice=named, max_tokens=200, temperature=0)
        (call,) = reply.json["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        free = await site.post(CHAT, messages=[ASKS], tools=tools, max_tokens=20)
        assert free.json["choices"][0]["message"]["content"]
