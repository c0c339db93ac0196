"""Products of rows with their experts' weights by tensor cores, for rows that are sorted into tiles of one expert each.

Weights are the left operand, as in linear/tiled.py. They are read where they lie, and weights in float8 or int4 become
the dtype of the rows in registers. A row's sums do not depend on the other rows of its tile.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.experts.codes import columns_of_codes, decode, kernel_operands, load_codes, load_scales
from asyncengine.kernels.cuda.experts.epilogue import GATED_KINDS, activate_columns
from asyncengine.kernels.cuda.experts.plan import Tiles
from asyncengine.kernels.cuda.experts.sort import SortedPairs
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import INTERPRETED, launch_options, must_widen, start_next, wait
from asyncengine.kernels.cuda.linear.handle import CudaLinear
from asyncengine.kernels.cuda.linear.skinny import weight_rows_of


@triton.jit
def _multiply(w, x, acc, WIDEN: tl.constexpr):
    if WIDEN:
        w = w.to(tl.float32)
        x = x.to(tl.float32)
    return tl.dot(w.to(x.dtype), x, acc, input_precision="ieee")


@kernel
def _grouped_kernel(
    x,
    weight,
    bias,
    factors,
    order,
    tiles,
    out,
    weight_scale,
    limit,
    columns,
    x_stride,
    K: tl.constexpr,
    G: tl.constexpr,
    PITCH: tl.constexpr,
    FP4: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    WIDEN: tl.constexpr,
    PLAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    tile, program = tl.program_id(0), tl.program_id(1)
    expert = tl.load(tiles + tile).to(tl.int64)
    first = tl.load(tiles + limit + tile)
    count = tl.load(tiles + 2 * limit + tile)
    if tile >= tl.load(tiles + 3 * limit):
        return
    m, k = tl.arange(0, BM), columns_of_codes(0, BK // 2) if G else tl.arange(0, BK)
    there = m < count
    pair = tl.load(order + first + m, mask=there, other=0).to(tl.int64)
    row = weight_rows_of(program, columns, GATED, BN) + expert * (columns * (2 if GATED else 1))
    from_weight = weight + row[:, None] * K + k[None, :]
    from_x = x + (pair // PAIRS_PER_ROW)[None, :] * x_stride + k[:, None]
    acc = tl.zeros([BN, BM], tl.float32)
    for done in tl.range(0, K, BK, num_stages=STAGES):
        if G:
            packed = load_codes(weight, row, done, K, BK, K % BK == 0)
            scales = load_scales(weight_scale, row, done, K, G, PITCH, BK, K % BK == 0)
            low, high = decode(packed, scales, x.dtype.element_ty, FP4, PLAIN)
            x_low = tl.load(from_x + done, mask=(done + k < K)[:, None] & there[None, :], other=0.0)
            x_high = tl.load(from_x + done + 64, mask=(done + k + 64 < K)[:, None] & there[None, :], other=0.0)
            acc = _multiply(tl.reshape(low, [BN, BK // 2]), x_low, acc, WIDEN)
            acc = _multiply(tl.reshape(high, [BN, BK // 2]), x_high, acc, WIDEN)
        elif K % BK:
            inside = done + k < K
            w = tl.load(from_weight + done, mask=inside[None, :], other=0.0)
            acc = _multiply(w, tl.load(from_x + done, mask=there[None, :] & inside[:, None], other=0.0), acc, WIDEN)
        else:
            w = tl.load(from_weight + done)
            acc = _multiply(w, tl.load(from_x + done, mask=there[None, :], other=0.0), acc, WIDEN)
    if weight_scale is not None and G == 0:
        acc *= tl.load(weight_scale + row)[:, None]
    if bias is not None:
        acc += tl.load(bias + row).to(tl.float32)[:, None]
    y = activate_columns(acc, ACT, GATED)
    if factors is not None:
        y *= tl.load(factors + pair, mask=there, other=0.0).to(tl.float32)[None, :]
    WIDTH: tl.constexpr = BN // 2 if GATED else BN
    column = program * WIDTH + tl.arange(0, WIDTH)
    to = out + pair[None, :] * columns + column[:, None]
    tl.store(to, y.to(out.dtype.element_ty), mask=there[None, :] & (column < columns)[:, None])


def multiply_tiles(
    x: Tensor,
    handle: CudaLinear,
    pairs: SortedPairs,
    tiles: Tiles,
    *,
    out: Tensor,
    pairs_per_row: int = 1,
    activation: str = "none",
    factors: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """out [P, N] = activation(x W^T + bias) * factors, for each pair by the weights of its expert.

    Pair p is of row p // pairs_per_row of x. ``factors`` [P] and ``activation`` may be missing.
    """
    weight, scale, coding = kernel_operands(handle.weight)
    columns, gated = out.shape[1], activation in GATED_KINDS
    programs = triton.cdiv(columns * (1 + gated), tiles.columns)
    _grouped_kernel[(pairs.limit, programs)](
        x, weight, handle.bias, factors, pairs.order, pairs.tiles, out, scale, pairs.limit, columns, x.stride(0),
        K=x.shape[1], PAIRS_PER_ROW=pairs_per_row, BM=tiles.rows, BN=tiles.columns, BK=tiles.inner,
        STAGES=tiles.stages, ACT=activation, GATED=gated, WIDEN=must_widen(x.dtype), PLAIN=INTERPRETED,
        num_warps=tiles.warps, num_stages=tiles.stages, **coding, **launch_options(pdl),
    )  # fmt: skip
