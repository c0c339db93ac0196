"""Chunks of long rows, in which recurrences are products of matrices.

Tokens of a row that has more than LOOPED tokens are taken CHUNK at a time: only states go from chunk to chunk. Sums are
in another order than token by token, and products are in tf32, which is finer than inputs and results of 16 bits. The
last bits of a result depend on where a prompt is cut.
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
from asyncengine.kernels.cuda.recurrent.gate import softplus
from asyncengine.kernels.cuda.step.tensors import DeviceStep
from asyncengine.kernels.states import DeltaNet, Mamba2

LOOPED = 32
"""Tokens of the longest row whose tokens are computed one by one."""
CHUNK = 64
_NUMBERS = 32
"""Numbers of a head for one program."""
_MAX_SIZE = 128
_SHARED_BYTES = 136 << 10
"""Shared memory of a program at most."""


def computes_chunks(x: Tensor, state_dtype: torch.dtype, size: int, gpu: Gpu, *, invariant: bool) -> bool:
    """Return whether long rows among those of x are computed in chunks, for a state of ``size`` numbers a column.

    Products in float32 would take more registers than there are, and a state in bfloat16 is rounded behind each token.
    """
    fits = size <= _MAX_SIZE and gpu.shared_bytes >= _SHARED_BYTES
    dtypes_fit = x.dtype != torch.float32 and state_dtype == torch.float32
    return fits and dtypes_fit and len(x) > LOOPED and not invariant


def delta_chunks(
    mixed: Tensor, x: Tensor, mixer: DeltaNet, states: Tensor, step: DeviceStep, out: Tensor, *, pdl: bool = False
) -> None:
    """Gated DeltaNet for the long rows of a step: their part of out [T, H * V], and their states.

    ``mixed`` float32 [T, C] are the convolved inputs, ``states`` float32 [slots, H * K * V].
    """
    tokens, heads, size, dim = len(x), len(mixer.decay), mixer.key_dim, mixer.value_dim
    inverses = torch.empty(tokens, heads, CHUNK, dtype=torch.float32, device=x.device)
    most = tokens // CHUNK + min(step.num_rows, tokens // (LOOPED + 1))
    shapes = {"HEADS": heads, "KEY_HEADS": mixer.key_heads, "KEYS": size, "VALUES": dim, "CHUNK": CHUNK}
    shapes |= {"KEY_TILE": max(16, triton.next_power_of_2(size)), "LOOPED": LOOPED}
    _inverse_kernel[(most, heads)](
        mixed, x, mixer.decay, mixer.dt_bias, step.row_query_start, step.row_query_len, inverses, x.stride(0),
        step.num_rows, ROWS=triton.next_power_of_2(step.num_rows), num_warps=4, num_stages=1, **shapes,
        **launch_options(pdl),
    )  # fmt: skip
    tile = min(_NUMBERS, max(16, triton.next_power_of_2(dim)))
    _delta_chunks_kernel[(step.num_rows, heads, triton.cdiv(dim, tile))](
        mixed, x, states, mixer.decay, mixer.dt_bias, inverses, step.row_slot, step.row_query_start,
        step.row_query_len, step.row_context_len, out, x.stride(0), states.stride(0), size**-0.5, VALUE_TILE=tile,
        num_warps=8, num_stages=1, **shapes, **launch_options(pdl),
    )  # fmt: skip


def mamba_chunks(
    mixed: Tensor, x: Tensor, mixer: Mamba2, states: Tensor, step: DeviceStep, out: Tensor, *, pdl: bool = False
) -> None:
    """Mamba-2 for the long rows of a step: their part of out [T, H * P], and their states.

    ``mixed`` float32 [T, C] are the convolved inputs, ``states`` float32 [slots, H * N * P].
    """
    heads, size, dim = len(mixer.decay), mixer.state_size, mixer.head_dim
    tile = min(_NUMBERS, max(16, triton.next_power_of_2(dim)))
    _mamba_chunks_kernel[(step.num_rows, heads, triton.cdiv(dim, tile))](
        mixed, x, states, mixer.decay, mixer.skip, mixer.dt_bias, step.row_slot, step.row_query_start,
        step.row_query_len, step.row_context_len, out, x.stride(0), states.stride(0), *mixer.dt_range, HEADS=heads,
        GROUPS=mixer.groups, DIM=dim, SIZE=size, DIM_TILE=tile, SIZE_TILE=max(16, triton.next_power_of_2(size)),
        CHUNK=CHUNK, LOOPED=LOOPED, num_warps=8, num_stages=1, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _product(a, b):
    return tl.dot(a, b, input_precision="tf32")


@triton.jit
def _unit_rows(value):
    """Each row with a norm of 1."""
    return value * tl.rsqrt(tl.sum(value * value, 1) + 1e-6)[:, None]


@triton.jit
def _fading(total, LOWER: tl.constexpr):
    """[C, C]: factor by which token j's part has faded at token i, for j <= i, or with LOWER for j < i; otherwise 0."""
    i = tl.arange(0, total.shape[0])
    sees = (i[:, None] > i[None, :]) if LOWER else (i[:, None] >= i[None, :])
    return tl.where(sees, tl.exp(tl.where(sees, total[:, None] - total[None, :], 0.0)), 0.0)


@kernel(do_not_specialize=["rows"])
def _inverse_kernel(
    mixed,
    x,
    decay,
    dt_bias,
    row_query_start,
    row_query_len,
    inverses,
    x_stride,
    rows,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    KEY_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    LOOPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """For each chunk the inverse of the lower triangle by which a token's change depends on those before it.

    With rates b, keys k and sums G of log decays, change i is b_i (v_i - exp(G_i) k_i · s) less the sum over j < i of
    b_i exp(G_i - G_j) (k_i · k_j) times change j. Rows of the inverse follow from those above by substitution, which is
    stable whatever the keys are.
    """
    wait(PDL)
    head, r = tl.program_id(1), tl.arange(0, ROWS)
    lengths = tl.load(row_query_len + r, mask=r < rows, other=0)
    counts = tl.where(lengths > LOOPED, (lengths + CHUNK - 1) // CHUNK, 0)
    number = tl.program_id(0)
    if number < tl.sum(counts, 0):
        row = tl.sum((tl.cumsum(counts, 0) <= number).to(tl.int32), 0)
        begin = (number - tl.sum(tl.where(r < row, counts, 0), 0)) * CHUNK
        i, key = tl.arange(0, CHUNK), tl.arange(0, KEY_TILE)
        there = begin + i < tl.load(row_query_len + row)
        token = tl.load(row_query_start + row).to(tl.int64) + begin + i
        CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
        RATES: tl.constexpr = CHANNELS + HEADS * VALUES
        at = (KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEYS + key
        inside = there[:, None] & (key < KEYS)[None, :]
        k = _unit_rows(tl.load(mixed + token[:, None] * CHANNELS + at[None, :], mask=inside, other=0.0))
        rate = tl.sigmoid(tl.load(x + token * x_stride + RATES + head, mask=there, other=0.0).to(tl.float32))
        time = tl.load(x + token * x_stride + RATES + HEADS + head, mask=there, other=0.0).to(tl.float32)
        fades = tl.load(decay + head) * softplus(time + tl.load(dt_bias + head))
        total = tl.cumsum(tl.where(there, fades, 0.0), 0)
        lower = rate[:, None] * _product(k, tl.trans(k)) * _fading(total, LOWER=True)
        inverse = (i[:, None] == i[None, :]).to(tl.float32)
        for n in range(1, CHUNK):
            of_row = tl.sum(tl.where((i == n)[:, None], lower, 0.0), 0)
            less = tl.sum(of_row[:, None] * inverse, 0)
            inverse -= tl.where((i == n)[:, None], less[None, :], 0.0)
        place = inverses + (token[:, None] * HEADS + head) * CHUNK + i[None, :]
        tl.store(place, inverse, mask=there[:, None])


@kernel
def _delta_chunks_kernel(
    mixed,
    x,
    states,
    decay,
    dt_bias,
    inverses,
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
    CHUNK: tl.constexpr,
    LOOPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row's chunks in turn, with a part of a head's state in registers."""
    wait(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(row_query_len + row)
    if length > LOOPED:
        i, key = tl.arange(0, CHUNK), tl.arange(0, KEY_TILE)
        value = tl.program_id(2) * VALUE_TILE + tl.arange(0, VALUE_TILE)
        in_keys, in_values = (key < KEYS)[None, :], (value < VALUES)[None, :]
        CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
        RATES: tl.constexpr = CHANNELS + HEADS * VALUES
        keys = head // (HEADS // KEY_HEADS) * KEYS + key
        begun = tl.load(row_context_len + row) > 0
        place = states + tl.load(row_slot + row).to(tl.int64) * state_stride
        place += head * KEYS * VALUES + key[:, None] * VALUES + value[None, :]
        of_state = (key < KEYS)[:, None] & in_values
        state = tl.load(place, mask=of_state & begun, other=0.0)
        start = tl.load(row_query_start + row).to(tl.int64)
        decays, bias = tl.load(decay + head), tl.load(dt_bias + head)
        for begin in range(0, length, CHUNK):
            there = begin + i < length
            token = start + begin + i
            inputs = mixed + token[:, None] * CHANNELS
            k = tl.load(inputs + KEY_HEADS * KEYS + keys[None, :], mask=there[:, None] & in_keys, other=0.0)
            k = _unit_rows(k)
            at = 2 * KEY_HEADS * KEYS + head * VALUES + value
            v = tl.load(inputs + at[None, :], mask=there[:, None] & in_values, other=0.0)
            rate = tl.sigmoid(tl.load(x + token * x_stride + RATES + head, mask=there, other=0.0).to(tl.float32))
            time = tl.load(x + token * x_stride + RATES + HEADS + head, mask=there, other=0.0).to(tl.float32)
            steps = tl.where(there, decays * softplus(time + bias), 0.0)
            total, whole = tl.cumsum(steps, 0), tl.sum(steps, 0)
            fades = tl.exp(total)[:, None]
            inverse = tl.load(
                inverses + (token[:, None] * HEADS + head) * CHUNK + i[None, :], mask=there[:, None], other=0.0
            )
            change = _product(inverse, rate[:, None] * (v - fades * _product(k, state)))
            change = tl.where(there[:, None], change, 0.0)
            q = tl.load(inputs + keys[None, :], mask=there[:, None] & in_keys, other=0.0)
            q = _unit_rows(q) * scale
            y = fades * _product(q, state)
            y += _product(_product(q, tl.trans(k)) * _fading(total, LOWER=False), change)
            to = out + token[:, None] * (HEADS * VALUES) + (head * VALUES + value)[None, :]
            tl.store(to, y, mask=there[:, None] & in_values)
            kept = tl.exp(whole - total)[:, None]
            state = tl.exp(whole) * state + _product(tl.trans(k), kept * change)
        tl.store(place, state, mask=of_state)


@kernel
def _mamba_chunks_kernel(
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
    CHUNK: tl.constexpr,
    LOOPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row's chunks in turn, with a part of a head's state in registers."""
    wait(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(row_query_len + row)
    if length > LOOPED:
        i, n = tl.arange(0, CHUNK), tl.arange(0, SIZE_TILE)
        p = tl.program_id(2) * DIM_TILE + tl.arange(0, DIM_TILE)
        in_size, in_dim = (n < SIZE)[None, :], (p < DIM)[None, :]
        INNER: tl.constexpr = HEADS * DIM
        CHANNELS: tl.constexpr = INNER + 2 * GROUPS * SIZE
        first = INNER + head // (HEADS // GROUPS) * SIZE + n
        begun = tl.load(row_context_len + row) > 0
        place = states + tl.load(row_slot + row).to(tl.int64) * state_stride
        place += head * SIZE * DIM + n[:, None] * DIM + p[None, :]
        of_state = (n < SIZE)[:, None] & in_dim
        state = tl.load(place, mask=of_state & begun, other=0.0)
        start = tl.load(row_query_start + row).to(tl.int64)
        decays, bias, own = tl.load(decay + head), tl.load(dt_bias + head), tl.load(skip + head)
        for begin in range(0, length, CHUNK):
            there = begin + i < length
            token = start + begin + i
            inputs = mixed + token[:, None] * CHANNELS
            value = tl.load(inputs + (head * DIM + p)[None, :], mask=there[:, None] & in_dim, other=0.0)
            b = tl.load(inputs + first[None, :], mask=there[:, None] & in_size, other=0.0)
            c = tl.load(inputs + GROUPS * SIZE + first[None, :], mask=there[:, None] & in_size, other=0.0)
            time = tl.load(x + token * x_stride + INNER + CHANNELS + head, mask=there, other=0.0).to(tl.float32)
            time = tl.minimum(tl.maximum(softplus(time + bias), shortest), longest)
            steps = tl.where(there, time * decays, 0.0)
            total, whole = tl.cumsum(steps, 0), tl.sum(steps, 0)
            added = time[:, None] * value
            y = own * value + tl.exp(total)[:, None] * _product(c, state)
            y += _product(_product(c, tl.trans(b)) * _fading(total, LOWER=False), added)
            tl.store(out + token[:, None] * INNER + (head * DIM + p)[None, :], y, mask=there[:, None] & in_dim)
            kept = tl.exp(whole - total)[:, None]
            state = tl.exp(whole) * state + _product(tl.trans(b), kept * added)
        tl.store(place, state, mask=of_state)
