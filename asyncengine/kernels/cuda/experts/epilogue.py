"""Ends of experts' products that every kernel of them shares."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, misc"

from __future__ import annotations

import triton
import triton.language as tl

from asyncengine.kernels.cuda.rows.activation import activate, clamped_silu_mul

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
