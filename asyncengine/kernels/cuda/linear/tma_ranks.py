"""The head of rows that are all sampled greedily, on Hopper: of each tile of the vocabulary a rank instead of logits.

A vocabulary has several tiles for each multiprocessor. Programs stay, and take one tile after another; copies go on
across tiles, so that the next one's first weights are there when its turn comes. See linear/tma.py for the rest.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.launch.cache_policy import marks_of_operands
from asyncengine.kernels.cuda.launch.gluon import GluonKernel, copy_tile, sums_layout, tiles_of, whole_tiles_of
from asyncengine.kernels.cuda.launch.programmatic import launch_options
from asyncengine.kernels.cuda.linear.formats.registry import shared_bytes
from asyncengine.kernels.cuda.linear.plan import Plan
from asyncengine.kernels.cuda.sampling.filters import LAST_INDEX, MAX_VOCAB, rank_of

_rank_of = gluon.jit(rank_of.fn)


def tma_ranks(
    x: Tensor,
    weight: Tensor,
    plan: Plan,
    *,
    gpu: Gpu,
    bias: Tensor | None = None,
    pdl: bool = False,
    l2_cache_hints: bool = True,
) -> Tensor:
    """Return the greatest rank in each ``plan.columns`` of a row of the logits x [M, K] weight [N, K]^T + bias [N].

    int64 [M, tiles]; see ``rank_of`` of sampling/filters.py. NaN has the rank of +inf, and its index may be any. x and
    weight are bfloat16, the rows of x aligned to 16 bytes. Raises ValueError if anything does not fit, or if a rank
    cannot tell N columns apart. ``l2_cache_hints``: see ``cache_policy``; results are the same.
    """
    (rows, inner), columns = x.shape, len(weight)
    if columns > MAX_VOCAB:
        raise ValueError(f"a rank does not tell {columns} columns apart")
    if not plan.fits_head(columns, inner):
        raise ValueError(f"{plan} does not fit a head {list(weight.shape)}")
    if x.stride(1) != 1 or not weight.is_contiguous() or weight.shape[1] != inner:
        raise ValueError(f"x {list(x.shape)} and weight {list(weight.shape)} do not fit")
    tiles, blocks = triton.cdiv(columns, plan.columns), triton.cdiv(rows, plan.rows)
    ranks = torch.empty((rows, tiles), dtype=torch.int64, device=x.device)
    _head_kernel[(blocks, min(tiles, max(1, num_programs(gpu, plan) // blocks)))](
        whole_tiles_of(x, plan.rows, plan.inner),
        tiles_of(weight, plan.columns, plan.inner),
        weight if bias is None else bias,
        ranks,
        rows,
        columns,
        K=inner,
        BM=plan.rows,
        BN=plan.columns,
        BK=plan.inner,
        STAGES=plan.stages,
        BIAS=bias is not None,
        WARPS=plan.warps,
        num_warps=plan.warps,
        **marks_of_operands(blocks, hints=l2_cache_hints),
        **launch_options(pdl),
    )
    return ranks


def num_programs(gpu: Gpu, plan: Plan) -> int:
    """Return as many programs as the card has room for at once."""
    return gpu.multiprocessors * (2 if shared_bytes(plan, "bf16") <= gpu.tile_bytes_of_two else 1)


@gluon.jit
def _greater(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _greatest_rank(logits, column, columns, AXIS: gl.constexpr):
    """Along the axis of columns, which begin with ``column``; those from ``columns`` on are not there."""
    n = column + gl.arange(0, logits.shape[AXIS], gl.SliceLayout(1 - AXIS, logits.type.layout))
    n = gl.expand_dims(n, 1 - AXIS)
    if column + logits.shape[AXIS] > columns:
        logits = gl.where(n < columns, logits, float("-inf"))
    # First the value, then its index: 4 instructions a logit, of 32 bits. Ranks have 64.
    first = gl.reduce(logits, AXIS, _greater)
    is_first = logits == gl.expand_dims(first, AXIS)
    return _rank_of(first, gl.min(gl.where(is_first, n, LAST_INDEX), AXIS))


@partial(GluonKernel, do_not_specialize=["rows"])  # one compilation for all that a plan is for
def _head_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    columns,
    K: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    W_MARK: gl.constexpr,
    X_MARK: gl.constexpr,
    STAGES: gl.constexpr,
    BIAS: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Grid: blocks of x's rows, programs. out: [rows, tiles]. W_MARK and X_MARK: see marks_of_operands.

    Copies are STAGES steps ahead of products. A step that many later is of this tile, or of one to come.
    """
    if PDL:
        gdc_launch_dependents()
    STEPS: gl.constexpr = (K + BK - 1) // BK
    BYTES: gl.constexpr = (BN + BM) * BK * 2
    # A thread has sums of 2 rows of the left operand and of many of the right one. So if weights are on the right, it
    # finds the first of a row of x by itself, but for what three others have. On the left rows are 64 at least.
    TURNED: gl.constexpr = BM >= 64
    AXIS: gl.constexpr = 1 if TURNED else 0
    LEFT: gl.constexpr = BM if TURNED else BN
    RIGHT: gl.constexpr = BN if TURNED else BM
    SUMS: gl.constexpr = sums_layout(LEFT, RIGHT, WARPS)
    block, program, count = gl.program_id(0), gl.program_id(1), gl.num_programs(1)
    row, tiles = block * BM, (columns + BN - 1) // BN
    # If x is small, programs begin at different k. That saves 1-4% for large weights, whose rows all begin in the same
    # banks.
    turn = 5 * program % STEPS if BM <= 16 else 0
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], x.layout)
    ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], weight.layout)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        tile, k = program + i // STEPS * count, (i + turn) % STEPS * BK
        copy_tile(weight, (tile * BN, k), ready.index(i), ws.index(i), W_MARK, tile < tiles)
    for i in gl.static_range(STAGES):
        mbarrier.expect(ready.index(i), BYTES, pred=program + i // STEPS * count < tiles)
    if PDL:
        gdc_wait()
    for i in gl.static_range(STAGES):
        there = program + i // STEPS * count < tiles
        copy_tile(x, (row, (i + turn) % STEPS * BK), ready.index(i), xs.index(i), X_MARK, there)

    at = 0
    for tile in range(program, tiles, count):
        column = tile * BN
        if BIAS:
            of = column + gl.arange(0, BN, gl.SliceLayout(1 - AXIS, SUMS))
            offset = gl.load(bias + of, mask=of < columns, other=0.0)
        acc = gl.zeros([LEFT, RIGHT], gl.float32, SUMS)
        for step in range(STEPS):
            slot = at % STAGES
            mbarrier.wait(ready.index(slot), at // STAGES & 1)
            if TURNED:
                acc = warpgroup_mma(xs.index(slot), ws.index(slot).permute((1, 0)), acc, is_async=True)
            else:
                acc = warpgroup_mma(ws.index(slot), xs.index(slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, (acc,))
            # The product of the step before is done, so its memory is free.
            free, ahead = (at + STAGES - 1) % STAGES, step + STAGES - 1
            then, k = tile + ahead // STEPS * count, (ahead + turn) % STEPS * BK
            wanted = (at > 0) & (then < tiles)
            mbarrier.expect(ready.index(free), BYTES, pred=wanted)
            copy_tile(weight, (then * BN, k), ready.index(free), ws.index(free), W_MARK, wanted)
            copy_tile(x, (row, k), ready.index(free), xs.index(free), X_MARK, wanted)
            at += 1
        acc = warpgroup_mma_wait(0, (acc,))
        if BIAS:
            acc += gl.expand_dims(offset.to(gl.float32), 1 - AXIS)
        ranks = _greatest_rank(acc, column, columns, AXIS)
        m = row + gl.arange(0, BM, gl.SliceLayout(AXIS, SUMS))
        gl.store(out + m.to(gl.int64) * tiles + tile, ranks, mask=m < rows)
