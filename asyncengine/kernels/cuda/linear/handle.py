"""Weights of projections as the GPU keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncengine.kernels.cuda.linear.plan import Fused, Site, WeightKind, norm_kind
from asyncengine.kernels.float8 import Quantized, join
from asyncengine.kernels.ops import Norm


@dataclass(frozen=True, slots=True)
class CudaLinear:
    """Weights that share their input, as one matrix."""

    weight: Tensor | Quantized
    """[N, K]; a Tensor with rows of zeros after the out_features that there are"""
    bias: Tensor | None
    out_features: int

    @property
    def quantized(self) -> bool:
        return isinstance(self.weight, Quantized)

    def columns(self, activation: Fused | None) -> int:
        """Return the number of columns of the result, padding included."""
        return len(self.weight) // (2 if activation == "silu_mul" else 1)

    def exact(self) -> CudaLinear:
        """Return the matrix without its padding, for a result that is split, added to something or searched for its
        maximum."""
        if isinstance(self.weight, Quantized) or len(self.weight) == self.out_features:
            return self
        bias = None if self.bias is None else self.bias[: self.out_features]
        return CudaLinear(self.weight[: self.out_features], bias, self.out_features)

    def site(
        self, rows: int, dtype: torch.dtype, norm: Norm | None = None, fused: Fused | None = None, *, add: bool = False
    ) -> Site:
        """The kind of projection by these weights, of so many rows in this dtype, which are not rounded."""
        plain: WeightKind = "bf16" if dtype == torch.bfloat16 else "fp32"
        return Site(
            self.columns(fused), self.weight.shape[1], rows, norm_kind(norm), fused, self.bias is not None, add,
            "fp8" if self.quantized else plain,
        )  # fmt: skip


def make_plain(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> CudaLinear:
    """One matrix, padded to rows that are aligned. Several weights, and padding, copy.

    Otherwise cuBLAS falls back to kernels of Turing's time: a vocabulary of 50,257 took 214 us instead of 36 at 256
    rows on an H200.
    """
    out_features = sum(len(w) for w in weights)
    padding = -out_features % 64 if out_features % 8 else 0
    weight = weights[0]
    if len(weights) > 1 or padding:
        weight = torch.cat((*weights, weight.new_zeros(padding, weight.shape[1])))
    return CudaLinear(weight.contiguous(), _join_biases([len(w) for w in weights], biases, padding), out_features)


def make_quantized(weights: Sequence[Quantized], biases: Sequence[Tensor | None]) -> CudaLinear:
    """One matrix in float8, with a scale for each row."""
    quantized = join(weights)
    return CudaLinear(quantized, _join_biases([len(w) for w in weights], biases), len(quantized))


def _join_biases(rows: Sequence[int], biases: Sequence[Tensor | None], padding: int = 0) -> Tensor | None:
    """Join the biases of weights of so many rows, with zeros for the missing ones; None if all are missing."""
    some = next((bias for bias in biases if bias is not None), None)
    if some is None:
        return None
    filled = [some.new_zeros(n) if b is None else b for n, b in zip(rows, biases, strict=True)]
    return torch.cat((*filled, some.new_zeros(padding)))
