"""Linear layers of transformers' modules as projections of a kernel package."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from asyncengine.kernels.ops import Handle
from asyncengine.kernels.weight import dense
from asyncengine.models.transformers.linears import bias_of, is_linear, weight_of
from asyncengine.models.transformers.step import Step


class Group:
    """Projections of one input. The first that is called computes all, side by side."""

    def __init__(self, step: Step, linears: Sequence[nn.Module]) -> None:
        weights = [weight_of(linear) for linear in linears]
        self._step = step
        self.handle: Handle = step.ops.make_linear([dense(w) for w in weights], [bias_of(linear) for linear in linears])
        self._ends = [0, *accumulate(len(w) for w in weights)]
        self._x: Tensor | None = None
        self._y: Tensor | None = None
        self._left = 0

    def __len__(self) -> int:
        return len(self._ends) - 1

    def part(self, x: Tensor, index: int) -> Tensor:
        """The product of one of the projections with x [..., K]: a view [..., N]."""
        if self._x is not x:
            y = self._step.ops.linear(x.reshape(-1, x.shape[-1]), self.handle, self._step.batch)
            self._x, self._y, self._left = x, y.view(*x.shape[:-1], -1), len(self)
        assert self._y is not None
        part = self._y if len(self) == 1 else self._y[..., self._ends[index] : self._ends[index + 1]]
        self._left -= 1
        if not self._left:
            self._x = self._y = None
        return part


class Projection(nn.Module):
    """A linear layer."""

    def __init__(self, group: Group, index: int, weight: Tensor) -> None:
        super().__init__()
        self._group, self._index = group, index
        self.out_features, self.in_features = weight.shape
        if len(group) == 1:  # modules may ask for its dtype; a group has copied it
            self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self._group.part(x, self._index)


def replace(model: nn.Module, step: Step, groups: Sequence[Sequence[str]], dtype: torch.dtype) -> None:
    """Put projections in the place of linear layers, by the names of those that share their input.

    Layers in another dtype stay as they are.
    """
    for names in groups:
        linears = [model.get_submodule(name) for name in names]
        if all(is_linear(linear) and weight_of(linear).dtype == dtype for linear in linears):
            group = Group(step, linears)
            for index, (name, linear) in enumerate(zip(names, linears, strict=True)):
                model.set_submodule(name, Projection(group, index, weight_of(linear)))
