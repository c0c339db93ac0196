"""OpenAI's Agents SDK: loops of ten turns over chat completions and responses."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Literal

import pytest
from conftest import Server
from walk import ASKED, TURNS, Walk

agents = pytest.importorskip("agents")
openai = pytest.importorskip("openai")


def agent(server: Server, api: str, walk: Walk) -> Any:
    client = openai.AsyncOpenAI(base_url=server.v1, api_key=server.key, max_retries=0)
    kinds = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}

    @agents.function_tool
    def go(steps: Literal[1, 2]) -> str:
        """Walk."""
        told = walk.go(steps)
        if walk.is_over:  # a response that is cut is an error to this client
            made.model_settings = replace(made.model_settings, tool_choice="none", max_tokens=200)
        return told

    made = agents.Agent(
        name="Walker",
        instructions="Be brief.",
        model=kinds[api](model=server.model, openai_client=client),
        model_settings=agents.ModelSettings(
            temperature=0, max_tokens=60, tool_choice="required", parallel_tool_calls=False, store=False
        ),
        tools=[go],
        reset_tool_choice=False,
    )
    return made


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_loop_of_ten_turns(server: Server, api: str) -> None:
    walk = Walk()
    result = agents.Runner.run_sync(agent(server, api, walk), ASKED, max_turns=TURNS + 1)
    walk.check(result.final_output)
    assert len(result.raw_responses) == TURNS + 1
    assert [item.type for item in result.new_items].count("tool_call_output_item") == TURNS


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_streamed_loop_of_ten_turns(server: Server, api: str) -> None:
    walk = Walk()

    async def run() -> tuple[str, Any]:
        running = agents.Runner.run_streamed(agent(server, api, walk), ASKED, max_turns=TURNS + 1)
        text = ""
        async for event in running.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta
        return text, running.final_output

    text, final = asyncio.run(run())
    walk.check(final)
    assert text == final
