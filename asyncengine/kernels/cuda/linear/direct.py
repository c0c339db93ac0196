"""Projections by weights in int4 or int8 for few rows: codes go from memory to registers, for the tensor cores.

    out = residual + activation(x W^T + bias)

A thread reads 16 bytes, and has the codes of its part of the tensor cores' operand (see ``in_tiles``): no weight moves
between threads, and the loop has no barrier. Codes, scales and inputs of the next step are loaded before this one is
multiplied, the first codes and scales even before x is there (see launch/programmatic.py). Warps of a program take
tiles of K in turn; their sums meet at the end in shared memory, so that no sum crosses programs.

Numbers of int4 are ``int4_unit`` times the codes, less 8, and so are all sums until the end.

A product of the tensor cores takes columns of all 64 that lie side by side in a tile. For smaller groups it is taken
once for each of them, with zeros in the place of the inputs of the others.

The product prepares the norm of the residual that it adds to, and ends a norm that was prepared, as the kernels of
tma.py do (see residual.py).
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc, no-redef"

from __future__ import annotations

from functools import partial

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncengine.kernels.cuda.launch.gluon import GluonKernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options
from asyncengine.kernels.cuda.linear.decode import int4_unit
from asyncengine.kernels.cuda.linear.ends import activate_sums, load_sums, store_norm, store_unnormed_rows
from asyncengine.kernels.cuda.linear.grouped import TILE_COLUMNS, GroupedMatrix
from asyncengine.kernels.cuda.linear.operands import (
    along,
    by_unit,
    load_by_group,
    multiply_codes,
    multiply_small_groups,
    sums_layout,
    weight_row_at,
)
from asyncengine.kernels.cuda.linear.plan import Plan
from asyncengine.kernels.cuda.linear.residual import Unnormed
from asyncengine.kernels.ops import Activation, Norm
from asyncengine.kernels.weight import INT4

_TRAP_IF_NEGATIVE = gl.constexpr("{ .reg .pred p; setp.lt.s32 p, $1, 0; @p trap; mov.u32 $0, 0; }")


@gluon.jit
def _keep_loads_ahead(rows):
    """Have the loads before this one run before the products behind it: a branch that is never taken parts the two.

    To save registers, the compiler moves loads of the next step behind the products of this one, where all wait for
    them. It moves instructions within a block alone, and a branch ends a block. No step has fewer than no rows.
    """
    gl.inline_asm_elementwise(_TRAP_IF_NEGATIVE, "=r,r", [rows], dtype=gl.int32, is_pure=False, pack=1)


@partial(GluonKernel, do_not_specialize=["rows"])
def direct_kernel(
    x,
    codes,
    scales,
    offsets,
    bias,
    out,
    vector,
    scaled,
    sums,
    eps,
    rows,
    columns,
    x_stride,
    out_stride,
    K: gl.constexpr,
    G: gl.constexpr,
    PER_BYTE: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    UNITS: gl.constexpr,
    AHEAD: gl.constexpr,
    HALF: gl.constexpr,
    FUSED: gl.constexpr,
    OFFSETS: gl.constexpr,
    BIAS: gl.constexpr,
    ADD: gl.constexpr,
    READS: gl.constexpr,
    WRITES: gl.constexpr,
    TILES: gl.constexpr,
    HOLDS: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Grid: blocks of x's rows, programs of BN rows of the weight. x and codes are int32, x_stride is in these.

    PER_BYTE: numbers in a byte of codes, 2 of int4 and 1 of int8. A step is UNITS tiles of K for each warp. AHEAD: x of
    the next step is loaded in this one. HALF: x is float16, and not bfloat16. READS, WRITES, TILES: as in tma.py.
    HOLDS: see ``_keep_loads_ahead``.
    """
    if PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    GATED: gl.constexpr = FUSED == "silu_mul"
    WIDTH: gl.constexpr = BN // 2 if GATED else BN
    RB: gl.constexpr = BN // 16
    TILE: gl.constexpr = 64 * PER_BYTE
    KT: gl.constexpr = K // TILE
    STRIDE: gl.constexpr = WARPS * UNITS
    STEPS: gl.constexpr = (KT + STRIDE - 1) // STRIDE
    UNIT: gl.constexpr = int4_unit(half=HALF) if PER_BYTE == 2 else 1.0
    ONE: gl.constexpr = G >= TILE
    PER_UNIT: gl.constexpr = 1 if ONE else TILE // G
    HELD: gl.constexpr = UNITS * (8 * RB + PER_BYTE * BM) + BN * BM // 32  # registers for a step, and for the sums
    TWICE: gl.constexpr = ONE and not OFFSETS and (STEPS == 2 or (HELD <= 52 and STEPS > 3))
    EACH: gl.constexpr = max(1, WIDTH // 32, min(8, WIDTH * BM // (32 * WARPS)))
    STORED: gl.constexpr = gl.BlockedLayout([EACH, 1], [WIDTH // EACH, 32 * EACH // WIDTH], [1, WARPS], [0, 1])
    PARTS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    TOGETHER: gl.constexpr = sums_layout(WARPS, BN, BM, EACH, GATED)
    SUMS: gl.constexpr = gl.SliceLayout(0, TOGETHER)
    ROWS: gl.constexpr = gl.SliceLayout(2, PARTS)
    # Words [W, UNITS, RB, 2 blocks of 8 rows, 128], and pairs of x [W, UNITS, BM, TILE / 2].
    WORDS: gl.constexpr = gl.BlockedLayout([1, UNITS, RB, 2, 4], [1, 1, 1, 1, 32], [WARPS, 1, 1, 1, 1], [4, 3, 2, 1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, UNITS, 1, 8], [1, 1, 8, 4], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    row, program = gl.program_id(0) * BM, gl.program_id(1)
    column = program * WIDTH
    all_rows = columns * 2 if GATED else columns

    tile = gl.arange(0, WARPS, along(WORDS, 0, 5))[:, None, None, None, None]
    tile = tile + gl.arange(0, UNITS, along(WORDS, 1, 5))[None, :, None, None, None] * WARPS
    of_16 = gl.arange(0, RB, along(WORDS, 2, 5))[None, None, :, None, None] + program * RB
    of_8 = gl.arange(0, 2, along(WORDS, 3, 5))[None, None, None, :, None]
    if GATED:  # 8 rows of the gate and the 8 rows of up for the same columns
        block = gl.minimum(of_16, columns // 8 - 1) + of_8 * (columns // 8)
    else:
        block = gl.minimum(of_16 * 2 + of_8, columns // 8 - 1)
    at_codes = codes + (block.to(gl.int64) * KT + tile) * 128
    at_codes = at_codes + gl.arange(0, 128, along(WORDS, 4, 5))[None, None, None, None, :]

    place = gl.arange(0, BN, gl.SliceLayout(0, ROWS))
    weight_row = gl.minimum(weight_row_at(place, column, columns, GATED), all_rows - 1)[None, :]
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, ROWS))

    tile_of_x = gl.arange(0, WARPS, along(PAIRS, 0, 4))[:, None, None, None]
    tile_of_x = tile_of_x + gl.arange(0, UNITS, along(PAIRS, 1, 4))[None, :, None, None] * WARPS
    of_x = (row + gl.arange(0, BM, along(PAIRS, 2, 4)))[None, None, :, None]
    from_row = gl.minimum(of_x, rows - 1).to(gl.int64)
    pair = gl.arange(0, TILE // 2, along(PAIRS, 3, 4))[None, None, None, :]
    at_x = x + from_row * x_stride + (tile_of_x * (TILE // 2) + pair)
    wanted = (of_x < rows) | (BM > 16)  # few rows are loaded once, and not for all rows of a tile

    words = gl.load(at_codes, mask=tile < KT, other=0)
    scale = load_by_group(scales + weight_row, warp, all_rows, KT, TILE, G, WARPS, UNITS)
    shift = load_by_group(offsets + weight_row, warp, all_rows, KT, TILE, G, WARPS, UNITS) if OFFSETS else scale
    ones = gl.full([WARPS, BN, 16], UNIT, dtype, gl.DotOperandLayout(0, PARTS, 2))
    n = column + gl.arange(0, WIDTH, gl.SliceLayout(1, STORED))
    m = row + gl.arange(0, BM, gl.SliceLayout(0, STORED))
    at = out + m.to(gl.int64)[None, :] * out_stride + n[:, None]
    there = (m < rows)[None, :] & (n < columns)[:, None]
    if WRITES > 0:
        gain = gl.load(vector + n, mask=n < columns, other=0.0)
    if BIAS:
        of = weight_row_at(gl.arange(0, BN, gl.SliceLayout(1, SUMS)), column, columns, GATED)
        offset = gl.load(bias + gl.minimum(of, all_rows - 1))
    if PDL:
        gdc_wait()
    if ADD:
        added = gl.load(at, mask=there, other=0.0)
    if AHEAD:
        pairs = gl.load(at_x, mask=(tile_of_x < KT) & wanted, other=0)
    if READS > 0:  # while the first codes are under way
        norms = gl.allocate_shared_memory(gl.float32, [READS, BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        squares = load_sums(sums, row, rows, BM, TILES, WARPS, DIVIDED=True)
        store_norm(norms, squares, squares, eps, K)

    acc = gl.zeros([WARPS, BN, BM], gl.float32, PARTS)
    if PER_UNIT > PER_BYTE:  # of four neighbours, two of 8 columns are those of a lane
        lane = gl.arange(0, 16, along(gl.DotOperandLayout(1, PARTS, 2), 1, 3))[None, :, None] % 8 // 2
    # Two steps in a turn of the loop, if registers have room: what is loaded ahead changes places without being moved.
    # A step behind the last tile adds zeros.
    for begin in range(0, KT, (1 + TWICE) * STRIDE):
        for step in gl.static_range(1 + TWICE):
            first = begin + step * STRIDE
            done = first + STRIDE
            next_words = gl.load(at_codes + done * 128, mask=tile + done < KT, other=0)
            next_scale = load_by_group(scales + weight_row, warp + done, all_rows, KT, TILE, G, WARPS, UNITS)
            next_shift = next_scale
            if OFFSETS:
                next_shift = load_by_group(offsets + weight_row, warp + done, all_rows, KT, TILE, G, WARPS, UNITS)
            if AHEAD:
                next_pairs = gl.load(at_x + done * (TILE // 2), mask=(tile_of_x + done < KT) & wanted, other=0)
            else:
                pairs = gl.load(at_x + first * (TILE // 2), mask=(tile_of_x + first < KT) & wanted, other=0)
            if HOLDS and (ONE or not OFFSETS):  # offsets of half tiles leave too few registers
                _keep_loads_ahead(rows)
            own_words = gl.permute(gl.reshape(words, [WARPS, UNITS, RB, 2, 32, 2, 2]), (0, 2, 3, 4, 5, 6, 1))
            own_pairs = gl.reshape(pairs, [WARPS, UNITS, BM, PER_BYTE, 4, 2, 2, 2])
            own_pairs = gl.permute(own_pairs, (0, 2, 3, 4, 7, 5, 6, 1))
            own_words, own_pairs = by_unit(own_words, UNITS), by_unit(own_pairs, UNITS)
            for unit in gl.static_range(UNITS):
                if PER_UNIT > PER_BYTE:
                    acc = multiply_small_groups(
                        own_words[unit], own_pairs[unit], scale[unit * PER_UNIT : (unit + 1) * PER_UNIT],
                        shift[unit * PER_UNIT : (unit + 1) * PER_UNIT], acc, ones, lane, dtype, PER_UNIT, OFFSETS,
                    )  # fmt: skip
                else:
                    acc = multiply_codes(
                        own_words[unit], own_pairs[unit], scale[unit * PER_UNIT : (unit + 1) * PER_UNIT],
                        shift[unit * PER_UNIT : (unit + 1) * PER_UNIT], acc, ones, dtype, ONE, OFFSETS,
                    )  # fmt: skip
            words, scale, shift = next_words, next_scale, next_shift
            if AHEAD:
                pairs = next_pairs

    acc = gl.sum(gl.convert_layout(acc, TOGETHER), 0) * (1 / UNIT)
    if READS > 0:
        acc *= norms.index(0).load(gl.SliceLayout(0, SUMS))[None, :]
    if BIAS:
        acc += offset.to(gl.float32)[:, None]
    y = gl.convert_layout(activate_sums(acc, FUSED), STORED)
    if ADD:
        y += added.to(gl.float32)
    y = y.to(out.dtype.element_ty)
    gl.store(at, y, mask=there)
    if WRITES > 0:
        store_unnormed_rows(y, gain, scaled, sums, program, gl.num_programs(1), n, m, rows, columns, WRITES)


def direct_linear(
    x: Tensor | Unnormed,
    weight: GroupedMatrix,
    plan: Plan,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    add: bool = False,
    pdl: bool = False,
) -> None:
    """out [M, N] = activation(x [M, K] weight^T + bias), or with ``add`` out += that.

    x is bfloat16 or float16, weight is int4 or int8 in tiles, of the plan's size, for silu_mul [2N, K] with the gate's
    rows first. Rows of x and out may be strided. Raises ValueError if anything does not fit.
    """
    if isinstance(x, Unnormed):
        if len(x.sums) != 1 or x.sums.shape[2] != len(x.x):
            raise ValueError(f"sums {list(x.sums.shape)} are not those of an RMS norm of {list(x.x.shape)}")
        _launch(x.x, weight, plan, out, bias, activation, add, pdl, reads=x)
    else:
        _launch(x, weight, plan, out, bias, activation, add, pdl)


def direct_sum(
    x: Tensor,
    weight: GroupedMatrix,
    plan: Plan,
    *,
    out: Tensor,
    norm: Norm,
    bias: Tensor | None = None,
    pdl: bool = False,
) -> Unnormed:
    """out [M, N] += x [M, K] weight [N, K]^T + bias [N], bfloat16, for the projection that reads it through ``norm``.

    Raises ValueError as ``direct_linear`` does.
    """
    result = Unnormed.allocate(out, triton.cdiv(len(weight), plan.columns), norm)
    _launch(x, weight, plan, out, bias, None, True, pdl, writes=result, gain=norm.weight)
    return result


def _launch(
    x: Tensor, weight: GroupedMatrix, plan: Plan, out: Tensor, bias: Tensor | None, fused: Activation | None, add: bool,
    pdl: bool, *, reads: Unnormed | None = None, writes: Unnormed | None = None, gain: Tensor | None = None,
) -> None:  # fmt: skip
    weight_rows, inner = weight.shape
    gated = fused == "silu_mul"
    columns = weight_rows // (1 + gated)
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if x.stride(1) != 1 or x.stride(0) % 2:
        x = x.contiguous()
    known = weight.tiled and (weight.scales_sums or weight.has_small_groups) and plan.inner == TILE_COLUMNS[weight.form]
    if plan.kind != "direct" or not known or not plan.fits(columns, inner, gated):
        raise ValueError(f"{plan} does not fit {weight.form} {list(weight.shape)} in groups of {weight.group}")
    if x.element_size() != 2 or x.shape[1] != inner or out.shape != (len(x), columns) or out.stride(1) != 1:
        raise ValueError(f"x {x.dtype} {list(x.shape)} and out {out.dtype} {list(out.shape)} do not fit")
    pairs, words = x.view(torch.int32), weight.codes.view(torch.int32)
    unnormed = reads or writes
    direct_kernel[(triton.cdiv(len(x), plan.rows), triton.cdiv(weight_rows, plan.columns))](
        pairs, words, weight.scales,
        weight.scales if weight.offsets is None else weight.offsets,
        words if bias is None else bias,
        out,
        words if gain is None else gain,
        out if writes is None else writes.x,
        out if unnormed is None else unnormed.sums,
        0.0 if reads is None else reads.eps,
        len(x), columns, pairs.stride(0), out.stride(0),
        K=inner, G=weight.group, PER_BYTE=2 if weight.form == INT4 else 1, BM=plan.rows, BN=plan.columns,
        UNITS=plan.stages, AHEAD=plan.ahead > 0, HALF=x.dtype == torch.float16, FUSED=fused or "none",
        OFFSETS=weight.offsets is not None, BIAS=bias is not None, ADD=add,
        READS=0 if reads is None else len(reads.sums), WRITES=0 if writes is None else len(writes.sums),
        TILES=0 if reads is None else reads.sums.shape[1], HOLDS=plan.holds, WARPS=plan.warps,
        num_warps=plan.warps, **launch_options(pdl),
    )  # fmt: skip
