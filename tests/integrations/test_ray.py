"""Two replicas on a local Ray cluster: streams, warm prefixes, a replica that is killed, one that drains."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

pytest.importorskip("ray", reason="needs ray: make integrations")

import ray
from ray import serve

from asyncengine import ConfigError
from asyncengine.integrations.ray import Autoscaler, build_app

ENGINE = {"device": "cpu", "cpu_threads": 1, "num_kv_blocks": 512, "max_model_len": 512}
SETTINGS: dict[str, Any] = {"engine": ENGINE, "ray_actor_options": {"num_cpus": 0.5}, "drain_s": 60}
NAME = "ray::ServeReplica:default:EngineReplica"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[2]
    environment = {"env_vars": {"PYTHONPATH": str(root)}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        scale(2)
        yield f"http://127.0.0.1:{port}/v1/completions"
    finally:
        serve.shutdown()
        ray.shutdown()


def scale(replicas: int) -> None:
    serve.run(build_app({**SETTINGS, "min_replicas": replicas, "max_replicas": replicas}))


def replicas() -> list[int]:
    """Processes of this cluster's replicas."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            name = (folder / "cmdline").read_bytes() if folder.name.isdigit() else b""
        except OSError:  # it ended meanwhile
            continue
        if name.startswith(NAME.encode()) and os.getsid(int(folder.name)):
            found.append(int(folder.name))
    return found


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what the cluster does by itself."""
    async with asyncio.timeout(200):
        while not holds():  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(0.5)


async def stream(session: aiohttp.ClientSession, url: str, prompt: str, tokens: int) -> str:
    """Return how a stream ended: "done", or the code of its error."""
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    async with session.post(url, json=asked) as reply:
        if reply.status != 200:
            return str((await reply.json())["error"]["code"])
        lines = [line.decode().strip() async for line in reply.content if line.startswith(b"data: ")]
    if lines[-1] == "data: [DONE]":
        assert sum("text" in line for line in lines[:-1]) >= 1
        return "done"
    return str(json.loads(lines[-1][6:])["error"]["code"])


async def crowd(url: str, count: int, tokens: int, during: Any) -> Counter[str]:
    """Endings of ``count`` streams at once, while ``during`` is awaited."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        streams = [asyncio.create_task(stream(session, url, f"Story {i} tells of", tokens)) for i in range(count)]
        await during
        return Counter(await asyncio.gather(*streams))


async def test_prompts_go_where_their_beginning_is_warm(url: str) -> None:
    async with aiohttp.ClientSession() as session:

        async def cached(prompt: str) -> int:
            async with session.post(url, json={"prompt": prompt, "max_tokens": 2}) as reply:
                return int((await reply.json())["usage"]["prompt_tokens_details"]["cached_tokens"])

        beginnings = [f"{word} upon a time there was a fox who lived in a forest. " * 12 for word in "ABCDEF"]
        first = [await cached(beginning) for beginning in beginnings]
        again = [await cached(beginning + f"Now {i}") for i in range(3) for beginning in beginnings]
    assert max(first) < 64
    assert min(again) > 100


async def test_a_replica_that_is_killed_ends_its_streams_alone(url: str) -> None:
    """200 streams: those of the other replica reach their end, and a new replica takes the place of the lost one."""
    victim, other = replicas()

    async def kill() -> None:
        await asyncio.sleep(1.5)
        os.kill(victim, signal.SIGKILL)

    endings = await crowd(url, 200, 60, kill())
    assert endings.keys() <= {"done", "replica_lost"}
    assert endings["done"] > 20
    assert endings["replica_lost"] > 0
    await until(lambda: len(replicas()) == 2 and victim not in replicas())
    assert other in replicas()
    assert await crowd(url, 20, 4, asyncio.sleep(0)) == {"done": 20}


async def test_a_replica_that_is_taken_away_ends_its_streams_first(url: str) -> None:
    async def shrink() -> None:
        await asyncio.sleep(0.5)
        await asyncio.to_thread(scale, 1)

    assert await crowd(url, 60, 200, shrink()) == {"done": 60}
    await until(lambda: len(replicas()) == 1)
    assert await crowd(url, 10, 4, asyncio.sleep(0)) == {"done": 10}


async def test_a_queue_brings_another_replica(url: str) -> None:
    """Prompts wait for an engine that runs two requests at once, until Ray has started a second one."""
    narrow = {**SETTINGS, "engine": {**ENGINE, "max_num_seqs": 2}}
    await asyncio.to_thread(
        serve.run, build_app({**narrow, "min_replicas": 1, "max_replicas": 2, "most_queued_tokens": 10})
    )
    await until(lambda: len(replicas()) == 1)
    stop = asyncio.Event()

    async def ask_until_then() -> set[str]:
        endings: set[str] = set()
        while not stop.is_set():
            endings |= (await crowd(url, 12, 100, asyncio.sleep(0))).keys()
        return endings

    asking = asyncio.create_task(ask_until_then())
    try:
        await until(lambda: len(replicas()) == 2)
    finally:
        stop.set()
    assert await asking == {"done"}


def test_autoscaling_and_wrong_settings() -> None:
    metrics = {"queued_tokens": {"a": 900.0, "b": 1300.0}, "kv_cache_usage": {"a": 0.2, "b": 0.1}}
    limits = {"capacity_adjusted_min_replicas": 1, "capacity_adjusted_max_replicas": 8}
    context = SimpleNamespace(aggregated_metrics=metrics, **limits)
    policy = Autoscaler(most_queued_tokens=500, most_kv_usage=0.8)
    assert policy(context) == (5, {})
    context.capacity_adjusted_max_replicas = 3
    assert policy(context) == (3, {})
    wrong_numbers = ({"max_replicas": "many"}, {"max_replicas": 0}, {"most_queued_tokens": 0}, {"most_kv_usage": -1})
    for wrong in ({"models": "x"}, {"server": {"nonsense": 1}}, *wrong_numbers):
        with pytest.raises(ConfigError, match="settings"):
            build_app(wrong)
