"""What a model asks of the machine: the operations every kernel package implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, device

Activation = Literal["silu_mul", "gelu", "gelu_tanh"]
"""silu_mul takes gate and up side by side, [M, 2I], and gives silu(gate) * up, [M, I]."""


class Norm(NamedTuple):
    """A layer norm, or without a bias an RMS norm."""

    weight: Tensor
    """[H]"""
    bias: Tensor | None
    eps: float


class HeadNorms(NamedTuple):
    """RMS norms [D] over every head of the queries and of the keys."""

    q: Tensor
    k: Tensor
    eps: float


class AttentionLayer(NamedTuple):
    """What one layer's attention is, beside its KV cache."""

    num_heads: int
    """of the queries"""
    norms: HeadNorms | None
    cos_sin: Tensor | None
    """float32 [max_positions, D]: D/2 cosines, then D/2 sines, element i of a head paired with element i + D/2; without
    it nothing is rotated"""
    scale: float
    window: int
    """The token at position i sees position j if j <= i and, with a window > 0, i - window < j."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0: they stay as they are."""


def split_heads(heads: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the queries, keys and values in heads [T, num_heads + 2 Hk, D]."""
    last = num_heads + (heads.shape[1] - num_heads) // 2
    return heads[:, :num_heads], heads[:, num_heads:last], heads[:, last:]


class Ops(Protocol):
    """A pre-norm transformer as its machine sees it: a residual stream, read through norms and added to.

    Activations are [tokens, features] in the model's dtype. ``batch`` is a step and ``stream`` its residual stream,
    both in the form that the package works with; models only hand them on. The KV cache of a layer is a pair of
    tensors whose layout inside a block is the package's own (``transposed_keys``). What an operation returns is good
    until it is called again.
    """

    device: device
    transposed_keys: bool
    """Keys are [num_blocks, Hk, D, block_size] instead of, like the values, [num_blocks, Hk, block_size, D]."""

    def make_linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Any:
        """A handle for weights [N_i, K] that share their input, and whose results lie side by side: N = sum of N_i.

        The CPU copies no contiguous weight; a transposed view may be copied.
        """

    def make_head(self, weight: Tensor) -> Any:
        """A handle for the weight [V, K] of ``logits``, which nobody quantises."""

    def make_embedding(self, table: Tensor, *, tied: bool, copy: bool = False) -> Any:
        """A handle for the table [V, H] of ``embed``; if tied, it is one for ``logits`` as well.

        With ``copy`` a tied table may be laid out anew on the CPU, for both its uses: for models whose other matrices
        are copied there anyway. Otherwise it is read where the file is mapped.
        """

    def embed(self, batch: Any, embedding: Any, position_table: Tensor | None = None) -> Any:
        """The stream of a step's tokens: their rows of the embedding, plus those of their positions.

        Ids and positions are not checked.
        """

    def norm_linear(self, stream: Any, norm: Norm, handle: Any, activation: Activation | None = None) -> Any:
        """The normed stream times the handle's weights, transposed: a Tensor [T, N].

        Activated, if so said, it is [T, N] in a form of the package's own, which only ``linear_add_`` reads.
        """

    def linear_add_(self, x: Any, handle: Any, stream: Any) -> None:
        """stream += x times the handle's weights, transposed; x [T, K] may be what ``norm_linear`` activated."""

    def attention(
        self, heads: Tensor, layer: AttentionLayer, k_cache: Tensor, v_cache: Tensor, batch: Any
    ) -> Tensor:
        """Causal attention of a step over the cache, its own tokens included: [T, num_heads * D].

        heads [T, (num_heads + 2 Hk) * D] holds queries, keys and values side by side. Queries and keys are normed and
        rotated, keys and values stored in the cache's slots of the step. May overwrite ``heads``.
        """

    def keep_sampled(self, x: Tensor, stream: Any, batch: Any) -> Tensor:
        """After the last layer's attention x [T, K]: the rest of the model needs only the tokens that are sampled from.

        The package may drop the others from the stream, and returns the rows of x that are still in it.
        """

    def logits(self, stream: Any, norm: Norm, handle: Any, batch: Any) -> Any:
        """float32 [num_samples, N] of the tokens whose logits the step wants; None if it wants none.

        Of a step that does not need all of them it may be what does, in the form of the package's own sampler.
        """
