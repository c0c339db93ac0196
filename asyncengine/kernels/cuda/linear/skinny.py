"""Projections of one row and of up to 32, and what they share with those of more rows (see tiled.py)."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc"
# ruff: noqa: RUF005 - Triton knows no starred items in a tuple

from __future__ import annotations

import triton
import triton.language as tl

from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import start_next, wait
from asyncengine.kernels.cuda.rows.activation import activate
from asyncengine.kernels.cuda.rows.norms import store_unnormed
from asyncengine.kernels.cuda.rows.quantise import row_scale

# ---- what they share ----


@triton.jit
def weight_rows_of(program, columns, GATED: tl.constexpr, BN: tl.constexpr):
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
def load_bias(bias, rows, BIAS: tl.constexpr):
    """Load the bias of the weight's ``rows`` for ``finish``, before the wait: behind the product it would be waited
    for."""
    return tl.load(bias + rows).to(tl.float32)[:, None] if BIAS else 0.0


@triton.jit
def load_sum(out, to, there, ADD: tl.constexpr):
    """Load the elements to which ``finish`` adds, as soon as they may be read."""
    return tl.load(out + to, mask=there, other=0.0).to(tl.float32) if ADD else 0.0


@triton.jit
def finish(y, bias, added, to, there, out, ACT: tl.constexpr):
    """Store y [BN, BM] at ``to`` [columns, BM] with the bias, the activation and the addition applied, and return
    it."""
    BN: tl.constexpr = y.shape[0]
    BM: tl.constexpr = y.shape[1]
    y += bias
    if ACT == "silu_mul":
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, BN // 2, BM]), [1, 2, 0]))
        y = gate * tl.sigmoid(gate) * up
    elif ACT != "none":
        y = activate(y, ACT)
    y += added
    y = y.to(out.dtype.element_ty)
    tl.store(out + to, y, mask=there)
    return y


@triton.jit
def leave_part(acc, partials, arrivals, program, split, block, SPLIT: tl.constexpr):
    """Store the sums [BN, BM] of a program's share of K, and count it.

    Return the addresses of the first program's part, the distance from part to part, and whether all have arrived: the
    last program adds them up. The counter is 0 again for the next launch, since nobody else comes in this one.
    """
    BN: tl.constexpr = acc.shape[0]
    BM: tl.constexpr = acc.shape[1]
    size = tl.num_programs(2).to(tl.int64) * tl.num_programs(0) * (BN * BM)
    mine = (block * tl.num_programs(0) + program).to(tl.int64) * (BN * BM)
    at = partials + mine + tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    tl.store(at + split * size, acc)
    # Release: the barrier puts every thread's stores before the one thread that counts.
    tl.debug_barrier()
    arrival = arrivals + block * tl.num_programs(0) + program
    last = tl.atomic_add(arrival, 1, sem="acq_rel") == SPLIT - 1
    if last:
        tl.store(arrival, 0)
    return at, size, last


@triton.jit
def columns_of(program, ACT: tl.constexpr, BN: tl.constexpr):
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
def vector_kernel(
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
    row = weight_rows_of(program, columns, ACT == "silu_mul", BN)
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
    offset = load_bias(bias, row, BIAS)
    column = columns_of(program, ACT, BN)[:, None]
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
        to = m * out_stride + column
        added = load_sum(out, to, column < columns, ADD)
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
        total = total[:, None]
        if FLOAT8:
            total *= channel * back[None, :]
        finish(total, offset, added, to, column < columns, out, ACT)


# ---- up to 32 rows ----


@triton.jit
def _narrow_dot(w, x, acc, WIDEN: tl.constexpr):
    if w.dtype == tl.float8e4nv:
        # float16 and not bfloat16: that is one instruction for two elements.
        w = w.to(tl.float16)
        x = x.to(tl.float16)
    return multiply_tiles(w, x, acc, WIDEN)


@triton.jit
def multiply_tiles(w, x, acc, WIDEN: tl.constexpr):
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
def skinny_kernel(
    x,
    index,
    weight,
    bias,
    norm_weight,
    norm_bias,
    out,
    scaled,
    sums,
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
    WRITES: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """A step is B stretches of BK elements of K, one for each warp; their sums are added up at the end.

    Weights are loaded AHEAD steps before their use, in registers; 0 is all of them. WRITES: how many sums are written
    for the norm behind, whose weight norm_weight is then.
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
    row = weight_rows_of(program, columns, ACT == "silu_mul", BN)
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
    if WRITES > 0:
        gain = tl.load(norm_weight + row)
    offset = load_bias(bias, row, BIAS)
    m2 = tl.arange(0, BM)[None, :]
    to = m2.to(tl.int64) * out_stride + columns_of(program, ACT, BN)[:, None]
    wait(PDL)
    added = load_sum(out, to, m2 < rows, ADD)
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
    if FLOAT8:
        y *= channel * back[None, :]
    y = finish(y, offset, added, to, m2 < rows, out, ACT)
    if WRITES > 0:
        store_unnormed(
            y, gain, scaled, sums, program, tl.num_programs(0), columns_of(program, ACT, BN), tl.arange(0, BM), rows,
            columns, WRITES,
        )  # fmt: skip
