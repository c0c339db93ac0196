"""Pydantic AI: text, streams, typed output."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from conftest import Server
from walk import ASKED, TURNS, Walk

pydantic_ai = pytest.importorskip("pydantic_ai")
pytest.importorskip("openai")

from shapes import Animal  # noqa: E402  # needs pydantic


def agent(server: Server, **more: Any) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(server.model, provider=OpenAIProvider(base_url=server.v1, api_key=server.key))
    return pydantic_ai.Agent(model, model_settings={"temperature": 0, "max_tokens": 64}, **more)


def test_text_and_stream(server: Server) -> None:
    result = agent(server, system_prompt="You tell stories.").run_sync("Tell me one.")
    assert result.output

    async def stream() -> list[str]:
        async with agent(server, system_prompt="You tell stories.").run_stream("Tell me one.") as running:
            return [text async for text in running.stream_text(delta=True)]

    assert "".join(asyncio.run(stream())) == result.output


def test_a_conversation(server: Server) -> None:
    first = agent(server).run_sync("Tell me a story.")
    second = agent(server).run_sync("And then?", message_history=first.all_messages())
    assert second.output
    assert second.usage.input_tokens > first.usage.input_tokens


def test_typed_output(server: Server) -> None:
    result = agent(server, output_type=pydantic_ai.NativeOutput(Animal)).run_sync("Invent an animal.")
    assert isinstance(result.output, Animal)


def test_typed_output_as_a_tool_call(roomy: Server) -> None:
    settings = {"temperature": 0, "max_tokens": 500, "parallel_tool_calls": False}  # the model would go on with calls
    result = agent(roomy, output_type=Animal).run_sync("Invent an animal.", model_settings=settings)
    assert isinstance(result.output, Animal)


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_loop_of_ten_turns(server: Server, api: str) -> None:
    from pydantic_ai.capabilities import AbstractCapability
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    walk = Walk()

    class Choice(AbstractCapability[None]):
        """Demands calls until the walk is over."""

        def get_model_settings(self) -> Any:
            return lambda context: {"tool_choice": walk.choice}

    def go(steps: Literal[1, 2]) -> str:
        """Walk."""
        return walk.go(steps)

    kind = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[api]
    model = kind(server.model, provider=OpenAIProvider(base_url=server.v1, api_key=server.key))
    settings: Any = {"temperature": 0, "max_tokens": 60, "parallel_tool_calls": False}
    walker = pydantic_ai.Agent(model, tools=[go], model_settings=settings, capabilities=[Choice()])
    result = walker.run_sync(ASKED)
    walk.check(result.output)
    assert result.usage.requests == TURNS + 1
