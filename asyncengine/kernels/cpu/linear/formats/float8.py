"""Float8 weights, with a scale for each row (see kernels/float8.py). Inputs are rounded to float8 row by row."""

from __future__ import annotations

from torch import Tensor

from asyncengine.kernels.cpu.linear.formats.base import Format
from asyncengine.kernels.float8 import quantize, unpack_float8
from asyncengine.kernels.weight import PackedWeight


class Float8(Format):
    """Matrices in float8, which are multiplied in float32: the same numbers."""

    def unpack(self, weight: PackedWeight) -> Tensor:
        return unpack_float8([weight])[0].dequantize()

    def operand(self, x: Tensor) -> Tensor:
        return quantize(x).dequantize()
