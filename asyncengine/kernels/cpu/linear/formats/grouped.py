"""Weights in int4, int8 or float8 whose columns share scales in groups (see kernels/grouped.py)."""

from __future__ import annotations

from torch import Tensor

from asyncengine.kernels.cpu.linear.formats.base import Format
from asyncengine.kernels.grouped import unpack
from asyncengine.kernels.weight import PackedWeight


class Grouped(Format):
    """Matrices of codes with scales. Inputs stay as they are."""

    def unpack(self, weight: PackedWeight) -> Tensor:
        return unpack(weight)
