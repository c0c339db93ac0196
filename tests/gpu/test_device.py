"""An engine on a GPU by its number: nothing of it touches another one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncengine import AsyncEngine, ConfigError, DataParallelEngine, SamplingParams
from asyncengine.config import EngineConfig
from asyncengine.runner.backend import load_backend

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {
    "load_format": "dummy",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_kv_blocks": 16,
    "max_model_len": 64,
}

PROGRAM = """
import asyncio, sys
import torch
from asyncengine import AsyncEngine, SamplingParams

async def main():
    model, device, eager = sys.argv[1], sys.argv[2], sys.argv[3] == "eager"
    config = dict(load_format="dummy", device=device, dtype="float32", max_num_seqs=4, max_num_batched_tokens=24,
                  num_kv_blocks=5, max_model_len=48, host_kv_memory_bytes=1 << 22, hybrid_attention="always",
                  enforce_eager=eager)
    async with AsyncEngine.from_pretrained(model, progress=False, **config) as engine:
        assert engine.model_info.device_index == int(device[-1])
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        outputs = await asyncio.gather(*(engine.generate([3 + i] * (1 + 5 * i), params) for i in range(6)))
        print([list(output.token_ids) for output in outputs])

asyncio.run(main())
assert torch.cuda.current_device() == 0
if sys.argv[2] != "cuda:0":
    assert not torch._C._cuda_hasPrimaryContext(0), "the first GPU was used"
"""


def run(model: str, device: str, way: str, folder: Path) -> str:
    (folder / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(folder / "program.py"), model, device, way],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_a_number_that_is_not_there_is_refused(tiny_llama):
    with pytest.raises(ConfigError, match="device=cuda:99, but torch sees"):
        load_backend(EngineConfig(model=tiny_llama, device="cuda:99", **SMALL), progress=False)


def test_the_first_gpu_has_a_number_too(tiny_llama):
    backend = load_backend(EngineConfig(model=tiny_llama, device="cuda:0", **SMALL), progress=False)
    assert backend.model_info.device_label == f"{torch.cuda.get_device_name(0)} (cuda:0)"
    assert backend.step_loop.stop(5.0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("way", ["graphs", "eager"])
def test_the_second_gpu_serves_alone(tiny_llama, tmp_path, way):
    """The second GPU gives the tokens of the first, whose memory is not touched."""
    assert run(tiny_llama, "cuda:1", way, tmp_path) == run(tiny_llama, "cuda:0", way, tmp_path)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_engines_share_requests(tiny_llama):
    """An engine on each GPU, behind one: both serve, and each gives the tokens of an engine alone."""
    prompts = [[3 + i] * (1 + i % 7) for i in range(24)]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)

    async def tokens(size: int) -> tuple[list[Any], AsyncEngine]:
        config = SMALL | {"data_parallel_size": size, "dtype": "float32"}
        async with AsyncEngine.from_pretrained(tiny_llama, progress=False, **config) as engine:
            outputs = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
            assert all(stats.generation_tokens > 0 for stats in engine.engine_stats())
            return [output.token_ids for output in outputs], engine

    alone, _ = asyncio.run(tokens(1))
    together, engine = asyncio.run(tokens(2))
    assert isinstance(engine, DataParallelEngine)
    assert together == alone
    assert torch.cuda.current_device() == 0
