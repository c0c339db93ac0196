"""AutoGen of Microsoft: a loop of ten turns of its assistant."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from conftest import Server
from walk import ASKED, TURNS, Walk

autogen_agents = pytest.importorskip("autogen_agentchat.agents")
autogen_openai = pytest.importorskip("autogen_ext.models.openai")


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_loop_of_ten_turns(server: Server, streams: bool) -> None:
    walk = Walk()

    class Client(autogen_openai.OpenAIChatCompletionClient):  # type: ignore[misc, name-defined]
        """The assistant has no setting for the choice of tools."""

        async def create(self, *args: Any, **options: Any) -> Any:
            return await super().create(*args, **options | {"tool_choice": walk.choice})

        def create_stream(self, *args: Any, **options: Any) -> Any:
            return super().create_stream(*args, **options | {"tool_choice": walk.choice})

    async def go(steps: Literal[1, 2]) -> str:
        """Walk."""
        return walk.go(steps)

    async def run() -> Any:
        info = {
            "vision": False, "function_calling": True, "json_output": True, "structured_output": True,
            "family": "unknown", "multiple_system_messages": True,
        }  # fmt: skip
        client = Client(
            model=server.model, base_url=server.v1, api_key=server.key, model_info=info, max_retries=0, temperature=0,
            max_tokens=60, parallel_tool_calls=False,
        )  # fmt: skip
        assistant = autogen_agents.AssistantAgent(
            "walker", model_client=client, tools=[go], max_tool_iterations=TURNS + 1, system_message="Be brief.",
            model_client_stream=streams,
        )  # fmt: skip
        try:
            return await assistant.run(task=ASKED)
        finally:
            await client.close()

    messages = asyncio.run(run()).messages
    walk.check(messages[-1].content)
    assert [type(message).__name__ for message in messages].count("ToolCallExecutionEvent") == TURNS
