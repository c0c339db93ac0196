"""Attention over latents in a step: the absorbed form for all rows, or for the rows that the expanded form leaves."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncengine.kernels.cuda.attention.context import find_expanded_rows
from asyncengine.kernels.cuda.attention.expanded import ExpandedPlan, choose_expanded, expanded_attention
from asyncengine.kernels.cuda.attention.latent import LatentPlan, choose_plan, latent_attention
from asyncengine.kernels.cuda.attention.latent_decode import fits_decode
from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.rows.tensors import empty_rows
from asyncengine.kernels.cuda.step.tensors import DeviceStep
from asyncengine.kernels.latent import LatentLayer
from asyncengine.kernels.ops import LayerLatentCache


class LatentPlans(NamedTuple):
    """Plans of a step."""

    absorbed: LatentPlan
    expanded: ExpandedPlan | None
    """plan for chunks of prompts; None: they take the absorbed form"""


def choose_plans(
    q: Tensor, layer: LatentLayer, step: DeviceStep, gpu: Gpu, *, single_token_rows: bool, float8: bool
) -> LatentPlans:
    """The plans for queries q [tokens, heads, key_dim + rope]; ``float8``: over latents in float8."""
    absorbed = choose_plan(
        step.num_rows, step.num_tokens, layer.num_heads, q.dtype, gpu.multiprocessors, float8=float8,
        transposed=single_token_rows and fits_decode(layer, q.dtype, gpu),
    )  # fmt: skip
    if single_token_rows:
        return LatentPlans(absorbed, None)
    key_dim = q.shape[2] - layer.rope
    value_dim = layer.up.shape[1] - key_dim
    return LatentPlans(absorbed, choose_expanded(step.num_tokens, key_dim, layer, value_dim, q.dtype, gpu))


def by_head(x: Tensor, weights: Tensor) -> Tensor:
    """x [T, heads, K] times weights [heads, N, K], transposed, by head: [T, heads, N], contiguous."""
    heads, columns, _ = weights.shape
    out = empty_rows(len(x), heads * columns, x.dtype, x.device).view(len(x), heads, columns)
    torch.bmm(x.transpose(0, 1), weights.transpose(1, 2), out=out.transpose(0, 1))
    return out


def attend(
    q: Tensor, rows: Tensor, layer: LatentLayer, cache: LayerLatentCache, step: DeviceStep, plans: LatentPlans,
    *, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """``Ops.latent_attention``. Raises ValueError for tensors that do not fit."""
    key_dim, expanded = q.shape[2] - layer.rope, plans.expanded
    found = None if expanded is None else find_expanded_rows(step, expanded.context, pdl=pdl)
    absorbed = by_head(q[..., :key_dim], layer.up[:, :key_dim].transpose(1, 2))
    q_rope = q[..., key_dim:]
    left_out = None if found is None else found.token_rows
    x = latent_attention(absorbed, q_rope, rows, layer, cache, step, plans.absorbed, left_out=left_out, pdl=pdl)
    out = by_head(x, layer.up[:, key_dim:])
    if expanded is not None and found is not None:
        expanded_attention(q, rows, layer, cache, step, found, out, expanded, pdl=pdl)
    return out.flatten(1)
