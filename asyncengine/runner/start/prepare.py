"""Preparation of a start before it captures: compiles kernels, measures plans, and allocates the memory of a step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

import torch

from asyncengine._core import CudaDevice, Staging
from asyncengine.config import EngineConfig
from asyncengine.kernels.cuda.comm.exchange import Exchange
from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.launch.compile_processes import MAX_COMPILATIONS
from asyncengine.kernels.cuda.launch.compiling import compile_launches
from asyncengine.kernels.cuda.linear.candidates import candidates
from asyncengine.kernels.cuda.linear.choose import ROWS_OF_CUBLAS, Choices, default_plan, fallback
from asyncengine.kernels.cuda.linear.plan import MAX_ROWS, Plan, Site
from asyncengine.kernels.cuda.linear.tables import PlanTable, keep
from asyncengine.kernels.cuda.ops import CudaOps
from asyncengine.runner.host.rows import HostRows
from asyncengine.runner.loop_config import step_loop_config
from asyncengine.runner.start.tuning import Tuner
from asyncengine.runner.state import memory
from asyncengine.runner.state.groups import Groups
from asyncengine.runner.steps.buckets import Bucket
from asyncengine.runner.steps.device_steps import VARIANTS, DeviceSteps, StepBuffers
from asyncengine.runner.steps.model_runner import LoadedModel

logger = logging.getLogger(__name__)

_BUDGET_S = 30.0
"""Seconds by which measuring may prolong a start; the next start continues where this one ended."""
_TRIED = 8
"""Plans that an engine measures of a site, beside cuBLAS. With plans of two models of three given, they hold the
fastest of the hundred candidates for the third in three cases of five."""


def make_steps(
    config: EngineConfig,
    loaded: LoadedModel,
    ops: CudaOps,
    native: CudaDevice,
    num_blocks: int,
    host_rows: HostRows | None = None,
    exchange: Exchange | None = None,
    first: Staging | None = None,
    groups: Groups = memory.ONE_GROUP,
) -> tuple[DeviceSteps, StepBuffers]:
    """Allocate the steps. ``first``, beside an ``exchange``, is the staging of the first GPU, which this follows.
    ``groups`` divides the layers."""
    room = loaded.state_room(config)
    cache = memory.allocate(config, loaded.config, num_blocks, loaded.dtype, ops, loaded.kv_scales, room, groups)
    # The host tier comes later, and its size does not matter here: with one there may be lanes.
    info = loaded.info(config, num_blocks, 0 if host_rows is None else 1, groups=groups)
    staging = Staging.following(first) if first else Staging(native, step_loop_config(config, info), config.staging)
    buffers = StepBuffers.allocate(staging, config.max_num_seqs, ops.device, reads_only=first is not None)
    lanes = None if host_rows is None else host_rows.lanes(buffers.source.header)
    return DeviceSteps(config, loaded, ops, buffers, cache, lanes, exchange), buffers


def prepare(
    config: EngineConfig,
    loaded: LoadedModel,
    ops: CudaOps,
    native: CudaDevice,
    buckets: list[Bucket],
    host_rows: HostRows | None = None,
    exchange: Exchange | None = None,
    groups: Groups = memory.ONE_GROUP,
) -> tuple[int, int]:
    """Compile kernels and measure plans; then bytes of the steps' state, and bytes that the largest step takes beside.

    The steps are empty and run over a cache of one block. The memory that compiling and measuring take is free again.
    """
    device = ops.device
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    steps, buffers = make_steps(config, loaded, ops, native, 1, host_rows, exchange, groups=groups)
    state_bytes = torch.cuda.memory_allocated(device) - before
    prepare_kernels(config, ops, steps, buckets, Tuner(ops.device, ops.gpu, **ops.options.for_tma))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    steps.run(buckets[-1], VARIANTS[-1])
    torch.cuda.synchronize(device)
    step_bytes = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    del steps, buffers
    torch.cuda.empty_cache()
    return state_bytes, step_bytes


# ---- kernels ----


def prepare_kernels(
    config: EngineConfig, ops: CudaOps, steps: DeviceSteps, buckets: list[Bucket], tuner: Measuring
) -> None:
    """Compile what the steps of these buckets launch, and measure plans for projections that no table knows."""
    threads = min(MAX_COMPILATIONS, config.num_threads)
    _compile(steps, buckets, ops.device, threads)
    if config.tune_linear and config.programmatic_launch and ops.choices.missing:
        tune_missing(ops.choices, tuner, threads=threads)
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


# ---- plans ----


class Measuring(Protocol):
    """The methods of a Tuner that ``measure`` calls."""

    def compile(self, plans: Mapping[Site, Iterable[Plan]], threads: int) -> None: ...

    def fastest(self, site: Site, plans: Iterable[Plan]) -> list[tuple[float, Plan]]: ...


def tune_missing(choices: Choices, tuner: Measuring, *, threads: int) -> None:
    """Measure plans for the projections that were asked for and that no table knows; keep them for later starts."""
    started, wanted = time.monotonic(), len(choices.missing)
    known = PlanTable.shipped()
    known.update(choices.table)
    measured = measure(choices.missing, known, tuner, choices.gpu, budget_s=_BUDGET_S, threads=threads)
    choices.learn(measured)
    logger.info(
        "measured plans for %d of %d kinds of projection in %.1f s; --no-tune-linear (tune_linear=False) turns it off",
        len(measured),
        wanted,
        time.monotonic() - started,
    )
    try:
        if len(measured):
            keep(choices.gpu.name, measured)
    except OSError as e:
        logger.warning("the plans cannot be kept, so the next start will measure them again: %s", e)


def measure(
    sites: Iterable[Site],
    known: PlanTable,
    tuner: Measuring,
    gpu: Gpu,
    *,
    budget_s: float,
    threads: int,
    clock: Callable[[], float] = time.monotonic,
) -> PlanTable:
    """The fastest of the likely plans for each of the sites, as far as ``budget_s`` seconds reach.

    Few rows come first, where there is most to win; of as many rows what reads norms, which decides who may leave
    parts to them. ``known`` are the plans that say what is likely. A site that there is no memory to measure for is
    left out.
    """
    measured, end = PlanTable(), clock() + budget_s
    ordered = sorted(sites, key=lambda site: (site.rows, site.add, -site.weight_rows * site.inner, repr(site)))
    together = max(1, 2 * threads // _TRIED)  # enough to compile at a time for all threads
    for i in range(0, len(ordered), together):
        plans = {site: worth_trying(site, known, gpu) for site in ordered[i : i + together]}
        if clock() >= end:
            break
        tuner.compile(plans, threads)
        for site, some in plans.items():
            if clock() >= end:
                break
            some = allowed(site, some, known, measured)
            try:
                timed = tuner.fastest(site, some) if len(some) > 1 else [(0.0, some[0])]
            except torch.OutOfMemoryError:
                logger.warning("too little memory of the GPU is free to measure plans for %s", site)
                continue
            if timed:
                measured.add(site, timed[0][1])
    return measured


def allowed(site: Site, plans: Iterable[Plan], *tables: PlanTable) -> list[Plan]:
    """Return the plans, without those that would take a norm out of the projections that read it."""
    apart = all(table.norms_are_apart(site) for table in tables)
    return [plan for plan in plans if apart or not plan.leaves_parts]


def worth_trying(site: Site, known: PlanTable, gpu: Gpu, count: int = _TRIED) -> list[Plan]:
    """Return the plans to try: those that run without measuring, and the likely ones."""
    return list(dict.fromkeys((fallback(site), default_plan(site, gpu), *likely(site, known, gpu, count))))


def likely(site: Site, known: PlanTable, gpu: Gpu, count: int) -> list[Plan]:
    """The candidates, at most ``count``, that are most like the best plans of sites like this one; cuBLAS aside."""
    near = [(s, p, _site_distance(site, s)) for s, p in known.items() if s.rows == site.rows and p.kind != "cublas"]

    def distance(plan: Plan) -> float:
        alike = ((s, p, d) for s, p, d in near if _family(p) == _family(plan))
        return min((d + _plan_distance(site, plan, s, p) for s, p, d in alike), default=math.inf)

    plans = (plan for plan in candidates(site, gpu) if plan.kind != "cublas")
    return sorted(plans, key=distance)[:count]


def _family(plan: Plan) -> str:
    """Tiles that are fast for one of the two kernels are fast for the other."""
    return "tiled" if plan.kind == "tma" else plan.kind


def _site_distance(a: Site, b: Site) -> float:
    """Return the distance of two sites, in doublings of a dimension."""
    kinds = ((a.activation == "silu_mul") != (b.activation == "silu_mul")) + ((a.norm == "none") != (b.norm == "none"))
    kinds += (a.weight != b.weight) + ((a.activation == "argmax") != (b.activation == "argmax"))
    sizes = abs(math.log2(a.weight_rows / b.weight_rows)) + abs(math.log2(a.inner / b.inner))
    return 0.5 * (sizes + kinds)


def _plan_distance(site: Site, plan: Plan, other_site: Site, other: Plan) -> float:
    """Return the distance of two plans, in doublings of a tile, of the bytes in flight, or of the programs that share
    the work."""
    wholes = (
        plan.columns / other.columns,
        (plan.warps / other.warps) ** 2,
        (plan.split / other.split) ** 2,
    )
    halves = (
        _in_flight(plan) / _in_flight(other),
        plan.inner / other.inner,
        max(1, plan.rows) / max(1, other.rows),
        _programs(site, plan) / _programs(other_site, other),
    )
    doublings = sum(abs(math.log2(ratio)) for ratio in wholes) + 0.5 * sum(abs(math.log2(ratio)) for ratio in halves)
    kinds = (plan.kind != other.kind) + (plan.fused_norm != other.fused_norm) + (plan.holds != other.holds)
    return doublings + abs(plan.ahead - other.ahead) + 0.5 * kinds


def _in_flight(plan: Plan) -> int:
    """Elements of a program's tiles in shared memory; 1 if it has none there."""
    return (plan.rows + plan.columns) * plan.inner * plan.stages if plan.rows else 1


def _programs(site: Site, plan: Plan) -> float:
    return site.weight_rows / plan.columns * plan.split / max(1, plan.rows)
