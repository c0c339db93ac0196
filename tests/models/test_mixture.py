"""Mixtures beside an expert that computes every token: it is one of the experts where it is like them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from asyncengine.config import EngineConfig
from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.cuda.ops import CudaOps
from asyncengine.kernels.ops import Activation, Experts, Norm, Routing, RoutingRule
from asyncengine.kernels.weight import PackedWeight
from asyncengine.runner.describe import describe_model
from asyncengine.runner.steps.model_runner import CpuModelRunner, load_model
from tests.models import tiny
from tests.models.gguf_files import write_model
from tests.models.quantised import PACKINGS, quantise

PROMPT = [5, 17, 3, 90, 44, 9, 71]
COUNT = 12
SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}

SHARED = {
    "qwen2-moe-window": ("shared_expert_intermediate_size", 24, 40, "gated"),
    "qwen3-next": ("shared_expert_intermediate_size", 24, 40, "gated"),
    "qwen3.5-moe": ("shared_expert_intermediate_size", 24, 32, "gated"),
    "nemotron-h-experts": ("moe_shared_expert_intermediate_size", 24, 32, "plain"),
    "glm4-moe": ("n_shared_experts", 1, 2, "plain"),
    "deepseek-v3": ("n_shared_experts", 1, 2, "plain"),
    "deepseek-v2": ("n_shared_experts", 1, 3, "plain"),
}
"""Variant: the setting of the shared expert's size, a value with which it is that of the experts, one with which it is
another, and the kind of expert that it becomes."""


class NotingOps(CpuOps):
    """Notes the numbers of experts of the mixtures, and the kinds of their shared experts."""

    def __init__(self) -> None:
        super().__init__(2)
        self.counts: list[int] = []
        self.kinds: set[str] = set()

    def make_experts(
        self,
        up: Sequence[Sequence[PackedWeight]],
        down: Sequence[PackedWeight],
        activation: Activation,
        up_biases: Sequence[Sequence[torch.Tensor]] | None = None,
        down_biases: Sequence[torch.Tensor] | None = None,
    ) -> Experts[Any]:
        self.counts.append(len(up))
        return super().make_experts(up, down, activation, up_biases, down_biases)

    def route(
        self, residual: Any, norm: Norm | None, router: Any, rule: RoutingRule, batch: Any
    ) -> tuple[torch.Tensor, Routing]:
        self.kinds.add(rule.shared)
        x, routing = super().route(residual, norm, router, rule, batch)
        assert routing.ids.shape == (len(x), rule.top_k + (rule.shared != "none"))
        return x, routing


def generate(path: Path) -> tuple[list[int], NotingOps]:
    """Return the tokens behind the prompt."""
    config = EngineConfig.from_kwargs(str(path), {"num_kv_blocks": 16, "dtype": "float32"})
    ops = NotingOps()
    driver = tiny.Driver(CpuModelRunner.load(config, ops=ops), native=True)
    sequence = driver.add(PROMPT, len(PROMPT) + COUNT)
    driver.run([sequence], COUNT, 64)
    return sequence.generated, ops


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("variant", SHARED)
def test_a_shared_expert_of_the_size_of_the_others_is_one_of_them(tmp_path: Path, variant: str, alike: bool) -> None:
    key, same, other, kind = SHARED[variant]
    model = tiny.build_model(variant, **{key: same if alike else other})
    model.save_pretrained(tmp_path)
    tokens, ops = generate(tmp_path)
    assert tokens == tiny.followers(model, PROMPT, tokens)
    config = model.config
    experts = getattr(config, "num_experts", None) or config.n_routed_experts
    assert set(ops.counts) == {experts + alike}
    assert ops.kinds == {kind if alike else "none"}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind", ["fp8", "packed int4", "gptq act-order"])
def test_a_shared_expert_in_the_format_of_the_others_is_one_of_them(tmp_path: Path, kind: str, whole: bool) -> None:
    """A checkpoint may leave it in floats where the others are packed. Both have the tokens of unpacked weights, and a
    GPU's operations load both."""
    source, packed, dense = (tmp_path / name for name in ("source", "packed", "dense"))
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1}
    tiny.build_model("qwen2-moe-window", **SIZES, **sizes).save_pretrained(source)
    quantise(source, packed, dense, PACKINGS[kind])
    if not whole:
        floats = {name: t for name, t in load_file(dense / "model.safetensors").items() if "shared_expert." in name}
        kept = {name: t for name, t in load_file(packed / "model.safetensors").items() if "shared_expert." not in name}
        save_file(kept | floats, packed / "model.safetensors", {"format": "pt"})
    tokens, ops = generate(packed)
    assert tokens == generate(dense)[0]
    assert set(ops.counts) == {9 + whole}
    load_model(EngineConfig.from_kwargs(str(packed), {"dtype": "float32"}), CudaOps(torch.device("cpu")))


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0])
def test_shared_experts_of_gguf_files_are_among_the_others(tmp_path: Path, kind: Type) -> None:
    """Also in blocks of another type than theirs, as each expert is multiplied by itself on the CPU."""
    changes = {"hidden_size": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    path, plain = write_model(tmp_path, "qwen2-moe", lambda name: kind if "shexp" in name else Type.Q8_0, **changes)
    tokens, ops = generate(path)
    assert tokens == generate(plain)[0]
    assert set(ops.counts) == {7}


def test_models_counts_the_same_weights_either_way(tmp_path: Path) -> None:
    """A shared expert has its own number of parameters and bytes, among the others or apart."""
    totals: list[tuple[int, int]] = []
    for size in (24, 40, 56):
        path = tmp_path / str(size)
        tiny.build_model("qwen3.5-moe", shared_expert_intermediate_size=size).save_pretrained(path)
        report = describe_model(EngineConfig.from_kwargs(str(path), {"dtype": "float32"}), "cpu", 1 << 30)
        assert report.num_parameters is not None
        assert report.weight_bytes is not None
        totals.append((report.num_parameters, report.weight_bytes))
    (first, first_bytes), (second, second_bytes), (third, third_bytes) = totals
    assert second - first == third - second > 0
    assert second_bytes - first_bytes == third_bytes - second_bytes == 4 * (second - first)
