"""Transforms of scores before the softmax, for every attention kernel in Triton.

The softmax is in base 2: scores are multiplied by log2(e), which ``base2_scale`` puts into their scale. A transform of
scores is a constant of ``score_constants`` and lines of ``transform_scores``; kernels only pass them on.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

import math

import triton
import triton.language as tl

from asyncengine.kernels.ops import AttentionLayer

LOG2_E = math.log2(math.e)
_LOG2_E = tl.constexpr(LOG2_E)


def base2_scale(layer: AttentionLayer) -> float:
    return layer.scale * LOG2_E


def score_constants(layer: AttentionLayer) -> dict[str, float]:
    """Constants of a kernel that calls ``transform_scores``; SOFTCAP is in base 2."""
    return {"SOFTCAP": layer.softcap * LOG2_E}


@triton.jit
def with_sinks(total, peak, sinks, head, there):
    """Sums of weights, whose peaks are of base 2, with those of the sinks of ``head``; a softmax ends with it."""
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head, mask=there, other=0.0) * _LOG2_E - peak)
    return total


@triton.jit
def transform_scores(product, scale, SOFTCAP: tl.constexpr):
    """Scores of base 2 from the products of queries and keys."""
    score = product * scale
    if SOFTCAP != 0.0:
        # tanh(|x|) is (1 - e^-2|x|) / (1 + e^-2|x|), which overflows for no x.
        decay = tl.exp2(tl.abs(score) * (-2.0 * _LOG2_E / SOFTCAP))
        capped = SOFTCAP * ((1.0 - decay) / (1.0 + decay))
        score = tl.where(score < 0, -capped, capped)
    return score
