"""The simulated engine with scripted texts: what a program's own tests can cover with it."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from asyncengine import EngineError, SamplingParams, testing
from asyncengine.server import ServerConfig, create_app
from asyncengine.testing import Reply, SimulatedEngine, no_leaks

LONG = SamplingParams(max_tokens=200)


async def test_replies_by_prompt_in_order_and_by_a_function() -> None:
    by_prompt = {"capital": "Rome?", "capital of France": "Paris", "bad": EngineError("down"), "slow": Reply("x", 0.05)}
    async with SimulatedEngine(replies=by_prompt) as engine, no_leaks(engine):
        assert (await engine.generate("What is the capital of France?", LONG)).text == "Paris"
        assert (await engine.generate([{"role": "user", "content": "capital"}], LONG)).text == "Rome?"
        with pytest.raises(EngineError, match="down"):
            await engine.generate("a bad one", LONG)
        with pytest.raises(AssertionError, match="replies have none for the prompt 'hello'"):
            await engine.generate("hello", LONG)
        began = asyncio.get_running_loop().time()
        assert (await engine.generate("slow", LONG)).text == "x"
        assert asyncio.get_running_loop().time() - began >= 0.05
    async with SimulatedEngine(replies=["one", "two", "three"]) as engine, no_leaks(engine):
        same = [engine.generate("the same prompt", LONG) for _ in range(3)]
        assert [output.text for output in await asyncio.gather(*same)] == ["one", "two", "three"]
    async with SimulatedEngine(replies=lambda text: text.upper()) as engine, no_leaks(engine):
        outputs = await asyncio.gather(*(engine.generate("abcé"[:n], LONG) for n in (1, 2, 3, 4)))
        assert [output.text for output in outputs] == ["A", "AB", "ABC", "ABCÉ"]
        assert "".join([delta.text async for delta in engine.stream("stream", LONG)]) == "STREAM"


async def test_log_probabilities_schemas_processors_and_embeddings() -> None:
    answer = '{"age": 7}'
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    seen: list[int] = []

    def shout(tokens: Any, logits: Any) -> None:
        seen.append(len(tokens))
        logits[ord("!") - 33] += 200  # the byte alphabet begins with it

    async with no_leaks(), SimulatedEngine(replies=lambda text: answer) as engine:
        output = await engine.generate("a", SamplingParams(max_tokens=50, logprobs=2))
        assert output.text == answer
        assert output.outputs[0].logprobs is not None
        assert math.isclose(output.outputs[0].logprobs[0].logprob, 0, abs_tol=1e-6)
        assert len(output.outputs[0].logprobs[0].top) == 2
        params = SamplingParams(max_tokens=50, structured_outputs={"json": schema})
        assert json.loads((await engine.generate("a", params)).text) == {"age": 7}
        chosen = SamplingParams(max_tokens=50, structured_outputs={"choice": ["yes", "no"]})
        assert (await engine.generate("a", chosen)).text in ("yes", "no")  # the grammar has the last word
        shouted = await engine.generate("a", SamplingParams(max_tokens=3, logits_processor=shout))
        assert (shouted.text, len(seen)) == ("!!!", 3)
        vectors = (await engine.embed(["a fox", "fox a", "zzzz"])).vectors
        assert vectors.shape == (3, 64)
        assert np.allclose(vectors[0], vectors[1])
        assert vectors[0] @ vectors[2] < 0.5
        scores = await engine.score_pairs(["a fox", "a fox"], ["a fox", "zzzz"])
        assert scores.scores[0] > scores.scores[1]


async def test_tool_calls_and_reasoning_come_of_the_text_over_http() -> None:
    call = '{"name": "weather", "parameters": {"city": "Rome"}}'
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    async with SimulatedEngine(replies=[f"<tool_call>{call.replace('parameters', 'arguments')}</tool_call>"]) as engine:
        app = create_app(engine, ServerConfig(page=False, tool_call_parser="hermes"))
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        try:
            async with aiohttp.ClientSession() as session:
                fields = {"messages": [{"role": "user", "content": "?"}], "tools": tools, "max_tokens": 200}
                async with session.post(f"http://{host}:{port}/v1/chat/completions", json=fields) as r:
                    answer = await r.json()
        finally:
            await runner.cleanup()
    (made,) = answer["choices"][0]["message"]["tool_calls"]
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("weather", {"city": "Rome"})


async def test_the_example_of_the_documentation_runs() -> None:
    assert testing.__doc__ is not None
    example = testing.__doc__.split("serves all that an engine on the CPU serves:\n\n")[1].split("\n\n")[0]
    assert "replies=replies" in example
    program = f"async def run():\n{example}\n"
    names: dict[str, Any] = {"testing": testing, "Reply": Reply, "EngineError": EngineError}
    exec(program, names)
    await names["run"]()
