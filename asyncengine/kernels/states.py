"""Layers that keep a state of fixed size for each sequence, as kernels are handed them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ShortConv(NamedTuple):
    """Convolution over the last K tokens of a sequence, each channel by itself.

    Channel c of token t is the sum over k of weight[k, c] * x[t - K + 1 + k, c]; before a sequence x is 0. The layer's
    state begins with the last K - 1 inputs, float32 [K - 1, C].
    """

    weight: Tensor
    """float32 [K, C]"""
    bias: Tensor | None = None
    """float32 [C]: added to the sum"""
    silu: bool = False
    """The result is activated by silu."""

    @staticmethod
    def state_bytes(size: int, channels: int) -> int:
        """Bytes of the state of a convolution over ``size`` tokens, a multiple of 16."""
        return -(-(size - 1) * channels * 4 // 16) * 16


def state_floats(states: Tensor, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """A view [slots, count] of the numbers of ``dtype`` that lie in states uint8 [slots, bytes] from byte ``first``."""
    return states[:, first : first + count * dtype.itemsize].view(dtype)


class Mamba2(NamedTuple):
    """Mixer of Mamba-2 (Dao, Gu 2024) between its two projections, for H heads of P numbers and G groups of heads.

    A token brings a gate [H * P], inputs of the convolution [H * P + 2 G * N] and H time steps, side by side. Behind
    the convolution these are x [H, P], b [G, N] and c [G, N], and dt = softplus(time step + dt_bias) within dt_range.
    The state s [N, P] of each head becomes exp(dt * decay) * s + b * (dt * x), and the result is c · s + skip * x.
    It is multiplied by silu(gate), and normed where there is a norm. The layer's state is that of the convolution, then
    s [H, N, P] in the dtype of states, to which it is rounded behind every token.
    """

    conv: ShortConv
    decay: Tensor
    """float32 [H]: negative numbers"""
    skip: Tensor
    """float32 [H]"""
    dt_bias: Tensor
    """float32 [H]"""
    head_dim: int
    state_size: int
    groups: int
    dt_range: tuple[float, float]
    norm: Tensor | None
    """float32 [H * P]: weight of the RMS norms over each group's numbers of the result"""
    eps: float
    norm_before_gate: bool = False
    """The norm comes before the product with silu(gate)."""
    state_dtype: torch.dtype = torch.float32
    """float32 or bfloat16"""

    @property
    def inner(self) -> int:
        """Numbers of a token's result, H * P."""
        return len(self.decay) * self.head_dim

    @property
    def width(self) -> int:
        """Numbers that a token brings."""
        return 2 * self.inner + 2 * self.groups * self.state_size + len(self.decay)


class DeltaNet(NamedTuple):
    """Mixer of gated DeltaNet (Yang, Kautz, Hatamizadeh 2024) between its projections.

    There are H heads of V values and G heads of K keys and queries, each for H / G heads of values one after another.
    A token brings inputs of the convolution [2 * G * K + H * V], a gate [H * V], rates [H] and time steps [H], side by
    side. Behind the convolution the inputs are q, k and v; q and k have a norm of 1 over each head, and q then one of
    K^-0.5. With g = exp(decay * softplus(time step + dt_bias)) the state s [K, V] of each head becomes
    g * s + k * d for d = sigmoid(rate) * (v - k · (g * s)), and the result is q · s. It has an RMS norm over each head
    and is multiplied by silu(gate). The layer's state is that of the convolution, then s [H, K, V] in the dtype of
    states, to which it is rounded behind every token.
    """

    conv: ShortConv
    decay: Tensor
    """float32 [H]: negative numbers"""
    dt_bias: Tensor
    """float32 [H]"""
    key_heads: int
    key_dim: int
    value_dim: int
    norm: Tensor
    """float32 [V]"""
    eps: float
    state_dtype: torch.dtype = torch.float32
    """float32 or bfloat16"""

    @property
    def inner(self) -> int:
        """Numbers of a token's result, H * V."""
        return len(self.decay) * self.value_dim

    @property
    def width(self) -> int:
        """Numbers that a token brings."""
        return 2 * (self.key_heads * self.key_dim + self.inner + len(self.decay))
