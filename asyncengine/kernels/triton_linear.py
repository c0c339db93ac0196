"""Projections of few rows on the GPU: what is bound by reading the weights, with what surrounds it in the same launch.

    out = residual + activation(norm(x) W^T + bias)

The weights are bfloat16 (or float32), or float8 with a scale per row (see quantize.py).

Three kernels, by how they multiply: ``vector`` with plain multiplications (one row), ``skinny`` with tensor cores
and every warp of a program on another stretch of K (up to 32 rows), ``tiled`` with Hopper's asynchronous tensor cores
and a pipelined loop (more rows). ``asyncengine.kernels.linear_plans`` says which, and how large its tiles are.

The first two load weights into registers before they wait for the kernel that makes x (see pdl.py): at a few
microseconds each, a projection is bound by its start-up and not by its bytes.

Float8 numbers are exact in float16, and so are their products in float32: the first two convert weights in registers
and multiply as ever, and since every program sees whole rows of x, it can quantise them itself after the norm. The
third multiplies float8 with float8, x quantised by a kernel before it.

Every program's sums are its own and split K is added up in the order of the splits: a result depends on the plan, not
on what else runs.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc"
# ruff: noqa: RUF005 - Triton knows no starred items in a tuple

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.compiling import kernel
from asyncengine.kernels.linear_plans import Plan, norm_kind
from asyncengine.kernels.ops import Activation, Norm
from asyncengine.kernels.pdl import launch_options, must_widen, start_next, wait
from asyncengine.kernels.quantize import Quantized
from asyncengine.kernels.triton_quantize import row_scale
from asyncengine.kernels.triton_rows import activate

MAX_ARRIVALS = 1 << 16
"""Counters that ``linear`` needs at most for a split K."""


def linear(
    x: Tensor | Quantized,
    weight: Tensor | Quantized,
    plan: Plan,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    activation: Activation | None = None,
    add: bool = False,
    index: Tensor | None = None,
    arrivals: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """out [M, N] = activation(norm(x [M, K]) weight^T + bias), or with ``add`` out += that.

    weight is [N, K], for silu_mul [2N, K] with the gate's rows first, bias as long. out may be float32 for any x; rows
    of x and out may be strided. The plan must fit (``Plan.fits``). ``arrivals`` are int32 counters that are 0 between
    launches, MAX_ARRIVALS of them for a split K; launches that share them must not overlap. ``index`` int64 [M] names
    the rows of x to take. The tiled kernel takes neither index nor norm.

    With a quantised weight there is no index, a norm is an RMS norm, and x must be quantised already (after its norm)
    for the tiled kernel and for weights loaded ``ahead``; elsewhere it may be.
    """
    if not _takes(plan, x, weight, norm, index):
        raise ValueError(f"{plan} does not fit what is fused with it")
    x, x_scale = (x.values, x.scale) if isinstance(x, Quantized) else (x, None)
    weight, weight_scale = (weight.values, weight.scale) if isinstance(weight, Quantized) else (weight, None)
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
        return
    gain, shift, eps = (weight, None, 0.0) if norm is None else norm
    programs = len(weight) // plan.columns
    multiply, extra = _vector_kernel, {"M": rows}
    if plan.kind == "skinny":
        multiply = _skinny_kernel
        extra = {"BM": max(8, triton.next_power_of_2(rows)), "B": plan.warps, "AHEAD": plan.ahead}
    multiply[(programs,)](
        x, x if index is None else index, weight, bias, gain, weight if shift is None else shift, out, *scales,
        rows, columns, x.stride(0), out.stride(0), eps, INDEX=index is not None,
        BN=plan.columns, BK=plan.inner, NORM=norm_kind(norm), **extra, **common,
    )  # fmt: skip


def _takes(
    plan: Plan, x: Tensor | Quantized, weight: Tensor | Quantized, norm: Norm | None, index: Tensor | None
) -> bool:
    """Whether the plan's kernel can do all that in one launch."""
    quantized, float8 = isinstance(x, Quantized), isinstance(weight, Quantized)
    layer = norm is not None and norm.bias is not None
    alone = norm is None and index is None
    if (quantized and not (float8 and alone)) or (float8 and (layer or index is not None)):
        return False
    match plan.kind:
        case "vector":
            return plan.ahead == 0
        case "skinny":  # a layer norm and quantising need to know the whole row before the first product
            return plan.ahead == 0 or quantized or not (layer or float8)
        case "tiled":
            return quantized or (alone and not float8)
        case _:
            return False


# ---- what they share ----


@triton.jit
def _weight_rows(program, columns, GATED: tl.constexpr, BN: tl.constexpr):
    """Rows of the weight that a program multiplies: with a gate half of them gate and half up, of the same columns.

    Past the last column it is the last.
    """
    i = tl.arange(0, BN)
    if GATED:
        HALF: tl.constexpr = BN // 2
        column = tl.minimum(program * HALF + i % HALF, columns - 1)
        return tl.where(i < HALF, column, columns + column).to(tl.int64)
    return tl.minimum(program * BN + i, columns - 1).to(tl.int64)


@triton.jit
def _finish(y, rows, to, there, bias, out, ACT: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr):
    """y [BN, BM] of the weight's ``rows``, biased, activated, added to and stored at ``to`` [columns, BM]."""
    BN: tl.constexpr = y.shape[0]
    BM: tl.constexpr = y.shape[1]
    if BIAS:
        y += tl.load(bias + rows).to(tl.float32)[:, None]
    if ACT == "silu_mul":
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, BN // 2, BM]), [1, 2, 0]))
        y = gate * tl.sigmoid(gate) * up
    elif ACT != "none":
        y = activate(y, ACT)
    if ADD:
        y += tl.load(out + to, mask=there, other=0.0).to(tl.float32)
    tl.store(out + to, y.to(out.dtype.element_ty), mask=there)


@triton.jit
def _columns(program, ACT: tl.constexpr, BN: tl.constexpr):
    """Columns of out that a program makes."""
    WIDTH: tl.constexpr = BN // 2 if ACT == "silu_mul" else BN
    return program * WIDTH + tl.arange(0, WIDTH)


@triton.jit
def _load(pointers, inside, EVEN: tl.constexpr):
    """Elements of K; without a mask where every step is whole, since masks cost registers."""
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=inside, other=0.0)


# ---- one row, or few ----


@kernel
def _vector_kernel(
    x,
    index,
    weight,
    bias,
    norm_weight,
    norm_bias,
    out,
    x_scale,
    weight_scale,
    rows,
    columns,
    x_stride,
    out_stride,
    eps,
    M: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    INDEX: tl.constexpr,
    NORM: tl.constexpr,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    STEPS: tl.constexpr = (K + BK - 1) // BK
    EVEN: tl.constexpr = K % BK == 0
    FLOAT8: tl.constexpr = weight_scale is not None
    QUANTIZE: tl.constexpr = FLOAT8 and x_scale is None
    program = tl.program_id(0)
    row = _weight_rows(program, columns, ACT == "silu_mul", BN)
    k = tl.arange(0, BK)
    at = weight + row[:, None] * K + k[None, :]
    w, g, b = (), (), ()
    for i in tl.static_range(STEPS):
        inside = i * BK + k < K
        w = w + (_load(at + i * BK, inside[None, :], EVEN),)
        if NORM != "none":
            g = g + (_load(norm_weight + i * BK + k, inside, EVEN),)
        if NORM == "layer":
            b = b + (_load(norm_bias + i * BK + k, inside, EVEN),)
    if FLOAT8:
        channel = tl.load(weight_scale + row)[:, None]
    wait(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    for m in tl.static_range(M):
        from_x = x + m * x_stride
        if INDEX:
            from_x = x + tl.load(index + m) * x_stride
        xs = ()
        square = tl.zeros([BK], tl.float32)
        for i in tl.static_range(STEPS):
            xs = xs + (_load(from_x + i * BK + k, i * BK + k < K, EVEN).to(tl.float32),)
        mean = 0.0
        if NORM == "layer":
            for i in tl.static_range(STEPS):
                square += xs[i]
            mean = tl.sum(square, 0) / K
            square = tl.zeros([BK], tl.float32)
        if NORM != "none":
            for i in tl.static_range(STEPS):
                centered = xs[i] - mean
                if not EVEN:
                    centered = tl.where(i * BK + k < K, centered, 0.0)
                square += centered * centered
            scale = tl.rsqrt(tl.sum(square, 0) / K + eps)
        if QUANTIZE:
            top = tl.zeros([BK], tl.float32)
            for i in tl.static_range(STEPS):
                value = xs[i]
                if NORM == "rms":
                    value *= g[i].to(tl.float32)
                top = tl.maximum(top, tl.abs(value))
            factor, back = row_scale(tl.max(top, 0, keep_dims=True))
        elif FLOAT8:
            back = tl.load(x_scale + m + tl.arange(0, 1))
        y = tl.zeros([BN, BK], tl.float32)
        for i in tl.static_range(STEPS):
            value = xs[i]
            if NORM == "layer":
                value = ((value - mean) * scale * g[i].to(tl.float32) + b[i].to(tl.float32)).to(dtype).to(tl.float32)
            if NORM == "rms":
                value *= g[i].to(tl.float32)
                if not QUANTIZE:
                    value = value.to(dtype).to(tl.float32)
            if QUANTIZE:
                value = (value * factor).to(tl.float8e4nv).to(tl.float32)
            y += w[i].to(tl.float32) * value[None, :]
        total = tl.sum(y, 1)
        if NORM == "rms":
            # A row's scale is the same for all of K, so the multiplication need not wait for it.
            total *= scale
        column = _columns(program, ACT, BN)[:, None]
        total = total[:, None]
        if FLOAT8:
            total *= channel * back[None, :]
        _finish(total, row, m * out_stride + column, column < columns, bias, out, ACT, BIAS, ADD)


# ---- up to 32 rows ----


@triton.jit
def _narrow_dot(w, x, acc, WIDEN: tl.constexpr):
    if w.dtype == tl.float8e4nv:
        # float16 and not bfloat16: that is one instruction for two elements.
        w = w.to(tl.float16)
        x = x.to(tl.float16)
    return _dot(w, x, acc, WIDEN)


@triton.jit
def _dot(w, x, acc, WIDEN: tl.constexpr):
    if w.dtype == tl.float8e4nv:
        # Sums of 128 products at most before they are added up in float32: Hopper's own have 14 bits.
        acc = tl.dot(w, x, acc, max_num_imprecise_acc=min(128, w.shape[1]))
    else:
        if WIDEN:
            w = w.to(tl.float32)
            x = x.to(tl.float32)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    return acc


@kernel
def _skinny_kernel(
    x,
    index,
    weight,
    bias,
    norm_weight,
    norm_bias,
    out,
    x_scale,
    weight_scale,
    rows,
    columns,
    x_stride,
    out_stride,
    eps,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    B: tl.constexpr,
    BK: tl.constexpr,
    INDEX: tl.constexpr,
    NORM: tl.constexpr,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    AHEAD: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """A step is B stretches of BK elements of K, one for each warp; their sums are added up at the end.

    Weights are loaded AHEAD steps before their use, in registers; 0 is all of them.
    """
    start_next(PDL)
    TILE: tl.constexpr = B * BK
    STEPS: tl.constexpr = (K + TILE - 1) // TILE
    EVEN: tl.constexpr = K % TILE == 0
    ALL: tl.constexpr = AHEAD == 0
    FLOAT8: tl.constexpr = weight_scale is not None
    QUANTIZE: tl.constexpr = FLOAT8 and x_scale is None
    dtype: tl.constexpr = x.dtype.element_ty
    program = tl.program_id(0)
    row = _weight_rows(program, columns, ACT == "silu_mul", BN)
    stretch = tl.arange(0, B)[:, None, None] * BK
    kw = stretch + tl.arange(0, BK)[None, None, :]
    kx = stretch + tl.arange(0, BK)[None, :, None]
    at = weight + row[None, :, None] * K + kw
    w, g, b = (), (), ()
    for i in tl.static_range(STEPS if ALL else AHEAD):
        w = w + (_load(at + i * TILE, i * TILE + kw < K, EVEN),)
        if ALL and NORM != "none":
            g = g + (_load(norm_weight + i * TILE + kx, i * TILE + kx < K, EVEN),)
        if NORM == "layer":
            b = b + (_load(norm_bias + i * TILE + kx, i * TILE + kx < K, EVEN),)
    if FLOAT8:
        channel = tl.load(weight_scale + row)[:, None]
    wait(PDL)
    if FLOAT8 and not QUANTIZE:
        back = tl.load(x_scale + tl.arange(0, BM), mask=tl.arange(0, BM) < rows, other=0.0)
    m = tl.arange(0, BM)[None, None, :]
    source = m.to(tl.int64)
    if INDEX:
        source = tl.load(index + m, mask=m < rows, other=0)
    from_x = x + source * x_stride + kx
    acc = tl.zeros([B, BN, BM], tl.float32)
    square = tl.zeros([B, BK, BM], tl.float32)
    if ALL:
        xs = ()
        for i in tl.static_range(STEPS):
            xs = xs + (tl.load(from_x + i * TILE, mask=(m < rows) & (i * TILE + kx < K), other=0.0),)
        if NORM == "layer":
            for i in tl.static_range(STEPS):
                square += xs[i].to(tl.float32)
            mean = (tl.sum(tl.sum(square, 1), 0) / K)[None, None, :]
            square = tl.zeros([B, BK, BM], tl.float32)
            for i in tl.static_range(STEPS):
                centered = xs[i].to(tl.float32) - mean
                if not EVEN:
                    centered = tl.where(i * TILE + kx < K, centered, 0.0)
                square += centered * centered
            scale = tl.rsqrt(tl.sum(tl.sum(square, 1), 0) / K + eps)[None, None, :]
        if QUANTIZE:
            top = tl.zeros([B, BK, BM], tl.float32)
            for i in tl.static_range(STEPS):
                wide = xs[i].to(tl.float32)
                if NORM == "rms":
                    wide *= g[i].to(tl.float32)
                top = tl.maximum(top, tl.abs(wide))
            factor, back = row_scale(tl.max(tl.max(top, 1), 0))
        for i in tl.static_range(STEPS):
            value = xs[i]
            if NORM == "rms":
                wide = value.to(tl.float32)
                square += wide * wide
                wide *= g[i].to(tl.float32)
                value = wide if QUANTIZE else wide.to(dtype)
            if QUANTIZE:
                value = (value.to(tl.float32) * factor[None, None, :]).to(tl.float8e4nv)
            if NORM == "layer":
                value = ((value.to(tl.float32) - mean) * scale * g[i].to(tl.float32) + b[i].to(tl.float32)).to(dtype)
            acc = _narrow_dot(w[i], value, acc, WIDEN)
    else:
        tl.static_assert(NORM != "layer" and not QUANTIZE)
        value = tl.load(from_x, mask=(m < rows) & (kx < K), other=0.0)
        for step in tl.range(0, STEPS, num_stages=1):
            k = (step + 1) * TILE
            there = step + AHEAD < STEPS
            if not EVEN:
                there = (step + AHEAD) * TILE + kw < K
            following = tl.load(at + (step + AHEAD) * TILE, mask=there, other=0.0)
            next_value = tl.load(from_x + k, mask=(m < rows) & (k + kx < K), other=0.0)
            if NORM == "rms":
                wide = value.to(tl.float32)
                square += wide * wide
                gain = _load(norm_weight + step * TILE + kx, step * TILE + kx < K, EVEN)
                value = (wide * gain.to(tl.float32)).to(dtype)
            acc = _narrow_dot(w[0], value, acc, WIDEN)
            w = w[1:] + (following,)
            value = next_value
    y = tl.sum(acc, 0)
    if NORM == "rms":
        y *= tl.rsqrt(tl.sum(tl.sum(square, 1), 0) / K + eps)[None, :]
    m2 = tl.arange(0, BM)[None, :]
    if FLOAT8:
        y *= channel * back[None, :]
    to = m2.to(tl.int64) * out_stride + _columns(program, ACT, BN)[:, None]
    _finish(y, row, to, m2 < rows, bias, out, ACT, BIAS, ADD)


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
    row = _weight_rows(program, columns, ACT == "silu_mul", BN)
    k = split * SPAN + tl.arange(0, BK)
    m = block * BM + tl.arange(0, BM)
    from_weight = weight + row[:, None] * K + k[None, :]
    from_x = x + m[None, :].to(tl.int64) * x_stride + k[:, None]
    there = (m < rows)[None, :]
    FLOAT8: tl.constexpr = weight_scale is not None
    if FLOAT8:
        channel = tl.load(weight_scale + row)[:, None]
    wait(PDL)
    if FLOAT8:
        back = tl.load(x_scale + m, mask=m < rows, other=0.0)[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    for done in tl.range(0, SPAN, BK, num_stages=STAGES):
        if SPAN % BK:
            left = K - done - tl.arange(0, BK)
            w = tl.load(from_weight + done, mask=(left > 0)[None, :], other=0.0)
            acc = _dot(w, tl.load(from_x + done, mask=there & (left > 0)[:, None], other=0.0), acc, WIDEN)
        else:
            acc = _dot(tl.load(from_weight + done), tl.load(from_x + done, mask=there, other=0.0), acc, WIDEN)
    if SPLIT > 1:
        size = tl.num_programs(2).to(tl.int64) * tl.num_programs(0) * (BN * BM)
        mine = (block * tl.num_programs(0) + program).to(tl.int64) * (BN * BM)
        at = partials + mine + tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(at + split * size, acc)
        # Release: the barrier puts every thread's stores before the one thread that counts.
        tl.debug_barrier()
        arrival = arrivals + block * tl.num_programs(0) + program
        if tl.atomic_add(arrival, 1, sem="acq_rel") != SPLIT - 1:
            return
        tl.store(arrival, 0)  # for the next launch: nobody else will come in this one
        acc = tl.zeros([BN, BM], tl.float32)
        for i in tl.static_range(SPLIT):
            acc += tl.load(at + i * size, cache_modifier=".cg")
    if FLOAT8:
        acc *= channel * back
    column = _columns(program, ACT, BN)[:, None]
    to = m[None, :].to(tl.int64) * out_stride + column
    _finish(acc, row, to, there & (column < columns), bias, out, ACT, BIAS, ADD)
