"""Linear layers of transformers' modules."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def weight_of(linear: nn.Module) -> Tensor:
    """The weight [N, K] of a linear layer; GPT-2's lie as [K, N]."""
    parameter: Any = linear.weight
    weight: Tensor = parameter.detach()
    return weight.T if isinstance(linear, Conv1D) else weight


def bias_of(linear: nn.Module) -> Tensor | None:
    """The bias [N] of a linear layer, if it has one."""
    bias: Any = linear.bias
    return None if bias is None else bias.detach()


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, and nothing derived from one."""
    return type(module) in (nn.Linear, Conv1D)
