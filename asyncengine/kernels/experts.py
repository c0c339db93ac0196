"""Mixtures of experts by plain operations, over the products of a kernel package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from asyncengine.kernels.ops import Activation, Experts, HandleT, Routing
from asyncengine.kernels.weight import PackedWeight

Block = Callable[[int, Tensor], Tensor]
"""The result [M, H] of an expert, by its index, for rows [M, K]."""


def make_experts(
    make_linear: Callable[[Sequence[PackedWeight], Sequence[Tensor | None]], HandleT],
    up: Sequence[Sequence[PackedWeight]],
    down: Sequence[PackedWeight],
    activation: Activation,
) -> Experts[HandleT]:
    """Two handles for each expert. Raises ValueError if there are other numbers of experts in ``up`` and ``down``."""
    if len(up) != len(down):
        raise ValueError(f"weights of {len(up)} and of {len(down)} experts do not belong together")
    of_up = tuple(make_linear(weights, [None] * len(weights)) for weights in up)
    return Experts(of_up, tuple(make_linear([weight], [None]) for weight in down), activation)


def mix_rows(x: Tensor, routing: Routing, block: Block) -> Tensor:
    """``Ops.experts`` where the host can read the routing: an expert computes its rows alone.

    A row's results are added up in the order of its experts' indices, whatever the other rows are.
    """
    out = torch.zeros_like(x, dtype=torch.float32)
    for index in torch.unique(routing.ids).tolist():
        row, place = (routing.ids == index).nonzero(as_tuple=True)
        out[row] += block(index, x[row]).float() * routing.weights[row, place, None].float()
    return out.to(x.dtype)


def mix_all(x: Tensor, routing: Routing, indices: Iterable[int], block: Block) -> Tensor:
    """``Ops.experts`` where nothing may wait for the routing: each expert computes all rows."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for index in indices:
        chosen = routing.ids == index
        weight = torch.where(chosen, routing.weights, 0).float().sum(1, keepdim=True)
        # A row's result of an expert that it was not sent to may be infinite.
        out += torch.where(chosen.any(1, keepdim=True), block(index, x).float() * weight, 0)
    return out.to(x.dtype)
