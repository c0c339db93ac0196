"""Backend: a loaded model with the step loop that runs it, and how the CPU's is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncengine import _core
from asyncengine.config import EngineConfig
from asyncengine.errors import ModelNotFoundError

if TYPE_CHECKING:
    from asyncengine.model_info import ModelInfo
    from asyncengine.tokenization import Tokenizer


@dataclass(frozen=True, slots=True)
class Backend:
    """A loaded model, ready to step. What AsyncEngine runs on; asyncengine.testing makes simulated ones."""

    model_info: ModelInfo
    tokenizer: Tokenizer
    step_loop: _core.StepLoop
    keep_alive: object = None
    """Whatever owns the memory that the step loop uses."""


def scheduler_config(config: EngineConfig, model_info: ModelInfo) -> _core.SchedulerConfig:
    """The core's view of the configuration."""
    return _core.SchedulerConfig(
        num_blocks=model_info.num_kv_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefill_chunk_size=config.prefill_chunk_size or 0,
        max_model_len=model_info.max_model_len,
        prefix_caching=config.enable_prefix_caching,
    )


def step_loop_config(config: EngineConfig, model_info: ModelInfo) -> _core.StepLoopConfig:
    """The core's view of the configuration."""
    return _core.StepLoopConfig(
        scheduler=scheduler_config(config, model_info),
        steps_in_flight=config.steps_in_flight,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        priority_ageing_s=config.priority_ageing_s,
        step_timeout_s=config.step_timeout_s,
    )


def load_backend(config: EngineConfig, *, progress: bool) -> Backend:
    """Load the model that ``config`` names, for the CPU. Blocks; raises ModelError, ConfigError."""
    from asyncengine.kernels.cpu import CpuOps
    from asyncengine.runner.model_runner import CpuModelRunner

    ops = CpuOps(config.num_threads)
    runner = CpuModelRunner.load(config, progress=progress, ops=ops)
    tokenizer = load_tokenizer(config, runner.info.vocab_size)

    def forward(batch: _core.StepBatch) -> int:
        logits = runner.forward(batch)
        return 0 if logits is None else logits.data_ptr()

    step_loop = _core.StepLoop.on_cpu(
        step_loop_config(config, runner.info), forward, ops.native, runner.info.vocab_size, runner.kv_block_regions()
    )
    return Backend(runner.info, tokenizer, step_loop, runner)


def load_tokenizer(config: EngineConfig, vocab_size: int) -> Tokenizer:
    """The configured tokenizer; random weights without one get the placeholder of their vocabulary."""
    from asyncengine.tokenization import Tokenizer, placeholder_tokenizer

    try:
        return Tokenizer.from_pretrained(
            config.tokenizer or config.model, revision=config.revision, chat_template=config.chat_template
        )
    except ModelNotFoundError:
        if config.load_format != "dummy" or config.tokenizer is not None:
            raise
        return placeholder_tokenizer(vocab_size)
