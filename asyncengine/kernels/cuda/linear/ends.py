"""Beginnings and ends that kernels in Gluon share: norms that are read and written by products, and activations."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from asyncengine.kernels.cuda.launch.gluon import next_power_of_2
from asyncengine.kernels.cuda.rows.activation import activate, gelu_gate
from asyncengine.kernels.cuda.rows.norms import store_unnormed

_activate = gluon.jit(activate.fn)
_gelu_gate = gluon.jit(gelu_gate.fn)
store_unnormed_rows = gluon.jit(store_unnormed.fn)


@gluon.jit
def _sigmoid(x):
    """Good to some 2^-22, in a third of the instructions that ``gl.exp`` and a division take, who mind denormals."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1; add.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0;",
        "=f,f",
        [x * -1.4426950408889634],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def load_sums(
    sums, row, rows, BM: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr, DIVIDED: gl.constexpr = False
):
    """Load the sums of a norm that is read, by tile: [tiles, BM]. A thread, or the one next to it, has all tiles of a
    row. DIVIDED: it has those of its warp, and their total takes a barrier; that is for many tiles of few rows."""
    ACROSS: gl.constexpr = 32 if BM >= 32 else BM
    PLACES: gl.constexpr = [WARPS, 1] if DIVIDED else [1, WARPS]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // ACROSS, ACROSS], PLACES, [1, 0])
    tile = gl.arange(0, next_power_of_2(TILES), gl.SliceLayout(1, LAYOUT))[:, None]
    m = row + gl.arange(0, BM, gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.load(sums + tile * rows + m, mask=(tile < TILES) & (m < rows), other=0.0)


@gluon.jit
def store_norm(to, squares, values, eps, K: gl.constexpr):
    """Store the factors of the rows, and for a LayerNorm their means, to shared memory [1 or 2, BM]."""
    square = gl.sum(squares, 0) / K
    if to.shape[0] == 2:
        mean = gl.sum(values, 0) / K
        to.index(1).store(mean)
        square -= mean * mean
    to.index(0).store(gl.rsqrt(square + eps))


@gluon.jit
def _gate(gate, up, FUSED: gl.constexpr):
    """up, gated as the operations of rows/activation.py do it."""
    if FUSED == "silu_mul":
        result = gate * _sigmoid(gate) * up
    elif FUSED == "gelu_tanh_mul":
        result = gate * _sigmoid(_gelu_gate(gate)) * up
    else:
        gl.static_assert(FUSED == "clamped_silu_mul")
        gate = gl.where(gate > 7.0, 7.0, gate)
        up = gl.where(up > 7.0, 7.0, gl.where(up < -7.0, -7.0, up))
        result = gate * _sigmoid(1.702 * gate) * (up + 1.0)
    return result


@gluon.jit
def activate_sums(acc, FUSED: gl.constexpr):
    """The activation of sums [BN, BM]; with a gate, 8 rows of which and 8 of up come in turn, [BN / 2, BM]."""
    if FUSED == "silu_mul" or FUSED == "gelu_tanh_mul" or FUSED == "clamped_silu_mul":
        pairs = gl.permute(gl.reshape(acc, [acc.shape[0] // 16, 2, 8, acc.shape[1]]), (0, 2, 3, 1))
        gate, up = gl.split(pairs)
        acc = gl.reshape(_gate(gate, up, FUSED), [acc.shape[0] // 2, acc.shape[1]])
    elif FUSED == "gelu_tanh":
        acc *= _sigmoid(_gelu_gate(acc))
    elif FUSED != "none":
        acc = _activate(acc, FUSED)
    return acc
