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

from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, wait
from asyncengine.kernels.cuda.recurrent.chunks import LOOPED, computes_chunks, delta_chunks
from asyncengine.kernels.cuda.recurrent.conv import begin_mixer, convolve_kept, convolve_token
from asyncengine.kernels.cuda.recurrent.delta_step import delta_step, takes_step
from asyncengine.kernels.cuda.recurrent.gate import gate_rows, softplus
from asyncengine.kernels.cuda.recurrent.tiles import head_tile
from asyncengine.kernels.cuda.rows.tensors import check
from asyncengine.kernels.cuda.step.tensors import DeviceStep
from asyncengine.kernels.states import DeltaNet


def delta_net(
    x: Tensor,
    mixer: DeltaNet,
    states: Tensor,
    step: DeviceStep,
    gpu: Gpu,
    *,
    single: bool = False,
    invariant: bool = False,
    pdl: bool = False,
) -> Tensor:
    """``Ops.delta_net`` of x [T, mixer.width] with states uint8 [slots, bytes]: [T, mixer.inner].

    ``single``: every row of the step has one token, or none. ``invariant``: sums are in an order that does not depend
    on the number of rows. Raises ValueError for tensors that do not fit.
    """
    heads, dim, size, inner, conv = len(mixer.decay), mixer.value_dim, mixer.key_dim, mixer.inner, mixer.conv
    if x.shape[1] != mixer.width:
        raise ValueError(f"x must be [{step.num_tokens}, {mixer.width}], got {list(x.shape)}")
    check(mixer.decay, torch.float32, (heads,), "decay")
    check(mixer.dt_bias, torch.float32, (heads,), "dt_bias")
    mixed, kept, floats = both = begin_mixer(x, x, mixer, size, states, step, single=single, pdl=pdl)
    if single and not invariant and takes_step(mixer, len(x), gpu):
        return delta_step(x, mixer, both, step, gpu, pdl=pdl)
    channels = conv.weight.shape[1]
    out = torch.empty(len(x), inner, dtype=torch.float32, device=x.device)
    chunked = not single and computes_chunks(x, mixer.state_dtype, size, gpu, invariant=invariant)
    tile, warps = head_tile(step.num_rows * heads, dim, single=single and not invariant)
    _delta_kernel[(step.num_rows, heads, triton.cdiv(dim, tile))](
        mixed,
        x,
        kept,
        floats,
        conv.weight,
        conv.weight if conv.bias is None else conv.bias,
        mixer.decay,
        mixer.dt_bias,
        step.row_slot,
        step.row_query_start,
        step.row_query_len,
        step.row_context_len,
        out,
        x.stride(0),
        kept.stride(0),
        floats.stride(0),
        size**-0.5,
        HEADS=heads,
        KEY_HEADS=mixer.key_heads,
        KEYS=size,
        VALUES=dim,
        KEY_TILE=triton.next_power_of_2(size),
        VALUE_TILE=tile,
        LONGEST=LOOPED if chunked else 0,
        CONV=len(conv.weight) if single else 0,
        BIAS=conv.bias is not None,
        num_warps=warps,
        **launch_options(pdl),
    )
    if chunked:
        delta_chunks(mixed, x, mixer, kept, step, out, pdl=pdl)
    gate, shifted = x[:, channels : channels + inner], (x, floats, conv) if single else None
    return gate_rows(out, gate, mixer.norm, mixer.eps, heads, step, norm_first=True, shifted=shifted, pdl=pdl)


@triton.jit
def _unit(value):
    """A vector with a norm of 1."""
    return value * tl.rsqrt(tl.sum(value * value, 0) + 1e-6)


@kernel
def _delta_kernel(
    mixed,
    x,
    states,
    conv_states,
    weight,
    conv_bias,
    decay,
    dt_bias,
    row_slot,
    row_query_start,
    row_query_len,
    row_context_len,
    out,
    x_stride,
    state_stride,
    conv_stride,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
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
    key = tl.arange(0, KEY_TILE)
    value = tl.program_id(2) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    in_keys, in_values = key < KEYS, value < VALUES
    inside = in_keys[:, None] & in_values[None, :]
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    RATES: tl.constexpr = CHANNELS + HEADS * VALUES
    keys = head // (HEADS // KEY_HEADS) * KEYS + key
    values = head * VALUES + value
    begun = used & (tl.load(row_context_len + row) > 0)
    slot = tl.load(row_slot + row).to(tl.int64)
    place = states + slot * state_stride
    place += head * KEYS * VALUES + key[:, None] * VALUES + value[None, :]
    state = tl.load(place, mask=inside & begun, other=0.0).to(tl.float32)  # it was written a step ago
    token = tl.load(row_query_start + row).to(tl.int64)
    fades, bias = tl.load(decay + head), tl.load(dt_bias + head)
    if CONV > 0:
        before = conv_states + slot * conv_stride
        of_q, of_k, of_v = keys, keys + KEY_HEADS * KEYS, values + 2 * KEY_HEADS * KEYS
        kept_q = convolve_kept(before, weight, conv_bias, of_q, in_keys, begun, CHANNELS, CONV, BIAS)
        kept_k = convolve_kept(before, weight, conv_bias, of_k, in_keys, begun, CHANNELS, CONV, BIAS)
        kept_v = convolve_kept(before, weight, conv_bias, of_v, in_values, begun, CHANNELS, CONV, BIAS)
    wait(PDL)
    if used:
        for _ in range(length):
            if CONV > 0:
                source = x + token * x_stride
                q = convolve_token(source, kept_q, of_q, in_keys)
                k = convolve_token(source, kept_k, of_k, in_keys)
                v = convolve_token(source, kept_v, of_v, in_values)
            else:
                inputs = mixed + token * CHANNELS
                q = tl.load(inputs + keys, mask=in_keys, other=0.0)
                k = tl.load(inputs + KEY_HEADS * KEYS + keys, mask=in_keys, other=0.0)
                v = tl.load(inputs + 2 * KEY_HEADS * KEYS + values, mask=in_values, other=0.0)
            q, k = _unit(q) * scale, _unit(k)
            rate = tl.sigmoid(tl.load(x + token * x_stride + RATES + head).to(tl.float32))
            time = tl.load(x + token * x_stride + RATES + HEADS + head).to(tl.float32) + bias
            kept = tl.exp(fades * softplus(time)) * state
            change = rate * (v - tl.sum(k[:, None] * kept, 0))
            new = kept + k[:, None] * change[None, :]
            tl.store(out + token * (HEADS * VALUES) + values, tl.sum(q[:, None] * new, 0), mask=in_values)
            state = new.to(states.dtype.element_ty).to(tl.float32)
            token += 1
        tl.store(place, state.to(states.dtype.element_ty), mask=inside)
