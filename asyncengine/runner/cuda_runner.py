"""The GPU's side of an engine: memory sized, model loaded, steps captured, step loop made."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from typing import Self

import torch

from asyncengine import _core
from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError
from asyncengine.kernels.attention import NativeAttention
from asyncengine.kernels.cuda.launch import programmatic as pdl
from asyncengine.kernels.cuda.launch.compile_processes import MAX_COMPILATIONS
from asyncengine.kernels.cuda.launch.compiling import compile_launches
from asyncengine.kernels.cuda.linear.choose import MAX_ROWS, ROWS_OF_CUBLAS, PlanTable
from asyncengine.kernels.cuda.ops import CudaOps, CudaOptions, can_stream
from asyncengine.model_info import ModelInfo
from asyncengine.runner import memory as kv_cache
from asyncengine.runner.buckets import Bucket, token_buckets
from asyncengine.runner.device_steps import VARIANTS, DeviceSteps, StepBuffers, step_buckets
from asyncengine.runner.graphs import CapturedSteps, loaded_libcudart
from asyncengine.runner.loop_config import step_loop_config
from asyncengine.runner.model_runner import LoadedModel, load_model
from asyncengine.runner.tuning import Measuring, Tuner, tune_missing

logger = logging.getLogger(__name__)

POLL_INTERVAL_US = 5.0
"""Between two queries of a running step's event: a query costs half a microsecond."""
_BYTES_PER_GRAPH = 2 << 20
"""Reserved beside the graphs' tensors; a graph of 300 kernels takes about half of it."""


class CudaRunner:
    """A loaded model whose steps are graphs. Owns all that they use on the device."""

    def __init__(
        self, info: ModelInfo, steps: DeviceSteps, device: _core.CudaDevice, buffers: StepBuffers, buckets: list[Bucket]
    ) -> None:
        self.info = info
        self.steps = steps
        self.buckets = buckets
        self.graphs = CapturedSteps(device)
        self._device = device
        self._buffers = buffers
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @classmethod
    def load(cls, config: EngineConfig, *, progress: bool = False) -> Self:
        """Load the model and size the KV cache; nothing is captured yet.

        Raises ModelError, and ConfigError if there is no GPU or its memory does not do.
        """
        if not torch.cuda.is_available():
            raise ConfigError("device=cuda, but torch sees no GPU: check the driver, and that torch is built for CUDA")
        device = torch.device("cuda", torch.cuda.current_device())
        torch.empty(1, device=device)  # torch loads the CUDA runtime when it first needs it
        capability = torch.cuda.get_device_capability(device)
        if config.quantization == "fp8" and capability < (8, 9):
            raise ConfigError(
                "quantization=fp8 needs a GPU of compute capability 8.9 or newer; "
                f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
            )
        native = _core.CudaDevice(loaded_libcudart(), device.index)
        options = CudaOptions(
            PlanTable.load(torch.cuda.get_device_name(device)),
            pdl=config.programmatic_launch and pdl.works(device),
            streamed=can_stream(device),
            batch_invariant=config.batch_invariant,
            quantization=config.quantization,
            l2_cache_hints=config.l2_cache_hints,
        )
        ops = CudaOps(device, options)
        try:
            loaded = load_model(config, ops, NativeAttention(ops), progress=progress)
            loaded = replace(loaded, owned_bytes=loaded.owned_bytes - ops.saved_bytes)
            buckets = step_buckets(config, loaded, ops)
            budget = _kv_budget(config, loaded, ops, native, buckets)
            num_blocks = kv_cache.choose_num_blocks(
                config, loaded.max_model_len, loaded.kv_bytes_per_block(config), budget
            )
            steps, buffers = make_steps(config, loaded, ops, native, num_blocks)
        except torch.OutOfMemoryError as e:
            raise ConfigError(f"{_too_little_memory()} ({e})") from e
        return cls(loaded.info(config, num_blocks), steps, native, buffers, buckets)

    def make_step_loop(self, config: EngineConfig, *, progress: bool) -> _core.StepLoop:
        """Capture the graphs, unless eager execution is enforced, and build the step loop that launches them."""
        if self._buffers.staging.mode != config.staging:
            logger.warning("host memory cannot be pinned: staging falls back to pageable copies, which are slower")
        try:
            if config.enforce_eager:
                for bucket in self.buckets:
                    self.graphs.native.add_bucket(*bucket, [(needs, 0) for needs in VARIANTS])
                self.steps.run(self.buckets[-1], VARIANTS[-1])
            else:
                self.graphs.capture(self.steps, self.buckets, self.stream, progress=progress)
        except torch.OutOfMemoryError as e:
            raise ConfigError(f"{_too_little_memory()} ({e})") from e
        torch.cuda.synchronize()
        self.steps.restart()
        torch.cuda.synchronize()
        return _core.StepLoop.on_cuda(
            step_loop_config(config, self.info, token_buckets(self.buckets)),
            self._device,
            self._buffers.staging,
            self.graphs.native,
            self._launch if config.enforce_eager else None,
            self.stream.cuda_stream,
            POLL_INTERVAL_US,
        )

    def _launch(self, bucket: int, needs: int, stream: int) -> None:
        """A step's kernels one by one; bucket -1 is block copies. Called by the step thread."""
        with torch.cuda.device(self.stream.device), torch.cuda.stream(self.stream):
            if bucket < 0:
                self.steps.copy_blocks()
            else:
                self.steps.run(self.buckets[bucket], needs)


def make_steps(
    config: EngineConfig, loaded: LoadedModel, ops: CudaOps, native: _core.CudaDevice, num_blocks: int
) -> tuple[DeviceSteps, StepBuffers]:
    cache = kv_cache.allocate(loaded.config, num_blocks, config.block_size, loaded.dtype, ops)
    staging = _core.Staging(native, step_loop_config(config, loaded.info(config, num_blocks)), config.staging)
    buffers = StepBuffers.allocate(staging, ops.device)
    return DeviceSteps(config, loaded, ops, buffers, cache), buffers


def _kv_budget(
    config: EngineConfig, loaded: LoadedModel, ops: CudaOps, native: _core.CudaDevice, buckets: list[Bucket]
) -> int:
    """Bytes left for the KV cache, seen by running the largest step, empty, over a cache of one block.

    Before, kernels are compiled and plans measured: that takes memory which the cache has later.
    """
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    steps, buffers = make_steps(config, loaded, ops, native, 1)
    state_bytes = torch.cuda.memory_allocated() - before
    prepare_kernels(config, loaded.device, ops, steps, buckets, Tuner(ops.device, **ops.options.for_streaming))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    steps.run(buckets[-1], VARIANTS[-1])
    torch.cuda.synchronize()
    step_bytes = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del steps, buffers
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    graphs = 0 if config.enforce_eager else len(VARIANTS) * len(buckets) * _BYTES_PER_GRAPH
    fixed = state_bytes + 2 * step_bytes + graphs + (64 << 20)  # the step's tensors, in the pool and while warming up
    return int(total * config.gpu_memory_utilization) - (total - free) - fixed


def prepare_kernels(
    config: EngineConfig, gpu: str, ops: CudaOps, steps: DeviceSteps, buckets: list[Bucket], tuner: Measuring
) -> None:
    """Compile what the steps of these buckets launch, and measure plans for projections that no table knows."""
    threads = min(MAX_COMPILATIONS, config.num_threads)
    _compile(steps, buckets, ops.device, threads)
    if config.tune_linear and config.programmatic_launch and ops.missing:
        tune_missing(ops, gpu, tuner, threads=threads)
        _compile(steps, buckets, ops.device, threads)


def _compile(steps: DeviceSteps, buckets: list[Bucket], device: torch.device, threads: int) -> None:
    started = time.monotonic()
    chosen = {_launches(bucket): bucket for bucket in buckets}
    runs = [partial(steps.run, bucket, needs) for bucket in chosen.values() for needs in reversed(VARIANTS)]
    compile_launches([*runs, steps.copy_blocks], device, threads)
    logger.info("compiled kernels, or found them in Triton's cache, in %.1f s", time.monotonic() - started)


def _launches(bucket: Bucket) -> tuple[int, ...]:
    """The same for steps that launch the same kernels: of about the same size, and of as many tokens beyond MAX_ROWS.

    For counts that are multiples of 16 Triton compiles kernels of their own.
    """
    rows, tokens = (((count - 1).bit_length(), count > ROWS_OF_CUBLAS, count % 16) for count in bucket[:2])
    return (bucket.max_tokens, *bucket[2:]) if bucket.max_tokens > MAX_ROWS else (*rows, *tokens, *bucket[2:])


def _too_little_memory() -> str:
    free, total = torch.cuda.mem_get_info()
    return (
        f"the GPU's memory is exhausted ({free >> 20:,} of {total >> 20:,} MiB are free): lower "
        "max_num_batched_tokens, max_num_seqs, gpu_memory_utilization or kv_cache_memory_bytes, or end other "
        "programs on this GPU"
    )
