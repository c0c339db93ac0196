"""The KV cache: how many blocks there are, and the memory they live in."""

from __future__ import annotations

import ctypes
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from asyncengine._core import HostLayer, HostShape
from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError
from asyncengine.kernels.cpu.checks import native_dtype
from asyncengine.kernels.float8 import FLOAT8
from asyncengine.kernels.ops import (
    CacheSpec,
    JointSpec,
    KVSpec,
    LatentSpec,
    LayerCache,
    LayerJointCache,
    LayerKVCache,
    LayerLatentCache,
    LayerStates,
    Ops,
    PagedSpec,
    SharedSpec,
    StateSpec,
)
from asyncengine.machine import available_memory, total_memory
from asyncengine.models.config import ModelConfig
from asyncengine.runner.state.groups import Groups

logger = logging.getLogger(__name__)

DEFAULT_LIMIT_BYTES = 4 << 30
DEFAULT_SHARE = 0.4
SNAPSHOT_SHARE = 8
"""Snapshots of states take at most the part of one in so many of the memory beside the weights, and those within a
prompt such a part of the memory of its keys and values."""
SNAPSHOT_TOKENS = 4096
"""Tokens between snapshots where no layer keeps keys and values."""
ONE_GROUP = Groups()
_BYTES_PER_GRAPH = 2 << 20
"""Reserved beside the graphs' tensors; a graph of 300 kernels takes about half of it."""


def kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of keys and values in the cache, for a model in ``dtype``."""
    return FLOAT8 if config.float8_cache else dtype


def block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: the planes in ``dtype`` of all layers that keep some. 0: no layer does."""
    return sum(spec.planes * spec.width for spec in _paged(model)) * block_size * dtype.itemsize


def page_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype, groups: Groups) -> int:
    """Bytes of one block where it holds the layers of one group; ``block_bytes`` where there is one group."""
    if groups.window_groups == 0:
        return block_bytes(model, block_size, dtype)
    spec = model.kv_specs[0]
    return groups.layers * spec.planes * spec.width * block_size * dtype.itemsize


def blocks_per_sequence(config: EngineConfig, model: ModelConfig, context: int, groups: Groups) -> int:
    """Blocks that a sequence of ``context`` tokens holds at most. Where all layers have a window, it lets go of those
    that none sees any more; a chunk of a prompt is computed before. Groups with a window do so by themselves."""
    if model.longest_window and config.hybrid_attention == "off":
        chunk = config.prefill_chunk_size or config.max_num_batched_tokens
        context = min(context, model.longest_window + chunk + 2 * config.block_size)
    return groups.blocks_for(-(-context // config.block_size))


def state_bytes(model: ModelConfig) -> int:
    """Bytes of the states that all layers keep of one sequence."""
    return sum(spec.num_bytes for spec in model.cache_parts if isinstance(spec, StateSpec))


def host_obstacle(model: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> str:
    """Return why no sequence of the model can decode on the host; empty if one can.

    Queries and keys cross in halves of heads, all layers by one mailbox; and a classification model makes no tokens.
    """
    if model.labels:
        return "classifies"
    if model.foreign:
        return "runs modules of transformers"
    if state_bytes(model):
        return "has layers that keep a state"
    if not model.has_alike_layers:
        return "has layers that do not all keep keys and values of one shape"
    if model.attention_sinks:
        return "has sinks in its attention"
    if dtype == torch.float16:
        return "computes in float16"
    return "has heads of an odd size" if model.head_dim % 2 else ""


def float8_obstacle(model: ModelConfig) -> str:
    """Return why the model cannot have its cache in float8; empty if it can."""
    if model.positions_in_keys:
        return "has keys that hold their positions, which float8 rounds"
    if not model.has_alike_layers and model.latent is None:
        return "has layers that do not all keep keys and values of one shape"
    return ""


@dataclass(frozen=True, slots=True)
class StateRoom:
    """States that there is room for, of sequences and of snapshots. Without layers that keep one, all is 0."""

    state_bytes: int = 0
    """Bytes of a state of all layers."""
    num_slots: int = 0
    """States of all: one for each sequence, and behind them the snapshots."""
    num_snapshots: int = 0
    snapshot_tokens: int = 0
    """Tokens between the snapshots of a prompt, in whole blocks; 0: there is none within a prompt."""

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.state_bytes


def state_room(
    config: EngineConfig, model: ModelConfig, bytes_per_block: int, memory_bytes: int, *, on_host: bool
) -> StateRoom:
    """Size the states of a model whose blocks of keys and values take ``bytes_per_block``.

    There are two snapshots for each sequence, of its prompt and of its answer, and one for every ``snapshot_tokens`` of
    the tokens that the cache may hold; as far as they fit their share of the memory, and at least one.
    ``memory_bytes`` are those of the device that keeps them, without weights.
    """
    of_one = state_bytes(model)
    if not of_one:
        return StateRoom()
    every = snapshot_tokens(config, of_one, bytes_per_block)
    tokens = config.max_num_seqs * (config.max_model_len or model.max_positions)
    if config.num_kv_blocks is not None:
        tokens = config.num_kv_blocks * config.block_size
    elif bytes_per_block:
        room = config.kv_cache_memory_bytes or (share_of_host(memory_bytes) if on_host else memory_bytes)
        tokens = min(tokens, room // bytes_per_block * config.block_size)
    wanted = 2 * config.max_num_seqs + (-(-tokens // every) if every else 0)
    snapshots = min(wanted, max(1, memory_bytes // SNAPSHOT_SHARE // of_one))
    return StateRoom(of_one, config.max_num_seqs + snapshots, snapshots, every)


def snapshot_tokens(config: EngineConfig, of_one: int, bytes_per_block: int) -> int:
    """Tokens between the snapshots of a prompt, of ``of_one`` bytes each.

    Where nobody says, it is the least power of two at which the snapshots of a prompt take no more than their share of
    its keys and values, but no less than a chunk: chunks end where a snapshot is taken, and shorter ones are slow.
    """
    tokens = config.state_snapshot_tokens
    if tokens is None:
        least = SNAPSHOT_TOKENS
        if bytes_per_block:
            least = -(-SNAPSHOT_SHARE * of_one * config.block_size // bytes_per_block)
        chunk = min(config.max_num_batched_tokens, config.prefill_chunk_size or config.max_num_batched_tokens)
        tokens = 1 << (min(max(least, chunk), 1 << 24) - 1).bit_length()
    return -(-tokens // config.block_size) * config.block_size


def memory_of(device: torch.device) -> int:
    """Return the bytes of all memory of a device."""
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else total_memory()


def _paged(model: ModelConfig) -> list[PagedSpec]:
    return [spec for spec in model.cache_parts if isinstance(spec, KVSpec | LatentSpec)]


def choose_num_blocks(
    config: EngineConfig, max_model_len: int, bytes_per_block: int, budget: int, device_bytes: int,
    groups: Groups = ONE_GROUP,
) -> int:  # fmt: skip
    """Blocks to allocate: as configured, or what max_num_seqs sequences can use within ``budget`` bytes.

    Blocks of ``bytes_per_block`` 0 only count tokens: max_num_seqs sequences have all that they can use.
    With window groups blocks are those of all groups, and num_kv_blocks counts the entries of block tables for which
    there are blocks in every group.
    ``device_bytes`` is all memory of the device that keeps them. Raises ConfigError if what is configured is more, or
    if not even one sequence of the configured max_model_len fits. The model's own context may be
    larger than the cache: a request that can never fit is refused at its admission (KVCapacityError).
    """
    per_sequence = groups.blocks_for(-(-max_model_len // config.block_size))
    field = "kv_cache_memory_bytes" if config.num_kv_blocks is None else "num_kv_blocks"
    configured: int | None = getattr(config, field)
    if configured is not None and (bytes_per_block > 0 or field == "num_kv_blocks"):
        blocks = configured * groups.count if field == "num_kv_blocks" else configured // bytes_per_block
        origin = field
        if blocks * bytes_per_block > device_bytes:
            raise ConfigError(
                f"{field} ({configured:,}) takes {blocks * bytes_per_block:,} bytes of the device's memory, which has "
                f"{device_bytes:,} in all"
            )
    else:
        blocks = config.max_num_seqs * per_sequence
        if bytes_per_block > 0:
            blocks = min(max(0, budget) // bytes_per_block, blocks)
        origin = f"the default budget of {max(0, budget):,} bytes"
    if blocks < per_sequence:
        what = (
            f"the KV cache ({origin}) holds {groups.entries_in(blocks) * config.block_size:,} tokens, but one sequence "
            f"of max_model_len takes {max_model_len:,} ({per_sequence:,} blocks, "
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
    return share_of_host(available_memory() - reserved_bytes)


def share_of_host(available_bytes: int) -> int:
    """Return the part of the host's free memory that a KV cache takes which nobody sized."""
    return min(DEFAULT_LIMIT_BYTES, int(DEFAULT_SHARE * max(0, available_bytes)))


def device_budget(
    config: EngineConfig, device: torch.device, state_bytes: int, step_bytes: int, num_graphs: int
) -> int:
    """Bytes of a GPU's memory for a KV cache: the configured share, less what is taken and what steps will take.

    ``state_bytes`` is what every step shares, ``step_bytes`` what the largest step takes beside, in the graphs' pool
    and again while it warms up.
    """
    free, total = torch.cuda.mem_get_info(device)
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
    """The memory of all that layers keep, and the part that each layer sees."""

    groups: list[Tensor]
    """Planes of blocks, [planes, num_blocks, elements of a block] of each size of plane; in a group they have the order
    of the layers, and keys come before values. A model whose layers are alike has one group."""
    states: list[Tensor]
    """States of each size, uint8 [layers, slots, bytes]; in a group they have the order of the layers"""
    layers: list[LayerCache]
    """caches of the layers, as ModelConfig.layer_caches says"""

    @property
    def window_groups(self) -> int:
        """Groups of layers with a window that have block tables of their own."""
        return max((layer.group for layer in self.layers if isinstance(layer, LayerKVCache)), default=0)

    def block_regions(self) -> list[tuple[int, int]]:
        """(address of block 0, bytes per block) of every plane, for copying blocks."""
        return [(plane.data_ptr(), plane[0].nbytes) for group in self.groups for plane in group]

    def state_regions(self) -> list[tuple[int, int]]:
        """(address of slot 0, bytes per slot) of every layer's states."""
        return [(layer.data_ptr(), layer[0].nbytes) for group in self.states for layer in group]


def allocate(
    config: EngineConfig, model: ModelConfig, num_blocks: int, dtype: torch.dtype, ops: Ops[Any, Any, Any],
    scales: Tensor | None = None, room: StateRoom | None = None, division: Groups = ONE_GROUP,
) -> KVCache:  # fmt: skip
    """The cache in the layout and on the device of ``ops``, for config.max_num_seqs slots.

    ``room`` has the states; without it they are sized for all memory of the device.
    With ``scales`` [layers, 2, 2, Hk] (float8_cache.with_inverses) it is in float8, and otherwise in ``dtype``.

    Layers that have the same place in groups of ``division`` share planes: a block holds one group.
    Host memory is not touched, so pages become real as blocks get used. Raises ConfigError if there is not enough.
    """
    if scales is not None:
        dtype = FLOAT8
    block_size, counts = config.block_size, Counter[int]()
    of_block, on_host = block_bytes(model, block_size, dtype), ops.device.type != "cuda"
    room = room or state_room(config, model, of_block, memory_of(ops.device), on_host=on_host)
    for spec in _paged(model):
        counts[spec.width] += spec.planes
    if division.window_groups:
        counts = Counter(dict.fromkeys(counts, 2 * division.layers))
    sizes = Counter(spec.num_bytes for spec in model.cache_parts if isinstance(spec, StateSpec))
    try:
        groups = {
            width: torch.empty((planes, num_blocks, width * block_size), dtype=dtype, device=ops.device)
            for width, planes in counts.items()
        }
        states = {
            size: torch.empty((layers, room.num_slots, size), dtype=torch.uint8, device=ops.device)
            for size, layers in sizes.items()
        }
    except RuntimeError as e:
        beside = f", and {room.num_slots:,} states of {room.state_bytes:,} bytes" if room.num_slots else ""
        each = page_bytes(model, block_size, dtype, division)
        raise ConfigError(
            f"cannot allocate {num_blocks:,} KV blocks of {each:,} bytes{beside}: "
            "lower num_kv_blocks, kv_cache_memory_bytes or gpu_memory_utilization"
            + (", or max_num_seqs" if room.num_slots else "")
        ) from e
    planes, of_layers = ({size: iter(group) for size, group in made.items()} for made in (groups, states))
    if division.window_groups:
        order = [2 * place + part for place in division.places for part in (0, 1)]
        planes = {width: iter([group[plane] for plane in order]) for width, group in groups.items()}
    layers = _layers(model, planes, of_layers, block_size, scales, ops.transposed_keys)
    if division.window_groups:
        layers = [
            layer._replace(group=division.of_layers[layer.number]) if isinstance(layer, LayerKVCache) else layer
            for layer in layers
        ]
    return KVCache(list(groups.values()), list(states.values()), layers)


def _layers(
    model: ModelConfig, planes: Mapping[int, Iterator[Tensor]], states: Mapping[int, Iterator[Tensor]], block_size: int,
    scales: Tensor | None, transposed_keys: bool,
) -> list[LayerCache]:  # fmt: skip
    """The caches of the layers over planes [num_blocks, elements] by their width, and states by their bytes."""
    numbers = count()

    def paged(spec: KVSpec) -> LayerKVCache:
        by_token = (spec.num_heads, block_size, spec.head_dim)
        keys = (spec.num_heads, spec.head_dim, block_size) if transposed_keys else by_token
        k, v = (next(planes[spec.width]).view(-1, *shape) for shape in (keys, by_token))
        number = next(numbers)
        return LayerKVCache(k, v, None if scales is None else scales[number], number)

    layers: list[LayerCache] = []
    for spec in model.layer_caches:
        match spec:
            case SharedSpec():
                layers.append(layers[spec.layer])
            case StateSpec():
                layers.append(LayerStates(next(states[spec.num_bytes])))
            case LatentSpec():
                own = None if scales is None else scales[len(layers)]
                layers.append(LayerLatentCache(next(planes[spec.width]).view(-1, block_size, spec.width), own))
            case KVSpec():
                layers.append(paged(spec))
            case JointSpec():
                layers.append(LayerJointCache(paged(spec.kv), LayerStates(next(states[spec.state.num_bytes]))))
    return layers


def without_memory(model: ModelConfig, device: torch.device) -> list[LayerCache]:
    """Return caches of the layers that hold nothing, for a run of a model whose attention computes nothing."""
    return [_without_memory(model.kv_spec(i) or spec, device) for i, spec in enumerate(model.layer_caches)]


def _without_memory(spec: CacheSpec, device: torch.device) -> LayerCache:
    if isinstance(spec, KVSpec):  # in its shape, by which attention is chosen
        blocks = torch.empty(0, spec.num_heads, 0, spec.head_dim, device=device)
        return LayerKVCache(blocks, blocks)
    nothing = torch.empty(0, device=device)
    return LayerLatentCache(nothing) if isinstance(spec, LatentSpec) else LayerStates(nothing)
