"""Mamba-2 on the GPU: each program goes through the tokens of a row with a part of a head's state in registers.

The numbers of a head are independent of each other, so that programs share a head by them. Every token is computed by
the same operations in the same order: no bit of a result depends on chunks or on other rows.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, wait
from asyncengine.kernels.cuda.recurrent.chunks import LOOPED, computes_chunks, mamba_chunks
from asyncengine.kernels.cuda.recurrent.conv import begin_mixer, convolve_kept, convolve_token
from asyncengine.kernels.cuda.recurrent.gate import gate_rows, softplus
from asyncengine.kernels.cuda.recurrent.tiles import head_tile
from asyncengine.kernels.cuda.rows.tensors import check
from asyncengine.kernels.cuda.step.tensors import DeviceStep
from asyncengine.kernels.states import Mamba2


def mamba2(
    x: Tensor,
    mixer: Mamba2,
    states: Tensor,
    step: DeviceStep,
    gpu: Gpu,
    *,
    single: bool = False,
    invariant: bool = False,
    pdl: bool = False,
) -> Tensor:
    """``Ops.mamba2`` of x [T, mixer.width] with states uint8 [slots, bytes]: [T, mixer.inner].

    ``single``: every row of the step has one token, or none. ``invariant``: sums are in an order that does not depend
    on the number of rows. Raises ValueError for tensors that do not fit.
    """
    heads, dim, size, inner, conv = len(mixer.decay), mixer.head_dim, mixer.state_size, mixer.inner, mixer.conv
    if x.shape[1] != mixer.width:
        raise ValueError(f"x must be [{step.num_tokens}, {mixer.width}], got {list(x.shape)}")
    for name in ("decay", "skip", "dt_bias"):
        check(getattr(mixer, name), torch.float32, (heads,), name)
    inputs = x[:, inner:]
    mixed, kept, floats = begin_mixer(x, inputs, mixer, size, states, step, single=single, pdl=pdl)
    out = torch.empty(len(x), inner, dtype=torch.float32, device=x.device)
    chunked = not single and computes_chunks(x, mixer.state_dtype, size, gpu, invariant=invariant)
    tile, warps = head_tile(step.num_rows * heads, dim, single=single and not invariant)
    _mamba_kernel[(step.num_rows, heads, triton.cdiv(dim, tile))](
        mixed,
        x,
        kept,
        floats,
        conv.weight,
        conv.weight if conv.bias is None else conv.bias,
        mixer.decay,
        mixer.skip,
        mixer.dt_bias,
        step.row_slot,
        step.row_query_start,
        step.row_query_len,
        step.row_context_len,
        out,
        x.stride(0),
        kept.stride(0),
        floats.stride(0),
        *mixer.dt_range,
        HEADS=heads,
        GROUPS=mixer.groups,
        DIM=dim,
        SIZE=size,
        DIM_TILE=tile,
        SIZE_TILE=triton.next_power_of_2(size),
        LONGEST=LOOPED if chunked else 0,
        CONV=len(conv.weight) if single else 0,
        BIAS=conv.bias is not None,
        num_warps=warps,
        **launch_options(pdl),
    )
    if chunked:
        mamba_chunks(mixed, x, mixer, kept, step, out, pdl=pdl)
    gate, shifted = x[:, :inner], (inputs, floats, conv) if single else None
    return gate_rows(
        out, gate, mixer.norm, mixer.eps, mixer.groups, step, norm_first=mixer.norm_before_gate, shifted=shifted,
        pdl=pdl,
    )  # fmt: skip


@kernel
def _mamba_kernel(
    mixed,
    x,
    states,
    conv_states,
    weight,
    conv_bias,
    decay,
    skip,
    dt_bias,
    row_slot,
    row_query_start,
    row_query_len,
    row_context_len,
    out,
    x_stride,
    state_stride,
    conv_stride,
    shortest,
    longest,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    DIM_TILE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    LONGEST: tl.constexpr,
    CONV: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each row's tokens in turn, of rows of up to LONGEST tokens, or 0 for any.

    With CONV, the size of the convolution, a row has one token, which is convolved here.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(row_query_len + row)
    used = (length > 0) & ((LONGEST == 0) | (length <= LONGEST))
    n = tl.arange(0, SIZE_TILE)
    p = tl.program_id(2) * DIM_TILE + tl.arange(0, DIM_TILE)
    in_size, in_dim = n < SIZE, p < DIM
    inside = in_size[:, None] & in_dim[None, :]
    INNER: tl.constexpr = HEADS * DIM
    CHANNELS: tl.constexpr = INNER + 2 * GROUPS * SIZE
    of_value, of_b = head * DIM + p, INNER + head // (HEADS // GROUPS) * SIZE + n
    of_c = of_b + GROUPS * SIZE
    begun = used & (tl.load(row_context_len + row) > 0)
    slot = tl.load(row_slot + row).to(tl.int64)
    place = states + slot * state_stride
    place += head * SIZE * DIM + n[:, None] * DIM + p[None, :]
    state = tl.load(place, mask=inside & begun, other=0.0).to(tl.float32)  # it was written a step ago
    token = tl.load(row_query_start + row).to(tl.int64)
    fades, bias, own = tl.load(decay + head), tl.load(dt_bias + head), tl.load(skip + head)
    if CONV > 0:
        before = conv_states + slot * conv_stride
        kept_value = convolve_kept(before, weight, conv_bias, of_value, in_dim, begun, CHANNELS, CONV, BIAS)
        kept_b = convolve_kept(before, weight, conv_bias, of_b, in_size, begun, CHANNELS, CONV, BIAS)
        kept_c = convolve_kept(before, weight, conv_bias, of_c, in_size, begun, CHANNELS, CONV, BIAS)
    wait(PDL)
    if used:
        for _ in range(length):
            if CONV > 0:
                source = x + token * x_stride + INNER
                value = convolve_token(source, kept_value, of_value, in_dim)
                b = convolve_token(source, kept_b, of_b, in_size)
                c = convolve_token(source, kept_c, of_c, in_size)
            else:
                inputs = mixed + token * CHANNELS
                value = tl.load(inputs + of_value, mask=in_dim, other=0.0)
                b = tl.load(inputs + of_b, mask=in_size, other=0.0)
                c = tl.load(inputs + of_c, mask=in_size, other=0.0)
            time = softplus(tl.load(x + token * x_stride + INNER + CHANNELS + head).to(tl.float32) + bias)
            time = tl.minimum(tl.maximum(time, shortest), longest)
            new = tl.exp(time * fades) * state + b[:, None] * (time * value)[None, :]
            y = tl.sum(c[:, None] * new, 0) + own * value
            tl.store(out + token * INNER + head * DIM + p, y, mask=in_dim)
            state = new.to(states.dtype.element_ty).to(tl.float32)
            token += 1
        tl.store(place, state.to(states.dtype.element_ty), mask=inside)
