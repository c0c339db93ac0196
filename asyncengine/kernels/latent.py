"""Latent attention: the heads of a layer share one vector of each token, which the cache keeps."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

EXPANDED_BYTES = 256 << 20
"""Memory of a GPU for keys and values that are made of the latents of contexts, a part of them at a time, at most."""


class LatentLayer(NamedTuple):
    """Attention of one layer over latents (DeepSeek-AI 2024), beside its cache.

    A token keeps ``rank`` latent numbers, normed, and ``rope`` rotated numbers of a key. A matrix of each head makes
    the rest of its key of the latent, and another its value.

    Absorbed, the first matrix multiplies the query in place of the latents, the latents themselves are the values, and
    the second matrix multiplies what attention gives. Expanded, keys and values are made of the latents.
    """

    num_heads: int
    rank: int
    """latent numbers of a token"""
    rope: int
    """rotated numbers of a token, an even number"""
    norm_weight: Tensor
    """[rank]: of the RMS norm of new latents, in the model's dtype"""
    norm_eps: float
    cos_sin: Tensor
    """float32 [max_positions, rope]: as ``AttentionLayer.cos_sin``"""
    scale: float
    """factor on the scores"""
    up: Any
    """handle of ``Ops.make_latent_up``: the matrices of the heads"""

    @property
    def width(self) -> int:
        """Numbers of a token in the cache."""
        return self.rank + self.rope
