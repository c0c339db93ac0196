"""Groups of layers with a window on the CUDA path: in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncengine import testing
from asyncengine.runner.costs.replay import Row, staged
from asyncengine.runner.steps.buckets import Bucket
from asyncengine.runner.steps.device_steps import ARGMAX, DeviceSteps
from tests.kernels.simulated_cuda import make_engine
from tests.models import tiny
from tests.runner.stateful_engines import greedy, save

SMALL: dict[str, Any] = {
    "max_num_seqs": 3, "max_num_batched_tokens": 16, "num_kv_blocks": 7, "max_model_len": 96, "dtype": "float32",
    "step_timeout_s": 600.0,
}  # fmt: skip
LAYERS = {
    "gemma3": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3},
    "gpt-oss": {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2},
}
PROMPT = [(7 * i + 3) % tiny.VOCAB_SIZE for i in range(60)]
COUNT = 3


@pytest.mark.parametrize("variant", LAYERS)
async def test_tokens_equal_transformers(tmp_path: Path, variant: str) -> None:
    """Chunks beyond the window, a hit in the prefix cache and two samples of a prompt beside another."""
    model = save(variant, tmp_path, sliding_window=9, **LAYERS[variant])
    other = [5, *PROMPT[:40]]
    engine = make_engine(str(tmp_path), **SMALL)
    async with engine, testing.no_leaks(engine):
        info = engine.model_info
        assert info.window_groups == len(LAYERS[variant]["layer_types"]) - 1
        assert info.num_kv_blocks == 7 * (1 + info.window_groups)
        first = await engine.generate(PROMPT, greedy(COUNT))
        both, beside = await asyncio.gather(
            engine.generate(PROMPT, greedy(COUNT, n=2)), engine.generate(other, greedy(COUNT))
        )
        assert engine.stats().prefix_cache_hits >= 48
    tokens = list(first.token_ids)
    assert tokens == tiny.followers(model, PROMPT, tokens)
    assert [list(output.token_ids) for output in both.outputs] == [tokens] * 2
    assert list(beside.token_ids) == tiny.followers(model, other, beside.token_ids)


async def test_a_sequence_that_gave_way_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    """Sequences that begin together need the next block of each group together, for which there is no room."""
    model = save("gemma3", tmp_path, sliding_window=9, **LAYERS["gemma3"])
    prompts = [[1 + i, *PROMPT[:12]] for i in range(6)]
    settings = SMALL | {"max_num_seqs": 6, "max_num_batched_tokens": 32, "max_model_len": 128}
    engine = make_engine(str(tmp_path), **settings)
    async with engine, testing.no_leaks(engine):
        outputs = await asyncio.gather(*(engine.generate(prompt, greedy(6)) for prompt in prompts))
        assert engine.stats().num_preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == tiny.followers(model, prompt, output.token_ids)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_costs.py replays")
async def test_a_replayed_step_finds_the_blocks_of_every_group(tmp_path: Path) -> None:
    save("gemma3", tmp_path, sliding_window=9, **LAYERS["gemma3"])
    contexts = [40, 17]
    async with make_engine(str(tmp_path), **SMALL) as engine:
        steps: DeviceSteps = engine._life.loaded().keep_alive[0]  # type: ignore[index]
        rows = [Row(1, context) for context in contexts]
        with staged(steps, rows, 1, lambda: None, own_tables=True), np.errstate(all="ignore"):
            for _ in range(len(steps.source.inputs)):
                steps.run(Bucket(3, 3, True), ARGMAX)
        assert steps.state.positions[:2].tolist() == contexts
        for group in (1, 2):
            assert steps.state.of_group(group).slot_mapping[:2].tolist() == steps.state.slot_mapping[:2].tolist()
