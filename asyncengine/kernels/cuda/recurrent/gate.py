"""The end of a mixer with a state on the GPU: results times an activated gate, with an RMS norm before or behind it."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, wait
from asyncengine.kernels.cuda.recurrent.conv import COLUMNS, shift
from asyncengine.kernels.cuda.rows.tensors import check, check_rows, empty_rows
from asyncengine.kernels.cuda.step.tensors import DeviceStep
from asyncengine.kernels.states import ShortConv


@triton.jit
def softplus(value):
    """log(1 + exp(value)) without overflow."""
    return tl.maximum(value, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(value)))


def gate_rows(
    y: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    groups: int,
    step: DeviceStep,
    *,
    norm_first: bool,
    shifted: tuple[Tensor, Tensor, ShortConv] | None = None,
    pdl: bool = False,
) -> Tensor:
    """y float32 [T, N] times silu(gate [T, N]), in the dtype of the gate: [T, N].

    With a ``weight`` there is an RMS norm over each of ``groups`` equal parts of a row, of the product or, with
    ``norm_first``, of y alone. The weight is float32 [N], or [N / groups] for all parts alike. Rows that the step does
    not use become zeros.

    ``shifted``, in a step whose rows have one token each: inputs x [T, at least C] of a convolution, the states float32
    [slots, numbers], and the convolution. The inputs then enter the states, which the kernel before has read.
    """
    tokens, columns = y.shape
    check(y, torch.float32, (tokens, columns), "y")
    check_rows(gate, "gate")
    width = columns // groups
    if weight is not None:
        check(weight, torch.float32, (columns if len(weight) == columns else width,), "weight")
    out = empty_rows(tokens, columns, gate.dtype, gate.device)
    tile = triton.next_power_of_2(width)
    x, states, conv = (gate, gate, None) if shifted is None else shifted
    size, channels = (0, 0) if conv is None else conv.weight.shape
    _gate_kernel[(tokens, groups + triton.cdiv(channels, COLUMNS))](
        y,
        gate,
        y if weight is None else weight,
        step.token_slot,
        out,
        x,
        states,
        step.positions,
        gate.stride(0),
        x.stride(0),
        states.stride(0),
        eps,
        GROUPS=groups,
        WIDTH=width,
        TILE=tile,
        NORM="none" if weight is None else "first" if norm_first else "last",
        ALIKE=weight is not None and len(weight) == width,
        CHANNELS=channels,
        SIZE=size,
        COLUMNS=COLUMNS,
        num_warps=min(8, max(1, tile // 256)),
        **launch_options(pdl),
    )
    return out


@kernel
def _gate_kernel(
    y,
    gate,
    weight,
    token_slot,
    out,
    x,
    states,
    positions,
    gate_stride,
    x_stride,
    state_stride,
    eps,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
    ALIKE: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first GROUPS programs of a token have a part of its result each, the others a part of its inputs' state."""
    wait(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(token_slot + token).to(tl.int64)
    if part < GROUPS:
        column = tl.arange(0, TILE)
        inside = column < WIDTH
        used = inside & (slot >= 0)
        at = part * WIDTH + column
        value = tl.load(y + token * (GROUPS * WIDTH) + at, mask=used, other=0.0)
        factor = tl.load(gate + token * gate_stride + at, mask=used, other=0.0).to(tl.float32)
        factor = factor * tl.sigmoid(factor)
        if NORM != "first":
            value *= factor
        if NORM != "none":
            value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
            value *= tl.load(weight + (column if ALIKE else at), mask=inside, other=0.0)
        if NORM == "first":
            value *= factor
        tl.store(out + token * (GROUPS * WIDTH) + at, value.to(out.dtype.element_ty), mask=inside)
    elif slot >= 0:
        column = (part - GROUPS) * COLUMNS + tl.arange(0, COLUMNS)
        begun = tl.load(positions + token) > 0
        source, state = x + token * x_stride + column, states + slot * state_stride + column
        shift(source, state, 1, x_stride, column < CHANNELS, begun, CHANNELS, SIZE)
