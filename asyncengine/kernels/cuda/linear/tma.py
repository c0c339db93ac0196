"""Projections of 8 rows and more on Hopper: weights are copied without a pause between kernels.

The tiled kernel begins to read weights when it may read x. The memory is idle from the last product of one kernel to
the first product of the next. Here a program asks for its first weights, as much as its shared memory holds, before it
waits for the kernel that makes x (see launch/programmatic.py). The kernel is written in Gluon, because Triton's own
pipelining starts behind the wait.

A thread asks the accelerator for a tile, and a barrier in shared memory counts the tile's bytes. Weights are the left
operand: the tensor cores want 64 rows there, and x may have 8. Where tiles of 64 rows would leave multiprocessors idle,
tiles have 16 or 32 rows. These use the small instruction, and each warp has its own stretch of K.

Where K is split, the parts of a sum are left for the norm that reads the sum. A program that adds the parts up here
would wait for the others, 2 us; the norm reads several places as fast as one (see rows/norms.py). Where K is not split,
the norm may have no kernel of its own (see residual.py).
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc, no-redef"
# ruff: noqa: RUF005 - Triton knows no starred items in a list

from __future__ import annotations

from functools import partial
from typing import Unpack

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncengine.kernels.cuda.launch.cache_policy import marks_of_operands
from asyncengine.kernels.cuda.launch.gluon import (
    GluonKernel,
    copy_tile,
    stretches,
    sums_layout,
    tiles_of,
    whole_tiles_of,
)
from asyncengine.kernels.cuda.launch.programmatic import TmaOptions, launch_options
from asyncengine.kernels.cuda.linear.ends import activate_sums, load_sums, store_norm, store_unnormed_rows
from asyncengine.kernels.cuda.linear.plan import Plan
from asyncengine.kernels.cuda.linear.residual import Unnormed
from asyncengine.kernels.ops import Activation, Norm


def tma_linear(
    x: Tensor | Unnormed,
    weight: Tensor,
    plan: Plan,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    shift: Tensor | None = None,
    activation: Activation | None = None,
    add: bool = False,
    **how: Unpack[TmaOptions],
) -> None:
    """out [M, N] = activation(x [M, K] weight^T + bias), or with ``add`` out += that.

    x and weight are bfloat16, the rows of x aligned to 16 bytes; weight is [N, K], for silu_mul [2N, K] with the gate's
    rows first, bias as long. out is bfloat16 or float32, its rows may be strided. Raises ValueError if anything does
    not fit, or if the plan splits K.

    If x is ``Unnormed`` by a LayerNorm, ``bias`` and ``shift`` are what ``fold_norm`` gives.
    """
    if not isinstance(x, Unnormed):
        _launch(x, weight, plan, out, bias, activation, add, **how)
        return
    if len(x.sums) != 1 + (shift is not None) or x.sums.shape[2] != len(x.x):
        raise ValueError(f"sums {list(x.sums.shape)} are not those of a norm of {list(x.x.shape)}")
    _launch(x.x, weight, plan, out, bias, activation, add, reads=x, vector=shift, **how)


def tma_sum(
    x: Tensor,
    weight: Tensor,
    plan: Plan,
    *,
    out: Tensor,
    norm: Norm,
    bias: Tensor | None = None,
    **how: Unpack[TmaOptions],
) -> Unnormed:
    """out [M, N] += x [M, K] weight [N, K]^T + bias [N], bfloat16, for the projection that reads it through ``norm``.

    Raises ValueError as ``tma_linear`` does.
    """
    result = Unnormed.allocate(out, triton.cdiv(len(weight), plan.columns), norm)
    _launch(x, weight, plan, out, bias, None, True, writes=result, vector=norm.weight, **how)
    return result


def tma_parts(
    x: Tensor, weight: Tensor, plan: Plan, *, bias: Tensor | None = None, **how: Unpack[TmaOptions]
) -> Tensor:
    """float32 [plan.split, M, N], the sum of whose parts is x [M, K] weight [N, K]^T + bias [N]."""
    parts = torch.empty((plan.split, len(x), len(weight)), dtype=torch.float32, device=x.device)
    _launch(x, weight, plan, parts, bias, None, False, **how)
    return parts


def _launch(
    x: Tensor, weight: Tensor, plan: Plan, out: Tensor, bias: Tensor | None, fused: Activation | None, add: bool,
    *, reads: Unnormed | None = None, writes: Unnormed | None = None, vector: Tensor | None = None, pdl: bool = False,
    l2_cache_hints: bool = True,
) -> None:  # fmt: skip
    """``vector`` is that of the norm which is read or written: what its mean adds, or its weight."""
    rows, inner = x.shape
    unnormed = reads or writes
    gated = fused == "silu_mul"
    columns = len(weight) // (1 + gated)
    if plan.leaves_parts and out.ndim < 3:
        raise ValueError(f"{plan} leaves parts")
    if plan.kind != "tma" or not plan.fits(columns, inner, gated):
        raise ValueError(f"{plan} does not fit a weight {list(weight.shape)}")
    blocks, programs = triton.cdiv(rows, plan.rows), triton.cdiv(columns, plan.columns // (1 + gated))
    strided = x.stride(1) != 1 or out.stride(-1) != 1 or not weight.is_contiguous()
    if strided or out.shape[-2:] != (rows, columns) or weight.shape != (columns * (1 + gated), inner):
        raise ValueError(f"x {list(x.shape)}, weight {list(weight.shape)} and out {list(out.shape)} do not fit")
    _tma_kernel[(blocks, programs, plan.split)](
        whole_tiles_of(x, plan.rows, plan.inner),
        _gate_and_up(weight, plan.columns, plan.inner) if gated else tiles_of(weight, plan.columns, plan.inner),
        weight if bias is None else bias,
        out,
        weight if vector is None else vector,
        out if writes is None else writes.x,
        out if unnormed is None else unnormed.sums,
        0.0 if reads is None else reads.eps,
        rows,
        columns,
        out.stride(-2),
        K=inner,
        BM=plan.rows,
        BN=plan.columns,
        BK=plan.inner,
        SPLIT=plan.split,
        STAGES=plan.stages,
        FUSED=fused or "none",
        BIAS=bias is not None,
        ADD=add,
        READS=0 if reads is None else len(reads.sums),
        WRITES=0 if writes is None else len(writes.sums),
        TILES=0 if reads is None else reads.sums.shape[1],
        WARPS=plan.warps,
        num_warps=plan.warps,
        **marks_of_operands(blocks, hints=l2_cache_hints),
        **launch_options(pdl),
    )


_GATE_AND_UP = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


def _gate_and_up(weight: Tensor, rows: int, inner: int) -> TensorDescriptor:
    """weight [2N, K] in tiles of so many rows: in turn 8 rows of the gate and the 8 rows of up for the same columns.

    A thread's sums are of rows that lie 8 apart, so it gets what belongs together.
    """
    columns, k = len(weight) // 2, weight.shape[1]
    shape, strides = [columns // 8, 2, 8, k], [8 * k, columns * k, k, 1]
    return TensorDescriptor(weight, shape, strides, [rows // 16, 2, 8, inner], _GATE_AND_UP)


@gluon.jit
def _copy_weights(weight, column, k, ready, to, GATED: gl.constexpr, MARK: gl.constexpr, wanted):
    if GATED:
        copy_tile(weight, (column // 8, 0, 0, k), ready, to, MARK, wanted)
    else:
        copy_tile(weight, (column, k), ready, to, MARK, wanted)


@gluon.jit
def _multiply(acc, w, x, ready, phase, BN: gl.constexpr, GATED: gl.constexpr):
    """A step of K. That of Hopper's own instruction is done when the one before it is waited for."""
    BM: gl.constexpr = x.shape[0]
    BK: gl.constexpr = x.shape[1]
    mbarrier.wait(ready, phase)
    if len(acc.shape) == 3:
        PARTS: gl.constexpr = acc.type.layout
        WARPS: gl.constexpr = acc.shape[0]
        w = w._reinterpret(gl.bfloat16, [WARPS, BN, BK // WARPS], stretches(BN, BK, WARPS))
        x = x._reinterpret(gl.bfloat16, [WARPS, BM, BK // WARPS], stretches(BM, BK, WARPS))
        left = w.load(gl.DotOperandLayout(0, PARTS, 2))
        right = x.permute((0, 2, 1)).load(gl.DotOperandLayout(1, PARTS, 2))
        acc = mma_v2(left, right, acc)
    else:
        if GATED:
            w = w._reinterpret(gl.bfloat16, [BN, BK], gl.NVMMASharedLayout(128, 16, 2))
        acc = warpgroup_mma(w, x.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, (acc,))
    return acc


@partial(GluonKernel, do_not_specialize=["rows"])  # one compilation for all that a plan is for
def _tma_kernel(
    x,
    weight,
    bias,
    out,
    vector,
    scaled,
    sums,
    eps,
    rows,
    columns,
    out_stride,
    K: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    SPLIT: gl.constexpr,
    W_MARK: gl.constexpr,
    X_MARK: gl.constexpr,
    STAGES: gl.constexpr,
    FUSED: gl.constexpr,
    BIAS: gl.constexpr,
    ADD: gl.constexpr,
    READS: gl.constexpr,
    WRITES: gl.constexpr,
    TILES: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Grid: blocks of x's rows, tiles of the weight's rows, parts of K. Programs that share weights are side by side.

    out: [parts, rows, columns]. W_MARK and X_MARK: see marks_of_operands. READS and WRITES: how many sums of a norm's
    rows are read or written.
    """
    if PDL:
        gdc_launch_dependents()
    GATED: gl.constexpr = FUSED == "silu_mul"
    WIDTH: gl.constexpr = BN // 2 if GATED else BN
    SPAN: gl.constexpr = K // SPLIT
    STEPS: gl.constexpr = (SPAN + BK - 1) // BK
    AHEAD: gl.constexpr = STAGES if STAGES < STEPS else STEPS
    BYTES: gl.constexpr = (BN + BM) * BK * 2
    # Layout of the results that threads store: each thread has 16 bytes of a row of out.
    THREADS: gl.constexpr = WIDTH // 8 if WIDTH < 256 else 32
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [THREADS, 32 // THREADS], [1, WARPS], [0, 1])
    # Layout of the sums. Where rows are fewer than Hopper's instruction has, each warp sums up another stretch of K.
    NARROW: gl.constexpr = BN < 64
    if NARROW:
        PARTS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
        TOGETHER: gl.constexpr = gl.BlockedLayout(
            [WARPS, BN // THREADS, 1], [1, THREADS, 32 // THREADS], [1, 1, WARPS], [1, 2, 0]
        )
        SUMS: gl.constexpr = gl.SliceLayout(0, TOGETHER)
        acc = gl.zeros([WARPS, BN, BM], gl.float32, PARTS)
    else:
        SUMS: gl.constexpr = sums_layout(BN, BM, WARPS)
        acc = gl.zeros([BN, BM], gl.float32, SUMS)

    block, program, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    row, column, first = block * BM, program * WIDTH, split * SPAN
    # If x is small, programs begin at different k. That saves 1-4% for large weights, whose rows all begin in the same
    # banks.
    turn = (5 * program + 3 * split) % STEPS if BM <= 16 else 0
    ready = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    xs = gl.allocate_shared_memory(gl.bfloat16, [AHEAD, BM, BK], x.layout)
    ws = gl.allocate_shared_memory(gl.bfloat16, [AHEAD] + weight.block_shape, weight.layout)
    # All warps meet between any two operations on barriers, so weights are asked for before it is said how many bytes
    # are to come.
    for i in gl.static_range(AHEAD):
        mbarrier.init(ready.index(i), count=1)
        _copy_weights(weight, column, first + (i + turn) % STEPS * BK, ready.index(i), ws.index(i), GATED, W_MARK, True)
    for i in gl.static_range(AHEAD):
        mbarrier.expect(ready.index(i), BYTES)
    n = column + gl.arange(0, WIDTH, gl.SliceLayout(1, STORED))
    m = row + gl.arange(0, BM, gl.SliceLayout(0, STORED))
    at = out + (split * rows + m).to(gl.int64)[None, :] * out_stride + n[:, None]
    there = (m < rows)[None, :] & (n < columns)[:, None]
    place = gl.arange(0, BN, gl.SliceLayout(1, SUMS))
    of = column + (place // 16 * 8 + place % 8 if GATED else place)
    second = place // 8 % 2 * columns if GATED else 0
    # A load that begins behind the product has nothing left to hide behind.
    if WRITES > 0:
        gain = gl.load(vector + n, mask=n < columns, other=0.0)
    if READS == 2:
        shift = gl.load(vector + second + of, mask=of < columns, other=0.0)
    if BIAS:  # once, and not in every part
        offset = gl.load(bias + second + of, mask=(of < columns) & (split == 0), other=0.0)
    if PDL:
        gdc_wait()
    for i in gl.static_range(AHEAD):
        copy_tile(x, (row, first + (i + turn) % STEPS * BK), ready.index(i), xs.index(i), X_MARK, True)
    if ADD:
        added = gl.load(at, mask=there, other=0.0)
    if READS > 0:  # and nobody waits for them until the products are made
        norms = gl.allocate_shared_memory(gl.float32, [READS, BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        squares = load_sums(sums, row, rows, BM, TILES, WARPS)
        values = load_sums(sums + TILES * rows, row, rows, BM, TILES, WARPS) if READS == 2 else squares

    for step in range(STEPS):
        slot = step % STAGES
        acc = _multiply(acc, ws.index(slot), xs.index(slot), ready.index(slot), step // STAGES & 1, BN, GATED)
        if STEPS > STAGES:  # the product of the step before is done, so its memory is free
            free, following = (slot + STAGES - 1) % STAGES, step - 1 + STAGES
            wanted = (step > 0) & (following < STEPS)
            k = first + (following + turn) % STEPS * BK
            mbarrier.expect(ready.index(free), BYTES, pred=wanted)
            _copy_weights(weight, column, k, ready.index(free), ws.index(free), GATED, W_MARK, wanted)
            copy_tile(x, (row, k), ready.index(free), xs.index(free), X_MARK, wanted)
    if READS > 0:
        store_norm(norms, squares, values, eps, K)
    acc = gl.sum(gl.convert_layout(acc, TOGETHER), 0) if NARROW else warpgroup_mma_wait(0, (acc,))

    if READS == 2:
        acc -= shift[:, None] * norms.index(1).load(gl.SliceLayout(0, SUMS))[None, :]
    if READS > 0:
        acc *= norms.index(0).load(gl.SliceLayout(0, SUMS))[None, :]
    if BIAS:
        acc += offset.to(gl.float32)[:, None]
    y = gl.convert_layout(activate_sums(acc, FUSED), STORED)
    if ADD:
        y += added.to(gl.float32)
    y = y.to(out.dtype.element_ty)
    gl.store(at, y, mask=there)
    if WRITES > 0:
        store_unnormed_rows(y, gain, scaled, sums, program, gl.num_programs(1), n, m, rows, columns, WRITES)
