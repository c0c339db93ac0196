"""Mixtures of experts in whole engines: on the CPU, and by the kernels of a GPU in Triton's interpreter."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.text.tokenizer import placeholder_tokenizer
from tests.kernels.simulated_cuda import make_engine
from tests.models import tiny

SMALL: dict[str, Any] = {
    "max_num_seqs": 2, "max_num_batched_tokens": 16, "num_kv_blocks": 4, "max_model_len": 48, "dtype": "float32",
    "step_timeout_s": 600.0,
}  # fmt: skip
PROMPTS = [[5 + i, *range(3, 23)] for i in range(2)]
COUNT = 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("variant", "make"),
    [
        ("gpt-oss", "cuda"),
        ("glm4-moe-groups", "cpu"),
        ("qwen2-moe-window", "cuda"),
        ("qwen2-moe-window", "cpu"),
        ("deepseek-v3", "cuda"),
        ("deepseek-v3", "cpu"),
        ("glm4-moe-lite-mixed", "cpu"),
    ],
)
async def test_tokens_equal_transformers(tmp_path: Path, variant: str, make: str) -> None:
    """Chunks, a hit in the prefix cache, and two samples of a prompt beside another, in a pool that is too small."""
    model = tiny.build_model(variant, num_hidden_layers=3 if make == "cpu" else 2)
    model.save_pretrained(tmp_path)
    placeholder_tokenizer(tiny.VOCAB_SIZE).backend.save(str(tmp_path / "tokenizer.json"))
    expected = [tuple(tiny.generate(model, prompt, COUNT)) for prompt in PROMPTS]
    if make == "cuda":
        engine = make_engine(str(tmp_path), **SMALL)
    else:
        engine = AsyncEngine.from_pretrained(tmp_path, device="cpu", progress=False, **SMALL)
    params = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
    async with engine:
        first = await engine.generate(PROMPTS[0], params)
        both, other = await asyncio.gather(
            engine.generate(PROMPTS[0], SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True, n=2)),
            engine.generate(PROMPTS[1], params),
        )
        assert engine.stats().prefix_cache_hits > 0
    assert [output.token_ids for output in both.outputs] == [expected[0]] * 2
    assert [result.outputs[0].token_ids for result in (first, other)] == expected
