"""Keys and values in float8 for kernels (see ``asyncengine/kernels/float8_cache.py``).

A kernel takes ``LayerKVCache.scales`` as a pointer to [2, 2, KV_HEADS], and whether there are any as the constant
FLOAT8. It stores ``to_float8`` of a head, and attends with the numbers as they lie: scores are scaled by ``key_scale``
as well, sums of values by ``value_scale``. A step's own keys and values take part as they are stored, so that it does
not matter which kernel reads them.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.rows.tensors import check
from asyncengine.kernels.float8 import FLOAT8, FLOAT8_MAX

_FLOAT8_MAX = tl.constexpr(FLOAT8_MAX)


def cached_dtype(dtype: torch.dtype, scales: Tensor | None) -> torch.dtype:
    """Return the dtype of keys and values in a cache, for a model in ``dtype``."""
    return dtype if scales is None else FLOAT8


def check_scales(scales: Tensor | None, kv_heads: int) -> None:
    if scales is not None:
        check(scales, torch.float32, (2, 2, kv_heads), "scales")


@triton.jit
def key_scale(scales, head, KV_HEADS: tl.constexpr):
    return tl.load(scales + head)


@triton.jit
def value_scale(scales, head, KV_HEADS: tl.constexpr):
    return tl.load(scales + 2 * KV_HEADS + head)


@triton.jit
def key_inverse(scales, head, KV_HEADS: tl.constexpr):
    return tl.load(scales + KV_HEADS + head)


@triton.jit
def value_inverse(scales, head, KV_HEADS: tl.constexpr):
    return tl.load(scales + 3 * KV_HEADS + head)


@triton.jit
def to_float8(x, inverse):
    """x * inverse, to nearest; what is beyond float8's range becomes its largest, NaN stays NaN."""
    y = x.to(tl.float32) * inverse
    y = tl.where(y > _FLOAT8_MAX, _FLOAT8_MAX, tl.where(y < -_FLOAT8_MAX, -_FLOAT8_MAX, y))
    return y.to(tl.float8e4nv)


@triton.jit
def for_products(x):
    """Queries in the dtype in which they meet keys in float8: hardware makes these float16, and not bfloat16."""
    return x.to(tl.float16) if x.dtype == tl.bfloat16 else x
