"""Weights in blocks of GGUF's types (see kernels/blocks.py), which may differ side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncengine._core import CpuKernels, StepBatch
from asyncengine.kernels import blocks
from asyncengine.kernels.blocks import BlockType
from asyncengine.kernels.cpu.linear.formats.base import Format
from asyncengine.kernels.weight import PackedWeight

NATIVE = frozenset({
    BlockType.Q4_0, BlockType.Q4_1, BlockType.Q5_0, BlockType.Q5_1, BlockType.Q8_0, BlockType.Q4_K, BlockType.Q5_K,
    BlockType.Q6_K,
})  # fmt: skip
"""Types that native kernels multiply where they lie."""


class Blocks(Format):
    """Matrices in blocks.

    Rows of bfloat16 are rounded to 8 bits in groups of 32 for the types that native kernels read, as the format's
    reference does. Rows of float32 stay in floats, and so do those for other types: their blocks are unpacked for each
    product.
    """

    def unpack(self, weight: PackedWeight) -> Tensor:
        return blocks.unpack(weight)

    def rows(self, weight: PackedWeight, ids: Tensor) -> Tensor:
        return blocks.dequantize(blocks.BlockType(weight.block_type), weight.tensors["blocks"][ids])

    def launch(
        self, kernels: CpuKernels, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None], x: Tensor,
        out: Tensor, batch: StepBatch,
    ) -> None:  # fmt: skip
        if x.dtype == torch.float32 or any(BlockType(weight.block_type) not in NATIVE for weight in weights):
            super().launch(kernels, weights, biases, x, out, batch)
            return
        rows, product, first = x.float().contiguous(), torch.empty(out.shape), 0
        for weight, bias in zip(weights, biases, strict=True):
            behind = first + weight.out_features
            part = product[:, first:behind]
            blocks = weight.tensors["blocks"].data_ptr()
            kernels.block_linear(
                weight.block_type, blocks, weight.out_features, weight.in_features, rows.data_ptr(), len(rows),
                part.data_ptr(), product.shape[1],
            )  # fmt: skip
            if bias is not None:
                part += bias
            first = behind
        out.copy_(product)
