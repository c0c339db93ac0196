"""Float8 (e4m3) operands: every row of a matrix is scaled so that its largest element is float8's largest.

    W[n, k] ≈ weight[n, k] * scale[n]        x[m, k] ≈ values[m, k] * scale[m]

so that a product is the sum of values * weight, in float32, times both scales. Weights are quantised once, when they
are loaded; activations by every step, each row by itself, so that a row's result does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Quantization = Literal["none", "fp8"]

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
SMALLEST_TOP = 1e-30
"""Value taken as the largest element of a row of zeros: its inverse is finite."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """The rows of a matrix in float8."""

    values: Tensor
    """float8 [M, K]"""
    scale: Tensor
    """float32 [M]"""

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes

    def __len__(self) -> int:
        return len(self.values)

    def dequantize(self) -> Tensor:
        """float32 [M, K]"""
        return self.values.float() * self.scale[:, None]


def quantize(x: Tensor) -> Quantized:
    """x [M, K] by plain operations of torch: for weights, and the twin of the GPU's ``quantize_rows``."""
    values = torch.empty(x.shape, dtype=FLOAT8, device=x.device)
    scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    _quantize_into(x, values, scale)
    return Quantized(values, scale)


def quantize_weights(weights: Sequence[Tensor]) -> Quantized:
    """Weights [N_i, K] as one matrix, one after another: beside the result there is one of them in float32 at a
    time."""
    rows = [len(w) for w in weights]
    values = torch.empty((sum(rows), weights[0].shape[1]), dtype=FLOAT8, device=weights[0].device)
    scale = torch.empty(len(values), dtype=torch.float32, device=values.device)
    parts = zip(weights, torch.split(values, rows), torch.split(scale, rows), strict=True)
    for weight, its_values, its_scale in parts:
        _quantize_into(weight, its_values, its_scale)
    return Quantized(values, scale)


def _quantize_into(x: Tensor, values: Tensor, scale: Tensor) -> None:
    top = x.abs().amax(1).float().clamp_(min=SMALLEST_TOP)
    # Not FLOAT8_MAX / top, which torch makes the product with an inverse: rounded twice.
    values.copy_(x * (torch.full_like(top, FLOAT8_MAX) / top)[:, None])
    torch.mul(top, 1 / FLOAT8_MAX, out=scale)


def scaled_product_takes(columns: int, inner: int) -> bool:
    """Return whether ``scaled_product`` can multiply weights [columns, inner] on a GPU."""
    return columns % 16 == 0 and inner % 16 == 0


def scaled_product(x: Quantized, weight: Quantized, bias: Tensor | None) -> Tensor:
    """x [M, K] times weight [N, K], transposed, in bfloat16 [M, N]: torch's own kernels, for many rows.

    Without fast accumulation: float8 tensor cores add up in 14 bits, and their sums go to float32 now and then.
    """
    return torch._scaled_mm(
        x.values, weight.values.T, scale_a=x.scale[:, None], scale_b=weight.scale[None, :], bias=bias,
        out_dtype=torch.bfloat16, use_fast_accum=False,
    )  # fmt: skip
