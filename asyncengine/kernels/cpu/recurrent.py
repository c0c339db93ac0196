"""Layers with a state in plain torch: each row of a step goes on from the state of its sequence's slot.

Every token is computed by the same operations in the same order, so that the cut of a prompt into chunks and the other
rows of a step change no bit of its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncengine._core import StepBatch
from asyncengine.kernels.cpu.sdpa import count_decodes
from asyncengine.kernels.ops import LayerStates
from asyncengine.kernels.states import DeltaNet, Mamba2, ShortConv, state_floats


def rows_of(batch: StepBatch) -> Iterator[tuple[Tensor, slice, int]]:
    """Rows of equal lengths together: their slots int64 [R], their tokens, and the length of each.

    Rows of one token, which come first, are one item. Each other row is one by itself.
    """
    slots, starts = torch.from_numpy(batch.slots).long(), batch.query_start.tolist()
    decodes = count_decodes(batch)
    if decodes:
        yield slots[:decodes], slice(0, decodes), 1
    for row in range(decodes, batch.num_rows):
        yield slots[row : row + 1], slice(starts[row], starts[row + 1]), starts[row + 1] - starts[row]


def short_conv(x: Tensor, conv: ShortConv, cache: LayerStates, batch: StepBatch) -> Tensor:
    """``Ops.short_conv``."""
    size, channels = conv.weight.shape
    states = cache.states.view(torch.float32)[:, : (size - 1) * channels]
    out = torch.empty_like(x)
    for slots, tokens, length in rows_of(batch):
        before = states[slots].view(-1, size - 1, channels)
        inputs = torch.cat((before, x[tokens].view(-1, length, channels).float()), 1)
        y = inputs[:, :length] * conv.weight[0]
        for k in range(1, size):
            y += inputs[:, k : k + length] * conv.weight[k]
        if conv.bias is not None:
            y += conv.bias
        out[tokens] = (F.silu(y) if conv.silu else y).flatten(0, 1).to(x.dtype)
        states[slots] = inputs[:, length:].flatten(1)
    return out


def _recur(states: Tensor, reads: Tensor, renew: Callable[[Tensor, slice], Tensor], batch: StepBatch) -> Tensor:
    """Renew states [slots, H, N, P] token by token, and multiply them by ``reads`` [T, H, N]: [T, H, P].

    ``renew`` gets states of several sequences in float32 and the places of their tokens, and gives the next states.
    """
    out = reads.new_empty(*reads.shape[:2], states.shape[3])
    for slots, tokens, length in rows_of(batch):
        state = states[slots]
        for t in range(length):
            now = slice(tokens.start + t, tokens.stop, length)
            new = renew(state.float(), now)
            out[now] = (reads[now, :, :, None] * new).sum(2)
            state = new.to(states.dtype)
        states[slots] = state
    return out


def mamba2(x: Tensor, mixer: Mamba2, cache: LayerStates, batch: StepBatch) -> Tensor:
    """``Ops.mamba2``."""
    heads, dim, size, inner = len(mixer.decay), mixer.head_dim, mixer.state_size, mixer.inner
    gate, mixed, steps = torch.split(x.float(), [inner, mixer.width - inner - heads, heads], -1)
    first, of_groups = ShortConv.state_bytes(*mixer.conv.weight.shape), mixer.groups * size
    values, b, c = torch.split(short_conv(mixed, mixer.conv, cache, batch), [inner, of_groups, of_groups], -1)
    values = values.view(-1, heads, dim)
    b, c = (y.view(-1, mixer.groups, size).repeat_interleave(heads // mixer.groups, 1) for y in (b, c))
    steps = F.softplus(steps + mixer.dt_bias).clamp(*mixer.dt_range)
    keeps, added = torch.exp(steps * mixer.decay), steps[..., None] * values

    def renew(state: Tensor, now: slice) -> Tensor:
        return keeps[now, :, None, None] * state + b[now, :, :, None] * added[now, :, None]

    states = state_floats(cache.states, first, inner * size, mixer.state_dtype)
    out = _recur(states.view(-1, heads, size, dim), c, renew, batch)
    out = (out + mixer.skip[:, None] * values).view(-1, inner)
    return _gated(out, gate, mixer).to(x.dtype)


def _gated(y: Tensor, gate: Tensor, mixer: Mamba2) -> Tensor:
    """y [T, H * P] times the activated gate, normed where there is a norm."""
    gate = F.silu(gate)
    if mixer.norm is None:
        return y * gate
    if not mixer.norm_before_gate:
        y = y * gate
    y = F.rms_norm(y.view(len(y), mixer.groups, -1), (y.shape[1] // mixer.groups,), eps=mixer.eps)
    y = y.flatten(1) * mixer.norm
    return y * gate if mixer.norm_before_gate else y


def delta_net(x: Tensor, mixer: DeltaNet, cache: LayerStates, batch: StepBatch) -> Tensor:
    """``Ops.delta_net``."""
    heads, dim, size, inner = len(mixer.decay), mixer.value_dim, mixer.key_dim, mixer.inner
    of_keys, first = mixer.key_heads * size, ShortConv.state_bytes(*mixer.conv.weight.shape)
    mixed, gate, rates, steps = torch.split(x.float(), [2 * of_keys + inner, inner, heads, heads], -1)
    q, k, v = torch.split(short_conv(mixed, mixer.conv, cache, batch), [of_keys, of_keys, inner], -1)
    q, k = (_unit(y.view(-1, mixer.key_heads, size)) for y in (q, k))
    q, k = ((y * f).repeat_interleave(heads // mixer.key_heads, 1) for y, f in ((q, size**-0.5), (k, 1.0)))
    v, rates = v.view(-1, heads, dim), rates.sigmoid()[..., None]
    keeps = torch.exp(mixer.decay * F.softplus(steps + mixer.dt_bias))[..., None, None]

    def renew(state: Tensor, now: slice) -> Tensor:
        kept, key = keeps[now] * state, k[now, :, :, None]
        return kept + key * (rates[now] * (v[now] - (key * kept).sum(2)))[:, :, None]

    states = state_floats(cache.states, first, inner * size, mixer.state_dtype)
    out = _recur(states.view(-1, heads, size, dim), q, renew, batch)
    out = F.rms_norm(out, (dim,), eps=mixer.eps) * mixer.norm
    return (out.flatten(1) * F.silu(gate)).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    """x with a norm of 1 over its last axis."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
