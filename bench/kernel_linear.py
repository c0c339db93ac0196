"""bench/kernels.py linear: projections as a step makes them, by the table of plans, with what is fused with them.

A layer's four and the head, which gives the logits; and the head with greedy sampling, by ranks where there is a plan
for that, and by logits. Beside them what torch has for the same: F.rms_norm or
F.layer_norm, F.linear, which is cuBLAS, the activation, and the addition to the residual.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from gpu_common import ELEMENT_BYTES, projection_biases, projections, read_model
from kernel_timing import Line, Lines, Timer, copies_for
from torch import Tensor
from tune_linear import THREADS, sites

from asyncengine.kernels.cuda.linear.handle import CudaLinear
from asyncengine.kernels.cuda.linear.plan import CUBLAS, MAX_ROWS, Plan, Site, round_rows
from asyncengine.kernels.cuda.linear.residual import Residual
from asyncengine.kernels.cuda.linear.tables import PlanTable
from asyncengine.kernels.cuda.ops import CudaBatch, CudaOps, CudaOptions
from asyncengine.kernels.cuda.sampling.sample import sample
from asyncengine.kernels.cuda.step.tensors import allocate_step
from asyncengine.kernels.cuda.trials import examine
from asyncengine.kernels.ops import Activation, Norm
from asyncengine.kernels.weight import dense
from asyncengine.models.config import ModelConfig
from asyncengine.runner.start.tuning import Tuner, norm_behind
from asyncengine.runner.steps.device_steps import SAMPLING

DTYPE = torch.bfloat16


def lines(args: argparse.Namespace, timer: Timer) -> Lines:
    on_gpu = timer.device.type == "cuda"
    table = PlanTable.load(torch.cuda.get_device_name()) if on_gpu else PlanTable()
    gpu = examine(timer.device)
    if on_gpu and (plans := planned(args.shape, args.rows, table)):
        Tuner(timer.device, gpu, pdl=args.pdl).compile({site: [plan] for site, plan in plans.items()}, THREADS)
    ops = CudaOps(timer.device, CudaOptions(table, args.pdl, gpu=gpu))
    for shape in args.shape:
        c = read_model(shape)
        for name in (*projections(c), "head"):
            for rows in args.rows:
                if name != "head" or rows <= MAX_ROWS:  # no step samples more
                    yield line(ops, Projection.of(c, name), shape, rows, timer)
        for rows in (rows for rows in args.rows if rows <= MAX_ROWS):
            yield from greedy_lines(ops, Projection.of(c, "head"), shape, rows, timer)


def planned(shapes: list[str], rows: list[int], table: PlanTable) -> dict[Site, Plan]:
    """Return the plans to compile. The head has other kernels here, which take an index and give float32."""
    found = {}
    for shape in shapes:
        for count in {round_rows(count) for count in rows if count <= MAX_ROWS}:
            for name, site in sites(shape, count):
                plan = table.find(site)
                if "head" not in name and plan is not None and plan != CUBLAS:
                    found[site] = plan
    return found


@dataclass(frozen=True)
class Projection:
    """A projection of a layer, or the head."""

    name: str
    columns: int
    """rows of the weight"""
    inner: int
    normed: bool
    layer_norm: bool
    activation: Activation | None
    bias: bool

    @classmethod
    def of(cls, c: ModelConfig, name: str) -> Projection:
        columns, inner = projections(c).get(name, (c.vocab_size, c.hidden_size))
        activation = c.activation if name == "up" else None
        normed = name in ("qkv", "up", "head")
        return cls(name, columns, inner, normed, not c.ropes, activation, projection_biases(c).get(name, False))

    @property
    def label(self) -> str:
        norm = "" if not self.normed else "layer norm + " if self.layer_norm else "RMS norm + "
        after = "" if self.activation is None else f" + {self.activation}"
        return f"{norm}{self.name}{after}" + ("" if self.normed else " + add + norm")

    def moved(self, rows: int) -> int:
        """Bytes of the weights, of what is read and of what is written."""
        out = self.columns // (2 if self.activation == "silu_mul" else 1)
        written = 2 if self.name == "head" else 1 if self.normed else 3  # float32; the residual is read and normed
        return ELEMENT_BYTES * (self.columns * self.inner + rows * (self.inner + written * out))


class Operands(NamedTuple):
    x: Tensor
    residual: Tensor
    """residual to which the projection is added"""
    norm: Norm
    """before the projection, or after it"""
    handle: CudaLinear
    batch: CudaBatch


def allocate(ops: CudaOps, p: Projection, rows: int) -> Operands:
    def random(*size: int) -> Tensor:
        return torch.randn(*size, dtype=DTYPE, device=ops.device)

    weight = random(p.columns, p.inner).mul_(p.inner**-0.5)
    handle = ops.make_linear([dense(weight)], [random(p.columns) if p.bias else None])
    step = allocate_step(rows, 1, rows, rows, ops.device)
    step.sample_index.copy_(torch.arange(rows))
    step.sample_slot.copy_(torch.arange(rows))
    width = p.inner if p.normed else p.columns
    norm = Norm(random(width), random(width) if p.layer_norm else None, 1e-5)
    residual = random(rows, p.columns if not p.normed else 1)
    return Operands(random(rows, p.inner), residual, norm, handle, CudaBatch(step))


def ours(ops: CudaOps, p: Projection, a: Operands) -> object:
    if p.name == "head":
        return ops.logits(Residual(a.x), a.norm, a.handle, a.batch)
    if p.normed:
        return ops.norm_linear(Residual(a.x), a.norm, a.handle, a.batch, p.activation)
    residual = Residual(a.residual)
    ops.linear_add_(a.x, a.handle, residual, a.batch)
    return norm_behind(residual, a.norm, pdl=ops.options.pdl)  # adds up what a plan leaves


def greedy_lines(ops: CudaOps, p: Projection, shape: str, rows: int, timer: Timer) -> Lines:
    moved = ELEMENT_BYTES * p.inner * (p.columns + rows)
    copies = [allocate(ops, p, rows) for _ in range(copies_for(moved, 48))]
    header, words = (torch.zeros(n, dtype=torch.int64, device=ops.device) for n in (2, rows))

    def tokens(a: Operands, greedy: bool) -> None:
        batch = replace(a.batch, needs=0 if greedy else SAMPLING)
        logits = ops.logits(Residual(a.x), a.norm, a.handle, batch)
        sample(logits, batch.step, header, words[None], needs=0, pdl=ops.options.pdl)

    with torch.inference_mode():
        torch_us = timer.us([partial(greedy_of_theirs, p, a) for a in copies])
        for name, greedy in (("greedy", True), ("greedy by logits", False)):
            us = timer.us([partial(tokens, a, greedy) for a in copies])
            way = ("F.layer_norm" if p.layer_norm else "F.rms_norm") + ", F.linear, float, argmax"
            flops = 2.0 * rows * p.columns * p.inner
            yield Line("linear", f"head + {name}", shape, f"{rows} rows", us, moved, flops, torch_us, way)


def greedy_of_theirs(p: Projection, a: Operands) -> Tensor:
    return theirs(p, a).argmax(-1)


def theirs(p: Projection, a: Operands) -> Tensor:
    size = (p.inner,)
    x, norm = a.x, a.norm
    if p.normed and norm.bias is not None:
        x = F.layer_norm(x, size, norm.weight, norm.bias, norm.eps)
    elif p.normed:
        x = F.rms_norm(x, size, norm.weight, norm.eps)
    assert isinstance(a.handle.weight, Tensor)
    y = F.linear(x, a.handle.weight, a.handle.bias)
    if p.name == "head":
        return y.float()
    if p.activation == "silu_mul":
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up
    if p.activation is not None:
        return F.gelu(y, approximate="tanh" if p.activation == "gelu_tanh" else "none")
    if p.normed:
        return y
    size = (p.columns,)
    a.residual.add_(y)
    if norm.bias is not None:
        return F.layer_norm(a.residual, size, norm.weight, norm.bias, norm.eps)
    return F.rms_norm(a.residual, size, norm.weight, norm.eps)


def line(ops: CudaOps, p: Projection, shape: str, rows: int, timer: Timer) -> Line:
    copies = [allocate(ops, p, rows) for _ in range(copies_for(p.moved(rows), 48))]
    with torch.inference_mode():
        us = timer.us([partial(ours, ops, p, a) for a in copies])
        torch_us = timer.us([partial(theirs, p, a) for a in copies])
    flops = 2.0 * rows * p.columns * p.inner
    norm = "" if not p.normed else "F.layer_norm, " if p.layer_norm else "F.rms_norm, "
    way = norm + ("F.linear" if p.normed else "F.linear, add_, " + ("F.layer_norm" if p.layer_norm else "F.rms_norm"))
    return Line("linear", p.label, shape, f"{rows} rows", us, p.moved(rows), flops, torch_us, way)
