"""OpenAI's own client, in the version that the other clients bring."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from conftest import Server

openai = pytest.importorskip("openai")


def test_31_responses(server: Server) -> None:
    client = openai.OpenAI(base_url=server.v1, api_key=server.key)
    reply = client.responses.create(model=server.model, input="Tell me a story.", max_output_tokens=24)
    assert reply.output_text
    assert reply.usage.output_tokens == 24
    with client.responses.stream(model=server.model, input="Tell me a story.", max_output_tokens=24) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert "response.output_text.delta" in kinds


def test_45_responses_for_agents(roomy: Server) -> None:
    client = openai.OpenAI(base_url=roomy.v1, api_key=roomy.key)
    time: Any = {
        "type": "custom",
        "name": "time",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: N ":" N "\\n"?\nN: /[0-9]{2}/'},
    }
    look: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    tools: Any = [time, {"type": "namespace", "name": "eyes", "description": "To see.", "tools": [look]}]
    asked: dict[str, Any] = {"model": roomy.model, "tools": tools, "max_output_tokens": 200}
    first = client.responses.create(**asked, input="When?", tool_choice={"type": "custom", "name": "time"})
    (call,) = first.output
    assert (call.type, call.name) == ("custom_tool_call", "time")
    assert re.fullmatch(r"\d\d:\d\d\n?", call.input)
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "eyes__look"}]}
    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Now."}
    options: dict[str, Any] = {"previous_response_id": first.id, "parallel_tool_calls": False}
    with client.responses.stream(**asked, **options, input=[result], tool_choice=allowed) as stream:
        kinds = {event.type for event in stream}
        second = stream.get_final_response()
    assert "response.function_call_arguments.done" in kinds
    (call,) = second.output
    assert (call.namespace, call.name, json.loads(call.arguments)) == ("eyes", "look", {})
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in items] == ["message", "custom_tool_call", "custom_tool_call_output"]
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(second.id)


def test_45_responses_tell_log_probabilities_and_drop_old_turns(server: Server) -> None:
    client = openai.OpenAI(base_url=server.v1, api_key=server.key)
    asked: dict[str, Any] = {"model": server.model, "max_output_tokens": 12}
    reply = client.responses.create(
        **asked, input="Tell me a story.", include=["message.output_text.logprobs"], top_logprobs=2
    )
    told = reply.output[0].content[0].logprobs
    assert "".join(each.token for each in told) == reply.output_text
    assert all(len(each.top_logprobs) == 2 for each in told)
    turns: Any = [{"role": role, "content": "A story. " * 20} for _ in range(20) for role in ("user", "assistant")]
    turns.append({"role": "user", "content": "And then?"})
    with pytest.raises(openai.BadRequestError, match="context"):
        client.responses.create(**asked, input=turns)
    cut = client.responses.create(**asked, input=turns, truncation="auto")
    count = client.responses.input_tokens.count(model=server.model, input=turns, truncation="auto")
    assert 0 < count.input_tokens <= 512
    assert 0 < cut.usage.input_tokens <= 500


def test_45_older_fields_of_completions_and_chats(server: Server) -> None:
    client = openai.OpenAI(base_url=server.v1, api_key=server.key)
    asked: dict[str, Any] = {"model": server.model, "max_tokens": 12}
    best = client.completions.create(**asked, prompt="One day", n=2, best_of=4, seed=1)
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.usage.completion_tokens == 48
    assert best.choices[0].stop_reason is None
    with pytest.raises(openai.BadRequestError, match="markers"):
        client.completions.create(**asked, prompt="One day", suffix=" the end.")
    look: Any = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    chat: dict[str, Any] = {"model": server.model, "functions": [look], "function_call": {"name": "look"}}
    user: Any = {"role": "user", "content": "Look."}
    message = client.chat.completions.create(**chat, messages=[user]).choices[0].message
    assert (message.function_call.name, message.function_call.arguments) == ("look", "{}")
    chunks = list(client.chat.completions.create(**chat, messages=[user], stream=True))
    assert chunks[-1].choices[0].finish_reason == "function_call"
    result: Any = {"role": "function", "name": "look", "content": "A fox."}
    turns: Any = [user, message, result]
    final = client.chat.completions.create(**asked, messages=turns, functions=[look], function_call="none")
    assert final.choices[0].message.content
    (card,) = client.models.list().data
    assert (card.root, card.parent, card.permission[0]["allow_sampling"]) == ("stories", None, True)
