"""Short convolutions on the GPU, and their part of the states.

A token finds the inputs before it among the step's tokens of its slot, and before those in the slot's state. The state
of a sequence counts as zeros before its first token, whatever it holds: no memory is cleared when a slot begins a new
life. Nothing is read or written for tokens and rows that a step does not use.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, wait
from asyncengine.kernels.cuda.rows.tensors import check, check_rows, empty_rows
from asyncengine.kernels.cuda.step.tensors import DeviceStep
from asyncengine.kernels.states import DeltaNet, Mamba2, ShortConv, state_floats

_MAX_SIZE = 8
COLUMNS = 128
"""Channels of a program."""
_ROWS = 16


def convolve(
    x: Tensor,
    conv: ShortConv,
    states: Tensor,
    step: DeviceStep,
    *,
    single: bool = False,
    dtype: torch.dtype | None = None,
    pdl: bool = False,
) -> Tensor:
    """Convolve the first C numbers of each row of x [T, at least C], and bring the states up to date: [T, C].

    ``states`` is uint8 [slots, bytes]. ``single``: every row of the step has one token, or none. ``dtype``: that of the
    result, by default that of x. Raises ValueError for tensors that do not fit.
    """
    size, channels = conv.weight.shape
    check_conv(x, conv, states, step)
    floats = states.view(torch.float32)
    out = empty_rows(len(x), channels, dtype or x.dtype, x.device)
    rows = 1 if single else _ROWS
    _conv_kernel[(triton.cdiv(len(x), rows), triton.cdiv(channels, COLUMNS))](
        x,
        conv.weight,
        conv.weight if conv.bias is None else conv.bias,
        floats,
        step.token_slot,
        step.positions,
        out,
        x.stride(0),
        floats.stride(0),
        len(x),
        CHANNELS=channels,
        SIZE=size,
        BIAS=conv.bias is not None,
        SILU=conv.silu,
        SINGLE=single,
        ROWS=rows,
        COLUMNS=COLUMNS,
        num_warps=1 if single else 4,
        **launch_options(pdl),
    )
    if not single and size > 1:
        _shift_kernel[(step.num_rows, triton.cdiv(channels, COLUMNS))](
            x,
            floats,
            step.row_slot,
            step.row_query_start,
            step.row_query_len,
            step.row_context_len,
            x.stride(0),
            floats.stride(0),
            CHANNELS=channels,
            SIZE=size,
            COLUMNS=COLUMNS,
            num_warps=1,
            **launch_options(pdl),
        )
    return out


class Mixed(NamedTuple):
    """Inputs and states of a mixer's recurrence."""

    inputs: Tensor
    """float32 [T, C]: convolved; in a step of single tokens the rows themselves, which the recurrence convolves"""
    kept: Tensor
    """[slots, H * S * D]: the mixer's states, in their dtype"""
    floats: Tensor
    """float32 [slots, numbers]: the same memory from its beginning, where the convolution's states are"""


def begin_mixer(
    x: Tensor, inputs: Tensor, mixer: Mamba2 | DeltaNet, size: int, states: Tensor, step: DeviceStep, *, single: bool,
    pdl: bool,
) -> Mixed:  # fmt: skip
    """Convolve the inputs of a mixer, columns of x, but in a step of ``single`` tokens; ``size`` is that of a state.

    Raises ValueError for tensors that do not fit.
    """
    conv, numbers = mixer.conv, mixer.inner * size
    if not conv.silu:
        raise ValueError("the convolution of a mixer must be activated")
    first = ShortConv.state_bytes(*conv.weight.shape)
    check_states(states, first + numbers * mixer.state_dtype.itemsize, step)
    if single:
        check_conv(inputs, conv, states, step)
    mixed = x if single else convolve(inputs, conv, states, step, dtype=torch.float32, pdl=pdl)
    return Mixed(mixed, state_floats(states, first, numbers, mixer.state_dtype), states.view(torch.float32))


def check_conv(x: Tensor, conv: ShortConv, states: Tensor, step: DeviceStep) -> None:
    """Raises ValueError for tensors that do not fit, as ``convolve``."""
    size, channels = conv.weight.shape
    check_rows(x, "x")
    check(conv.weight, torch.float32, (size, channels), "weight")
    if conv.bias is not None:
        check(conv.bias, torch.float32, (channels,), "bias")
    if size > _MAX_SIZE:
        raise ValueError(f"a convolution may have {_MAX_SIZE} tokens at most, got {size}")
    check_states(states, ShortConv.state_bytes(size, channels), step)
    if x.shape[1] < channels or len(x) != step.num_tokens:
        raise ValueError(f"x must be [{step.num_tokens}, at least {channels}], got {list(x.shape)}")


def check_states(states: Tensor, least: int, step: DeviceStep) -> None:
    """Raises ValueError unless states is uint8 [slots, at least ``least`` bytes] for the slots of the step."""
    slots = len(step.slots.last_token)
    fits = states.dim() == 2 and len(states) >= slots and states.shape[1] >= least and states.shape[1] % 16 == 0
    if states.dtype != torch.uint8 or not fits or not states.is_contiguous():
        raise ValueError(
            f"states must be contiguous uint8 [at least {slots}, at least {least} bytes], got {states.dtype} "
            f"{list(states.shape)}"
        )


@triton.jit
def convolve_kept(state, weight, bias, column, inside, begun, CHANNELS: tl.constexpr, SIZE: tl.constexpr,
                  BIAS: tl.constexpr):  # fmt: skip
    """The share of kept inputs in the channels ``column``, the weight of a token's own, and the bias.

    It reads nothing that the step has computed. ``begun``: the state holds inputs of the sequence.
    """
    y = tl.zeros_like(column).to(tl.float32)
    offset = y
    for k in tl.static_range(SIZE - 1):
        value = tl.load(state + k * CHANNELS + column, mask=inside & begun, other=0.0)
        y += value * tl.load(weight + k * CHANNELS + column, mask=inside, other=0.0)
    if BIAS:
        offset = tl.load(bias + column, mask=inside, other=0.0)
    return y, tl.load(weight + (SIZE - 1) * CHANNELS + column, mask=inside, other=0.0), offset


@triton.jit
def convolve_token(source, kept, column, inside):
    """Activated results of the channels ``column`` for the only token of a row, from what ``convolve_kept`` gave."""
    y = kept[0] + tl.load(source + column, mask=inside, other=0.0).to(tl.float32) * kept[1] + kept[2]
    return y * tl.sigmoid(y)


@triton.jit
def shift(source, state, length, x_stride, inside, begun, CHANNELS: tl.constexpr, SIZE: tl.constexpr):
    """The last inputs of a row of ``length`` tokens become its state: some channels of it, by one program."""
    for k in tl.static_range(SIZE - 1):
        token = length - (SIZE - 1) + k
        value = tl.load(source + token * x_stride, mask=inside & (token >= 0), other=0.0).to(tl.float32)
        # Kept inputs lie behind place k, which is written next.
        kept = inside & (token < 0) & begun
        value += tl.load(state + (token + SIZE - 1) * CHANNELS, mask=kept, other=0.0)
        tl.debug_barrier()
        tl.store(state + k * CHANNELS, value, mask=inside)


@kernel(do_not_specialize=["tokens"])
def _conv_kernel(
    x,
    weight,
    bias,
    states,
    token_slot,
    positions,
    out,
    x_stride,
    state_stride,
    tokens,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    SINGLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tokens of any rows. Only where each row has one token does a program also write the state that it reads."""
    wait(PDL)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = token < tokens
    inside = (column < CHANNELS)[None, :]
    slot = tl.load(token_slot + token, mask=there, other=-1)
    position = tl.load(positions + token, mask=there, other=0)
    used = slot >= 0
    # How many of the tokens before this one are of the same row, up to what the convolution sees.
    before = tl.zeros([ROWS], tl.int32)
    if not SINGLE:
        alike = used
        for back in tl.static_range(1, SIZE):
            other = tl.load(token_slot + token - back, mask=used & (token >= back), other=-1)
            alike = alike & (other == slot)
            before += alike.to(tl.int32)
    begun = used & (position > before)  # the row begins behind the sequence's first token, if its begin is seen
    source = x + token.to(tl.int64)[:, None] * x_stride + column[None, :]
    state = states + slot.to(tl.int64)[:, None] * state_stride + column[None, :]
    y = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in tl.static_range(SIZE):
        back = SIZE - 1 - k
        own = (used & (before >= back))[:, None] & inside
        kept = (begun & (before < back))[:, None] & inside
        value = tl.load(source - back * x_stride, mask=own, other=0.0).to(tl.float32)
        # An input that lies so far before the row's first token.
        value += tl.load(state + (before + k)[:, None] * CHANNELS, mask=kept, other=0.0)
        y += value * tl.load(weight + k * CHANNELS + column, mask=column < CHANNELS, other=0.0)[None, :]
        if SINGLE and k > 0:
            tl.debug_barrier()  # place k - 1 was read above, by whichever thread
            tl.store(state + (k - 1) * CHANNELS, value, mask=used[:, None] & inside)
    if BIAS:
        y += tl.load(bias + column, mask=column < CHANNELS, other=0.0)[None, :]
    if SILU:
        y = y * tl.sigmoid(y)
    y = tl.where(used[:, None], y, 0.0)
    to = out + token.to(tl.int64)[:, None] * CHANNELS + column[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=there[:, None] & inside)


@kernel
def _shift_kernel(
    x,
    states,
    row_slot,
    row_query_start,
    row_query_len,
    row_context_len,
    x_stride,
    state_stride,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The last inputs of each row become its state, behind those of earlier steps that are still among the last."""
    wait(PDL)
    row = tl.program_id(0)
    length = tl.load(row_query_len + row)
    if length > 0:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < CHANNELS
        begun = tl.load(row_context_len + row) > 0
        source = x + tl.load(row_query_start + row).to(tl.int64) * x_stride + column
        state = states + tl.load(row_slot + row).to(tl.int64) * state_stride + column
        shift(source, state, length, x_stride, inside, begun, CHANNELS, SIZE)
