"""Norms of transformers' modules as norms of a kernel package, found by what a module makes of random numbers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from asyncengine.kernels.ops import Norm
from asyncengine.models.transformers.step import Step

_EPS = ("variance_epsilon", "eps", "epsilon", "rms_norm_eps")
"""Names that modules have for the number under the root."""


class KernelNorm(nn.Module):
    """A norm over the last axis."""

    def __init__(self, step: Step, norm: Norm) -> None:
        super().__init__()
        self._step, self._norm = step, norm
        self.weight, self.bias = norm.weight, norm.bias

    def forward(self, x: Tensor) -> Tensor:
        ops, batch = self._step.ops, self._step.batch
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return ops.normed(ops.residual(rows, batch), self._norm, batch).view(x.shape)


def replace_norms(model: nn.Module, step: Step, dtype: torch.dtype) -> None:
    """Put norms of the kernel package in the place of those that compute the same."""
    for name, module in list(model.named_modules()):
        if (norm := find_norm(module, dtype)) is not None:
            model.set_submodule(name, KernelNorm(step, norm))


def find_norm(module: Any, dtype: torch.dtype) -> Norm | None:
    """The norm that a module is: a layer norm, or an RMS norm whose factors are its weight, or one plus that. None if
    it is none of these, or keeps its weight in another dtype."""
    parameters = dict(module.named_parameters(recurse=False))
    weight, bias = parameters.pop("weight", None), parameters.pop("bias", None)
    eps = next((value for name in _EPS if isinstance(value := getattr(module, name, None), float)), None)
    if weight is None or weight.ndim != 1 or weight.dtype != dtype or parameters or eps is None:
        return None
    if len(list(module.children())) or (bias is not None and type(module) is not nn.LayerNorm):
        return None
    wide = copy.deepcopy(module).float()
    x = 2 * torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device)
    try:
        with torch.inference_mode():
            y = wide(x)
    except (RuntimeError, TypeError):
        return None
    if type(module) is nn.LayerNorm:
        bias = torch.zeros_like(weight) if bias is None else bias
        return Norm(weight.detach(), bias.detach(), eps)
    rms = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    for factors in (weight.detach(), weight.detach().float() + 1):
        if torch.allclose(y, rms * factors.float(), rtol=1e-4, atol=1e-5):
            return Norm(factors, None, eps)
    return None
