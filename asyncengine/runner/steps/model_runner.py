"""A model directory turned into a loaded model, and on the CPU into one forward call per step."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from asyncengine._core import CpuHostRows, CpuLanes, Need, StepBatch
from asyncengine.api.logprobs import record_words
from asyncengine.api.model_info import ModelInfo
from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError
from asyncengine.kernels.cpu.base import BaseOps
from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.float8_cache import with_inverses
from asyncengine.kernels.ops import LayerCache, LayerKVCache, Ops
from asyncengine.machine import total_memory
from asyncengine.models.config import ModelConfig, RawConfig
from asyncengine.models.files import read_optional_json
from asyncengine.models.gguf.paths import is_gguf
from asyncengine.models.registry import CausalLM, Family, choose_family, settle_head, settle_rotation
from asyncengine.models.state_space import with_half_states
from asyncengine.models.weights.checkpoint import Checkpoint, choose_dtype
from asyncengine.models.weights.dummy import DummyWeights
from asyncengine.models.weights.formats.at_load import HEAD_FORMS, GroupedAtLoad
from asyncengine.models.weights.formats.base import WeightFormat
from asyncengine.models.weights.formats.choose import choose_format
from asyncengine.models.weights.gguf import GgufFormat, GgufTensors
from asyncengine.models.weights.hub import resolve_model
from asyncengine.models.weights.shard import Shard
from asyncengine.models.weights.source import WeightsOfKind, WeightSource
from asyncengine.runner.loop_config import choose_num_host_blocks, choose_num_host_states, decodes_on_host
from asyncengine.runner.state import kv_scales
from asyncengine.runner.state import memory as kv_cache
from asyncengine.runner.state.fingerprint import program_digest
from asyncengine.runner.state.groups import Groups, choose_groups
from asyncengine.runner.state.host_ranks import HostRanks
from asyncengine.runner.state.memory import KVCache
from asyncengine.runner.steps.pooling import Means

_SLOT_BYTES = 1024
"""Kept of a running sequence, apart from what the configuration sizes."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights on the device of its ops, and what its directory says of it."""

    path: Path
    architecture: str
    config: ModelConfig
    dtype: torch.dtype
    device: str
    max_model_len: int
    model: CausalLM[Any]
    """model for steps in the form of the ops that it was loaded with"""
    num_parameters: int
    mapped_bytes: int
    owned_bytes: int
    eos_token_ids: tuple[int, ...]
    kv_scales: Tensor | None = None
    """float32 [layers, 2, 2, Hk] on the device of its ops, as ``LayerKVCache.scales``: of a KV cache in float8"""
    device_index: int | None = None
    """number of a GPU"""
    waits_at: str = ""
    """place in the code of modules at which a step waits for the device; empty: steps can be captured"""
    weight_kinds: tuple[WeightsOfKind, ...] = ()
    """formats of the projections"""
    head_kind: WeightsOfKind | None = None
    """format of a head that was packed"""
    ranks: int = 1
    """Ranks that hold the model together. ``config`` has the heads and caches of one, and bytes are those of one."""

    def info(
        self,
        config: EngineConfig,
        num_blocks: int,
        num_host_blocks: int = 0,
        num_host_states: int = 0,
        groups: Groups = kv_cache.ONE_GROUP,
    ) -> ModelInfo:
        bytes_per_block = self.ranks * self.kv_bytes_per_block(config, groups)
        blocks = kv_cache.blocks_per_sequence(config, self.config, self.max_model_len, groups)
        states = self.state_room(config)
        return ModelInfo(
            name=config.model,
            path=self.path,
            architecture=self.architecture,
            dtype=str(self.dtype).removeprefix("torch."),
            device=self.device,
            device_index=self.device_index,
            vocab_size=self.config.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            num_parameters=self.num_parameters,
            weight_bytes=self.ranks * (self.mapped_bytes + self.owned_bytes),
            num_kv_blocks=num_blocks,
            num_host_kv_blocks=num_host_blocks,
            num_kv_layers=len(self.config.kv_specs),
            num_state_slots=states.num_slots,
            num_host_states=num_host_states,
            num_snapshots=states.num_snapshots,
            state_bytes=states.state_bytes,
            state_snapshot_tokens=states.snapshot_tokens,
            window=self.config.longest_window,
            can_decode_on_host=not self.host_obstacle,
            host_obstacle=self.host_obstacle,
            fingerprint="" if config.disk_kv_path is None else self._fingerprint(config),
            block_size=config.block_size,
            kv_bytes_per_block=bytes_per_block,
            window_groups=groups.window_groups,
            group_window=groups.window,
            window_blocks=groups.window_blocks,
            layers_per_block=groups.layers if groups.window_groups else 0,
            kv_bytes_per_sequence=bytes_per_block * blocks,
            vector_size=len(self.config.labels) or self.config.hidden_size,
            labels=self.config.labels,
            exclusive_labels=self.config.exclusive_labels,
            generates=self.config.has_head and not self.config.labels,
        )

    def state_room(self, config: EngineConfig) -> kv_cache.StateRoom:
        """States that there is room for beside the weights, and the cache of one rank."""
        index, on_host = self.device_index, self.device_index is None
        total = kv_cache.memory_of(torch.device("cpu") if index is None else torch.device("cuda", index))
        beside = max(0, total - self.mapped_bytes - self.owned_bytes)
        return kv_cache.state_room(config, self.config, self.kv_bytes_per_block(config), beside, on_host=on_host)

    @property
    def host_obstacle(self) -> str:
        """``memory.host_obstacle`` of the model."""
        return kv_cache.host_obstacle(self.config, self.dtype)

    def _fingerprint(self, config: EngineConfig) -> str:
        """Digest all that keys and values depend on. Files count by size and time, as reading weights again would take
        as long as loading them. The program counts whole: any of its files may decide a bit of keys and values, or
        where it lies."""
        directory = self.path.parent if is_gguf(self.path) else self.path
        files = sorted(path for path in directory.iterdir() if path.suffix in (".json", ".safetensors", ".gguf"))
        stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        settings = (config.load_format, config.seed, config.quantization, config.block_size, config.prefill_attention)
        scales = () if self.kv_scales is None else self.kv_scales.flatten().tolist()
        kernels = (self.device, torch.__version__, config.batch_invariant, config.kv_cache_dtype, scales, self.ranks)
        parts = (str(self.path), self.architecture, str(self.dtype), stats, settings, kernels, program_digest())
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def kv_bytes_per_block(self, config: EngineConfig, groups: Groups = kv_cache.ONE_GROUP) -> int:
        """Bytes of a block in the cache of one rank."""
        dtype = kv_cache.kv_dtype(config, self.dtype)
        return kv_cache.page_bytes(self.config, config.block_size, dtype, groups)


def read_model_config(config: EngineConfig) -> ModelConfig:
    """Read the model's configuration, without the weights. Raises ModelError or a subclass."""
    raw = RawConfig.load(resolve_model(config.model, revision=config.revision, weights=False))
    return shape_of(config, family_of(config, raw)[1], raw)


def shape_of(config: EngineConfig, family: Family, raw: RawConfig) -> ModelConfig:
    """The model's configuration, with states in ``config.state_dtype``."""
    model = family.read_config(raw)
    return with_half_states(model) if config.state_dtype == "bfloat16" else model


def family_of(config: EngineConfig, raw: RawConfig) -> tuple[str, Family]:
    """The name of the model's architecture and the code that the configuration chooses for it."""
    return choose_family(
        raw, config.model_impl, max_model_len=config.max_model_len, trust_remote_code=config.trust_remote_code
    )


def load_model(
    config: EngineConfig,
    ops: Ops[Any, Any, Any],
    *,
    progress: bool = False,
    rank: int = 0,
    dense_form: WeightFormat | None = None,
) -> LoadedModel:
    """Read, check and build the model, or the part of it that a rank has; blocks for as long as the weights take.

    Raises ModelError or a subclass if the directory cannot be used, ConfigError if the configuration does not fit the
    model. ``progress`` shows a bar on a terminal. ``dense_form`` reads the weights of a checkpoint of floats.
    """
    dummy = config.load_format == "dummy"
    path = resolve_model(config.model, revision=config.revision, weights=not dummy)
    raw = RawConfig.load(path)
    architecture, family = family_of(config, raw)
    model_config = shape_of(config, family, raw)
    eos_token_ids = read_eos_token_ids(path, raw, model_config.vocab_size)
    check_layers(config, architecture, model_config, ops.device.type)
    shard = Shard(rank, config.tensor_parallel_size)
    max_model_len = choose_max_model_len(config, model_config)
    on_gpu = "cpu" not in (ops.device.type, config.device)  # operations that compute nothing have the device "meta"
    dtype = dtype_of(config, architecture, family, raw, ops.device)
    check_memory_beside_cache(config, model_config, max_model_len, dtype, on_gpu=on_gpu)
    # The kernels of --quantization fp8, which are faster, where they can serve the model.
    gpu = getattr(ops, "gpu", None)
    fast = gpu is not None and gpu.has_float8 and family.quantizable and dtype == torch.bfloat16
    form = dense_form or choose_format(config.quantization, raw, rounds_inputs=fast)
    tensors: DummyWeights | Checkpoint | GgufTensors
    if dummy:
        tensors = DummyWeights(dtype, model_config.initializer_range, config.seed, device=ops.device)
    elif is_gguf(path):
        if shard.ranks > 1:
            raise ConfigError(f"tensor_parallel_size={shard.ranks}: GGUF files are read by one rank alone yet")
        tensors = GgufTensors(path, dtype, device=ops.device, progress=progress, keeps_blocks=ops.reads_blocks)
        if tensors.keeps_blocks and config.quantization != "none":
            raise ConfigError(f"quantization={config.quantization}: the weights of {path} are quantised already")
        if config.quantization == "none" and dense_form is None:
            form = GgufFormat(tensors)
    else:
        tensors = Checkpoint(path, dtype, device=ops.device, progress=progress)
    with contextlib.closing(tensors):
        model_config = settle_rotation(settle_head(model_config, tensors), tensors)
        if config.head_quantization != "none" and (model_config.labels or not model_config.has_head):
            raise ConfigError(f"head_quantization={config.head_quantization}: the model has no head that makes tokens")
        weights = WeightSource(tensors, form, shard, head_form=HEAD_FORMS[config.head_quantization])
        model = family.build(model_config, weights, ops, max_model_len)
        if isinstance(form, GroupedAtLoad):
            form.log_errors()
        scales = kv_scales.stored(tensors, model_config) if config.float8_cache else None
        tensors.finish()
    own = model_config.of_rank(shard.ranks)
    if scales is not None:
        scales = scales.narrow(2, rank * own.num_kv_heads, own.num_kv_heads)
    return LoadedModel(
        path,
        architecture,
        own,
        dtype,
        torch.cuda.get_device_name(ops.device) if ops.device.type == "cuda" else ops.device.type,
        max_model_len,
        model,
        tensors.num_parameters,
        tensors.mapped_bytes,
        tensors.owned_bytes,
        eos_token_ids,
        None if scales is None else with_inverses(scales).to(ops.device),
        ops.device.index,
        getattr(model, "waits_at", ""),
        weights.kinds(),
        weights.head_kind,
        shard.ranks,
    )


def dtype_of(
    config: EngineConfig, architecture: str, family: Family, raw: RawConfig, device: torch.device
) -> torch.dtype:
    """The dtype that the model computes in. Raises ConfigError if the family cannot have the quantisation."""
    dtype = choose_dtype(config.dtype, raw.dtype, device)
    if config.head_quantization != "none" and not family.model_types:
        raise ConfigError(f"head_quantization={config.head_quantization} is not implemented for {architecture}")
    if config.quantization in ("int8", "int4") and not family.model_types:
        raise ConfigError(f"quantization={config.quantization} is not implemented for {architecture}")
    if config.quantization != "fp8":
        return dtype
    if config.dtype == "auto" and dtype == torch.float16:
        dtype = torch.bfloat16  # as the kernels for quantised weights have it
    if not family.quantizable:
        raise ConfigError(f"quantization={config.quantization} is not implemented for {architecture}")
    if dtype != torch.bfloat16:
        raise ConfigError(f"quantization={config.quantization} needs dtype=bfloat16, and not {dtype}")
    return dtype


def check_layers(config: EngineConfig, architecture: str, model: ModelConfig, device_type: str) -> None:
    """Raises ConfigError for settings that do not go with what the layers keep. ``device_type`` is as torch has it."""
    if config.state_dtype != "float32" and model.state_space is None and model.delta is None:
        raise ConfigError(
            f"state_dtype={config.state_dtype} needs layers with a recurrence, and {architecture} has none"
        )
    if obstacle := model.rank_obstacle(config.tensor_parallel_size):
        raise ConfigError(f"tensor_parallel_size={config.tensor_parallel_size}: {architecture} {obstacle}")
    if kv_cache.state_bytes(model) and config.disk_kv_path is not None:
        raise ConfigError(
            f"some layers of {architecture} keep a state, which disk_kv_path does not: a prefix from the disk is of no "
            "use without it"
        )
    if device_type == "cuda" and model.latent is not None and (model.latent.rank % 8 or model.latent.rope_dim % 8):
        raise ConfigError(f"{architecture} runs with device=cpu alone: kv_lora_rank and qk_rope_head_dim are not of 8s")
    if device_type == "cuda" and config.batch_invariant and model.latent is not None:
        raise ConfigError(f"batch_invariant: on a GPU, attention of {architecture} over latents depends on the batch")
    if config.float8_cache and (obstacle := kv_cache.float8_obstacle(model)):
        raise ConfigError(f"kv_cache_dtype=fp8: {architecture} {obstacle}")


class Answers(NamedTuple):
    """Results of a step for its samples, float32 and contiguous."""

    logits: Tensor | None
    """[num_samples, vocab_size], or of a classification model [num_samples, labels]; None without samples"""
    vectors: Tensor | None = None
    """[num_samples, H]: the normed hidden states, or the logits; None where no sample needs its vector"""

    def addresses(self) -> tuple[int, int, int]:
        """Addresses of the logits and the vectors, 0 where there are none, and the vectors' width."""
        logits = 0 if self.logits is None else self.logits.data_ptr()
        return (logits, 0, 0) if self.vectors is None else (logits, self.vectors.data_ptr(), self.vectors.shape[1])


class CpuModelRunner:
    """A loaded model with its KV cache. One step at a time, from any one thread."""

    def __init__(self, info: ModelInfo, config: ModelConfig, model: CausalLM[StepBatch], cache: KVCache) -> None:
        self.info = info
        self.model_config = config
        self._model = model
        self._cache = cache
        self._answers = Answers(None)
        self._means = Means()
        self._interrupted = False

    @classmethod
    def load(cls, config: EngineConfig, *, progress: bool = False, ops: BaseOps[Any] | None = None) -> Self:
        """``load_model`` with a KV cache in host memory; the same errors, and ConfigError if either does not fit.

        ``ops`` stands in for ``cpu_ops(config)``.
        """
        if config.quantization == "fp8":
            raise ConfigError(f"quantization={config.quantization} needs a GPU, and there is none or device is cpu")
        if config.dtype == "float16":
            raise ConfigError("dtype=float16 needs a GPU, and there is none: take bfloat16 or float32")
        if config.hybrid_form in ("link", "both"):
            raise ConfigError(f"hybrid_form={config.hybrid_form} needs a GPU, and there is none")
        ops = ops or cpu_ops(config)
        ranks = [ops, *(cpu_ops(config) for _ in range(config.tensor_parallel_size - 1))]
        try:
            loads = [load_model(config, own, progress=progress, rank=rank) for rank, own in enumerate(ranks)]
        except RuntimeError as e:
            if "can't allocate memory" not in str(e):  # torch has an error of its own for GPUs alone
                raise
            raise ConfigError(f"the weights do not fit into memory; bfloat16 takes half of float32 ({e})") from e
        loaded, count = loads[0], len(loads)
        model = loaded.model if count == 1 else HostRanks([each.model for each in loads], ranks)
        all_scales = [each.kv_scales for each in loads]
        if config.float8_cache and loaded.kv_scales is None:
            made = kv_scales.calibrate_host(model, loaded.config, loaded.dtype, loaded.max_model_len, *ranks)
            all_scales = [with_inverses(own.contiguous()) for own in made.chunk(count, -1)]
            loaded = replace(loaded, kv_scales=all_scales[0])
        room = loaded.state_room(config)
        state_bytes = room.num_bytes
        groups = choose_groups(config, loaded.config, loaded.max_model_len)
        num_blocks = kv_cache.choose_num_blocks(
            config,
            loaded.max_model_len,
            count * loaded.kv_bytes_per_block(config, groups),
            kv_cache.host_budget(count * loaded.mapped_bytes + state_bytes),
            total_memory() - state_bytes,
            groups,
        )
        cache, *others = [
            kv_cache.allocate(config, loaded.config, num_blocks, loaded.dtype, own, scales, room, groups)
            for own, scales in zip(ranks, all_scales, strict=True)
        ]
        if isinstance(model, HostRanks):
            model.caches = [other.layers for other in others]
            cache = replace(cache, groups=[group for each in (cache, *others) for group in each.groups])
        of_block, of_state = count * loaded.kv_bytes_per_block(config), kv_cache.state_bytes(loaded.config)
        host_blocks = choose_num_host_blocks(config, of_block, num_blocks, state_bytes=of_state)
        host_states = choose_num_host_states(config, of_state, of_block)
        return cls(loaded.info(config, num_blocks, host_blocks, host_states, groups), loaded.config, model, cache)

    def forward(self, batch: StepBatch) -> Answers:
        """Run one step. The result stays alive until the next call: native code may read it by its address."""
        model = self._model
        with torch.inference_mode():
            residual = model.run(batch, self._layer_caches())
            logits = model.logits(residual, batch)
            vectors = self._vectors(residual, logits, batch) if batch.needs & (Need.vector | Need.mean) else None
            self._answers = Answers(logits, vectors)
        return self._answers

    def _vectors(self, residual: Any, logits: Tensor | None, batch: StepBatch) -> Tensor | None:
        """A classification model's vectors are its logits."""
        if self.info.labels:
            return logits
        states = self._model.hidden(residual, batch).float()
        return self._means.pool(states, batch) if batch.needs & Need.mean else states

    def interrupt(self) -> None:
        """Make the step under way fail at its next layer, and every later step too. May be called from any thread."""
        self._interrupted = True

    def _layer_caches(self) -> Iterator[LayerCache]:
        for cache in self._cache.layers:
            if self._interrupted:
                raise RuntimeError("the engine was closed during the step")
            yield cache

    def host_rows(self, config: EngineConfig, ops: CpuOps) -> CpuHostRows | None:
        """Make the rows that decode on the host, where the configuration allows that: ``ops`` get the lanes."""
        if not decodes_on_host(config, self.info):
            return None
        model = self.model_config
        shape = kv_cache.host_shape(model, getattr(torch, self.info.dtype), config.max_num_seqs)
        ops.lanes = CpuLanes(shape, model.hidden_size)
        caches = [cache for cache in self._cache.layers if isinstance(cache, LayerKVCache)]
        layers = kv_cache.attention_layers(model, (cache.scales for cache in caches))
        return CpuHostRows(lanes=ops.lanes, layers=layers, num_workers=config.num_hybrid_workers, isa=ops.isa)

    def kv_block_regions(self) -> list[tuple[int, int]]:
        """(address of block 0, bytes per block) of every plane of the cache."""
        return self._cache.block_regions()

    def state_regions(self) -> list[tuple[int, int]]:
        """(address of slot 0, bytes per slot) of every layer's states."""
        return self._cache.state_regions()


def cpu_ops(config: EngineConfig) -> CpuOps:
    """The native kernels with a rank's share of threads, and the attention of prompts that the configuration names."""
    threads = max(1, config.num_threads // config.tensor_parallel_size)
    return CpuOps(threads, prefill_attention=config.prefill_attention, fast_prefill=config.fast_prefill)


def choose_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The configured context, or the model's own; ConfigError if the former exceeds the latter."""
    if config.max_model_len is None:
        return model.max_positions
    if config.max_model_len > model.max_positions:
        raise ConfigError(
            f"max_model_len ({config.max_model_len}) exceeds the model's context of {model.max_positions} tokens"
        )
    return config.max_model_len


def check_memory_beside_cache(
    config: EngineConfig, model: ModelConfig, max_model_len: int, dtype: torch.dtype, *, on_gpu: bool = False
) -> None:
    """Raises ConfigError if the sizes of steps take more than half the memory beside the KV cache.

    For a sequence that is its block table, what is kept of it while it runs, the state of its layers, its mask, and in
    each step in flight its input and its records; for a token its id in each step's input. For rotary positions it is a
    table of cosines and sines for each kind, and its halves, which are computed from the angles. Without this check the
    system may end the process.
    """
    steps = config.steps_in_flight
    of_sequence = 4 * -(-max_model_len // config.block_size) + _SLOT_BYTES + model.vocab_size // 8
    of_sequence += 4 * steps * record_words(config.max_logprobs)
    needed = config.max_num_seqs * of_sequence + config.max_num_batched_tokens * steps * 8
    if model.ropes:
        needed += max_model_len * max(model.head_dims) * (4 * len(model.ropes) + 6)
    total = total_memory()
    if not on_gpu:  # whose own memory has them
        of_block = kv_cache.block_bytes(model, config.block_size, kv_cache.kv_dtype(config, dtype))
        needed += kv_cache.state_room(config, model, of_block, total, on_host=True).num_bytes
    if needed > total // 2:
        raise ConfigError(
            f"max_num_seqs ({config.max_num_seqs:,}), max_num_batched_tokens ({config.max_num_batched_tokens:,}) and a "
            f"context of {max_model_len:,} tokens take {needed:,} bytes beside the KV cache, more than half of this "
            f"machine's {total:,}: lower max_num_seqs, max_num_batched_tokens or max_model_len"
        )


def read_eos_token_ids(directory: Path, raw: RawConfig, vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence tokens of config.json and generation_config.json together, in that order.

    Where a language model is part of one for images, its own config counts as well. Ids outside the vocabulary are left
    out. Raises ModelError for a value that is no id.
    """
    ids = raw.token_ids("eos_token_id", vocab_size)
    if raw.get("text_config", dict, None) is not None:
        ids += raw.text_part().token_ids("eos_token_id", vocab_size)
    path = directory / "generation_config.json"
    ids += RawConfig(read_optional_json(path), str(path)).token_ids("eos_token_id", vocab_size)
    return tuple(dict.fromkeys(ids))
