"""Rows that decode on the host, on a card: the same tokens, whatever lives where, and no step waits for a worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from asyncengine import AsyncEngine, SamplingParams, testing
from asyncengine.bundled import path as bundled_path
from asyncengine.config import EngineConfig
from tests.gpu.test_no_hidden_sync import (  # noqa: F401 - one is a fixture of this file too
    SMALL,
    check_that_launches_never_wait,
    short_collections,
)
from tests.kernels.lanes import read_mailbox
from tests.kernels.test_lanes import TOKENS, Behind, Case

ROOMY: dict[str, Any] = {"max_num_seqs": 12, "max_model_len": 192, "num_kv_blocks": 400, "dtype": "float32"}
HYBRID: dict[str, Any] = {
    "hybrid_attention": "always", "hybrid_workers": 2, "hybrid_lanes": 4, "host_kv_memory_bytes": 64 << 20,
}  # fmt: skip
PRESSED = ROOMY | HYBRID | {"num_kv_blocks": 18}
PROMPTS = [[3 + i, *range(5, 60 + i)] for i in range(8)]
COUNT = 70


async def generate(config: dict[str, Any], params: SamplingParams) -> tuple[list[Any], dict[str, int]]:
    async with AsyncEngine.from_pretrained(str(bundled_path()), progress=False, **config) as engine:
        async with testing.no_leaks(engine):
            outputs = await asyncio.gather(*(engine.generate(prompt, params) for prompt in PROMPTS))
        assert engine._life.backend is not None
        stats = engine._life.backend.step_loop.stats()
    return [sequence for output in outputs for sequence in output.outputs], stats


def same_until_a_tie(got: Any, expected: Any, gap: float) -> int:
    """Tokens up to the first that differs. There the two best must have been as good as each other."""
    for i, (mine, other) in enumerate(zip(got.token_ids, expected.token_ids, strict=True)):
        if mine != other:
            first, second = (entry.logprob for entry in expected.logprobs[i].top[:2])
            assert first - second < gap, f"token {i} is {mine} and not {other}"
            return i
    return len(expected.token_ids)


@pytest.mark.parametrize(
    ("options", "gap"),
    [
        ({}, 1e-3), ({"staging": "mapped"}, 1e-3), ({"staging": "pinned", "steps_in_flight": 1}, 1e-3),
        ({"enforce_eager": True}, 1e-3), ({"hybrid_lanes": 1, "hybrid_workers": 1}, 1e-3),
        ({"batch_invariant": True}, 1e-3), ({"dtype": "bfloat16"}, 0.15), ({"kv_cache_dtype": "fp8"}, 0.1),
        ({"hybrid_form": "workers"}, 1e-3), ({"hybrid_form": "link"}, 1e-3),
        ({"hybrid_form": "link", "kv_cache_dtype": "fp8", "dtype": "bfloat16"}, 0.2),
    ],
    ids=str,
)  # fmt: skip
def test_tokens_are_those_of_an_engine_with_room(options: dict[str, Any], gap: float) -> None:
    params = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True, logprobs=2)
    plain = {key: value for key, value in options.items() if not key.startswith("hybrid")}
    expected, _ = asyncio.run(generate(ROOMY | plain, params))
    got, stats = asyncio.run(generate(PRESSED | options, params))
    assert stats["moved_to_host"] > 0
    assert stats["failed_host_rows"] == 0
    same = [same_until_a_tie(a, b, gap) for a, b in zip(got, expected, strict=True)]
    assert sum(same) > 0.5 * COUNT * len(PROMPTS), "most tokens are compared"


@pytest.mark.parametrize(
    "feature",
    [
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "no_repeat_ngram_size": 3},
        {"temperature": 0.8, "seed": 5, "n": 2},
        {"logit_bias": {7: 2.0}, "min_tokens": 40},
    ],
    ids=str,
)
def test_sampling_is_the_same(feature: dict[str, Any]) -> None:
    """Histories go on on the host, and the generator's counter is the token's position."""
    params = SamplingParams(**{"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "logprobs": 2, **feature})
    expected, _ = asyncio.run(generate(ROOMY, params))
    got, stats = asyncio.run(generate(PRESSED, params))
    assert stats["moved_to_host"] > 0
    equal = sum(a.token_ids == b.token_ids for a, b in zip(got, expected, strict=True))
    assert equal >= 0.75 * len(expected), "but for ties"


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_layer_of_a_real_shape(dtype: torch.dtype, pdl: bool) -> None:
    behind = Behind(Case((32, 8), 128, True, True, 4096), dtype, torch.device("cuda"))
    residual, saved = behind.residual.clone(), behind.lanes.saved.clone()
    behind.run(pdl=pdl)
    for lane, (slot, position) in enumerate(behind.leaving):
        token, entering = TOKENS - 3 + lane, behind.entering[lane]
        if slot >= 0:
            left = read_mailbox(behind.lanes.mailboxes[slot], dtype, behind.step_number & 0xFFFFFFFF)
            torch.testing.assert_close(left, behind.rotated(token, position), rtol=1e-5, atol=1e-5)
            assert torch.equal(behind.lanes.saved[slot], residual[token])
        if entering >= 0:
            assert torch.equal(behind.residual[token], saved[entering])
            assert torch.equal(behind.x[token].cpu(), behind.lanes.results[entering])


@pytest.mark.alone
@pytest.mark.parametrize("staging", ["ahead", "mapped"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_launching_never_waits(tiny_llama: str, staging: Any, eager: bool) -> None:
    """A launch waits neither for the device nor for a worker, which wait for each other behind the sleep."""
    config = EngineConfig(model=tiny_llama, **SMALL, **HYBRID, staging=staging, enforce_eager=eager)
    check_that_launches_never_wait(config, "moved_to_host")
