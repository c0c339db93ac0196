"""An item's result in tma_decode.py: its warps' parts are joined, and a unit's pieces combined."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from asyncengine.kernels.cuda.attention.scores import with_sinks

_with_sinks = gluon.jit(with_sinks.fn)

BLOCKS = gl.constexpr(4)  # of a tile, one a warp
GROUP_ROWS = gl.constexpr(8)  # heads of a group, padded; the tensor cores take 16
FEW_PIECES, MANY_PIECES = gl.constexpr(4), gl.constexpr(16)  # of a unit, read at once


@gluon.jit
def _upper(x):
    """The first GROUP_ROWS of 16 rows [BLOCKS, 16, ...], or of no more: they lie in the same threads as the others."""
    if x.shape[1] == 2 * GROUP_ROWS:
        if len(x.shape) == 3:
            x = gl.permute(gl.reshape(x, [BLOCKS, 2, GROUP_ROWS, x.shape[2]]), (0, 2, 3, 1))
        else:
            x = gl.permute(gl.reshape(x, [BLOCKS, 2, GROUP_ROWS]), (0, 2, 1))
        x = gl.split(x)[0]
    return x


@gluon.jit
def join_warps(acc, peak, total, score, value, takes_new, PARTS: gl.constexpr):
    """The warps' results, and the new token, as one: [GROUP_ROWS, D], [GROUP_ROWS] and again."""
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, PARTS))
    acc = gl.convert_layout(_upper(acc), PARTS)
    peak = gl.convert_layout(_upper(peak), gl.SliceLayout(2, PARTS))
    total = gl.convert_layout(_upper(total), gl.SliceLayout(2, PARTS))
    score = gl.where(takes_new, score, -float("inf"))
    whole_peak = gl.maximum(gl.convert_layout(gl.max(peak, 0), ROWS), score)
    base = gl.where(whole_peak == -float("inf"), 0.0, whole_peak)  # all of a piece is out of the window
    weight = gl.exp2(peak - gl.convert_layout(base, gl.SliceLayout(0, peak.type.layout))[None, :])
    new = gl.exp2(score - base)
    whole_total = gl.convert_layout(gl.sum(total * weight, 0), ROWS) + new
    whole = gl.sum(acc * weight[:, :, None], 0) + new[:, None] * value.to(gl.float32)
    return whole, whole_peak, whole_total


@gluon.jit
def finish(
    acc, peak, total, slot, piece, pieces, query, head, sinks, out, partials, stats, arrivals, stride_out, stats_size,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Store an item's result: to ``out`` if the item is a whole unit or the unit's last to arrive. SINKS: heads have
    sinks."""
    HEADS: gl.constexpr = acc.type.layout
    member = gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, HEADS))
    there, at = member < GROUP, member[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, HEADS))[None, :]
    out += query * stride_out + head * GROUP * D
    sinks += head * GROUP
    if pieces == 1:
        if SINKS:
            total = _with_sinks(total, peak, sinks, member, there)
        gl.store(out + at, (acc / total[:, None]).to(gl.bfloat16), mask=there[:, None])
    else:
        unit = (slot * KV_HEADS + head) * GROUP
        mine = unit + piece * (KV_HEADS * GROUP)
        gl.store(stats + mine + member, peak, mask=there)
        gl.store(stats + stats_size + mine + member, total, mask=there)
        gl.store(partials + mine * D + at, acc, mask=there[:, None])
        # Release: the barrier puts every thread's stores before the one thread that counts.
        gl.thread_barrier()
        arrival = arrivals + slot * KV_HEADS + head
        if gl.atomic_add(arrival, 1, sem="acq_rel") == pieces - 1:
            gl.store(arrival, 0)  # for the next launch: nobody else will come in this one
            partials += unit * D
            stats += unit
            if pieces <= FEW_PIECES:  # what is not there takes time too
                _combine(partials, stats, stats + stats_size, sinks, out, pieces, GROUP, KV_HEADS, D, SINKS, FEW_PIECES)
            else:
                MANY: gl.constexpr = MANY_PIECES * 128 // D if D > 128 else MANY_PIECES  # for which registers do
                _combine(partials, stats, stats + stats_size, sinks, out, pieces, GROUP, KV_HEADS, D, SINKS, MANY)


@gluon.jit
def _combine(
    partials, peaks, totals, sinks, out, pieces, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr,
    SINKS: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Sum the partial results of a unit's pieces, in their order, into ``out`` (its first head)."""
    PARTS: gl.constexpr = gl.BlockedLayout([AT_ONCE, 1, D // 16], [1, 2, 16], [1, 4, 1], [2, 1, 0])
    HEADS: gl.constexpr = gl.SliceLayout(0, PARTS)
    STATS: gl.constexpr = gl.SliceLayout(2, PARTS)
    ROWS: gl.constexpr = gl.SliceLayout(1, HEADS)
    row = gl.arange(0, GROUP_ROWS, ROWS)
    at = row[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, HEADS))[None, :]
    member = gl.arange(0, GROUP_ROWS, gl.SliceLayout(0, STATS))[None, :]
    acc = gl.zeros([GROUP_ROWS, D], gl.float32, HEADS)
    peak = gl.full([GROUP_ROWS], -float("inf"), gl.float32, ROWS)
    total = gl.zeros([GROUP_ROWS], gl.float32, ROWS)
    for first in range(0, pieces, AT_ONCE):
        # Nothing here waits for another load: one round trip.
        piece = first + gl.arange(0, AT_ONCE, gl.SliceLayout(1, STATS))[:, None]
        there = (piece < pieces) & (member < GROUP)
        of = piece * (KV_HEADS * GROUP) + member
        piece_peak = gl.load(peaks + of, mask=there, other=-float("inf"), cache_modifier=".cg")
        piece_total = gl.load(totals + of, mask=there, other=0.0, cache_modifier=".cg")
        part = partials + (piece * (KV_HEADS * GROUP * D))[:, :, None] + at[None, :, :]
        part = gl.load(part, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        new_peak = gl.maximum(peak, gl.convert_layout(gl.max(piece_peak, 0), ROWS))
        base = gl.where(new_peak == -float("inf"), 0.0, new_peak)  # out of the window so far, or no head
        weight = gl.exp2(piece_peak - gl.convert_layout(base, gl.SliceLayout(0, STATS))[None, :])
        shrink = gl.exp2(peak - base)
        total = total * shrink + gl.convert_layout(gl.sum(weight * piece_total, 0), ROWS)
        acc = acc * shrink[:, None] + gl.sum(weight[:, :, None] * part, 0)
        peak = new_peak
    if SINKS:
        total = _with_sinks(total, peak, sinks, row, row < GROUP)
    gl.store(out + at, (acc / total[:, None]).to(gl.bfloat16), mask=(row < GROUP)[:, None])
