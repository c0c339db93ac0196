"""What a model asks of the machine: the operations every kernel package implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, dtype


class StepBatch(Protocol):
    """One step as a host executor sees it; csrc/core/step_batch.h has the native one.

    T tokens in R rows (sequences). The rows that decode come first. The arrays are writable views of
    memory that is valid during the step only.
    """

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def input_ids(self) -> npt.NDArray[np.int64]:
        """[T] token ids."""

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """[T] position of each token in its sequence."""

    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """[T] block * block_size + offset: where the token's KV goes."""

    @property
    def query_start(self) -> npt.NDArray[np.int32]:
        """[R + 1] row r has the tokens query_start[r] to query_start[r + 1]."""

    @property
    def context_len(self) -> npt.NDArray[np.int32]:
        """[R] tokens of KV that precede the row's query."""

    @property
    def sample_index(self) -> npt.NDArray[np.int64]:
        """[S] tokens whose logits are wanted."""

    def block_table(self, row: int, num_blocks: int) -> npt.NDArray[np.int32]:
        """The first num_blocks block ids of the row's sequence, by position // block_size."""


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
