"""bench/kernels.py experts: a layer's mixture of experts, of random weights and rows that are routed nearly evenly.

The floor is the time to read the weights of the experts that are hit once, at the bandwidth that copies of
device memory reach. Every call has rows of its own, and calls take the weights of two layers in turn. A router is
multiplied by the plan of its site, which is cuBLAS as long as no start has measured another.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from gpu_common import ELEMENT_BYTES, measured_bandwidth
from kernel_timing import Line, Lines, Timer
from torch import Tensor

from asyncengine.kernels.cuda.launch.compiling import compile_launches
from asyncengine.kernels.cuda.linear.handle import CudaLinear
from asyncengine.kernels.cuda.linear.residual import Residual
from asyncengine.kernels.cuda.linear.tables import PlanTable
from asyncengine.kernels.cuda.ops import CudaBatch, CudaOps, CudaOptions
from asyncengine.kernels.cuda.step.tensors import allocate_step
from asyncengine.kernels.cuda.trials import examine
from asyncengine.kernels.float8 import pack_float8
from asyncengine.kernels.ops import Experts, Norm, Routing, RoutingRule
from asyncengine.kernels.weight import dense

DTYPE = torch.bfloat16
LAYERS = 2


class Mixture(NamedTuple):
    """Sizes of a mixture of experts."""

    experts: int
    top_k: int
    hidden: int
    inner: int


MIXTURES = {
    "qwen3-30b-a3b": Mixture(128, 8, 2048, 768),
    "gpt-oss-20b": Mixture(32, 4, 2880, 2880),
}


class Layer(NamedTuple):
    norm: Norm
    router: CudaLinear
    experts: Experts[CudaLinear]


def allocate(ops: CudaOps, size: Mixture, quantization: str) -> Layer:
    """A layer whose weights are distributed as those of a model at the start of its training."""

    def random(*shape: int, std: float) -> Tensor:
        return torch.empty(shape, dtype=DTYPE, device=ops.device).normal_(std=std)

    pack = pack_float8 if quantization == "fp8" else dense
    up = random(size.experts, 2 * size.inner, size.hidden, std=size.hidden**-0.5)
    down = random(size.experts, size.hidden, size.inner, std=size.inner**-0.5)
    halves = [[pack(part) for part in weight.chunk(2)] for weight in up]
    router = ops.make_linear([dense(random(size.experts, size.hidden, std=size.hidden**-0.5))], [None])
    norm = Norm(torch.ones(size.hidden, dtype=DTYPE, device=ops.device), None, 1e-6)
    return Layer(norm, router, ops.make_experts(halves, [pack(weight) for weight in down], "silu_mul"))


def run(ops: CudaOps, layer: Layer, x: Tensor, rule: RoutingRule, batch: CudaBatch) -> None:
    """The block of a model's layer, with its norm."""
    residual = Residual(x)
    rows, routing = ops.route(residual, layer.norm, layer.router, rule, batch)
    add_experts(ops, rows, routing, layer, residual, batch)


def add_experts(ops: CudaOps, x: Tensor, routing: Routing, layer: Layer, residual: Residual, batch: CudaBatch) -> None:
    """All kernels of the experts, the one that a norm behind them would launch included."""
    ops.experts_add_(x, routing, layer.experts, residual, batch)
    residual.settle()


def lines(args: argparse.Namespace, timer: Timer) -> Lines:
    on_gpu = timer.device.type == "cuda"
    table = PlanTable.load(torch.cuda.get_device_name()) if on_gpu else PlanTable()
    ops = CudaOps(timer.device, CudaOptions(table, args.pdl, gpu=examine(timer.device)))
    bandwidth = measured_bandwidth(timer.device.type)
    print(f"  copies of device memory: {bandwidth / 1e12:.2f} TB/s", flush=True)
    for name in args.shape if set(args.shape) <= MIXTURES.keys() else MIXTURES:
        size = MIXTURES[name] if on_gpu else Mixture(8, 2, 64, 32)
        for quantization in ("none", "fp8"):
            yield from lines_of(ops, name, size, quantization, args.rows, bandwidth, timer)


def lines_of(
    ops: CudaOps, name: str, size: Mixture, quantization: str, rows: list[int], bandwidth: float, timer: Timer
) -> Lines:
    layers = [allocate(ops, size, quantization) for _ in range(LAYERS)]
    rule = RoutingRule(size.top_k, sums_to_one=True)
    parameters = 3 * size.hidden * size.inner
    with torch.inference_mode():
        compile_launches(warm_ups(ops, layers[0], size, rule, rows), ops.device, os.cpu_count() or 1)
        for count in rows:
            batch = CudaBatch(allocate_step(count, 1, count, count, ops.device))
            xs = [
                torch.randn(count, size.hidden, dtype=DTYPE, device=ops.device) for _ in range(16 if count < 9 else 6)
            ]
            pairs = list(zip(xs, layers * len(xs), strict=False))
            routings = [ops.route(Residual(x), None, layer.router, rule, batch)[1] for x, layer in pairs]
            hit = sum(hit_experts(routing) for routing in routings) / len(routings)
            calls: dict[str, list[Callable[[], object]]] = {
                "norm + router + experts": [partial(run, ops, layer, x, rule, batch) for x, layer in pairs],
                "router": [partial(ops.route, Residual(x), None, layer.router, rule, batch) for x, layer in pairs],
                "experts": [
                    partial(add_experts, ops, x, routing, layer, Residual(torch.zeros_like(x)), batch)
                    for (x, layer), routing in zip(pairs, routings, strict=True)
                ],
            }
            weights = hit * parameters * (1 if quantization == "fp8" else ELEMENT_BYTES)
            router = ELEMENT_BYTES * size.experts * size.hidden
            moved = {"norm + router + experts": weights + router, "router": router, "experts": weights}
            for kernel, of_kernel in calls.items():
                us = timer.us(of_kernel)
                flops = 0.0 if kernel == "router" else 2.0 * count * size.top_k * parameters
                label = kernel if quantization == "none" else f"{kernel}, {quantization}"
                yield Line(
                    "experts", label, name, f"{count} rows, {hit:.0f} hit", us, moved[kernel], flops,
                    bandwidth=bandwidth,
                )  # fmt: skip


def hit_experts(routing: Routing) -> int:
    return len(set(routing.ids.flatten().tolist()))


def warm_ups(ops: CudaOps, layer: Layer, size: Mixture, rule: RoutingRule, rows: list[int]) -> list[Callable[[], None]]:
    """Return the calls whose kernels are compiled first, side by side."""
    calls: list[Callable[[], None]] = []
    for count in rows:
        batch = CudaBatch(allocate_step(count, 1, count, count, ops.device))
        x = torch.zeros(count, size.hidden, dtype=DTYPE, device=ops.device)
        calls.append(partial(run, ops, layer, x, rule, batch))
    return calls
