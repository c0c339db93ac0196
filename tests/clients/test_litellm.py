"""LiteLLM, as a proxy for OpenAI-compatible servers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from conftest import Server

litellm = pytest.importorskip("litellm")

from shapes import Animal  # noqa: E402  # needs pydantic

USER = [{"role": "user", "content": "Tell me a story."}]


def arguments(server: Server, **more: Any) -> dict[str, Any]:
    return {
        "model": f"openai/{server.model}",
        "api_base": server.v1,
        "api_key": server.key,
        "temperature": 0,
        "max_tokens": 24,
    } | more


def test_chat_with_and_without_a_stream(server: Server) -> None:
    reply = litellm.completion(messages=USER, **arguments(server))
    text = reply.choices[0].message.content
    assert text
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 24
    options = {"include_usage": True}
    chunks = list(litellm.completion(messages=USER, stream=True, stream_options=options, **arguments(server)))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == text
    assert chunks[-1].usage.completion_tokens == 24


def test_text_completion(server: Server) -> None:
    model = f"text-completion-openai/{server.model}"
    reply = litellm.text_completion(prompt="Once upon a time", **arguments(server, model=model, logprobs=1))
    assert reply.choices[0].text
    assert len(reply.choices[0].logprobs.token_logprobs) == 24


def test_many_at_once(server: Server) -> None:
    async def ask() -> list[Any]:
        return await asyncio.gather(*(litellm.acompletion(messages=USER, **arguments(server)) for _ in range(16)))

    assert len({reply.choices[0].message.content for reply in asyncio.run(ask())}) == 1


def test_structured_output(server: Server) -> None:
    reply = litellm.completion(messages=USER, response_format=Animal, **arguments(server, max_tokens=100))
    Animal.model_validate_json(reply.choices[0].message.content)
    reply = litellm.completion(
        messages=USER, response_format={"type": "json_object"}, **arguments(server, max_tokens=400)
    )
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(reply.choices[0].message.content), dict)


def test_errors_have_litellms_types(server: Server) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=USER, **arguments(server, api_key="wrong"))
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "story " * 600}], **arguments(server))
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=USER, **arguments(server, temperature=7))
