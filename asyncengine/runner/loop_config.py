"""The core's view of the configuration."""

from __future__ import annotations

from collections.abc import Sequence

from asyncengine import _core
from asyncengine.config import EngineConfig
from asyncengine.logprobs import record_words
from asyncengine.model_info import ModelInfo

UPDATE_WORDS = RESULT_WORDS = 1 << 13
"""Budgets of a step, in words: entries of newly filled slots, beside one history and one bit per token; and records.
They cost memory alone, until a request asks for some."""
SCORED = 128
"""Tokens of prompts that a step scores at most, beside the samples of its rows."""
VECTORS = 4
"""A step has room for so many vectors at least."""
DEFERRED = 2
"""And for the logits of so many rows, which a logits_processor gets."""


def scheduler_config(
    config: EngineConfig, model_info: ModelInfo, token_buckets: Sequence[int] = ()
) -> _core.SchedulerConfig:
    return _core.SchedulerConfig(
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
    )


def _result_words(config: EngineConfig, model_info: ModelInfo) -> int:
    """Every row of a step has room for as many log probabilities as the configuration allows."""
    logprobs = config.max_num_seqs * record_words(config.max_logprobs)
    vectors, logits = VECTORS * (1 + model_info.vector_size), DEFERRED * (1 + model_info.vocab_size)
    return max(RESULT_WORDS, logprobs, vectors, logits)


def step_loop_config(
    config: EngineConfig, model_info: ModelInfo, token_buckets: Sequence[int] = ()
) -> _core.StepLoopConfig:
    return _core.StepLoopConfig(
        scheduler=scheduler_config(config, model_info, token_buckets),
        steps_in_flight=config.steps_in_flight,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        priority_ageing_s=config.priority_ageing_s,
        step_timeout_s=config.step_timeout_s,
        # A busy event loop would miss the moment.
        late_launch=config.late_launch and config.step_driver == "thread",
    )
