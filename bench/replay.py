"""Bare replay of a decode step's graph, without an engine around it: what the engine's step time is compared with.

The StepInput is made here, in the layout of csrc/core/step_input.h, and stays the same for every replay. It needs an
idle engine without a prefix cache: block tables and KV are overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from asyncengine.runner.buckets import Bucket
from asyncengine.runner.device_steps import GREEDY, DeviceSteps

if TYPE_CHECKING:
    from asyncengine.runner.cuda_runner import CudaRunner

MAGIC = 0x53744932
SAMPLE, FROM_DEVICE = 1, 2
STEP = 2**31 - 1
"""Number of the replayed step; an engine would run for a month before it got there."""
_WARM_UP = 32
"""Replays before the clock starts: more than there are places in a ring, and enough for the clocks to rise."""


def decode_input(contexts: Sequence[int]) -> list[int]:
    """A StepInput, in 32-bit words: row i decodes slot i with ``contexts[i]`` tokens before it, greedily."""
    rows = len(contexts)
    total = 16 + 12 * rows
    header = [MAGIC, total, STEP, 0, rows, rows, rows, rows, 0, 0, 0, 0, 1, max(contexts), 0, 0]
    for i, context in enumerate(contexts):
        header += [i, i, 1, context, SAMPLE | FROM_DEVICE, 0, i, -1, 0, 0, 0, 0]
    return header


def decode_bucket(buckets: Sequence[Bucket], contexts: Sequence[int]) -> int:
    """Index of the bucket that the engine takes for a step of decode rows of ``contexts``: the first that fits."""
    rows, longest = len(contexts), max(contexts)
    return next(i for i, b in enumerate(buckets) if rows <= b.max_rows and longest <= b.max_context)


def stage(steps: DeviceSteps, contexts: Sequence[int]) -> None:
    """Make every launch from now on a decode step of ``contexts``.

    With a row for every slot the block tables and the KV stay what the last sequences of the slots left there, which
    must have been no shorter: what the memory of a step looks like is worth 5% of its time. Otherwise the rows get
    block tables of their own.
    """
    rows, slots = len(contexts), steps.state.slots
    if rows < len(slots.last_token):
        _lay_out(steps, rows, max(contexts) // steps.cache.layers[0][1].shape[2] + 1)
    slots.last_token.copy_(torch.arange(len(slots.last_token)))
    slots.finished.zero_()
    slots.stops.fill_(-1)
    words = torch.tensor(decode_input(contexts), dtype=torch.int32)
    steps.source.inputs[:, : len(words)] = words.to(steps.source.inputs.device)


def _lay_out(steps: DeviceSteps, rows: int, entries: int) -> None:
    """Blocks of a sequence lie apart, as they do when sequences grow side by side."""
    if rows * entries > steps.cache.memory.shape[2]:
        raise ValueError(f"{rows} rows of {entries} blocks do not fit a cache of {steps.cache.memory.shape[2]}")
    # Memory that nobody has written may hold NaN, with which rows would end.
    steps.cache.memory[:, :, : rows * entries].nan_to_num_(0.0, 0.0, 0.0)
    tables = torch.arange(entries)[None, :] * rows + torch.arange(rows)[:, None]
    block_tables = steps.state.slots.block_tables
    block_tables[:rows, :entries] = tables.to(block_tables)


def check(steps: DeviceSteps, rows: int) -> None:
    """Every place of the ring must hold tokens of the replayed step, and no row have ended. RuntimeError if not."""
    words = steps.source.outputs[:, :rows].cpu()
    tokens = words & 0xFFFFFFFF
    if not (words >> 32 == STEP).all() or (tokens >= 2**31).any() or steps.state.slots.finished.any():
        raise RuntimeError("the bare replays did not do what the engine's steps do")


@contextmanager
def staged(
    steps: DeviceSteps, contexts: Sequence[int], next_step: int, synchronize: Callable[[], None]
) -> Iterator[None]:
    """Launches inside are steps of ``contexts``, checked at the end; afterwards the engine's ``next_step`` is next.

    ``synchronize`` waits for the device: torch's stream and the runner's do not wait for each other.
    """
    synchronize()
    stage(steps, contexts)
    synchronize()
    try:
        yield
        synchronize()
        check(steps, len(contexts))
    finally:
        steps.restart(next_step)
        synchronize()


def bare_step_us(runner: CudaRunner, contexts: Sequence[int], replays: int, next_step: int) -> float:
    """Microseconds per launch when ``replays`` greedy decode graphs are launched back to back on the runner's stream.

    The engine must be idle; ``next_step`` is the number of its next step, which finds the ring as it expects it.
    """
    steps, stream = runner.steps, runner.stream
    bucket = decode_bucket(runner.buckets, contexts)

    def launch(count: int) -> None:
        for _ in range(count):
            runner.graphs.native.launch(bucket, GREEDY, stream.cuda_stream)

    with staged(steps, contexts, next_step, torch.cuda.synchronize):
        return _time(launch, replays, stream)


def _time(launch: Callable[[int], None], replays: int, stream: torch.cuda.Stream) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    launch(_WARM_UP)
    begin.record(stream)  # while the GPU is still busy: the first launch has no latency to show
    launch(replays)
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / replays
