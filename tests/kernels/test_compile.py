"""The kernels of a step compile for Hopper, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def compiled_for(directory: Path, *quantization: str) -> list[str]:
    """The kernels of Qwen3, which has the most of them. Its real heads and widths, one layer, few words."""
    config = json.loads((ROOT / "bench/shapes/qwen3-0.6b/config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("layer_types", "max_window_layers")}
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "vocab_size": 32000}))
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for_hopper", str(directory), "bfloat16", *quantization],
        cwd=ROOT, env=environment | {"TRITON_CACHE_DIR": str(directory / "cache"), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split()[0] for line in done.stdout.splitlines()]


def test_every_kernel_of_a_step_compiles(tmp_path):
    compiled = compiled_for(tmp_path)
    assert compiled.count("_attention_kernel") == 2  # decode and prefill
    assert compiled.count("_tiles_kernel") == 2  # greedy and full sampling
    for name in (
        "_fetch", "_ingest", "_build_kernel", "_norm_kernel", "_rotary_store_kernel", "_copy_blocks", "_collect_kernel",
        "finish_kernel",
    ):  # fmt: skip
        assert name in compiled


def test_every_kernel_of_a_step_with_float8_weights_compiles(tmp_path):
    compiled = compiled_for(tmp_path, "fp8")
    assert compiled.count("_quantize_kernel") == 3  # after a norm, and of the widths of attention and of the MLP
    assert compiled.count("_vector_kernel") == 4
    assert compiled.count("_skinny_kernel") == 4
    assert compiled.count("_tiled_kernel") == 4
    assert "_norm_kernel" in compiled, "the head's"
