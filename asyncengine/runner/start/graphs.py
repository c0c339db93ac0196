"""Every kind of step as a CUDA graph, captured at start and instantiated outside of torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncengine._core import CudaDevice, CudaGraphs
from asyncengine.errors import ConfigError
from asyncengine.runner.host.tier import HostTier
from asyncengine.runner.steps.buckets import Bucket
from asyncengine.runner.steps.device_steps import VARIANTS, DeviceSteps

logger = logging.getLogger(__name__)


def loaded_libcudart() -> str:
    """Path of the CUDA runtime that torch has loaded. ConfigError if it has none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if "libcudart" in path and path.startswith("/"):
            return path
    raise ConfigError("torch has loaded no CUDA runtime library: install a build of torch for CUDA, or set device=cpu")


class CapturedSteps:
    """The graphs of all buckets. torch's graph objects own the memory; they live as long as this does."""

    def __init__(self, device: CudaDevice) -> None:
        self.native = CudaGraphs(device)
        self._captured: list[torch.cuda.CUDAGraph] = []

    def capture(
        self, steps: DeviceSteps, buckets: list[Bucket], cuda_stream: torch.cuda.Stream, *, progress: bool
    ) -> None:
        """Warm up and capture each bucket for each variant; they share one pool of memory.

        The kernels of all steps must be compiled and loaded, and the next StepInput an empty one. Raises
        torch.OutOfMemoryError.
        """
        started, pool = time.monotonic(), torch.cuda.graph_pool_handle()
        before = torch.cuda.mem_get_info(cuda_stream.device)[0]
        variants: dict[Bucket, list[tuple[int, int]]] = {}
        with torch.cuda.stream(cuda_stream), _bar(len(VARIANTS) * len(buckets), progress) as bar:
            # The largest first: what it takes of the pool serves all others.
            for bucket in reversed(buckets):
                variants[bucket] = []
                steps.run(bucket, VARIANTS[-1])  # loads what libraries have, which a capture must not
                for needs in VARIANTS:
                    graph = self._capture(partial(steps.run, bucket, needs), cuda_stream, pool)
                    variants[bucket].append((needs, graph))
                    bar.update(1)
            steps.copy_blocks()
            self.native.set_copy_blocks(self._capture(steps.copy_blocks, cuda_stream, pool))
        for bucket in buckets:
            self.native.add_bucket(**bucket._asdict(), variants=variants[bucket])
        self.native.upload(cuda_stream.cuda_stream)
        cuda_stream.synchronize()
        logger.info(
            "captured %d graphs in %.1f s; they take %s MiB",
            len(self._captured),
            time.monotonic() - started,
            f"{(before - torch.cuda.mem_get_info(cuda_stream.device)[0]) >> 20:,}",
        )

    def capture_moves(self, tier: HostTier, cuda_stream: torch.cuda.Stream) -> None:
        """The graphs of a host tier's transfers, whose lists are empty."""
        pool, graphs = torch.cuda.graph_pool_handle(), []
        with torch.cuda.stream(cuda_stream):
            for transfer in tier.transfers:
                tier.enqueue(transfer)  # compiles and loads the kernel
                graphs.append(self._capture(partial(tier.enqueue, transfer), cuda_stream, pool))
        self.native.set_host_pool(tier.pool, graphs)

    def capture_one(self, enqueue: Callable[[], None], cuda_stream: torch.cuda.Stream) -> int:
        """A graph of its own, after a launch that compiles and loads its kernels; torch's address of it."""
        with torch.cuda.stream(cuda_stream):
            enqueue()
            return self._capture(enqueue, cuda_stream, torch.cuda.graph_pool_handle())

    def _capture(self, enqueue: Callable[[], None], cuda_stream: torch.cuda.Stream, pool: Any) -> int:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        cuda_stream.synchronize()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            enqueue()
        finally:
            graph.capture_end()
        self._captured.append(graph)
        return int(graph.raw_cuda_graph())


def _bar(total: int, enabled: bool) -> Any:
    """A progress bar on a terminal's standard error, or nothing; a context manager."""
    from tqdm import tqdm

    return tqdm(total=total, desc="Capturing graphs", disable=None if enabled else True)
