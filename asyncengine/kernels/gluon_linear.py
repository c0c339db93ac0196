"""Projections of 8 to 256 rows on Hopper, whose weights flow through shared memory without a pause between kernels.

The kernels of ``triton_linear`` for many rows begin to read weights when they may read x, and so leave the memory idle
from one kernel's last product to the next one's first. Here a program asks for its first weights, as much as its
shared memory holds, before it waits for the kernel that makes x (see pdl.py). Written in Gluon, because Triton's own
pipelining starts behind the wait.

The copies are the tensor memory accelerator's: a thread asks for a tile, and a barrier in shared memory counts its
bytes. Weights are the left operand, since the tensor cores want 64 rows there and x may have 8.

Where K is split, the parts are left for whoever reads the sum: adding them up here takes a program that waits for the
others, 2 us, and the norm that follows reads as fast from several places as from one (``triton_rows.norm``).
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc"
# ruff: noqa: RUF005 - Triton knows no starred items in a list

from __future__ import annotations

import logging

import torch
import triton
from torch import Tensor
from triton import TritonError
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncengine.kernels.compiling import Kernel
from asyncengine.kernels.linear_plans import Plan
from asyncengine.kernels.ops import Activation
from asyncengine.kernels.pdl import launch_options
from asyncengine.kernels.triton_rows import activate

logger = logging.getLogger(__name__)

_activate = gluon.jit(activate.fn)


class GluonKernel(Kernel, GluonJITFunction):
    """A function in Gluon that is launched from Python. Triton's interpreter does not run it."""


def works(device: torch.device) -> bool:
    """Whether this GPU and this Triton, of which Gluon is an experimental part, run streamed plans; runs one."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    x, weight = (torch.ones(rows, 128, dtype=torch.bfloat16, device=device) for rows in (8, 64))
    out = torch.zeros(8, 64, dtype=torch.bfloat16, device=device)
    try:
        streamed_linear(x, weight, Plan("streamed", 64, 64, 4, 8, stages=2), out=out)
        torch.cuda.synchronize(device)
    except (RuntimeError, TypeError, AttributeError, TritonError) as e:
        logger.warning("projections do not stream their weights, which is slower: %s", e)
        return False
    return bool((out == 128).all())


def streamed_linear(
    x: Tensor,
    weight: Tensor,
    plan: Plan,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    add: bool = False,
    pdl: bool = False,
) -> None:
    """out [M, N] = activation(x [M, K] weight^T + bias), or with ``add`` out += that.

    x and weight are bfloat16, the rows of x aligned to 16 bytes; weight is [N, K], for silu_mul [2N, K] with the gate's
    rows first, bias as long. out is bfloat16 or float32, its rows may be strided. Raises ValueError if anything does
    not fit, or if the plan splits K.
    """
    if plan.leaves_parts:
        raise ValueError(f"{plan} leaves parts")
    _launch(x, weight, plan, out, bias, activation, add, pdl)


def streamed_parts(x: Tensor, weight: Tensor, plan: Plan, *, bias: Tensor | None = None, pdl: bool = False) -> Tensor:
    """float32 [plan.split, M, N], the sum of whose parts is x [M, K] weight [N, K]^T + bias [N]."""
    parts = torch.empty((plan.split, len(x), len(weight)), dtype=torch.float32, device=x.device)
    _launch(x, weight, plan, parts, bias, None, False, pdl)
    return parts


def _launch(
    x: Tensor, weight: Tensor, plan: Plan, out: Tensor, bias: Tensor | None, activation: Activation | None, add: bool,
    pdl: bool,
) -> None:  # fmt: skip
    rows, inner = x.shape
    gated = activation == "silu_mul"
    columns = len(weight) // (1 + gated)
    if plan.kind != "streamed" or not plan.fits(columns, inner, gated):
        raise ValueError(f"{plan} does not fit a weight {list(weight.shape)}")
    strided = x.stride(1) != 1 or out.stride(-1) != 1 or not weight.is_contiguous()
    if strided or out.shape[-2:] != (rows, columns) or weight.shape != (columns * (1 + gated), inner):
        raise ValueError(f"x {list(x.shape)}, weight {list(weight.shape)} and out {list(out.shape)} do not fit")
    programs = triton.cdiv(columns, plan.columns // (1 + gated))
    _streamed_kernel[(triton.cdiv(rows, plan.rows), programs, plan.split)](
        _tiles(x, plan.rows, plan.inner),
        _gate_and_up(weight, plan.columns, plan.inner) if gated else _tiles(weight, plan.columns, plan.inner),
        weight if bias is None else bias,
        out,
        rows,
        columns,
        out.stride(-2),
        K=inner,
        BM=plan.rows,
        BN=plan.columns,
        BK=plan.inner,
        SPLIT=plan.split,
        STAGES=plan.stages,
        ACT=activation or "none",
        BIAS=bias is not None,
        ADD=add,
        WARPS=plan.warps,
        num_warps=plan.warps,
        **launch_options(pdl),
    )


def _tiles(x: Tensor, rows: int, inner: int) -> TensorDescriptor:
    """x [M, K] as the accelerator copies it, in tiles of so many rows and elements of K."""
    if x.stride(0) % 8 or x.data_ptr() % 16:
        raise ValueError(f"rows of {list(x.shape)} with stride {x.stride(0)} are not aligned to 16 bytes")
    layout = gl.NVMMASharedLayout.get_default_for([rows, inner], gl.bfloat16)
    return TensorDescriptor.from_tensor(x, [rows, inner], layout)


def _gate_and_up(weight: Tensor, rows: int, inner: int) -> TensorDescriptor:
    """weight [2N, K] in tiles of so many rows: in turn 8 rows of the gate and the 8 rows of up for the same columns.

    A thread's sums are of rows that lie 8 apart, so it gets what belongs together.
    """
    columns, k = len(weight) // 2, weight.shape[1]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    shape, strides = [columns // 8, 2, 8, k], [8 * k, columns * k, k, 1]
    return TensorDescriptor(weight, shape, strides, [rows // 16, 2, 8, inner], layout)


@gluon.jit
def _copy_weights(weight, column, k, ready, to, GATED: gl.constexpr, wanted):
    if GATED:
        tma.async_copy_global_to_shared(weight, [column // 8, 0, 0, k], ready, to, pred=wanted)
    else:
        tma.async_copy_global_to_shared(weight, [column, k], ready, to, pred=wanted)


@GluonKernel
def _streamed_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    columns,
    out_stride,
    K: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    ACT: gl.constexpr,
    BIAS: gl.constexpr,
    ADD: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Grid: blocks of x's rows, tiles of the weight's rows, parts of K. Who shares weights is side by side."""
    if PDL:
        gdc_launch_dependents()
    GATED: gl.constexpr = ACT == "silu_mul"
    WIDTH: gl.constexpr = BN // 2 if GATED else BN
    SPAN: gl.constexpr = K // SPLIT
    STEPS: gl.constexpr = (SPAN + BK - 1) // BK
    AHEAD: gl.constexpr = STAGES if STAGES < STEPS else STEPS
    BYTES: gl.constexpr = (BN + BM) * BK * 2
    # How sums lie among threads, and how results do that are stored: 16 bytes of a row of out each.
    DOWN: gl.constexpr = WARPS if BN >= 16 * WARPS else 4
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [DOWN, WARPS // DOWN], [16, BM * DOWN // WARPS, 16])
    LANES: gl.constexpr = WIDTH // 8 if WIDTH < 256 else 32
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])

    block, program, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    row, column, first = block * BM, program * WIDTH, split * SPAN
    # Where x is small, programs begin at different k: 1-4% of large weights, whose rows all begin in the same banks.
    shift = (5 * program + 3 * split) % STEPS if BM <= 16 else 0
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], x.layout)
    ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + weight.block_shape, weight.layout)
    for i in gl.static_range(AHEAD):
        mbarrier.expect(ready.index(i), BYTES)
        k = first + (i + shift) % STEPS * BK
        _copy_weights(weight, column, k, ready.index(i), ws.index(i), GATED, True)
    n = column + gl.arange(0, WIDTH, gl.SliceLayout(1, STORED))
    m = row + gl.arange(0, BM, gl.SliceLayout(0, STORED))
    at = out + (split * rows + m).to(gl.int64)[None, :] * out_stride + n[:, None]
    there = (m < rows)[None, :] & (n < columns)[:, None]
    if PDL:
        gdc_wait()
    for i in gl.static_range(AHEAD):
        tma.async_copy_global_to_shared(x, [row, first + (i + shift) % STEPS * BK], ready.index(i), xs.index(i))
    if ADD:
        added = gl.load(at, mask=there, other=0.0)

    acc = gl.zeros([BN, BM], gl.float32, SUMS)
    FLAT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    for step in range(STEPS):
        slot = step % STAGES
        mbarrier.wait(ready.index(slot), step // STAGES & 1)
        tile = ws.index(slot)
        if GATED:
            tile = tile._reinterpret(gl.bfloat16, [BN, BK], FLAT)
        acc = warpgroup_mma(tile, xs.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, (acc,))
        # The product of the step before is done, so its memory is free.
        free, following = (slot + STAGES - 1) % STAGES, step - 1 + STAGES
        wanted = (step > 0) & (following < STEPS)
        k = first + (following + shift) % STEPS * BK
        mbarrier.expect(ready.index(free), BYTES, pred=wanted)
        _copy_weights(weight, column, k, ready.index(free), ws.index(free), GATED, wanted)
        tma.async_copy_global_to_shared(x, [row, k], ready.index(free), xs.index(free), pred=wanted)
    acc = warpgroup_mma_wait(0, (acc,))
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(ready.index(i))

    if BIAS:  # once, and not in every part
        of = gl.arange(0, BN, gl.SliceLayout(1, SUMS))
        of = column + (of // 16 * 8 + of % 8 if GATED else of)
        second = gl.arange(0, BN, gl.SliceLayout(1, SUMS)) // 8 % 2 * columns if GATED else 0
        b = gl.load(bias + second + of, mask=(of < columns) & (split == 0), other=0.0)
        acc += b.to(gl.float32)[:, None]
    if GATED:
        pairs = gl.permute(gl.reshape(acc, [BN // 16, 2, 8, BM]), (0, 2, 3, 1))
        gate, up = gl.split(pairs)
        acc = gl.reshape(gate / (1 + gl.exp(-gate)) * up, [WIDTH, BM])
    elif ACT != "none":
        acc = _activate(acc, ACT)
    y = gl.convert_layout(acc, STORED)
    if ADD:
        y += added.to(gl.float32)
    gl.store(at, y.to(out.dtype.element_ty), mask=there)
