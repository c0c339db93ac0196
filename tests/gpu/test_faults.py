"""A GPU that fails or hangs kills the engine with a typed error, and never the program around it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import asyncio, sys, time
import torch
from asyncengine import AsyncEngine, EngineDeadError, SamplingParams
from tests.gpu.test_faults import FAULTS

async def main():
    config = dict(load_format="dummy", device="cuda", max_num_seqs=4, max_num_batched_tokens=32, num_kv_blocks=16,
                  max_model_len=96, step_timeout_s=1.0, enforce_eager=sys.argv[3] == "eager")
    async with AsyncEngine.from_pretrained(sys.argv[1], **config) as engine:
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        assert len((await engine.generate([1, 2, 3], params)).outputs[0].token_ids) == 60
        runner = engine._life.backend.keep_alive
        FAULTS[sys.argv[2]](runner.cuda_stream)
        outcomes = await asyncio.gather(*(engine.generate([i], params) for i in range(8)), return_exceptions=True)
        assert all(isinstance(o, EngineDeadError) for o in outcomes), outcomes
        assert engine.health == "dead"
        print("all failed:", outcomes[0])
        try:
            await engine.generate([1], params)
        except EngineDeadError:
            print("refused")

asyncio.run(main())
print("ends normally")
"""


def _hang(stream) -> None:
    import torch

    with torch.cuda.stream(stream):
        torch.cuda._sleep(12_000_000_000)  # some seconds, longer than a step may take


def _illegal_access(stream) -> None:
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def write_far_away(x):
        tl.store(x + (1 << 42), 1)

    with torch.cuda.stream(stream):
        write_far_away[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))


FAULTS = {"hang": _hang, "illegal": _illegal_access}


@pytest.mark.parametrize("mode", ["graphs", "eager"])
@pytest.mark.parametrize(("fault", "message"), [("hang", "did not finish"), ("illegal", "illegal memory access")])
def test_a_broken_gpu(tiny_llama, fault, message, mode, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), tiny_llama, fault, mode],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[1:] == ["refused", "ends normally"], done.stdout + done.stderr
    assert message in lines[0]
    assert done.returncode == 0, done.stderr
