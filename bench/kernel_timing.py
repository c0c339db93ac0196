"""Timing of kernels, and the lines of bench/kernels.py: a kernel at one size, its floor, and torch's way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from gpu_common import BANDWIDTH

from asyncengine.cli.benchmarks.report import median

FLUSH_BYTES = 512 << 20
COLD_BYTES = 256 << 20
"""Buffers of the calls of a graph together: five times the L2 cache of a Hopper GPU."""
_MATRIX = 8192

Call = Callable[[], object]


class Timer:
    """Time of a call inside a captured graph, with its part of the gap to the next one.

    The calls of a graph are of one kernel, or of two in turn, on buffers of their own, COLD_BYTES together or more. A
    large buffer is read through the L2 cache before every replay, which also hides the launch of the graph.
    """

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self.repeats = repeats
        if device.type == "cuda":
            self._cuda_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def us(self, calls: Sequence[Call]) -> float:
        """Microseconds of one of the calls; the median of the repeats. On the CPU two of them run once."""
        if self.device.type != "cuda":
            some, started = calls[:2], time.perf_counter()
            for call in some:
                call()
            return 1e6 * (time.perf_counter() - started) / len(some)
        self._cuda_stream.wait_stream(torch.cuda.current_stream(self.device))  # where the buffers are filled
        with torch.cuda.stream(self._cuda_stream):
            for call in calls[:2]:  # compiles
                call()
            self._cuda_stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._cuda_stream):
                for call in calls:
                    call()
            return median([self._replay(graph, len(calls)) for _ in range(self.repeats + 2)][2:])

    def _replay(self, graph: torch.cuda.CUDAGraph, calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._flush.sum()  # reading leaves nothing to be written back
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / calls

    def us_if_possible(self, calls: Sequence[Call]) -> float | None:
        """Time the calls; None where torch has no kernel for them, or not the memory."""
        try:
            return self.us(calls)
        except RuntimeError as e:
            print(f"  torch cannot: {str(e).splitlines()[0]}", flush=True)
            return None


def copies_for(num_bytes: float, most: int = 32) -> int:
    """Count the sets of buffers of ``num_bytes`` that are cold together."""
    return max(2, min(most, round(COLD_BYTES / max(1.0, num_bytes))))


def matrix_rate(timer: Timer, size: int = _MATRIX) -> float:
    """Operations per second of torch's product of large bfloat16 matrices of normal numbers."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=timer.device) for _ in range(2))
    out = torch.empty_like(a)
    return 2e6 * size**3 / timer.us([lambda: torch.mm(a, b, out=out)] * 8)


@dataclass(frozen=True, slots=True)
class Line:
    """A kernel at one size."""

    part: str
    kernel: str
    shape: str
    size: str
    us: float
    bytes: float
    """bytes that must move, in and out"""
    flops: float = 0.0
    torch_us: float | None = None
    """Time of torch; None where torch has no such thing."""
    torch_way: str = ""
    at_least: float | None = None
    """the share of the floor that is asked for"""
    bandwidth: float = BANDWIDTH
    """bandwidth of the memory that the bytes come from"""

    def floor_us(self, rate: float) -> float:
        """Bytes over the bandwidth or operations over the matrix ``rate``, whichever takes longer."""
        return 1e6 * max(self.bytes / self.bandwidth, self.flops / rate)

    def share(self, rate: float) -> float:
        return self.floor_us(rate) / self.us

    @property
    def name(self) -> str:
        return f"{self.part}: {self.kernel}, {self.shape}, {self.size}"


def header() -> str:
    columns = f"{'ours µs':>10}{'floor µs':>10}{'share':>8}{'target':>8}{'torch µs':>10}{'torch/ours':>11}"
    return f"{'part':<10}{'kernel':<27}{'shape':<14}{'size':<24}{columns}  torch's way"


def row(line: Line, rate: float) -> str:
    target = "" if line.at_least is None else f"{line.at_least:.0%}"
    torch_us = "-" if line.torch_us is None else f"{line.torch_us:.2f}"
    ratio = "-" if line.torch_us is None else f"{line.torch_us / line.us:.2f}"
    labels = f"{line.part:<10}{line.kernel:<26} {line.shape:<13} {line.size:<23} "
    shares = f"{line.us:>10.2f}{line.floor_us(rate):>10.2f}{line.share(rate):>8.1%}{target:>8}"
    return f"{labels}{shares}{torch_us:>10}{ratio:>11}  {line.torch_way}"


Lines = Iterator[Line]
