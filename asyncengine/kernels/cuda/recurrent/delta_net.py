"""Gated DeltaNet on the GPU: each program goes through the tokens of a row with a part of a head's state in registers.

A head's values are independent of each other, so that programs share a head by its values. Every token is computed by
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
from asyncengine.kernels.states import DeltaNet, ShortConv, state_floats

_VALUES = 8
"""Values of a head for one program of a warp: 32 numbers of the state a thread where keys have 128."""


def delta_net(
    x: Tensor, mixer: DeltaNet, states: Tensor, step: DeviceStep, *, single: bool = False, pdl: bool = False
) -> Tensor:
    """``Ops.delta_net`` of x [T, mixer.width] with states uint8 [slots, bytes]: [T, mixer.inner].

    ``single``: every row of the step has one token, or none. Raises ValueError for tensors that do not fit.
    """
    heads, dim, size, inner = len(mixer.decay), mixer.value_dim, mixer.key_dim, mixer.inner
    if x.shape[1] != mixer.width:
        raise ValueError(f"x must be [{step.num_tokens}, {mixer.width}], got {list(x.shape)}")
    check(mixer.decay, torch.float32, (heads,), "decay")
    check(mixer.dt_bias, torch.float32, (heads,), "dt_bias")
    first = ShortConv.state_bytes(*mixer.conv.weight.shape)
    check_states(states, first + inner * size * mixer.state_dtype.itemsize, step)
    mixed = convolve(x, mixer.conv, states, step, single=single, dtype=torch.float32, pdl=pdl)
    kept = state_floats(states, first, inner * size, mixer.state_dtype)
    out = torch.empty(len(x), inner, dtype=torch.float32, device=x.device)
    values = min(_VALUES, triton.next_power_of_2(dim))
    _delta_kernel[(step.num_rows, heads, triton.cdiv(dim, values))](
        mixed,
        x,
        kept,
        mixer.decay,
        mixer.dt_bias,
        step.row_slot,
        step.row_query_start,
        step.row_query_len,
        step.row_context_len,
        out,
        x.stride(0),
        kept.stride(0),
        size**-0.5,
        HEADS=heads,
        KEY_HEADS=mixer.key_heads,
        KEYS=size,
        VALUES=dim,
        KEY_TILE=triton.next_power_of_2(size),
        VALUE_TILE=values,
        num_warps=1,
        **launch_options(pdl),
    )
    gate = x[:, mixed.shape[1] : mixed.shape[1] + inner]
    return gate_rows(out, gate, mixer.norm, mixer.eps, heads, step, norm_first=True, pdl=pdl)


@triton.jit
def _unit(value):
    """A vector with a norm of 1."""
    return value * tl.rsqrt(tl.sum(value * value, 0) + 1e-6)


@kernel
def _delta_kernel(
    mixed,
    x,
    states,
    decay,
    dt_bias,
    row_slot,
    row_query_start,
    row_query_len,
    row_context_len,
    out,
    x_stride,
    state_stride,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(row_query_len + row)
    if length > 0:
        key = tl.arange(0, KEY_TILE)
        value = tl.program_id(2) * VALUE_TILE + tl.arange(0, VALUE_TILE)
        in_keys, in_values = key < KEYS, value < VALUES
        inside = in_keys[:, None] & in_values[None, :]
        CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
        RATES: tl.constexpr = CHANNELS + HEADS * VALUES
        keys = head // (HEADS // KEY_HEADS) * KEYS + key
        values = head * VALUES + value
        begun = tl.load(row_context_len + row) > 0
        place = states + tl.load(row_slot + row).to(tl.int64) * state_stride
        place += head * KEYS * VALUES + key[:, None] * VALUES + value[None, :]
        state = tl.load(place, mask=inside & begun, other=0.0).to(tl.float32)
        token = tl.load(row_query_start + row).to(tl.int64)
        fades, bias = tl.load(decay + head), tl.load(dt_bias + head)
        for _ in range(length):
            inputs = mixed + token * CHANNELS
            q = _unit(tl.load(inputs + keys, mask=in_keys, other=0.0)) * scale
            k = _unit(tl.load(inputs + KEY_HEADS * KEYS + keys, mask=in_keys, other=0.0))
            v = tl.load(inputs + 2 * KEY_HEADS * KEYS + values, mask=in_values, other=0.0)
            rate = tl.sigmoid(tl.load(x + token * x_stride + RATES + head).to(tl.float32))
            time = tl.load(x + token * x_stride + RATES + HEADS + head).to(tl.float32) + bias
            kept = tl.exp(fades * softplus(time)) * state
            change = rate * (v - tl.sum(k[:, None] * kept, 0))
            new = kept + k[:, None] * change[None, :]
            tl.store(out + token * (HEADS * VALUES) + values, tl.sum(q[:, None] * new, 0), mask=in_values)
            state = new.to(states.dtype.element_ty).to(tl.float32)
            token += 1
        tl.store(place, state.to(states.dtype.element_ty), mask=inside)
