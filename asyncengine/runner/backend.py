"""Backend: a loaded model with the step loop that runs it, on the CPU or on a GPU."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import logging
import os
import select
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from asyncengine._core import StepBatch, StepLoop
from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError, ModelNotFoundError
from asyncengine.kernels.cuda.launch.compile_processes import compile_processes
from asyncengine.machine import total_memory
from asyncengine.runner.loop_config import step_loop_config

if TYPE_CHECKING:
    from asyncengine.api.model_info import ModelInfo
    from asyncengine.runner.costs.table import KnownCosts
    from asyncengine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Backend:
    """A loaded model, ready to step. What AsyncEngine runs on; asyncengine.testing makes simulated ones."""

    model_info: ModelInfo
    tokenizer: Tokenizer | None
    """Tokenizer of the model; None: token ids in and out, no text."""
    step_loop: StepLoop
    keep_alive: object = None
    """Owner of the memory that the step loop uses."""
    interrupt: Callable[[], None] | None = None
    """Ends the step under way early, where Python computes the steps. The process must not end before the step has."""
    costs: KnownCosts | None = None
    """Costs of the engine's steps, if the configuration needs them; learned corrections are kept when the engine
    closes."""
    on_device: Callable[[], AbstractContextManager[object]] = nullcontext
    """Makes the model's GPU the current one of the thread. Its memory is freed there: torch would otherwise take some
    of the GPU that is current."""
    process: int = field(default_factory=os.getpid)

    @property
    def forked(self) -> bool:
        """True if this process is a fork of the one that has the step loop's threads."""
        return self.process != os.getpid()

    def stop(self, limit_s: float) -> bool:
        """Stop the step loop, with the step under way if it can be interrupted. False: that still runs."""
        if self.forked:
            return True
        if self.interrupt is not None and not self.step_loop.stop(0.0):
            self.interrupt()
        if not self.step_loop.stop(limit_s):
            return False
        if self.costs is not None:
            self.costs.keep_learned(self.step_loop.stats())
        return True


# The threads of these backends must be gone before the interpreter is.
_running: weakref.WeakKeyDictionary[Backend, asyncio.AbstractEventLoop] = weakref.WeakKeyDictionary()


def stop_at_exit(backend: Backend) -> None:
    """Note a backend whose threads must end before the interpreter. To be called in its event loop when its step loop
    starts."""
    _running[backend] = asyncio.get_running_loop()


@atexit.register
def _stop_all() -> None:
    for backend in list(_running):
        while not backend.stop(1.0) and backend.interrupt is not None:
            pass


def _leave_to_parent() -> None:
    """Keep a forked process from freeing step loops, which would wait for threads that only the parent has."""
    for backend, loop in list(_running.items()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))
        if not loop.is_closed():
            _leave_poller_to_parent(loop)


def _leave_poller_to_parent(loop: asyncio.AbstractEventLoop) -> None:
    """Give the forked process a poller of its own in place of the loop's, which it shares with the parent.

    Closing the loop here, as asyncio.run does, would otherwise remove the parent's descriptors from the parent's
    poller: the parent's loop would sleep for ever.
    """
    if hasattr(loop, "_selector"):
        descriptor = loop._selector.fileno()  # asyncio's
    elif hasattr(loop, "_get_backend_id"):
        descriptor = loop._get_backend_id()  # uvloop's
    else:
        return
    if hasattr(select, "epoll"):  # the kernel gives a forked process no other pollers
        with select.epoll() as fresh:
            os.dup2(fresh.fileno(), descriptor, inheritable=False)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_to_parent)


_SIZES = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "kv_cache_memory_bytes",
    "num_kv_blocks",
    "host_kv_memory_bytes",
    "disk_kv_bytes",
    "hybrid_workers",
)


def load_backend(config: EngineConfig, *, progress: bool, measure: bool = False) -> Backend:
    """Load the model that ``config`` names. Blocks; raises ModelError, ConfigError.

    ``measure``: measure the costs of steps, whatever is kept of them and whether the configuration needs them or not.
    """
    device = choose_device(config)
    load = _load_on_cuda if device == "cuda" else _load_on_cpu
    try:
        if config.measure_quantization:
            from asyncengine.runner.rounding import log_errors

            log_errors(config, device)
        backend = load(config, progress=progress, measure=measure)
    except MemoryError as e:
        sizes = (f"{field}={getattr(config, field):,}" for field in _SIZES if getattr(config, field) is not None)
        raise ConfigError(f"this machine's memory of {total_memory():,} bytes does not hold {', '.join(sizes)}") from e
    except (RuntimeError, ValueError) as e:
        if config.disk_kv_path is None or config.disk_kv_path not in str(e):
            raise
        field = "disk_kv_path" if isinstance(e, RuntimeError) else "disk_kv_bytes"
        raise ConfigError(f"{field} cannot be used: {e}") from e
    if config.hybrid_attention != "off" and not backend.model_info.can_decode_on_host:
        logger.warning(
            "hybrid_attention=%s is off: no sequence of %s can decode on the host, as it %s",
            config.hybrid_attention,
            backend.model_info.name,
            backend.model_info.host_obstacle,
        )
    elif config.hybrid_attention == "auto" and backend.model_info.device == "cpu":
        logger.warning("hybrid_attention=auto is off on the CPU: the cores that would attend compute the steps")
    return replace(backend, model_info=_with_stop_of(backend.tokenizer, backend.model_info, config))


def choose_device(config: EngineConfig) -> Literal["cpu", "cuda"]:
    """Return the kind of device that ``config.device`` names; auto is a GPU if torch sees one."""
    if config.device != "auto":
        return "cpu" if config.device == "cpu" else "cuda"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _load_on_cpu(config: EngineConfig, *, progress: bool, measure: bool) -> Backend:
    from asyncengine.runner.costs.cpu import cpu_costs
    from asyncengine.runner.steps.model_runner import CpuModelRunner, cpu_ops

    tokenizer = load_tokenizer(config)
    ops = cpu_ops(config)
    runner = CpuModelRunner.load(config, progress=progress, ops=ops)
    costs = cpu_costs(config, runner, anew=measure) if measure or config.needs_costs else None

    def forward(batch: StepBatch) -> tuple[int, int, int]:
        return runner.forward(batch).addresses()

    step_loop = StepLoop.on_cpu(
        step_loop_config(config, runner.info, costs=costs.table if costs else None),
        forward,
        ops.native,
        len(runner.info.labels) or runner.info.vocab_size,
        runner.kv_block_regions(),
        runner.host_rows(config, ops),
        runner.state_regions(),
    )
    return Backend(runner.info, tokenizer, step_loop, runner, runner.interrupt, costs)


def _load_on_cuda(config: EngineConfig, *, progress: bool, measure: bool) -> Backend:
    count = config.num_threads if config.compile_processes else 0
    with compile_processes(count, kernels="asyncengine.runner.steps.device_steps"):
        from asyncengine.runner.cuda_runner import CudaRunner

        tokenizer = load_tokenizer(config)
        runner = CudaRunner.load(config, progress=progress)
    step_loop = runner.make_step_loop(config, progress=progress, measure=measure)
    return Backend(runner.info, tokenizer, step_loop, runner, costs=runner.costs, on_device=runner.on_device)


def _with_stop_of(tokenizer: Tokenizer | None, info: ModelInfo, config: EngineConfig) -> ModelInfo:
    """Sequences end with the tokenizer's end as well: fine-tuned models may name theirs nowhere else."""
    eos = None if tokenizer is None else tokenizer.eos_token_id
    if eos is None or eos >= info.vocab_size or eos in info.eos_token_ids or config.load_format == "dummy":
        return info
    return replace(info, eos_token_ids=(*info.eos_token_ids, eos))


def load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """The configured tokenizer, if any; random weights without one get the placeholder of their vocabulary.

    To be loaded before the weights, which take longer: a mistake here, or in the model's configuration, shows at once.
    """
    from asyncengine.runner.steps.model_runner import read_model_config
    from asyncengine.text.tokenizer import Tokenizer, placeholder_tokenizer

    vocab_size = read_model_config(config).vocab_size
    if config.skip_tokenizer_init:
        return None
    name = config.tokenizer or config.model
    revision = config.revision if name == config.model else None
    try:
        return Tokenizer.from_pretrained(
            name, revision=revision, chat_template=config.chat_template, num_rows=vocab_size
        )
    except ModelNotFoundError:
        if config.load_format != "dummy" or config.tokenizer is not None:
            raise
        return placeholder_tokenizer(vocab_size)
