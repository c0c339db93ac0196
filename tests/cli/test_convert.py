"""``asyncengine convert``: other programs read the directory that it writes, and compute the same with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from asyncengine.cli.main import main
from asyncengine.config import EngineConfig
from asyncengine.runner.convert import Bits
from asyncengine.runner.rounding import measure
from asyncengine.runner.steps.model_runner import CpuModelRunner
from tests.models import tiny

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
PROMPT = [5, 9, 3, 70]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense")
    tiny.build_model("llama", **SIZES).save_pretrained(path, max_shard_size="100KB")
    return path


def generated(path: Path, **settings: Any) -> list[int]:
    settings = {"num_kv_blocks": 16, "dtype": "float32", "cpu_threads": 2, "device": "cpu"} | settings
    driver = tiny.Driver(CpuModelRunner.load(EngineConfig.from_kwargs(str(path), settings)), native=True)
    sequence = driver.add(PROMPT, len(PROMPT) + 12)
    driver.run([sequence], 12, 64)
    return sequence.generated


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", ["int4", "int8", "fp8"])
def test_transformers_reads_the_directory(
    bits: Bits, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """down_proj has groups of another size than the other projections."""
    out = tmp_path / "out"
    assert main(["convert", str(dense), str(out), "--quantization", bits]) == 0
    told = capsys.readouterr().out
    assert "14 projections" in told
    projections = [line.split() for line in told.splitlines() if line.startswith("model.layers")]
    assert {(name.rpartition(".")[2], group) for name, group, *_ in projections if group == "32"} == (
        set() if bits == "fp8" else {("down_proj", "32")}
    )
    measured = measure(EngineConfig(model=str(dense), device="cpu"), bits, torch.device("cpu")).errors
    assert {name: error for name, *_, error in projections} == {k: f"{100 * v:.3f}%" for k, v in measured.items()}
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["ignore"] == ["lm_head", "model.embed_tokens"]
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert generated(out) == tiny.generate(model, PROMPT, 12)
    if bits != "fp8":
        assert generated(out) == generated(dense, quantization=bits), "as rounded at load"


def test_wrong_directories_are_refused(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["convert", str(dense), str(out), "--quantization", "int4"]) == 0
    assert main(["convert", str(dense), str(out), "--quantization", "int4"]) != 0
    assert "is there already" in capsys.readouterr().err
    assert main(["convert", str(out), str(tmp_path / "again"), "--quantization", "int4"]) != 0
    assert "quantised already, by compressed-tensors" in capsys.readouterr().err
    tiny.build_model("gpt2").save_pretrained(tmp_path / "gpt2")
    assert main(["convert", str(tmp_path / "gpt2"), str(tmp_path / "other"), "--quantization", "int8"]) != 0
    assert "transpose of a projection" in capsys.readouterr().err
