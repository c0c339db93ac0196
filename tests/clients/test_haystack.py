"""Haystack of deepset: a loop of ten turns of its agent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from conftest import Server
from walk import ASKED, TURNS, Walk

pytest.importorskip("haystack")


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_loop_of_ten_turns(server: Server, streams: bool) -> None:
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    walk = Walk()
    pieces: list[str] = []

    def go(steps: Annotated[Literal[1, 2], "how far"]) -> str:
        """Walk."""
        told = walk.go(steps)
        generator.generation_kwargs["tool_choice"] = walk.choice
        return told

    generator: Any = OpenAIChatGenerator(
        model=server.model, api_base_url=server.v1, api_key=Secret.from_token(server.key), max_retries=0,
        generation_kwargs={
            "temperature": 0, "max_tokens": 60, "tool_choice": "required", "parallel_tool_calls": False,
        },
    )  # fmt: skip
    agent = Agent(
        chat_generator=generator, tools=[create_tool_from_function(go)], max_agent_steps=TURNS + 1,
        streaming_callback=(lambda chunk: pieces.append(chunk.content)) if streams else None,
    )  # fmt: skip
    result = agent.run(messages=[ChatMessage.from_user(ASKED)])
    walk.check(result["last_message"].text)
    assert sum(bool(message.tool_call_results) for message in result["messages"]) == TURNS
    assert "".join(pieces).endswith(result["last_message"].text) or not streams
