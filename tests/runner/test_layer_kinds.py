"""Models whose layers keep different things: memory adds up by layer, and what moves blocks takes every plane."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncengine import AsyncEngine, ConfigError, SamplingParams, testing
from asyncengine.config import EngineConfig
from asyncengine.kernels.cpu.reference import ReferenceOps
from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.ops import KVSpec, LatentSpec, LayerKVCache, LayerLatentCache, LayerStates, StateSpec
from asyncengine.models import registry
from asyncengine.models.config import ModelConfig, RawConfig
from asyncengine.runner.plans import plan_steps
from asyncengine.runner.state import memory
from asyncengine.runner.steps.device_steps import attention_kinds
from asyncengine.runner.steps.model_runner import CpuModelRunner, load_model
from asyncengine.text.tokenizer import placeholder_tokenizer
from tests.kernels.simulated_cuda import make_engine
from tests.models import tiny

MIXED = (KVSpec(2, 8), LatentSpec(24), StateSpec(48), KVSpec(1, 16, 9), StateSpec(16), KVSpec(3, 8))
SMALL: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 24, "num_kv_blocks": 24, "max_model_len": 64, "dtype": "float32",
    "step_timeout_s": 600.0,
}  # fmt: skip
PROMPTS = [[5 + i, *range(3, 36)] for i in range(2)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Llama whose second layer has the same keys and values in both heads, and one that keeps a single head there."""
    alike, mixed = (tmp_path_factory.mktemp(name) for name in ("alike", "mixed"))
    model = tiny.build_model("llama", num_hidden_layers=2)
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        for projection in (attention.k_proj, attention.v_proj):
            projection.weight[8:] = projection.weight[:8]
    for path in (alike, mixed):
        model.save_pretrained(path)
        placeholder_tokenizer(tiny.VOCAB_SIZE).backend.save(str(path / "tokenizer.json"))
    tensors = load_file(mixed / "model.safetensors")
    for kind in "kv":
        name = f"model.layers.1.self_attn.{kind}_proj.weight"
        tensors[name] = tensors[name][:8].clone()
    save_file(tensors, mixed / "model.safetensors", {"format": "pt"})
    return alike, mixed


@pytest.fixture
def mixed(checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The model with layers that differ, in a registry whose Llama reads them so."""
    family = registry.FAMILIES["LlamaForCausalLM"]

    def read_config(raw: RawConfig) -> ModelConfig:
        return replace(family.read_config(raw), layer_caches=(KVSpec(2, 8), KVSpec(1, 8)))

    with monkeypatch.context() as patch:
        patch.setitem(registry.FAMILIES, "LlamaForCausalLM", family._replace(read_config=read_config))
        yield checkpoints[1]


def with_layers(path: Path, *layers: Any) -> ModelConfig:
    config = registry.FAMILIES["LlamaForCausalLM"].read_config(RawConfig.load(path))
    return replace(config, num_layers=len(layers), layer_caches=layers)


def test_bytes_add_up_by_layer(checkpoints):
    model = with_layers(checkpoints[0], *MIXED)
    kv = 2 * (2 * 8 + 16 + 3 * 8) + 24
    assert memory.block_bytes(model, 32, torch.bfloat16) == kv * 32 * 2
    assert memory.state_bytes(model) == 64
    assert model.layer_windows == (0, 0, 0, 9, 0, 0)
    assert not model.has_alike_layers
    cache = memory.allocate(
        EngineConfig(model="", block_size=32, max_num_seqs=5), model, 7, torch.float32, ReferenceOps()
    )
    assert sum(size for _, size in cache.block_regions()) == memory.block_bytes(model, 32, torch.float32)
    assert [size for _, size in cache.state_regions()] == [48, 16]
    kinds = [LayerKVCache, LayerLatentCache, LayerStates, LayerKVCache, LayerStates, LayerKVCache]
    assert [type(layer) for layer in cache.layers] == kinds
    assert [layer.number for layer in cache.layers if isinstance(layer, LayerKVCache)] == [0, 1, 2]


def test_layers_share_no_memory_and_regions_are_where_they_are(checkpoints):
    """Each tensor of each layer is filled with a number of its own, which one region alone holds."""
    model = with_layers(checkpoints[0], *MIXED)
    cache = memory.allocate(EngineConfig(model="", max_num_seqs=5), model, 7, torch.float32, ReferenceOps())
    tensors: list[torch.Tensor] = []
    for layer in cache.layers:
        tensors += [layer.k, layer.v] if isinstance(layer, LayerKVCache) else [layer[0]]
    for number, tensor in enumerate(tensors, 1):
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors, 1))
    paged = [number for number, tensor in enumerate(tensors, 1) if tensor.dtype == torch.float32]
    found = [memory.host_view(address, 7 * size, torch.float32).unique() for address, size in cache.block_regions()]
    assert sorted(int(values.item()) for values in found) == paged
    states = [memory.host_view(address, 5 * size, torch.uint8).unique() for address, size in cache.state_regions()]
    assert [int(values.item()) for values in states] == [4, 7]


def test_a_model_of_states_alone_has_blocks_that_only_count_tokens(checkpoints):
    model = with_layers(checkpoints[0], StateSpec(64), StateSpec(64))
    assert memory.block_bytes(model, 16, torch.float32) == 0
    choose = memory.choose_num_blocks
    config = EngineConfig(model="", max_num_seqs=3)
    assert choose(config, 100, 0, 0, 1 << 30) == 21
    assert choose(replace(config, kv_cache_memory_bytes=1 << 20), 100, 0, 0, 1 << 30) == 21
    assert choose(replace(config, num_kv_blocks=9), 100, 0, 0, 1 << 30) == 9
    assert memory.allocate(config, model, 21, torch.float32, ReferenceOps()).groups == []


def test_states_that_do_not_fit_beside_the_cache_are_refused(checkpoints, monkeypatch):
    family, total = registry.FAMILIES["LlamaForCausalLM"], 64 << 20
    states = lambda raw: replace(family.read_config(raw), layer_caches=(KVSpec(2, 8), StateSpec(1 << 20)))  # noqa: E731
    monkeypatch.setitem(registry.FAMILIES, "LlamaForCausalLM", family._replace(read_config=states))
    monkeypatch.setattr("asyncengine.runner.steps.model_runner.total_memory", lambda: total)
    with pytest.raises(ConfigError, match=r"max_num_seqs \(64\).*lower max_num_seqs"):
        load_model(EngineConfig.from_kwargs(str(checkpoints[0]), {"max_num_seqs": 64}), ReferenceOps())


def generate(make: Any, path: Path, **config: Any) -> tuple[list[Any], dict[str, int]]:
    async def main() -> tuple[list[Any], dict[str, int]]:
        async with make(str(path), **{**SMALL, **config}) as engine:
            async with testing.no_leaks(engine):
                params = SamplingParams(max_tokens=2, temperature=0.0, n=2)
                for _ in range(2):
                    outputs = [await engine.generate(prompt, params) for prompt in PROMPTS]
            return [[c.token_ids for c in output.outputs] for output in outputs], engine._life.backend.step_loop.stats()

    return asyncio.run(main())


def on_cpu(path: str, **config: Any) -> AsyncEngine:
    return AsyncEngine.from_pretrained(path, device="cpu", progress=False, **config)


FEW = {"num_kv_blocks": 4, "host_kv_memory_bytes": 1 << 20}


@pytest.fixture(scope="module")
def expected(checkpoints: tuple[Path, Path]) -> list[Any]:
    return generate(on_cpu, checkpoints[0])[0]


def test_layers_with_other_heads_generate_on_the_cpu(expected, mixed):
    """Forks copy blocks, and blocks go to the host and come back, in planes of two sizes."""
    tokens, stats = generate(on_cpu, mixed, **FEW)
    assert stats["blocks_from_host"] > 0
    assert tokens == expected


def test_layers_with_other_heads_generate_on_the_device(expected, mixed):
    tokens, stats = generate(make_engine, mixed, **FEW)
    assert stats["blocks_from_host"] > 0
    assert tokens == expected


def test_kinds_of_attention_and_plans_follow_the_layers(mixed):
    loaded = load_model(EngineConfig.from_kwargs(str(mixed), {}), ReferenceOps())
    kinds = attention_kinds(loaded.config, torch.bfloat16)
    assert [(kind.shape.num_kv_heads, kind.shape.head_dim) for kind in kinds] == [(1, 8), (2, 8)]
    assert len({kind.key for kind in kinds}) == 2
    steps = plan_steps(EngineConfig.from_kwargs(str(mixed), {"dtype": "bfloat16", "load_format": "dummy"}), H200)
    assert all(len(step.attention) == 2 for step in steps)


def test_what_needs_layers_that_are_alike_is_refused_by_name(mixed, caplog):
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=fp8: .* has layers that do not all keep keys and values"):
        CpuModelRunner.load(EngineConfig.from_kwargs(str(mixed), {"kv_cache_dtype": "fp8", "device": "cpu"}))
    _, stats = generate(on_cpu, mixed, **FEW, hybrid_attention="always")
    assert "has layers that do not all keep keys and values of one shape" in caplog.text
    assert stats["moved_to_host"] == 0
