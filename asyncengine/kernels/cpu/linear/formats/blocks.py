"""Weights in blocks of GGUF's types (see kernels/blocks.py), which may differ side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncengine._core import CpuLinear
from asyncengine.kernels import blocks
from asyncengine.kernels.blocks import BlockType
from asyncengine.kernels.cpu.checks import check, native_dtype
from asyncengine.kernels.cpu.linear.formats.base import Format, Native
from asyncengine.kernels.cpu.linear.panels import Panels
from asyncengine.kernels.weight import PackedWeight


class Blocks(Format):
    """Matrices in blocks.

    Native kernels multiply them where they lie, and round rows of bfloat16 to 8 bits in groups of as many columns as a
    block has, 32 or 256, as the format's reference does. Rows of float32 stay in floats: the blocks are unpacked for
    each product.
    """

    def unpack(self, weight: PackedWeight) -> Tensor:
        return blocks.unpack(weight)

    def rows(self, weight: PackedWeight, ids: Tensor) -> Tensor:
        return blocks.dequantize(BlockType(weight.block_type), weight.tensors["blocks"][ids])

    def pack(
        self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None], panels: Panels, *, rearrange: bool
    ) -> Native | None:
        """The blocks as they lie. Raises ValueError for a tensor of another shape or layout."""
        dtype = weights[0].inputs
        if dtype != torch.bfloat16:
            return None
        for weight, bias in zip(weights, biases, strict=True):
            size = blocks.row_bytes(BlockType(weight.block_type), weight.in_features)
            check(weight.tensors["blocks"], torch.uint8, (weight.out_features, size), "blocks")
            if bias is not None:
                check(bias, dtype, (weight.out_features,), "bias")
        stored = [weight.tensors["blocks"] for weight in weights]
        native = CpuLinear(
            [tensor.data_ptr() for tensor in stored],
            [weight.out_features for weight in weights],
            [0 if bias is None else bias.data_ptr() for bias in biases],
            weights[0].in_features,
            native_dtype(dtype),
        )
        native.set_blocks([weight.block_type for weight in weights])
        return Native(native, (*stored, *(bias for bias in biases if bias is not None)), dtype)
