"""Folding of tiles into an item's result in tma_decode.py: scores, their softmax, and the weighted sum of values.

A product of the tensor cores has 16 rows and 8 columns. Heads of 64 and 128 have the group's queries in the rows, half
of which are waste at least. WIDE heads, of 256, have queries in the columns, and keys and values in the rows: their sum
takes 64 registers a thread, and would take 128.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from asyncengine.kernels.cuda.attention.tma_results import BLOCKS, GROUP_ROWS

BLOCK = gl.constexpr(16)  # tokens of a block of the cache
KEYS = gl.constexpr(64)


@gluon.constexpr_function
def is_wide(dim):
    """Return whether queries of heads of ``dim`` are the right operands of products."""
    return dim > 128


@gluon.jit
def _sees(tile, first, context, LAYOUT: gl.constexpr):
    """[BLOCKS, BLOCK]: which lines of a tile hold tokens that the new one sees. See ``_copy``."""
    block = tile * KEYS + gl.arange(0, BLOCKS, gl.SliceLayout(1, LAYOUT))[:, None] * BLOCK
    line = gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))[None, :]
    token = gl.minimum(block, context - BLOCK) + line
    return token >= gl.maximum(block, first)


@gluon.jit
def _hide_scores(score, tile, first, context, WIDE: gl.constexpr):
    HEADS_AXIS: gl.constexpr = 2 if WIDE else 1
    seen = _sees(tile, first, context, gl.SliceLayout(HEADS_AXIS, score.type.layout))
    return gl.where(seen.expand_dims(HEADS_AXIS), score, -float("inf"))


@gluon.jit
def _hide_values(v, tile, first, context, WIDE: gl.constexpr):
    """Set the values of tokens that do not exist to 0: their memory may hold anything, and 0 * NaN is NaN."""
    COLUMNS_AXIS: gl.constexpr = 1 if WIDE else 2
    seen = _sees(tile, first, context, gl.SliceLayout(COLUMNS_AXIS, v.type.layout))
    return gl.where(seen.expand_dims(COLUMNS_AXIS), v, 0.0)


@gluon.jit
def load_queries(queries, MMA: gl.constexpr, WIDE: gl.constexpr):
    """Queries [ROWS, D] for each block: [BLOCKS, ROWS, D], or [BLOCKS, D, ROWS] if WIDE."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(1 if WIDE else 0, MMA, 2)
    if WIDE:
        queries = queries.permute((1, 0))
    q = queries.load(gl.SliceLayout(0, OPERAND))[None, :, :]
    return q.broadcast_to([BLOCKS, q.shape[1], q.shape[2]])


@gluon.jit
def _scores(q, k_tile, MMA: gl.constexpr, WIDE: gl.constexpr):
    """Products of queries and keys: [BLOCKS, 16, BLOCK], or [BLOCKS, BLOCK, GROUP_ROWS] if WIDE."""
    if WIDE:
        k = k_tile.load(gl.DotOperandLayout(0, MMA, 2))
        score = mma_v2(k, q, gl.zeros([BLOCKS, BLOCK, GROUP_ROWS], gl.float32, MMA))
    else:
        k = k_tile.permute((0, 2, 1)).load(gl.DotOperandLayout(1, MMA, 2))
        score = mma_v2(q, k, gl.zeros([BLOCKS, 2 * GROUP_ROWS, BLOCK], gl.float32, MMA))
    return score


@gluon.jit
def _load_values(v_tile, MMA: gl.constexpr, WIDE: gl.constexpr):
    """The values of a tile: [BLOCKS, BLOCK, D], or [BLOCKS, D, BLOCK] if WIDE."""
    if WIDE:
        v = v_tile.permute((0, 2, 1)).load(gl.DotOperandLayout(0, MMA, 2))
    else:
        v = v_tile.load(gl.DotOperandLayout(1, MMA, 2))
    return v


@gluon.jit
def _add_values(acc, weight, v, MMA: gl.constexpr, WIDE: gl.constexpr):
    weight = gl.convert_layout(weight.to(gl.bfloat16), gl.DotOperandLayout(1 if WIDE else 0, MMA, 2))
    return mma_v2(v, weight, acc) if WIDE else mma_v2(weight, v, acc)


@gluon.jit
def take(
    acc, peak, total, q, k_tiles, v_tiles, ready, free, turn, first, context, tile, scale, MMA: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Fold one or two tiles into acc [BLOCKS, 16, D], peak and total [BLOCKS, 16]: of each block of its own. If WIDE,
    acc is [BLOCKS, D, GROUP_ROWS], and the others are [BLOCKS, GROUP_ROWS].

    Two at once take little longer than one: the chain of products and exchanges between threads is as long.
    """
    KEYS_AXIS: gl.constexpr = 1 if WIDE else 2
    slot, other = turn % STAGES, (turn + 1) % STAGES
    mbarrier.wait(ready.index(slot), turn // STAGES & 1)
    score = _scores(q, k_tiles.index(slot), MMA, WIDE) * scale
    if TILES == 2:
        mbarrier.wait(ready.index(other), (turn + 1) // STAGES & 1)
        score_2 = _scores(q, k_tiles.index(other), MMA, WIDE) * scale
    v = _load_values(v_tiles.index(slot), MMA, WIDE)
    mbarrier.arrive(free.index(slot))
    partial = (tile * KEYS < first) | ((tile + TILES) * KEYS > context)
    if partial:
        score, v = _hide_scores(score, tile, first, context, WIDE), _hide_values(v, tile, first, context, WIDE)
        if TILES == 2:
            score_2 = _hide_scores(score_2, tile + 1, first, context, WIDE)
    if TILES == 2:
        new_peak = gl.maximum(peak, gl.max(gl.maximum(score, score_2), KEYS_AXIS))
    else:
        new_peak = gl.maximum(peak, gl.max(score, KEYS_AXIS))
    base = gl.where(new_peak == -float("inf"), 0.0, new_peak)  # a warp that has seen no key yet
    shrink = gl.exp2(peak - base)
    weight = gl.exp2(score - base.expand_dims(KEYS_AXIS))
    acc = acc * shrink.expand_dims(KEYS_AXIS)
    acc = _add_values(acc, weight, v, MMA, WIDE)
    if TILES == 2:  # registers have no room for two tiles of values
        v_2 = _load_values(v_tiles.index(other), MMA, WIDE)
        mbarrier.arrive(free.index(other))
        if partial:
            v_2 = _hide_values(v_2, tile + 1, first, context, WIDE)
        weight_2 = gl.exp2(score_2 - base.expand_dims(KEYS_AXIS))
        acc = _add_values(acc, weight_2, v_2, MMA, WIDE)
        weight += weight_2
    return acc, new_peak, total * shrink + gl.sum(weight, KEYS_AXIS)
