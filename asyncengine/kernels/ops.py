"""What a model asks of the machine: the operations every kernel package implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, dtype

from asyncengine._core import StepBatch


class Ops(Protocol):
    """Activations are [tokens, features] in the model's dtype. A method whose name ends in _ works in place.

    The KV cache of a layer is a pair: keys [num_blocks, Hk, D, block_size] (transposed inside a block, so
    that scores of neighbouring tokens are neighbours) and values [num_blocks, Hk, block_size, D].
    """

    def make_linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Any:
        """A handle for ``linear`` over weights [N_i, K] that share their input. It copies none of them."""

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

    def head_rms_norm_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """RMS norm over the last axis of the view x [T, H, D]."""

    def rotary_(self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
        """Rotate the views q [T, Hq, D] and k [T, Hk, D], element i paired with element i + D/2.

        cos_sin is float32 [max_positions, D]: D/2 cosines, then D/2 sines. positions is int64 [T].
        """

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: StepBatch) -> None:
        """Write the views k, v [T, Hk, D] to the cache slots of batch.slot_mapping."""

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: StepBatch, scale: float, window: int
    ) -> Tensor:
        """Causal attention of the view q [T, Hq, D] over the rows' KV in the cache: [T, Hq * D].

        The token at position i sees position j if j <= i and, with a window > 0, i - window < j.
        q may also hold just the tokens of the leading rows; the other rows are then left out.
        """
