"""Keys and values in float8 on a card that has them: what they cost in accuracy, and that whole engines run."""

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
from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.cuda.gpu import A100
from asyncengine.kernels.cuda.ops import CudaOps
from asyncengine.runner import cuda_runner
from asyncengine.runner.cuda_runner import CudaRunner
from asyncengine.runner.start.calibration import calibrate_device
from asyncengine.runner.state.kv_scales import calibrate_host
from asyncengine.runner.steps.model_runner import load_model
from tests.gpu.conftest import SHAPES

sys.path.insert(0, str(SHAPES.parent))  # the benchmarks import each other by name

from fp8_accuracy import measure

needs_float8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs compute capability 8.9"
)
PROMPTS = ["Once upon a time", "One day, a fox", "There was a", "The"]


@needs_float8
def test_the_bundled_model_stays_what_it_is() -> None:
    """Logits against those over a cache in bfloat16: of prompts, and token by token for 1, 8 and 64 rows."""
    result = measure(bundled_model(), argparse.Namespace(device="cuda", rows=[1, 8, 64], tokens=64), "kv-cache")
    assert result["perplexity"]["fp8"] < 1.01 * result["perplexity"]["bf16"]
    for case in ("prompts", "rows 1", "rows 8", "rows 64"):
        assert 1e-4 < result[case]["relative error"] < 0.04, case
        assert result[case]["equal tokens"] > 0.9, case


@needs_float8
@pytest.mark.parametrize("shape", ["gpt2", "qwen3-0.6b"])
def test_logits_of_a_real_shape(shape: str) -> None:
    """Random weights, so that there is nothing to be sure of: the error is that of rounding, in all layers."""
    result = measure(SHAPES / shape, argparse.Namespace(device="cuda", rows=[1, 8, 64], tokens=48), "kv-cache")
    for case in ("prompts", "rows 1", "rows 8", "rows 64"):
        assert 1e-5 < result[case]["relative error"] < 0.2, case


def generate(*, alone: bool = False, rounds: int = 1, params: Any = None, **config: Any) -> tuple[list[Any], Any]:
    """Greedy stories, or what other parameters give, and what the engine says of its model."""
    params = params or SamplingParams(max_tokens=240, temperature=0)

    async def main() -> tuple[list[Any], Any]:
        settings = {"device": "cuda", "dtype": "bfloat16", "progress": False, "kv_cache_dtype": "fp8", **config}
        async with AsyncEngine.from_pretrained(bundled_model(), **settings) as engine:
            for _ in range(rounds):
                if alone:
                    outputs = [await engine.generate(prompt, params) for prompt in PROMPTS]
                else:
                    outputs = list(await asyncio.gather(*(engine.generate(prompt, params) for prompt in PROMPTS)))
            return [[one.text for one in output.outputs] for output in outputs], engine.model_info

    return asyncio.run(main())


@needs_float8
def test_an_engine_tells_stories_over_twice_the_tokens() -> None:
    memory = {"kv_cache_memory_bytes": 1 << 24, "max_num_seqs": 16}
    stories, info = generate(**memory)
    _, plain = generate(kv_cache_dtype="auto", **memory)
    assert info.num_kv_blocks in (2 * plain.num_kv_blocks, 2 * plain.num_kv_blocks + 1)  # of the same memory
    assert plain.kv_bytes_per_block == 2 * info.kv_bytes_per_block
    story = PROMPTS[0] + stories[0][0]
    assert parse(story) is not None, story


@needs_float8
def test_a_batch_invariant_engine_gives_the_same_whatever_surrounds_it() -> None:
    """Alone, together, in chunks, after a prefix hit, and with n, whose blocks are copied."""
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=5, n=2, ignore_eos=True)
    config = {"batch_invariant": True, "max_num_seqs": 16, "params": params}
    expected, _ = generate(alone=True, **config)
    for other in ({}, {"prefill_chunk_size": 3}, {"rounds": 2}, {"steps_in_flight": 1}, {"enforce_eager": True}):
        assert generate(**config, **other)[0] == expected, other


@needs_float8
def test_the_device_makes_the_scales_of_the_cpu() -> None:
    config = EngineConfig(model=str(bundled_model()), dtype="float32")
    device, host = CudaOps(torch.device("cuda", torch.cuda.current_device())), CpuOps(2)
    on_device, on_host = load_model(config, device), load_model(config, host)
    scales = calibrate_host(on_host.model, on_host.config, on_host.dtype, on_host.max_model_len, host)
    assert torch.equal(calibrate_device(on_device, device).cpu(), scales)


def test_an_older_card_is_refused(monkeypatch: pytest.MonkeyPatch, tiny_llama: str) -> None:
    monkeypatch.setattr(cuda_runner, "examine", lambda device: A100)
    config = EngineConfig(model=tiny_llama, load_format="dummy", device="cuda", dtype="bfloat16", kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=fp8 .*compute capability 8\.9"):
        CudaRunner.load(config)
