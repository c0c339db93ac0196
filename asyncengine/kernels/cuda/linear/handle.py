"""Weights of projections as the GPU keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncengine.kernels.cuda.linear.formats.base import Format, Matrix
from asyncengine.kernels.cuda.linear.formats.registry import FORMATS, format_of
from asyncengine.kernels.cuda.linear.plan import Fused, Site, norm_kind
from asyncengine.kernels.ops import Norm
from asyncengine.kernels.weight import PackedWeight, form_in


@dataclass(frozen=True, slots=True)
class CudaLinear:
    """Weights that share their input, as one matrix."""

    weight: Matrix
    """[N, K], with rows of zeros after the out_features that there are"""
    bias: Tensor | None
    out_features: int

    @property
    def format(self) -> Format:
        return format_of(self.weight)

    def columns(self, activation: Fused | None) -> int:
        """Return the number of columns of the result, padding included."""
        return len(self.weight) // (2 if activation == "silu_mul" else 1)

    def exact(self) -> CudaLinear:
        """Return the matrix without its padding, for a result that is split, added to something or searched for its
        maximum."""
        if len(self.weight) == self.out_features:
            return self
        bias = None if self.bias is None else self.bias[: self.out_features]
        return CudaLinear(self.format.first_rows(self.weight, self.out_features), bias, self.out_features)

    def site(
        self, rows: int, dtype: torch.dtype, norm: Norm | None = None, fused: Fused | None = None, *, add: bool = False
    ) -> Site:
        """The kind of projection by these weights, of so many rows in this dtype, which are not rounded."""
        return Site(
            self.columns(fused), self.weight.shape[1], rows, norm_kind(norm), fused, self.bias is not None, add,
            self.format.kind(dtype),
        )  # fmt: skip


def pack(weights: Sequence[PackedWeight], biases: Sequence[Tensor | None]) -> CudaLinear:
    """One matrix of weights that share their input. Raises ValueError for a format that the GPU does not have."""
    return CudaLinear(*form_in(FORMATS, weights).pack(weights, biases))
