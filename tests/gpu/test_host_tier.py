"""The host tier on a card: what comes back is what went, and steps wait for no copy."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncengine import AsyncEngine, SamplingParams, testing
from asyncengine.bundled import path as bundled_path

ROOMY: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 192, "num_kv_blocks": 400, "batch_invariant": True}
PRESSED = ROOMY | {"num_kv_blocks": 18, "host_kv_memory_bytes": 64 << 20}
PARAMS = SamplingParams(max_tokens=70, temperature=0.8, seed=5, ignore_eos=True, n=2)
PROMPTS = [[3 + i, *range(5, 60 + i)] for i in range(8)]


async def generate(config: dict[str, Any]) -> tuple[list[Any], Any]:
    async with AsyncEngine.from_pretrained(str(bundled_path()), progress=False, **config) as engine:
        async with testing.no_leaks(engine):
            outputs = await asyncio.gather(*(engine.generate(prompt, PARAMS) for prompt in PROMPTS))
            outputs += [await engine.generate(prompt, PARAMS) for prompt in PROMPTS]
        return [sequence.token_ids for output in outputs for sequence in output.outputs], engine.stats()


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8"}, {"enforce_eager": True}])
def test_outputs_are_those_of_an_engine_with_room(options: dict[str, Any]) -> None:
    expected, _ = asyncio.run(generate(ROOMY | options))
    got, stats = asyncio.run(generate(PRESSED | options))
    assert stats.num_preemptions > 0
    assert stats.blocks_to_host > 0
    assert stats.blocks_from_host > 0
    assert stats.failed_transfers == 0
    assert got == expected
