"""Anthropic's clients (Python, JavaScript) run tools to the end of a conversation, and ask for threads in vain."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest
from conftest import Server, scripted
from walk import ASKED, TURNS, Walk

anthropic = pytest.importorskip("anthropic")

NODE = Path(__file__).with_name("node")
needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not (NODE / "node_modules" / "@anthropic-ai" / "sdk").is_dir(),
    reason="needs Node and its packages",
)
STREAMS = pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
USER: Any = [{"role": "user", "content": "What is 2 + 3, and then 4 more?"}]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


REPLIES = (
    ("What is 2 + 3", "Let me see." + call("add", a=2, b=3)),
    ("sum=5", call("add", a=5, b=4) + call("add", a=1, b="one")),
    ("sum=9", "It is 9."),
)
"""Each is given if the prompt has what stands before it: the results of the calls so far."""


def client_of(server: Server) -> Any:
    return anthropic.Anthropic(base_url=server.url, auth_token=server.key, api_key=None, max_retries=0)


@STREAMS
def test_the_tool_runner_ends_with_a_text(tmp_path: Path, streams: bool) -> None:
    given: list[tuple[int, int]] = []

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        given.append((a, b))
        return f"sum={a + b}"

    with scripted(tmp_path, *REPLIES) as server:
        runner = client_of(server).beta.messages.tool_runner(
            model=server.model, max_tokens=500, tools=[add], messages=USER, stream=streams
        )
        messages = [item.get_final_message() if streams else item for item in runner]
    assert given == [(2, 3), (5, 4)]
    assert [message.stop_reason for message in messages] == ["tool_use", "tool_use", "end_turn"]
    assert [block.type for block in messages[0].content] == ["text", "tool_use"]
    assert messages[-1].content[0].text == "It is 9."


def test_the_tool_runner_walks_with_the_bundled_model(server: Server) -> None:
    walk = Walk()

    @anthropic.beta_tool
    def go(steps: Literal[1, 2]) -> str:
        """Walk."""
        return walk.go(steps)

    runner = client_of(server).beta.messages.tool_runner(
        model=server.model,
        max_tokens=60,
        extra_body={"temperature": 0},
        tools=[go],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        messages=[{"role": "user", "content": ASKED}],
    )
    messages = []
    for message in runner:
        messages.append(message)
        if len(messages) == TURNS:
            said = {"role": "assistant", "content": message.content}
            runner.set_messages_params(
                lambda params, said=said: {
                    **params, "tool_choice": {"type": "none"}, "messages": [*params["messages"], said],
                }
            )  # fmt: skip
    walk.check(messages[-1].content[0].text)
    assert [message.stop_reason for message in messages[:-1]] == ["tool_use"] * TURNS


def test_a_thread_goes_on_without_the_server(tmp_path: Path) -> None:
    with scripted(tmp_path, ("first", "One."), ("One.", "Two.")) as server:
        client, first = client_of(server), {"role": "user", "content": "first"}
        fields: dict[str, Any] = {"model": server.model, "max_tokens": 100}
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.beta.messages.thread(**fields).send(first)
        assert refused.value.body["error"]["details"]["error_code"] == "thread_unsupported_request"
        thread = client.beta.messages.thread(**fields, unsupported_request_behavior="continue_unthreaded")
        assert thread.send(first).content[0].text == "One."
        assert thread.send(first | {"content": "second"}).content[0].text == "Two."


@needs_node
@STREAMS
def test_the_javascript_tool_runner_ends_with_a_text(tmp_path: Path, streams: bool) -> None:
    with scripted(tmp_path, *REPLIES) as server:
        told = javascript(server, streams=streams, prompt=USER[0]["content"])
    assert told["given"] == [[2, 3], [5, 4]]
    assert told["reasons"] == ["tool_use", "tool_use", "end_turn"]
    assert told["text"] == "It is 9."


@needs_node
def test_the_javascript_tool_runner_walks_with_the_bundled_model(server: Server) -> None:
    told = javascript(server, streams=False, prompt=ASKED, turns=TURNS)
    Walk(told["places"]).check(told["text"])
    assert told["reasons"][:-1] == ["tool_use"] * TURNS


@needs_node
def test_the_javascript_client_lists_models(server: Server) -> None:
    told = javascript(server, models=True)
    assert [(model["id"], model["type"], model["display_name"]) for model in told] == [("stories", "model", "stories")]


def javascript(server: Server, **asked: Any) -> Any:
    """Run a program of the JavaScript client, and return the JSON that it prints."""
    settings = {"baseURL": server.url, "authToken": server.key, "model": server.model, **asked}
    done = subprocess.run(
        ["node", "tools.mjs", json.dumps(settings)],
        cwd=NODE, capture_output=True, text=True, timeout=120, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
