"""Measures which plan is fastest for a kind of projection, on the card that is there.

An engine does so at its start for what no table knows, with few plans and for a limited time; bench/tune_linear.py
with all of them. A projection is timed as a step runs it: captured in a graph, one call behind another over different
weights, so that none of them is in the L2 cache when its turn comes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol, Unpack

import torch
from torch import Tensor
from triton import TritonError

from asyncengine.kernels.cuda.launch.compiling import compile_launches
from asyncengine.kernels.cuda.launch.programmatic import StreamingOptions
from asyncengine.kernels.cuda.linear.choose import (
    Plan,
    PlanTable,
    Site,
    candidates,
    default_plan,
    fallback,
    keep,
)
from asyncengine.kernels.cuda.linear.residual import Unnormed
from asyncengine.kernels.cuda.ops import CudaBatch, CudaLinear, CudaOps, CudaOptions, Stream
from asyncengine.kernels.cuda.rows import rows
from asyncengine.kernels.cuda.sampling.sample import sample
from asyncengine.kernels.cuda.step.tensors import DeviceStep, allocate_step
from asyncengine.kernels.float8 import quantize_weights
from asyncengine.kernels.ops import Norm

logger = logging.getLogger(__name__)

_BUDGET_S = 30.0
"""What a start may take longer; the next one goes on where this one ended."""
_TRIED = 8
"""Plans that an engine measures of a site, beside cuBLAS. With plans of two models of three given, they hold the
fastest of the hundred candidates for the third in three cases of five."""
FAILURES = (RuntimeError, ValueError, TritonError)
"""Of plans that cannot run: too much shared memory, too many registers."""
_COLD_BYTES = 160 << 20
"""Weights of one timing: three times the L2 cache of a Hopper GPU."""
_MIN_CALLS, _MAX_CALLS = 3, 48


class Tuner:
    """Memory to time projections with; one site after another."""

    def __init__(self, device: torch.device, **how: Unpack[StreamingOptions]) -> None:
        self._device = device
        self._options = CudaOptions(streamed=True, **how)

    def compile(self, plans: Mapping[Site, Iterable[Plan]], threads: int) -> None:
        """Compile the kernels of plans side by side, for ``fastest``; those that do not compile are left out."""
        calls, nowhere = [], torch.device("meta")
        for site, some in plans.items():
            case = _Case.allocate(site, nowhere, calls=1)
            for plan in some:
                if plan.kind != "cublas":
                    ops = CudaOps(nowhere, replace(self._options, plans=PlanTable({site: plan})))
                    calls.append(partial(_try, partial(case.call, ops, case.handles[0])))
        compile_launches(calls, self._device, threads)

    def fastest(self, site: Site, plans: Iterable[Plan], repeats: int = 5) -> list[tuple[float, Plan]]:
        """Microseconds of one projection by each plan, fastest first. Plans that cannot run are left out."""
        torch.cuda.empty_cache()  # what the graphs of the site before had
        case, stream = _Case.allocate(site, self._device), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        timed = []
        for plan in plans:
            try:
                timed.append((self._time(case, plan, stream, repeats), plan))
            except FAILURES as e:
                if isinstance(e, torch.OutOfMemoryError):
                    raise
        return sorted(timed, key=lambda entry: entry[0])

    def _time(self, case: _Case, plan: Plan, stream: torch.cuda.Stream, repeats: int) -> float:
        ops = self._ops(case.site, plan)
        with torch.inference_mode(), torch.cuda.stream(stream):
            case.call(ops, case.handles[0])
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")  # other engines of this process go on
            try:
                for handle in case.handles:
                    case.call(ops, handle)
            finally:
                graph.capture_end()
            samples: list[float] = []
            for repeat in range(repeats + 2):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                if repeat >= 2:
                    samples.append(float(start.elapsed_time(end)) * 1e3 / len(case.handles))
        return statistics.median(samples)

    def _ops(self, site: Site, plan: Plan) -> CudaOps:
        return CudaOps(self._device, replace(self._options, plans=PlanTable({site: plan})))


class _Case:
    """A site with its operands."""

    def __init__(
        self, site: Site, handles: list[CudaLinear], x: Tensor, stream: Tensor, norm: Norm, step: DeviceStep
    ) -> None:
        self.site = site
        self.handles = handles
        self._x = x
        self._stream = stream
        self._norm = norm
        self._step = step
        """of rows that are all sampled"""
        self._header = torch.zeros(2, dtype=torch.int64, device=x.device)
        self._words = torch.zeros(1, len(x), dtype=torch.int64, device=x.device)

    @classmethod
    def allocate(cls, site: Site, device: torch.device, calls: int | None = None) -> _Case:
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).to(torch.bfloat16)

        calls = calls or min(_MAX_CALLS, max(_MIN_CALLS, -(-_COLD_BYTES // site.weight_bytes)))
        handles = []
        for _ in range(calls):
            weight = random(site.weight_rows, site.inner).mul_(site.inner**-0.5)
            bias = random(site.weight_rows) if site.bias else None
            stored = quantize_weights([weight]) if site.weight == "fp8" else weight
            handles.append(CudaLinear(stored, bias, site.weight_rows))
        width = site.columns if site.add else site.inner
        norm = Norm(random(width), random(width) if site.norm == "layer" else None, 1e-5)
        step = allocate_step(site.rows, 1, site.rows, site.rows, device)
        for rows_of in (step.sample_index, step.sample_slot):
            rows_of.copy_(torch.arange(site.rows))
        return cls(site, handles, random(site.rows, site.inner), random(site.rows, site.columns), norm, step)

    def call(self, ops: CudaOps, handle: CudaLinear) -> None:
        """With the norm that adds up parts, or the sampler that reads ranks, whether a plan leaves some or not."""
        if self.site.activation == "argmax":
            batch, pdl = CudaBatch(self._step), ops.options.pdl
            logits = ops.logits(Stream(self._x), self._norm, handle, batch)
            sample(logits, self._step, self._header, self._words, needs=0, pdl=pdl)
            return
        if not self.site.add:
            ops.norm_linear(Stream(self._x), self._norm, handle, self.site.activation)
            return
        stream = Stream(self._stream)
        ops.linear_add_(self._x, handle, stream)
        if stream.pending or (self.site.rows > 1 and self.site.weight == "bf16"):
            norm_behind(stream, self._norm, pdl=ops.options.pdl)


def norm_behind(stream: Stream, norm: Norm, *, pdl: bool) -> Tensor | Unnormed:
    """What a norm that reads an addition takes before its projection runs, which may do the rest of it."""
    return stream.add_pending(norm) or rows.norm(stream.x, norm, parts=stream.parts, pdl=pdl)


def _try(call: Callable[[], None]) -> None:
    with contextlib.suppress(*FAILURES):
        call()


# ---- at the start of an engine ----


class Measuring(Protocol):
    """What ``measure`` asks of a Tuner."""

    def compile(self, plans: Mapping[Site, Iterable[Plan]], threads: int) -> None: ...

    def fastest(self, site: Site, plans: Iterable[Plan]) -> list[tuple[float, Plan]]: ...


def tune_missing(ops: CudaOps, gpu: str, tuner: Measuring, *, threads: int) -> None:
    """Measure plans for the projections that ``ops`` was asked for and knew none for; keep them for later starts."""
    started, wanted = time.monotonic(), len(ops.missing)
    known = PlanTable.shipped()
    known.update(ops.options.plans)
    measured = measure(
        ops.missing, known, tuner, budget_s=_BUDGET_S, threads=threads, streamed=ops.options.streamed
    )
    ops.options.plans.update(measured)
    ops.missing.difference_update(site for site, _ in measured.items())
    logger.info(
        "measured plans for %d of %d kinds of projection in %.1f s; --no-tune-linear (tune_linear=False) turns it off",
        len(measured),
        wanted,
        time.monotonic() - started,
    )
    try:
        if len(measured):
            keep(gpu, measured)
    except OSError as e:
        logger.warning("the plans cannot be kept, so the next start will measure them again: %s", e)


def measure(
    sites: Iterable[Site],
    known: PlanTable,
    tuner: Measuring,
    *,
    budget_s: float,
    threads: int,
    streamed: bool = True,
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
        plans = {site: worth_trying(site, known, streamed=streamed) for site in ordered[i : i + together]}
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
    """Without those that would take a norm out of the projections that read it."""
    apart = all(table.norms_are_apart(site) for table in tables)
    return [plan for plan in plans if apart or not plan.leaves_parts]


def worth_trying(site: Site, known: PlanTable, count: int = _TRIED, *, streamed: bool) -> list[Plan]:
    """What is run without measuring, and the likely ones."""
    return list(dict.fromkeys((fallback(site), default_plan(site), *likely(site, known, count, streamed=streamed))))


def likely(site: Site, known: PlanTable, count: int, *, streamed: bool = True) -> list[Plan]:
    """The candidates, at most ``count``, that are most like the best plans of sites like this one; cuBLAS aside."""
    near = [(s, p, _site_distance(site, s)) for s, p in known.items() if s.rows == site.rows and p.kind != "cublas"]

    def distance(plan: Plan) -> float:
        alike = ((s, p, d) for s, p, d in near if _family(p) == _family(plan))
        return min((d + _plan_distance(site, plan, s, p) for s, p, d in alike), default=math.inf)

    plans = (plan for plan in candidates(site, streamed=streamed) if plan.kind != "cublas")
    return sorted(plans, key=distance)[:count]


def _family(plan: Plan) -> str:
    """What is fast in tiles is so whether their weights are streamed or not."""
    return "tiled" if plan.kind == "streamed" else plan.kind


def _site_distance(a: Site, b: Site) -> float:
    """In doublings of a dimension."""
    kinds = ((a.activation == "silu_mul") != (b.activation == "silu_mul")) + ((a.norm == "none") != (b.norm == "none"))
    kinds += (a.weight != b.weight) + ((a.activation == "argmax") != (b.activation == "argmax"))
    sizes = abs(math.log2(a.weight_rows / b.weight_rows)) + abs(math.log2(a.inner / b.inner))
    return 0.5 * (sizes + kinds)


def _plan_distance(site: Site, plan: Plan, other_site: Site, other: Plan) -> float:
    """In doublings of a tile, of what is in flight, or of the programs that share the work."""
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
    kinds = (plan.kind != other.kind) + (plan.fused_norm != other.fused_norm)
    return doublings + abs(plan.ahead - other.ahead) + 0.5 * kinds


def _in_flight(plan: Plan) -> int:
    """Elements of a program's tiles in shared memory; 1 if it has none there."""
    return (plan.rows + plan.columns) * plan.inner * plan.stages if plan.rows else 1


def _programs(site: Site, plan: Plan) -> float:
    return site.weight_rows / plan.columns * plan.split / max(1, plan.rows)
