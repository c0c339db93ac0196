"""The GPU's memory: how much of it is taken, what happens when it does not do, and that nobody strays in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncengine import ConfigError
from asyncengine.config import EngineConfig
from asyncengine.runner.backend import load_backend

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"load_format": "dummy", "device": "cuda", "max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.mark.alone
def test_the_engine_stays_within_its_share(tiny_llama):
    """All of the rest goes to the KV cache, but for what its sequences can use."""
    torch.cuda.empty_cache()
    used_by_others = torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]
    total = torch.cuda.mem_get_info()[1]
    share = used_by_others / total + 0.02
    config = EngineConfig(model=tiny_llama, **{**SMALL, "max_num_seqs": 4096, "max_num_batched_tokens": 4096},
                          gpu_memory_utilization=share, enforce_eager=True)  # fmt: skip
    backend = load_backend(config, progress=False)
    info, used = backend.model_info, total - torch.cuda.mem_get_info()[0]
    assert used <= share * total
    blocks_for_all = 4096 * -(-info.max_model_len // config.block_size)
    assert info.num_kv_blocks == blocks_for_all or used > (share - 0.01) * total
    assert backend.step_loop.stop(5.0)


@pytest.mark.parametrize(
    ("config", "advice"),
    [
        ({"num_kv_blocks": 1 << 30}, r"num_kv_blocks \(1,073,741,824\) takes"),
        ({"gpu_memory_utilization": 1e-6, "max_model_len": 96}, "kv_cache_memory_bytes"),
    ],
    ids=["too many blocks", "too small a share"],
)
def test_too_little_memory_is_said_at_start(tiny_llama, config, advice):
    with pytest.raises(ConfigError, match=advice):
        load_backend(EngineConfig(model=tiny_llama, **SMALL, **config), progress=False)


PROGRAM = """
import asyncio, sys
from asyncengine import AsyncEngine, SamplingParams

async def main():
    config = dict(load_format="dummy", device="cuda", max_num_seqs=4, max_num_batched_tokens=24, num_kv_blocks=5,
                  max_model_len=48, dtype=sys.argv[2], compile_processes=False)  # which would be checked too
    async with AsyncEngine.from_pretrained(sys.argv[1], **config) as engine:
        ways = [dict(temperature=0), dict(temperature=1, top_k=7, top_p=0.9, seed=3), dict(temperature=1, seed=4, n=2)]
        jobs = [engine.generate([i] * (1 + 5 * i), SamplingParams(max_tokens=12, ignore_eos=True, **ways[i % 3]))
                for i in range(6)]
        print(sum(len(s.token_ids) for output in await asyncio.gather(*jobs) for s in output.outputs), "tokens")

asyncio.run(main())
"""


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memcheck(tiny_llama, dtype, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9",
         sys.executable, str(tmp_path / "program.py"), tiny_llama, dtype],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTORCH_NO_CUDA_MEMORY_CACHING": "0"},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout
    assert "96 tokens" in done.stdout
