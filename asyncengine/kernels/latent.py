"""Latent attention: the heads of a layer share one vector of each token, which the cache keeps."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LatentLayer(NamedTuple):
    """Attention of one layer over latents (DeepSeek-AI 2024), beside its cache.

    A token keeps ``rank`` latent numbers, normed, and ``rope`` rotated numbers of a key. A head's query has as many of
    both. Its score is the sum of their products, and the value is the latent itself.
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

    @property
    def width(self) -> int:
        """Numbers of a token in the cache."""
        return self.rank + self.rope
