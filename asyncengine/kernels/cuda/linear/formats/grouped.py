"""Weights in int4, int8 or float8 whose columns share scales in groups. Inputs stay in the model's dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.linear.formats.base import Matrix, Packed, PlainInputs, as_tensor, join_biases
from asyncengine.kernels.cuda.linear.grouped import GroupedMatrix, multiply
from asyncengine.kernels.cuda.linear.plan import Plan, Site, WeightKind
from asyncengine.kernels.grouped import are_alike, round_to_groups
from asyncengine.kernels.ops import Norm
from asyncengine.kernels.weight import INT4, PackedWeight


class Grouped(PlainInputs):
    """Implements ``Format`` for matrices of codes. ``product`` alone multiplies them: it chooses its kernels itself."""

    needs = "any GPU"
    prepares_norms = False

    def __init__(self, form: str) -> None:
        self._form = form
        self.bits: Mapping[WeightKind, int] = {form: 4 if form == INT4 else 8}

    def runs_on(self, gpu: Gpu) -> bool:
        return True

    def pack(self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None]) -> Packed:
        if not are_alike(weights):
            raise ValueError("weights side by side must have groups, tables and orders of one kind")
        codes = torch.cat([weight.tensors["codes"].view(torch.uint8) for weight in weights])
        first, rows = weights[0].tensors, [weight.out_features for weight in weights]
        scales = torch.cat([weight.tensors["scales"] for weight in weights])
        offsets = torch.cat([weight.tensors["offsets"] for weight in weights]) if "offsets" in first else None
        matrix = GroupedMatrix(
            self._form, codes.view(first["codes"].dtype), scales, offsets, first.get("table"), first.get("order")
        )
        return Packed(matrix, join_biases(rows, biases), sum(rows))

    def make(self, weight: Tensor) -> Matrix:
        return self.pack([round_to_groups(self._form, weight)], [None]).weight

    def first_rows(self, weight: Matrix, count: int) -> Matrix:
        """There is no padding."""
        return weight

    def kind(self, dtype: torch.dtype) -> WeightKind:
        return self._form

    def fits(self, plan: Plan, x: Matrix, norm: Norm | None, index: Tensor | None) -> bool:
        return False

    def product(self, x: Matrix, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert isinstance(weight, GroupedMatrix)
        return multiply(as_tensor(x), weight, bias, dtype)

    def add_product(self, to: Tensor, x: Matrix, weight: Matrix, bias: Tensor | None) -> None:
        to += self.product(x, weight, bias, to.dtype)

    def takes_tma(self, site: Site) -> bool:
        return False

    def takes_library_alone(self, site: Site) -> bool:
        return True

    def takes_library(self, site: Site) -> bool:
        return True

    def pattern(self, site: Site, gpu: Gpu) -> Plan | None:
        return None
