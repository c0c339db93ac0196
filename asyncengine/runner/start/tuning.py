"""Times the plans of a projection on the card.

A start measures a few likely plans (see prepare.py), bench/tune_linear.py all of them. A projection is timed as a step
runs it: captured in a graph, one call behind another over different weights, so that no weight is in the L2 cache when
its turn comes.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Unpack

import torch
from torch import Tensor
from triton import TritonError

from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.launch.compiling import compile_launches
from asyncengine.kernels.cuda.launch.programmatic import TmaOptions
from asyncengine.kernels.cuda.linear.formats.registry import format_of_kind, weight_bytes
from asyncengine.kernels.cuda.linear.handle import CudaLinear
from asyncengine.kernels.cuda.linear.plan import Plan, Site
from asyncengine.kernels.cuda.linear.residual import Residual, Unnormed
from asyncengine.kernels.cuda.linear.tables import PlanTable
from asyncengine.kernels.cuda.ops import CudaBatch, CudaOps, CudaOptions
from asyncengine.kernels.cuda.sampling.sample import sample
from asyncengine.kernels.cuda.step.tensors import DeviceStep, allocate_step
from asyncengine.kernels.ops import Norm

logger = logging.getLogger(__name__)

FAILURES = (RuntimeError, ValueError, TritonError)
"""Errors of plans that cannot run: too much shared memory, too many registers."""
_COLD_BYTES = 160 << 20
"""Weights of one timing: three times the L2 cache of a Hopper GPU."""
_MIN_CALLS, _MAX_CALLS = 3, 48


class Tuner:
    """Memory to time projections with; one site after another."""

    def __init__(self, device: torch.device, gpu: Gpu, **how: Unpack[TmaOptions]) -> None:
        self._device = device
        self._options = CudaOptions(gpu=gpu, **how)

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
        case = _Case.allocate(site, self._device)
        cuda_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self._device)
        timed = []
        for plan in plans:
            try:
                timed.append((self._time(case, plan, cuda_stream, repeats), plan))
            except FAILURES as e:
                if isinstance(e, torch.OutOfMemoryError):
                    raise
        return sorted(timed, key=lambda entry: entry[0])

    def _time(self, case: _Case, plan: Plan, cuda_stream: torch.cuda.Stream, repeats: int) -> float:
        ops = self._ops(case.site, plan)
        with torch.inference_mode(), torch.cuda.stream(cuda_stream):
            case.call(ops, case.handles[0])
            cuda_stream.synchronize()
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
        self, site: Site, handles: list[CudaLinear], x: Tensor, residual: Tensor, norm: Norm, step: DeviceStep
    ) -> None:
        self.site = site
        self.handles = handles
        self._x = x
        self._residual = residual
        self._norm = norm
        self._step = step
        """step of rows that are all sampled"""
        self._header = torch.zeros(2, dtype=torch.int64, device=x.device)
        self._words = torch.zeros(1, len(x), dtype=torch.int64, device=x.device)

    @classmethod
    def allocate(cls, site: Site, device: torch.device, calls: int | None = None) -> _Case:
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).to(torch.bfloat16)

        calls = calls or min(_MAX_CALLS, max(_MIN_CALLS, -(-_COLD_BYTES // weight_bytes(site))))
        handles, form = [], format_of_kind(site.weight)
        for _ in range(calls):
            weight = random(site.weight_rows, site.inner).mul_(site.inner**-0.5)
            bias = random(site.weight_rows) if site.bias else None
            handles.append(CudaLinear(form.make(weight), bias, site.weight_rows))
        width = site.columns if site.add else site.inner
        norm = Norm(random(width), random(width) if site.norm == "layer" else None, 1e-5)
        step = allocate_step(site.rows, 1, site.rows, site.rows, device)
        for rows_of in (step.sample_index, step.sample_slot):
            rows_of.copy_(torch.arange(site.rows))
        return cls(site, handles, random(site.rows, site.inner), random(site.rows, site.columns), norm, step)

    def call(self, ops: CudaOps, handle: CudaLinear) -> None:
        """Run the projection with the norm that adds up parts, or the sampler that reads ranks, whether a plan leaves
        some or not."""
        batch, pdl = CudaBatch(self._step, needs=0), ops.options.pdl
        if self.site.activation == "argmax":
            logits = ops.logits(Residual(self._x), self._norm, handle, batch)
            sample(logits, self._step, self._header, self._words, needs=0, pdl=pdl)
            return
        if not self.site.add:
            norm = None if self.site.norm == "none" else self._norm
            ops.norm_linear(Residual(self._x), norm, handle, batch, self.site.activation)
            return
        residual = Residual(self._residual)
        ops.linear_add_(self._x, handle, residual, batch)
        if residual.state == "put off" or (self.site.rows > 1 and handle.format.prepares_norms):
            norm_behind(residual, self._norm, pdl=pdl)


def norm_behind(residual: Residual, norm: Norm, *, pdl: bool) -> Tensor | Unnormed:
    """Run the norm that reads an addition, before its projection, which may do the rest of the norm."""
    return residual.prepare(norm) or residual.read_by_kernel(norm, pdl=pdl)


def _try(call: Callable[[], None]) -> None:
    with contextlib.suppress(*FAILURES):
        call()
