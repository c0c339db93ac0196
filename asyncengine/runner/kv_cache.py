"""The KV cache: how many blocks there are, and the memory they live in."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from pathlib import Path

import torch

from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError
from asyncengine.layers.attention import LayerKVCache
from asyncengine.models.config import ModelConfig

logger = logging.getLogger(__name__)

DEFAULT_LIMIT_BYTES = 4 << 30
DEFAULT_SHARE = 0.4


def block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * block_size * dtype.itemsize


def available_memory() -> int:
    """Bytes that this process can still use: what the system has to give and the control group allows."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError):  # not Linux
        available = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        limits += [int(available[1]) * 1024] if available else []
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            group = Path("/sys/fs/cgroup")
            limits.append(int((group / limit).read_text()) - int((group / used).read_text()))
        except (OSError, ValueError):  # no such control group, or its limit is "max"
            continue
    return max(0, min(limits))


def choose_num_blocks(
    config: EngineConfig, max_model_len: int, bytes_per_block: int, *, reserved_bytes: int = 0
) -> int:
    """Blocks to allocate: as configured, or what is useful within a share of the memory.

    ``reserved_bytes`` are spoken for although the system calls them available (mapped weights).
    Raises ConfigError if not even one sequence of the configured max_model_len fits. The model's own context may be
    larger than the cache: a request that can never fit is refused at its admission (KVCapacityError).
    """
    per_sequence = -(-max_model_len // config.block_size)
    if config.num_kv_blocks is not None:
        blocks, origin = config.num_kv_blocks, "num_kv_blocks"
    elif config.kv_cache_memory_bytes is not None:
        blocks, origin = config.kv_cache_memory_bytes // bytes_per_block, "kv_cache_memory_bytes"
    else:
        free = available_memory() - reserved_bytes
        budget = min(DEFAULT_LIMIT_BYTES, int(DEFAULT_SHARE * max(0, free)))
        blocks = min(budget // bytes_per_block, config.max_num_seqs * per_sequence)
        origin = f"the default budget of {budget:,} bytes"
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


def allocate(model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype) -> list[LayerKVCache]:
    """One allocation with a view per layer. It is not touched, so pages become real as blocks get used."""
    heads, dim = model.num_kv_heads, model.head_dim
    try:
        memory = torch.empty(model.num_layers, 2, num_blocks, heads * dim * block_size, dtype=dtype)
    except RuntimeError as e:
        raise ConfigError(
            f"cannot allocate {num_blocks:,} KV blocks of {block_bytes(model, block_size, dtype):,} bytes: "
            "lower num_kv_blocks or kv_cache_memory_bytes"
        ) from e
    return [
        LayerKVCache(
            layer[0].view(num_blocks, heads, dim, block_size),
            layer[1].view(num_blocks, heads, block_size, dim),
        )
        for layer in memory
    ]


def block_regions(caches: list[LayerKVCache]) -> list[tuple[int, int]]:
    """(address of block 0, bytes per block) of every layer's keys and values, for copying blocks."""
    return [(t.data_ptr(), t[0].nbytes) for cache in caches for t in cache]
