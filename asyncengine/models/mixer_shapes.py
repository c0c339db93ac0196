"""Shapes of mixers with a state, as a config names them."""

from __future__ import annotations

import math
from typing import NamedTuple

from asyncengine.kernels.ops import StateSpec
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
        of_conv = ShortConv.state_bytes(self.conv_size, self.channels)
        return StateSpec(of_conv + -(-self.inner * self.state_size * 4 // 16) * 16)


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
