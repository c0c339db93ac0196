"""The GPU's side of an engine: memory sized, model loaded, steps captured, step loop made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Self

import torch

from asyncengine._core import CudaDevice, Staging, StepLoop
from asyncengine.api.model_info import ModelInfo
from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError
from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.linear.formats.registry import FORMATS
from asyncengine.kernels.cuda.linear.tables import PlanTable
from asyncengine.kernels.cuda.ops import CudaOps, CudaOptions
from asyncengine.kernels.cuda.trials import examine
from asyncengine.kernels.weight import FLOAT8
from asyncengine.models.config import ModelConfig
from asyncengine.models.weights.formats.at_load import at_load
from asyncengine.runner.costs.cuda import Machine, cuda_costs
from asyncengine.runner.costs.table import KnownCosts
from asyncengine.runner.host.rows import HostRows
from asyncengine.runner.host.tier import HostTier, gathered_bytes
from asyncengine.runner.loop_config import step_loop_config
from asyncengine.runner.start.graphs import CapturedSteps, loaded_libcudart
from asyncengine.runner.start.prepare import make_steps, prepare
from asyncengine.runner.start.ranks import GpuRank, OtherRank, calibrate, check_ranks, connect_ranks, reach_peers
from asyncengine.runner.state import memory
from asyncengine.runner.state.groups import Groups, choose_groups
from asyncengine.runner.steps.buckets import Bucket, token_buckets
from asyncengine.runner.steps.device_steps import ARGMAX, VARIANTS, DeviceSteps, StepBuffers, step_buckets
from asyncengine.runner.steps.model_runner import LoadedModel

logger = logging.getLogger(__name__)

POLL_INTERVAL_US = 5.0
"""Time between two queries of a running step's event: a query costs half a microsecond."""


class CudaRunner:
    """A loaded model whose steps are graphs. Owns all that they use on the device."""

    def __init__(
        self,
        info: ModelInfo,
        model_config: ModelConfig,
        steps: DeviceSteps,
        device: CudaDevice,
        buffers: StepBuffers,
        buckets: list[Bucket],
        host_tier: HostTier | None,
        host_rows: HostRows | None = None,
        *,
        eager: bool = False,
        first: GpuRank | None = None,
        others: Sequence[OtherRank] = (),
    ) -> None:
        """``eager``: steps are not captured, whatever the configuration of the step loop says. ``others`` are the GPUs
        that hold the model together with this one, which is the ``first``."""
        self._eager = eager
        self._first = first
        self.others = list(others)
        self.info = info
        self.model_config = model_config
        self.costs: KnownCosts | None = None
        self._host_tier = host_tier
        self._host_rows = host_rows
        self.steps = steps
        self.buckets = buckets
        self.graphs = CapturedSteps(device)
        self._device = device
        self._buffers = buffers
        self.cuda_stream = torch.cuda.Stream(device.index)  # type: ignore[no-untyped-call]

    @classmethod
    def load(cls, config: EngineConfig, *, progress: bool = False) -> Self:
        """Load the model and size the KV cache; nothing is captured yet.

        Raises ModelError, and ConfigError if there is no such GPU or its memory does not do.
        """
        check_ranks(config)
        device = find_gpu(config)
        with torch.cuda.device(device):  # kernels are launched on the current one
            return cls._load(config, device, progress=progress)

    @classmethod
    def _load(cls, config: EngineConfig, device: torch.device, *, progress: bool) -> Self:
        try:
            ranks = _load_ranks(config, device, progress=progress)
            config = without_graphs(config, ranks[0].loaded)
            calibrate(config, ranks)
            native, ops, loaded, count = ranks[0].native, ranks[0].ops, ranks[0].loaded, len(ranks)
            host_rows = HostRows.make(config, native, loaded)
            lanes = 0 if host_rows is None else host_rows.num_lanes
            buckets = step_buckets(config, loaded, ops, lanes)
            groups = choose_groups(config, loaded.config, loaded.max_model_len)
            num_blocks = memory.choose_num_blocks(
                config,
                loaded.max_model_len,
                count * loaded.kv_bytes_per_block(config, groups),
                count * min(_prepare(config, rank, buckets, host_rows, groups) for rank in ranks),
                count * torch.cuda.mem_get_info(device)[1],
                groups,
            )
            steps, buffers = make_steps(
                config, loaded, ops, native, num_blocks, host_rows, ranks[0].exchange, groups=groups
            )
            others = [_other_rank(config, rank, num_blocks, buffers.staging) for rank in ranks[1:]]
            tier = HostTier.make(config, native, steps.cache, num_blocks)
        except torch.OutOfMemoryError as e:
            raise ConfigError(f"{_too_little_memory(device)} ({e})") from e
        on_host = (0, 0) if tier is None else (tier.pool.num_blocks, tier.num_states)
        info = loaded.info(config, num_blocks, *on_host, groups)
        if host_rows is not None and (tier is None or buffers.staging.mode == "pageable"):
            logger.warning("hybrid_attention is off: host memory cannot be pinned")
            host_rows, buckets = None, [bucket for bucket in buckets if not bucket.lanes]
        if others and buffers.staging.mode == "pageable":
            raise ConfigError("tensor_parallel_size: host memory cannot be pinned, which GPUs together need")
        eager, model = config.enforce_eager, loaded.config
        return cls(
            info, model, steps, native, buffers, buckets, tier, host_rows, eager=eager, first=ranks[0], others=others
        )

    def on_device(self) -> torch.cuda.device:
        """A context in which the model's GPU is the current one of the thread."""
        return torch.cuda.device(self.cuda_stream.device)

    def make_step_loop(self, config: EngineConfig, *, progress: bool, measure: bool = False) -> StepLoop:
        """Capture the graphs, unless eager execution is enforced, and build the step loop that launches them.

        ``measure``: measure what steps take, whatever is kept of that and whether the configuration needs it or not.
        """
        with self.on_device():
            return self._make_step_loop(config, progress=progress, measure=measure)

    def _make_step_loop(self, config: EngineConfig, *, progress: bool, measure: bool) -> StepLoop:
        eager = config.enforce_eager or self._eager
        if self._buffers.staging.mode != config.staging:
            logger.warning("host memory cannot be pinned: staging falls back to pageable copies, which are slower")
        try:
            config = replace(config, enforce_eager=eager or not self._capture(progress=progress))
            if config.enforce_eager:
                for bucket in self.buckets:
                    self.graphs.native.add_bucket(**bucket._asdict(), variants=[(needs, 0) for needs in VARIANTS])
                self.steps.run(self.buckets[-1], VARIANTS[-1])
            if self._host_tier is not None:
                self.graphs.capture_moves(self._host_tier, self.cuda_stream)
        except torch.OutOfMemoryError as e:
            raise ConfigError(f"{_too_little_memory(self.cuda_stream.device)} ({e})") from e
        torch.cuda.synchronize(self.cuda_stream.device)
        if measure or config.needs_costs:
            pool = None if self._host_tier is None else self._host_tier.pool
            machine = Machine(self.steps, self.buckets, self._launch_one(config), self.cuda_stream, pool)
            self.costs = cuda_costs(config, self.info, self.model_config, machine, anew=measure)
        self.steps.restart()
        torch.cuda.synchronize(self.cuda_stream.device)
        for other in self.others:
            other.restart()
        if self._first is not None and self.others:
            connect_ranks(self._first, self.steps, self._buffers.staging, self.others)
        workers = None
        if self._host_rows is not None and self._host_tier is not None:
            capture = partial(self.graphs.capture_one, cuda_stream=self.cuda_stream)
            workers = self._host_rows.workers(self._device, self._host_tier.pool, self.graphs.native, capture)
        else:
            config = replace(config, hybrid_attention="off")
        return StepLoop.on_cuda(
            step_loop_config(config, self.info, token_buckets(self.buckets), self.costs.table if self.costs else None),
            self._device,
            self._buffers.staging,
            self.graphs.native,
            self._launch if config.enforce_eager else None,
            self.cuda_stream.cuda_stream,
            POLL_INTERVAL_US,
            workers,
            [other.for_loop() for other in self.others],
        )

    def _capture(self, *, progress: bool) -> bool:
        """Return whether every kind of step is a graph now: steps of transformers' modules may refuse it, with a
        warning."""
        try:
            self.graphs.capture(self.steps, self.buckets, self.cuda_stream, progress=progress)
            for other in self.others:
                other.capture(self.buckets)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as e:
            if not self.model_config.foreign:
                raise
            first = e.__context__ or e  # the end of a capture that is void raises too
            logger.warning(
                "%s refuses capture (%s): its steps are not captured, and run slower",
                self.info.architecture,
                " ".join(str(first).split())[:200],
            )
            self.graphs = CapturedSteps(self._device)
            return False
        return True

    def _launch_one(self, config: EngineConfig) -> Callable[[int], None]:
        """Enqueues the cheapest variant of a bucket."""
        address = self.cuda_stream.cuda_stream
        if config.enforce_eager:
            return lambda bucket: self._launch(bucket, ARGMAX, address)
        return lambda bucket: self.graphs.native.launch(bucket, ARGMAX, address)

    def _launch(self, bucket: int, needs: int, cuda_stream: int) -> None:
        """A step's kernels one by one; bucket -1 is block copies. Called by the step thread."""
        with self.on_device(), torch.cuda.stream(self.cuda_stream):
            if bucket < 0:
                self.steps.copy_blocks()
            else:
                self.steps.run(self.buckets[bucket], needs)


def _load_ranks(config: EngineConfig, first: torch.device, *, progress: bool) -> list[GpuRank]:
    """Load each GPU's part of the model, from the first one on. All choose the plans of the first."""
    ranks: list[GpuRank] = []
    for rank in range(config.tensor_parallel_size):
        device = torch.device("cuda", first.index + rank)
        with torch.cuda.device(device):
            torch.empty(1, device=device)  # torch loads the CUDA runtime when it first needs it
            native = CudaDevice(loaded_libcudart(), device.index)
            ops = CudaOps(device, cuda_options(config, examine(device)))
            if ranks:
                ops.choices = ranks[0].ops.choices
            ranks.append(GpuRank.load(config, native, ops, rank, progress=progress))
    reach_peers(ranks)
    return ranks


def _prepare(
    config: EngineConfig, rank: GpuRank, buckets: list[Bucket], host_rows: HostRows | None, groups: Groups
) -> int:
    """Compile the kernels of a GPU; its bytes for keys and values."""
    loaded, device = rank.loaded, rank.device
    with torch.cuda.device(device):
        state_bytes, step_bytes = prepare(
            config, loaded, rank.ops, rank.native, buckets, host_rows, rank.exchange, groups
        )
        state_bytes += gathered_bytes(config, loaded.kv_bytes_per_block(config))
        return memory.device_budget(config, device, state_bytes, step_bytes, len(VARIANTS) * len(buckets))


def _other_rank(config: EngineConfig, rank: GpuRank, num_blocks: int, first: Staging) -> OtherRank:
    with torch.cuda.device(rank.device):
        steps, buffers = make_steps(
            config, rank.loaded, rank.ops, rank.native, num_blocks, exchange=rank.exchange, first=first
        )
        cuda_stream = torch.cuda.Stream(rank.device)  # type: ignore[no-untyped-call]
        return OtherRank(rank, steps, buffers, CapturedSteps(rank.native), cuda_stream)


def cuda_options(config: EngineConfig, gpu: Gpu) -> CudaOptions:
    """Return the settings of the kernels that the configuration asks for. Raises ConfigError if the card cannot run
    them."""
    needed = {f"quantization={config.quantization}": FORMATS[at_load(config.quantization).packed]}
    if config.float8_cache:
        needed[f"kv_cache_dtype={config.kv_cache_dtype}"] = FORMATS[FLOAT8]
    for setting, form in needed.items():
        if not form.runs_on(gpu):
            major, minor = gpu.capability
            raise ConfigError(f"{setting} needs {form.needs}; {gpu.name} has {major}.{minor}")
    return CudaOptions(
        PlanTable.load(gpu.name),
        pdl=config.programmatic_launch and gpu.dependent_launch,
        gpu=gpu,
        batch_invariant=config.batch_invariant,
        l2_cache_hints=config.l2_cache_hints,
    )


def without_graphs(config: EngineConfig, loaded: LoadedModel) -> EngineConfig:
    """Return the configuration; with enforce_eager for a model whose steps wait for the device, and a warning."""
    if not loaded.waits_at or config.enforce_eager:
        return config
    logger.warning(
        "%s waits for the device (%s): its steps are not captured, and run slower", loaded.architecture, loaded.waits_at
    )
    return replace(config, enforce_eager=True)


def find_gpu(config: EngineConfig) -> torch.device:
    """Return the GPU that the configuration names. Raises ConfigError if there is none of that number."""
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device={config.device}, but torch sees no GPU: check the driver, and that torch is built for CUDA"
        )
    count = torch.cuda.device_count()
    if config.device_index >= count:
        there = "one GPU, cuda:0" if count == 1 else f"{count} GPUs, cuda:0 to cuda:{count - 1}"
        raise ConfigError(f"device={config.device}, but torch sees {there}")
    last = config.device_index + config.tensor_parallel_size - 1
    if last >= count:
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size} takes cuda:{config.device_index} to cuda:{last}, but "
            f"torch sees {count} GPU{'s' if count > 1 else ''}"
        )
    return torch.device("cuda", config.device_index)


def _too_little_memory(device: torch.device) -> str:
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"the memory of {device} is exhausted ({free >> 20:,} of {total >> 20:,} MiB are free): lower "
        "max_num_batched_tokens, max_num_seqs, gpu_memory_utilization or kv_cache_memory_bytes, or end other "
        "programs on this GPU"
    )
