"""OpenAI's Agents SDK over responses: calls, hosted tools, and a tool that is forced."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Server, scripted

openai = pytest.importorskip("openai")
agents = pytest.importorskip("agents")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def agent_of(server: Server, tools: list[Any], **settings: Any) -> Any:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=server.v1, api_key=server.key)
    model = agents.OpenAIResponsesModel(server.model, client)
    return agents.Agent(
        "clerk", instructions="Add.", model=model, tools=tools, model_settings=agents.ModelSettings(**settings)
    )


def test_agents_calls_tools_and_reads_their_results(tmp_path: Path) -> None:
    given: list[tuple[int, int]] = []

    @agents.function_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        given.append((a, b))
        return f"sum={a + b}"

    replies = (
        ("2 + 3", "<think>Add.</think>" + call("add", a=2, b=3)),
        ("sum=5", call("add", a=5, b=4)),
        ("sum=9", "It is nine."),
        ("And more?", "No more."),
    )

    async def run(server: Server) -> list[str]:
        agent = agent_of(server, [add, agents.WebSearchTool()], verbosity="low", truncation="auto", top_logprobs=2)
        first = await agents.Runner.run(agent, "What is 2 + 3, and 4 more?")
        more = agents.Runner.run_streamed(agent, [*first.to_input_list(), {"role": "user", "content": "And more?"}])
        kinds = [event.type async for event in more.stream_events()]
        assert "raw_response_event" in kinds
        return [first.final_output, more.final_output]

    with scripted(tmp_path, *replies) as server:
        said = asyncio.run(run(server))
    assert given == [(2, 3), (5, 4)]
    assert said == ["It is nine.", "No more."]


def test_agents_are_forced_to_call_by_the_bundled_model(roomy: Server) -> None:
    given: list[str] = []

    @agents.function_tool
    def choose(animal: str) -> str:
        """Choose an animal."""
        given.append(animal)
        return "chosen"

    agent = agent_of(roomy, [choose], tool_choice="required", parallel_tool_calls=False, max_tokens=400)
    agent.tool_use_behavior = "stop_on_first_tool"
    result = asyncio.run(agents.Runner.run(agent, "Which animal?"))
    assert result.final_output == "chosen"
    assert len(given) == 1
