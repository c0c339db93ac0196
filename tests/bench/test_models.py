"""bench/models.py: what it counts of each shape, and its table of a small one on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gpu_common
import models
import pytest
from gpu_common import decode_bytes, read_model, weight_bytes

from asyncengine.runner.state import memory
from tests.models import tiny

WITH_STATES = (
    "lfm2", "lfm2-moe", "mamba2", "bamba", "falcon-h1", "granite-hybrid", "nemotron-h", "nemotron-h-experts",
    "qwen3-next", "qwen3.5", "qwen3.5-moe",
)  # fmt: skip
GEMMA4 = ("gemma4", "gemma4-shared", "gemma4-experts")


@pytest.mark.parametrize("variant", ["gemma3", *GEMMA4, "qwen3-moe", "qwen3-moe-window-biased", "glm", *WITH_STATES])
def test_bytes_of_a_step_are_those_of_the_matrices(tmp_path: Path, variant: str) -> None:
    model = tiny.build_model(variant)
    model.save_pretrained(tmp_path)
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)
    c = read_model(str(tmp_path))
    if c.layer_inputs is not None:
        matrices -= c.layer_inputs.vocab_size * c.layer_inputs.size * c.num_layers
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        matrices -= c.vocab_size * c.hidden_size
    many = 1 << 20
    assert weight_bytes(c, rows=many) == 2 * matrices
    if c.mixture is not None:
        assert weight_bytes(c, rows=1) < weight_bytes(c, rows=2) < weight_bytes(c, rows=many)
    assert decode_bytes(c, 1, 0) == weight_bytes(c, rows=1) + 2 * memory.state_bytes(c)


@pytest.mark.parametrize("variant", ["qwen3-moe", "gemma4-experts"])
def test_the_table_of_a_small_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variant: str
) -> None:
    tiny.build_model(variant, max_position_embeddings=256).save_pretrained(tmp_path)
    record = tmp_path / "models.json"
    arguments = ["--device", "cpu", "--batches", "1,2", "--tokens", "2,4", "--repeats", "1", "--json", str(record)]
    monkeypatch.setattr(sys, "argv", ["models.py", "--model", str(tmp_path), *arguments])
    monkeypatch.setitem(gpu_common.COPIED_BYTES, "cpu", 1 << 20)
    models.main()
    heading, header, row = capsys.readouterr().out.splitlines()
    assert heading.startswith("floor: bytes over ")
    assert header.split() == ["1", "rows", "2", "rows"]
    assert row.startswith(str(tmp_path))
    saved = json.loads(record.read_text())
    assert set(saved["results"][str(tmp_path)]["ms"]) == {"1", "2"}
    assert {figure["unit"] for figure in saved["figures"]} == {"GB/s", "ms/step", "x"}
