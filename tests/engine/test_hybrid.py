"""Hybrid attention: outputs are those of an engine with room for all, whoever decodes on the host meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import asyncengine
from asyncengine import AsyncEngine, ConfigError, SamplingParams, testing
from tests.engine.test_host_tier import PRESSED, PROMPTS, ROOMY, answers

HYBRID: dict[str, Any] = PRESSED | {"hybrid_attention": "always", "hybrid_workers": 2, "hybrid_lanes": 2, "max_num_seqs": 12}


async def run(config: dict[str, Any], model: str = str(asyncengine.bundled_model())) -> tuple[list[Any], dict[str, int]]:
    async with AsyncEngine.from_pretrained(model, device="cpu", progress=False, **config) as engine:
        async with testing.no_leaks(engine):
            outputs = await answers(engine)
        return outputs, engine._backend.step_loop.stats()


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8"},
        {"hybrid_lanes": 5, "hybrid_workers": 1, "steps_in_flight": 1},
        {"prefill_attention": "sdpa", "prefill_chunk_size": None},
        {"step_driver": "loop"},
    ],
    ids=lambda config: ",".join(f"{key}={value}" for key, value in config.items()) or "default",
)
def test_outputs_are_those_of_an_engine_with_room(config: dict[str, Any]) -> None:
    of_steps = {key: value for key, value in config.items() if not key.startswith("hybrid")}
    expected, _ = asyncio.run(run(ROOMY | of_steps))
    got, stats = asyncio.run(run(HYBRID | config))
    assert got == expected
    assert stats["moved_to_host"] > 0
    assert stats["host_row_tokens"] > 0
    assert stats["failed_host_rows"] == 0
    assert stats["num_host_rows"] == 0
