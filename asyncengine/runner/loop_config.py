"""The core's view of the configuration."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncengine._core import HybridConfig, ItlTargets, SchedulerConfig, StepCosts, StepLoopConfig
from asyncengine.api.logprobs import record_words
from asyncengine.api.model_info import ModelInfo
from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError

if TYPE_CHECKING:
    from asyncengine.runner.costs.table import CostTable

UPDATE_WORDS = RESULT_WORDS = 1 << 13
"""Budgets of a step, in words: entries of newly filled slots, beside one history and one bit per token; and records.
They cost memory alone, until a request asks for some."""
SCORED = 128
"""Tokens of prompts that a step scores at most, beside the samples of its rows."""
VECTORS = 4
"""A step has room for so many vectors at least."""
DEFERRED = 2
"""A step has room for the logits of so many rows, which a logits_processor gets."""
_LEAST_GAIN = {"auto": 0.05, "always": -1e9}
"""Least predicted gain of throughput at which sequences move to the host."""


HOST_STATE_SHARE = 4
"""States take at most the part of one in so many of a host tier's memory."""
_NAME_BYTES = 256
"""Memory that a block takes which holds nothing: its tokens, and its place in the index of prefixes."""
_LEAST_HOST_STATES = 4
"""With fewer, what comes in and what goes out would leave no room for each other."""


def choose_num_host_states(config: EngineConfig, state_bytes: int, bytes_per_block: int) -> int:
    """States of the host tier, where layers keep some; 0 if there is none, or next to no room for them.

    Where no layer keeps keys and values, the memory is theirs but for what blocks take that only name them.
    """
    if config.host_kv_memory_bytes is None or state_bytes == 0:
        return 0
    share = config.host_kv_memory_bytes // HOST_STATE_SHARE
    states = (share if bytes_per_block else config.host_kv_memory_bytes - share) // state_bytes
    return min(states, 1 << 20) if states >= _LEAST_HOST_STATES else 0


def choose_num_host_blocks(
    config: EngineConfig, bytes_per_block: int, num_blocks: int, least: int = 1, state_bytes: int = 0
) -> int:
    """Blocks of the host tier beside ``num_blocks`` of the cache; 0 if none is configured, or nothing is kept.

    They share its memory with states of ``state_bytes`` each. Blocks of ``bytes_per_block`` 0 name the prefixes of
    these: there are all that sequences may have before so many states, or as many as fit. Raises ConfigError if the
    configured memory does not hold ``least`` blocks.
    """
    if config.host_kv_memory_bytes is None:
        return 0
    if bytes_per_block == 0:
        states = choose_num_host_states(config, state_bytes, bytes_per_block)
        room = config.host_kv_memory_bytes // HOST_STATE_SHARE // _NAME_BYTES
        return min(states * -(-num_blocks // config.max_num_seqs), room, 2**31 - 1 - num_blocks)
    beside = choose_num_host_states(config, state_bytes, bytes_per_block) * state_bytes
    blocks = (config.host_kv_memory_bytes - beside) // bytes_per_block
    if blocks < least:
        raise ConfigError(
            f"host_kv_memory_bytes ({config.host_kv_memory_bytes:,}) must hold {least:,} KV blocks of "
            f"{bytes_per_block:,} bytes"
        )
    return min(blocks, 2**31 - 1 - num_blocks)  # the core numbers both together


def choose_disk_bytes(config: EngineConfig) -> int:
    """Bytes of blocks that the directory of the disk tier may have; 0 without one.

    The default is no more than what the file system has in all. Raises ConfigError if a configured size is more.
    """
    if config.disk_kv_path is None:
        return 0
    size, path = config.disk_kv_bytes, Path(config.disk_kv_path).absolute()
    try:
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        has = shutil.disk_usage(there).total
    except OSError as e:
        raise ConfigError(f"disk_kv_path cannot be used: {e}") from e
    if size > has and size != EngineConfig.disk_kv_bytes:
        raise ConfigError(f"disk_kv_bytes ({size:,}) is more than the file system of {there} has: {has:,} bytes")
    return min(size, has)


def decodes_on_host(config: EngineConfig, model_info: ModelInfo) -> bool:
    """Return whether steps have lanes for sequences on the host: asked for, possible, and there are blocks for them.

    Where the CPU computes the steps, threads would attend with the cores that these need: nothing is gained.
    """
    wanted = "always" if model_info.device == "cpu" else "auto"
    asked_for = config.hybrid_attention in ("always", wanted)
    return asked_for and model_info.can_decode_on_host and model_info.num_host_kv_blocks > 0


def hybrid_config(config: EngineConfig, model_info: ModelInfo, costs: CostTable | None = None) -> HybridConfig:
    """Return the settings of hybrid attention. It is taken to pay without ``costs``, or with costs that lack the host's
    attention."""
    if not decodes_on_host(config, model_info):
        return HybridConfig()
    form, workers, attend_ns = config.hybrid_form_on(model_info.device), config.num_hybrid_workers, 0.0
    if costs is not None:
        workers, attend_ns = costs.attenders(form, workers, model_info.kv_layer_token_bytes)
    return HybridConfig(
        lanes=config.hybrid_lanes_on(model_info.device),
        layers=model_info.num_kv_layers,
        workers=max(1, workers),
        attend_ns=attend_ns,
        exchange_ns=costs.exchange_ns if costs else 0.0,
        min_gain=_LEAST_GAIN[config.hybrid_attention],
        host_tokens=model_info.num_host_kv_blocks * config.block_size,
    )


def hybrid_gain(
    config: EngineConfig, model_info: ModelInfo, costs: CostTable, context: int
) -> tuple[int, float | None]:
    """Count the sequences of ``context`` tokens that fill the cache, and predict the share of throughput that the host
    would add.

    None where that is not known, and on the CPU, whose cores would have both to do.
    """
    rows = max(1, min(config.max_num_seqs, model_info.kv_capacity_tokens // context))
    if model_info.device == "cpu":
        return rows, None
    attended = min(rows * context, model_info.kv_capacity_tokens)
    return rows, hybrid_config(config, model_info, costs).gain(costs.native(), rows, attended)


def scheduler_config(
    config: EngineConfig, model_info: ModelInfo, token_buckets: Sequence[int] = (), costs: CostTable | None = None
) -> SchedulerConfig:
    """Return the scheduler's settings. Without ``costs`` no chunk heeds the targets of the configuration."""
    chunk, default = config.prefill_chunk_size, EngineConfig.prefill_chunk_size
    return SchedulerConfig(
        num_blocks=model_info.num_kv_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefill_chunk_size=config.prefill_chunk_size or 0,
        max_model_len=model_info.max_model_len,
        prefix_caching=config.enable_prefix_caching,
        token_buckets=token_buckets,
        max_update_words=UPDATE_WORDS + model_info.max_model_len + model_info.vocab_size // 32,
        max_samples=config.max_num_seqs + SCORED,
        mask_words=-(-model_info.vocab_size // 32),
        max_result_words=_result_words(config, model_info),
        num_host_blocks=model_info.num_host_kv_blocks,
        num_host_states=model_info.num_host_states,
        costs=costs.native() if costs else StepCosts(),
        targets=ItlTargets(
            ns=round(1e6 * (config.target_itl_ms or 0)),
            of_class=[(p, max(1, round(1e6 * ms))) for p, ms in config.itl_targets_by_priority.items()],
        ),
        paced_chunk_size=0 if chunk in (None, default) else chunk,
        hybrid=hybrid_config(config, model_info, costs),
        window=model_info.window,
        window_groups=model_info.window_groups,
        group_window=model_info.group_window,
        num_state_slots=model_info.num_state_slots,
        state_snapshot_tokens=model_info.state_snapshot_tokens,
        num_block_events=_block_events(model_info) if config.kv_events else 0,
    )


def _block_events(model_info: ModelInfo) -> int:
    """The whole cache may change between two looks of a reader: each block is removed, and another stored."""
    return min(2**20, max(4096, 2 * (model_info.num_kv_blocks + model_info.num_host_kv_blocks)))


def _result_words(config: EngineConfig, model_info: ModelInfo) -> int:
    """Every row of a step has room for as many log probabilities as the configuration allows."""
    logprobs = config.max_num_seqs * record_words(config.max_logprobs)
    vectors, logits = VECTORS * (1 + model_info.vector_size), DEFERRED * (1 + model_info.vocab_size)
    return max(RESULT_WORDS, logprobs, vectors, logits)


def step_loop_config(
    config: EngineConfig, model_info: ModelInfo, token_buckets: Sequence[int] = (), costs: CostTable | None = None
) -> StepLoopConfig:
    on_disk = model_info.num_host_kv_blocks > 0 and model_info.kv_bytes_per_block > 0  # states are not kept there
    return StepLoopConfig(
        scheduler=scheduler_config(config, model_info, token_buckets, costs),
        steps_in_flight=config.steps_in_flight,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        priority_ageing_s=config.priority_ageing_s,
        step_timeout_s=config.step_timeout_s,
        # A busy event loop would miss the moment.
        late_launch=config.late_launch and config.step_driver == "thread",
        disk_path=config.disk_kv_path or "" if on_disk else "",
        fingerprint=model_info.fingerprint,
        disk_bytes=choose_disk_bytes(config) if on_disk else 0,
    )
