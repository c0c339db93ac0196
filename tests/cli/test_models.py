"""asyncengine models: the table of families, and what a directory needs, without a weight being read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Starcoder2Config, Starcoder2ForCausalLM

from asyncengine.cli.main import main
from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError
from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.models.registry import FAMILIES
from asyncengine.models.weights.checkpoint import Checkpoint
from asyncengine.runner.steps import model_runner
from tests.models import tiny

SHAPES = Path(__file__).resolve().parents[2] / "bench/shapes"
GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.build_model("llama").save_pretrained(path)
    return path


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["models", *map(str, arguments), "--json"]) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def test_every_causal_family_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    causal = {name for name in FAMILIES if name.endswith(("ForCausalLM", "LMHeadModel"))}
    assert {row.split()[0] for row in rows} == causal
    assert main(["models", "--json"]) == 0
    families = {family["architecture"]: family for family in json.loads(capsys.readouterr().out)}
    for row in rows:
        family = families[row.split()[0]]
        assert (row[header.index("fp8 weights") :].split()[0] == "yes") == family["fp8_weights"]
    assert {name for name in causal if families[name]["fp8_weights"]} == {
        name for name in causal if FAMILIES[name].quantizable
    }
    assert not families["Cohere2ForCausalLM"]["labels"]
    assert families["Gemma3ForCausalLM"]["labels"]
    assert families["Gemma3ForCausalLM"]["vectors"]


def test_no_weight_is_read(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "_tensor", None)
    values = report(capsys, model, "--device", "cpu")
    assert values["way"] == "native"
    assert values["has_weights"]
    assert values["num_parameters"] == tiny.build_model("llama").num_parameters()
    assert values["weight_bytes"] == 4 * values["num_parameters"]
    assert values["kv_bytes_per_token"] == 2 * 3 * 2 * 8 * 4


def test_memory_of_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    """An engine for the shape on an H200 with these settings had room for 893,456 tokens: commit f0f32e7."""
    shape = SHAPES / "llama-3.1-8b"
    values = report(capsys, shape, "--memory", int(139.8 * GIB), "--max-model-len", 1024)
    assert (values["dtype"], values["num_parameters"], values["has_weights"]) == ("bfloat16", 8_030_261_248, False)
    assert values["kv_bytes_per_token"] == 131_072
    assert abs(values["kv_tokens"] - 893_456) < 0.01 * 893_456
    assert values["sequences"] == 256
    longer = report(capsys, shape, "--memory", "80GiB")
    assert longer["context"] == 131_072
    assert longer["sequences"] == longer["kv_tokens"] // 131_072
    halves = report(capsys, shape, "--memory", "80GiB", "--quantization", "fp8", "--kv-cache-dtype", "fp8")
    assert halves["kv_bytes_per_token"] == 65_536
    assert 0.5 < halves["weight_bytes"] / longer["weight_bytes"] < 0.6
    assert report(capsys, shape, "--memory", "8GiB")["sequences"] == 0


def test_windows_and_blocks_count(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.build_model("mistral-window", max_position_embeddings=4096).save_pretrained(tmp_path)
    settings = ("--device", "cpu", "--num-kv-blocks", 64, "--prefill-chunk-size", 16, "--max-num-seqs", 32)
    assert report(capsys, tmp_path, *settings)["sequences"] == 64 // 4, "7 tokens, a chunk and two blocks"
    assert report(capsys, model, *settings)["sequences"] == 64 // 8, "128 tokens"


def test_the_text_says_the_same(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", str(model), "--memory", "1GiB"]) == 0
    out = capsys.readouterr().out
    assert f"{model}: native" in out
    assert "float32, on a GPU" in out
    assert "1 GiB of a GPU, about " in out


def test_a_model_is_described_whose_steps_the_machine_has_no_memory_for(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine refuses it with the same words. Fewer rows fit, and so may other machines."""
    monkeypatch.setattr(model_runner, "total_memory", lambda: 512 << 10)
    few = report(capsys, model, "--device", "cpu", "--max-num-seqs", 1)
    assert few["obstacle"] is None
    assert main(["models", str(model), "--device", "cpu", "--json"]) == 1
    many = json.loads(capsys.readouterr().out)
    assert many["num_parameters"] == few["num_parameters"]
    with pytest.raises(ConfigError) as refused:
        model_runner.load_model(EngineConfig.from_kwargs(str(model), {"device": "cpu"}), CpuOps(1))
    assert many["obstacle"] == str(refused.value)
    assert "lower max_num_seqs" in many["obstacle"]
    assert main(["models", str(model), "--device", "cpu"]) == 1
    assert f"does not load    {many['obstacle']}" in capsys.readouterr().out
    assert report(capsys, model, "--memory", "1GiB")["obstacle"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "tensor model.norm.weight is not in"),
        ({"model.norm.weight": torch.zeros(49)}, "tensor model.norm.weight in .*: expected shape"),
        ({"model.norm.weight": torch.zeros(48, dtype=torch.int32)}, "expected floats, found torch.int32"),
    ],
)
def test_models_that_cannot_run_say_why(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    tensors = load_file(model / "model.safetensors") | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "model.safetensors")
    assert main(["models", str(tmp_path), "--device", "cpu"]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(": refused")
    assert re.search(message, second)


def test_modules_of_transformers_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Starcoder2Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=200, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = Starcoder2ForCausalLM(config)
    model.save_pretrained(tmp_path)
    told = report(capsys, tmp_path, "--device", "cpu")
    assert (told["way"], told["architecture"]) == ("transformers", "Starcoder2ForCausalLM")
    assert "no native code" in told["reason"]
    assert told["num_parameters"] == model.num_parameters()
    assert told["weight_bytes"] == 4 * model.num_parameters()
    assert told["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert main(["models", str(tmp_path), "--device", "cpu", "--model-impl", "native"]) == 1
    assert "architecture ['Starcoder2ForCausalLM'] is not supported" in capsys.readouterr().out


def test_a_family_by_its_modules(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    native, modules = (
        report(capsys, model, "--device", "cpu", "--model-impl", impl) for impl in ("auto", "transformers")
    )
    assert (native["way"], modules["way"]) == ("native", "transformers")
    assert "model_impl=transformers" in modules["reason"]
    assert native["num_parameters"] == modules["num_parameters"]
    assert native["kv_bytes_per_token"] == modules["kv_bytes_per_token"]


def test_a_model_for_the_cpu_alone_is_refused_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.build_model("glm4-moe-lite", qk_rope_head_dim=6).save_pretrained(tmp_path)
    assert report(capsys, tmp_path, "--device", "cpu")["way"] == "native"
    assert main(["models", str(tmp_path), "--device", "cuda", "--memory", "80GiB"]) == 2
    assert "runs with device=cpu alone" in capsys.readouterr().err


@pytest.mark.parametrize("variant", ["mamba2", "falcon-h1"])
def test_states_and_cache_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str], variant: str) -> None:
    """A Mamba-2 keeps no keys and values: all sequences fit beside its states."""
    model = tiny.build_model(variant)
    model.save_pretrained(tmp_path)
    arguments = ("--device", "cpu", "--max-num-seqs", "3")
    whole, half = (report(capsys, tmp_path, *arguments, "--state-dtype", dtype) for dtype in ("float32", "bfloat16"))
    layers, channels, recurrence = model.config.num_hidden_layers, 96 + 2 * 2 * 10, 96 * 10
    assert whole["state_bytes_per_sequence"] == 4 * layers * (3 * channels + recurrence)
    assert half["state_bytes_per_sequence"] == layers * (4 * 3 * channels + 2 * recurrence)
    assert whole["kv_bytes_per_token"] == (0 if variant == "mamba2" else 2 * layers * 16 * 4)
    assert whole["sequences"] == 3


def test_other_architectures_and_formats_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((SHAPES / "gpt2/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["OtherForCausalLM"]}))
    assert main(["models", str(tmp_path)]) == 1
    assert "architecture ['OtherForCausalLM'] is not supported" in capsys.readouterr().out
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert main(["models", str(tmp_path)]) == 1
    assert "save_pretrained" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda"], "this machine has no GPU: say with --memory"),
        (["--quantization", "fp8", "--device", "cpu"], "quantization=fp8 needs a GPU"),
        (["--memory", "0"], "memory must be at least 1 byte"),
        (["--max-model-len", "1000"], "exceeds the model's context of 128"),
    ],
)
def test_wrong_settings(model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    if arguments == ["--device", "cuda"] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["models", str(model), *arguments]) == 2
    assert message in capsys.readouterr().err
