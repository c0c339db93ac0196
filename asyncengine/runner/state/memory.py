"""The KV cache: how many blocks there are, and the memory they live in."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncengine._core import HostLayer, HostShape
from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError
from asyncengine.kernels.cpu.checks import native_dtype
from asyncengine.kernels.float8 import FLOAT8
from asyncengine.kernels.ops import KVSpec, LayerCache, LayerKVCache, Ops
from asyncengine.machine import available_memory
from asyncengine.models.config import ModelConfig

logger = logging.getLogger(__name__)

DEFAULT_LIMIT_BYTES = 4 << 30
DEFAULT_SHARE = 0.4
_BYTES_PER_GRAPH = 2 << 20
"""Reserved beside the graphs' tensors; a graph of 300 kernels takes about half of it."""


def kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of keys and values in the cache, for a model in ``dtype``."""
    return FLOAT8 if config.float8_cache else dtype


def block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values in ``dtype`` of all layers that keep them."""
    layers, spec = kv_layers(model)
    return 2 * layers * _block_elements(spec, block_size) * dtype.itemsize


def kv_layers(model: ModelConfig) -> tuple[int, KVSpec]:
    """Count the layers that keep keys and values, and give their one shape: it is the same for all, so that blocks are
    copied as one."""
    specs = [spec for spec in model.layer_caches if isinstance(spec, KVSpec)]
    assert len(set(specs)) == 1
    return len(specs), specs[0]


def _block_elements(spec: KVSpec, block_size: int) -> int:
    return spec.num_heads * spec.head_dim * block_size


def choose_num_blocks(
    config: EngineConfig, max_model_len: int, bytes_per_block: int, budget: int, device_bytes: int
) -> int:
    """Blocks to allocate: as configured, or what max_num_seqs sequences can use within ``budget`` bytes.

    ``device_bytes`` is all memory of the device that keeps them. Raises ConfigError if what is configured is more, or
    if not even one sequence of the configured max_model_len fits. The model's own context may be
    larger than the cache: a request that can never fit is refused at its admission (KVCapacityError).
    """
    per_sequence = -(-max_model_len // config.block_size)
    field = "kv_cache_memory_bytes" if config.num_kv_blocks is None else "num_kv_blocks"
    configured: int | None = getattr(config, field)
    if configured is not None:
        blocks, origin = configured // (1 if field == "num_kv_blocks" else bytes_per_block), field
        if blocks * bytes_per_block > device_bytes:
            raise ConfigError(
                f"{field} ({configured:,}) takes {blocks * bytes_per_block:,} bytes of the device's memory, which has "
                f"{device_bytes:,} in all"
            )
    else:
        blocks = min(max(0, budget) // bytes_per_block, config.max_num_seqs * per_sequence)
        origin = f"the default budget of {max(0, budget):,} bytes"
    if blocks < per_sequence:
        what = (
            f"the KV cache ({origin}) holds {blocks * config.block_size:,} tokens, but one sequence of "
            f"max_model_len takes {max_model_len:,} ({per_sequence:,} blocks, "
            f"{per_sequence * bytes_per_block:,} bytes): lower max_model_len, or raise "
            "kv_cache_memory_bytes or num_kv_blocks"
        )
        if config.max_model_len is not None or blocks < 1:
            raise ConfigError(what)
        logger.warning("%s; longer requests will be refused", what)
    return blocks


def host_budget(reserved_bytes: int) -> int:
    """Bytes for a KV cache in host memory that nobody sized.

    ``reserved_bytes`` are spoken for although the system calls them available (mapped weights).
    """
    return min(DEFAULT_LIMIT_BYTES, int(DEFAULT_SHARE * max(0, available_memory() - reserved_bytes)))


def device_budget(config: EngineConfig, state_bytes: int, step_bytes: int, num_graphs: int) -> int:
    """Bytes of the GPU's memory for a KV cache: the configured share, less what is taken and what steps will take.

    ``state_bytes`` is what every step shares, ``step_bytes`` what the largest step takes beside, in the graphs' pool
    and again while it warms up.
    """
    free, total = torch.cuda.mem_get_info()
    graphs = 0 if config.enforce_eager else num_graphs * _BYTES_PER_GRAPH
    fixed = state_bytes + 2 * step_bytes + graphs + (64 << 20)
    return int(total * config.gpu_memory_utilization) - (total - free) - fixed


def host_view(address: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
    """Host memory that somebody else owns, as a tensor."""
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=dtype)


def host_shape(model: ModelConfig, dtype: torch.dtype, num_slots: int = 1) -> HostShape:
    """Return the heads of rows that decode on the host, one a slot."""
    return HostShape(
        dtype=native_dtype(dtype),
        num_slots=num_slots,
        num_q_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
    )


def attention_layers(model: ModelConfig, scales: Iterable[Tensor | None]) -> list[HostLayer]:
    """Return for each layer the settings of its attention on the host.

    ``scales`` are ``LayerKVCache.scales`` in host memory, by layer.
    """
    return [
        HostLayer(
            scale=scale,
            window=window,
            softcap=model.score_softcap,
            scales=0 if of_layer is None else of_layer.data_ptr(),
        )
        for scale, window, of_layer in zip(model.layer_scales, model.layer_windows, scales, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class KVCache:
    """One allocation for the blocks of all layers, and what each layer sees."""

    memory: Tensor
    """[layers that keep keys and values, 2, num_blocks, elements of a block]: keys and values"""
    layers: list[LayerCache]
    """caches of the layers, as ModelConfig.layer_caches says"""

    def block_regions(self) -> list[tuple[int, int]]:
        """(address of block 0, bytes per block) of every layer's keys and values, for copying blocks."""
        return [(plane.data_ptr(), plane[0].nbytes) for plane in self.memory.flatten(0, 1)]


def allocate(
    config: EngineConfig, model: ModelConfig, num_blocks: int, dtype: torch.dtype, ops: Ops[Any, Any, Any],
    scales: Tensor | None = None,
) -> KVCache:  # fmt: skip
    """The cache in the layout and on the device of ``ops``, for config.max_num_seqs slots.

    With ``scales`` [layers, 2, 2, Hk] (float8_cache.with_inverses) it is in float8, and otherwise in ``dtype``.

    Host memory is not touched, so pages become real as blocks get used. Raises ConfigError if there is not enough.
    """
    num_layers, spec = kv_layers(model)
    block_size = config.block_size
    if scales is not None:
        dtype = FLOAT8
    shape = (num_layers, 2, num_blocks, _block_elements(spec, block_size))
    try:
        memory = torch.empty(shape, dtype=dtype, device=ops.device)
    except RuntimeError as e:
        raise ConfigError(
            f"cannot allocate {num_blocks:,} KV blocks of {block_bytes(model, block_size, dtype):,} bytes: "
            "lower num_kv_blocks, kv_cache_memory_bytes or gpu_memory_utilization"
        ) from e
    by_token = (num_blocks, spec.num_heads, block_size, spec.head_dim)
    keys = (num_blocks, spec.num_heads, spec.head_dim, block_size) if ops.transposed_keys else by_token
    of_layers = [None] * num_layers if scales is None else list(scales)
    return KVCache(
        memory,
        [
            LayerKVCache(k.view(keys), v.view(by_token), s, index)
            for index, ((k, v), s) in enumerate(zip(memory, of_layers, strict=True))
        ],
    )
