"""The modules of families with layer norms and one matrix for queries, keys and values: GPT-2, Bloom, MPT, Falcon."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from asyncengine.kernels.ops import Handle, ModelOps, Norm
from asyncengine.models.config import ModelConfig, RawConfig
from asyncengine.models.decoder import MLPBlock, load_ends
from asyncengine.models.weights.shard import Cut
from asyncengine.models.weights.source import WeightSource


def head_size(raw: RawConfig, key: str, hidden_size: int, num_heads: int) -> int:
    """Return the numbers of a head. Raises UnsupportedModelError, naming ``key``, if heads do not divide the hidden
    size."""
    if hidden_size % num_heads:
        raise raw.unsupported(f"{key} = {hidden_size} over {num_heads} heads")
    return hidden_size // num_heads


class FusedModules(NamedTuple):
    """Makes the modules of one model by the names of their tensors."""

    config: ModelConfig
    weights: WeightSource
    ops: ModelOps
    biased: bool = True
    """Projections have a bias."""
    biased_norms: bool = True
    transposed: bool = False
    """Matrices lie as [in, out]."""

    def norm(self, name: str) -> Norm:
        size = self.config.hidden_size
        weight = self.weights.tensor(f"{name}.weight", size)
        bias = self.weights.tensor(f"{name}.bias", size) if self.biased_norms else torch.zeros_like(weight)
        return Norm(weight, bias, self.config.norm_eps)

    def linear(self, name: str, out_size: int, in_size: int, cut: Cut, blocks: int = 1) -> Handle:
        """A projection from ``in_size`` to ``out_size`` of ``blocks`` matrices, of which a rank has ``cut``."""
        weight = self.weights.weight(name, out_size, in_size, cut=cut, blocks=blocks, transposed=self.transposed)
        bias = self.weights.bias(name, out_size, cut=cut, blocks=blocks) if self.biased else None
        return self.ops.make_linear([weight], [bias])

    def mlp(self, norm: Norm, up: str, down: str) -> MLPBlock:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        return MLPBlock(
            norm=norm,
            up=self.linear(up, inner, hidden, "rows"),
            activation=self.config.activation,
            down=self.linear(down, hidden, inner, "columns"),
        )

    def ends(self, norm: str, *, copy: bool = False) -> dict[str, Any]:
        """The embedding, the last norm and the head, as ``Decoder`` takes them. ``copy``: see ``make_embedding``."""
        return load_ends(self.config, self.weights, self.ops, copy=copy) | {"norm": self.norm(norm)}
