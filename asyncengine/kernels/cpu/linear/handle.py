"""CpuLinearHandle: weights of projections as the CPU keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncengine._core import CpuExperts, CpuLinear, CpuNorm
from asyncengine.kernels.cpu.linear.formats.base import Format
from asyncengine.kernels.cpu.memory import Result
from asyncengine.kernels.ops import Experts, Norm
from asyncengine.kernels.weight import PackedWeight


@dataclass(slots=True)
class CpuLinearHandle:
    """Weights that share their input. Native kernels multiply them."""

    native: CpuLinear
    in_features: int
    out_features: int
    dtype: torch.dtype
    """dtype of inputs and results"""
    tensors: tuple[Tensor, ...]
    """The tensors that ``native`` points to."""
    product: Result
    """result of norm_linear"""
    added: Result
    """result of linear_add_"""
    # The norm and the table of positions last used with this handle. They were checked then.
    norm: Norm | None = None
    native_norm: CpuNorm | None = None
    position_table: Tensor | None = None


@dataclass(frozen=True, slots=True)
class UnpackedHandle:
    """Weights that share their input, in a format that no native kernel reads."""

    form: Format
    weights: Sequence[PackedWeight]
    biases: Sequence[Tensor | None]

    @property
    def in_features(self) -> int:
        return self.weights[0].in_features

    @property
    def out_features(self) -> int:
        return sum(weight.out_features for weight in self.weights)


@dataclass(frozen=True, slots=True)
class NativeExperts(Experts[CpuLinearHandle | UnpackedHandle]):
    """Experts that native kernels multiply, all of one shape."""

    native: CpuExperts
    out_features: int
