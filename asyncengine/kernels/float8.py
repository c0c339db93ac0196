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

from asyncengine.kernels.weight import FLOAT8 as FLOAT8_FORMAT
from asyncengine.kernels.weight import PackedWeight, tensors_of

Quantization = Literal["none", "fp8", "int8", "int4"]

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
    top = x.abs().amax(1).float().clamp_(min=SMALLEST_TOP)
    # Not FLOAT8_MAX / top, which torch makes the product with an inverse: rounded twice.
    values = x * (torch.full_like(top, FLOAT8_MAX) / top)[:, None]
    return Quantized(values.to(FLOAT8), top * (1 / FLOAT8_MAX))


def pack_float8(weight: Tensor) -> PackedWeight:
    """A weight [N, K] in the format FLOAT8."""
    made = quantize(weight)
    return PackedWeight(FLOAT8_FORMAT, {"values": made.values, "scale": made.scale}, *weight.shape)


def unpack_float8(weights: Sequence[PackedWeight]) -> list[Quantized]:
    """The matrices of weights in the format FLOAT8. Raises ValueError for a weight in another."""
    values, scales = (tensors_of(weights, name, FLOAT8_FORMAT) for name in ("values", "scale"))
    return [Quantized(*part) for part in zip(values, scales, strict=True)]


def join(matrices: Sequence[Quantized]) -> Quantized:
    """Matrices [N_i, K] as one, one below another. Several are copied."""
    if len(matrices) == 1:
        return matrices[0]
    # Bytes: torch joins no float8.
    values = torch.cat([matrix.values.view(torch.uint8) for matrix in matrices]).view(FLOAT8)
    return Quantized(values, torch.cat([matrix.scale for matrix in matrices]))


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
