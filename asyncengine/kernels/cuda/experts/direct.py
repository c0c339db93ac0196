"""Products of rows with their experts' weights in codes of 4 bits, for tiles of few rows of one expert each.

Codes go from memory to registers as in linear/direct.py. Warps of a program divide K, and the rows of the weight: those
that take the same columns read the same numbers of x at about the same time, so that these come from the L1 cache.

A float of 4 bits becomes one of bfloat16, times its scale, in registers. Sums of whole numbers are scaled, group by
group.
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

from asyncengine.kernels.cuda.experts.epilogue import GATED_KINDS
from asyncengine.kernels.cuda.experts.plan import DirectTiles
from asyncengine.kernels.cuda.experts.sort import SortedPairs
from asyncengine.kernels.cuda.launch.gluon import GluonKernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options
from asyncengine.kernels.cuda.linear.decode import fp4_of_word, int4_unit
from asyncengine.kernels.cuda.linear.ends import activate_sums
from asyncengine.kernels.cuda.linear.grouped import TILE, CodedRows
from asyncengine.kernels.cuda.linear.handle import CudaLinear
from asyncengine.kernels.cuda.linear.operands import (
    along,
    halves,
    left_operand,
    multiply_codes,
    pairs_layout,
    quarters,
    right_operands,
    weight_row_at,
)

_EIGHT = gl.constexpr((gl.int16,) * 8)
_FP4_WORD = gl.constexpr(
    f"{{ .reg .b32 p, q, r, v; {fp4_of_word('$8', 'pqrv', ('$9', '$9', '$10', '$10'))} {halves('p', 'q', 'r', 'v')} }}"
)


@gluon.jit
def _blocks_of_rows(first, expert, eights, RB: gl.constexpr, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """Blocks of 8 rows of the weight [1, RB, 2, 1] of a program whose first 16 rows are ``first``.

    With a gate each 16 rows are 8 of the gate and the 8 of up for the same columns.
    """
    of_16 = first + gl.arange(0, RB, along(LAYOUT, 1, 4))[None, :, None, None]
    of_8 = gl.arange(0, 2, along(LAYOUT, 2, 4))[None, None, :, None]
    if GATED:
        block = gl.minimum(of_16, eights - 1) + of_8 * eights + expert * (2 * eights)
    else:
        block = gl.minimum(of_16 * 2 + of_8, eights - 1) + expert * eights
    return block


@gluon.jit
def _load_weights(at_codes, tile, at_scales, warp, first, KT: gl.constexpr, GROUPS: gl.constexpr, G: gl.constexpr,
                  FP4: gl.constexpr, WK: gl.constexpr, UNITS: gl.constexpr):  # fmt: skip
    """Words [WK, RB, 2, 128] of each unit of the step that begins at tile ``first``, and its scales.

    Of floats, scales are words [WK, RB, 2, 32] of a unit. Of numbers they are [WK, BN] of a unit, or if a group is half
    a tile of each half of it. Behind the last tile they are 0. ``tile`` and ``warp`` are the first tiles of the warps.
    """
    words, scale = (), ()
    for unit in gl.static_range(UNITS):
        words = words + (gl.load(at_codes + gl.minimum(tile + first + unit * WK, KT - 1) * 128),)
    for unit in gl.static_range(UNITS):
        own = warp + first + unit * WK
        if FP4:
            scale = scale + (gl.load(at_scales + own, mask=own < KT, other=0),)
        else:
            for part in gl.static_range(1 if G >= 128 else 2):
                group = gl.minimum(own * 128 // G + part, GROUPS - 1)
                scale = scale + (gl.load(at_scales + group[:, None], mask=(own < KT)[:, None], other=0.0),)
    return words, scale


@gluon.jit
def _load_pairs(x, eight, within, first, K: gl.constexpr, WK: gl.constexpr, UNITS: gl.constexpr):
    """Pairs of x [WK, BM, 64] of each unit of the step that begins at tile ``first``; in the first step they have the
    places ``eight`` and, in these eights, ``within``.

    Behind the last column, where all codes stand for 0 or have scales of 0, the last eight come again.
    """
    pairs = ()
    for unit in gl.static_range(UNITS):
        pairs = pairs + (gl.load(x + (gl.minimum(eight + (first + unit * WK) * 64, K // 2 - 8) + within)),)
    return pairs


@gluon.jit
def _factors(word, shift):
    """2^126 times a power of 2, twice in a word as bfloat16; its exponent is the byte of ``word`` at ``shift``.

    A byte of 0 makes it 0.
    """
    return ((word >> shift) & 255) * 0x00800080


@gluon.jit
def _multiply_floats(words, pairs, low, high, acc):
    """A tile of K for each warp: words [WK, BN / 16, 2, 32, 2, 2] of floats of 4 bits, pairs as in ``multiply_codes``,
    and ``_factors`` [WK, BN / 16, 2, 32] of the low and of the high halves."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, acc.type.layout, 2)
    words, pairs = quarters(words), quarters(pairs)
    low = gl.convert_layout(low, words[0].type.layout)
    high = gl.convert_layout(high, words[0].type.layout)
    for i in gl.static_range(4):
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            _FP4_WORD, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [words[i], low, high], dtype=_EIGHT, is_pure=True, pack=1
        )
        x = right_operands(pairs[i], gl.bfloat16, RIGHT)
        acc = mma_v2(left_operand(a, b, c, d, gl.bfloat16, LEFT), x[0], acc)
        acc = mma_v2(left_operand(e, f, g, h, gl.bfloat16, LEFT), x[1], acc)
    return acc


@gluon.jit
def _multiply_step(words, pairs, scale, shift, acc, ones, UNITS: gl.constexpr, FP4: gl.constexpr, ONE: gl.constexpr):
    """acc with the products of a step: what ``_load_weights`` and ``_load_pairs`` gave."""
    PER_UNIT: gl.constexpr = 1 if ONE else 2
    for unit in gl.static_range(UNITS):
        own, x = words[unit], pairs[unit]
        own = gl.reshape(own, [own.shape[0], own.shape[1], 2, 32, 2, 2])
        x = gl.permute(gl.reshape(x, [x.shape[0], x.shape[1], 2, 4, 2, 2, 2]), (0, 1, 2, 3, 6, 4, 5))
        if FP4:
            low, high = _factors(scale[unit], shift), _factors(scale[unit], shift + 16)
            acc = _multiply_floats(own, x, low, high, acc)
        else:
            of_unit = scale[unit * PER_UNIT : (unit + 1) * PER_UNIT]
            acc = multiply_codes(own, x, of_unit, of_unit, acc, ones, ones.dtype, ONE, False)
    return acc


@gluon.jit
def _multiply_rows(
    x, bias, factors, order, out, columns, x_stride, expert, first, count, column, at_codes, tile, at_scales, warp,
    shift, words, scale, K: gl.constexpr, G: gl.constexpr, FP4: gl.constexpr, PAIRS_PER_ROW: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, UNITS: gl.constexpr, AHEAD: gl.constexpr, HALF: gl.constexpr,
    FUSED: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, WEIGHTED: gl.constexpr, WK: gl.constexpr,
    WN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The products of up to BM rows of one expert, whose weights of the first step are loaded.

    Pairs of x [WK, BM, 64] of a unit have the layout PAIRS.
    """
    dtype: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    WIDTH: gl.constexpr = BN // 2 if GATED else BN
    KT: gl.constexpr = (K + 127) // 128
    STRIDE: gl.constexpr = WK * UNITS
    STEPS: gl.constexpr = (KT + STRIDE - 1) // STRIDE
    WARPS: gl.constexpr = WK * WN
    UNIT: gl.constexpr = 1.0 if FP4 else int4_unit(half=HALF)
    ONE: gl.constexpr = G >= 128
    THREADS: gl.constexpr = WIDTH // 8
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [THREADS, 32 // THREADS], [1, WARPS], [0, 1])
    PARTS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WK, WN, 1], [1, 16, 8])
    TOGETHER: gl.constexpr = gl.BlockedLayout(
        [WK, BN // THREADS, 1], [1, THREADS, 32 // THREADS], [1, 1, WARPS], [1, 2, 0]
    )
    SUMS: gl.constexpr = gl.SliceLayout(0, TOGETHER)
    PAIRS: gl.constexpr = pairs_layout(WK, WN, BM)
    all_rows = columns * 2 if GATED else columns
    ones = gl.full([WK, BN, 16], UNIT, dtype, gl.DotOperandLayout(0, PARTS, 2))

    place_in_x = gl.arange(0, 64, along(PAIRS, 2, 3))[None, None, :]
    eight = gl.arange(0, WK, along(PAIRS, 0, 3))[:, None, None] * 64 + place_in_x // 8 * 8
    within = place_in_x % 8
    from_pair = gl.load(order + first + gl.minimum(gl.arange(0, BM, along(PAIRS, 1, 3)), count - 1))
    from_x = x + (from_pair // PAIRS_PER_ROW).to(gl.int64)[None, :, None] * x_stride
    n = column + gl.arange(0, WIDTH, gl.SliceLayout(1, STORED))
    m = gl.arange(0, BM, gl.SliceLayout(0, STORED))
    of = weight_row_at(gl.arange(0, BN, gl.BlockedLayout([1], [32], [WARPS], [0])), column, columns, GATED)
    of = gl.minimum(of, all_rows - 1) + expert * all_rows
    pair = gl.load(order + first + gl.minimum(m, count - 1))
    if BIAS:
        offset = gl.load(bias + of)
    if PDL and WEIGHTED:
        gdc_wait()
    if WEIGHTED:
        factor = gl.load(factors + pair)
    if AHEAD:
        pairs = _load_pairs(from_x, eight, within, 0, K, WK, UNITS)

    acc = gl.zeros([WK, BN, BM], gl.float32, PARTS)
    # Two steps in a turn of the loop: what is loaded ahead changes places without being moved. Up to three steps need
    # no loop, and load nothing for steps that there are not.
    LOOPED: gl.constexpr = 0 if STEPS <= 3 else STEPS + STEPS % 2
    for begin in range(0, LOOPED * STRIDE, 2 * STRIDE):
        for step in gl.static_range(2):
            done = begin + (step + 1) * STRIDE
            next_words, next_scale = _load_weights(
                at_codes, tile, at_scales, warp, done, KT, K // G, G, FP4, WK, UNITS
            )  # fmt: skip
            if AHEAD:
                next_pairs = _load_pairs(from_x, eight, within, done, K, WK, UNITS)
            else:
                pairs = _load_pairs(from_x, eight, within, done - STRIDE, K, WK, UNITS)
            acc = _multiply_step(words, pairs, scale, shift, acc, ones, UNITS, FP4, ONE)
            words, scale = next_words, next_scale
            if AHEAD:
                pairs = next_pairs
    for step in gl.static_range(LOOPED, STEPS):
        done = (step + 1) * STRIDE
        if step + 1 < STEPS:
            next_words, next_scale = _load_weights(
                at_codes, tile, at_scales, warp, done, KT, K // G, G, FP4, WK, UNITS
            )  # fmt: skip
            if AHEAD:
                next_pairs = _load_pairs(from_x, eight, within, done, K, WK, UNITS)
        if not AHEAD:
            pairs = _load_pairs(from_x, eight, within, done - STRIDE, K, WK, UNITS)
        acc = _multiply_step(words, pairs, scale, shift, acc, ones, UNITS, FP4, ONE)
        if step + 1 < STEPS:
            words, scale = next_words, next_scale
            if AHEAD:
                pairs = next_pairs

    acc = gl.sum(gl.convert_layout(acc, TOGETHER), 0) * (1 / UNIT)
    if BIAS:
        acc += gl.convert_layout(offset, gl.SliceLayout(1, SUMS)).to(gl.float32)[:, None]
    y = gl.convert_layout(activate_sums(acc, FUSED), STORED)
    if WEIGHTED:
        y *= factor.to(gl.float32)[None, :]
    at = out + pair.to(gl.int64)[None, :] * columns + n[:, None]
    gl.store(at, y.to(out.dtype.element_ty), mask=(m < count)[None, :] & (n < columns)[:, None])


@partial(GluonKernel, do_not_specialize=["limit"])
def direct_experts_kernel(
    x,
    codes,
    scales,
    bias,
    factors,
    order,
    tiles,
    out,
    limit,
    columns,
    x_stride,
    K: gl.constexpr,
    G: gl.constexpr,
    PITCH: gl.constexpr,
    FP4: gl.constexpr,
    PAIRS_PER_ROW: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    UNITS: gl.constexpr,
    AHEAD: gl.constexpr,
    HALF: gl.constexpr,
    FUSED: gl.constexpr,
    GATED: gl.constexpr,
    BIAS: gl.constexpr,
    WEIGHTED: gl.constexpr,
    WK: gl.constexpr,
    WN: gl.constexpr,
    PDL: gl.constexpr,
):
    """Grid: tiles of rows, programs of BN rows of the weight. x and codes are int32, x_stride is in these; of floats
    scales are too, and PITCH is that of a row of scales.

    A step is UNITS tiles of K for each of WK warps, whose rows WN warps divide. AHEAD: x of the next step is loaded in
    this one. HALF: x is float16, and not bfloat16. A tile with rows for half of BM or less is computed as such a tile.

    A second product, which is WEIGHTED, reads its first weights while the first one runs: that one lets it start only
    when the sorted pairs are there.
    """
    WIDTH: gl.constexpr = BN // 2 if GATED else BN
    RB: gl.constexpr = BN // 16
    KT: gl.constexpr = (K + 127) // 128
    PARTS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WK, WN, 1], [1, 16, 8])
    ROWS: gl.constexpr = gl.SliceLayout(2, PARTS)
    # Words [WK, RB, 2 blocks of 8 rows, 128] of a unit.
    WORDS: gl.constexpr = gl.BlockedLayout([1, 1, 2, 4], [1, 1, 1, 32], [WK, WN, 1, 1], [3, 2, 1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1, 1, 2, 1], [1, 1, 1, 32], [WK, WN, 1, 1], [3, 2, 1, 0])
    if PDL:
        if not WEIGHTED:
            gdc_wait()
        gdc_launch_dependents()
    number, program = gl.program_id(0), gl.program_id(1)
    expert = gl.load(tiles + number)
    first = gl.load(tiles + limit + number)
    count = gl.load(tiles + 2 * limit + number)
    if number >= gl.load(tiles + 3 * limit):
        return
    column = program * WIDTH
    all_rows = columns * 2 if GATED else columns
    eights = columns // 8

    tile = gl.arange(0, WK, along(WORDS, 0, 4))[:, None, None, None]
    block = _blocks_of_rows(program * RB, expert, eights, RB, GATED, WORDS)
    at_codes = codes + block.to(gl.int64) * (KT * 128) + gl.arange(0, 128, along(WORDS, 3, 4))[None, None, None, :]
    shift = 0
    if FP4:
        lane = gl.arange(0, 32, along(LANES, 3, 4))[None, None, None, :]
        warp = gl.arange(0, WK, along(LANES, 0, 4))[:, None, None, None]
        own_row = _blocks_of_rows(program * RB, expert, eights, RB, GATED, LANES) * 8 + lane // 4
        at_scales = scales + own_row.to(gl.int64) * PITCH
        shift = lane % 4 // 2 * 8
    else:
        warp = gl.arange(0, WK, gl.SliceLayout(1, ROWS))
        place = gl.arange(0, BN, gl.SliceLayout(0, ROWS))
        weight_row = gl.minimum(weight_row_at(place, column, columns, GATED), all_rows - 1) + expert * all_rows
        at_scales = scales + weight_row.to(gl.int64)[None, :] * PITCH
    words, scale = _load_weights(at_codes, tile, at_scales, warp, 0, KT, K // G, G, FP4, WK, UNITS)
    if BM > 8 and count <= BM // 2:
        _multiply_rows(
            x, bias, factors, order, out, columns, x_stride, expert, first, count, column, at_codes, tile, at_scales,
            warp, shift, words, scale, K, G, FP4, PAIRS_PER_ROW, BM // 2, BN, UNITS, AHEAD, HALF, FUSED, GATED, BIAS,
            WEIGHTED, WK, WN, PDL,
        )  # fmt: skip
    else:
        _multiply_rows(
            x, bias, factors, order, out, columns, x_stride, expert, first, count, column, at_codes, tile, at_scales,
            warp, shift, words, scale, K, G, FP4, PAIRS_PER_ROW, BM, BN, UNITS, AHEAD, HALF, FUSED, GATED, BIAS,
            WEIGHTED, WK, WN, PDL,
        )  # fmt: skip


def takes(weight: CodedRows, dtype: torch.dtype) -> bool:
    """Return whether ``multiply_few`` multiplies rows of ``dtype`` by the weight: floats of 4 bits with powers of 2 for
    32 columns each by bfloat16, and numbers in groups of 64 columns or a multiple of 128 also by float16."""
    if weight.fp4:
        return dtype == torch.bfloat16 and weight.group == 32 and weight.scales.dtype == torch.uint8
    return dtype in (torch.bfloat16, torch.float16) and (weight.group == 64 or weight.group % TILE == 0)


def multiply_few(
    x: Tensor,
    handle: CudaLinear,
    pairs: SortedPairs,
    tiles: DirectTiles,
    *,
    out: Tensor,
    pairs_per_row: int = 1,
    activation: str = "none",
    factors: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """``grouped.multiply_tiles`` of weights that are in codes. With factors it is the product behind one without.

    Raises ValueError for what ``takes`` refuses.
    """
    weight, bias = handle.weight, handle.bias
    (_, columns), inner, gated = out.shape, x.shape[1], activation in GATED_KINDS
    if not isinstance(weight, CodedRows) or not takes(weight, x.dtype) or inner != weight.columns or x.stride(0) % 2:
        raise ValueError(f"x {x.dtype} {list(x.shape)} does not fit the weights")
    scales, pitch = weight.scales, weight.scales.stride(0)
    if weight.fp4:
        pitch //= 4
        scales = scales.as_strided((len(weight), 4 * pitch), (4 * pitch, 1)).view(torch.int32)
    words = weight.codes.view(torch.int32)
    direct_experts_kernel[(pairs.limit, triton.cdiv(columns * (1 + gated), tiles.columns))](
        x.view(torch.int32), words, scales, words if bias is None else bias, words if factors is None else factors,
        pairs.order, pairs.tiles, out, pairs.limit, columns, x.stride(0) // 2,
        K=inner, G=weight.group, PITCH=pitch, FP4=weight.fp4, PAIRS_PER_ROW=pairs_per_row, BM=tiles.rows,
        BN=tiles.columns, UNITS=tiles.units, AHEAD=tiles.ahead,
        HALF=x.dtype == torch.float16, FUSED=activation, GATED=gated, BIAS=bias is not None,
        WEIGHTED=factors is not None, WK=tiles.along_inner, WN=tiles.along_columns,
        num_warps=tiles.along_inner * tiles.along_columns, **launch_options(pdl),
    )  # fmt: skip
