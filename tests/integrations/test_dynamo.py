"""The engine behind Dynamo's interface, and as a worker of a real Dynamo with its frontend. ``make integrations``."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytest.importorskip("dynamo.common.backend", reason="needs ai-dynamo: make integrations")

from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

from asyncengine import AsyncEngine, ConfigError, ModelNotFoundError, SamplingParams, bundled_model
from asyncengine.integrations.dynamo import DynamoEngine

FLAGS = ["--device", "cpu", "--cpu-threads", "1", "--num-kv-blocks", "64", "--max-model-len", "256"]
PROMPT = list(range(300, 340))


class Context:
    """A request's context, as far as the engine looks at it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def id(self) -> str:
        return self.name


async def collected(engine: DynamoEngine, name: str, tokens: int, **parts: Any) -> tuple[list[int], dict[str, Any]]:
    request = {"token_ids": PROMPT, "stop_conditions": {"max_tokens": tokens, "ignore_eos": True}, **parts}
    chunks = [chunk async for chunk in engine.generate(request, Context(name))]
    return [token for chunk in chunks for token in chunk["token_ids"]], chunks[-1]


async def test_the_interface() -> None:
    """Start, concurrent requests, an abort, wrong requests, and cleanup, which may be called again."""
    engine, worker = await DynamoEngine.from_args([*FLAGS, "--namespace", "here", "--served-model-name", "tales"])
    assert (worker.namespace, worker.component, worker.served_model_name) == ("here", "backend", "tales")
    config = await engine.start(7)
    assert (config.llm.context_length, config.llm.kv_cache_block_size, config.llm.total_kv_blocks) == (256, 16, 64)
    assert [source.endpoint.startswith("ipc://") for source in await engine.kv_event_sources()] == [True]
    greedy = {"sampling_options": {"temperature": 0.0}}
    expected, last = await collected(engine, "alone", 12, **greedy)
    assert (len(expected), last["finish_reason"], last["completion_usage"]["total_tokens"]) == (12, "length", 52)
    outputs = await asyncio.gather(*(collected(engine, f"r{i}", 12, **greedy) for i in range(8)))
    assert [output for output, _ in outputs] == [expected] * 8
    running = asyncio.create_task(collected(engine, "left", 200))
    await asyncio.sleep(0.05)
    await engine.abort(Context("left"))
    await engine.abort(Context("unknown"))
    assert (await running)[1]["finish_reason"] == "cancelled"
    with pytest.raises(InvalidArgument, match="context"):
        await collected(engine, "long", 400)
    payload = await engine.health_check_payload()
    assert [chunk async for chunk in engine.generate(payload, Context("probe"))][-1]["finish_reason"] == "length"
    assert await engine.is_quiescent()
    for _ in range(2):
        await engine.cleanup()
    with pytest.raises(EngineShutdown):
        await collected(engine, "late", 4)


async def test_starts_that_fail(tmp_path: Path) -> None:
    engine = DynamoEngine(AsyncEngine.from_pretrained(str(tmp_path / "none"), device="cpu"), "none")
    with pytest.raises(ModelNotFoundError):
        await engine.start(1)
    await engine.cleanup()
    with pytest.raises(ConfigError, match="start one for each device"):
        DynamoEngine(AsyncEngine.from_pretrained(str(tmp_path), device="cpu", data_parallel_size=2), "two")


@asynccontextmanager
async def program(log: Path, *words: str) -> Any:
    """Run a module; in the end it gets SIGTERM and has to leave with 0."""
    environment = os.environ | {"DYN_FILE_KV": str(log.parent / "discovery"), "DYN_SELF_HOST_METADATA": "0"}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *words, "--discovery-backend", "file", "--event-plane", "zmq",
            stdout=output, stderr=output, env=environment,
        )  # fmt: skip
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 30) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_a_worker_of_a_real_dynamo(tmp_path: Path) -> None:
    """The frontend finds the model, answers as the engine does, and learns of the prefix cache."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    async with AsyncExitStack() as stack:
        front = ("dynamo.frontend", "--router-mode", "kv", "--http-host", "127.0.0.1", "--http-port", url.split(":")[2])
        await stack.enter_async_context(program(tmp_path / "frontend.log", *front))
        worker = ("asyncengine.integrations.dynamo", *FLAGS, "--endpoint-types", "chat,completions")
        await stack.enter_async_context(program(tmp_path / "worker.log", *worker))
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def answer(path: str, **body: Any) -> Any:
            async with session.post(f"{url}/v1/{path}", json={"model": "stories", "temperature": 0, **body}) as reply:
                return await reply.json()

        async with asyncio.timeout(60):
            while True:
                await asyncio.sleep(0.3)
                try:
                    async with session.get(f"{url}/v1/models") as reply:
                        if (await reply.json())["data"]:
                            break
                except aiohttp.ClientError:
                    continue
        prompt = "Once upon a time there was a fox. " * 6
        first = await answer("completions", prompt=prompt, max_tokens=8)
        again = await answer("completions", prompt=prompt, max_tokens=8)
        assert first["choices"] == again["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
        small = {"device": "cpu", "num_kv_blocks": 64, "max_model_len": 256}
        async with AsyncEngine.from_pretrained(str(bundled_model()), **small) as engine:
            direct = await engine.generate(prompt, SamplingParams(max_tokens=8, temperature=0))
        assert first["choices"][0]["text"] == direct.text
        chat = {"messages": [{"role": "user", "content": "Tell me of a fox."}], "logprobs": True, "top_logprobs": 2}
        content = (await answer("chat/completions", max_tokens=4, **chat))["choices"][0]["logprobs"]["content"]
        assert [len(token["top_logprobs"]) for token in content] == [2, 2, 2, 2]
        refused = await answer("completions", prompt="x", max_tokens=4000)
        assert "context" in refused["message"]
