"""Mixtures of experts by plain operations, over the products of a kernel package."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from asyncengine.kernels.ops import Activation, Experts, HandleT, Routing, RoutingRule
from asyncengine.kernels.weight import PackedWeight

Block = Callable[[int, Tensor], Tensor]
"""The result [M, H] of an expert, by its index, for rows [M, K]."""


def check_experts(up: Sequence[Sequence[PackedWeight]], down: Sequence[PackedWeight]) -> None:
    """Raise ValueError if there are other numbers of experts in ``up`` and ``down``."""
    if len(up) != len(down):
        raise ValueError(f"weights of {len(up)} and of {len(down)} experts do not belong together")


def make_experts(
    make_linear: Callable[[Sequence[PackedWeight], Sequence[Tensor | None]], HandleT],
    up: Sequence[Sequence[PackedWeight]],
    down: Sequence[PackedWeight],
    activation: Activation,
    up_biases: Sequence[Sequence[Tensor]] | None = None,
    down_biases: Sequence[Tensor] | None = None,
) -> Experts[HandleT]:
    """Two handles for each expert. Raises ValueError if there are other numbers of experts in ``up`` and ``down``."""
    check_experts(up, down)
    of_up = tuple(
        make_linear(weights, up_biases[index] if up_biases else [None] * len(weights))
        for index, weights in enumerate(up)
    )
    of_down = tuple(
        make_linear([weight], [down_biases[index] if down_biases else None]) for index, weight in enumerate(down)
    )
    return Experts(of_up, of_down, activation, len(up))


def choose_experts(logits: Tensor, rule: RoutingRule) -> Routing:
    """The experts of rows with these logits float32 [T, E], or [T, E + 1] if a shared expert is gated."""
    experts = logits.shape[1] - (rule.shared == "gated")
    logits, gate = logits[:, :experts], logits[:, experts:]
    scores = logits.sigmoid() if rule.scores == "sigmoid" else logits.softmax(-1)
    choice = scores if rule.correction is None else scores + rule.correction
    if rule.kept_groups < rule.groups:
        by_group = choice.view(len(choice), rule.groups, choice.shape[1] // rule.groups)
        best = by_group.topk(rule.group_scores, dim=-1)[0].sum(-1).topk(rule.kept_groups, dim=-1)[1]
        kept = torch.zeros(by_group.shape[:2], dtype=torch.bool, device=logits.device).scatter_(1, best, True)
        choice = by_group.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    ids = choice.topk(rule.top_k, dim=-1)[1]
    weights = scores.gather(1, ids)
    if rule.sums_to_one:
        weights = weights / (weights.sum(-1, keepdim=True) + rule.sum_offset)
    if rule.scale != 1:
        weights = weights * rule.scale
    if rule.factors is not None:
        weights = weights * rule.factors[ids]
    if rule.shared != "none":
        share = gate.sigmoid() if rule.shared == "gated" else torch.ones_like(weights[:, :1])
        weights = torch.cat((weights, share), 1)
        ids = torch.cat((ids, torch.full_like(ids[:, :1], experts)), 1)
    return Routing(weights, ids)


def mix_rows(x: Tensor, routing: Routing, block: Block) -> Tensor:
    """``Ops.experts`` where the host can read the routing: an expert computes its rows alone.

    A row's results are added up in the order of its experts' indices, whatever the other rows are.
    """
    out = torch.zeros_like(x, dtype=torch.float32)
    for index in torch.unique(routing.ids).tolist():
        row, place = (routing.ids == index).nonzero(as_tuple=True)
        out[row] += block(index, x[row]).float() * routing.weights[row, place, None].float()
    return out.to(x.dtype)
