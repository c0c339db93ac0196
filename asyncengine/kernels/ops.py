"""What a model asks of the machine: the operations every kernel package implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, device, dtype


class StepTokens(NamedTuple):
    """What a model itself reads of a step: integers, T tokens in the order of rows and S samples."""

    input_ids: Tensor
    """[T]"""
    positions: Tensor
    """[T] of each token in its sequence"""
    sample_index: Tensor
    """[S]: the tokens whose logits are wanted"""


class HeadNorms(NamedTuple):
    """RMS norms [D] over every head of the queries and of the keys."""

    q: Tensor
    k: Tensor
    eps: float


def split_heads(heads: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the queries, keys and values in heads [T, num_heads + 2 Hk, D]."""
    last = num_heads + (heads.shape[1] - num_heads) // 2
    return heads[:, :num_heads], heads[:, num_heads:last], heads[:, last:]


class Ops(Protocol):
    """Activations are [tokens, features] in the model's dtype. A method whose name ends in _ works in place.

    ``batch`` is a step in the form that the package works with; models only hand it on. The KV cache of a layer is a
    pair of tensors whose layout inside a block is the package's own (``transposed_keys``).
    """

    device: device
    transposed_keys: bool
    """Keys are [num_blocks, Hk, D, block_size] instead of, like the values, [num_blocks, Hk, block_size, D]."""

    def tokens(self, batch: Any) -> StepTokens: ...

    def make_linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Any:
        """A handle for ``linear`` over weights [N_i, K] that share their input.

        Contiguous weights are not copied; transposed views may be.
        """

    def linear(self, x: Tensor, handle: Any, out_dtype: dtype | None = None) -> Tensor:
        """x [M, K] times every weight of the handle, transposed, side by side: [M, sum of N_i]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place; returns the norm of the sum."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor: ...

    def add_layer_norm(self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """residual += x in place; returns the norm of the sum."""

    def silu_mul(self, x: Tensor) -> Tensor:
        """x [M, 2I] holds gate and up side by side; returns silu(gate) * up, [M, I]."""

    def gelu_tanh(self, x: Tensor) -> Tensor: ...

    def gelu(self, x: Tensor) -> Tensor: ...

    def rotary_store_kv(
        self,
        heads: Tensor,
        num_heads: int,
        norms: HeadNorms | None,
        cos_sin: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Any,
    ) -> None:
        """Norm and rotate queries and keys in place, element i paired with element i + D/2; store keys and values.

        heads [T, num_heads + 2 Hk, D] holds queries, keys and values side by side. cos_sin is float32
        [max_positions, D]: D/2 cosines, then D/2 sines.
        """

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Any) -> None:
        """Write the views k, v [T, Hk, D] to the cache slots of the step."""

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Any, scale: float, window: int
    ) -> Tensor:
        """Causal attention of the view q [T, Hq, D] over the rows' KV in the cache: [T, Hq * D].

        The token at position i sees position j if j <= i and, with a window > 0, i - window < j.
        q may also hold just the tokens of the leading rows; the other rows are then left out.
        """
