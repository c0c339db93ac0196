"""Format: the part of a projection on the CPU that depends on how its weights are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asyncengine._core import CpuKernels, CpuLinear, StepBatch
from asyncengine.kernels.cpu.checks import check, native_dtype
from asyncengine.kernels.cpu.linear.panels import Panels, is_transposed
from asyncengine.kernels.weight import PackedWeight


class Native(NamedTuple):
    """Weights that share their input, as native kernels multiply them."""

    linear: CpuLinear
    tensors: tuple[Tensor, ...]
    """The tensors that ``linear`` points to."""
    dtype: torch.dtype
    """dtype of inputs and results"""


class Format(ABC):
    """Operations on weights of one format.

    A format says how a weight is unpacked. Without more it is unpacked for each product, which native kernels compute
    in float32. A format that native kernels read as it is stored has ``pack``.
    """

    @abstractmethod
    def unpack(self, weight: PackedWeight) -> Tensor:
        """The matrix [N, K] in floats."""

    def operand(self, x: Tensor) -> Tensor:
        """The rows of x [M, K] as a product multiplies them; a format may round them."""
        return x

    def pack(
        self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None], panels: Panels, *, rearrange: bool
    ) -> Native | None:
        """The weights for native kernels; None if these do not read the format.

        With ``rearrange`` weights are laid out anew that could be read where they are.
        """
        return None

    def rows(self, weight: PackedWeight, ids: Tensor) -> Tensor:
        """The rows float32 [T, K] of an embedding that ``pack`` does not pack."""
        raise NotImplementedError

    def launch(
        self, kernels: CpuKernels, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None], x: Tensor,
        out: Tensor, batch: StepBatch,
    ) -> None:  # fmt: skip
        """out [M, N] = x [M, K] times weights that ``pack`` does not pack, transposed, side by side, plus the biases.

        x has the rows of a residual in the step ``batch``, which may differ in their adapters. An element of the result
        does not depend on the other rows of x.
        """
        rows = self.operand(x).float().contiguous()
        matrices = [self.unpack(weight).float().contiguous() for weight in weights]
        native = native_linear(matrices, [None if bias is None else bias.float() for bias in biases])
        product = rows.new_empty(out.shape)
        kernels.linear(native.linear, rows.data_ptr(), rows.shape[1], len(rows), product.data_ptr(), True)
        out.copy_(product)


def native_linear(weights: Sequence[Tensor], biases: Sequence[Tensor | None], panels: Panels | None = None) -> Native:
    """Weights [N_i, K] for native kernels: contiguous, or for ``panels`` all contiguous or all transposed.

    Raises ValueError for a tensor of another shape, dtype or layout.
    """
    k, dtype = weights[0].shape[-1], weights[0].dtype
    named, rows = native_dtype(dtype), [w.shape[0] for w in weights]
    for weight, bias in zip(weights, biases, strict=True):
        n = weight.shape[0]
        stored, shape = (weight.T, (k, n)) if panels and is_transposed(weight) else (weight, (n, k))
        check(stored, dtype, shape, "weight")
        if bias is not None:
            check(bias, dtype, (n,), "bias")
    if panels:
        weights = [panels.copy(w) for w in weights]
    native = CpuLinear(
        [w.data_ptr() for w in weights],
        rows,
        [0 if b is None else b.data_ptr() for b in biases],
        k,
        named,
        panels is not None,
    )
    return Native(native, (*weights, *(b for b in biases if b is not None)), dtype)
