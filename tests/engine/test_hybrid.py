"""Hybrid attention: outputs are those of an engine with room for all, whoever decodes on the host meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import asyncengine
from asyncengine import AsyncEngine, ConfigError, SamplingParams, testing
from asyncengine.api.stats import EngineStats
from tests.amounts import sample_of
from tests.models import tiny

from .test_host_tier import PRESSED, PROMPTS, ROOMY, answers

HYBRID: dict[str, Any] = PRESSED | {
    "hybrid_attention": "always", "hybrid_workers": 2, "hybrid_lanes": 2, "max_num_seqs": 12,
}  # fmt: skip
MODEL = str(asyncengine.bundled_model())


async def run(config: dict[str, Any]) -> tuple[list[Any], EngineStats]:
    async with AsyncEngine.from_pretrained(MODEL, device="cpu", progress=False, **config) as engine:
        async with testing.no_leaks(engine):
            outputs = await answers(engine)
        return outputs, engine.stats()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8"},
        {"hybrid_lanes": 5, "hybrid_workers": 1, "steps_in_flight": 1},
        {"prefill_chunk_size": None},
        {"step_driver": "loop"},
    ],
    ids=lambda config: ",".join(f"{key}={value}" for key, value in config.items()) or "default",
)
def test_outputs_are_those_of_an_engine_with_room(config: dict[str, Any]) -> None:
    of_steps = {key: value for key, value in config.items() if not key.startswith("hybrid")}
    expected, _ = asyncio.run(run(ROOMY | of_steps))
    got, stats = asyncio.run(run(HYBRID | config))
    assert got == expected
    assert stats.moved_to_host > 0
    assert stats.host_row_tokens > 0
    assert stats.failed_host_rows == 0
    assert stats.num_host_rows == 0


KINDS = ["gpt2", "llama-odd-heads-biased", "mistral-window", "qwen3-window-biased"]
KINDS += ["gemma2", "gemma3", "phi3", "smollm3", "ministral3", "olmo2", "exaone4", "cohere2", "glm4"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("variant", KINDS)
def test_every_kind_of_model(variant: str, tmp_path: Path) -> None:
    tiny.build_model(variant).save_pretrained(tmp_path)
    rng = random.Random(variant)
    prompts = [[rng.randrange(tiny.VOCAB_SIZE) for _ in range(rng.randrange(20, 60))] for _ in range(14)]
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)

    async def main(config: dict[str, Any]) -> tuple[list[Any], EngineStats]:
        async with AsyncEngine.from_pretrained(
            str(tmp_path), tokenizer="none", device="cpu", progress=False, **config | {"max_model_len": 128}
        ) as engine:
            async with testing.no_leaks(engine):
                outputs = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
            return [output.outputs[0].token_ids for output in outputs], engine.stats()

    expected, _ = asyncio.run(main(ROOMY))
    got, stats = asyncio.run(main(HYBRID))
    assert got == expected
    assert stats.host_row_tokens > 0


def test_cancelled_requests_leave_nothing_wherever_they_are() -> None:
    async def main() -> int:
        params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True, n=2)
        async with AsyncEngine.from_pretrained(MODEL, device="cpu", progress=False, **HYBRID) as engine:
            expected = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=60, temperature=0.0))
            async with testing.no_leaks(engine):
                for delay in range(25):
                    tasks = [asyncio.ensure_future(engine.generate(prompt, params)) for prompt in PROMPTS * 2]
                    await asyncio.sleep(delay * 6e-3)
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
            again = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=60, temperature=0.0))
            assert again.outputs[0].token_ids == expected.outputs[0].token_ids
            return engine.stats().moved_to_host

    assert asyncio.run(main()) > 0


STOPPED = """
import asyncio, functools
from asyncengine import AsyncEngine, SamplingParams
from asyncengine.runner import loop_config

loop_config.HybridConfig = functools.partial(loop_config.HybridConfig, job_timeout_ns=2_000_000_000)

async def main():
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    async with AsyncEngine.from_pretrained(
        MODEL, tokenizer="none", load_format="dummy", device="cpu", progress=False, max_num_seqs=8, max_model_len=512,
        num_kv_blocks=70, host_kv_memory_bytes=400 << 20, hybrid_attention="always", hybrid_workers=1,
    ) as engine:
        failed = 0
        while True:
            jobs = [engine.generate([token] * 400, params) for token in range(3, 11)]
            outputs = await asyncio.gather(*jobs, return_exceptions=True)
            failed += sum(isinstance(output, Exception) for output in outputs)
            stats = engine.stats()
            print(failed, stats.failed_host_rows, stats.host_row_tokens, flush=True)

asyncio.run(main())
"""
WIDE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 64, "vocab_size": 256,
    "max_position_embeddings": 512, "eos_token_id": 1, "torch_dtype": "float32",
}  # fmt: skip
"""A block has a megabyte: one worker has jobs that wait at nearly any moment."""


def test_time_in_which_the_process_is_stopped_fails_nobody(tmp_path: Path) -> None:
    """The process is stopped as by SIGSTOP, or on a laptop that is closed: longer than attention of a row may take."""
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    program = f"MODEL = {str(tmp_path)!r}" + STOPPED
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:

            def finish_round() -> list[int]:
                assert process.stdout is not None
                return [int(word) for word in process.stdout.readline().split()]

            *_, tokens = finish_round()
            for _ in range(sample_of(2, 1)):
                time.sleep(1)  # in the midst of a round
                process.send_signal(signal.SIGSTOP)
                time.sleep(2.5)
                process.send_signal(signal.SIGCONT)
                failed, failed_host_rows, after = finish_round()
                assert (failed, failed_host_rows) == (0, 0)
            assert after > tokens > 0
        finally:
            process.kill()


def test_switches_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match="hybrid_attention needs host_kv_memory_bytes"):
        AsyncEngine.from_pretrained("x", hybrid_attention="auto")
    with pytest.raises(ConfigError, match="hybrid_attention must be one of off, auto, always"):
        AsyncEngine.from_pretrained("x", hybrid_attention="on")
    with pytest.raises(ConfigError, match=r"must be at least max_num_seqs \(8\) and hybrid_lanes \(8\) together"):
        AsyncEngine.from_pretrained(
            "x", hybrid_attention="auto", host_kv_memory_bytes=1, max_num_seqs=8, max_num_batched_tokens=15
        )
    with pytest.raises(ConfigError, match="hybrid_form=both needs a GPU"):
        AsyncEngine.from_pretrained("x", hybrid_form="both", device="cpu")
    for lanes in (0, 65):
        with pytest.raises(ConfigError, match=r"hybrid_lanes must be in \[1, 64\]"):
            AsyncEngine.from_pretrained("x", hybrid_lanes=lanes)
    with pytest.raises(ConfigError, match="hybrid_workers must be at least 1"):
        AsyncEngine.from_pretrained("x", hybrid_workers=0)
