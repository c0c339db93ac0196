"""Attention of prompts over a WorkList on Hopper: two warps that copy, and two warp groups that compute.

What paged.py does for rows of several tokens, for heads of 64 and 128 in bfloat16 without a window. The 128
rows of a unit are two halves, one a warp group, so that one multiplies while the other has its softmax; and within each
the next scores are made beside the product of the last weights and values, as in FlashAttention-3 (Shah et al., 2024).
Each group has a partition of its own: as one of eight warps, which meet whenever memory is freed, they multiply at the
same time and then neither does, and a long context takes half as long again.

Rows are ordered by head and then by token. So the accelerator can copy queries, a head's tokens at a time, and both
halves see the same keys. Keys and values it copies a block of the cache at a time, as far ahead as shared memory has
room, across items; a warp for each, since copies of 2 KiB keep one warp as busy as their products keep the others.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc"

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncengine.errors import ConfigError
from asyncengine.kernels.cuda.attention.call import KernelCall
from asyncengine.kernels.cuda.attention.paged import section_for
from asyncengine.kernels.cuda.attention.plan import Launch
from asyncengine.kernels.cuda.attention.scores import base2_scale
from asyncengine.kernels.cuda.attention.work.items import (
    BEGIN,
    COUNT,
    END,
    FIRST,
    ITEM,
    LAST,
    PARTIAL,
    PIECE,
    PIECES,
    POSITION,
    QUERY,
    SLOT,
    TEAM,
)
from asyncengine.kernels.cuda.attention.work.lists import WorkList
from asyncengine.kernels.cuda.launch.gluon import GluonKernel, tiles_of
from asyncengine.kernels.cuda.launch.programmatic import launch_options

ROWS = gl.constexpr(128)  # of a unit
HALF = gl.constexpr(64)  # of them, a warp group's
KEYS = gl.constexpr(128)  # of a tile
BLOCK = gl.constexpr(16)  # tokens of a block of the cache
BLOCKS = gl.constexpr(8)  # of a tile
SPAN = gl.constexpr(64)  # elements of a token that lie side by side in shared memory: 128 bytes
QUEUED = gl.constexpr(2)  # items whose queries are in shared memory


def run(launch: Launch, call: KernelCall) -> None:
    """Attend as ``run`` of run.py says, for rows of several tokens, over keys and values that are in the cache.

    If it runs ``beside`` tma_decode, that must be the kernel before (see programmatic.py).

    Raises ConfigError if a tensor or ``work`` was made for something else.
    """
    section = section_for(launch, call)
    if section is None:
        return
    q, out, layer, step, work = call.queries, call.out, call.layer, call.step, call.work
    _, kv_heads, block_size, dim = call.cache.k.shape
    assert isinstance(work, WorkList)
    group = work.shape.group
    tile_suits = (section.tile.rows, section.tile.keys) == (ROWS.value, KEYS.value) and ROWS.value % group == 0
    suits = block_size == BLOCK.value and dim in (64, 128) and q.dtype == torch.bfloat16 and q.stride(1) == dim
    if not tile_suits or not suits or layer.window or layer.softcap or layer.sinks is not None:
        raise ConfigError(f"prefill of {work.shape}, blocks of {block_size}, {layer} is another kernel's")
    lines = q.as_strided((len(q), work.shape.num_heads * dim), (q.stride(0), 1))
    _tma_prefill_kernel[(section.teams * kv_heads,)](
        tiles_of(lines, min(ROWS.value // group, HALF.value), SPAN.value),
        *(tiles_of(cache.view(-1, dim), BLOCK.value, SPAN.value) for cache in call.cache[:2]),
        out,
        step.slots.block_tables,
        *section.operands,
        work.decode.team_items,
        base2_scale(layer),
        out.stride(0),
        step.slots.block_tables.stride(0),
        section.stats.stride(0),
        GROUP=group,
        KV_HEADS=kv_heads,
        D=dim,
        STAGES=section.tile.stages,
        BESIDE=launch.beside,
        num_warps=4,
        maxnreg=168,  # on average: the warp groups that compute take 232
        **launch_options(call.pdl),
    )


@gluon.jit
def _item(fields):
    """An item's row, first token, tokens, position of the first, tiles. A team begins with those of its first item."""
    slot, query, count = gl.load(fields + SLOT), gl.load(fields + QUERY), gl.load(fields + COUNT)
    return slot, query, count, gl.load(fields + POSITION), gl.load(fields + BEGIN), gl.load(fields + END)


@gluon.jit
def _fill(
    cache, tiles, ready, free, k_ready, k_free, q_boxes, qs, q_ready, q_free, items, its_team, first_item, last_item,
    beside, block_tables, stride_table, head, OF_KEYS: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warp that copies keys, and queries, or one that copies values. It reads a tile ahead where blocks are."""
    PARTS: gl.constexpr = D // SPAN
    parts = tiles._reinterpret(gl.bfloat16, [STAGES * PARTS * BLOCKS, BLOCK, SPAN], cache.layout)
    index = gl.arange(0, BLOCKS, gl.BlockedLayout([1], [32], [1], [0]))
    if PDL and first_item == last_item:
        _begin(beside)
    turn = 0
    row, query, count, first, begin, end = _item(its_team)
    for item in range(first_item, last_item):
        following = gl.minimum(item + 1, last_item - 1)
        next_row, next_query, next_count, next_first, next_begin, next_end = _item(items + following * ITEM)
        last = (first + count + BLOCK - 1) // BLOCK
        table = block_tables + row.to(gl.int64) * stride_table
        blocks = _blocks(table, begin, last, index)
        if PDL and item == first_item:
            _begin(beside)
        if OF_KEYS:
            _copy_queries(q_boxes, qs, q_ready, q_free, item - first_item, query, head, GROUP, D)
        for tile in range(begin, end):
            # Triton 3.6 takes what only bounds an inner loop for dead, and hands on what it was at first.
            next_blocks = _blocks(table, gl.minimum(tile + 1, end - 1), last, index)
            stage = turn % STAGES
            mbarrier.wait(free.index(stage), (turn // STAGES & 1) ^ 1)
            if not OF_KEYS:  # values are needed later, and would come as early: behind the tile's keys
                mbarrier.wait(k_ready.index(stage), turn // STAGES & 1)
                mbarrier.arrive(k_free.index(stage))
            mbarrier.expect(ready.index(stage), KEYS * D * 2)
            _copy_tile(cache, blocks, index, head, KV_HEADS, ready.index(stage), parts, stage, PARTS)
            blocks = next_blocks
            turn += 1
        row, query, count, first, begin, end = next_row, next_query, next_count, next_first, next_begin, next_end
    if PDL:
        gdc_wait()


@gluon.jit
def _begin(beside):
    """Wait for the kernel before. The one of rows of one token lets this start when there is nothing to wait for."""
    if not beside:
        gdc_wait()
    gdc_launch_dependents()


@gluon.jit
def _blocks(table, tile, last, index):
    """Return the blocks of a tile. Places behind the row's last block get its first one, whose values are at least
    numbers."""
    block = tile * BLOCKS + index
    return gl.load(table + gl.where(block < last, block, 0))


@gluon.jit
def _copy_queries(q_boxes, qs, q_ready, q_free, number, query, head, GROUP: gl.constexpr, D: gl.constexpr):
    TOKENS: gl.constexpr = ROWS // GROUP
    BOX: gl.constexpr = q_boxes.block_shape[0]
    PARTS: gl.constexpr = D // SPAN
    parts = qs._reinterpret(gl.bfloat16, [QUEUED * PARTS * (ROWS // BOX), BOX, SPAN], q_boxes.layout)
    place = number % QUEUED
    mbarrier.wait(q_free.index(place), (number // QUEUED & 1) ^ 1)
    mbarrier.expect(q_ready.index(place), ROWS * D * 2)
    for row in gl.static_range(0, ROWS, BOX):
        column = (head * GROUP + row // TOKENS) * D
        for part in gl.static_range(PARTS):
            to = ((place * 2 + row // HALF) * PARTS + part) * (HALF // BOX) + row % HALF // BOX
            tma.async_copy_global_to_shared(
                q_boxes, [query + row % TOKENS, column + part * SPAN], q_ready.index(place), parts.index(to)
            )


@gluon.jit
def _copy_tile(cache, blocks, index, head, KV_HEADS: gl.constexpr, ready, parts, stage, PARTS: gl.constexpr):
    for i in gl.static_range(BLOCKS):
        line = (gl.sum(gl.where(index == i, blocks, 0), 0) * KV_HEADS + head) * BLOCK
        for part in gl.static_range(PARTS):
            to = parts.index((stage * PARTS + part) * BLOCKS + i)
            tma.async_copy_global_to_shared(cache, [line, part * SPAN], ready, to)


@gluon.jit
def _clear_values(vs, slot, kept, kv_end, D: gl.constexpr, STAGES: gl.constexpr):
    """Set the values behind the last key to 0: their memory may hold anything, and 0 * NaN is NaN. Both warp groups
    write the same.

    That memory is in the last key's block alone, unless all blocks of the tile are copies of that one.
    """
    PARTS: gl.constexpr = D // SPAN
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    parts = vs._reinterpret(gl.bfloat16, [STAGES * PARTS * BLOCKS, BLOCK, SPAN], vs.layout)
    token = gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))
    first = kept // BLOCK
    last = gl.where(kv_end < BLOCK, BLOCKS, first + 1)
    for block in range(first, last):
        for part in gl.static_range(PARTS):
            values = parts.index((slot * PARTS + part) * BLOCKS + block)
            there = (block * BLOCK + token < kept)[:, None]
            values.store(gl.where(there, values.load(LAYOUT), 0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _weigh(score, peak, total, scale):
    """The online softmax: weights, the peak of each row, their sum so far, and what earlier sums shrink to."""
    new_peak = gl.maximum(peak, gl.max(score, 1) * scale)
    base = gl.where(new_peak == -float("inf"), 0.0, new_peak)  # no key seen yet
    weight = gl.exp2(score * scale - base[:, None])
    shrink = gl.exp2(peak - base)
    return weight.to(gl.bfloat16), new_peak, total * shrink + gl.sum(weight, 1), shrink


@gluon.jit
def _hide(score, tile, position):
    """Keys that come after the query's."""
    key = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, score.type.layout))
    return gl.where(key[None, :] <= position[:, None], score, -float("inf"))


@gluon.jit
def _attend(
    out, qs, ks, vs, q_ready, q_free, k_ready, k_free, v_ready, v_free, items, its_team, first_item, last_item,
    partials, stats, arrivals, scale, stride_out, stats_size, head, WHICH: gl.constexpr, GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warp group that computes one half of each unit."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    TOKENS: gl.constexpr = ROWS // GROUP
    token = (WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))) % TOKENS
    none = gl.zeros([HALF, KEYS], gl.float32, SCORES)
    turn = 0
    _, query, count, first, begin, end = _item(its_team)
    for item in range(first_item, last_item):
        fields, number = items + item * ITEM, item - first_item
        following = gl.minimum(item + 1, last_item - 1)
        _, next_query, next_count, next_first, next_begin, next_end = _item(items + following * ITEM)
        pieces = gl.load(fields + PIECES)
        position = first + token
        whole = (first + 1) // KEYS  # tiles that all rows see
        acc = gl.zeros([HALF, D], gl.float32, SUMS)
        peak = gl.full([HALF], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, SCORES))
        place = number % QUEUED
        q = qs.index(place * 2 + WHICH)
        mbarrier.wait(q_ready.index(place), number // QUEUED & 1)
        slot, phase = turn % STAGES, turn // STAGES & 1
        mbarrier.wait(k_ready.index(slot), phase)
        score = warpgroup_mma(q, ks.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, (score,))
        mbarrier.arrive(k_free.index(slot))
        if begin >= whole:
            score = _hide(score, begin, position)
        weight, peak, total, shrink = _weigh(score, peak, total, scale)
        left = gl.convert_layout(weight, LEFT)
        next_slot, next_phase = (turn + 1) % STAGES, (turn + 1) // STAGES & 1
        mbarrier.wait(k_ready.index(next_slot), next_phase, pred=begin + 1 < end)
        for tile in range(begin + 1, end):
            scores = warpgroup_mma(q, ks.index(next_slot).permute((1, 0)), none, use_acc=False, is_async=True)
            mbarrier.wait(v_ready.index(slot), phase)
            sums = warpgroup_mma(left, vs.index(slot), acc, is_async=True)
            score = warpgroup_mma_wait(1, (scores,))
            mbarrier.arrive(k_free.index(next_slot))
            if tile >= whole:
                score = _hide(score, tile, position)
            weight, peak, total, shrink = _weigh(score, peak, total, scale)
            turn += 1
            free, slot, phase = slot, next_slot, next_phase
            next_slot, next_phase = (turn + 1) % STAGES, (turn + 1) // STAGES & 1
            # Here, not at the top: without a wait between them ptxas makes the weights behind the product.
            mbarrier.wait(k_ready.index(next_slot), next_phase, pred=tile + 1 < end)
            acc, weight, total = warpgroup_mma_wait(0, (sums, weight, total))
            mbarrier.arrive(v_free.index(free))
            acc *= gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
            left = gl.convert_layout(weight, LEFT)
        mbarrier.arrive(q_free.index(place))
        mbarrier.wait(v_ready.index(slot), phase)
        kv_end = first + count
        if (end * KEYS > kv_end) & (kv_end % BLOCK > 0):
            _clear_values(vs, slot, kv_end - (end - 1) * KEYS, kv_end, D, STAGES)
        acc = warpgroup_mma_wait(0, (warpgroup_mma(left, vs.index(slot), acc, is_async=True),))
        mbarrier.arrive(v_free.index(slot))
        turn += 1
        peak = gl.convert_layout(peak, gl.SliceLayout(1, SUMS))
        total = gl.convert_layout(total, gl.SliceLayout(1, SUMS))
        _finish(
            acc, peak, total, fields, pieces, query, count, head, out, partials, stats, arrivals, stride_out,
            stats_size, WHICH, GROUP, KV_HEADS, D,
        )  # fmt: skip
        query, count, first, begin, end = next_query, next_count, next_first, next_begin, next_end


@gluon.jit
def _finish(
    acc, peak, total, fields, pieces, query, count, head, out, partials, stats, arrivals, stride_out, stats_size,
    WHICH: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Store half an item's result: to ``out`` if the item is a whole unit or its half the unit's last to arrive."""
    SUMS: gl.constexpr = acc.type.layout
    PIECE_STRIDE: gl.constexpr = KV_HEADS * ROWS
    if pieces > 1:
        row = gl.arange(0, HALF, gl.SliceLayout(1, SUMS))
        at = row[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, SUMS))[None, :]
        slot = gl.load(fields + PARTIAL).to(gl.int64)
        unit = (slot * KV_HEADS + head) * ROWS + WHICH * HALF
        mine = unit + gl.load(fields + PIECE) * PIECE_STRIDE
        gl.store(stats + mine + row, peak)
        gl.store(stats + stats_size + mine + row, total)
        gl.store(partials + mine * D + at, acc)
        # Release: the barrier puts every thread's stores before the one thread that counts.
        gl.thread_barrier()
        arrival = arrivals + slot * KV_HEADS + head
        ONE: gl.constexpr = 1 << 16 * WHICH  # each half counts in 16 bits of its own
        there = gl.atomic_add(arrival, ONE, sem="acq_rel") >> 16 * WHICH & 0xFFFF
        if there == pieces - 1:
            gl.atomic_add(arrival, -pieces * ONE, sem="relaxed")  # for the next launch
            acc = gl.zeros([HALF, D], gl.float32, SUMS)
            peak = gl.full([HALF], -float("inf"), gl.float32, gl.SliceLayout(1, SUMS))
            total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, SUMS))
            for i in range(0, pieces):
                of = unit + i * PIECE_STRIDE
                piece_peak = gl.load(stats + of + row, cache_modifier=".cg")
                piece_total = gl.load(stats + stats_size + of + row, cache_modifier=".cg")
                part = gl.load(partials + of * D + at, cache_modifier=".cg")
                new_peak = gl.maximum(peak, piece_peak)
                base = gl.where(new_peak == -float("inf"), 0.0, new_peak)
                shrink, weight = gl.exp2(peak - base), gl.exp2(piece_peak - base)
                total = total * shrink + piece_total * weight
                acc = acc * shrink[:, None] + part * weight[:, None]
                peak = new_peak
            _store(acc, total, query, count, head, out, stride_out, WHICH, GROUP, D)
    else:
        _store(acc, total, query, count, head, out, stride_out, WHICH, GROUP, D)


@gluon.jit
def _store(
    acc, total, query, count, head, out, stride_out, WHICH: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    TOKENS: gl.constexpr = ROWS // GROUP
    result = gl.convert_layout((acc * (1.0 / total)[:, None]).to(gl.bfloat16), STORED)
    row = WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, STORED))
    to = out + (query + row % TOKENS) * stride_out + (head * GROUP + row // TOKENS) * D
    column = gl.arange(0, D, gl.SliceLayout(0, STORED))
    gl.store(to[:, None] + column[None, :], result, mask=(row % TOKENS < count)[:, None])


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@GluonKernel
def _tma_prefill_kernel(
    q_boxes, k_blocks, v_blocks, out, block_tables, items, team_items, partials, stats, arrivals, decode_teams, scale,
    stride_out, stride_table, stats_size, BESIDE: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid: teams x KV heads, heads of a team side by side, since their KV lies side by side in a block."""
    head = gl.program_id(0) % KV_HEADS
    team = gl.program_id(0) // KV_HEADS
    its_team = team_items + team * TEAM
    first_item, last_item = gl.load(its_team + FIRST), gl.load(its_team + LAST)
    beside = False
    if BESIDE:  # if any team has a row of one token the first one has
        beside = gl.load(decode_teams + FIRST) < gl.load(decode_teams + LAST)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    qs = gl.allocate_shared_memory(gl.bfloat16, [QUEUED * 2, HALF, D], TILE)
    ks = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, D], TILE)
    vs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, D], TILE)
    q_ready, q_free = _barriers(QUEUED, 1), _barriers(QUEUED, 2)
    k_ready, k_free = _barriers(STAGES, 1), _barriers(STAGES, 3)  # to be freed by whoever waits for it
    v_ready, v_free = _barriers(STAGES, 1), _barriers(STAGES, 2)
    # Tuples in variables would lose their constants.
    gl.warp_specialize(
        [
            (_attend, (
                out, qs, ks, vs, q_ready, q_free, k_ready, k_free, v_ready, v_free, items, its_team, first_item,
                last_item, partials, stats, arrivals, scale, stride_out, stats_size, head, 0, GROUP, KV_HEADS, D,
                STAGES,
            )),
            (_attend, (
                out, qs, ks, vs, q_ready, q_free, k_ready, k_free, v_ready, v_free, items, its_team, first_item,
                last_item, partials, stats, arrivals, scale, stride_out, stats_size, head, 1, GROUP, KV_HEADS, D,
                STAGES,
            )),
            (_fill, (
                k_blocks, ks, k_ready, k_free, k_ready, k_free, q_boxes, qs, q_ready, q_free, items, its_team,
                first_item, last_item, beside, block_tables, stride_table, head, True, GROUP, KV_HEADS, D, STAGES, PDL,
            )),
            (_fill, (
                v_blocks, vs, v_ready, v_free, k_ready, k_free, q_boxes, qs, q_ready, q_free, items, its_team,
                first_item, last_item, beside, block_tables, stride_table, head, False, GROUP, KV_HEADS, D, STAGES, PDL,
            )),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )  # fmt: skip
