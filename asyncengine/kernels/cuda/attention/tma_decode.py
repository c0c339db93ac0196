"""Attention of one-token rows over a WorkList on Hopper, whose keys flow through shared memory without a pause.

The kernel does the work of paged_decode.py, for heads of 64, 128 and 256 in bfloat16. An item of few keys is over
before Triton's pipelining has the memory busy, which starts anew with each. Here a warp of its own walks a program's
items and asks for one tile after another, as far ahead as shared memory holds, whatever the others are at: across
items, and while the projection that makes queries still runs (programmatic.py). It reads what earlier steps wrote, and
nobody reads in the cache what this step writes there.

The copies are the tensor memory accelerator's, a block of the cache each. If a row fills a block in part, only the
tokens that are there are read: the copy begins before the block, whose last lines it leaves out, and lines from beyond
a block are zeros. Each of four warps takes a block of a tile, with a softmax of its own until the item ends: so a tile
costs them no meeting but the one that frees its memory. The new token, which is in no tile, comes last. Queries are
made, and new keys and values written, by two warps that are an item ahead of the four: an item of a few hundred keys
would take half as long again if it began with them. Beside prompts another kernel has made and written them before.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc"

from __future__ import annotations

from dataclasses import replace

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncengine.errors import ConfigError
from asyncengine.kernels.cuda.attention.call import KernelCall
from asyncengine.kernels.cuda.attention.few_keys import surroundings
from asyncengine.kernels.cuda.attention.paged import section_for
from asyncengine.kernels.cuda.attention.paged_decode import norm_and_rotate, section_of_heads
from asyncengine.kernels.cuda.attention.plan import Launch
from asyncengine.kernels.cuda.attention.scores import base2_scale
from asyncengine.kernels.cuda.attention.tma_fold import BLOCK, KEYS, is_wide, load_queries, take
from asyncengine.kernels.cuda.attention.tma_results import BLOCKS, GROUP_ROWS, finish, join_warps
from asyncengine.kernels.cuda.attention.work.items import (
    BEGIN,
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
from asyncengine.kernels.cuda.attention.work.lists import NO_WINDOW, Section
from asyncengine.kernels.cuda.launch.cache_policy import EVICT_FIRST, NO_POLICY
from asyncengine.kernels.cuda.launch.gluon import GluonKernel, copy_tile, next_power_of_2, stretches, tiles_of
from asyncengine.kernels.cuda.launch.programmatic import launch_options

PREPARING = gl.constexpr(2)  # warps that make queries
REGISTERS, REGISTERS_WIDE = 128, 192
"""Registers of a thread on average. The warps that compute take the rest: 200, so that two programs have room on a
multiprocessor, and 240 for wide heads, which have one to a multiprocessor."""
OTHERS, OTHERS_WIDE = gl.constexpr([48, 56]), gl.constexpr([48, 144])  # registers of the other warps

_norm_and_rotate = gluon.jit(norm_and_rotate.fn)


def run(launch: Launch, call: KernelCall) -> None:
    """Attend as ``run`` of run.py says, for rows of one token. ``l2_cache_hints``: see ``cache_policy``; results are
    the same.

    If the heads are not stored it prepares them, as few_keys does. If they are, the step may have other rows, and the
    kernel before stored them: tma_prefill, if it comes next, begins beside this one, and if there are rows of one token
    as soon as that kernel is over.

    Raises ConfigError if ``work`` was allocated for something else, ConfigError or ValueError if the other tensors do
    not fit.
    """
    if not launch.stored:
        _launch(launch, call, section_of_heads(launch, call))
        return
    q = call.queries
    if q.stride(1) != q.shape[2]:
        raise ConfigError(f"heads of a token lie {q.stride(1)} elements apart, not {q.shape[2]}")
    if section := section_for(launch, call):
        _launch(launch, replace(call, heads=q, layer=call.layer._replace(norms=None, cos_sin=None)), section)


def _launch(launch: Launch, call: KernelCall, section: Section) -> None:
    heads, out, layer, step, (k_cache, v_cache, *_) = call.heads, call.out, call.layer, call.step, call.cache
    _, kv_heads, block_size, dim = k_cache.shape
    tile, group = section.tile, layer.num_heads // kv_heads
    suits = block_size == BLOCK.value and dim in (64, 128, 256) and group <= GROUP_ROWS.value
    if not suits or layer.softcap or heads.dtype != torch.bfloat16 or section.split_tiles or tile.keys != KEYS.value:
        raise ValueError(f"{layer.num_heads} heads of {dim}, blocks of {block_size} and {tile} are for another kernel")
    _tma_decode_kernel[(section.teams * kv_heads,)](
        *(tiles_of(cache.view(-1, block_size, dim), 1, block_size, dim) for cache in (k_cache, v_cache)),
        k_cache,
        v_cache,
        heads,
        *surroundings(call),
        step.slot_mapping,
        heads if layer.sinks is None else layer.sinks,
        out,
        step.slots.block_tables,
        *section.operands,
        base2_scale(layer),
        layer.window or NO_WINDOW,
        heads.stride(0),
        out.stride(0),
        step.slots.block_tables.stride(0),
        section.stats.stride(0),
        STORED=launch.stored,
        NORM=layer.norms is not None,
        ROTARY=layer.cos_sin is not None,
        GROUP=group,
        KV_HEADS=kv_heads,
        D=dim,
        SINKS=layer.sinks is not None,
        STAGES=tile.stages,
        MARK=EVICT_FIRST if call.l2_cache_hints else NO_POLICY,
        num_warps=BLOCKS.value,
        maxnreg=REGISTERS_WIDE if is_wide(dim) else REGISTERS,
        **launch_options(call.pdl),
    )


@gluon.constexpr_function
def _tile_layout(dim):
    """[BLOCKS, BLOCK, D] as four such copies lie in shared memory, one behind another."""
    return gl.SharedLinearLayout([*stretches(BLOCK.value, dim, 1).offset_bases, [1, 0, 0], [2, 0, 0]], alignment=1024)


@gluon.jit
def _item(fields):
    """An item's row, its query, its past tokens, the tiles that it has a turn for, whether the new token is its.

    Every item has a turn, even if all of its tile is to come. While tiles stream these loads take microseconds, so they
    are for the item that is next. The first one's are found with the team: a look further would put off its first tile.
    """
    slot = gl.load(fields + SLOT)
    query = gl.load(fields + QUERY).to(gl.int64)
    context = gl.load(fields + POSITION)
    begin = gl.load(fields + BEGIN)
    end = gl.load(fields + END)
    past = gl.maximum(gl.minimum(end, (context + KEYS - 1) // KEYS), begin + 1)
    return slot, query, context, begin, past, end * KEYS > context


@gluon.jit
def _tile_blocks(table, tile, context, window):
    """The blocks of a tile in which the new token sees something: the first, one past the last, where each is."""
    first = gl.maximum(context - window + 1, 0) // BLOCK
    last = (context + BLOCK - 1) // BLOCK
    block = tile * BLOCKS
    a = gl.load(table + block, mask=(block >= first) & (block < last), other=0)
    b = gl.load(table + block + 1, mask=(block + 1 >= first) & (block + 1 < last), other=0)
    c = gl.load(table + block + 2, mask=(block + 2 >= first) & (block + 2 < last), other=0)
    d = gl.load(table + block + 3, mask=(block + 3 >= first) & (block + 3 < last), other=0)
    return gl.maximum(first - block, 0), gl.minimum(last - block, BLOCKS), a, b, c, d


@gluon.jit
def _copy(
    cache, block, index, past, first, last, head, KV_HEADS: gl.constexpr, ready, tiles, slot, MARK: gl.constexpr
):  # fmt: skip
    """Ask for a block of a tile in which the row has ``past`` tokens. If the row fills the block in part, they come
    last."""
    line = gl.minimum(past - (index + 1) * BLOCK, 0)
    to, wanted = tiles.index(slot * BLOCKS + index), (index >= first) & (index < last)
    copy_tile(cache, (block * KV_HEADS + head, line, 0), ready, to, MARK, wanted)


@gluon.jit
def _fill(
    k_blocks, v_blocks, ks, vs, ready, free, items, first_item, last_item, row, context, begin, end, block_tables,
    stride_table, window, head, KV_HEADS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, MARK: gl.constexpr,
):  # fmt: skip
    """The warp that asks for all tiles. It reads the places of tiles one turn ahead, across items."""
    table = block_tables + row.to(gl.int64) * stride_table
    first, last, a, b, c, d = _tile_blocks(table, begin, context, window)
    turn = 0
    for item in range(first_item, last_item):
        following = gl.minimum(item + 1, last_item - 1)
        next_row, _, next_context, next_begin, next_end, _ = _item(items + following * ITEM)
        next_table = block_tables + next_row.to(gl.int64) * stride_table
        for tile in range(begin, end):
            if tile + 1 < end:
                next_first, next_last, next_a, next_b, next_c, next_d = _tile_blocks(table, tile + 1, context, window)
            else:
                next_first, next_last, next_a, next_b, next_c, next_d = _tile_blocks(
                    next_table, next_begin, next_context, window
                )
            slot = turn % STAGES
            filled = ready.index(slot)
            mbarrier.wait(free.index(slot), (turn // STAGES & 1) ^ 1)
            count = gl.maximum(last - first, 0)
            for blocks in gl.static_range(BLOCKS + 1):  # the bytes to expect are part of the instruction
                mbarrier.expect(filled, blocks * BLOCK * D * 4, pred=count == blocks)
            past = context - tile * KEYS
            _copy(k_blocks, a, 0, past, first, last, head, KV_HEADS, filled, ks, slot, MARK)
            _copy(k_blocks, b, 1, past, first, last, head, KV_HEADS, filled, ks, slot, MARK)
            _copy(k_blocks, c, 2, past, first, last, head, KV_HEADS, filled, ks, slot, MARK)
            _copy(k_blocks, d, 3, past, first, last, head, KV_HEADS, filled, ks, slot, MARK)
            _copy(v_blocks, a, 0, past, first, last, head, KV_HEADS, filled, vs, slot, MARK)
            _copy(v_blocks, b, 1, past, first, last, head, KV_HEADS, filled, vs, slot, MARK)
            _copy(v_blocks, c, 2, past, first, last, head, KV_HEADS, filled, vs, slot, MARK)
            _copy(v_blocks, d, 3, past, first, last, head, KV_HEADS, filled, vs, slot, MARK)
            first, last, a, b, c, d = next_first, next_last, next_a, next_b, next_c, next_d
            turn += 1
        table, context, begin, end = next_table, next_context, next_begin, next_end


@gluon.jit
def _cell(cache_slot, head, KV_HEADS: gl.constexpr, D: gl.constexpr):
    """Return the offset of a token's key or value in a cache."""
    return (cache_slot // BLOCK * KV_HEADS + head) * (BLOCK * D) + cache_slot % BLOCK * D


@gluon.jit
def _prepare(
    k_cache, v_cache, heads, q_norm, k_norm, eps, cos_sin, slot_mapping, queries, new_scores, new_values, asked,
    answered, items, first_item, last_item, query, context, takes_new, scale, stride_heads, head, STORED: gl.constexpr,
    NORM: gl.constexpr, ROTARY: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr,
    AHEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The warps that make queries, an item ahead, and write new keys and values to the cache.

    With STORED that was done before, and new keys and values come from the cache.
    """
    COPIES: gl.constexpr = gl.BlockedLayout([1, 1, D // 32], [1, 1, 32], [1, PREPARING, 1], [2, 1, 0])
    HEADS: gl.constexpr = gl.SliceLayout(0, COPIES)
    MEMBERS: gl.constexpr = next_power_of_2(GROUP)
    ROWS: gl.constexpr = queries.shape[1]
    HALF: gl.constexpr = D // 2
    member = gl.arange(0, MEMBERS, gl.SliceLayout(1, HEADS))[:, None]
    column = gl.arange(0, D, gl.SliceLayout(0, HEADS))[None, :]
    in_half, across = column % HALF, (column + HALF) % D
    q_gain, q_gain_across, k_gain, k_gain_across = 1.0, 1.0, 1.0, 1.0
    if NORM:
        q_gain, q_gain_across = gl.load(q_norm + column), gl.load(q_norm + across)
        k_gain, k_gain_across = gl.load(k_norm + column), gl.load(k_norm + across)
    if PDL and first_item == last_item:
        if not STORED:
            gdc_wait()
            gdc_launch_dependents()
        else:
            gdc_launch_dependents()
            if gl.program_id(0) == 0:  # nobody has an item, and somebody has to wait
                gdc_wait()
    for item in range(first_item, last_item):
        following = gl.minimum(item + 1, last_item - 1)
        _, next_query, next_context, _, _, next_takes_new = _item(items + following * ITEM)
        cache_slot = gl.load(slot_mapping + query)
        cosine, sine = 1.0, 0.0
        if ROTARY:
            angle = cos_sin + context.to(gl.int64) * D + in_half
            cosine = gl.load(angle)
            sine = gl.load(angle + HALF)
            sine = gl.where(column < HALF, -sine, sine)
        if PDL and item == first_item:
            gdc_wait()
            gdc_launch_dependents()

        q_new = heads + query * stride_heads + (head * GROUP + member) * D
        there = (member < GROUP) & (column >= 0)
        is_new = takes_new & (column >= 0)
        if STORED:
            k_new = k_cache + _cell(cache_slot, head, KV_HEADS, D)
            v_new = v_cache + _cell(cache_slot, head, KV_HEADS, D)
        else:
            k_new = heads + query * stride_heads + (KV_HEADS * GROUP + head) * D
            v_new = k_new + KV_HEADS * D
        q = gl.load(q_new + column, mask=there, other=0.0)
        key = gl.load(k_new + column, mask=is_new, other=0.0)
        value = gl.load(v_new + column, mask=is_new, other=0.0)
        q_across, key_across = q, key
        if ROTARY:
            q_across = gl.load(q_new + across, mask=there, other=0.0)
            key_across = gl.load(k_new + across, mask=is_new, other=0.0)
        q = _norm_and_rotate(q, q_across, q_gain, q_gain_across, cosine, sine, eps, NORM, ROTARY, D)
        key = _norm_and_rotate(key, key_across, k_gain, k_gain_across, cosine, sine, eps, NORM, ROTARY, D)
        if not STORED:
            at = _cell(cache_slot, head, KV_HEADS, D) + column
            gl.store(k_cache + at, key, mask=is_new & (cache_slot >= 0))
            gl.store(v_cache + at, value, mask=is_new & (cache_slot >= 0))
        score = gl.sum(q.to(gl.float32) * key.to(gl.float32), 1) * scale

        turn = item - first_item
        place = turn % AHEAD
        mbarrier.wait(answered.index(place), (turn // AHEAD & 1) ^ 1)
        q = q[None, :, :].broadcast_to([ROWS // MEMBERS, MEMBERS, D])
        queries.index(place).store(gl.reshape(q, [ROWS, D]))
        new_scores.index(place).slice(0, MEMBERS).store(score)
        new_values.index(place).store(gl.sum(value.to(gl.float32), 0).to(gl.bfloat16))
        gl.thread_barrier()
        mbarrier.arrive(asked.index(place))
        query, context, takes_new = next_query, next_context, next_takes_new


@gluon.jit
def _attend(
    sinks, out, ks, vs, ready, free, queries, new_scores, new_values, asked, answered, items, first_item, last_item,
    query, context, begin, end, takes_new, partials, stats, arrivals, scale, window, stride_out, stats_size, head,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, SINKS: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """The warps that compute. They free a tile's memory as soon as they have it in registers."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [BLOCKS, 1, 1], [1, 16, 8])
    WIDE: gl.constexpr = is_wide(D)
    ROWS: gl.constexpr = queries.shape[1]
    SUMS: gl.constexpr = gl.SliceLayout(1 if WIDE else 2, MMA)
    PARTS: gl.constexpr = gl.BlockedLayout([BLOCKS, 1, D // 16], [1, 2, 16], [1, 4, 1], [2, 1, 0])
    HEADS: gl.constexpr = gl.SliceLayout(0, PARTS)
    TILE: gl.constexpr = _tile_layout(D)
    k_tiles = ks._reinterpret(gl.bfloat16, [STAGES, BLOCKS, BLOCK, D], TILE)
    v_tiles = vs._reinterpret(gl.bfloat16, [STAGES, BLOCKS, BLOCK, D], TILE)
    turn = 0
    for item in range(first_item, last_item):
        following = gl.minimum(item + 1, last_item - 1)
        _, next_query, next_context, next_begin, next_end, next_takes_new = _item(items + following * ITEM)
        fields, number = items + item * ITEM, item - first_item
        place = number % AHEAD
        slot = gl.load(fields + PARTIAL).to(gl.int64)
        piece, pieces = gl.load(fields + PIECE), gl.load(fields + PIECES)
        first = gl.maximum(context - window + 1, 0)
        acc = gl.zeros([BLOCKS, D, ROWS] if WIDE else [BLOCKS, ROWS, D], gl.float32, MMA)
        peak = gl.full([BLOCKS, ROWS], -float("inf"), gl.float32, SUMS)
        total = gl.zeros([BLOCKS, ROWS], gl.float32, SUMS)
        mbarrier.wait(asked.index(place), number // AHEAD & 1)
        q = load_queries(queries.index(place), MMA, WIDE)
        # Triton 3.6 takes what only bounds an inner loop for dead, and hands on what it was at first.
        turn_of = turn - begin
        alone = begin
        if STAGES > 1:
            alone = end - (end - begin) % 2
            for tile in range(begin, alone, 2):
                acc, peak, total = take(
                    acc, peak, total, q, k_tiles, v_tiles, ready, free, turn_of + tile, first, context, tile, scale,
                    MMA, STAGES, 2, WIDE,
                )  # fmt: skip
        for tile in range(alone, end):
            acc, peak, total = take(
                acc, peak, total, q, k_tiles, v_tiles, ready, free, turn_of + tile, first, context, tile, scale, MMA,
                STAGES, 1, WIDE,
            )  # fmt: skip
        turn = turn_of + end
        new_score = new_scores.index(place).load(gl.SliceLayout(1, HEADS))
        value = new_values.index(place).load(gl.SliceLayout(0, HEADS))[None, :]
        mbarrier.arrive(answered.index(place))
        if WIDE:
            acc = acc.permute((0, 2, 1))
        acc, peak, total = join_warps(acc, peak, total, new_score, value, takes_new, PARTS)
        finish(
            acc, peak, total, slot, piece, pieces, query, head, sinks, out, partials, stats, arrivals, stride_out,
            stats_size, GROUP, KV_HEADS, D, SINKS,
        )  # fmt: skip
        query, context, begin, end, takes_new = next_query, next_context, next_begin, next_end, next_takes_new


@GluonKernel
def _tma_decode_kernel(
    k_blocks, v_blocks, k_cache, v_cache, heads, q_norm, k_norm, eps, cos_sin, slot_mapping, sinks, out, block_tables,
    items, team_items, partials, stats, arrivals, scale, window, stride_heads, stride_out, stride_table, stats_size,
    STORED: gl.constexpr, NORM: gl.constexpr, ROTARY: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr,
    D: gl.constexpr, SINKS: gl.constexpr, STAGES: gl.constexpr, MARK: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid: teams x KV heads, heads of a team side by side, since their KV lies side by side in a block."""
    head = gl.program_id(0) % KV_HEADS
    team = gl.program_id(0) // KV_HEADS
    its_team = team_items + team * TEAM
    first_item = gl.load(its_team + FIRST)
    last_item = gl.load(its_team + LAST)
    row, query, context, begin, end, takes_new = _item(its_team)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    # A program of one tile has an item or few, and is to take little memory (see choose_apart).
    AHEAD: gl.constexpr = 2 if STAGES > 1 else 1
    asked = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    answered = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(AHEAD):
        mbarrier.init(asked.index(i), count=1)
        mbarrier.init(answered.index(i), count=1)
    ks = gl.allocate_shared_memory(gl.bfloat16, [STAGES * BLOCKS, 1, BLOCK, D], k_blocks.layout)
    vs = gl.allocate_shared_memory(gl.bfloat16, [STAGES * BLOCKS, 1, BLOCK, D], v_blocks.layout)
    QUERY_ROWS: gl.constexpr = GROUP_ROWS if is_wide(D) else 2 * GROUP_ROWS  # as many as a product takes
    QUERIES: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(gl.bfloat16, [AHEAD, QUERY_ROWS, D], QUERIES)
    new_scores = gl.allocate_shared_memory(gl.float32, [AHEAD, GROUP_ROWS], PLAIN)
    new_values = gl.allocate_shared_memory(gl.bfloat16, [AHEAD, D], PLAIN)
    # Tuples in variables would lose their constants.
    gl.warp_specialize(
        [
            (_attend, (
                sinks, out, ks, vs, ready, free, queries, new_scores, new_values, asked, answered, items, first_item,
                last_item, query, context, begin, end, takes_new, partials, stats, arrivals, scale, window, stride_out,
                stats_size, head, GROUP, KV_HEADS, D, SINKS, STAGES, AHEAD,
            )),
            (_fill, (
                k_blocks, v_blocks, ks, vs, ready, free, items, first_item, last_item, row, context, begin, end,
                block_tables, stride_table, window, head, KV_HEADS, D, STAGES, MARK,
            )),
            (_prepare, (
                k_cache, v_cache, heads, q_norm, k_norm, eps, cos_sin, slot_mapping, queries, new_scores, new_values,
                asked, answered, items, first_item, last_item, query, context, takes_new, scale, stride_heads, head,
                STORED, NORM, ROTARY, GROUP, KV_HEADS, D, AHEAD, PDL,
            )),
        ],
        [1, PREPARING],
        OTHERS_WIDE if is_wide(D) else OTHERS,
    )  # fmt: skip
