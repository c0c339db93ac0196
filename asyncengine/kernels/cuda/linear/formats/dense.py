"""Dense weights: a matrix in the model's dtype: bfloat16, float16 or float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.linear.formats.base import Matrix, Packed, PlainInputs, as_tensor, join_biases
from asyncengine.kernels.cuda.linear.plan import INVARIANT, Plan, Site, WeightKind
from asyncengine.kernels.ops import Norm
from asyncengine.kernels.weight import DENSE, PackedWeight, tensors_of


class Dense(PlainInputs):
    """Implements ``Format`` for matrices in the model's dtype."""

    bits: Mapping[WeightKind, int] = {"bf16": 16, "fp16": 16, "fp32": 32}
    invariant = INVARIANT
    needs = "any GPU"
    prepares_norms = True

    def runs_on(self, gpu: Gpu) -> bool:
        return True

    def pack(self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None]) -> Packed:
        """One matrix, padded to rows that are aligned. Several weights, and padding, copy.

        Otherwise cuBLAS falls back to kernels of Turing's time: a vocabulary of 50,257 took 214 us instead of 36 at 256
        rows on an H200.
        """
        tensors = tensors_of(weights, "weight", DENSE)
        rows = [len(w) for w in tensors]
        out_features = sum(rows)
        padding = -out_features % 64 if out_features % 8 else 0
        weight = tensors[0]
        if len(tensors) > 1 or padding:
            weight = torch.cat((*tensors, weight.new_zeros(padding, weight.shape[1])))
        return Packed(weight.contiguous(), join_biases(rows, biases, padding), out_features)

    def make(self, weight: Tensor) -> Matrix:
        return weight

    def first_rows(self, weight: Matrix, count: int) -> Matrix:
        return as_tensor(weight)[:count]

    def kind(self, dtype: torch.dtype) -> WeightKind:
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")

    def fits(self, plan: Plan, x: Matrix, norm: Norm | None, index: Tensor | None) -> bool:
        if not isinstance(x, Tensor):
            return False
        match plan.kind:
            case "vector":
                return plan.ahead == 0
            case "skinny":  # a layer norm needs to know the whole row before the first product
                return plan.ahead == 0 or norm is None or norm.bias is None
            case "tiled":
                return norm is None and index is None
            case _:
                return False

    def product(self, x: Matrix, weight: Matrix, bias: Tensor | None, dtype: torch.dtype, tile_rows: int = 0) -> Tensor:
        """The product by cuBLAS."""
        x, weight = as_tensor(x), as_tensor(weight)
        if dtype == x.dtype:
            return F.linear(x, weight, bias)
        if x.device.type == "cpu":  # no such product there
            return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        y = torch.mm(x, weight.T, out_dtype=dtype)
        return y if bias is None else y + bias

    def add_product(self, to: Tensor, x: Matrix, weight: Matrix, bias: Tensor | None, tile_rows: int = 0) -> None:
        if bias is None:
            torch.addmm(to, as_tensor(x), as_tensor(weight).T, out=to)
        else:
            to += self.product(x, weight, bias, to.dtype)

    def takes_tma(self, site: Site) -> bool:
        return site.weight == "bf16"

    def takes_library_alone(self, site: Site) -> bool:
        return site.weight != "bf16"

    def takes_library(self, site: Site) -> bool:
        return True

    def pattern(self, site: Site, gpu: Gpu) -> Plan | None:
        return None
