"""Quantised checkpoints: their weights and tokens are those of the dequantised checkpoint, and errors name the rest."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError, ModelError, UnsupportedModelError, WeightMismatchError
from asyncengine.kernels.cpu.reference import ReferenceOps
from asyncengine.models.config import RawConfig
from asyncengine.models.weights.checkpoint import Checkpoint
from asyncengine.models.weights.formats.at_load import GroupedAtLoad, at_load
from asyncengine.models.weights.formats.choose import choose_format
from asyncengine.models.weights.formats.packed import to_dense
from asyncengine.models.weights.shard import WHOLE, Shard
from asyncengine.models.weights.source import WeightSource
from asyncengine.runner.describe import describe_model
from asyncengine.runner.steps.model_runner import CpuModelRunner
from tests.models import tiny
from tests.models.quantised import PACKINGS, is_packed, quantise

PROMPT = [5, 9, 3, 70]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for name, changes in (("llama", {}), ("qwen3-moe", {"moe_intermediate_size": 64})):
        paths[name] = tmp_path_factory.mktemp(name)
        tiny.build_model(name, **SIZES, **changes).save_pretrained(paths[name])
    return paths


@pytest.fixture
def pair(dense: dict[str, Path], tmp_path: Path) -> Any:
    def make(kind: str, model: str = "llama") -> tuple[Path, Path]:
        quantise(dense[model], tmp_path / "packed", tmp_path / "dense", PACKINGS[kind])
        return tmp_path / "packed", tmp_path / "dense"

    return make


def generate(path: Path, count: int = 12) -> list[int]:
    config = EngineConfig.from_kwargs(str(path), {"num_kv_blocks": 16, "dtype": "float32", "cpu_threads": 2})
    driver = tiny.Driver(CpuModelRunner.load(config), native=True)
    sequence = driver.add(PROMPT, len(PROMPT) + count)
    driver.run([sequence], count, 64)
    return sequence.generated


def source_of(path: Path, shard: Shard | None = None) -> WeightSource:
    raw = RawConfig.load(path)
    return WeightSource(Checkpoint(path, torch.float32), choose_format("none", raw), shard)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", PACKINGS)
def test_tokens_are_those_of_the_dequantised_weights(pair: Any, kind: str) -> None:
    packed, dense = pair(kind)
    source = source_of(packed)
    for name, expected in load_file(dense / "model.safetensors").items():
        if is_packed(name):
            module = name.removesuffix(".weight")
            made = to_dense(source.weight(module, *expected.shape), torch.float32)
            assert torch.allclose(made, expected, rtol=1e-6, atol=1e-7)
    assert generate(packed) == generate(dense)


@pytest.mark.parametrize("kind", ["gptq act-order", "packed int4", "fp8"])
def test_experts(pair: Any, kind: str) -> None:
    packed, dense = pair(kind, "qwen3-moe")
    assert generate(packed) == generate(dense)


def edit(path: Path, settings: dict[str, Any] | None = None, **tensors: Any) -> None:
    """Change settings of quantization_config, and tensors by the ends of their names in the first layer's up_proj."""
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= settings or {}
    (path / "config.json").write_text(json.dumps(config))
    stored = load_file(path / "model.safetensors")
    for end, change in tensors.items():
        name = f"model.layers.0.mlp.up_proj.{end}"
        stored[name] = change(stored[name]).contiguous()
    save_file(stored, path / "model.safetensors", {"format": "pt"})


def nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[0] = torch.nan
    return tensor


def test_parts_of_ranks(pair: Any) -> None:
    packed, _ = pair("packed int4 with zero points")
    module = "model.layers.0.mlp.down_proj"
    whole = to_dense(source_of(packed).weight(module, 64, 128), torch.float32)
    for cut, axis in (("rows", 0), ("columns", 1)):
        parts = [
            to_dense(source_of(packed, Shard(rank, 2)).weight(module, 64, 128, cut=cut), torch.float32)
            for rank in range(2)
        ]
        assert torch.equal(torch.cat(parts, axis), whole)
    with pytest.raises(ModelError, match="cannot be cut"):
        source_of(packed, Shard(0, 8)).weight(module, 64, 128, cut="columns")


def test_an_order_of_columns_is_not_cut(pair: Any) -> None:
    packed, _ = pair("gptq act-order")
    with pytest.raises(UnsupportedModelError, match="in an order cannot be cut for 2 ranks"):
        source_of(packed, Shard(0, 2)).weight("model.layers.0.mlp.down_proj", 64, 128, cut="columns")


def test_modules_that_are_left_out_and_settings_of_modules(pair: Any, dense: dict[str, Path]) -> None:
    """A module of the ignore list is dense, and one that "dynamic" names has bits of its own."""
    packed, floats = pair("gptq")
    eight, expected = PACKINGS["gptq 8 bits v2"].pack(torch.randn(128, 64))
    stored = load_file(packed / "model.safetensors")
    stored = {name: t for name, t in stored.items() if not name.startswith("model.layers.1.mlp.up_proj")}
    original = load_file(dense["llama"] / "model.safetensors")
    for name in ("self_attn.k_proj", "mlp.gate_proj"):
        for key in [key for key in stored if key.startswith(f"model.layers.1.{name}")]:
            del stored[key]
        stored[f"model.layers.1.{name}.weight"] = original[f"model.layers.1.{name}.weight"]
    one = 0x01010101
    eight["qzeros"] = eight["qzeros"] - one
    stored |= {f"model.layers.1.mlp.up_proj.{key}": value.contiguous() for key, value in eight.items()}
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    dynamic = {"-:.*layers\\.1\\.self_attn\\.k_proj": {}, "+:.*layers\\.1\\.mlp\\.up.*": {"bits": 8, "sym": False}}
    edit(packed, {"dynamic": dynamic})
    made = to_dense(source_of(packed).weight("model.layers.1.mlp.up_proj", 128, 64), torch.float32)
    assert torch.allclose(made, expected, rtol=1e-6, atol=1e-7)
    changed = load_file(floats / "model.safetensors") | {"model.layers.1.mlp.up_proj.weight": expected}
    for name in ("self_attn.k_proj", "mlp.gate_proj"):
        changed[f"model.layers.1.{name}.weight"] = original[f"model.layers.1.{name}.weight"]
    save_file(changed, floats / "model.safetensors", {"format": "pt"})
    assert generate(packed) == generate(floats)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("awq", {"quant_method": "hqq"}, "quant_method = 'hqq'"),
        ("awq", {"quant_method": 5}, "'quant_method' must be str"),
        ("awq", {"bits": 3}, "bits = 3"),
        ("awq", {"version": "gemv"}, "version = 'gemv'"),
        ("awq", {"brand_new": 1}, "the key 'brand_new' = 1"),
        ("awq", {"group_size": 48}, "group_size = 48"),
        ("awq", {"group_size": 64}, "expected shape"),
        ("awq", {"modules_to_not_convert": [7]}, "modules_to_not_convert"),
        ("gptq", {"bits": 2}, "bits = 2"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ("gptq", {"dynamic": {"(a+)+$": {}}}, "the expression"),
        ("gptq", {"dynamic": {"[": {}}}, "no regular expression"),
        ("gptq", {"dynamic": {".*": {"bits": 4, "other": 1}}}, "the key 'other'"),
        ("packed int4", {"format": "marlin-24"}, "format = 'marlin-24'"),
        ("packed int4", {"sparsity_config": {"format": "dense"}}, "sparsity_config"),
        ("packed int4", {"ignore": ["re:(.*)*x"]}, "the expression"),
        ("packed int4", {"config_groups": {"a": 3}}, "a' = 3"),
        ("fp8", {"fmt": "e5m2"}, "fmt = 'e5m2'"),
        ("fp8", {"weight_block_size": [128]}, "weight_block_size"),
        ("fp8", {"weight_block_size": [128, 128]}, "expected shape"),
        ("nf4", {"load_in_8bit": True}, "load_in_4bit"),
        ("nf4", {"bnb_4bit_quant_type": "fp4"}, "bitsandbytes__fp4"),
    ],
)  # fmt: skip
def test_settings_that_are_not_known_are_refused(pair: Any, kind: str, settings: Any, message: str) -> None:
    packed, _ = pair(kind)
    edit(packed, settings)
    with pytest.raises(ModelError, match=message):
        generate(packed, 1)


@pytest.mark.parametrize(
    ("kind", "tensors", "message"),
    [
        ("awq", {"scales": nan}, "up_proj.scales holds a scale"),
        ("awq", {"qweight": lambda t: t[:-1]}, "up_proj.qweight in .*expected shape"),
        ("awq", {"qzeros": lambda t: t.float()}, "up_proj.qzeros in .*expected torch.int32"),
        ("gptq", {"g_idx": lambda t: t + 1}, "up_proj.g_idx names groups"),
        ("gptq", {"g_idx": torch.zeros_like}, "up_proj.g_idx has groups of other sizes"),
        ("packed int4", {"weight_shape": lambda t: t + 2}, "up_proj: weight_shape says"),
        ("packed int4", {"weight_scale": lambda t: t[:, :1]}, "up_proj.weight_scale in .*expected shape"),
        ("nvfp4", {"weight_global_scale": torch.zeros_like}, "up_proj.weight_global_scale holds a scale"),
        ("mxfp4", {"weight_scale": lambda t: torch.full_like(t, 255)}, "up_proj: weight_scale holds 255"),
        ("fp8", {"weight_scale_inv": nan}, "up_proj.weight_scale_inv holds a scale"),
        ("nf4", {"weight.quant_state.bitsandbytes__nf4": lambda t: t[:-3]}, "bitsandbytes__nf4 has no state"),
        ("nf4", {"weight.absmax": nan}, "absmax holds a scale"),
        ("bitsandbytes int8", {"SCB": lambda t: t[:3]}, "SCB in .*expected shape"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_name_themselves(pair: Any, kind: str, tensors: Any, message: str) -> None:
    packed, _ = pair(kind)
    edit(packed, None, **tensors)
    with pytest.raises(WeightMismatchError, match=message):
        source_of(packed).weight("model.layers.0.mlp.up_proj", 128, 64)


def test_a_quantised_checkpoint_is_not_quantised_again(pair: Any) -> None:
    with pytest.raises(ConfigError, match="quantised already, by gptq"):
        choose_format("fp8", RawConfig.load(pair("gptq")[0]))


def test_headers_tell_the_memory(pair: Any) -> None:
    """On the device "meta" each weight has the shapes that it has in memory."""
    packed, _ = pair("gptq act-order")
    raw, meta = RawConfig.load(packed), torch.device("meta")
    for device in (meta, torch.device("cpu")):
        tensors = Checkpoint(packed, torch.float32, device=device)
        made = choose_format("none", raw).weight(
            tensors, "model.layers.0.mlp.up_proj", (128, 64), WHOLE, transposed=False
        )
        assert tensors.owned_bytes == made.nbytes == 128 * 32 + 2 * 128 * 2 * 4 + 64 * 4
        assert tensors.num_parameters - 128 * 64 < 300  # zero points, scales and the groups of columns


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_dense_checkpoint_is_quantised_when_it_is_loaded(
    dense: dict[str, Path], kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Each layer's error is told, and tokens are those of the rounded weights."""
    caplog.set_level(logging.INFO, "asyncengine")
    config = EngineConfig.from_kwargs(
        str(dense["llama"]), {"num_kv_blocks": 16, "dtype": "float32", "cpu_threads": 2, "quantization": kind}
    )
    runner = CpuModelRunner.load(config)
    told = [record.getMessage() for record in caplog.records if "relative error" in record.getMessage()]
    assert [line.split()[0] for line in told] == ["model.layers.0", "model.layers.1"]
    form = at_load(kind)
    tensors = Checkpoint(dense["llama"], torch.float32)
    packed = form.weight(tensors, "model.layers.0.mlp.up_proj", (128, 64), WHOLE, transposed=False)
    assert tensors.owned_bytes == packed.nbytes
    assert isinstance(form, GroupedAtLoad)
    [error] = form.errors().values()
    assert 0.001 < error < (0.01 if kind == "int8" else 0.12)
    driver = tiny.Driver(runner, native=True)
    sequence = driver.add(PROMPT, 16)
    driver.run([sequence], 12, 64)
    by_torch = tiny.Driver(CpuModelRunner.load(config, ops=ReferenceOps()))
    other = by_torch.add(PROMPT, 16)
    by_torch.run([other], 12, 64)
    assert sequence.generated == other.generated


def test_models_says_how_weights_lie(pair: Any) -> None:
    packed, _ = pair("gptq")
    config = EngineConfig.from_kwargs(str(packed), {"device": "cpu"})
    told = describe_model(config, "cpu", 1 << 30)
    assert told.weight_formats == ("int4 in groups of 32 columns, decoded by native kernels",)
    assert told.bits_per_weight is not None
    assert 4 < told.bits_per_weight < 16
    assert describe_model(replace(config, device="cuda"), "cuda", 1 << 40).weight_formats == (
        "int4 in groups of 32 columns, decoded by a kernel up to 256 rows and unpacked beyond",
    )


@pytest.mark.parametrize("kind", ["float8 by channel", "float8 by tensor"])
def test_float8_by_rows_takes_the_kernels_that_round_inputs(pair: Any, kind: str) -> None:
    """On a GPU that has them; parts of ranks have the scales of their rows."""
    packed, dense = pair(kind)
    raw, module = RawConfig.load(packed), "model.layers.0.mlp.down_proj"
    expected = load_file(dense / "model.safetensors")[f"{module}.weight"]
    for cut, axis in (("rows", 0), ("columns", 1)):
        form = choose_format("none", raw, rounds_inputs=True)
        parts = [
            WeightSource(Checkpoint(packed, torch.float32), form, Shard(rank, 2)).weight(module, 64, 128, cut=cut)
            for rank in range(2)
        ]
        assert {part.format for part in parts} == {"float8"}
        assert torch.equal(torch.cat([to_dense(part, torch.float32) for part in parts], axis), expected)
