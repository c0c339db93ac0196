"""The step that a model of transformers computes: its operations, its batch, and the calls of its layers so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from asyncengine.kernels.ops import AttentionLayer, Batch, LayerCache, ModelOps
from asyncengine.models.transformers.discover import Site
from asyncengine.models.transformers.interface import MaskFunction


class Step:
    """Hooks of one model. A model computes one step at a time."""

    def __init__(self, model: nn.Module, sites: Sequence[Site], ops: ModelOps) -> None:
        self.ops = ops
        self.batch: Any = Batch()
        self.experts: dict[int, Any] = {}
        """mixtures by the id of their module"""
        self._sites = tuple(sites)
        self._modules = tuple(model.get_submodule(site.module) for site in sites)
        self._layers = tuple(_layer(model, site) for site in sites)
        modules = [site.module for site in sites]
        # A module that attends several times a layer may still hold one result when it asks for the next.
        self._copies = tuple(modules.count(module) > 1 for module in modules)
        self._next = 0
        self._caches: Iterator[LayerCache] = iter(())

    def begin(self, batch: Batch, caches: Iterator[LayerCache]) -> None:
        self.batch, self._caches, self._next = batch, caches, 0

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **how: Any) -> Tensor:
        index = self._next
        self._next += 1
        if self._modules[index] is not module:
            raise RuntimeError(
                f"{type(module).__name__} attends out of turn, in the place of {self._sites[index].module}"
            )
        site, cache = self._sites[index], next(self._caches)
        dim = max(site.key_dim, site.value_dim)
        parts = [_rows(x, dim) for x in (q, k, v)]
        heads = torch.cat(parts, 1)
        tokens = heads.shape[0]
        out = self.ops.attention(heads.view(tokens, -1), self._layers[index], cache, self.batch)  # type: ignore[arg-type]
        out = out.view(1, tokens, site.num_heads, dim)[..., : site.value_dim]
        return out.clone() if self._copies[index] else out

    def mix(self, module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = self.experts[id(module)](x, ids, weights)
        return out

    def mix_without_waiting(self, module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """``mix`` where the module computes its experts itself; zeros where the kernel package does, which waits for
        nothing on a GPU."""
        return self.mix(module, x, ids, weights) if self.experts[id(module)].is_foreign else torch.zeros_like(x)

    def mask(self, sees: MaskFunction, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """A mask that hides nothing, for layers that choose among all tokens of a short text: their choice is not
        asked for."""
        return torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device)


def _layer(model: nn.Module, site: Site) -> AttentionLayer:
    sinks = model.get_parameter(site.sinks).detach().float().flatten().contiguous() if site.sinks else None
    return AttentionLayer(site.num_heads, None, None, site.scale, site.window, site.softcap, sinks=sinks)


def _rows(x: Tensor, dim: int) -> Tensor:
    """Heads [1, H, T, D] as a view [T, H, D], filled up with zeros to ``dim``."""
    x = x[0].transpose(0, 1)
    return x if x.shape[-1] == dim else nn.functional.pad(x, (0, dim - x.shape[-1]))
