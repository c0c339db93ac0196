"""What the tests of projections share: a float64 twin's result comes with how far rounding may take the kernel's."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from asyncengine.kernels.ops import Activation


def activated(y: Tensor, error: Tensor, kind: Activation | None) -> tuple[Tensor, Tensor]:
    """An activation of y, which is known but for ``error``; no activation is steeper than 1.13."""
    if kind is None:
        return y, error
    if kind != "silu_mul":
        return F.gelu(y, approximate="tanh" if kind == "gelu_tanh" else "none"), 1.13 * error
    (gate, up), (gate_error, up_error) = y.chunk(2, 1), error.chunk(2, 1)
    error = 1.13 * gate_error * (up.abs() + up_error) + F.silu(gate).abs() * up_error
    return F.silu(gate) * up, error


def assert_within(got: Tensor, expected: Tensor, bound: Tensor) -> None:
    error = (got.double() - expected).abs()
    assert (error <= bound).all(), f"error is {(error / bound).max():.3g} of the bound"
