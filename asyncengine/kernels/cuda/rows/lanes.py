"""Lanes: rows that decode on the host leave a step behind attention of one layer, and enter one behind that of another.

csrc/core/hybrid/host_rows.h has the circuit. The lanes of a step are its last tokens; ``DeviceStep.lane_slots`` says
which row has a lane at which stage. Attention passes their tokens over: behind it their heads are still what the
projection made.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, start_next, wait
from asyncengine.kernels.cuda.rows.rotary import load_gains, norm_and_rotate
from asyncengine.kernels.cuda.rows.tensors import check, check_heads, check_rows
from asyncengine.kernels.cuda.step.tensors import DeviceStep
from asyncengine.kernels.ops import AttentionLayer

_HEAD_TILE = 1024
"""Elements of a half head tile, as in rotary.py."""
_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class HostLanes:
    """Memory that the lanes of steps read and write, for S slots, R lanes and L layers. All heads have D elements."""

    mailboxes: Tensor
    """int64 [S, heads, words of a head], on the host: the step's number << 32 | a payload; queries, keys and values"""
    results: Tensor
    """[S, Hq * D], on the host: what attention on the host has given"""
    staged: Tensor
    """[L, R, Hq * D]: the results that enter behind attention of each layer, copied when the step begins"""
    saved: Tensor
    """[S, H]: the residual that the slot's row had when it left"""
    header: Tensor
    """int64 [2]: the number of the running step comes first"""

    @classmethod
    def allocate(
        cls, mailboxes: Tensor, results: Tensor, header: Tensor, *, layers: int, lanes: int, width: int
    ) -> HostLanes:
        """Allocate the lanes' memory on the device of ``header``, for residuals of so many columns."""
        slots, columns = results.shape
        staged = torch.zeros((layers, lanes, columns), dtype=results.dtype, device=header.device)
        saved = torch.zeros((slots, width), dtype=results.dtype, device=header.device)
        return cls(mailboxes, results, staged, saved, header)


def gather_results(lanes: HostLanes, step: DeviceStep, *, pdl: bool = False) -> None:
    """Copy the results with which rows enter the step. It comes after ingest, once a step."""
    assert step.lane_slots is not None
    entering, columns = step.lane_slots[1:], lanes.staged.shape[2]
    check(lanes.staged, lanes.results.dtype, (*entering.shape, columns), "staged")
    _gather_kernel[(entering.numel(), triton.cdiv(columns, _COLUMNS))](
        lanes.results, entering, lanes.staged, COLUMNS=columns, TILE=_COLUMNS, num_warps=4, **launch_options(pdl)
    )


@kernel
def _gather_kernel(
    results: tl.tensor,
    slots: tl.tensor,
    staged: tl.tensor,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
    entry = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + entry).to(tl.int64)
    if slot >= 0:
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = column < COLUMNS
        result = tl.load(results + slot * COLUMNS + column, mask=inside)
        tl.store(staged + entry * COLUMNS + column, result, mask=inside)


def exchange(
    heads: Tensor,
    x: Tensor,
    residual: Tensor,
    layer: AttentionLayer,
    number: int,
    lanes: HostLanes,
    step: DeviceStep,
    *,
    pdl: bool = False,
) -> None:
    """Exchange rows behind attention of layer ``number``: rows of that stage leave the lanes, then rows of the next one
    enter.

    heads [T, (Hq + 2Hk) * D] is what the QKV projection gave, x [T, Hq * D] what attention did, residual is [T, H]. In
    lanes that nobody enters x and residual stay as they are. One launch.
    """
    assert step.lane_slots is not None
    assert step.lane_positions is not None
    num_lanes, (slots, all_heads, _) = step.num_lanes, lanes.mailboxes.shape
    heads = heads.view(len(heads), all_heads, -1)
    dim, columns, width = heads.shape[2], x.shape[1], residual.shape[1]
    check_heads(heads, "heads")
    for rows in (x, residual):
        check_rows(rows, "x and residual")
    check(lanes.mailboxes, torch.int64, (slots, all_heads, dim * x.dtype.itemsize // 4), "mailboxes")
    check(lanes.saved, x.dtype, (slots, width), "saved")
    check(lanes.staged[number], x.dtype, (num_lanes, columns), "staged")
    if dim % 2 or columns != layer.num_heads * dim or heads.dtype != x.dtype or residual.dtype != x.dtype:
        raise ValueError(f"x {list(x.shape)} does not suit heads {list(heads.shape)} of {layer.num_heads} queries")
    half_tile = triton.next_power_of_2(dim // 2)
    head_tile = min(triton.next_power_of_2(all_heads), max(1, _HEAD_TILE // half_tile))
    head_parts = triton.cdiv(all_heads, head_tile)
    q_norm, k_norm, eps, v_norm = layer.norms or (heads, heads, 0.0, None)
    _exchange_kernel[(num_lanes, head_parts + triton.cdiv(max(columns, width), _COLUMNS))](
        heads,
        q_norm,
        k_norm,
        heads if v_norm is None else v_norm,
        eps,
        heads if layer.cos_sin is None else layer.cos_sin,
        x,
        residual,
        step.lane_slots,
        step.lane_positions,
        lanes.staged[number],
        lanes.saved,
        lanes.mailboxes,
        lanes.header,
        number * num_lanes,
        step.num_tokens - num_lanes,
        heads.stride(0),
        x.stride(0),
        residual.stride(0),
        NORM=layer.norms is not None,
        NORM_VALUES=v_norm is not None,
        ROTARY=layer.cos_sin is not None,
        Q_HEADS=layer.num_heads,
        HEADS=all_heads,
        HALF=dim // 2,
        HEAD_PARTS=head_parts,
        HEAD_TILE=head_tile,
        HALF_TILE=half_tile,
        X_COLUMNS=columns,
        COLUMNS=width,
        TILE=_COLUMNS,
        LANES=num_lanes,
        num_warps=4,
        **launch_options(pdl),
    )


@kernel(do_not_specialize=["first_entry", "first_lane"])
def _exchange_kernel(
    heads: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    v_norm: tl.tensor,
    eps: tl.tensor,
    cos_sin: tl.tensor,
    x: tl.tensor,
    residual: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    staged: tl.tensor,
    saved: tl.tensor,
    mailboxes: tl.tensor,
    header: tl.tensor,
    first_entry: tl.tensor,
    first_lane: tl.tensor,
    heads_stride: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    NORM: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    ROTARY: tl.constexpr,
    Q_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_PARTS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
    X_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid: lanes, then parts of the heads and parts of the columns of x and residual."""
    start_next(PDL)
    lane, part = tl.program_id(0), tl.program_id(1)
    token = (first_lane + lane).to(tl.int64)
    entry = first_entry + lane
    leaving = tl.load(slots + entry).to(tl.int64)  # ingest made the table, which may be read ahead
    entering = tl.load(slots + entry + LANES).to(tl.int64)
    position = tl.load(positions + entry).to(tl.int64)
    wait(PDL)
    if part < HEAD_PARTS:
        if leaving >= 0:
            _leave(
                heads + token * heads_stride, q_norm, k_norm, v_norm, eps, cos_sin + position * (2 * HALF), mailboxes,
                header, leaving, part * HEAD_TILE + tl.arange(0, HEAD_TILE)[:, None], NORM, NORM_VALUES, ROTARY,
                Q_HEADS, HEADS, HALF, HALF_TILE,
            )  # fmt: skip
    else:
        column = (part - HEAD_PARTS) * TILE + tl.arange(0, TILE)
        # Each element is read and written by one thread, the one that leaves before the one that enters.
        inside = column < COLUMNS
        at = residual + token * residual_stride + column
        leaves = tl.load(at, mask=inside & (leaving >= 0))
        enters = tl.load(saved + entering * COLUMNS + column, mask=inside & (entering >= 0))
        tl.store(saved + leaving * COLUMNS + column, leaves, mask=inside & (leaving >= 0))
        tl.store(at, enters, mask=inside & (entering >= 0))
        inside = (column < X_COLUMNS) & (entering >= 0)
        result = tl.load(staged + lane * X_COLUMNS + column, mask=inside)
        tl.store(x + token * x_stride + column, result, mask=inside)


@triton.jit
def _leave(
    heads: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    v_norm: tl.tensor,
    eps: tl.tensor,
    cos_sin: tl.tensor,
    mailboxes: tl.tensor,
    header: tl.tensor,
    slot: tl.tensor,
    head: tl.tensor,
    NORM: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    ROTARY: tl.constexpr,
    Q_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
) -> None:
    """Some heads of a token to the mailbox of a slot."""
    dtype: tl.constexpr = heads.dtype.element_ty
    KV_HEADS: tl.constexpr = (HEADS - Q_HEADS) // 2
    i = tl.arange(0, HALF_TILE)[None, :]
    inside = (head < HEADS) & (i < HALF)
    low = tl.load(heads + head * (2 * HALF) + i, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(heads + head * (2 * HALF) + HALF + i, mask=inside, other=0.0).to(tl.float32)
    is_v = head >= Q_HEADS + KV_HEADS
    gain_low, gain_high, cosine, sine = 1.0, 1.0, 1.0, 0.0
    if NORM:
        gain_low, gain_high = load_gains(q_norm, k_norm, v_norm, head < Q_HEADS, is_v, i, NORM_VALUES, HALF)
    if ROTARY:
        cosine = tl.load(cos_sin + i, mask=i < HALF, other=0.0)
        sine = tl.load(cos_sin + HALF + i, mask=i < HALF, other=0.0)
    low, high = norm_and_rotate(
        low, high, is_v, gain_low, gain_high, cosine, sine, eps, dtype, NORM, NORM_VALUES, ROTARY, HALF
    )
    tag = tl.load(header) << 32
    if dtype == tl.float32:
        at = mailboxes + (slot * HEADS + head) * (2 * HALF) + i
        tl.store(at, tag | (low.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF), mask=inside)
        tl.store(at + HALF, tag | (high.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF), mask=inside)
    else:
        first = low.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
        second = high.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
        tl.store(mailboxes + (slot * HEADS + head) * HALF + i, tag | (second << 16) | first, mask=inside)
