"""Rotary position embedding (Su et al. 2021) and the ways of stretching it that checkpoints use."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeConfig:
    """Base and scaling of the rotary frequencies, as config.json gives them."""

    dim: int
    """Elements of a head that are rotated, an even number."""
    interleaved: bool = False
    """Neighbours 2i and 2i + 1 are rotated together; otherwise i and i + dim / 2."""
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
    """Factor on cosines and sines; yarn and longrope only."""
    turning: int = 0
    """proportional: pairs of elements that turn, the first ones; the other pairs have frequency 0."""
    short_factor: tuple[float, ...] = ()
    """longrope: divisors of the frequencies in a context of at most ``original_max_positions``, [dim / 2]."""
    long_factor: tuple[float, ...] = ()
    """longrope: those in a longer one."""


def rotary_table(rope: RopeConfig | None, head_dim: int, max_positions: int) -> Tensor:
    """float32 [max_positions, head_dim]: the cosines of a position, then its sines.

    Elements that are not rotated have cosine 1 and sine 0; without ``rope`` these are all.
    """
    table = torch.zeros(max_positions, head_dim)
    table[:, : head_dim // 2] = 1
    if rope is not None:
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * _frequencies(rope, max_positions)
        halves = table.view(max_positions, 2, head_dim // 2)
        halves[:, 0, : rope.dim // 2] = angles.cos() * rope.attention_factor
        halves[:, 1, : rope.dim // 2] = angles.sin() * rope.attention_factor
    return table


def head_order(rope: RopeConfig | None, head_dim: int) -> Tensor | None:
    """int64 [head_dim]: the element of a checkpoint's head at each place of a head here; None if they agree.

    Kernels rotate element i together with i + head_dim / 2. Where a checkpoint pairs neighbours, or rotates a part of
    each head only, the rows of its projections of queries and keys take another order within each head when they are
    read. A score is a sum over the elements of a head, so it stays the same.
    """
    if rope is None or (rope.dim == head_dim and not rope.interleaved):
        return None
    rotated, rest = torch.arange(rope.dim), torch.arange(rope.dim, head_dim)
    first, second = (rotated[0::2], rotated[1::2]) if rope.interleaved else rotated.chunk(2)
    return torch.cat((first, rest[: len(rest) // 2], second, rest[len(rest) // 2 :]))


def _frequencies(rope: RopeConfig, max_positions: int) -> Tensor:
    """float32 [dim / 2], in radians per position."""
    dim = rope.dim
    periods = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    plain = 1.0 / periods
    match rope.kind:
        # "dynamic" scales the base only beyond max_position_embeddings, where this engine never goes.
        case "default" | "dynamic":
            return plain
        case "linear":
            return plain / rope.factor
        case "proportional":
            return torch.where(torch.arange(dim // 2) < rope.turning, plain / rope.factor, 0)
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain, dim)
        case "longrope":
            # One table for all lengths: keys of the cache were rotated before the length of their sequence was known.
            within = max_positions <= rope.original_max_positions
            return 1.0 / (torch.tensor(rope.short_factor if within else rope.long_factor) * periods)
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


def longrope_attention_factor(factor: float, original_max_positions: int) -> float:
    """The same for longrope; ``original_max_positions`` is at least 2."""
    return math.sqrt(1 + math.log(factor) / math.log(original_max_positions)) if factor > 1 else 1.0
