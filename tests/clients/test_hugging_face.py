"""Hugging Face's InferenceClient."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from conftest import Server

huggingface_hub = pytest.importorskip("huggingface_hub")

from shapes import Animal  # noqa: E402  # needs pydantic

USER = [{"role": "user", "content": "Tell me a story."}]
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


def test_chat_with_and_without_a_stream(server: Server) -> None:
    client = huggingface_hub.InferenceClient(base_url=server.v1, api_key=server.key)
    reply = client.chat.completions.create(model=server.model, messages=USER, logprobs=True, top_logprobs=1, **OPTIONS)
    text = reply.choices[0].message.content
    assert text
    assert reply.usage.completion_tokens == 24
    assert "".join(each.token for each in reply.choices[0].logprobs.content) == text
    chunks = client.chat_completion(model=server.model, messages=USER, stream=True, **OPTIONS)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_async(server: Server) -> None:
    async def ask() -> str:
        async with huggingface_hub.AsyncInferenceClient(base_url=server.v1, api_key=server.key) as client:
            chunks = await client.chat_completion(model=server.model, messages=USER, stream=True, **OPTIONS)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    assert asyncio.run(ask())


def test_structured_output(server: Server) -> None:
    client = huggingface_hub.InferenceClient(base_url=server.v1, api_key=server.key)
    schema = {"type": "json_schema", "json_schema": {"name": "animal", "schema": Animal.model_json_schema()}}
    reply = client.chat_completion(
        model=server.model, messages=USER, response_format=schema, **OPTIONS | {"max_tokens": 100}
    )
    Animal.model_validate_json(reply.choices[0].message.content)
