"""Keys and values in float8 (e4m3): a layer's KV head has a scale for its keys and another for its values.

A layer that keeps latents has a scale for these and another for their rotated keys, as if it had one KV head.

    k[token, head, i] ≈ stored[token, head, i] * scale[keys, head]        v likewise

Scales are fixed before the first token is stored, so that what is stored of a token depends on that token alone. They
come from the checkpoint, or from what a fixed prompt's keys and values reach (``fixed_scales``). Beyond its scale's
range a number becomes the largest of float8, or its negative; NaN stays NaN. Attention multiplies queries by the scale
of keys and results by that of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncengine.kernels.float8 import FLOAT8, FLOAT8_MAX

MARGIN = 2.0
"""Keys and values may be so many times as large as any that the scales were made of. That takes one of e4m3's 15
binades of normal numbers; the next power of two takes up to one more."""


def fixed_scales(tops: Tensor) -> Tensor:
    """float32, of ``tops``, the greatest absolute values: the next power of two that takes MARGIN times as much.

    Powers of two round nothing, and tops that differ in their last bits, as two machines' do, have one scale. Heads
    that are zero everywhere, or not finite, have the scale 1.
    """
    usable = tops.isfinite() & (tops > 1e-30)
    exponent = torch.frexp(torch.where(usable, tops.float() * (MARGIN / FLOAT8_MAX), 0.5)).exponent
    return ((exponent + 127) << 23).view(torch.float32)  # by its bits: a device's power of two may be off in the last


def with_inverses(scales: Tensor) -> Tensor:
    """Scales [..., 2, Hk] of keys and of values as kernels take them: float32 [..., 2, 2, Hk], scales and inverses.

    A kernel multiplies by the inverse, so that all kernels store the same.
    """
    return torch.stack((scales, torch.ones_like(scales) / scales), -2)


def quantize_heads(x: Tensor, scale: Tensor) -> Tensor:
    """x [T, Hk, D] in float8; ``scale`` is float32 [2, Hk], the heads' scales and their inverses."""
    return (x.float() * scale[1][:, None]).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
