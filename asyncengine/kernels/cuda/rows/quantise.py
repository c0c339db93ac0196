"""Rows to float8 on the GPU, with the operation that makes them: a norm, an activation or none.

A row's largest element must be known before any is stored, so a program has a whole row in registers.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, start_next, wait
from asyncengine.kernels.float8 import FLOAT8, FLOAT8_MAX, SMALLEST_TOP, Quantized
from asyncengine.kernels.ops import Activation, Norm

_SMALLEST_TOP = tl.constexpr(SMALLEST_TOP)
_FLOAT8_MAX = tl.constexpr(FLOAT8_MAX)


@triton.jit
def row_scale(top):
    """The factor that takes a row whose largest element is ``top`` to float8's range, and the scale that leads back.

    The factor is rounded as exactly as the twin's, so that the same elements come out.
    """
    top = tl.maximum(top, _SMALLEST_TOP)
    return tl.div_rn(tl.full(top.shape, _FLOAT8_MAX, tl.float32), top), top * (1 / _FLOAT8_MAX)


@kernel
def _quantize_kernel(
    x,
    norm_weight,
    values,
    scale,
    x_stride,
    eps,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < WIDTH
    if NORM:
        gain = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    inverse_rms = 1.0
    if NORM:
        # A row's scale takes in the norm's own factor: no element is multiplied by it.
        inverse_rms = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
        value *= gain
    if GATED:
        up = tl.load(x + row * x_stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        # Rounded as it is where the projection's own kernel activates.
        value = (value * tl.sigmoid(value) * up).to(x.dtype.element_ty).to(tl.float32)
    factor, back = row_scale(tl.max(tl.abs(value), 0, keep_dims=True))
    tl.store(values + row * WIDTH + column, (value * factor).to(tl.float8e4nv), mask=inside)
    tl.store(scale + row + tl.arange(0, 1), back * inverse_rms)


def quantize_rows(
    x: Tensor, norm: Norm | None = None, activation: Activation | None = None, *, pdl: bool = False
) -> Quantized:
    """The rows of x [M, N], which may be strided, after an RMS norm or, of [M, 2N], after silu_mul."""
    gated = activation == "silu_mul"
    if activation is not None and not gated:
        raise ValueError(f"{activation} makes no float8 rows")
    if norm is not None and (norm.bias is not None or gated):
        raise ValueError("float8 rows come from an RMS norm or from an activation")
    if x.dtype not in (torch.float32, torch.bfloat16) or x.dim() != 2 or x.stride(1) != 1 or (gated and x.shape[1] % 2):
        raise ValueError(f"x must have contiguous rows, got {x.dtype} {list(x.shape)} with strides {x.stride()}")
    width = x.shape[1] // (1 + gated)
    if norm is not None and (norm.weight.shape != (width,) or not norm.weight.is_contiguous()):
        raise ValueError(f"the norm must be contiguous [{width}], got {list(norm.weight.shape)}")
    values = torch.empty((len(x), width), dtype=FLOAT8, device=x.device)
    scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    tile = triton.next_power_of_2(width)
    _quantize_kernel[(len(x),)](
        x,
        x if norm is None else norm.weight,
        values,
        scale,
        x.stride(0),
        0.0 if norm is None else norm.eps,
        NORM=norm is not None,
        GATED=gated,
        WIDTH=width,
        TILE=tile,
        num_warps=min(16, max(1, tile // 256)),
        **launch_options(pdl),
    )
    return Quantized(values, scale)
