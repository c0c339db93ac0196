"""SiLU with a gate, GELU, squares and the soft cap of logits on the GPU. Kernels of products call the first two."""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, start_next, wait
from asyncengine.kernels.cuda.rows.tensors import ELEMENTWISE_TILE, check_rows, empty_rows
from asyncengine.kernels.ops import Activation, is_gated


@triton.jit
def gelu_gate(value: tl.tensor) -> tl.tensor:
    """2u of 0.5 x (1 + tanh(u)), u = sqrt(2/π) (x + 0.044715 x³): x sigmoid(2u), where nothing cancels for x << 0."""
    return value * (1.5957691216057308 + 0.07135481627260025 * value * value)


@triton.jit
def activate(value: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """GELU of float32, in its tanh approximation or not, or the square of what is above 0."""
    if KIND == "relu2":
        return tl.where(value < 0.0, 0.0, value * value)
    if KIND == "gelu_tanh":
        return value * tl.sigmoid(gelu_gate(value))
    return 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))


@triton.jit
def clamped_silu_mul(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """SiLU with a gate, both between limits. NaN stays NaN."""
    gate = tl.where(gate > 7.0, 7.0, gate)
    up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
    return gate * tl.sigmoid(1.702 * gate) * (up + 1.0)


@kernel
def _activation_kernel(
    x: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    start_next(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < WIDTH
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == "silu_mul":
        up = tl.load(x + row * x_stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        value = value * tl.sigmoid(value) * up
    elif KIND == "gelu_tanh_mul":
        up = tl.load(x + row * x_stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        value = activate(value, "gelu_tanh") * up
    elif KIND == "clamped_silu_mul":
        up = tl.load(x + row * x_stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        value = clamped_silu_mul(value, up)
    else:
        value = activate(value, KIND)
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)


def activate_rows(x: Tensor, kind: Activation, *, pdl: bool = False) -> Tensor:
    """x [M, N] activated, its rows may be strided. A gated activation takes an even N and halves it."""
    check_rows(x, "x")
    if is_gated(kind) and x.shape[1] % 2:
        raise ValueError(f"x must have an even last axis, got {list(x.shape)}")
    width = x.shape[1] // 2 if is_gated(kind) else x.shape[1]
    out = empty_rows(len(x), width, x.dtype, x.device)
    _activation_kernel[(x.shape[0], triton.cdiv(width, ELEMENTWISE_TILE))](
        x, out, x.stride(0), KIND=kind, WIDTH=width, TILE=ELEMENTWISE_TILE, num_warps=4, **launch_options(pdl)
    )
    return out


@kernel
def _sigmoid_gate_kernel(
    x: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    gate_stride: tl.tensor,
    WIDTH: tl.constexpr,
    ALIKE: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    start_next(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < WIDTH
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ALIKE:
        factor = tl.load(gate + row * gate_stride).to(tl.float32)
    else:
        factor = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (value * tl.sigmoid(factor)).to(out.dtype.element_ty), mask=inside)


def gate_by_sigmoid(x: Tensor, gate: Tensor, *, pdl: bool = False) -> Tensor:
    """x [M, N] times the sigmoid of gate [M, N] or [M, 1]; rows may be strided. ValueError if they do not fit."""
    check_rows(x, "x")
    check_rows(gate, "gate")
    rows, width = x.shape
    if len(gate) != rows or gate.shape[1] not in (1, width) or gate.dtype != x.dtype:
        raise ValueError(
            f"gate must be {x.dtype} [{rows}, {width}] or [{rows}, 1], got {gate.dtype} {list(gate.shape)}"
        )
    out = empty_rows(rows, width, x.dtype, x.device)
    _sigmoid_gate_kernel[(rows, triton.cdiv(width, ELEMENTWISE_TILE))](
        x, gate, out, x.stride(0), gate.stride(0), WIDTH=width, ALIKE=gate.shape[1] == 1, TILE=ELEMENTWISE_TILE,
        num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return out


@kernel
def _soft_cap_kernel(
    x: tl.tensor, x_stride: tl.tensor, cap: tl.tensor, WIDTH: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
) -> None:
    start_next(PDL)
    wait(PDL)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = x + tl.program_id(0).to(tl.int64) * x_stride + column
    value = tl.load(at, mask=column < WIDTH, other=0.0)
    # tanh(u) = 2 sigmoid(2u) - 1; its error of 1e-7 is small beside a cap's.
    tl.store(at, cap * (2.0 * tl.sigmoid(2.0 * value / cap) - 1.0), mask=column < WIDTH)


def soft_cap_(x: Tensor, cap: float, *, pdl: bool = False) -> None:
    """x float32 [M, N], whose rows may be strided, becomes cap tanh(x / cap)."""
    check_rows(x, "x")
    if x.dtype != torch.float32 or cap <= 0:
        raise ValueError(f"a cap is positive and of float32, got {cap} and {x.dtype}")
    rows, width = x.shape
    _soft_cap_kernel[(rows, triton.cdiv(width, ELEMENTWISE_TILE))](
        x, x.stride(0), float(cap), WIDTH=width, TILE=ELEMENTWISE_TILE, num_warps=4, **launch_options(pdl)
    )
