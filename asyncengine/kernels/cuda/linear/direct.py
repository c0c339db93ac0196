"""Projections by weights in int4 or int8 for few rows: codes go from memory to registers, for the tensor cores.

    out = residual + activation(x W^T + bias)

A thread reads 16 bytes, and has the codes of its part of the tensor cores' operand (see ``in_tiles``): no weight moves
between threads, and the loop has no barrier. Codes, scales and inputs of the next step are loaded before this one is
multiplied, the first codes and scales even before x is there (see launch/programmatic.py). Warps of a program take
tiles of K in turn; their sums meet at the end in shared memory, so that no sum crosses programs.

A product of the tensor cores takes columns of all 64 that lie side by side in a tile. For smaller groups it is taken
once for each of them, with zeros in the place of the inputs of the others.

The product prepares the norm of the residual that it adds to, and ends a norm that was prepared, as the kernels of
tma.py do (see residual.py).
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc, no-redef"
# ruff: noqa: RUF005 - Triton knows no starred items in a list or a tuple

from __future__ import annotations

from functools import partial

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncengine.kernels.cuda.launch.gluon import GluonKernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options
from asyncengine.kernels.cuda.linear.decode import bytes_of_word, nibbles_of_word
from asyncengine.kernels.cuda.linear.ends import activate_sums, load_sums, store_norm, store_unnormed_rows
from asyncengine.kernels.cuda.linear.grouped import TILE_COLUMNS, GroupedMatrix
from asyncengine.kernels.cuda.linear.plan import Plan
from asyncengine.kernels.cuda.linear.residual import Unnormed
from asyncengine.kernels.ops import Activation, Norm
from asyncengine.kernels.weight import INT4


def _halves(*registers: str) -> str:
    """Registers of two numbers become results of one."""
    return " ".join(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, {made};" for i, made in enumerate(registers))


def _word(*, half: bool) -> gl.constexpr:
    """A word of int4 becomes 8 numbers of 16 bits, four registers of two."""
    made = nibbles_of_word("$8", ("p", "q"), ("r", "s"), half=half)
    return gl.constexpr(f"{{ .reg .b32 p, q, r, s; {made} {_halves('p', 'q', 'r', 's')} }}")


def _bytes(*, half: bool) -> gl.constexpr:
    """A word of int8 becomes 4 numbers of 16 bits, two registers of two."""
    made = bytes_of_word("$4", "p", "q", half=half)
    return gl.constexpr(f"{{ .reg .b32 p, q; {made} {_halves('p', 'q')} }}")


_WORD_BF16, _WORD_FP16 = _word(half=False), _word(half=True)
_BYTES_BF16, _BYTES_FP16 = _bytes(half=False), _bytes(half=True)
_FOUR, _EIGHT = gl.constexpr((gl.int16,) * 4), gl.constexpr((gl.int16,) * 8)


@gluon.constexpr_function
def _along(layout, dim, rank):
    """Layout of a vector along one of the dimensions of ``layout``."""
    for other in reversed(range(rank)):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _weight_row(place, column, columns, GATED: gl.constexpr):
    """Rows of the weight in a program; for silu_mul in turn 8 of the gate and the 8 of up for the same columns."""
    return column + (place // 16 * 8 + place % 8 + place // 8 % 2 * columns if GATED else place)


@gluon.jit
def _quarters(t):
    """The four parts of a tensor whose last dimensions are [2, 2]."""
    even, odd = gl.split(t)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def _by_unit(t, UNITS: gl.constexpr):
    """The parts of a tensor by its last dimension, UNITS."""
    if UNITS == 1:
        parts = (gl.reshape(t, t.shape[:-1]),)
    elif UNITS == 2:
        parts = gl.split(t)
    else:
        parts = _quarters(gl.reshape(t, t.shape[:-1] + [2, 2]))
    return parts


@gluon.jit
def _left(low_register, low_place, high_register, high_place, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """The left operand [W, BN, 16] of a product, of the four numbers of each lane: int16 [W, BN / 16, 2, 32]."""
    w = gl.join(gl.join(low_register, low_place), gl.join(high_register, high_place))
    w = gl.reshape(w, [w.shape[0], w.shape[1], 2, 8, 4, 2, 2])
    w = gl.reshape(gl.permute(w, (0, 1, 2, 3, 6, 4, 5)), [w.shape[0], w.shape[1] * 16, 16])
    return gl.convert_layout(w.to(dtype, bitcast=True), LAYOUT)


@gluon.jit
def _weights(word, dtype: gl.constexpr, PER_BYTE: gl.constexpr, LAYOUT: gl.constexpr):
    """Left operands of words [W, BN / 16, 2, 32]: of int4 those of the low and of the high halves, of int8 one."""
    if PER_BYTE == 2:
        TEXT: gl.constexpr = _WORD_BF16 if dtype == gl.bfloat16 else _WORD_FP16
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            TEXT, "=h,=h,=h,=h,=h,=h,=h,=h,r", [word], dtype=_EIGHT, is_pure=True, pack=1
        )
        left = (_left(a, b, c, d, dtype, LAYOUT), _left(e, f, g, h, dtype, LAYOUT))
    else:
        OF_BYTES: gl.constexpr = _BYTES_BF16 if dtype == gl.bfloat16 else _BYTES_FP16
        a, b, c, d = gl.inline_asm_elementwise(OF_BYTES, "=h,=h,=h,=h,r", [word], dtype=_FOUR, is_pure=True, pack=1)
        left = (_left(a, b, c, d, dtype, LAYOUT),)
    return left


@gluon.jit
def _inputs(pairs, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """Right operands [W, 16, BM] for each of ``_weights``, of pairs of x: int32 [W, BM, PER_BYTE, 4, 2]."""
    first, second = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    x = gl.permute(gl.join(first, second), (0, 4, 3, 5, 1, 2))
    x = gl.reshape(x, [pairs.shape[0], 16, pairs.shape[1], pairs.shape[2]]).to(dtype, bitcast=True)
    if pairs.shape[2] == 2:
        low, high = gl.split(x)
        right = (gl.convert_layout(low, LAYOUT), gl.convert_layout(high, LAYOUT))
    else:
        right = (gl.convert_layout(gl.reshape(x, x.shape[:-1]), LAYOUT),)
    return right


@gluon.jit
def _load_by_group(
    values, tile, all_rows, KT: gl.constexpr, TILE: gl.constexpr, G: gl.constexpr, WARPS: gl.constexpr,
    UNITS: gl.constexpr,
):  # fmt: skip
    """Scales or offsets [W, BN] of a step: of each unit, and of each group in its tile, in order.

    ``values`` points to those of the program's rows in the first group, ``tile`` is the first one of each warp.
    """
    PER_TILE: gl.constexpr = 1 if G >= TILE else TILE // G
    loaded = ()
    for unit in gl.static_range(UNITS):
        for part in gl.static_range(PER_TILE):
            group = gl.minimum(tile + unit * WARPS, KT - 1) * TILE // G + part
            loaded = loaded + (gl.load(values + group[:, None] * all_rows),)
    return loaded


@gluon.jit
def _multiply(words, pairs, scale, shift, acc, ones, dtype: gl.constexpr, ONE: gl.constexpr, OFFSETS: gl.constexpr):
    """A tile of K for each warp: words [W, BN / 16, 2, 32, 2, 2], pairs [W, BM, PER_BYTE, 4, 2, 2, 2], and its scales
    and offsets. ONE: the tile has one of each, and not one for each half."""
    PARTS: gl.constexpr = acc.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PARTS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PARTS, 2)
    PER_BYTE: gl.constexpr = pairs.shape[2]
    words, pairs = _quarters(words), _quarters(pairs)
    zeros = gl.zeros(acc.shape, gl.float32, PARTS)
    low, high, x_low, x_high = zeros, zeros, zeros, zeros
    for i in gl.static_range(4):
        w, x = _weights(words[i], dtype, PER_BYTE, LEFT), _inputs(pairs[i], dtype, RIGHT)
        low = mma_v2(w[0], x[0], low)
        if PER_BYTE == 2:
            if ONE:
                low = mma_v2(w[1], x[1], low)
            else:
                high = mma_v2(w[1], x[1], high)
        if OFFSETS:
            x_low = mma_v2(ones, x[0], x_low)
            if PER_BYTE == 2:
                if ONE:
                    x_low = mma_v2(ones, x[1], x_low)
                else:
                    x_high = mma_v2(ones, x[1], x_high)
    acc += low * scale[0].to(gl.float32)[:, :, None]
    if OFFSETS:
        acc += x_low * shift[0].to(gl.float32)[:, :, None]
    if not ONE:
        acc += high * scale[1].to(gl.float32)[:, :, None]
        if OFFSETS:
            acc += x_high * shift[1].to(gl.float32)[:, :, None]
    return acc


@gluon.jit
def _multiply_small_groups(
    words, pairs, scale, shift, acc, ones, lane, dtype: gl.constexpr, PER_TILE: gl.constexpr, OFFSETS: gl.constexpr
):  # fmt: skip
    """As ``_multiply``, of a tile with PER_TILE groups of 16 or 32 columns. The columns of a lane are in one of them:
    ``lane`` is its place among four, in the layout of the right operand."""
    PARTS: gl.constexpr = acc.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PARTS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PARTS, 2)
    PER_BYTE: gl.constexpr = pairs.shape[2]
    PER_HALF: gl.constexpr = PER_TILE // PER_BYTE
    words, pairs = _quarters(words), _quarters(pairs)
    zeros = gl.zeros(acc.shape, gl.float32, PARTS)
    sums, x_sums = (), ()
    for i in gl.static_range(4):
        w, x = _weights(words[i], dtype, PER_BYTE, LEFT), _inputs(pairs[i], dtype, RIGHT)
        next_sums, next_x_sums = (), ()
        for group in gl.static_range(PER_TILE):
            of_group = x[group // PER_HALF]
            of_group = gl.where(lane // (4 // PER_HALF) == group % PER_HALF, of_group, gl.zeros_like(of_group))
            next_sums = next_sums + (mma_v2(w[group // PER_HALF], of_group, zeros if i == 0 else sums[group]),)
            if OFFSETS:
                next_x_sums = next_x_sums + (mma_v2(ones, of_group, zeros if i == 0 else x_sums[group]),)
        sums, x_sums = next_sums, next_x_sums
    for group in gl.static_range(PER_TILE):
        acc += sums[group] * scale[group].to(gl.float32)[:, :, None]
        if OFFSETS:
            acc += x_sums[group] * shift[group].to(gl.float32)[:, :, None]
    return acc


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
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Grid: blocks of x's rows, programs of BN rows of the weight. x and codes are int32, x_stride is in these.

    PER_BYTE: numbers in a byte of codes, 2 of int4 and 1 of int8. A step is UNITS tiles of K for each warp. AHEAD: x of
    the next step is loaded in this one. HALF: x is float16, and not bfloat16. READS, WRITES, TILES: as in tma.py.
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
    ONE: gl.constexpr = G >= TILE
    PER_UNIT: gl.constexpr = 1 if ONE else TILE // G
    THREADS: gl.constexpr = WIDTH // 8
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [THREADS, 32 // THREADS], [1, WARPS], [0, 1])
    PARTS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    TOGETHER: gl.constexpr = gl.BlockedLayout(
        [WARPS, BN // THREADS, 1], [1, THREADS, 32 // THREADS], [1, 1, WARPS], [1, 2, 0]
    )
    SUMS: gl.constexpr = gl.SliceLayout(0, TOGETHER)
    ROWS: gl.constexpr = gl.SliceLayout(2, PARTS)
    # Words [W, UNITS, RB, 2 blocks of 8 rows, 128], and pairs of x [W, UNITS, BM, TILE / 2].
    WORDS: gl.constexpr = gl.BlockedLayout([1, UNITS, RB, 2, 4], [1, 1, 1, 1, 32], [WARPS, 1, 1, 1, 1], [4, 3, 2, 1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, UNITS, 1, 8], [1, 1, 8, 4], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    row, program = gl.program_id(0) * BM, gl.program_id(1)
    column = program * WIDTH
    all_rows = columns * 2 if GATED else columns

    tile = gl.arange(0, WARPS, _along(WORDS, 0, 5))[:, None, None, None, None]
    tile = tile + gl.arange(0, UNITS, _along(WORDS, 1, 5))[None, :, None, None, None] * WARPS
    of_16 = gl.arange(0, RB, _along(WORDS, 2, 5))[None, None, :, None, None] + program * RB
    of_8 = gl.arange(0, 2, _along(WORDS, 3, 5))[None, None, None, :, None]
    if GATED:  # 8 rows of the gate and the 8 rows of up for the same columns
        block = gl.minimum(of_16, columns // 8 - 1) + of_8 * (columns // 8)
    else:
        block = gl.minimum(of_16 * 2 + of_8, columns // 8 - 1)
    at_codes = codes + (block.to(gl.int64) * KT + tile) * 128
    at_codes = at_codes + gl.arange(0, 128, _along(WORDS, 4, 5))[None, None, None, None, :]

    place = gl.arange(0, BN, gl.SliceLayout(0, ROWS))
    weight_row = gl.minimum(_weight_row(place, column, columns, GATED), all_rows - 1)[None, :]
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, ROWS))

    tile_of_x = gl.arange(0, WARPS, _along(PAIRS, 0, 4))[:, None, None, None]
    tile_of_x = tile_of_x + gl.arange(0, UNITS, _along(PAIRS, 1, 4))[None, :, None, None] * WARPS
    from_row = gl.minimum(row + gl.arange(0, BM, _along(PAIRS, 2, 4)), rows - 1).to(gl.int64)[None, None, :, None]
    pair = gl.arange(0, TILE // 2, _along(PAIRS, 3, 4))[None, None, None, :]
    at_x = x + from_row * x_stride + (tile_of_x * (TILE // 2) + pair)

    words = gl.load(at_codes, mask=tile < KT, other=0)
    scale = _load_by_group(scales + weight_row, warp, all_rows, KT, TILE, G, WARPS, UNITS)
    shift = _load_by_group(offsets + weight_row, warp, all_rows, KT, TILE, G, WARPS, UNITS) if OFFSETS else scale
    ones = gl.full([WARPS, BN, 16], 1.0, dtype, gl.DotOperandLayout(0, PARTS, 2))
    n = column + gl.arange(0, WIDTH, gl.SliceLayout(1, STORED))
    m = row + gl.arange(0, BM, gl.SliceLayout(0, STORED))
    at = out + m.to(gl.int64)[None, :] * out_stride + n[:, None]
    there = (m < rows)[None, :] & (n < columns)[:, None]
    if WRITES > 0:
        gain = gl.load(vector + n, mask=n < columns, other=0.0)
    if BIAS:
        of = _weight_row(gl.arange(0, BN, gl.SliceLayout(1, SUMS)), column, columns, GATED)
        offset = gl.load(bias + gl.minimum(of, all_rows - 1))
    if PDL:
        gdc_wait()
    if ADD:
        added = gl.load(at, mask=there, other=0.0)
    if AHEAD:
        pairs = gl.load(at_x, mask=tile_of_x < KT, other=0)
    if READS > 0:  # while the first codes are under way
        norms = gl.allocate_shared_memory(gl.float32, [READS, BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        squares = load_sums(sums, row, rows, BM, TILES, WARPS)
        store_norm(norms, squares, squares, eps, K)

    acc = gl.zeros([WARPS, BN, BM], gl.float32, PARTS)
    if PER_UNIT > PER_BYTE:  # of four neighbours, two of 8 columns are those of a lane
        lane = gl.arange(0, 16, _along(gl.DotOperandLayout(1, PARTS, 2), 1, 3))[None, :, None] % 8 // 2
    for first in range(0, KT, STRIDE):
        done = first + STRIDE
        next_words = gl.load(at_codes + done * 128, mask=tile + done < KT, other=0)
        next_scale = _load_by_group(scales + weight_row, warp + done, all_rows, KT, TILE, G, WARPS, UNITS)
        next_shift = next_scale
        if OFFSETS:
            next_shift = _load_by_group(offsets + weight_row, warp + done, all_rows, KT, TILE, G, WARPS, UNITS)
        if AHEAD:
            next_pairs = gl.load(at_x + done * (TILE // 2), mask=tile_of_x + done < KT, other=0)
        else:
            pairs = gl.load(at_x + first * (TILE // 2), mask=tile_of_x + first < KT, other=0)
        own_words = gl.permute(gl.reshape(words, [WARPS, UNITS, RB, 2, 32, 2, 2]), (0, 2, 3, 4, 5, 6, 1))
        own_pairs = gl.reshape(pairs, [WARPS, UNITS, BM, PER_BYTE, 4, 2, 2, 2])
        own_pairs = gl.permute(own_pairs, (0, 2, 3, 4, 7, 5, 6, 1))
        own_words, own_pairs = _by_unit(own_words, UNITS), _by_unit(own_pairs, UNITS)
        for unit in gl.static_range(UNITS):
            if PER_UNIT > PER_BYTE:
                acc = _multiply_small_groups(
                    own_words[unit], own_pairs[unit], scale[unit * PER_UNIT : (unit + 1) * PER_UNIT],
                    shift[unit * PER_UNIT : (unit + 1) * PER_UNIT], acc, ones, lane, dtype, PER_UNIT, OFFSETS,
                )  # fmt: skip
            else:
                acc = _multiply(
                    own_words[unit], own_pairs[unit], scale[unit * PER_UNIT : (unit + 1) * PER_UNIT],
                    shift[unit * PER_UNIT : (unit + 1) * PER_UNIT], acc, ones, dtype, ONE, OFFSETS,
                )  # fmt: skip
        words, scale, shift = next_words, next_scale, next_shift
        if AHEAD:
            pairs = next_pairs

    acc = gl.sum(gl.convert_layout(acc, TOGETHER), 0)
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
        TILES=0 if reads is None else reads.sums.shape[1], WARPS=plan.warps,
        num_warps=plan.warps, **launch_options(pdl),
    )  # fmt: skip
