"""CpuModelRunner: a model directory turned into one forward call per step."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from asyncengine._core import StepBatch
from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError
from asyncengine.kernels.cpu import CpuOps
from asyncengine.kernels.ops import Ops
from asyncengine.layers.attention import LayerKVCache, make_attention
from asyncengine.model_info import ModelInfo
from asyncengine.models.config import ModelConfig, RawConfig, read_json
from asyncengine.models.registry import CausalLM, find_family
from asyncengine.runner import kv_cache
from asyncengine.runner.hub import resolve_model
from asyncengine.runner.loader import Checkpoint, DummyWeights, choose_dtype


class CpuModelRunner:
    """A loaded model with its KV cache. One step at a time, from any one thread."""

    def __init__(self, info: ModelInfo, model: CausalLM, caches: list[LayerKVCache]) -> None:
        self.info = info
        self._model = model
        self._caches = caches
        self._logits: Tensor | None = None

    @classmethod
    def load(cls, config: EngineConfig, *, progress: bool = False, ops: Ops | None = None) -> Self:
        """Read, check and build everything; blocks for as long as the weights take.

        Raises ModelError or a subclass if the directory cannot be used, ConfigError if the configuration
        does not fit the model or the memory. ``progress`` shows a bar on a terminal.
        """
        dummy = config.load_format == "dummy"
        path = resolve_model(config.model, revision=config.revision, weights=not dummy)
        raw = RawConfig.load(path)
        architecture, family = find_family(raw)
        model_config = family.read_config(raw)
        max_model_len = choose_max_model_len(config, model_config)
        dtype = choose_dtype(config.dtype, raw.dtype)
        ops = ops or CpuOps(config.num_threads)

        weights = (
            DummyWeights(dtype, model_config.initializer_range, config.seed)
            if dummy
            else Checkpoint(path, dtype, progress=progress)
        )
        attention = make_attention(config.prefill_attention, ops)
        with contextlib.closing(weights):
            model = family.build(model_config, weights, ops, attention, max_model_len)
            weights.finish()

        bytes_per_block = kv_cache.block_bytes(model_config, config.block_size, dtype)
        num_blocks = kv_cache.choose_num_blocks(
            config, max_model_len, bytes_per_block, reserved_bytes=weights.mapped_bytes
        )
        info = ModelInfo(
            name=config.model,
            path=path,
            architecture=architecture,
            dtype=str(dtype).removeprefix("torch."),
            vocab_size=model_config.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=read_eos_token_ids(path, raw),
            num_parameters=weights.num_parameters,
            weight_bytes=weights.mapped_bytes + weights.owned_bytes,
            num_kv_blocks=num_blocks,
            block_size=config.block_size,
            kv_bytes_per_block=bytes_per_block,
        )
        return cls(info, model, kv_cache.allocate(model_config, num_blocks, config.block_size, dtype))

    def forward(self, batch: StepBatch) -> Tensor | None:
        """Run one step: float32 logits [num_samples, vocab_size], contiguous, or None without samples.

        The logits stay alive until the next call, so native code may read them through their address.
        """
        with torch.inference_mode():
            self._logits = self._model.forward(batch, self._caches)
        return self._logits

    def kv_block_regions(self) -> list[tuple[int, int]]:
        """(address of block 0, bytes per block) of every layer's keys and values."""
        return kv_cache.block_regions(self._caches)


def choose_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The configured context, or the model's own; ConfigError if the former exceeds the latter."""
    if config.max_model_len is None:
        return model.max_positions
    if config.max_model_len > model.max_positions:
        raise ConfigError(
            f"max_model_len ({config.max_model_len}) exceeds the model's context "
            f"of {model.max_positions} tokens"
        )
    return config.max_model_len


def read_eos_token_ids(directory: Path, raw: RawConfig) -> tuple[int, ...]:
    """End-of-sequence tokens of config.json and generation_config.json together, in that order."""
    ids = raw.token_ids("eos_token_id")
    path = directory / "generation_config.json"
    if path.is_file():
        ids += RawConfig(read_json(path), str(path)).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))
