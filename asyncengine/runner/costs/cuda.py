"""Times the captured steps of a GPU before an engine starts, copies of pinned memory, and the way to the host."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch
from torch import Tensor

from asyncengine._core import HostPool
from asyncengine.api.model_info import ModelInfo
from asyncengine.config import EngineConfig
from asyncengine.models.config import ModelConfig
from asyncengine.runner.costs.cpu import Rows, Sizes, known_costs, measure, time_host_attention
from asyncengine.runner.costs.replay import Row, choose_bucket, launch_us, staged
from asyncengine.runner.costs.table import Copy, CostFile, CostTable, KnownCosts
from asyncengine.runner.loop_config import decodes_on_host
from asyncengine.runner.steps.buckets import Bucket
from asyncengine.runner.steps.device_steps import DeviceSteps

logger = logging.getLogger(__name__)

BUDGET_S = 2.5
_MOST_CONTEXT = 16384
_COPY_BYTES = (1 << 14, 1 << 18, 1 << 22, 1 << 25)
_REPEATS = 20
_UNCOUNTED = 5
"""Measurements while the clocks rise."""
_LAUNCHES, _WARM_UP = 2, 1
_PAIRS = 5
"""Pairs of buckets that differ in lanes alone, at most."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Steps that nobody uses yet."""

    steps: DeviceSteps
    buckets: Sequence[Bucket]
    launch: Callable[[int], None]
    """enqueues the step of a bucket on the CUDA stream"""
    cuda_stream: torch.cuda.Stream
    host_pool: HostPool | None = None
    """pool of the host tier, if there is one"""


def cuda_costs(
    config: EngineConfig, info: ModelInfo, model: ModelConfig, machine: Machine, *, anew: bool = False
) -> KnownCosts | None:
    """Kept ones, or measured; None, with a warning, if steps cannot be timed. Afterwards the steps are to be restarted.

    ``anew``: whatever is kept.
    """
    file = CostFile.find(config, model, info.dtype, info.device)

    def measure_all() -> CostTable:
        end = time.monotonic() + BUDGET_S
        sizes = Sizes.of(config, info, _MOST_CONTEXT)
        for _ in range(_UNCOUNTED):
            time_step(machine, [(sizes.chunks[0], 0)])
        table = measure(sizes, lambda rows: time_step(machine, rows), end, time.monotonic)
        if (anew and info.can_decode_on_host) or decodes_on_host(config, info):
            pool = machine.host_pool
            attention = time_host_attention(config, model, info.dtype, transposed_keys=False, pool=pool)
            table = msgspec.structs.replace(table, host_attention=attention, exchange_ns=time_exchange(machine, info))
        try:
            to_device, to_host = time_copies(machine.cuda_stream)
        except RuntimeError as e:  # host memory that cannot be pinned
            logger.warning("copies cannot be timed: %s", e)
            return table
        return msgspec.structs.replace(
            table, to_device=to_device, to_host=to_host, crossing_ns=time_crossing(machine.cuda_stream)
        )

    try:
        return known_costs(file, measure_all, anew=anew)
    except RuntimeError as e:  # no memory; or what a step gave is no token, as of a model that classifies
        logger.warning("the costs of steps are not known, and no target is heeded: %s", e)
        return None


def time_step(machine: Machine, rows: Rows) -> float:
    """Seconds of a greedy step, launched back to back."""
    planned = [Row(*row) for row in rows]
    return _time_bucket(machine, planned, choose_bucket(machine.buckets, planned))


def _time_bucket(machine: Machine, planned: Sequence[Row], bucket: int) -> float:
    def launch(count: int) -> None:
        for _ in range(count):
            machine.launch(bucket)

    # At least one for each place of the ring: each must hold a result in the end.
    places = len(machine.steps.source.outputs)
    synchronize = partial(torch.cuda.synchronize, machine.steps.source.state.device)
    with staged(machine.steps, planned, 1, synchronize, own_tables=True):
        us = launch_us(launch, max(_LAUNCHES, places), machine.cuda_stream, warm_up=_WARM_UP)
    return us * 1e-6


def time_exchange(machine: Machine, info: ModelInfo) -> float:
    """Nanoseconds that lanes add to a step of as many tokens: of a few buckets the median. 0 if none has lanes."""
    added = []
    for with_lanes, without in lane_pairs(machine.buckets):
        bucket = machine.buckets[with_lanes]
        rows = max(1, bucket.max_tokens - bucket.lanes)
        planned = [Row(1, info.block_size - 1)] * min(rows, info.num_kv_blocks)
        added.append(_time_bucket(machine, planned, with_lanes) - _time_bucket(machine, planned, without))
    return max(0.0, 1e9 * statistics.median(added)) if added else 0.0


def lane_pairs(buckets: Sequence[Bucket]) -> list[tuple[int, int]]:
    """Decode steps with lanes, each beside the smallest without that has as many tokens: a few, of all sizes."""
    pairs = []
    for i, bucket in enumerate(buckets):
        if not bucket.lanes or not bucket.single_token_rows:
            continue
        fits = (
            k
            for k, other in enumerate(buckets)
            if not other.lanes and other.single_token_rows and other.max_tokens >= bucket.max_tokens
            and other.max_context == bucket.max_context
        )  # fmt: skip
        pairs += [(i, k) for k in [next(fits, None)] if k is not None]
    return pairs[:: max(1, len(pairs) // _PAIRS)][:_PAIRS]


def time_copies(cuda_stream: torch.cuda.Stream) -> tuple[list[Copy], list[Copy]]:
    """Time copies to the device and to the host, from pinned memory and to it, one copy at a time behind another."""
    most = max(_COPY_BYTES)
    host = torch.empty(most, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(most, dtype=torch.uint8, device=cuda_stream.device)
    to_device = [Copy(n, _copy_ns(device[:n], host[:n], cuda_stream)) for n in _COPY_BYTES]
    to_host = [Copy(n, _copy_ns(host[:n], device[:n], cuda_stream)) for n in _COPY_BYTES]
    return to_device, to_host


def _copy_ns(target: Tensor, source: Tensor, cuda_stream: torch.cuda.Stream) -> float:
    def launch(count: int) -> None:
        for _ in range(count):
            target.copy_(source, non_blocking=True)

    with torch.cuda.stream(cuda_stream):
        return 1e3 * launch_us(launch, _REPEATS, cuda_stream, warm_up=3)


def time_crossing(cuda_stream: torch.cuda.Stream) -> float:
    """Nanoseconds from the launch of a small kernel, with a copy behind it, until an event's query says it is over."""
    host = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    flag = torch.zeros(1, dtype=torch.int32, device=cuda_stream.device)
    samples = []
    with torch.cuda.stream(cuda_stream):
        for _ in range(_REPEATS):
            cuda_stream.synchronize()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            started = time.perf_counter_ns()
            flag.add_(1)
            host.copy_(flag, non_blocking=True)
            event.record()
            while not event.query():  # type: ignore[no-untyped-call]
                pass
            samples.append(time.perf_counter_ns() - started)
    return statistics.median(samples)
