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

from asyncengine.kernels.cuda.linear.formats.base import Matrix, values_and_scale
from asyncengine.kernels.cuda.linear.grouped import CodedRows
from asyncengine.kernels.grouped import FP4_NUMBERS, are_alike
from asyncengine.kernels.weight import INT4, PackedWeight


def stays_coded(weights: Sequence[PackedWeight]) -> bool:
    """Return whether the kernels of experts multiply by these weights as they are: int4 with neither offsets nor an
    order of columns, whose codes stand for whole numbers or for floats."""
    first = weights[0]
    if first.format != INT4 or first.tensors.keys() - {"codes", "scales", "table"} or not are_alike(weights):
        return False
    table = first.tensors.get("table")
    return table is None or table.is_meta or table.tolist() == list(FP4_NUMBERS)


def stack_codes(weights: Sequence[PackedWeight]) -> CodedRows:
    """Join weights that stay coded, one below another."""
    codes, scales = (torch.cat([weight.tensors[name] for weight in weights]) for name in ("codes", "scales"))
    return CodedRows(codes, _as_exponents(scales), "table" in weights[0].tensors)


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
        return weight.codes, weight.scales, {"G": weight.group, "FP4": weight.fp4}
    return *values_and_scale(weight), {"G": 0, "FP4": False}


@triton.jit
def load_scales(scales, row, first, K: tl.constexpr, G: tl.constexpr, BK: tl.constexpr):
    """Load the scales [BN, groups] of the columns from ``first`` on, for rows [BN]; zeros behind the last column."""
    GROUPS: tl.constexpr = BK // G if G < BK and G < K else 1
    group = first // G + tl.arange(0, GROUPS)
    at = row.to(tl.int64)[:, None] * (K // G) + group[None, :]
    scale = tl.load(scales + at, mask=(group < K // G)[None, :], other=0)
    if scale.dtype == tl.uint8:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scale.to(tl.float32)


@triton.jit
def load_codes(codes, row, first, K: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):
    """Load the bytes [BN, BK / 2] of the columns from ``first`` on, for rows [BN]; zeros behind the last column.

    EVEN: no step begins or ends behind the last column, so that nothing is masked.
    """
    pair = first // 2 + tl.arange(0, BK // 2)
    at = codes + row.to(tl.int64)[:, None] * (K // 2) + pair[None, :]
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(pair < K // 2)[None, :], other=0)


@triton.jit
def _number(code, FP4: tl.constexpr):
    """The number in float32 that a code below 16 stands for."""
    code = code.to(tl.int32)
    if FP4:
        fraction, power = code & 1, (code >> 1) & 3
        halves = tl.where(power == 0, fraction, ((2 + fraction) << power) >> 1)
        return tl.where(code < 8, halves, -halves).to(tl.float32) * 0.5
    return code.to(tl.float32) - 8.0


@triton.jit
def decode(packed, scale, dtype: tl.constexpr, FP4: tl.constexpr):
    """The weights [BN, BK] in ``dtype`` of bytes [BN, BK / 2] and scales [BN, groups]."""
    BN: tl.constexpr = packed.shape[0]
    BK: tl.constexpr = 2 * packed.shape[1]
    GROUPS: tl.constexpr = scale.shape[1]
    numbers = tl.interleave(_number(packed & 15, FP4), _number(packed >> 4, FP4))
    w = tl.reshape(numbers, [BN, GROUPS, BK // GROUPS]) * scale[:, :, None]
    return tl.reshape(w, [BN, BK]).to(dtype)
