"""Float8 weights, with a scale for each row (see kernels/float8.py). Inputs are quantised row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.linear.formats.base import Matrix, Packed, as_tensor, join_biases
from asyncengine.kernels.cuda.linear.plan import INVARIANT, Plan, Site, WeightKind
from asyncengine.kernels.cuda.rows.quantise import quantize_rows
from asyncengine.kernels.float8 import Quantized, join, quantize, scaled_product, scaled_product_takes, unpack_float8
from asyncengine.kernels.ops import Activation, Norm
from asyncengine.kernels.weight import PackedWeight


class Float8:
    """Implements ``Format`` for matrices in float8."""

    bits: Mapping[WeightKind, int] = {"fp8": 8}
    invariant = INVARIANT
    needs = "a GPU of compute capability 8.9 or newer"
    prepares_norms = False
    own_rows = True

    def runs_on(self, gpu: Gpu) -> bool:
        return gpu.has_float8

    def pack(self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None]) -> Packed:
        matrices = unpack_float8(weights)
        rows = [len(matrix) for matrix in matrices]
        return Packed(join(matrices), join_biases(rows, biases), sum(rows))

    def make(self, weight: Tensor) -> Matrix:
        return quantize(weight)

    def first_rows(self, weight: Matrix, count: int) -> Matrix:
        """There is no padding."""
        return weight

    def kind(self, dtype: torch.dtype) -> WeightKind:
        return "fp8"

    def fits(self, plan: Plan, x: Matrix, norm: Norm | None, index: Tensor | None) -> bool:
        quantized = isinstance(x, Quantized)
        if index is not None or (norm is not None and (quantized or norm.bias is not None)):
            return False
        match plan.kind:
            case "vector":
                return plan.ahead == 0
            case "skinny":  # quantising needs to know the whole row before the first product
                return plan.ahead == 0 or quantized
            case "tiled":
                return quantized
            case _:
                return False

    def result_dtype(self, x: Matrix) -> torch.dtype:
        return torch.bfloat16 if isinstance(x, Quantized) else as_tensor(x).dtype

    def make_rows(self, x: Tensor, norm: Norm | None = None, *, pdl: bool) -> Matrix:
        return quantize_rows(x, norm, pdl=pdl)

    def operand(self, x: Matrix, plan: Plan, *, pdl: bool) -> Matrix:
        if isinstance(x, Quantized) or plan.fused_norm:
            return x
        return self.make_rows(as_tensor(x), pdl=pdl)

    def activate(self, y: Tensor, activation: Activation, *, pdl: bool) -> Matrix:
        return quantize_rows(y, activation=activation, pdl=pdl)

    def product(self, x: Matrix, weight: Matrix, bias: Tensor | None, dtype: torch.dtype, tile_rows: int = 0) -> Tensor:
        """Torch's scaled product, in bfloat16."""
        assert isinstance(x, Quantized)
        assert isinstance(weight, Quantized)
        return scaled_product(x, weight, bias)

    def add_product(self, to: Tensor, x: Matrix, weight: Matrix, bias: Tensor | None, tile_rows: int = 0) -> None:
        to += self.product(x, weight, bias, to.dtype)

    def takes_tma(self, site: Site) -> bool:
        return False

    def takes_library_alone(self, site: Site) -> bool:
        return False

    def takes_library(self, site: Site) -> bool:
        return scaled_product_takes(site.weight_rows, site.inner)

    def pattern(self, site: Site, gpu: Gpu) -> Plan | None:
        """A plan by the pattern of what was fastest in bfloat16, for up to 64 rows.

        The scaled product takes three kernels and is made for many rows.
        """
        if site.rows > 64:
            return None
        if site.rows == 1:
            warps = 2 if site.inner <= 2048 else 4 if site.inner <= 8192 else 8 if site.inner <= 16384 else 16
            return Plan("vector", 4, min(1024, 1 << (site.inner - 1).bit_length()), warps)
        if site.rows <= 8 and site.inner <= 3072:
            return Plan("skinny", 16, 64, 4 if site.inner <= 1024 else 8)
        columns, split = 128 if site.weight_rows >= 1 << 14 else 64, 1
        programs = site.weight_rows / columns
        gated = site.activation == "silu_mul"
        while not gated and split < 8 and programs * split < 100 and site.inner % (256 * split) == 0:
            split *= 2
        return Plan("tiled", columns, 128, 4, max(16, site.rows), split, 4, fused_norm=False)
