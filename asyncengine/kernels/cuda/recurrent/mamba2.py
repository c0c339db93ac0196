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

from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, wait
from asyncengine.kernels.cuda.recurrent.conv import check_states, convolve
from asyncengine.kernels.cuda.recurrent.gate import gate_rows, softplus
from asyncengine.kernels.cuda.rows.tensors import check
from asyncengine.kernels.cuda.step.tensors import DeviceStep
from asyncengine.kernels.states import Mamba2, ShortConv, state_floats

_NUMBERS = 8
"""Numbers of a head for one program of a warp: 32 numbers of the state a thread where its size is 128."""


def mamba2(
    x: Tensor, mixer: Mamba2, states: Tensor, step: DeviceStep, *, single: bool = False, pdl: bool = False
) -> Tensor:
    """``Ops.mamba2`` of x [T, mixer.width] with states uint8 [slots, bytes]: [T, mixer.inner].

    ``single``: every row of the step has one token, or none. Raises ValueError for tensors that do not fit.
    """
    heads, dim, size, inner = len(mixer.decay), mixer.head_dim, mixer.state_size, mixer.inner
    if x.shape[1] != mixer.width:
        raise ValueError(f"x must be [{step.num_tokens}, {mixer.width}], got {list(x.shape)}")
    for name in ("decay", "skip", "dt_bias"):
        check(getattr(mixer, name), torch.float32, (heads,), name)
    first = ShortConv.state_bytes(*mixer.conv.weight.shape)
    check_states(states, first + inner * size * mixer.state_dtype.itemsize, step)
    mixed = convolve(x[:, inner:], mixer.conv, states, step, single=single, dtype=torch.float32, pdl=pdl)
    kept = state_floats(states, first, inner * size, mixer.state_dtype)
    out = torch.empty(len(x), inner, dtype=torch.float32, device=x.device)
    numbers = min(_NUMBERS, triton.next_power_of_2(dim))
    _mamba_kernel[(step.num_rows, heads, triton.cdiv(dim, numbers))](
        mixed,
        x,
        kept,
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
        *mixer.dt_range,
        HEADS=heads,
        GROUPS=mixer.groups,
        DIM=dim,
        SIZE=size,
        DIM_TILE=numbers,
        SIZE_TILE=triton.next_power_of_2(size),
        num_warps=1,
        **launch_options(pdl),
    )
    gate, first_norm = x[:, :inner], mixer.norm_before_gate
    return gate_rows(out, gate, mixer.norm, mixer.eps, mixer.groups, step, norm_first=first_norm, pdl=pdl)


@kernel
def _mamba_kernel(
    mixed,
    x,
    states,
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
    shortest,
    longest,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    DIM_TILE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(row_query_len + row)
    if length > 0:
        n = tl.arange(0, SIZE_TILE)
        p = tl.program_id(2) * DIM_TILE + tl.arange(0, DIM_TILE)
        in_size, in_dim = n < SIZE, p < DIM
        inside = in_size[:, None] & in_dim[None, :]
        INNER: tl.constexpr = HEADS * DIM
        CHANNELS: tl.constexpr = INNER + 2 * GROUPS * SIZE
        group = head // (HEADS // GROUPS)
        begun = tl.load(row_context_len + row) > 0
        place = states + tl.load(row_slot + row).to(tl.int64) * state_stride
        place += head * SIZE * DIM + n[:, None] * DIM + p[None, :]
        state = tl.load(place, mask=inside & begun, other=0.0).to(tl.float32)
        token = tl.load(row_query_start + row).to(tl.int64)
        fades, bias, own = tl.load(decay + head), tl.load(dt_bias + head), tl.load(skip + head)
        for _ in range(length):
            inputs = mixed + token * CHANNELS
            value = tl.load(inputs + head * DIM + p, mask=in_dim, other=0.0)
            b = tl.load(inputs + INNER + group * SIZE + n, mask=in_size, other=0.0)
            c = tl.load(inputs + INNER + (GROUPS + group) * SIZE + n, mask=in_size, other=0.0)
            time = softplus(tl.load(x + token * x_stride + INNER + CHANNELS + head).to(tl.float32) + bias)
            time = tl.minimum(tl.maximum(time, shortest), longest)
            new = tl.exp(time * fades) * state + b[:, None] * (time * value)[None, :]
            y = tl.sum(c[:, None] * new, 0) + own * value
            tl.store(out + token * INNER + head * DIM + p, y, mask=in_dim)
            state = new.to(states.dtype.element_ty).to(tl.float32)
            token += 1
        tl.store(place, state.to(states.dtype.element_ty), mask=inside)
