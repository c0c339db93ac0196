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

from asyncengine.kernels.cuda.linear.decode import fp4, nibbles, scaled_fp4
from asyncengine.kernels.cuda.linear.formats.base import Matrix, values_and_scale
from asyncengine.kernels.cuda.linear.grouped import CodedRows
from asyncengine.kernels.grouped import FP4_NUMBERS, are_alike, unpack_nibbles
from asyncengine.kernels.weight import INT4, PackedWeight

_BYTES = 16
"""Bytes in a row of which the low halves are columns in a row, and the high halves the columns behind them."""


def stays_coded(weights: Sequence[PackedWeight]) -> bool:
    """Return whether the kernels of experts multiply by these weights as they are: int4 with neither offsets nor an
    order of columns, whose codes stand for whole numbers or for floats, in groups of 16 columns or a multiple of 32.
    """
    first = weights[0]
    if first.format != INT4 or first.tensors.keys() - {"codes", "scales", "table"} or not are_alike(weights):
        return False
    group = first.in_features // first.tensors["scales"].shape[1]
    if first.in_features % (2 * _BYTES) or (group != _BYTES and group % (2 * _BYTES)):
        return False
    table = first.tensors.get("table")
    return table is None or table.is_meta or table.tolist() == list(FP4_NUMBERS)


def stack_codes(weights: Sequence[PackedWeight]) -> CodedRows:
    """Join weights that stay coded, one below another, their codes in the order of the kernels."""
    codes = torch.cat([_in_halves(weight.tensors["codes"]) for weight in weights])
    scales = torch.cat([weight.tensors["scales"] for weight in weights])
    return CodedRows(codes, _in_words(_as_exponents(scales)), "table" in weights[0].tensors)


def _in_halves(codes: Tensor) -> Tensor:
    """Bytes uint8 [N, K / 2] of int4, whose low halves are even columns, in the order of ``CodedRows``."""
    halves = unpack_nibbles(codes).view(len(codes), -1, 2, _BYTES)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(codes.shape)


def _in_words(scales: Tensor) -> Tensor:
    """The same scales in memory whose rows are whole words of 4 bytes, with zeros behind the last scale."""
    count, each = scales.shape[1], 4 // scales.itemsize
    memory = scales.new_zeros(len(scales), -(-count // each) * each)
    memory[:, :count] = scales
    return memory[:, :count]


def _as_exponents(scales: Tensor) -> Tensor:
    """Scales in float32 as their exponents uint8, if all are powers of 2 that float32 has in full."""
    if scales.dtype != torch.float32 or scales.is_meta:
        return scales
    bits = scales.view(torch.int32)
    exponents = bits >> 23
    exact = (bits & 0x7FFFFF == 0) & (exponents > 0) & (exponents < 255)
    return exponents.to(torch.uint8) if bool(exact.all()) else scales


def kernel_operands(weight: Matrix) -> tuple[Tensor, Tensor | None, dict[str, int | bool]]:
    """Return a matrix's numbers or codes, its scales, and the constants by which a kernel tells them apart."""
    if isinstance(weight, CodedRows):
        coding = {"G": weight.group, "PITCH": weight.scales.stride(0), "FP4": weight.fp4}
        return weight.codes, weight.scales, coding
    return *values_and_scale(weight), {"G": 0, "PITCH": 0, "FP4": False}


@triton.jit
def load_scales(scales, row, first, K: tl.constexpr, G: tl.constexpr, PITCH: tl.constexpr, BK: tl.constexpr,
                EVEN: tl.constexpr):  # fmt: skip
    """Load the scales [BN, BK / 32] of the low halves of ``load_codes`` and those of the high halves."""
    part = first // 32 + tl.arange(0, BK // 32)
    at = scales + row.to(tl.int64)[:, None] * PITCH
    if G < 32:
        low = _load_inside(at + (2 * part)[None, :], (part < K // 32)[None, :], EVEN)
        high = _load_inside(at + (2 * part + 1)[None, :], (part < K // 32)[None, :], EVEN)
    else:
        if G == 32:  # A row's memory ends in a whole word: bytes are copied four at a time.
            low = _load_inside(at + part[None, :], (part < PITCH)[None, :], EVEN)
        else:
            low = _load_inside(at + (part // (G // 32))[None, :], (part < K // 32)[None, :], EVEN)
        high = low
    return low, high


@triton.jit
def load_codes(codes, row, first, K: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):
    """Load the bytes [BN, BK / 32, 16] of the columns from ``first`` on, for rows [BN]; zeros behind the last column.

    EVEN: no step begins or ends behind the last column, so that nothing is masked.
    """
    part = first // 32 + tl.arange(0, BK // 32)
    within = part[:, None] * 16 + tl.arange(0, 16)[None, :]
    at = codes + row.to(tl.int64)[:, None, None] * (K // 2) + within[None, :, :]
    return _load_inside(at, (part < K // 32)[None, :, None], EVEN)


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
        else:
            low, high = nibbles(packed, tl.float16 if dtype == tl.float16 else tl.bfloat16, PLAIN)
        low, high = _scaled(low, low_scale, dtype), _scaled(high, high_scale, dtype)
    return low, high


@triton.jit
def _bits_of_power(exponent, packed):
    """Powers of 2 as bits of bfloat16, one for each byte of ``packed``."""
    return tl.broadcast_to((exponent.to(tl.int16) << 7)[:, :, None], packed.shape)


@triton.jit
def _scaled(numbers, scale, dtype: tl.constexpr):
    if scale.dtype == tl.uint8:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return (numbers.to(tl.float32) * scale.to(tl.float32)[:, :, None]).to(dtype)
