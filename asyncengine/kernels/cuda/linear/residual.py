"""Norms between two projections that need no kernel of their own.

What a norm multiplies with its weight the projection before it stores, with sums of squares by tile; the one behind it
multiplies that, and divides by their root at its end, or takes off the mean. The product is as exact as that of rows
which are normed first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncengine.kernels.cuda.rows.tensors import empty_rows
from asyncengine.kernels.ops import Norm


@dataclass(frozen=True, slots=True)
class Unnormed:
    """Rows of a residual stream whose norm is left to the projection that reads them."""

    x: Tensor
    """bfloat16 [M, K]: times the norm's weight"""
    sums: Tensor
    """float32 [1, tiles, M] of squares, by tiles of the stream's columns; of a LayerNorm [2, tiles, M], then values"""
    eps: float

    @classmethod
    def allocate(cls, out: Tensor, tiles: int, norm: Norm) -> Unnormed:
        """For a stream [M, K] that is made in so many tiles. Raises ValueError if the norm is not for it."""
        if norm.weight.shape != out.shape[1:] or out.dtype != torch.bfloat16:
            raise ValueError(f"a norm of {len(norm.weight)} does not fit {out.dtype} {list(out.shape)}")
        sums = torch.empty((1 if norm.bias is None else 2, tiles, len(out)), dtype=torch.float32, device=out.device)
        return cls(empty_rows(len(out), out.shape[1], out.dtype, out.device), sums, norm.eps)


def fold_norm(norm: Norm, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """For a weight [N, K] behind a LayerNorm, float32 [N]: its bias with what the norm's bias adds, and what a mean of
    1 adds to the product."""
    assert norm.bias is not None
    wide = weight.float()
    folded = wide @ norm.bias.float()
    return folded if bias is None else folded + bias.float(), wide @ norm.weight.float()
