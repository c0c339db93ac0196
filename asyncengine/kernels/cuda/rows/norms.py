"""Layer and RMS norms of rows on the GPU, and what a product stores for the product that reads it through a norm.

The twin of ``asyncengine.kernels.cpu.reference``: arithmetic is in float32, a result is rounded once to the model's
dtype, and the result of a row depends on nothing but the row.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, start_next, wait
from asyncengine.kernels.cuda.rows.tensors import check, check_rows, empty_rows, gain_dtype
from asyncengine.kernels.ops import Norm


@triton.jit
def load_gains(weight, bias, column, inside, NORM: tl.constexpr, CENTER: tl.constexpr):
    """A norm's weight and bias in float32, and zeros for those that it does not have."""
    scale = tl.zeros_like(column).to(tl.float32)
    shift = scale
    if NORM:
        scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if CENTER:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return scale, shift


@triton.jit
def norm_values(value, inside, scale, shift, eps, WIDTH: tl.constexpr, CENTER: tl.constexpr):
    """The norm of a row in float32, which is 0 where it is not ``inside``."""
    if CENTER:
        value = tl.where(inside, value - tl.sum(value, 0) / WIDTH, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps) * scale
    if CENTER:
        value += shift
    return value


@triton.jit
def store_sum(
    total, onto, onto_stride, normed, normed_stride, row, column, inside, scale, shift, eps,
    WIDTH: tl.constexpr, ONTO: tl.constexpr, NORM: tl.constexpr, CENTER: tl.constexpr,
):  # fmt: skip
    """Add a row to that of the residual, or store it, rounded once; then the norm of the result, as norm_rows has
    it."""
    at = onto + row.to(tl.int64) * onto_stride + column
    if ONTO:
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(onto.dtype.element_ty)
    tl.store(at, rounded, mask=inside)
    if NORM:
        value = tl.where(inside, rounded.to(tl.float32), 0.0)
        value = norm_values(value, inside, scale, shift, eps, WIDTH, CENTER)
        to = normed + row.to(tl.int64) * normed_stride + column
        tl.store(to, value.to(normed.dtype.element_ty), mask=inside)


@kernel
def _norm_kernel(
    x: tl.tensor,
    index: tl.tensor,
    parts: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    part_stride: tl.tensor,
    eps: tl.tensor,
    GATHER: tl.constexpr,
    PARTS: tl.constexpr,
    CENTER: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < WIDTH
    scale, shift = load_gains(weight, bias, column, inside, True, CENTER)
    wait(PDL)
    source = row
    if GATHER:
        source = tl.load(index + row)
    at = x + source * x_stride + column
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        value += tl.load(parts + part * part_stride + source * WIDTH + column, mask=inside, other=0.0)
    if PARTS > 0:
        value = value.to(x.dtype.element_ty).to(tl.float32)
        if not GATHER:
            tl.store(at, value.to(x.dtype.element_ty), mask=inside)
    value = norm_values(value, inside, scale, shift, eps, WIDTH, CENTER)
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=inside)


def check_norm(norm: Norm, x: Tensor) -> None:
    """Raise ValueError unless the norm is one of rows like those of x [M, N]."""
    check(norm.weight, gain_dtype(norm.weight, x), x.shape[1:], "weight")
    if norm.bias is not None:
        check(norm.bias, x.dtype, x.shape[1:], "bias")


def gains_or(norm: Norm | None, instead: Tensor) -> tuple[Tensor, Tensor]:
    """The weight and the bias of a norm; for those that there are not, a tensor that kernels do not read."""
    if norm is None:
        return instead, instead
    return norm.weight, norm.weight if norm.bias is None else norm.bias


def norm_rows(
    x: Tensor,
    norm: Norm,
    index: Tensor | None = None,
    parts: Tensor | None = None,
    *,
    in_place: bool = False,
    pdl: bool = False,
) -> Tensor:
    """The norm of the rows of x [M, N], which may be strided: [M, N]. With an ``index`` int64 [S], of those: [S, N].

    ``parts`` float32 [P, M, N] are first added to x, in their order; x itself takes the sum, but not with an index.
    ``in_place``, where there is neither, writes the norm to x.
    """
    check_rows(x, "x")
    width = x.shape[1]
    if parts is not None:
        check(parts, torch.float32, (len(parts), *x.shape), "parts")
    check_norm(norm, x)
    if index is not None:
        check(index, torch.int64, (len(index),), "index")
    rows = len(x) if index is None else len(index)
    out = x if in_place else empty_rows(rows, width, x.dtype, x.device)
    tile = triton.next_power_of_2(width)
    _norm_kernel[(rows,)](
        x,
        x if index is None else index,
        x if parts is None else parts,
        *gains_or(norm, x),
        out,
        x.stride(0),
        out.stride(0),
        0 if parts is None else parts.stride(0),
        norm.eps,
        GATHER=index is not None,
        PARTS=0 if parts is None else len(parts),
        CENTER=norm.bias is not None,
        WIDTH=width,
        TILE=tile,
        num_warps=min(16, max(1, tile // 256)),
        **launch_options(pdl),
    )
    return out


@triton.jit
def store_unnormed(
    y: tl.tensor,
    gain: tl.tensor,
    scaled: tl.tensor,
    sums: tl.tensor,
    tile: tl.tensor,
    tiles: tl.tensor,
    column: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    WRITES: tl.constexpr,
) -> None:
    """Store the input of the next projection for a residual's tile y [columns, rows], as it is stored (see
    residual.py)."""
    there = (row < rows)[None, :] & (column < columns)[:, None]
    y = tl.where(there, y.to(tl.float32), 0.0)
    to = scaled + row.to(tl.int64)[None, :] * columns + column[:, None]
    tl.store(to, (y * gain.to(tl.float32)[:, None]).to(scaled.dtype.element_ty), mask=there)
    at = sums + tile * rows + row
    tl.store(at, tl.sum(y * y, 0), mask=row < rows)
    if WRITES == 2:
        tl.store(at + tiles * rows, tl.sum(y, 0), mask=row < rows)
