"""Mixtures of experts of transformers' modules, over the experts of a kernel package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import grouped_mm_experts_forward

from asyncengine.kernels.experts import mix_rows
from asyncengine.kernels.ops import Activation, Routing
from asyncengine.kernels.weight import PackedWeight, dense
from asyncengine.models.transformers.activations import find_activation
from asyncengine.models.transformers.step import Step


def is_mixture(module: nn.Module) -> bool:
    """Return whether a module hands its experts to the experts function, whose decorator leaves these marks."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def add_mixtures(model: nn.Module, step: Step, dtype: torch.dtype) -> None:
    """Make the step compute the experts of a model in ``dtype``."""
    for module in model.modules():
        if is_mixture(module):
            step.experts[id(module)] = _mixture(module, step, dtype)


def _mixture(module: Any, step: Step, dtype: torch.dtype) -> Any:
    up = module.gate_up_proj if module.has_gate else module.up_proj
    if getattr(module, "has_post_expert_norm", False) or up.dtype != dtype:  # a mark that older versions have not
        return _Foreign(module)
    activation = (
        None if module.has_bias else find_activation(_inner(module), up.shape[1 if not module.is_transposed else 2])
    )
    if activation is not None:
        return _Native(module, step, activation)
    return _ByRows(module, step) if step.ops.device.type == "cpu" else _Grouped(module)


def _inner(module: Any) -> Any:
    return module._apply_gate if module.has_gate else module.act_fn


def _matrices(module: Any, name: str) -> list[Tensor]:
    """The weight [N, K] of each expert's product; a transposed view where it lies as [K, N]."""
    weights = getattr(module, name).detach()
    return [weight.T if module.is_transposed else weight for weight in weights]


def _parts(module: Any) -> list[list[PackedWeight]]:
    """The weights of each expert's first product: gate and up, or one that has both."""
    if module.has_gate and not module.is_concatenated:
        return [[dense(w[i::2].contiguous()) for i in (0, 1)] for w in _matrices(module, "gate_up_proj")]
    return [[dense(weight)] for weight in _matrices(module, "gate_up_proj" if module.has_gate else "up_proj")]


class _Native:
    """Experts with an activation that kernels have."""

    is_foreign = False

    def __init__(self, module: Any, step: Step, activation: Activation) -> None:
        self._step = step
        down = [dense(weight) for weight in _matrices(module, "down_proj")]
        self._experts = step.ops.make_experts(_parts(module), down, activation)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self._step.ops.experts(x, Routing(weights, ids), self._experts, self._step.batch)


class _ByRows:
    """Experts with biases, or with an activation of the module's own, where the host can read the routing."""

    is_foreign = False

    def __init__(self, module: Any, step: Step) -> None:
        self._step, self._inner = step, _inner(module)
        name = "gate_up_proj" if module.has_gate else "up_proj"
        self._up, self._down = (self._handles(module, name) for name in (name, "down_proj"))

    def _handles(self, module: Any, name: str) -> list[Any]:
        biases = getattr(module, f"{name}_bias").detach() if module.has_bias else None
        return [
            self._step.ops.make_linear([dense(weight)], [None if biases is None else biases[i].contiguous()])
            for i, weight in enumerate(_matrices(module, name))
        ]

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return mix_rows(x, Routing(weights, ids), self._block)

    def _block(self, index: int, rows: Tensor) -> Tensor:
        ops, batch = self._step.ops, self._step.batch
        inner = self._inner(ops.linear(rows, self._up[index], batch))
        return ops.linear(inner.contiguous(), self._down[index], batch)


class _Grouped:
    """The same on a GPU, by transformers' own grouped products, which do not wait for the routing."""

    is_foreign = False

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = grouped_mm_experts_forward(self._module, x, ids, weights)
        return out


class _Foreign:
    """Experts as the module itself computes them."""

    is_foreign = True

    def __init__(self, module: Any) -> None:
        self._module, self._forward = module, type(module).forward.__wrapped__

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = self._forward(self._module, x, ids, weights)
        return out
