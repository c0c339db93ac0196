"""Bare replay of a step's graph, without an engine around it: what the engine's step time is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from asyncengine.kernels.float8 import FLOAT8
from asyncengine.runner.costs.replay import (
    LAYOUT,
    STEP,
    Row,
    check,
    choose_bucket,
    decode_rows,
    launch_us,
    stage,
    staged,
    step_input,
)
from asyncengine.runner.steps.device_steps import ARGMAX

if TYPE_CHECKING:
    from asyncengine.runner.cuda_runner import CudaRunner

__all__ = [
    "LAYOUT", "STEP", "Row", "bare_step_us", "check", "choose_bucket", "decode_rows", "fill_cache", "launch_us",
    "stage", "staged", "step_input",
]  # fmt: skip


def fill_cache(groups: Iterable[Tensor]) -> None:
    """Fill the planes of the cache with random keys and values, one at a time."""
    for plane in (plane for group in groups for plane in group):
        if plane.dtype == FLOAT8:
            plane.view(torch.uint8).random_(0, 64)  # from 0 to 2: torch draws no float8
        else:
            plane.normal_()


def bare_step_us(
    runner: CudaRunner, rows: Sequence[Row], replays: int, next_step: int, *, own_tables: bool = False
) -> float:
    """Microseconds per launch when ``replays`` greedy graphs of a step are launched back to back.

    The engine must be idle; ``next_step`` is the number of its next step, which finds the ring as it expects it.
    """
    steps, cuda_stream = runner.steps, runner.cuda_stream
    bucket = choose_bucket(runner.buckets, rows)

    def launch(count: int) -> None:
        for _ in range(count):
            runner.graphs.native.launch(bucket, ARGMAX, cuda_stream.cuda_stream)

    with staged(steps, rows, next_step, torch.cuda.synchronize, own_tables=own_tables):
        return launch_us(launch, replays, cuda_stream)
