"""Measures which plan is fastest for a kind of projection, on the card that is there.

A projection is timed as a step runs it: captured in a graph, one call behind another over different weights, so that
none of them is in the L2 cache when its turn comes.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable

import torch
from torch import Tensor

from asyncengine.kernels.cuda import CudaLinear, CudaOps, CudaOptions
from asyncengine.kernels.linear_plans import Plan, PlanTable, Site
from asyncengine.kernels.ops import Norm
from asyncengine.kernels.quantize import quantize_weights

_COLD_BYTES = 160 << 20
"""Weights of one timing: three times the L2 cache of a Hopper GPU."""
_MIN_CALLS, _MAX_CALLS = 3, 48


class Tuner:
    """Memory to time projections with; one site after another."""

    def __init__(self, device: torch.device, *, pdl: bool) -> None:
        self._device = device
        self._pdl = pdl
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def load(self, site: Site, plans: Iterable[Plan]) -> None:
        """Compile the kernels of plans, into Triton's cache."""
        case = _Case.allocate(site, self._device, calls=1)
        for plan in plans:
            with contextlib.suppress(RuntimeError, ValueError):
                case.call(self._ops(site, plan), case.handles[0])

    def fastest(self, site: Site, plans: Iterable[Plan], repeats: int = 5) -> list[tuple[float, Plan]]:
        """Microseconds of one projection by each plan, fastest first. Plans that cannot run are left out."""
        case = _Case.allocate(site, self._device)
        timed = []
        for plan in plans:
            try:
                timed.append((self._time(case, plan, repeats), plan))
            except (RuntimeError, ValueError) as e:  # too much shared memory, too many registers
                if isinstance(e, torch.OutOfMemoryError):
                    raise
        return sorted(timed, key=lambda entry: entry[0])

    def _time(self, case: _Case, plan: Plan, repeats: int) -> float:
        ops = self._ops(case.site, plan)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            case.call(ops, case.handles[0])
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream):
                for handle in case.handles:
                    case.call(ops, handle)
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
        return CudaOps(self._device, CudaOptions(PlanTable({site: plan}), self._pdl))


class _Case:
    """A site with its operands."""

    def __init__(self, site: Site, handles: list[CudaLinear], x: Tensor, stream: Tensor, norm: Norm | None) -> None:
        self.site = site
        self.handles = handles
        self._x = x
        self._stream = stream
        self._norm = norm

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
        norm = Norm(random(site.inner), random(site.inner) if site.norm == "layer" else None, 1e-5)
        rows = site.rows
        return cls(
            site, handles, random(rows, site.inner), random(rows, site.columns), None if site.norm == "none" else norm
        )

    def call(self, ops: CudaOps, handle: CudaLinear) -> None:
        if self.site.add:
            ops.linear_add_(self._x, handle, self._stream)
        elif self._norm is not None:
            ops.norm_linear(self._x, self._norm, handle, self.site.activation)
