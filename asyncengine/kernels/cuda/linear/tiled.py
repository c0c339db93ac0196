"""Projections of few rows on the GPU: what is bound by reading the weights, with what surrounds it in the same launch.

    out = residual + activation(norm(x) W^T + bias)

The weights are bfloat16 (or float32), or float8 with a scale per row (see float8.py).

Three kernels, by how they multiply: ``vector`` with plain multiplications (one row), ``skinny`` with tensor cores
and every warp of a program on another stretch of K (up to 32 rows), ``tiled`` with Hopper's asynchronous tensor cores
and a pipelined loop (more rows). ``asyncengine.kernels.cuda.linear.choose`` says which, and how large its tiles are.

The first two load weights into registers before they wait for the kernel that makes x (see programmatic.py): at a few
microseconds each, a projection is bound by its start-up and not by its bytes.

Float8 numbers are exact in float16, and so are their products in float32: the first two convert weights in registers
and multiply as ever, and since every program sees whole rows of x, it can quantise them itself after the norm. The
third multiplies float8 with float8, x quantised by a kernel before it.

Every program's sums are its own and split K is added up in the order of the splits: a result depends on the plan, not
on what else runs.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, must_widen, start_next, wait
from asyncengine.kernels.cuda.linear.formats.base import Matrix, values_and_scale
from asyncengine.kernels.cuda.linear.formats.registry import format_of
from asyncengine.kernels.cuda.linear.plan import Plan, norm_kind
from asyncengine.kernels.cuda.linear.residual import Unnormed
from asyncengine.kernels.cuda.linear.skinny import (
    columns_of,
    finish,
    leave_part,
    load_bias,
    load_sum,
    multiply_tiles,
    skinny_kernel,
    vector_kernel,
    weight_rows_of,
)
from asyncengine.kernels.ops import Activation, Norm

MAX_ARRIVALS = 1 << 16
"""Counters that ``linear`` needs at most for a split K."""


def linear(
    x: Matrix,
    weight: Matrix,
    plan: Plan,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    activation: Activation | None = None,
    add: bool = False,
    index: Tensor | None = None,
    arrivals: Tensor | None = None,
    reader: Norm | None = None,
    pdl: bool = False,
) -> Unnormed | None:
    """out [M, N] = activation(norm(x [M, K]) weight^T + bias), or with ``add`` out += that.

    weight is [N, K], for silu_mul [2N, K] with the gate's rows first, bias as long. out may be float32 for any x; rows
    of x and out may be strided. The plan must fit (``Plan.fits``). ``arrivals`` are int32 counters that are 0 between
    launches, MAX_ARRIVALS of them for a split K; launches that share them must not overlap. ``index`` int64 [M] names
    the rows of x to take. The tiled kernel takes neither index nor norm.

    With a quantised weight there is no index, a norm is an RMS norm, and x must be quantised already (after its norm)
    for the tiled kernel and for weights loaded ``ahead``; elsewhere it may be.

    A skinny plan that adds in bfloat16, with neither norm nor float8, also makes what a projection needs that reads the
    sum through the norm ``reader`` (see residual.py).
    """
    form = format_of(weight)
    writes = plan.kind == "skinny" and add and norm is None and form.prepares_norms
    if not form.fits(plan, x, norm, index) or (reader and not writes):
        raise ValueError(f"{plan} does not fit the operations fused with it")
    (x, x_scale), (weight, weight_scale) = values_and_scale(x), values_and_scale(weight)
    rows, inner = len(x) if index is None else len(index), x.shape[1]
    gated = activation == "silu_mul"
    columns = len(weight) // 2 if gated else len(weight)
    if not plan.fits(columns, inner, gated):
        raise ValueError(f"{plan} does not fit a weight {list(weight.shape)}")
    strided = x.stride(1) != 1 or out.stride(1) != 1 or not weight.is_contiguous()
    if strided or out.shape != (rows, columns) or weight.shape != (columns * (1 + gated), inner):
        raise ValueError(f"x {list(x.shape)}, weight {list(weight.shape)} and out {list(out.shape)} do not fit")
    common = {
        "K": inner,
        "ACT": activation or "none",
        "BIAS": bias is not None,
        "ADD": add,
        "WIDEN": must_widen(x.dtype),
        "num_warps": plan.warps,
        "num_stages": plan.stages,
        **launch_options(pdl),
    }
    bias = weight if bias is None else bias
    scales = x_scale, weight_scale
    if plan.kind == "tiled":
        blocks, programs = triton.cdiv(rows, plan.rows), triton.cdiv(len(weight), plan.columns)
        if plan.split > 1 and (arrivals is None or blocks * programs > len(arrivals)):
            raise ValueError(f"{blocks * programs} counters of arrivals are needed")
        size = plan.split * blocks * programs * plan.columns * plan.rows if plan.split > 1 else 0
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
        _tiled_kernel[(programs, plan.split, blocks)](
            x, weight, bias, out, partials, x if arrivals is None else arrivals, *scales,
            rows, columns, x.stride(0), out.stride(0),
            BM=plan.rows, BN=plan.columns, BK=plan.inner, SPLIT=plan.split, STAGES=plan.stages, **common,
        )  # fmt: skip
        return None
    programs = len(weight) // plan.columns
    unnormed = None if reader is None else Unnormed.allocate(out, programs, reader)
    gain, shift, eps = norm or reader or (weight, None, 0.0)
    multiply, made, extra = vector_kernel, (), {"M": rows}
    if plan.kind == "skinny":
        multiply, made = skinny_kernel, (out, out) if unnormed is None else (unnormed.x, unnormed.sums)
        extra = {"BM": max(8, triton.next_power_of_2(rows)), "B": plan.warps, "AHEAD": plan.ahead}
        extra["WRITES"] = 0 if unnormed is None else len(unnormed.sums)
    multiply[(programs,)](
        x, x if index is None else index, weight, bias, gain, weight if shift is None else shift, out, *made, *scales,
        rows, columns, x.stride(0), out.stride(0), eps, INDEX=index is not None,
        BN=plan.columns, BK=plan.inner, NORM=norm_kind(norm), **extra, **common,
    )  # fmt: skip
    return unnormed


# ---- more rows ----


@kernel
def _tiled_kernel(
    x,
    weight,
    bias,
    out,
    partials,
    arrivals,
    x_scale,
    weight_scale,
    rows,
    columns,
    x_stride,
    out_stride,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weights are the left operand: the tensor cores want 64 rows there, and x has fewer."""
    start_next(PDL)
    SPAN: tl.constexpr = K // SPLIT
    program, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = weight_rows_of(program, columns, ACT == "silu_mul", BN)
    k = split * SPAN + tl.arange(0, BK)
    m = block * BM + tl.arange(0, BM)
    from_weight = weight + row[:, None] * K + k[None, :]
    from_x = x + m[None, :].to(tl.int64) * x_stride + k[:, None]
    there = (m < rows)[None, :]
    FLOAT8: tl.constexpr = weight_scale is not None
    if FLOAT8:
        channel = tl.load(weight_scale + row)[:, None]
    offset = load_bias(bias, row, BIAS)
    column = columns_of(program, ACT, BN)[:, None]
    to = m[None, :].to(tl.int64) * out_stride + column
    wait(PDL)
    if FLOAT8:
        back = tl.load(x_scale + m, mask=m < rows, other=0.0)[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    for done in tl.range(0, SPAN, BK, num_stages=STAGES):
        if SPAN % BK:
            left = K - done - tl.arange(0, BK)
            w = tl.load(from_weight + done, mask=(left > 0)[None, :], other=0.0)
            acc = multiply_tiles(w, tl.load(from_x + done, mask=there & (left > 0)[:, None], other=0.0), acc, WIDEN)
        else:
            acc = multiply_tiles(tl.load(from_weight + done), tl.load(from_x + done, mask=there, other=0.0), acc, WIDEN)
    if SPLIT > 1:
        at, size, last = leave_part(acc, partials, arrivals, program, split, block, SPLIT)
        if not last:
            return
        acc = tl.zeros([BN, BM], tl.float32)
        for i in tl.static_range(SPLIT):
            acc += tl.load(at + i * size, cache_modifier=".cg")
    if FLOAT8:
        acc *= channel * back
    there = there & (column < columns)
    finish(acc, offset, load_sum(out, to, there, ADD), to, there, out, ACT)
