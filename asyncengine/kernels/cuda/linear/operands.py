"""Operands of the tensor cores out of codes in tiles (see ``in_tiles`` of grouped.py) and of rows of x.

A thread reads 16 bytes of codes, and 8 neighbouring pairs of x: it has its part of the operands.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc, no-redef"
# ruff: noqa: RUF005 - Triton knows no starred items in a list or a tuple

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from asyncengine.kernels.cuda.linear.decode import bytes_of_word, nibbles_of_word


def halves(*registers: str) -> str:
    """Registers of two numbers become results of one."""
    return " ".join(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, {made};" for i, made in enumerate(registers))


def _word(*, half: bool) -> gl.constexpr:
    """A word of int4 becomes 8 numbers of 16 bits, four registers of two."""
    made = nibbles_of_word("$8", "pqrv", half=half)
    return gl.constexpr(f"{{ .reg .b32 p, q, r, v; {made} {halves('p', 'q', 'r', 'v')} }}")


def _bytes(*, half: bool) -> gl.constexpr:
    """A word of int8 becomes 4 numbers of 16 bits, two registers of two."""
    made = bytes_of_word("$4", "p", "q", half=half)
    return gl.constexpr(f"{{ .reg .b32 p, q; {made} {halves('p', 'q')} }}")


_WORD_BF16, _WORD_FP16 = _word(half=False), _word(half=True)
_BYTES_BF16, _BYTES_FP16 = _bytes(half=False), _bytes(half=True)
_FOUR, _EIGHT = gl.constexpr((gl.int16,) * 4), gl.constexpr((gl.int16,) * 8)


@gluon.constexpr_function
def along(layout, dim, rank):
    """Layout of a vector along one of the dimensions of ``layout``."""
    for other in reversed(range(rank)):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.constexpr_function
def _log2(n):
    """The exponent of a power of 2."""
    return n.bit_length() - 1


@gluon.constexpr_function
def _bits(first, last, dim):
    """Bases of a linear layout for the bits of a place along ``dim``, from ``first`` on and before ``last``."""
    return [[(1 << bit) if place == dim else 0 for place in range(3)] for bit in range(first, last)]


@gluon.constexpr_function
def pairs_layout(along_k, along_n, rows):
    """Layout of pairs of x [along_k, rows, 64]: a thread has 8 neighbours for each of its rows and of the halves
    of a tile of int4. Warps that divide the rows of the weight have the same."""
    registers = _bits(0, 3, 2) + _bits(5, 6, 2) + _bits(3, _log2(rows), 1)
    warps = [[0] * 3] * _log2(along_n) + _bits(0, _log2(along_k), 0)
    lanes = _bits(3, 5, 2) + _bits(0, 3, 1)
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [along_k, rows, 64])


@gluon.constexpr_function
def sums_layout(warps, columns, rows, each, gated):
    """Layout of the warps' sums [warps, columns, rows], where a thread has all that it adds up.

    A thread has ``each`` neighbouring columns of a row, and lanes have the next ones. All threads take part if there
    are as many results. With a gate a thread also has the columns 8 behind its own, in each 16.
    """
    bits, wide = _bits(0, _log2(columns), 1), _log2(each)
    gate = [bits.pop(3)] if gated else []
    rest = bits[wide:] + _bits(0, _log2(rows), 2)
    rest += [[0] * 3] * (5 + _log2(warps) - len(rest))
    threads = 5 + _log2(warps)
    registers = bits[:wide] + gate + _bits(0, _log2(warps), 0) + rest[threads:]
    return gl.DistributedLinearLayout(registers, rest[:5], rest[5:threads], [], [warps, columns, rows])


@gluon.jit
def weight_row_at(place, column, columns, GATED: gl.constexpr):
    """Rows of the weight in a program; for silu_mul in turn 8 of the gate and the 8 of up for the same columns."""
    return column + (place // 16 * 8 + place % 8 + place // 8 % 2 * columns if GATED else place)


@gluon.jit
def quarters(t):
    """The four parts of a tensor whose last dimensions are [2, 2]."""
    even, odd = gl.split(t)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def by_unit(t, UNITS: gl.constexpr):
    """The parts of a tensor by its last dimension, UNITS."""
    if UNITS == 1:
        parts = (gl.reshape(t, t.shape[:-1]),)
    elif UNITS == 2:
        parts = gl.split(t)
    else:
        parts = quarters(gl.reshape(t, t.shape[:-1] + [2, 2]))
    return parts


@gluon.jit
def left_operand(low_register, low_place, high_register, high_place, dtype: gl.constexpr, LAYOUT: gl.constexpr):
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
        left = (left_operand(a, b, c, d, dtype, LAYOUT), left_operand(e, f, g, h, dtype, LAYOUT))
    else:
        OF_BYTES: gl.constexpr = _BYTES_BF16 if dtype == gl.bfloat16 else _BYTES_FP16
        a, b, c, d = gl.inline_asm_elementwise(OF_BYTES, "=h,=h,=h,=h,r", [word], dtype=_FOUR, is_pure=True, pack=1)
        left = (left_operand(a, b, c, d, dtype, LAYOUT),)
    return left


@gluon.jit
def right_operands(pairs, dtype: gl.constexpr, LAYOUT: gl.constexpr):
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
def load_by_group(
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
def multiply_codes(
    words, pairs, scale, shift, acc, ones, dtype: gl.constexpr, ONE: gl.constexpr, OFFSETS: gl.constexpr
):
    """A tile of K for each warp: words [W, BN / 16, 2, 32, 2, 2], pairs [W, BM, PER_BYTE, 4, 2, 2, 2], and its scales
    and offsets. ONE: the tile has one of each, and not one for each half. Sums of int4 are ``int4_unit`` times those of
    the weights, and this is the number in ``ones``; for int8 it is 1."""
    PARTS: gl.constexpr = acc.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PARTS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PARTS, 2)
    PER_BYTE: gl.constexpr = pairs.shape[2]
    words, pairs = quarters(words), quarters(pairs)
    zeros = gl.zeros(acc.shape, gl.float32, PARTS)
    low, high, x_low, x_high = zeros, zeros, zeros, zeros
    for i in gl.static_range(4):
        w, x = _weights(words[i], dtype, PER_BYTE, LEFT), right_operands(pairs[i], dtype, RIGHT)
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
def multiply_small_groups(
    words, pairs, scale, shift, acc, ones, lane, dtype: gl.constexpr, PER_TILE: gl.constexpr, OFFSETS: gl.constexpr
):  # fmt: skip
    """As ``multiply_codes``, of a tile with PER_TILE groups of 16 or 32 columns. The columns of a lane are in one of
    them: ``lane`` is its place among four, in the layout of the right operand."""
    PARTS: gl.constexpr = acc.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PARTS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PARTS, 2)
    PER_BYTE: gl.constexpr = pairs.shape[2]
    PER_HALF: gl.constexpr = PER_TILE // PER_BYTE
    words, pairs = quarters(words), quarters(pairs)
    zeros = gl.zeros(acc.shape, gl.float32, PARTS)
    sums, x_sums = (), ()
    for i in gl.static_range(4):
        w, x = _weights(words[i], dtype, PER_BYTE, LEFT), right_operands(pairs[i], dtype, RIGHT)
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
