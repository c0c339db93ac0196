"""Trials of a card: they find out which features work with this driver and this Triton."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

import functools
import logging
from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton import TritonError

from asyncengine.kernels.cuda.gpu import Gpu, describe
from asyncengine.kernels.cuda.launch.programmatic import launch_options, start_next, wait
from asyncengine.kernels.cuda.linear.plan import Plan

logger = logging.getLogger(__name__)


@functools.cache
def examine(device: torch.device) -> Gpu:
    """The card, with what it was seen to do. The first call for a device runs kernels on it and waits for them."""
    gpu = describe(device)
    return replace(
        gpu,
        dependent_launch=gpu.may_launch_dependently and launches_dependently(device),
        tma=gpu.may_use_tma and runs_tma(device),
    )


@triton.jit
def _increment(x, PDL: tl.constexpr):
    start_next(PDL)
    wait(PDL)
    tl.store(x, tl.load(x) + 1)


def launches_dependently(device: torch.device) -> bool:
    """Return whether the driver and Triton capture and replay dependent launches; runs a graph of some."""
    x, count = torch.zeros(1, dtype=torch.int32, device=device), 8
    cuda_stream = torch.cuda.Stream(device)
    with torch.cuda.stream(cuda_stream):
        try:
            _increment[(1,)](x, **launch_options(True))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=cuda_stream, capture_error_mode="thread_local"):
                for _ in range(count):
                    _increment[(1,)](x, **launch_options(True))
            graph.replay()
            cuda_stream.synchronize()
        except (RuntimeError, TypeError):  # a driver or a Triton that knows nothing of it
            return False
    return int(x) == count + 1


def runs_tma(device: torch.device) -> bool:
    """Return whether this Triton, of which Gluon is an experimental part, runs tma plans; runs one."""
    x, weight = (torch.ones(rows, 128, dtype=torch.bfloat16, device=device) for rows in (8, 64))
    out = torch.zeros(8, 64, dtype=torch.bfloat16, device=device)
    try:
        from asyncengine.kernels.cuda.linear.tma import tma_linear

        tma_linear(x, weight, Plan("tma", 64, 64, 4, 8, stages=2), out=out)
        torch.cuda.synchronize(device)
    except (ImportError, RuntimeError, TypeError, AttributeError, TritonError) as e:
        logger.warning("tma kernels do not run on this GPU; the others are slower: %s", e)
        return False
    return bool((out == 128).all())
