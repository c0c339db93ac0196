"""Weights of experts that stay in int4, and how their kernels make numbers of them.

A code times its scale is computed in float32 and rounded to the dtype of the rows, as where weights are unpacked
before: results are the same. Floats of 4 bits times powers of 2 are exact in float32 and in bfloat16.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.linear.decode import fp4, int4_unit, nibbles, scaled_fp4
from asyncengine.kernels.cuda.linear.formats.base import Matrix, values_and_scale
from asyncengine.kernels.cuda.linear.grouped import TILE, CodedRows, at_tiles, in_tiles
from asyncengine.kernels.grouped import FP4_NUMBERS, are_alike
from asyncengine.kernels.weight import INT4, PackedWeight

_SMALLEST = 16
"""Columns of the smallest groups that kernels read."""
_MORE = 126
"""Exponents of scales are kept greater by so much: 2^126 times a scale is a kernel's factor in bfloat16."""


def stays_coded(weights: Sequence[PackedWeight]) -> bool:
    """Return whether the kernels of experts multiply by these weights as they are: int4 with neither offsets nor an
    order of columns, whose codes stand for whole numbers or for floats, in rows by eights and in groups of 16 columns
    or a multiple of 32.
    """
    first = weights[0]
    if first.format != INT4 or first.tensors.keys() - {"codes", "scales", "table"} or not are_alike(weights):
        return False
    group = first.in_features // first.tensors["scales"].shape[1]
    if first.in_features % 32 or (group != _SMALLEST and group % 32) or any(w.out_features % 8 for w in weights):
        return False
    table = first.tensors.get("table")
    return table is None or table.is_meta or table.tolist() == list(FP4_NUMBERS)


def stack_codes(weights: Sequence[PackedWeight]) -> CodedRows:
    """Join weights that stay coded, one below another, their codes in tiles."""
    fp4, columns = "table" in weights[0].tensors, weights[0].in_features
    codes = torch.cat([in_tiles(INT4, _whole_tiles(weight.tensors["codes"], fp4=fp4), fp4=fp4) for weight in weights])
    scales = torch.cat([weight.tensors["scales"] for weight in weights])
    return CodedRows(codes, _in_words(_as_exponents(scales) if fp4 else scales), columns, fp4)


def _whole_tiles(codes: Tensor, *, fp4: bool) -> Tensor:
    """Codes [N, K / 2] and, behind them, codes of 0 up to a whole number of tiles."""
    missing = -codes.shape[1] % (TILE // 2)
    zero = 0 if fp4 else 0x88
    return torch.cat((codes, codes.new_full((len(codes), missing), zero)), 1) if missing else codes


def _in_words(scales: Tensor) -> Tensor:
    """The same scales in memory whose rows are whole words of 4 bytes, with zeros behind the last scale."""
    count, each = scales.shape[1], 4 // scales.itemsize
    memory = scales.new_zeros(len(scales), -(-count // each) * each)
    memory[:, :count] = scales
    return memory[:, :count]


def _as_exponents(scales: Tensor) -> Tensor:
    """Scales in float32 as exponents uint8 of 2^126 times them, if all are powers of 2 that float32 has in full, up to
    2. No such exponent is 0."""
    if scales.dtype != torch.float32 or scales.is_meta:
        return scales
    bits = scales.view(torch.int32)
    exponents = bits >> 23
    exact = (bits & 0x7FFFFF == 0) & (exponents > 0) & (exponents + _MORE < 255)
    return (exponents + _MORE).to(torch.uint8) if bool(exact.all()) else scales


def kernel_operands(weight: Matrix) -> tuple[Tensor, Tensor | None, dict[str, int | bool]]:
    """Return a matrix's numbers or codes, its scales, and the constants by which a kernel tells them apart."""
    if isinstance(weight, CodedRows):
        coding = {"G": weight.group, "PITCH": weight.scales.stride(0), "FP4": weight.fp4}
        return weight.codes, weight.scales, coding
    return *values_and_scale(weight), {"G": 0, "PITCH": 0, "FP4": False}


@triton.jit
def columns_of_codes(first, BYTES: tl.constexpr):
    """Columns [BYTES] of the low halves of so many bytes of a row in tiles; those of the high halves are 64 behind.

    ``first`` is a column, the first one of a tile.
    """
    byte = tl.arange(0, BYTES)
    return first + byte // 64 * 128 + byte % 64


@triton.jit
def load_scales(scales, row, first, K: tl.constexpr, G: tl.constexpr, PITCH: tl.constexpr, BK: tl.constexpr,
                EVEN: tl.constexpr):  # fmt: skip
    """Load the scales [BN, BK / 32] of the low halves of ``load_codes`` and those of the high halves."""
    part = tl.arange(0, BK // 32)
    if G == 32 and scales.dtype.element_ty == tl.uint8:  # a tile's four scales are a word
        at = (scales + row.to(tl.int64) * PITCH).to(tl.pointer_type(tl.int32))
        tile = first // 128 + tl.arange(0, BK // 128)
        words = _load_inside(at[:, None] + tile[None, :], (tile < PITCH // 4)[None, :], EVEN)
        words = tl.broadcast_to(words[:, :, None], [row.shape[0], BK // 128, 4])
        words = tl.reshape(words, [row.shape[0], BK // 32]) >> (part % 4 // 2 * 8)[None, :]
        low, high = (words & 255).to(tl.uint8), ((words >> 16) & 255).to(tl.uint8)
    else:
        at = scales + row.to(tl.int64)[:, None] * PITCH
        column = first + part // 4 * 128 + part % 4 * 16
        low = _load_inside(at + (column // G)[None, :], (column < K)[None, :], EVEN)
        high = low
        if G < 128:
            high = _load_inside(at + ((column + 64) // G)[None, :], (column + 64 < K)[None, :], EVEN)
    return low, high


@triton.jit
def load_codes(codes, row, first, K: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):
    """Load the columns from ``first`` on, for rows [BN], as words int16 [BN, BK / 32, 8] of four codes each.

    Behind the last tile are zeros. ``first`` is the first column of a tile. EVEN: no step begins or ends behind the
    last column, so that nothing is masked.
    """
    WIDTH: tl.constexpr = (K + 127) // 128 * 32
    at = codes.to(tl.pointer_type(tl.int16)) + at_tiles(row.to(tl.int64), WIDTH, BK // 4, 2) + first * 2
    packed = _load_inside(at, (first // 4 + tl.arange(0, BK // 4) < WIDTH)[None, :], EVEN)
    return tl.reshape(packed, [row.shape[0], BK // 32, 8])


@triton.jit
def _load_inside(at, inside, EVEN: tl.constexpr):
    return tl.load(at) if EVEN else tl.load(at, mask=inside, other=0)


@triton.jit
def decode(packed, scales, dtype: tl.constexpr, FP4: tl.constexpr, PLAIN: tl.constexpr):
    """The weights [BN, BK / 32, 16] in ``dtype`` of the low halves and of the high halves, from what ``load_codes`` and
    ``load_scales`` gave. PLAIN: by operations that the interpreter has."""
    low_scale, high_scale = scales
    POWERS: tl.constexpr = low_scale.dtype == tl.uint8
    if FP4 and POWERS and dtype == tl.bfloat16 and not PLAIN:
        low_scale, high_scale = _bits_of_power(low_scale, packed), _bits_of_power(high_scale, packed)
        low, high = scaled_fp4(packed, low_scale, high_scale)
    else:
        if FP4:
            low, high = fp4(packed, PLAIN)
        else:  # a power of 2 changes no rounding
            low, high = nibbles(packed, tl.float16 if dtype == tl.float16 else tl.bfloat16, PLAIN)
            MORE: tl.constexpr = 1 / int4_unit(half=dtype == tl.float16)
            low_scale, high_scale = low_scale.to(tl.float32) * MORE, high_scale.to(tl.float32) * MORE
        low, high = _scaled(low, low_scale, dtype), _scaled(high, high_scale, dtype)
    return low, high


@triton.jit
def _bits_of_power(exponent, packed):
    """2^126 times powers of 2 as bits of bfloat16, one for each word of ``packed``."""
    return tl.broadcast_to((exponent.to(tl.int16) << 7)[:, :, None], packed.shape)


@triton.jit
def _scaled(numbers, scale, dtype: tl.constexpr):
    if scale.dtype == tl.uint8:
        scale = ((scale.to(tl.int32) - 126) << 23).to(tl.float32, bitcast=True)
    return (numbers.to(tl.float32) * scale.to(tl.float32)[:, :, None]).to(dtype)
