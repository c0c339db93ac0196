"""Report of how a model will run and what it takes, from config.json and the headers of its weight files alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from asyncengine._core import CpuKernels
from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError, ModelError
from asyncengine.kernels.cpu.reference import ReferenceOps
from asyncengine.kernels.latent import EXPANDED_BYTES
from asyncengine.kernels.weight import BLOCKS, DENSE, FLOAT8, FLOAT8_GROUPS, GROUPED, INT4
from asyncengine.machine import available_memory
from asyncengine.models.config import ModelConfig, RawConfig
from asyncengine.models.gguf.paths import is_gguf
from asyncengine.models.registry import FAMILIES, Family
from asyncengine.models.weights.hub import resolve_model
from asyncengine.models.weights.source import WeightsOfKind
from asyncengine.runner.state import memory
from asyncengine.runner.state.groups import choose_groups
from asyncengine.runner.steps.model_runner import (
    check_layers,
    check_memory_beside_cache,
    choose_max_model_len,
    dtype_of,
    family_of,
    load_model,
    shape_of,
)

_FIXED_GPU_BYTES = 768 << 20
"""About what CUDA, the kernels and the graphs of an engine take."""
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth")
_PROBE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 12,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024, "num_heads": 16,
}  # fmt: skip
"""Sizes of a model whose other keys are a family's defaults."""


@dataclass(frozen=True, slots=True)
class FamilyReport:
    """One family and the settings that its models can have."""

    architecture: str
    model_types: tuple[str, ...]
    fp8_weights: bool
    """quantization=fp8, on a GPU"""
    float8_cache: bool
    """kv_cache_dtype=fp8"""
    prefix_cache: bool
    host_tier: bool
    """host_kv_memory_bytes"""
    disk_tier: bool
    """disk_kv_path"""
    hybrid_attention: bool
    ranks: bool
    """tensor_parallel_size"""
    vectors: bool
    """A base without a head is known, and gives vectors."""
    labels: bool
    """There is a classification model."""


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Report of how a model will run with a configuration, and what it takes."""

    model: str
    way: Literal["native", "transformers", "refused"]
    reason: str
    """Why it runs this way."""
    architecture: str | None = None
    device: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    num_parameters: int | None = None
    ranks: int = 1
    """Devices that hold the model together. Bytes are those of all, where nothing else is said."""
    weight_bytes: int | None = None
    rank_weight_bytes: int | None = None
    """Bytes of one rank's weights: embedding and head are whole on each."""
    weight_formats: tuple[str, ...] = ()
    """Formats of the projections, and the kernels that multiply them; the one of the most parameters first."""
    head_format: str | None = None
    """Format of a head that is packed at load, and the kernel that multiplies it; None: it has the dtype."""
    bits_per_weight: float | None = None
    """Bits that a parameter takes on average, embeddings and scales included."""
    has_weights: bool | None = None
    """The directory holds weights, whose names and shapes are those of the model. False: there is config.json alone."""
    kv_bytes_per_token: int | None = None
    """Bytes of a token that all layers keep."""
    kv_bytes_per_sequence: int | None = None
    """Bytes that a sequence of ``context`` tokens holds at most: layers with a window may keep that alone."""
    state_bytes_per_sequence: int | None = None
    state_snapshots: int | None = None
    """Snapshots of states that the prefix cache has room for, each as large as the state of a sequence."""
    state_snapshot_tokens: int | None = None
    """Tokens between the snapshots of a long prompt; 0: none is taken within a prompt, or layers keep no state."""
    context: int | None = None
    """tokens"""
    window: int | None = None
    """Tokens that the layers see where each has a window; 0: a layer sees all."""
    memory_bytes: int | None = None
    """Memory of the device: what was said, or the card's, or what the machine has left."""
    kv_memory_bytes: int | None = None
    """Memory for keys and values; on a GPU about so much."""
    kv_tokens: int | None = None
    """Tokens of the longest sequence that it holds."""
    sequences: int | None = None
    """Sequences of ``context`` tokens that fit at the same time, at most max_num_seqs."""
    obstacle: str | None = None
    """Reason why this machine does not load the model with these settings."""


def describe_families() -> list[FamilyReport]:
    """Every causal family, in the order of the registry."""
    return [
        _describe(name, family) for name, family in FAMILIES.items() if name.endswith(("ForCausalLM", "LMHeadModel"))
    ]


def _describe(name: str, family: Family) -> FamilyReport:
    model = family.read_config(RawConfig(_PROBE, name))
    has_state = memory.state_bytes(model) > 0
    relatives = [other for other in FAMILIES if FAMILIES[other].model_types == family.model_types and other != name]
    return FamilyReport(
        architecture=name,
        model_types=family.model_types,
        fp8_weights=family.quantizable,
        float8_cache=not memory.float8_obstacle(model),
        prefix_cache=True,
        host_tier=True,
        disk_tier=not has_state,
        hybrid_attention=not memory.host_obstacle(model),
        ranks=not model.rank_obstacle(model.num_kv_heads if model.num_kv_heads > 1 else 2),
        vectors=any(other.endswith("Model") for other in relatives),
        labels=any(other.endswith("ForSequenceClassification") for other in relatives),
    )


class _NoOps(ReferenceOps):
    """Operations of a model that is never run: its tensors hold nothing."""

    device = torch.device("meta")

    def __init__(self, *, on_gpu: bool) -> None:
        super().__init__()
        self.expert_codes, self.reads_blocks = on_gpu, not on_gpu


def describe_model(config: EngineConfig, device: str, memory_bytes: int | None = None) -> ModelReport:
    """Read what the model needs, with ``device`` "cpu" or "cuda". Nothing is loaded, and no weight is read.

    ``memory_bytes``: memory of the device; None: that of the card or the machine. A model that cannot run gives a
    report that says why. Raises ModelNotFoundError for a directory that is no model, ConfigError for a configuration
    that does not fit the model, and for a GPU whose memory nobody says.
    """
    path = resolve_model(config.model, revision=config.revision, weights=False)
    raw = RawConfig.load(path)
    has_weights = is_gguf(path) or any(path.suffix in _WEIGHT_FILES for path in path.iterdir())
    formats: tuple[str, ...] = ()
    head_format = None
    try:
        architecture, family = family_of(config, raw)
        model = shape_of(config, family, raw)
        check_layers(config, architecture, model, device)
        context = choose_max_model_len(config, model)
        dtype = dtype_of(config, architecture, family, raw, torch.device(device))
        name: Any = str(dtype).removeprefix("torch.")
        if model.foreign:
            num_parameters, weight_bytes = family.num_parameters, family.num_parameters * dtype.itemsize
        else:
            form: Any = "dummy" if config.load_format == "dummy" or not has_weights else "auto"
            # The tables of rotary positions are as long as the context: here there is no use for one, nor for rows.
            probe = replace(
                config, model=str(path), load_format=form, dtype=name, max_model_len=1, max_num_seqs=1, device=device
            )
            loaded = load_model(probe, _NoOps(on_gpu=device == "cuda"))
            model, num_parameters, weight_bytes = loaded.config, loaded.num_parameters, loaded.owned_bytes
            formats = tuple(
                _words_for(kind, name, device, mixture=model.mixture is not None) for kind in loaded.weight_kinds
            )
            head_format = loaded.head_kind and _words_for(loaded.head_kind, name, device, mixture=False)
    except ModelError as e:
        return ModelReport(config.model, "refused", str(e))
    ranks = config.tensor_parallel_size
    groups, cached = choose_groups(config, model, context), memory.kv_dtype(config, dtype)
    of_token = ranks * memory.block_bytes(model, config.block_size, cached) // config.block_size
    of_block = ranks * memory.page_bytes(model, config.block_size, cached, groups)
    total = _memory_of(config, device) if memory_bytes is None else memory_bytes
    devices = ranks if device == "cuda" else 1
    beside = ranks // devices * weight_bytes
    states = memory.state_room(config, model, of_block, max(0, total - beside), on_host=device == "cpu")
    beside += states.num_bytes
    room = devices * _kv_room(config, model, dtype, device, total, beside)
    per_sequence = memory.blocks_per_sequence(config, model, context, groups)
    # Blocks that hold nothing only count tokens: there are all that sequences can use.
    num_blocks = room // of_block if of_block else config.max_num_seqs * per_sequence
    if config.num_kv_blocks:
        num_blocks = config.num_kv_blocks * groups.count
    return ModelReport(
        model=config.model,
        way="transformers" if model.foreign else "native",
        reason=_reason(config, architecture, model),
        architecture=architecture,
        device=device,
        dtype=name,
        quantization=config.quantization,
        num_parameters=num_parameters,
        ranks=ranks,
        weight_bytes=ranks * weight_bytes,
        rank_weight_bytes=weight_bytes,
        weight_formats=formats,
        head_format=head_format,
        bits_per_weight=round(8 * ranks * weight_bytes / num_parameters, 2) if num_parameters else None,
        has_weights=has_weights,
        kv_bytes_per_token=of_token,
        kv_bytes_per_sequence=per_sequence * of_block,
        state_bytes_per_sequence=states.state_bytes,
        state_snapshots=states.num_snapshots,
        state_snapshot_tokens=states.snapshot_tokens,
        context=context,
        window=model.longest_window,
        memory_bytes=devices * total,
        kv_memory_bytes=num_blocks * of_block,
        kv_tokens=groups.entries_in(num_blocks) * config.block_size,
        sequences=min(config.max_num_seqs, num_blocks // per_sequence),
        obstacle=_obstacle(config, model, context, dtype, device) if device == "cpu" or memory_bytes is None else None,
    )


def _obstacle(config: EngineConfig, model: ModelConfig, context: int, dtype: torch.dtype, device: str) -> str | None:
    """Return why this machine has no memory for the steps of the model; None if it has."""
    try:
        check_memory_beside_cache(config, model, context, dtype, on_gpu=device == "cuda")
    except ConfigError as e:
        return str(e)
    return None


def _words_for(kind: WeightsOfKind, dtype: str, device: str, *, mixture: bool) -> str:
    """A format with its groups, and the kernel that multiplies it."""
    if kind.format not in GROUPED:
        native = f"in native kernels ({CpuKernels(1).block_kernels})" if device == "cpu" else "in native kernels"
        return {
            DENSE: dtype,
            BLOCKS: f"blocks of GGUF, {native if dtype == 'bfloat16' else 'unpacked for each product'}",
            FLOAT8: "float8 by rows, inputs rounded to float8",
        }[kind.format]
    bits = "float8" if kind.format == FLOAT8_GROUPS else kind.format
    groups = f"{bits} in groups of {kind.group} columns"
    if device == "cpu":
        return f"{groups}, decoded by native kernels"
    experts = ""
    if mixture:
        stays = "experts without offsets decoded in their kernels, others " if kind.format == INT4 else "experts "
        experts = f", {stays}unpacked to {dtype}"
    return f"{groups}, decoded by a kernel up to 256 rows and unpacked beyond{experts}"


def _reason(config: EngineConfig, architecture: str, model: ModelConfig) -> str:
    if not model.foreign:
        return f"{architecture} is a family of asyncengine"
    if architecture in FAMILIES:
        return f"model_impl={config.model_impl}: {architecture} is a family of asyncengine too"
    return f"{architecture} has no native code: its modules run over the operations of asyncengine"


def _memory_of(config: EngineConfig, device: str) -> int:
    if device == "cpu":
        return available_memory()
    if not torch.cuda.is_available():
        raise ConfigError("this machine has no GPU: say with --memory how much memory the one has that is meant")
    return int(torch.cuda.mem_get_info(torch.device("cuda", config.device_index))[1])


def _kv_room(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: str, total: int, beside: int) -> int:
    """Bytes of a device for keys and values, as an engine chooses them; on a GPU it measures at its start what this
    estimates. ``beside`` are bytes of weights and states."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes // (config.tensor_parallel_size if device == "cuda" else 1)
    if device == "cpu":
        return memory.share_of_host(total - beside)
    of_step = 2 * sum(_step_bytes(config, model, dtype)) + (EXPANDED_BYTES if model.latent is not None else 0)
    return max(0, int(total * config.gpu_memory_utilization) - beside - of_step - _FIXED_GPU_BYTES)


def _step_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> Iterator[int]:
    """About what the largest step takes: activations of its tokens, and its logits."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    if (latent := model.latent) is not None:  # queries in both forms, results likewise, sums, keys and values
        heads = model.num_heads * (2 * (latent.rank + 2 * latent.value_dim) + latent.query_dim + latent.key_dim)
    widest = max(3 * model.intermediate_size, 2 * heads)
    yield config.max_num_batched_tokens * (3 * model.hidden_size + widest) * dtype.itemsize
    yield config.max_num_seqs * model.vocab_size * 4
