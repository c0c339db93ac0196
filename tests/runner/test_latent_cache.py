"""Latents in float8, and prompts over expanded latents: the same whatever the machinery does, and on the CUDA path."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncengine import AsyncEngine, EngineConfig, SamplingParams, testing
from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.cuda.attention import expanded
from asyncengine.kernels.cuda.attention.context import ContextPlan
from asyncengine.kernels.cuda.ops import CudaOps
from asyncengine.runner.describe import describe_model
from asyncengine.runner.start.calibration import calibrate_device
from asyncengine.runner.state.kv_scales import calibrate_host
from asyncengine.runner.steps.model_runner import CpuModelRunner, load_model
from asyncengine.text.tokenizer import placeholder_tokenizer
from tests.amounts import sample_of
from tests.kernels.simulated_cuda import make_engine
from tests.models import tiny

GPU = torch.cuda.is_available()
SMALL: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 24, "num_kv_blocks": 24, "max_model_len": 64, "dtype": "float32",
    "kv_cache_dtype": "fp8", "step_timeout_s": 600.0,
}  # fmt: skip
PROMPTS = [[5 + i, *range(3, 2 + length)] for i, length in enumerate(sample_of((14, 29, 30), (14, 29)))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek-v3")
    tiny.build_model("deepseek-v3", num_hidden_layers=2).save_pretrained(path)
    placeholder_tokenizer(tiny.VOCAB_SIZE).backend.save(str(path / "tokenizer.json"))
    return path


def config_of(path: Path, **config: Any) -> EngineConfig:
    return EngineConfig.from_kwargs(str(path), {"device": "cpu", **SMALL, **config})


def outputs(make: Any, path: Path, *, alone: bool = False, rounds: int = 1, **config: Any) -> tuple[list[Any], Any]:
    """Greedy tokens, and two samples of the first prompt, whose blocks are copied."""
    sampled = SamplingParams(max_tokens=5, temperature=0.8, seed=3, n=2, ignore_eos=True)
    greedy = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    jobs = [(PROMPTS[0], sampled), *((prompt, greedy) for prompt in PROMPTS)]

    async def main() -> tuple[list[Any], Any]:
        async with make(str(path), **{**SMALL, **config}) as engine, testing.no_leaks(engine):
            for _ in range(rounds):
                if alone:
                    done = [await engine.generate(*job) for job in jobs]
                else:
                    done = await asyncio.gather(*(engine.generate(*job) for job in jobs))
            return [[one.token_ids for one in output.outputs] for output in done], engine.stats()

    return asyncio.run(main())


def on_cpu(path: str, **config: Any) -> AsyncEngine:
    return AsyncEngine.from_pretrained(path, device="cpu", progress=False, **config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_near_the_exact_ones(checkpoint: Path, dtype: str) -> None:
    made = []
    for kind in ("auto", "fp8"):
        driver = tiny.Driver(CpuModelRunner.load(config_of(checkpoint, dtype=dtype, kv_cache_dtype=kind)), native=True)
        driver.run([driver.add(PROMPTS[-1], 48)], 1, 48)
        made.append(torch.stack(driver.logits))
    error = float((made[1] - made[0]).norm() / made[0].norm())
    assert 1e-4 < error < 0.1, error


def test_outputs_do_not_depend_on_the_machinery(checkpoint: Path) -> None:
    expected, _ = outputs(on_cpu, checkpoint, alone=True)
    for config in (
        {"steps_in_flight": 1, "max_num_batched_tokens": 256}, {"prefill_chunk_size": 1}, {"prefill_chunk_size": 7},
        {"rounds": 2, "block_size": 32}, {"enable_prefix_caching": False, "cpu_threads": 1},
    ):  # fmt: skip
        assert outputs(on_cpu, checkpoint, **config)[0] == expected, config
    tokens, stats = outputs(on_cpu, checkpoint, num_kv_blocks=4)
    assert tokens == expected
    assert stats.num_preemptions > 0


@pytest.mark.exhaustive  # prompts that are expanded have the same tokens in make test
def test_the_cuda_path_has_the_tokens_of_the_cpu(checkpoint: Path) -> None:
    assert outputs(make_engine, checkpoint)[0] == outputs(on_cpu, checkpoint)[0]


def test_the_cuda_path_has_the_scales_of_the_cpu(checkpoint: Path) -> None:
    device, host = CudaOps(torch.device("cuda" if GPU else "cpu")), CpuOps(1)
    on_device, on_host = (load_model(config_of(checkpoint), ops) for ops in (device, host))
    scales = calibrate_host(on_host.model, on_host.config, on_host.dtype, on_host.max_model_len, host)
    assert scales.shape == (2, 2, 1)
    assert torch.equal(calibrate_device(on_device, device).cpu(), scales)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["fp8", "auto"])
def test_prompts_that_are_expanded_have_the_tokens_of_the_cpu(
    checkpoint: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that begin their text beside later ones and decodes, and over a prefix hit."""
    monkeypatch.setattr(expanded, "LEAST_TOKENS", 8)
    config = {"kv_cache_dtype": kind, "rounds": 2}
    assert outputs(make_engine, checkpoint, **config)[0] == outputs(on_cpu, checkpoint, **config)[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("least", [1, 3])
@pytest.mark.parametrize("kind", ["fp8", "auto"])
def test_contexts_that_are_expanded_have_the_tokens_of_the_cpu(
    checkpoint: Path, kind: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small chunks of a prompt one after another, over contexts of several parts and over a prefix hit."""
    monkeypatch.setattr(expanded, "LEAST_TOKENS", 4)
    monkeypatch.setattr(expanded, "choose_context", lambda *_: ContextPlan(least, 16, 6, 16, 4, 1))
    config = {"kv_cache_dtype": kind, "rounds": 2, "prefill_chunk_size": 5}
    assert outputs(make_engine, checkpoint, **config)[0] == outputs(on_cpu, checkpoint, **config)[0]


def test_the_same_memory_holds_more_tokens(checkpoint: Path) -> None:
    """Engine and description count the bytes of float8."""
    made, told = [], []
    for kind in ("auto", "fp8"):
        config = config_of(checkpoint, kv_cache_dtype=kind, num_kv_blocks=None, kv_cache_memory_bytes=1 << 16)
        runner = CpuModelRunner.load(config)
        assert sum(size for _, size in runner.kv_block_regions()) == runner.info.kv_bytes_per_block
        made.append(runner.info.num_kv_blocks)
        report = describe_model(config, "cpu")
        assert report.kv_bytes_per_token == runner.info.kv_bytes_per_block // runner.info.block_size
        told.append(report.kv_tokens)
    assert made[1] // 4 == made[0]
    assert told == [16 * blocks for blocks in made]
