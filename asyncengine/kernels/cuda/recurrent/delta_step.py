"""Gated DeltaNet in steps whose rows have one token each, on Hopper: a mixer is one kernel, in Gluon.

A unit of work is a key head of a token, with the value heads that share it. Nobody else reads their part of the states,
so that it also writes what the next step convolves. A program takes units in turn, and heads of a unit. The state of
the next head is copied to shared memory while it computes. The first one is copied, and the kept inputs of the first
unit are loaded, before the program waits for the inputs of this step: they were written a step ago. Two programs share
a multiprocessor if there is work for them, so that one computes while the other waits.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc, no-redef"
# ruff: noqa: RUF005 - Triton knows no starred items in a tuple

from __future__ import annotations

from functools import partial

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.launch.gluon import GluonKernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options
from asyncengine.kernels.cuda.recurrent.conv import Mixed
from asyncengine.kernels.cuda.rows.tensors import check, empty_rows
from asyncengine.kernels.cuda.step.tensors import DeviceStep
from asyncengine.kernels.states import DeltaNet

_WARPS = 8
_PROGRAMS = 2
"""programs on a multiprocessor"""
_REGISTERS = 65536 // (32 * _WARPS * _PROGRAMS)


def takes_step(mixer: DeltaNet, tokens: int, gpu: Gpu) -> bool:
    """Return whether the kernel runs for this mixer, and a step has units for a quarter of the multiprocessors."""
    return has_step(mixer, gpu) and 4 * tokens * mixer.key_heads >= gpu.multiprocessors


def has_step(mixer: DeltaNet, gpu: Gpu) -> bool:
    """Return whether the kernel runs for this mixer: on Hopper, for states of whole tiles that registers can hold."""
    size, dim = mixer.key_dim, mixer.value_dim
    copied = size * dim * mixer.state_dtype.itemsize
    whole = all(triton.next_power_of_2(n) == n >= _WARPS for n in (size, dim)) and copied >= 16 * 32 * _WARPS
    return whole and size * dim <= 128 * 128 and len(mixer.conv.weight) > 1 and gpu.tma


def delta_step(x: Tensor, mixer: DeltaNet, mixed: Mixed, step: DeviceStep, gpu: Gpu, *, pdl: bool) -> Tensor:
    """``Ops.delta_net`` in a step of single tokens, which are convolved here: [T, mixer.inner].

    ``mixed`` has the states, and x is what ``begin_mixer`` has checked.
    """
    heads, size, dim, conv = len(mixer.decay), mixer.key_dim, mixer.value_dim, mixer.conv
    check(mixer.norm, torch.float32, (dim,), "norm")
    kept, floats, vector = mixed.kept, mixed.floats, 16 // mixer.state_dtype.itemsize
    out, units = empty_rows(len(x), mixer.inner, x.dtype, x.device), len(x) * mixer.key_heads
    share, programs = heads // mixer.key_heads, min(units, _PROGRAMS * gpu.multiprocessors)
    lone = units <= gpu.multiprocessors  # a multiprocessor has one unit, and room for two states
    _delta_step_kernel[(programs,)](
        x,
        kept,
        floats,
        conv.weight,
        conv.weight if conv.bias is None else conv.bias,
        mixer.decay,
        mixer.dt_bias,
        mixer.norm,
        step.token_slot,
        step.positions,
        out,
        units,
        x.stride(0),
        kept.stride(0) // vector,  # for the compiler to know what it is a multiple of
        floats.stride(0),
        size**-0.5,
        mixer.eps,
        KEY_HEADS=mixer.key_heads,
        SHARE=share,
        SHARE_TILE=triton.next_power_of_2(share),
        KEYS=size,
        VALUES=dim,
        SIZE=len(conv.weight),
        BIAS=conv.bias is not None,
        VECTOR=vector,
        BUFFERS=2 if lone and share % 2 == 0 else 1,
        WARPS=_WARPS,
        num_warps=_WARPS,
        **({} if lone else {"maxnreg": _REGISTERS}),
        **launch_options(pdl),
    )
    return out


@gluon.constexpr_function
def _state_layout(keys, values, vector, warps):
    """Layout of a state [keys, values]: a thread has ``vector`` neighbouring values of several keys.

    Warps divide the values first, so that a warp sums over keys alone.
    """
    lanes = max(1, values // (warps * vector))
    across = min(warps, values // vector)
    each = min(4, keys * values // (32 * warps * vector))
    return gl.BlockedLayout([each, vector], [32 // lanes, lanes], [warps // across, across], [1, 0])


@gluon.constexpr_function
def _copied_layout(values, vector, warps):
    """Layout in which a state is copied: a warp copies whole rows, or at least 32 neighbouring vectors."""
    across = min(32, values // vector)
    return gl.BlockedLayout([1, vector], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def _buffer_layout(keys, values, vector, warps):
    """Layout of a state in shared memory, with which the threads of ``_state_layout`` read from all banks at once."""
    each = min(4, keys * values // (32 * warps * vector))
    return gl.SwizzledSharedLayout(max(vector, values // warps), each, 8, [1, 0])


@gluon.jit
def _sigmoid(value):
    return 1.0 / (1.0 + gl.exp(-value))


@gluon.jit
def _softplus(value):
    return gl.maximum(value, 0.0) + gl.log(1.0 + gl.exp(-gl.abs(value)))


@gluon.jit
def _load_kept(before, column, inside, CHANNELS: gl.constexpr, SIZE: gl.constexpr):
    """Inputs of some channels that are kept, the earliest one first."""
    kept = ()
    for k in gl.static_range(SIZE - 1):
        kept = kept + (gl.load(before + k * CHANNELS + column, mask=inside, other=0.0),)
    return kept


@gluon.jit
def _convolve(kept, own, begun, weight, bias, column, inside, CHANNELS: gl.constexpr, SIZE: gl.constexpr,
              BIAS: gl.constexpr):  # fmt: skip
    """Activated results of some channels. Kept inputs count for tokens of a row that has begun."""
    y = own * gl.load(weight + (SIZE - 1) * CHANNELS + column, mask=inside, other=0.0)
    for k in gl.static_range(SIZE - 1):
        y += gl.where(begun, kept[k], 0.0) * gl.load(weight + k * CHANNELS + column, mask=inside, other=0.0)
    if BIAS:
        y += gl.load(bias + column, mask=inside, other=0.0)
    return y * _sigmoid(y)


@gluon.jit
def _keep(kept, own, begun, before, column, inside, CHANNELS: gl.constexpr, SIZE: gl.constexpr):
    """All inputs but the earliest become what is kept."""
    for k in gl.static_range(1, SIZE - 1):
        gl.store(before + (k - 1) * CHANNELS + column, gl.where(begun, kept[k], 0.0), mask=inside)
    gl.store(before + (SIZE - 2) * CHANNELS + column, own, mask=inside)


@gluon.jit
def _load_all_kept(
    conv_states, conv_stride, unit, slot, key, value, one, KEY_HEADS: gl.constexpr, KEYS: gl.constexpr,
    VALUES: gl.constexpr, SHARE: gl.constexpr, SIZE: gl.constexpr,
):  # fmt: skip
    """Kept inputs of a unit's queries and keys, and of its values. ``slot`` is negative if nothing is wanted."""
    CHANNELS: gl.constexpr = (2 * KEYS + SHARE * VALUES) * KEY_HEADS
    before = conv_states + gl.maximum(slot, 0).to(gl.int64) * conv_stride
    group = unit % KEY_HEADS
    of_values = 2 * KEY_HEADS * KEYS + group * (SHARE * VALUES) + value
    in_keys, in_own = (key >= 0) & (slot >= 0), (value >= 0) & (one < SHARE) & (slot >= 0)
    keys = _load_kept(before, group * KEYS + key, in_keys, CHANNELS, SIZE)
    return keys, _load_kept(before, of_values, in_own, CHANNELS, SIZE)


@gluon.jit
def _load_own(
    x, x_stride, unit, slot, key, value, one, of_heads, KEY_HEADS: gl.constexpr, KEYS: gl.constexpr,
    VALUES: gl.constexpr, SHARE: gl.constexpr,
):  # fmt: skip
    """A unit's part of its token: queries and keys, values, their gate, rates and times. See ``_load_all_kept``."""
    HEADS: gl.constexpr = KEY_HEADS * SHARE
    CHANNELS: gl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    RATES: gl.constexpr = CHANNELS + HEADS * VALUES
    source, group = x + unit // KEY_HEADS * x_stride, unit % KEY_HEADS
    in_keys, in_own = (key >= 0) & (slot >= 0), (value >= 0) & (one < SHARE) & (slot >= 0)
    own, head, known = group * (SHARE * VALUES) + value, group * SHARE + of_heads, (of_heads < SHARE) & (slot >= 0)
    keys = gl.load(source + group * KEYS + key, mask=in_keys, other=0.0).to(gl.float32)
    values = gl.load(source + 2 * KEY_HEADS * KEYS + own, mask=in_own, other=0.0).to(gl.float32)
    gate = gl.load(source + CHANNELS + own, mask=in_own, other=0.0).to(gl.float32)
    rates = gl.load(source + RATES + head, mask=known, other=0.0).to(gl.float32)
    return keys, values, gate, rates, gl.load(source + RATES + HEADS + head, mask=known, other=0.0).to(gl.float32)


@gluon.jit
def _fetch(states, slot, head, place, buffer, state_stride, NUMBERS: gl.constexpr):
    """Ask for the state of a head, of no slot if ``slot`` is negative."""
    source = states + gl.maximum(slot, 0).to(gl.int64) * state_stride + head * NUMBERS + place
    async_copy.async_copy_global_to_shared(buffer, source, mask=(place >= 0) & (slot >= 0))
    async_copy.commit_group()


@gluon.jit
def _row(tile, row: gl.constexpr):
    """A row of a tile in shared memory."""
    return tile._reinterpret(tile.dtype, tile.shape, gl.SwizzledSharedLayout(1, 1, 1, [0])).index(row)


@partial(GluonKernel, do_not_specialize=["units"])
def _delta_step_kernel(
    x,
    states,
    conv_states,
    weight,
    conv_bias,
    decay,
    dt_bias,
    norm,
    token_slot,
    positions,
    out,
    units,
    x_stride,
    state_stride,
    conv_stride,
    scale,
    eps,
    KEY_HEADS: gl.constexpr,
    SHARE: gl.constexpr,
    SHARE_TILE: gl.constexpr,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    SIZE: gl.constexpr,
    BIAS: gl.constexpr,
    VECTOR: gl.constexpr,
    BUFFERS: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """VECTOR: numbers of a state that a thread copies at once. BUFFERS: states on the way, which divide SHARE."""
    HEADS: gl.constexpr = KEY_HEADS * SHARE
    INNER: gl.constexpr = HEADS * VALUES
    CHANNELS: gl.constexpr = 2 * KEY_HEADS * KEYS + INNER
    NUMBERS: gl.constexpr = KEYS * VALUES
    state_stride *= VECTOR
    STATE: gl.constexpr = _state_layout(KEYS, VALUES, VECTOR, WARPS)
    COPIED: gl.constexpr = _copied_layout(VALUES, VECTOR, WARPS)
    OF_KEYS: gl.constexpr = gl.SliceLayout(1, STATE)
    OF_VALUES: gl.constexpr = gl.SliceLayout(0, STATE)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [2, WARPS // 2], [1, 0])
    OF_HEADS: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([SHARE_TILE, 1], [1, 32], [1, WARPS], [1, 0]))
    TILE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    buffers = gl.allocate_shared_memory(
        states.dtype.element_ty, [BUFFERS, KEYS, VALUES], _buffer_layout(KEYS, VALUES, VECTOR, WARPS)
    )
    keys_shared = gl.allocate_shared_memory(gl.float32, [2, KEYS], TILE)
    values_shared = gl.allocate_shared_memory(gl.float32, [SHARE_TILE, VALUES], TILE)
    results_shared = gl.allocate_shared_memory(gl.float32, [SHARE_TILE, VALUES], TILE)

    first, step = gl.program_id(0), gl.num_programs(0)
    place = gl.arange(0, KEYS, OF_KEYS)[:, None] * VALUES + gl.arange(0, VALUES, OF_VALUES)[None, :]
    copied = gl.arange(0, KEYS, gl.SliceLayout(1, COPIED))[:, None] * VALUES
    copied = copied + gl.arange(0, VALUES, gl.SliceLayout(0, COPIED))[None, :]
    which = gl.arange(0, 2, gl.SliceLayout(1, ROWS))[:, None]
    key = which * (KEY_HEADS * KEYS) + gl.arange(0, KEYS, gl.SliceLayout(0, ROWS))[None, :]
    one = gl.arange(0, SHARE_TILE, gl.SliceLayout(1, ROWS))[:, None]
    value = one * VALUES + gl.arange(0, VALUES, gl.SliceLayout(0, ROWS))[None, :]
    of_heads = gl.arange(0, SHARE_TILE, OF_HEADS)
    slot = gl.load(token_slot + first // KEY_HEADS)
    position = gl.load(positions + first // KEY_HEADS)
    for h in gl.static_range(BUFFERS):
        begin = first % KEY_HEADS * SHARE + h
        _fetch(states, slot, begin, copied, buffers.index(h), state_stride, NUMBERS)
    kept = _load_all_kept(conv_states, conv_stride, first, slot, key, value, one, KEY_HEADS, KEYS, VALUES, SHARE, SIZE)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for unit in range(first, units, step):
        group, token, next_unit = unit % KEY_HEADS, unit // KEY_HEADS, unit + step
        following = gl.minimum(next_unit, units - 1)
        next_slot = gl.load(token_slot + following // KEY_HEADS)
        next_position = gl.load(positions + following // KEY_HEADS)
        there = slot >= 0
        begun = there & (position > 0)
        home = gl.maximum(slot, 0).to(gl.int64)
        before = conv_states + home * conv_stride
        of_keys, of_own = group * KEYS + key, group * (SHARE * VALUES) + value
        of_values = 2 * KEY_HEADS * KEYS + of_own
        in_keys, in_own = (key >= 0) & there, (value >= 0) & (one < SHARE) & there
        head, known = group * SHARE + of_heads, (of_heads < SHARE) & there
        new_keys, new_values, factor, rates, times = _load_own(
            x, x_stride, unit, slot, key, value, one, of_heads, KEY_HEADS, KEYS, VALUES, SHARE
        )
        keys_shared.store(
            _convolve(kept[0], new_keys, begun, weight, conv_bias, of_keys, in_keys, CHANNELS, SIZE, BIAS)
        )
        values_shared.store(
            _convolve(kept[1], new_values, begun, weight, conv_bias, of_values, in_own, CHANNELS, SIZE, BIAS)
        )
        rates = _sigmoid(rates)
        times += gl.load(dt_bias + head, mask=known, other=0.0)
        fades = gl.exp(gl.load(decay + head, mask=known, other=0.0) * _softplus(times))
        gl.thread_barrier()  # all threads have the inputs that change now
        _keep(kept[0], new_keys, begun, before, of_keys, in_keys, CHANNELS, SIZE)
        _keep(kept[1], new_values, begun, before, of_values, in_own, CHANNELS, SIZE)
        wanted = gl.where(next_unit < units, next_slot, -1)
        q, k = _row(keys_shared, 0).load(OF_KEYS), _row(keys_shared, 1).load(OF_KEYS)
        q_unit, k_unit = gl.rsqrt(gl.sum(q * q, 0) + 1e-6) * scale, gl.rsqrt(gl.sum(k * k, 0) + 1e-6)
        together = gl.sum(q * k, 0) * q_unit * k_unit
        for h in gl.static_range(SHARE):
            async_copy.wait_group(BUFFERS - 1)
            buffer = buffers.index(h % BUFFERS)
            state = gl.where(begun, buffer.load(STATE).to(gl.float32), 0.0)
            if h + BUFFERS < SHARE:
                _fetch(states, slot, group * SHARE + h + BUFFERS, copied, buffer, state_stride, NUMBERS)
            else:
                next_head = next_unit % KEY_HEADS * SHARE + h + BUFFERS - SHARE
                _fetch(states, wanted, next_head, copied, buffer, state_stride, NUMBERS)
            state *= gl.sum(gl.where(of_heads == h, fades, 0.0), 0)
            rate = gl.sum(gl.where(of_heads == h, rates, 0.0), 0)
            q = _row(keys_shared, 0).load(OF_KEYS)  # again, since registers have no room for a unit's
            result = gl.sum(q[:, None] * state, 0) * q_unit
            k = _row(keys_shared, 1).load(OF_KEYS)
            of_state = gl.sum(k[:, None] * state, 0) * k_unit
            change = rate * (_row(values_shared, h).load(OF_VALUES) - of_state)
            result += together * change
            state += k[:, None] * (k_unit * change)[None, :]
            target = states + home * state_stride + (group * SHARE + h) * NUMBERS + place
            gl.store(target, state.to(states.dtype.element_ty), mask=(place >= 0) & there, cache_modifier=".cs")
            _row(results_shared, h).store(result)
        gl.thread_barrier()
        results = results_shared.load(ROWS)
        results *= gl.rsqrt(gl.sum(results * results, 1) / VALUES + eps)[:, None]
        results = results * gl.load(norm + value % VALUES) * (factor * _sigmoid(factor))
        results = gl.where(there, results, 0.0)
        at = out + token * INNER + of_own
        gl.store(at, results.to(out.dtype.element_ty), mask=(value >= 0) & (one < SHARE))
        kept = _load_all_kept(
            conv_states, conv_stride, following, wanted, key, value, one, KEY_HEADS, KEYS, VALUES, SHARE, SIZE
        )
        slot, position = next_slot, next_position
    async_copy.wait_group(0)
