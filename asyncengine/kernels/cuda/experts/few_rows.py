"""Experts of one row or of two: each pair of a row and an expert as products of a matrix and a vector, unsorted.

Nothing of an expert can be read before the routing is known, so a program asks for all of its weights at once, and as
many programs as fit run side by side. Programs of several pairs and the same columns start together: an expert that two
rows share comes from the L2 cache the second time.

The second product adds up the results of a row's experts in their order, in one program, and may add to the residual.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc"
# ruff: noqa: RUF005 - Triton knows no starred items in a tuple

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.experts.codes import columns_of_codes, decode, kernel_operands, load_codes, load_scales
from asyncengine.kernels.cuda.experts.epilogue import GATED_KINDS, activate_columns
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import INTERPRETED, launch_options, start_next, wait
from asyncengine.kernels.cuda.linear.handle import CudaLinear
from asyncengine.kernels.cuda.linear.skinny import weight_rows_of

_MOST_HELD = 1 << 15
"""Elements of weights that a program of 128 threads has on the way at most."""
_MOST_TOGETHER = 20_000
"""The same for several experts, so that four programs fit on a multiprocessor."""


@triton.jit
def _load_steps(source, first, k, K: tl.constexpr, COUNT: tl.constexpr, BK: tl.constexpr):
    """Steps from ``first`` on of the weights at ``source`` [BN, 1], for k [1, BK], or of the row there, for k [BK]."""
    loaded = ()
    for i in tl.static_range(COUNT):
        at = (first + i) * BK + k
        if K % (COUNT * BK) == 0:
            loaded = loaded + (tl.load(source + at),)
        else:
            loaded = loaded + (tl.load(source + at, mask=at < K, other=0.0),)
    return loaded


@triton.jit
def _add_products(acc, weight, x, factor, k, K: tl.constexpr, STEPS: tl.constexpr, HELD: tl.constexpr,
                  BK: tl.constexpr):  # fmt: skip
    """acc [BN, BK] += weights at ``weight`` [BN, 1] times the row at ``x`` times a factor, HELD steps at a time."""
    for first in tl.range(0, STEPS, HELD):
        w = _load_steps(weight, first, k[None, :], K, HELD, BK)
        xs = _load_steps(x, first, k, K, HELD, BK)
        for i in tl.static_range(HELD):
            acc += w[i].to(tl.float32) * (xs[i].to(tl.float32) * factor)[None, :]
    return acc


@triton.jit
def _sum_coded(codes, scales, row, x, K: tl.constexpr, STEPS: tl.constexpr, HELD: tl.constexpr, BK: tl.constexpr,
               G: tl.constexpr, PITCH: tl.constexpr, FP4: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    """[BN, BK / 32, 16]: sums of the products of the weights in codes of rows [BN] with the row at ``x``."""
    acc = tl.zeros([row.shape[0], BK // 32, 16], tl.float32)
    EVEN: tl.constexpr = K % (HELD * BK) == 0
    k = tl.reshape(columns_of_codes(0, BK // 2), [BK // 32, 16])
    for first in tl.range(0, STEPS, HELD):
        w, scale, lows, highs = (), (), (), ()
        for i in tl.static_range(HELD):
            at = (first + i) * BK
            w = w + (load_codes(codes, row, at, K, BK, EVEN),)
            scale = scale + (load_scales(scales, row, at, K, G, PITCH, BK, EVEN),)
            lows = lows + (tl.load(x + at + k, mask=at + k < K, other=0.0),)
            highs = highs + (tl.load(x + at + k + 64, mask=at + k + 64 < K, other=0.0),)
        for i in tl.static_range(HELD):
            low, high = decode(w[i], scale[i], x.dtype.element_ty, FP4, PLAIN)
            acc += low.to(tl.float32) * lows[i].to(tl.float32)[None, :, :]
            acc += high.to(tl.float32) * highs[i].to(tl.float32)[None, :, :]
    return acc


@triton.jit
def _load_experts(weight, ids, pair, weight_row, columns, k, K: tl.constexpr, STEPS: tl.constexpr, BK: tl.constexpr,
                  FIRST: tl.constexpr, LAST: tl.constexpr):  # fmt: skip
    """All steps of some rows of the weights of a row's experts, whose first pair is ``pair``."""
    w = ()
    for i in tl.static_range(FIRST, LAST):
        at = weight + (tl.load(ids + pair + i).to(tl.int64) * columns + weight_row)[:, None] * K
        w = w + _load_steps(at, 0, k[None, :], K, STEPS, BK)
    return w


@triton.jit
def _zeros(BN: tl.constexpr, BK: tl.constexpr, G: tl.constexpr):
    """Sums of the products of a step, for codes in the shape of ``load_codes``."""
    return tl.zeros([BN, BK // 32, 16] if G else [BN, BK], tl.float32)


@triton.jit
def _total(acc, G: tl.constexpr):
    """[BN]: the sums of ``_zeros``, added up."""
    return tl.sum(tl.sum(acc, 2), 1) if G else tl.sum(acc, 1)


@kernel
def _up_kernel(
    x,
    ids,
    weight,
    bias,
    out,
    weight_scale,
    columns,
    x_stride,
    K: tl.constexpr,
    G: tl.constexpr,
    PITCH: tl.constexpr,
    FP4: tl.constexpr,
    TOP_K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HELD: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    PLAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program is a pair and some columns. The next kernel starts late enough for it to read the ids ahead."""
    pair, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k = tl.arange(0, BK)
    row = weight_rows_of(program, columns, GATED, BN)
    wait(PDL)
    row += tl.load(ids + pair).to(tl.int64) * (columns * (2 if GATED else 1))
    from_x = x + pair // TOP_K * x_stride
    STEPS: tl.constexpr = (K + BK - 1) // BK
    if G:
        acc = _sum_coded(weight, weight_scale, row, from_x, K, STEPS, HELD, BK, G, PITCH, FP4, PLAIN)
    else:
        acc = tl.zeros([BN, BK], tl.float32)
        acc = _add_products(acc, weight + row[:, None] * K, from_x, 1.0, k, K, STEPS, HELD, BK)
    y = _total(acc, G)[:, None]
    if weight_scale is not None and G == 0:
        y *= tl.load(weight_scale + row)[:, None]
    if bias is not None:
        y += tl.load(bias + row).to(tl.float32)[:, None]
    y = activate_columns(y, ACT, GATED)
    WIDTH: tl.constexpr = BN // 2 if GATED else BN
    column = (program * WIDTH + tl.arange(0, WIDTH))[:, None]
    tl.store(out + pair * columns + column, y.to(out.dtype.element_ty), mask=column < columns)


@kernel
def _down_kernel(
    x,
    ids,
    factors,
    weight,
    bias,
    out,
    weight_scale,
    columns,
    out_stride,
    K: tl.constexpr,
    G: tl.constexpr,
    PITCH: tl.constexpr,
    FP4: tl.constexpr,
    TOP_K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HELD: tl.constexpr,
    TOGETHER: tl.constexpr,
    ADD: tl.constexpr,
    PLAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program is a row and some columns. TOGETHER: experts whose weights are on the way at once; 0 if those of one
    are too many. The first of these are asked for while the first product still runs.

    The layout of x changes in shared memory, and behind its barriers no load is asked for before. So loads come first.
    """
    start_next(PDL)
    row, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k, column = tl.arange(0, BK), program * BN + tl.arange(0, BN)
    weight_row = tl.minimum(column, columns - 1)
    to = out + row * out_stride + column
    STEPS: tl.constexpr = (K + BK - 1) // BK
    w = _load_experts(weight, ids, row * TOP_K, weight_row, columns, k, K, STEPS, BK, 0, TOGETHER)
    wait(PDL)
    total = tl.zeros([BN], tl.float32)
    acc = _zeros(BN, BK, G)
    for first in tl.static_range(0, TOP_K, max(1, TOGETHER)):
        if TOGETHER > 0:
            if first > 0:
                w = _load_experts(
                    weight, ids, row * TOP_K, weight_row, columns, k, K, STEPS, BK, first, min(first + TOGETHER, TOP_K)
                )
            xs = ()
            for i in tl.static_range(first, min(first + TOGETHER, TOP_K)):
                xs = xs + _load_steps(x + (row * TOP_K + i) * K, 0, k, K, STEPS, BK)
        for i in tl.static_range(first, min(first + max(1, TOGETHER), TOP_K)):
            pair = row * TOP_K + i
            of_expert = tl.load(ids + pair).to(tl.int64) * columns + weight_row
            factor = tl.load(factors + pair).to(tl.float32)
            if G:
                from_x = x + pair * K
                own = _sum_coded(weight, weight_scale, of_expert, from_x, K, STEPS, HELD, BK, G, PITCH, FP4, PLAIN)
                acc += own * factor
            else:
                own = tl.zeros([BN, BK], tl.float32)
                if TOGETHER > 0:
                    for j in tl.static_range(STEPS):
                        x_of_step = xs[(i - first) * STEPS + j].to(tl.float32) * factor
                        own += w[(i - first) * STEPS + j].to(tl.float32) * x_of_step[None, :]
                else:
                    at = weight + of_expert[:, None] * K
                    own = _add_products(own, at, x + pair * K, factor, k, K, STEPS, HELD, BK)
                acc += own if weight_scale is None else own * tl.load(weight_scale + of_expert)[:, None]
            if bias is not None:
                total += factor * tl.load(bias + of_expert).to(tl.float32)
    total += _total(acc, G)
    if ADD:
        total += tl.load(to, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=column < columns)


def _step(inner: int) -> int:
    """Elements of K in a step: what divides it, or else what leaves little of the last step over; whole tiles of
    codes."""
    whole = inner & -inner
    return min(1024, whole if whole >= 256 else max(128, 1 << (inner - 1).bit_length()))


def _held(inner: int, step: int, columns: int) -> int:
    """Steps whose weights are on the way at the same time."""
    return max(1, min(-(-inner // step), _MOST_HELD // (step * columns)))


def multiply_up(x: Tensor, ids: Tensor, handle: CudaLinear, *, out: Tensor, activation: str, pdl: bool = False) -> None:
    """out [T * top_k, I] = activation(x W^T + bias) for the row of each pair by the weights of its expert."""
    weight, scale, coding = kernel_operands(handle.weight)
    (pairs, columns), inner, gated = out.shape, x.shape[1], activation in GATED_KINDS
    step, tile = _step(inner), 4
    _up_kernel[(pairs, triton.cdiv(columns * (1 + gated), tile))](
        x, ids, weight, handle.bias, out, scale, columns, x.stride(0), K=inner, TOP_K=ids.shape[1], BN=tile, BK=step,
        HELD=_held(inner, step, tile), ACT=activation, GATED=gated, PLAIN=INTERPRETED,
        num_warps=4 if step == 1024 and inner > 2048 and not coding["G"] else 2, **coding, **launch_options(pdl),
    )  # fmt: skip


def multiply_down(
    x: Tensor, ids: Tensor, factors: Tensor, handle: CudaLinear, *, out: Tensor, add: bool, pdl: bool = False
) -> None:
    """out [T, H] = the sum of (x W^T + bias) * factors over the pairs of each row, or out += that; x [T * top_k, I]."""
    weight, scale, coding = kernel_operands(handle.weight)
    (rows, columns), inner, top_k = out.shape, x.shape[1], ids.shape[1]
    step, tile = _step(inner), 4
    fit = 0 if coding["G"] else _MOST_TOGETHER // (-(-inner // step) * step * tile)
    together = triton.cdiv(top_k, triton.cdiv(top_k, fit)) if fit else 0
    _down_kernel[(rows, triton.cdiv(columns, tile))](
        x, ids, factors, weight, handle.bias, out, scale, columns, out.stride(0), K=inner, TOP_K=top_k,
        BN=tile, BK=step, HELD=_held(inner, step, tile), TOGETHER=together, ADD=add, PLAIN=INTERPRETED,
        num_warps=4, **coding, **launch_options(pdl),
    )  # fmt: skip
