"""Common parts of the tests of kernels. A float64 twin's result comes with how far rounding may take the kernel's."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncengine.kernels.ops import Activation

NO_STEP: Any = None
"""Stands for the batch in calls of operations that ask nothing of it."""


def activated(y: Tensor, error: Tensor, kind: Activation | None) -> tuple[Tensor, Tensor]:
    """An activation of y, which is known but for ``error``; no activation is steeper than 1.13."""
    if kind is None:
        return y, error
    if not kind.endswith("_mul"):
        return F.gelu(y, approximate="tanh" if kind == "gelu_tanh" else "none"), 1.13 * error
    if kind == "clamped_silu_mul":  # for results that are known
        gate, up = y.chunk(2, 1)
        gate = gate.clamp(max=7)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1), error.chunk(2, 1)[0]
    (gate, up), (gate_error, up_error) = y.chunk(2, 1), error.chunk(2, 1)
    error = 1.13 * gate_error * (up.abs() + up_error) + F.silu(gate).abs() * up_error
    return F.silu(gate) * up, error


def assert_within(got: Tensor, expected: Tensor, bound: Tensor) -> None:
    error = (got.double() - expected).abs()
    assert (error <= bound).all(), f"error is {(error / bound).max():.3g} of the bound"


def greatest_ranks(logits: Tensor, width: int) -> Tensor:
    """int64 [R, tiles]: of each tile of so many logits of a row the greatest rank, as rank_of defines it."""
    logits = torch.where(logits < math.inf, logits, math.inf) + 0.0  # no NaN, no -0
    bits = logits.view(torch.int32).long()
    index = torch.arange(logits.shape[1], device=logits.device)
    rank = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 20) + (2**20 - 1 - index)
    return torch.stack([tile.amax(1) for tile in rank.split(width, 1)], 1)
