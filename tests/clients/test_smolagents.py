"""smolagents of Hugging Face: a loop of ten turns that its own tool final_answer ends."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Server
from walk import ASKED, TURNS, Walk

smolagents = pytest.importorskip("smolagents")


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_loop_of_ten_turns(stretched: Server, streams: bool) -> None:
    """The agent's own prompt has 10,000 characters: here it has a short one."""
    walk = Walk()

    class Go(smolagents.Tool):  # type: ignore[misc, name-defined]
        name = "go"
        description = "Walk."
        inputs = {"steps": {"type": "integer", "description": "How far.", "enum": [1, 2]}}  # noqa: RUF012
        output_type = "string"

        def forward(self, steps: int) -> str:
            return walk.go(steps)

    model = smolagents.OpenAIServerModel(
        model_id=stretched.model, api_base=stretched.v1, api_key=stretched.key, temperature=0, max_tokens=200,
        parallel_tool_calls=False,
    )  # fmt: skip
    prompts = smolagents.agents.EMPTY_PROMPT_TEMPLATES | {"system_prompt": "Be brief."}
    agent: Any = smolagents.ToolCallingAgent(
        tools=[Go()], model=model, max_steps=TURNS + 1, prompt_templates=prompts, verbosity_level=0,
        stream_outputs=streams,
    )  # fmt: skip
    end = agent.tools.pop("final_answer")
    end.inputs["answer"] |= {"type": "string", "maxLength": 80}
    ends = {"final_answer": end}

    def after_step(step: Any, agent: Any) -> None:
        if walk.is_over:
            agent.tools = ends

    agent.step_callbacks.register(smolagents.ActionStep, after_step)
    result = agent.run(ASKED, return_full_result=True)
    assert result.state == "success"
    walk.check(result.output)
    assert len([step for step in result.steps if "step_number" in step]) == TURNS + 1
