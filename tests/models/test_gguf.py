"""GGUF files: types, and models beside checkpoints of the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from asyncengine.config import EngineConfig
from asyncengine.kernels.blocks import FLOATS, SIZES, BlockType, dequantize
from asyncengine.runner.steps.model_runner import CpuModelRunner
from tests.models import tiny
from tests.models.gguf_files import write_model

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
