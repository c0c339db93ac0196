"""Anthropic's client, for servers with /v1/messages."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Server

anthropic = pytest.importorskip("anthropic")

USER: Any = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture
def client(server: Server) -> Any:
    return anthropic.Anthropic(base_url=server.url, auth_token=server.key, api_key=None, max_retries=0)


def test_messages(client: Any, server: Server) -> None:
    reply = client.messages.create(model=server.model, messages=USER, system="You tell stories.", max_tokens=24)
    assert reply.role == "assistant"
    assert reply.stop_reason == "max_tokens"
    assert reply.usage.output_tokens == 24
    assert reply.content[0].text


def test_streamed_messages(client: Any, server: Server) -> None:
    with client.messages.stream(model=server.model, messages=USER, max_tokens=24) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text
    assert final.stop_reason == "max_tokens"
