"""LangChain's ChatOpenAI and OpenAI."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from conftest import Server

langchain_openai = pytest.importorskip("langchain_openai")

from shapes import Animal  # noqa: E402  # needs pydantic


def chat(server: Server, **more: Any) -> Any:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "stream_usage": True} | more
    return langchain_openai.ChatOpenAI(model=server.model, base_url=server.v1, api_key=server.key, **options)


def test_invoke_and_stream(server: Server) -> None:
    reply = chat(server).invoke([("system", "You tell stories."), ("user", "Tell me one.")])
    assert reply.content
    assert reply.usage_metadata["output_tokens"] == 24
    assert reply.response_metadata["finish_reason"] == "length"
    chunks = list(chat(server).stream([("system", "You tell stories."), ("user", "Tell me one.")]))
    assert "".join(chunk.content for chunk in chunks) == reply.content
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.usage_metadata["output_tokens"] == 24


def test_batches_and_async(server: Server) -> None:
    prompts = ["Tell me a story.", "Tell me of a fox."]
    together = [reply.content for reply in chat(server).batch(prompts)]

    async def ask() -> list[str]:
        return [reply.content for reply in await chat(server).abatch(prompts)]

    assert together == asyncio.run(ask()) == [chat(server).invoke(prompt).content for prompt in prompts]


def test_log_probabilities(server: Server) -> None:
    reply = chat(server).bind(logprobs=True, top_logprobs=2).invoke("Tell me a story.")
    tokens = reply.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == reply.content
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)


def test_text_completion(server: Server) -> None:
    model = langchain_openai.OpenAI(
        model=server.model, base_url=server.v1, api_key=server.key, temperature=0, max_tokens=24
    )
    text = model.invoke("Once upon a time")
    assert text
    assert "".join(model.stream("Once upon a time")) == text


def test_structured_output(server: Server) -> None:
    structured = chat(server, max_tokens=100).with_structured_output(Animal, method="json_schema")
    assert isinstance(structured.invoke("Invent an animal."), Animal)


def test_structured_output_as_a_tool_call(roomy: Server) -> None:
    structured = chat(roomy, max_tokens=100).with_structured_output(Animal, method="function_calling")
    assert isinstance(structured.invoke("Invent an animal."), Animal)


def test_a_call_and_its_result(roomy: Server) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    model = chat(roomy, max_tokens=100)
    question = HumanMessage("Invent an animal.")
    call = model.bind_tools([Animal], tool_choice="Animal").invoke([question])
    (asked,) = call.tool_calls
    assert asked["name"] == "Animal"
    Animal.model_validate(asked["args"])
    reply = model.invoke([question, call, ToolMessage("done", tool_call_id=asked["id"])])
    assert isinstance(reply.content, str)


def test_embeddings(server: Server) -> None:
    client = langchain_openai.OpenAIEmbeddings(
        model=server.model, base_url=server.v1, api_key=server.key, check_embedding_ctx_length=False
    )
    one, two = client.embed_documents(["a mouse", "an owl"])
    assert len(one) == len(two) > 0
    assert client.embed_query("a mouse") == pytest.approx(one, abs=1e-4)
