"""LlamaIndex's OpenAILike."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Server

openai_like = pytest.importorskip("llama_index.llms.openai_like")


def model(server: Server, **more: Any) -> Any:
    return openai_like.OpenAILike(
        model=server.model, api_base=server.v1, api_key=server.key, temperature=0, max_tokens=24, **more
    )


def test_completion(server: Server) -> None:
    text = model(server).complete("Once upon a time").text
    assert text
    assert "".join(piece.delta for piece in model(server).stream_complete("Once upon a time")) == text


def test_chat(server: Server) -> None:
    from llama_index.core.llms import ChatMessage

    messages = [ChatMessage(role="system", content="You tell stories."), ChatMessage(role="user", content="One.")]
    text = model(server, is_chat_model=True).chat(messages).message.content
    assert text
    assert "".join(piece.delta for piece in model(server, is_chat_model=True).stream_chat(messages)) == text
