"""GPUs that hold a model together: their parts loaded, their memory sized, their steps captured and connected.

Until ``connect_ranks`` every GPU runs steps alone, for its kernels to be compiled, measured and captured: none waits
for another, and what steps compute is void.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from asyncengine._core import CudaDevice, CudaGraphs, Staging
from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError
from asyncengine.kernels.cuda.comm import exchange as comm
from asyncengine.kernels.cuda.comm.exchange import Exchange
from asyncengine.kernels.cuda.ops import CudaOps
from asyncengine.runner.loop_config import SCORED
from asyncengine.runner.start.calibration import with_kv_scales
from asyncengine.runner.start.graphs import CapturedSteps
from asyncengine.runner.state.kv_scales import PROMPT_TOKENS
from asyncengine.runner.steps.buckets import Bucket
from asyncengine.runner.steps.device_steps import DeviceSteps, StepBuffers
from asyncengine.runner.steps.model_runner import LoadedModel, load_model


@dataclass(slots=True)
class GpuRank:
    """A GPU with its part of the model; the only one has all of it."""

    native: CudaDevice
    ops: CudaOps
    loaded: LoadedModel
    exchange: Exchange | None

    @property
    def device(self) -> torch.device:
        return self.ops.device

    @classmethod
    def load(cls, config: EngineConfig, native: CudaDevice, ops: CudaOps, rank: int, *, progress: bool) -> GpuRank:
        """Load the part of a rank. ``load_model`` says what is raised."""
        loaded = load_model(config, ops, progress=progress and rank == 0, rank=rank)
        if loaded.ranks == 1:
            return cls(native, ops, loaded, None)
        model, most = loaded.config, max(config.max_num_batched_tokens, PROMPT_TOKENS)
        logits = (config.max_num_seqs + SCORED) * model.vocab_size if loaded.model.splits_head else 0
        exchange = comm.allocate(
            rank, loaded.ranks, most, model.hidden_size, loaded.dtype, ops.device, logits=logits, pdl=ops.options.pdl
        )
        ops.reduction = exchange.reduce
        return cls(native, ops, loaded, exchange)


@dataclass(slots=True)
class OtherRank:
    """The steps of a GPU beside the first."""

    rank: GpuRank
    steps: DeviceSteps
    buffers: StepBuffers
    graphs: CapturedSteps
    cuda_stream: torch.cuda.Stream

    def capture(self, buckets: list[Bucket]) -> None:
        """Capture the steps of these buckets. Raises torch.OutOfMemoryError."""
        with torch.cuda.device(self.rank.device):
            self.graphs.capture(self.steps, buckets, self.cuda_stream, progress=False)

    def restart(self) -> None:
        with torch.cuda.device(self.rank.device):
            self.steps.restart()
            torch.cuda.synchronize(self.rank.device)

    def for_loop(self) -> tuple[CudaDevice, Staging, CudaGraphs, int]:
        """Return what the step loop launches."""
        return self.rank.native, self.buffers.staging, self.graphs.native, self.cuda_stream.cuda_stream


def check_ranks(config: EngineConfig) -> None:
    """Raises ConfigError, with its name, for a setting that GPUs together do not have."""
    if config.tensor_parallel_size == 1:
        return
    refused = {
        "enforce_eager": config.enforce_eager,
        "host_kv_memory_bytes": config.host_kv_memory_bytes is not None,
        "target_itl_ms": config.needs_costs and config.host_kv_memory_bytes is None,
        "staging=pageable": config.staging == "pageable",
    }
    for name, wanted in refused.items():
        if wanted:
            raise ConfigError(f"{name} needs tensor_parallel_size=1 on GPUs yet, got {config.tensor_parallel_size}")


def reach_peers(ranks: Sequence[GpuRank]) -> None:
    """Let every GPU read and write the others' memory. Raises ConfigError if one cannot, or if they are not alike."""
    names = {rank.ops.gpu.name for rank in ranks}
    if len(names) > 1:
        raise ConfigError(
            f"tensor_parallel_size={len(ranks)} needs GPUs that are alike, got {', '.join(sorted(names))}"
        )
    if len(ranks) > 1:
        comm.reach_peers([rank.device for rank in ranks])


def calibrate(config: EngineConfig, ranks: Sequence[GpuRank]) -> None:
    """Give every rank the scales that its cache needs, if the cache is in float8 and the checkpoint has none.

    A GPU alone runs the fixed prompt at once. Several run it together, each from a thread of its own: a call that waits
    for one of them keeps none from going on. They have run it alone before, which loads its kernels.
    """
    exchanges = [rank.exchange for rank in ranks if rank.exchange is not None]

    def run(rank: GpuRank) -> LoadedModel:
        with torch.cuda.device(rank.device):
            loaded = with_kv_scales(config, rank.loaded, rank.ops)
            torch.cuda.synchronize(rank.device)
            return loaded

    for exchange in exchanges:
        comm.connect_alone(exchange)
    made = [run(rank) for rank in ranks]
    if exchanges and made[0] is not ranks[0].loaded:
        comm.connect(exchanges)
        comm.begin_together(exchanges)
        _synchronize(ranks)
        with ThreadPoolExecutor(len(ranks)) as threads:
            made = list(threads.map(run, ranks))
        comm.end_together(exchanges)
        _synchronize(ranks)
    for rank, loaded in zip(ranks, made, strict=True):
        rank.loaded = replace(rank.loaded, kv_scales=loaded.kv_scales)


def connect_ranks(first: GpuRank, steps: DeviceSteps, staging: Staging, others: Sequence[OtherRank]) -> None:
    """Have the steps of all GPUs wait for each other from now on."""
    exchanges = [rank.exchange for rank in (first, *(other.rank for other in others)) if rank.exchange is not None]
    comm.connect(
        exchanges, [each.state.slots for each in (steps, *(other.steps for other in others))], staging.released
    )
    comm.begin_together(exchanges)
    _synchronize([first, *(other.rank for other in others)])


def _synchronize(ranks: Sequence[GpuRank]) -> None:
    for rank in ranks:
        torch.cuda.synchronize(rank.device)
