"""Float8 weights on a card that has them: what they cost in accuracy, what they save, and that whole engines run."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

import pytest
import torch

from asyncengine import AsyncEngine, ConfigError, SamplingParams, bundled_model
from asyncengine.bundled.grammar import parse
from asyncengine.config import EngineConfig
from asyncengine.kernels.cuda.gpu import A100
from asyncengine.runner import cuda_runner
from asyncengine.runner.cuda_runner import CudaRunner
from tests.gpu.conftest import SHAPES

sys.path.insert(0, str(SHAPES.parent))  # the benchmarks import each other by name

from fp8_accuracy import measure

needs_float8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs compute capability 8.9"
)
PROMPTS = ["Once upon a time", "One day, a fox", "There was a", "The"]


def generate(model: Any, **config: Any) -> tuple[list[str], int]:
    """Greedy stories, and the bytes of the weights."""

    async def main() -> tuple[list[str], int]:
        config_ = {"device": "cuda", "dtype": "bfloat16", "progress": False, **config}
        async with AsyncEngine.from_pretrained(model, **config_) as engine:
            params = SamplingParams(max_tokens=200, temperature=0)
            outputs = await asyncio.gather(*(engine.generate(prompt, params) for prompt in PROMPTS))
            return [prompt + output.text for prompt, output in zip(PROMPTS, outputs, strict=True)], (
                engine.model_info.weight_bytes
            )

    return asyncio.run(main())


@needs_float8
def test_the_bundled_model_stays_what_it_is() -> None:
    result = measure(bundled_model(), argparse.Namespace(device="cuda", rows=[1, 8, 64], tokens=64))
    assert result["perplexity"]["fp8"] < 1.02 * result["perplexity"]["bf16"]
    for case in ("prompts", "rows 1", "rows 8", "rows 64"):
        assert result[case]["relative error"] < 0.08, case
        assert result[case]["equal tokens"] > 0.85, case


@needs_float8
def test_logits_of_a_real_shape() -> None:
    """Random weights, so that there is nothing to be sure of: the error is that of rounding, in all 28 layers."""
    result = measure(SHAPES / "qwen3-0.6b", argparse.Namespace(device="cuda", rows=[1, 8, 64], tokens=16))
    for case in ("prompts", "rows 1", "rows 8", "rows 64"):
        assert 0.005 < result[case]["relative error"] < 0.3, case


@needs_float8
def test_an_engine_tells_stories_and_saves_memory() -> None:
    plain, plain_bytes = generate(bundled_model())
    stories, num_bytes = generate(bundled_model(), quantization="fp8")
    assert num_bytes < 0.65 * plain_bytes, "all but the embedding is half as large"
    assert len(stories) == len(plain)
    for story in (plain[0], stories[0]):
        assert parse(story) is not None, story


@needs_float8
def test_gpt2_is_refused() -> None:
    config = EngineConfig(model=str(SHAPES / "gpt2"), load_format="dummy", device="cuda", dtype="bfloat16",
                          quantization="fp8")  # fmt: skip
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        CudaRunner.load(config)


def test_an_older_card_is_refused(monkeypatch: pytest.MonkeyPatch, tiny_llama: str) -> None:
    monkeypatch.setattr(cuda_runner, "examine", lambda device: A100)
    config = EngineConfig(model=tiny_llama, load_format="dummy", device="cuda", dtype="bfloat16", quantization="fp8")
    with pytest.raises(ConfigError, match=r"compute capability 8\.9"):
        CudaRunner.load(config)
