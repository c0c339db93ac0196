"""Fields that agents and their libraries send: served, passed over where that changes nothing, or refused by name."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from fake_engine import FakeEngine
from harness import CHAT, COMPLETIONS, USER, serving

from asyncengine.conversation import Conversation
from asyncengine.server import unserved

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
TEMPLATE = "{{ tools }}<tool_call><think></think>{{ verbosity }}"
THOUGHT = "<think>\nHm.\n</think>\n\nYes."
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
LOOK = {"name": "look", "input_schema": {"type": "object", "properties": {}}}

VALID: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": USER},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": USER, "max_tokens": 50},
}
_OPENAI: dict[str, Any] = {
    "user": "me", "safety_identifier": "me", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
    "metadata": {"a": "b"}, "service_tier": "priority", "extra_headers": {"a": "b"},
}  # fmt: skip
#: Fields of which an answer may as well know nothing.
PASSED_OVER: dict[str, dict[str, Any]] = {
    COMPLETIONS: _OPENAI,
    CHAT: _OPENAI | {
        "store": True, "modalities": ["text"], "prediction": {"type": "content", "content": "Once."},
        "num_retries": 3, "drop_params": True,
    },
    RESPONSES: _OPENAI | {"store": False, "max_tool_calls": 3, "client_metadata": {"a": "b"}},
    MESSAGES: {
        "metadata": {"user_id": "me"}, "service_tier": "standard_only", "speed": "fast", "inference_geo": "us",
        "betas": ["fine-grained-tool-streaming-2025-05-14"], "user_profile_id": "p", "workspace_id": "w",
        "billing_policy": {"type": "billing_policy", "bill_to": "self"}, "fallback_credit_token": "t",
        "diagnostics": {"previous_message_id": None}, "container": None, "mcp_servers": [], **CACHED,
        "thinking": {"type": "adaptive", "display": "summarized", "block_binding": {}},
        "output_config": {"effort": "xhigh"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    },
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    CHAT: {
        "modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}, "web_search_options": {},
        "reasoning": {"effort": "high"}, "thinking": {"type": "enabled"}, "enable_thinking": False,
    },
    RESPONSES: {"background": True, "conversation": "c", "prompt": {"id": "p"}},
    MESSAGES: {
        "container": "c", "mcp_servers": [{"type": "url", "url": "x", "name": "y"}], "fallbacks": [{"model": "m"}],
        "compaction": {"type": "compaction"},
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    },
}  # fmt: skip


@pytest.mark.parametrize("route", PASSED_OVER)
async def test_fields_that_change_no_output_are_passed_over(route: str) -> None:
    engine = FakeEngine(max_model_len=4096)
    headers = {"anthropic-beta": "context-management-2025-06-27,interleaved-thinking-2025-05-14"}
    async with serving(engine) as site:
        for field, value in PASSED_OVER[route].items():
            body = VALID[route] | {field: value}
            reply = await site.request("POST", f"{route}?beta=true", json=body, headers=headers)
            assert reply.status == 200, (field, reply.body)
        assert (await site.post(route, **VALID[route], **PASSED_OVER[route])).status == 200
        params = [each[1] for each in engine.submitted]
        assert all(each == params[0] for each in params)
        assert all(prompt == engine.prompts[0] for prompt in engine.prompts)


@pytest.mark.parametrize("route", REFUSED)
async def test_fields_that_would_change_an_output_are_refused_by_name(route: str) -> None:
    async with serving(FakeEngine(max_model_len=4096)) as site:
        for field, value in REFUSED[route].items():
            reply = await site.post(route, **VALID[route], **{field: value})
            assert reply.status == 400, field
            assert field in reply.json["error"]["message"]
            assert "not supported" in reply.json["error"]["message"]


async def test_cache_control_may_stand_anywhere() -> None:
    engine = FakeEngine(max_model_len=4096, chat_template=TEMPLATE)
    text = {"type": "text", "text": "Look.", **CACHED}
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {}, **CACHED}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "A fox.", **CACHED}]}
    messages = [
        {"role": "user", "content": [text]},
        {"role": "assistant", "content": [text, use]},
        {"role": "user", "content": [result | CACHED, text]},
    ]
    bare = json.loads(json.dumps(messages).replace(f", {json.dumps(CACHED)[1:-1]}", ""))
    assert "cache_control" not in json.dumps(bare)
    async with serving(engine) as site:
        for some, system, tools in (
            (messages, [text], [{**LOOK, **CACHED, "defer_loading": False, "eager_input_streaming": True}]),
            (bare, "Look.", [LOOK]),
        ):
            fields: dict[str, Any] = {"messages": some, "system": system, "tools": tools}
            assert (await site.post(MESSAGES, **fields, max_tokens=1)).status == 200
            assert (await site.post(COUNT, **fields)).status == 200
        assert engine.prompts[0] == engine.prompts[1]
        part = {"role": "user", "content": [{"type": "text", "text": USER[0]["content"], **CACHED}], **CACHED}
        assert (await site.post(CHAT, messages=[part], max_tokens=1)).status == 200
        assert engine.prompts[2] == USER


async def test_thinking_may_be_left_out_of_messages() -> None:
    async with serving(FakeEngine(THOUGHT, ends=True, max_model_len=4096, chat_template=TEMPLATE)) as site:
        for display, wanted in (("omitted", ""), ("summarized", "Hm."), (None, "Hm.")):
            thinking = {"type": "adaptive", "display": display}
            whole = (await site.post(MESSAGES, **VALID[MESSAGES], thinking=thinking)).json
            assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
            assert (whole["content"][0]["thinking"], whole["content"][1]["text"]) == (wanted, "Yes.")
            stream = (await site.post(MESSAGES, **VALID[MESSAGES], thinking=thinking, stream=True)).body.decode()
            events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
            deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
            assert "".join(delta.get("thinking", "") for delta in deltas) == wanted
            assert "".join(delta.get("text", "") for delta in deltas) == "Yes."
            assert [event["type"] for event in events].count("content_block_start") == 2


async def test_blocks_that_only_their_own_server_can_read_are_passed_over() -> None:
    engine = FakeEngine(max_model_len=4096)
    sealed = [{"type": "redacted_thinking", "data": "x" * 100}, {"type": "fallback", "to": {"model": "m"}}]
    said = {"role": "assistant", "content": [*sealed, {"type": "text", "text": "Yes."}]}
    async with serving(engine) as site:
        assert (await site.post(MESSAGES, messages=[*USER, said, *USER], max_tokens=1)).status == 200
        prompt: Any = engine.prompts[-1]
        assert prompt == [*USER, {"role": "assistant", "content": "Yes."}, *USER]
        for content in (sealed, [{"type": "thinking", "thinking": ""}]):
            reply = await site.post(MESSAGES, messages=[{"role": "assistant", "content": content}], max_tokens=1)
            assert (reply.status, "no text" in reply.json["error"]["message"]) == (400, True)
        reply = await site.post(MESSAGES, messages=[{"role": "user", "content": sealed}], max_tokens=1)
        assert "redacted_thinking" in reply.json["error"]["message"]


async def test_forms_of_older_clients_and_budgets(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    form = {"type": "json_schema", "schema": SCHEMA}
    async with serving(engine) as site:
        for fields in ({"output_format": form}, {"output_config": {"format": form}}):
            assert (await site.post(MESSAGES, **VALID[MESSAGES], **fields)).status == 200
            asked = engine.submitted[-1][1].structured_outputs
            assert asked is not None
            assert json.loads(asked.source()) == SCHEMA  # type: ignore[union-attr]
        both = await site.post(MESSAGES, **VALID[MESSAGES], output_format=form, output_config={"format": form})
        assert (both.status, "output_format" in both.json["error"]["message"]) == (400, True)
        reply = await site.post(MESSAGES, **VALID[MESSAGES], output_format={"type": "json_schema", "schema": None})
        assert "output_format.schema" in reply.json["error"]["message"]
        unserved._passed_over.clear()
        with caplog.at_level(logging.INFO, logger="asyncengine.server"):
            for _ in range(2):
                budget = {"output_config": {"task_budget": {"type": "tokens", "total": 20000}}}
                assert (await site.post(MESSAGES, **VALID[MESSAGES], **budget)).status == 200
        assert len([each for each in caplog.messages if "task_budget" in each]) == 1


async def test_tools_with_examples_and_with_callers() -> None:
    engine = FakeEngine(max_model_len=4096, chat_template=TEMPLATE)
    async with serving(engine) as site:
        tool = LOOK | {"description": "To see.", "input_examples": [{"at": "é"}, {}], "allowed_callers": ["direct"]}
        assert (await site.post(MESSAGES, **VALID[MESSAGES], tools=[tool])).status == 200
        prompt = engine.prompts[-1]
        assert isinstance(prompt, Conversation)
        described = prompt.tools[0]["function"]["description"]
        assert described == 'To see.\n\nExamples of the input:\n{"at":"é"}\n{}'
        tool |= {"allowed_callers": ["code_execution_20250825"]}
        reply = await site.post(MESSAGES, **VALID[MESSAGES], tools=[LOOK | {"name": "a"}, tool])
        assert reply.status == 400
        assert "tools[1].allowed_callers" in reply.json["error"]["message"]


async def test_verbosity_and_refusals_of_chats() -> None:
    engine = FakeEngine(max_model_len=4096, chat_template=TEMPLATE)
    refused = {"role": "assistant", "content": None, "refusal": "I may not."}
    async with serving(engine) as site:
        messages = [*USER, refused, *USER]
        assert (await site.post(CHAT, messages=messages, verbosity="low", max_tokens=1)).status == 200
        prompt = engine.prompts[-1]
        assert isinstance(prompt, Conversation)
        assert prompt.chat_template_kwargs == {"verbosity": "low"}
        assert prompt.messages[1] == {"role": "assistant", "content": "I may not."}
    async with serving(FakeEngine()) as site:  # whose template does not know it
        assert (await site.post(CHAT, messages=USER, verbosity="high", max_tokens=1)).status == 200
