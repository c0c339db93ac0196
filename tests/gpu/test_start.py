"""A first start: kernels compiled side by side, plans measured for what no table knows."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncengine.config import EngineConfig
from asyncengine.kernels.cuda.linear.tables import PlanTable, cache_path
from asyncengine.kernels.cuda.trials import examine
from asyncengine.runner.backend import load_backend
from asyncengine.runner.start import prepare
from tests.models import tiny

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import asyncio, sys, threading
import triton
from asyncengine import AsyncEngine, SamplingParams
from asyncengine.runner.start import prepare

prepare._BUDGET_S = 1e9  # the second start would go on where the first ended
compiled = []
triton.knobs.compilation.listener = lambda src, cache_hit, **_: compiled.append(
    (threading.current_thread().name.partition("_")[0], src.name, cache_hit))

async def main():
    config = dict(load_format="dummy", device="cuda", dtype=sys.argv[2], max_num_seqs=20, max_num_batched_tokens=700,
                  max_model_len=96, enforce_eager="eager" in sys.argv, compile_processes="processes" in sys.argv)
    async with AsyncEngine.from_pretrained(sys.argv[1], **config) as engine:
        ways = [dict(temperature=0), dict(temperature=1, top_k=7, top_p=0.9, seed=3)]
        jobs = [engine.generate([i] * (1 + 3 * i), SamplingParams(max_tokens=8, ignore_eos=True, **ways[i % 2]))
                for i in range(20)]
        print(sum(len(s.token_ids) for output in await asyncio.gather(*jobs) for s in output.outputs), "tokens")
    print(len(compiled), "kernels", sum(hit for *_, hit in compiled), "cached")
    print("late:", *(name for thread, name, _ in compiled if thread != "compile" and name != "_increment"))

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "arguments", [["float32"], ["bfloat16"], ["bfloat16", "eager"], ["bfloat16", "processes"]], ids=" ".join
)
def test_a_cold_start_compiles_all_kernels_beforehand(tiny_llama: str, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"), "ASYNCENGINE_CACHE": str(tmp_path / "plans"),
    }  # fmt: skip

    def start() -> list[str]:
        done = subprocess.run(
            [sys.executable, str(tmp_path / "program.py"), tiny_llama, *arguments],
            env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()

    tokens, kernels, late = start()
    assert tokens == "160 tokens"
    count, _, cached, _ = kernels.split()
    assert int(count) > 10
    if "processes" in arguments:
        assert int(cached) < int(count), "none was there before one was missing"
    else:
        assert cached == "0"
    probe = " _tma_kernel" if examine(torch.device("cuda", 0)).tma else ""
    assert late == "late:" + probe
    tokens_again, kernels, late = start()
    assert tokens_again == tokens
    again, _, cached, _ = kernels.split()
    assert 10 < int(again) <= int(count)  # with plans that the first start measured it needs fewer
    assert cached == again
    assert late == "late:" + probe


@pytest.fixture
def unknown_model(tmp_path: Path) -> str:
    config = {
        "architectures": ["LlamaForCausalLM"], **tiny.DECODER, "hidden_size": 1280, "intermediate_size": 2560,
        "num_hidden_layers": 1, "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 64,
        "vocab_size": 9600, "eos_token_id": None,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_a_first_start_measures_what_no_table_knows(
    unknown_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ASYNCENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prepare, "_BUDGET_S", 1e9)
    caplog.set_level(logging.INFO)
    path = cache_path(torch.cuda.get_device_name())

    def start(*, tune_linear: bool) -> list[str]:
        caplog.clear()
        config = EngineConfig(
            model=unknown_model, load_format="dummy", device="cuda", dtype="bfloat16", max_num_seqs=8,
            max_num_batched_tokens=16, num_kv_blocks=64, tune_linear=tune_linear,
        )  # fmt: skip
        backend = load_backend(config, progress=False)
        assert backend.step_loop.stop(5.0)
        return [r.getMessage() for r in caplog.records if "measured plans" in r.getMessage()]

    assert start(tune_linear=False) == []
    assert not path.exists()
    (message,) = start(tune_linear=True)
    # 4 projections of 1, 8 and 16 rows, the head of 1, 8 and 16 samples, and of 8 where it may leave ranks.
    count = 15 + examine(torch.device("cuda", 0)).tma
    assert f"measured plans for {count} of {count} kinds" in message
    measured = PlanTable.from_json(path.read_text())
    assert len(measured) == count
    assert any(plan.kind != "cublas" for _, plan in measured.items())
    assert start(tune_linear=True) == []
