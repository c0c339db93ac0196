"""GGUF files: types, and models beside checkpoints of the same numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

from asyncengine._core import CpuKernels
from asyncengine.config import EngineConfig
from asyncengine.kernels.blocks import FLOATS, SIZES, BlockType, dequantize
from asyncengine.kernels.grouped import group_size, unpack
from asyncengine.kernels.regroup import REGROUPED, regroup
from asyncengine.kernels.weight import BLOCKS, DENSE, INT4, INT8, PackedWeight
from asyncengine.models.weights.gguf import GgufFormat, GgufTensors
from asyncengine.models.weights.source import WeightSource
from asyncengine.runner.describe import describe_model
from asyncengine.runner.steps.model_runner import CpuModelRunner
from tests.models import tiny
from tests.models.gguf_files import to_blocks, write_model

COUNT = 8
PROMPT = [5, 17, 3, 190, 44, 9, 71]


@pytest.mark.parametrize("kind", [kind for kind in SIZES if kind not in FLOATS])
def test_numbers_of_random_blocks(kind: BlockType) -> None:
    blocks = np.random.default_rng(1).integers(0, 256, (5, 3 * SIZES[kind].num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, Type(int(kind)))
        found = dequantize(kind, torch.from_numpy(blocks)).numpy()
    np.testing.assert_array_equal(found, expected)


def greedy(path: Path, **settings: Any) -> tuple[list[int], torch.Tensor]:
    config = EngineConfig.from_kwargs(str(path), {"num_kv_blocks": 16, "cpu_threads": 2, **settings})
    driver = tiny.Driver(CpuModelRunner.load(config), native=True)
    sequence = driver.add(PROMPT, len(PROMPT) + COUNT)
    driver.run([sequence], COUNT, 64)
    return sequence.generated, torch.stack(driver.logits)


def q4_k_m(name: str) -> Type:
    """A mix of types, as in the files that people download."""
    if "attn_v" in name or name.startswith(("output", "token_embd")):
        return Type.Q6_K
    return Type.Q8_0 if "ffn_down" in name else Type.Q4_K


WIDE = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
}
FILES = {
    "llama-mixed": ("llama", q4_k_m, WIDE),
    "qwen3": ("qwen3", lambda name: Type.Q5_0, {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}),
    "qwen2": ("qwen2", lambda name: Type.Q4_1, {"hidden_size": 96, "intermediate_size": 96}),
    "mixture": (
        "qwen3-moe", lambda name: Type.Q8_0, {"hidden_size": 64, "moe_intermediate_size": 32, "norm_topk_prob": True}
    ),
    "llama-biases": (
        "llama", lambda name: Type.Q4_0, {"attention_bias": True, "hidden_size": 96, "intermediate_size": 64},
    ),
    "mixtral": ("mixtral", lambda name: Type.Q4_0, {"hidden_size": 96, "intermediate_size": 64}),
    "qwen2-mixture": (
        "qwen2-moe", lambda name: Type.Q8_0,
        {"hidden_size": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    ),
    "gemma2": (
        "gemma2", lambda name: Type.Q8_0,
        {"hidden_size": 96, "intermediate_size": 96, "query_pre_attn_scalar": 16},
    ),
    "gemma3": ("gemma3", lambda name: Type.F16, {"query_pre_attn_scalar": 16}),
    "phi3": ("phi3", lambda name: Type.BF16, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_tokens_equal_those_of_the_same_numbers_in_floats(name: str, tmp_path: Path) -> None:
    variant, kind, changes = FILES[name]
    path, plain = write_model(tmp_path, variant, kind, **changes)
    tokens, logits = greedy(path, dtype="float32")
    expected, expected_logits = greedy(plain, dtype="float32")
    assert tokens == expected
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)


def test_logits_of_rounded_rows(tmp_path: Path) -> None:
    """In bfloat16 native kernels round rows to 8 bits: logits are about as near as those of bfloat16 itself."""
    path, plain = write_model(tmp_path, "llama", q4_k_m, **WIDE)
    exact = greedy(plain, dtype="float32")[1][0]
    blocks, dense = ((greedy(p, dtype="bfloat16")[1][0] - exact).norm() for p in (path, plain))
    assert blocks < 1.5 * dense < 0.1 * exact.norm()


@pytest.mark.parametrize("kind", REGROUPED)
def test_blocks_in_groups_are_the_same_numbers(kind: BlockType) -> None:
    """A type without offsets gives them to the bit."""
    size = SIZES[kind]
    matrix = np.random.default_rng(2).normal(size=(6, 4 * 256)).astype(np.float32)
    blocks = torch.from_numpy(to_blocks(matrix, Type(int(kind)), 3))
    packed = PackedWeight(BLOCKS, {"blocks": blocks}, 6, 4 * 256, torch.bfloat16, kind)
    made, expected = regroup(packed), dequantize(kind, blocks)
    assert group_size(made) == (16 if kind == BlockType.Q6_K else 32)
    assert made.nbytes < 2 * size.num_bytes * 6 * 4 * 256 // size.numbers
    if "offsets" in made.tensors:
        torch.testing.assert_close(unpack(made), expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(unpack(made), expected)


def test_projections_of_a_gpu_stay_in_groups(tmp_path: Path) -> None:
    """Packed projections give the numbers of the file; the embedding and the head are dense."""
    path, plain = write_model(tmp_path, "llama", q4_k_m, **WIDE)
    tensors = GgufTensors(path, torch.float32, keeps_blocks=False)
    weights = WeightSource(tensors, GgufFormat(tensors))
    stored = load_file(plain / "model.safetensors")
    for module, form in (("self_attn.o_proj", INT4), ("mlp.down_proj", INT8), ("mlp.up_proj", INT4)):
        name = f"model.layers.0.{module}"
        before = tensors.owned_bytes
        made = weights.weight(name, 256, 256)
        assert made.format == form
        assert (tensors.owned_bytes - before, tensors.mapped_bytes) == (made.nbytes, 0)
        torch.testing.assert_close(unpack(made), stored[f"{name}.weight"], rtol=1e-6, atol=1e-6)
    assert weights.table("model.embed_tokens", *stored["model.embed_tokens.weight"].shape).format == DENSE


def test_models_says_what_of_a_file_stays_packed(tmp_path: Path) -> None:
    """Queries and keys lie beside values of another type, with which they are unpacked."""
    path, _ = write_model(tmp_path, "llama", q4_k_m, **WIDE)
    settings = EngineConfig.from_kwargs(str(path), {"dtype": "bfloat16"})
    told = describe_model(settings, "cuda", 1 << 34)
    assert {form.split(",")[0] for form in told.weight_formats} == {
        "int4 in groups of 32 columns", "int8 in groups of 32 columns", "int8 in groups of 16 columns",
    }  # fmt: skip
    on_cpu = describe_model(replace(settings, device="cpu"), "cpu", 1 << 34)
    assert on_cpu.weight_formats == (f"blocks of GGUF, in native kernels ({CpuKernels(1).block_kernels})",)
