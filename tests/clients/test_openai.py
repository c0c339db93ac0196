"""OpenAI's own client, in the version that the other clients bring."""

from __future__ import annotations

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
