"""Shapes of mixers with a state and of latent attention, as a config names them."""

from __future__ import annotations

import math
from typing import NamedTuple

from asyncengine.kernels.ops import LatentSpec, StateSpec
from asyncengine.kernels.states import ShortConv


class StateSpace(NamedTuple):
    """Mixers of Mamba-2 (``kernels.states.Mamba2``), and their names in checkpoints."""

    num_heads: int
    head_dim: int
    state_size: int
    groups: int
    conv_size: int
    eps: float
    conv_bias: bool = True
    input_bias: bool = False
    output_bias: bool = False
    dt_range: tuple[float, float] = (0.0, math.inf)
    normed: bool = True
    """The result has a norm."""
    norm_before_gate: bool = False
    module: str = "mamba"
    half: bool = False
    """The recurrence's state is in bfloat16, and otherwise in float32."""

    @property
    def inner(self) -> int:
        """Numbers of a token's result."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def spec(self) -> StateSpec:
        """The state of a layer."""
        return _spec(ShortConv.state_bytes(self.conv_size, self.channels), self.inner * self.state_size, self.half)


class Delta(NamedTuple):
    """Mixers of gated DeltaNet (``kernels.states.DeltaNet``)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int
    fused: bool = False
    """The checkpoint holds the rows of projections by heads of keys."""
    half: bool = False
    """The recurrence's state is in bfloat16, and otherwise in float32."""

    @property
    def inner(self) -> int:
        """Numbers of a token's result."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.key_heads * self.key_dim

    @property
    def spec(self) -> StateSpec:
        """The state of a layer."""
        return _spec(ShortConv.state_bytes(self.conv_size, self.channels), self.inner * self.key_dim, self.half)


class Latent(NamedTuple):
    """Latent attention (``kernels.latent.LatentLayer``)."""

    rank: int
    """Latent numbers of a token, of which keys and values are made."""
    rope_dim: int
    """Numbers of a head's query, and of the one key of all heads, that are rotated."""
    key_dim: int
    """Numbers of a head's query, and of its key, that are not."""
    value_dim: int
    query_rank: int = 0
    """Latent numbers of a token of which its queries are made; 0: they are made of its residual."""

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query."""
        return self.key_dim + self.rope_dim

    @property
    def spec(self) -> LatentSpec:
        """Cache of a layer."""
        return LatentSpec(self.rank + self.rope_dim)


def _spec(of_conv: int, numbers: int, half: bool) -> StateSpec:
    return StateSpec(of_conv + -(-numbers * (2 if half else 4) // 16) * 16)


class Multipliers(NamedTuple):
    """Factors of Falcon-H1."""

    attention: float
    """on the product behind attention"""
    mixer_input: float
    """on what a mixer reads"""
    mixer_parts: tuple[float, ...]
    """on a mixer's gate, values, b, c and time steps"""
    mixer: float
    """on the product behind a mixer"""
    mlp: tuple[float, ...]
    """on the gate of an MLP, and on its result"""
