"""Rotary position embedding (Su et al. 2021) and the ways of stretching it that checkpoints use."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeConfig:
    """Base and scaling of the rotary frequencies, as config.json gives them."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Factor on cosines and sines; yarn only."""


def rotary_table(rope: RopeConfig, head_dim: int, max_positions: int) -> Tensor:
    """float32 [max_positions, head_dim]: the cosines of a position, then its sines."""
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * _frequencies(rope, head_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor


def _frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """float32 [dim / 2], in radians per position."""
    plain = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    match rope.kind:
        # "dynamic" scales the base only beyond max_position_embeddings, where this engine never goes.
        case "default" | "dynamic":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain, dim)
    raise AssertionError(rope.kind)  # the config reader rejected it


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1: frequencies with few turns in the original context are slowed, with a ramp in between."""
    turns = rope.original_max_positions * plain / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * plain + (1 - keep) * plain / rope.factor


def _yarn(rope: RopeConfig, plain: Tensor, dim: int) -> Tensor:
    """YaRN (Peng et al. 2023), "NTK by parts": a ramp over the dimensions instead of over the frequencies."""

    def dimension_with(turns: float) -> float:
        return dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_with(rope.beta_fast), dimension_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    slow = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return slow * plain / rope.factor + (1 - slow) * plain


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """The factor on cosines and sines where config.json does not state it."""

    def of(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    return of(mscale) / of(mscale_all_dim) if mscale and mscale_all_dim else of(1.0)
