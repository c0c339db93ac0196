"""Weights in blocks of GGUF's types (see kernels/blocks.py), which may differ side by side."""

from __future__ import annotations

from torch import Tensor

from asyncengine.kernels import blocks
from asyncengine.kernels.cpu.linear.formats.base import Format
from asyncengine.kernels.weight import PackedWeight


class Blocks(Format):
    """Matrices in blocks."""

    def unpack(self, weight: PackedWeight) -> Tensor:
        return blocks.unpack(weight)

    def rows(self, weight: PackedWeight, ids: Tensor) -> Tensor:
        return blocks.dequantize(blocks.BlockType(weight.block_type), weight.tensors["blocks"][ids])
