"""Ends of experts' products that every kernel of them shares, and the sum of a row's results."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, start_next, wait
from asyncengine.kernels.cuda.rows.activation import activate, clamped_silu_mul
from asyncengine.kernels.cuda.rows.tensors import ELEMENTWISE_TILE

GATED_KINDS = frozenset(("silu_mul", "gelu_tanh_mul", "clamped_silu_mul"))


@triton.jit
def activate_columns(y, ACT: tl.constexpr, GATED: tl.constexpr):
    """Activate y [BN, BM] in float32; with a gate, half of the rows are gate and half up: [BN / 2, BM]."""
    if GATED:
        BN: tl.constexpr = y.shape[0]
        BM: tl.constexpr = y.shape[1]
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, BN // 2, BM]), [1, 2, 0]))
        if ACT == "silu_mul":
            y = gate * tl.sigmoid(gate) * up
        elif ACT == "clamped_silu_mul":
            y = clamped_silu_mul(gate, up)
        else:
            tl.static_assert(ACT == "gelu_tanh_mul")
            y = activate(gate, "gelu_tanh") * up
    elif ACT != "none":
        y = activate(y, ACT)
    return y


@kernel
def _sum_kernel(results, out, out_stride, TOP_K: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
                ADD: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    start_next(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < WIDTH
    total = tl.zeros([TILE], tl.float32)
    for i in tl.static_range(TOP_K):
        total += tl.load(results + (row * TOP_K + i) * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    to = out + row * out_stride + column
    if ADD:
        total += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)


def sum_results(results: Tensor, out: Tensor, *, add: bool, pdl: bool = False) -> None:
    """out [T, H] = the sums of results [T * top_k, H] over each row's experts, in their order; or out += that."""
    rows, width = out.shape
    _sum_kernel[(rows, triton.cdiv(width, ELEMENTWISE_TILE))](
        results, out, out.stride(0), TOP_K=len(results) // rows, WIDTH=width, TILE=ELEMENTWISE_TILE, ADD=add,
        num_warps=4, **launch_options(pdl),
    )  # fmt: skip
