"""Paged attention for CUDA: decode, prefill and mixed batches from one kernel over a WorkList.

Queries are rotated and keys and values stored by then; where a step's rows are all of one token,
paged_decode.py does that too, and shares what follows the first load.

The online softmax is that of FlashAttention (Dao et al., 2022), in base 2; pieces of a unit are combined by
the program that finishes last, in the order of the pieces, so that neither the order of arrival nor an
extra launch matters.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from asyncengine.errors import ConfigError
from asyncengine.kernels.cuda.attention.call import KernelCall
from asyncengine.kernels.cuda.attention.plan import AttentionShape, Launch, LayerKind
from asyncengine.kernels.cuda.attention.scores import base2_scale, score_constants, transform_scores, with_sinks
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
from asyncengine.kernels.cuda.attention.work.lists import NO_WINDOW, Section, WorkList
from asyncengine.kernels.cuda.launch import programmatic as pdl_kernels
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.rows.float8_cache import check_scales, for_products, key_scale, value_scale
from asyncengine.kernels.float8 import FLOAT8

COMBINE_ELEMENTS = (16, 64)
"""Partial results that a thread of a combining program loads at once, in decode and in prefill. All 128 rows of a piece
of prefill are in flight together; decode has no registers for more, whose programs share a multiprocessor."""
MAX_COMBINE_PIECES = 32


def run(launch: Launch, call: KernelCall) -> None:
    """Attend as ``run`` of run.py says, for the launch's rows, over keys and values that are in the cache.

    The kernel reads the queries among the heads. Raises ConfigError if a tensor's shape, dtype or layout is not what
    ``work`` was allocated for.
    """
    section = section_for(launch, call)
    check_scales(call.cache.scales, call.cache.k.shape[1])
    if section:
        _launch(call, section)


def section_for(launch: Launch, call: KernelCall) -> Section | None:
    """Return the section of the work list that the kernel walks. Raises ConfigError if ``work`` was allocated for
    another kernel or other tensors."""
    work = call.work
    if not isinstance(work, WorkList):
        raise ConfigError("a work list is needed")
    check_layout(call, work.shape)
    return work.section(launch, LayerKind(work.shape, call.layer.window))


def check_layout(call: KernelCall, shape: AttentionShape) -> None:
    """Raises ConfigError if a tensor of the call does not suit the shape."""
    q, k_cache, v_cache, out = call.queries, call.cache.k, call.cache.v, call.out
    cache_shape = (len(k_cache), shape.num_kv_heads, k_cache.shape[2], shape.head_dim)
    expected = (
        (q.shape[1:] == (shape.num_heads, shape.head_dim) and q.stride(2) == 1, "q"),
        (k_cache.shape == cache_shape and k_cache.is_contiguous(), "k_cache"),
        (v_cache.shape == cache_shape and v_cache.is_contiguous(), "v_cache"),
        (out.shape == (len(q), shape.num_heads * shape.head_dim) and out.stride(1) == 1, "out"),
    )
    for ok, name in expected:
        if not ok:
            raise ConfigError(f"paged: the layout of {name} does not suit {shape}")
    cached = FLOAT8 if shape.float8_cache else shape.dtype
    if not (q.dtype == out.dtype == shape.dtype and k_cache.dtype == v_cache.dtype == cached):
        raise ConfigError(f"paged: {q.dtype}, {k_cache.dtype}, {v_cache.dtype} and {out.dtype} for {shape}")


def _launch(call: KernelCall, section: Section) -> None:
    q, out, layer, step, (k_cache, v_cache, scales, *_) = call.queries, call.out, call.layer, call.step, call.cache
    _, kv_heads, block_size, head_dim = k_cache.shape
    tile, group = section.tile, q.shape[1] // kv_heads
    width = max(16, triton.next_power_of_2(head_dim))  # what a dot takes at least
    _attention_kernel[(section.teams * kv_heads,)](
        q,
        k_cache,
        v_cache,
        step.slot_mapping if scales is None else scales,
        layer.sinks,
        out,
        step.slots.block_tables,
        *section.operands,
        base2_scale(layer),
        layer.window or NO_WINDOW,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        step.slots.block_tables.stride(0),
        section.stats.stride(0),
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOWED=layer.window > 0,
        # One loop serves where the last tile is most of the work, or where all tiles must be treated alike.
        ONE_LOOP=section.queries == 1 or section.split_tiles > 0,
        QUERIES=section.queries,
        ITEM_STEP=section.item_step,
        M=tile.rows,
        N=tile.keys,
        D=width,
        STAGES=tile.stages,
        FLOAT8=scales is not None,
        **combine_options(section, group, width),
        **score_constants(layer),
        WIDEN=pdl_kernels.must_widen(q.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl_kernels.launch_options(call.pdl),
    )


def combine_options(section: Section, group: int, width: int) -> dict[str, int]:
    """COMBINE_ROWS and COMBINE_PIECES: a unit's rows, or as many as fit, of as many pieces as then fit.

    Fixed splits are combined one piece at a time: a token's unit may have others before or after those that the token
    sees, and they must not change in which order the sums are made.
    """
    elements = COMBINE_ELEMENTS[section.queries > 1] * 32 * section.tile.warps
    rows = min(triton.next_power_of_2(section.queries * group), max(1, elements // width))
    pieces = 1 if section.split_tiles else min(MAX_COMBINE_PIECES, max(1, elements // (rows * width)))
    return {"COMBINE_ROWS": rows, "COMBINE_PIECES": pieces}


@triton.jit
def dot(a, b, WIDEN: tl.constexpr):
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def load_blocks(table, tile, kv_end, BLOCK_SIZE: tl.constexpr, N: tl.constexpr):
    """The block of every token of a KV tile."""
    token = tile * N + tl.arange(0, N)
    return tl.load(table + token // BLOCK_SIZE, mask=token < kv_end, other=0)


@triton.jit
def fold(
    acc, peak, total, q, k, v, visible, scale, MASKED: tl.constexpr, SOFTCAP: tl.constexpr, WIDEN: tl.constexpr
):  # fmt: skip
    """Fold a tile of keys and values [N, D] into acc [M, D], peak [M] and total [M].

    Keys and values in float8 become what q is.
    """
    k = k.to(q.dtype)
    v = v.to(q.dtype)
    score = transform_scores(dot(q, tl.trans(k), WIDEN), scale, SOFTCAP)
    if MASKED:
        score = tl.where(visible, score, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(score, 1))
    base = new_peak
    if MASKED:
        # A row that has seen no key yet: -inf less -inf would be NaN.
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weight, 1)
    acc = acc * shrink[:, None] + dot(weight.to(v.dtype), v, WIDEN)
    return acc, new_peak, total


@triton.jit
def _attend(
    acc,
    peak,
    total,
    q,
    k_head,
    v_head,
    table,
    position,
    first,
    last,
    kv_begin,
    kv_end,
    scale,
    window,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Fold the KV tiles first to last, into acc [M, D], peak [M] and total [M].

    Without MASKED every query sees every key of these tiles. With it, nothing outside kv_begin to kv_end, the
    union of what the queries see, is loaded: there may be anything, and 0 * NaN is NaN.
    """
    column = tl.arange(0, D)
    block = load_blocks(table, first, kv_end, BLOCK_SIZE, N)
    for tile in tl.range(first, last, num_stages=STAGES):
        token = tile * N + tl.arange(0, N)
        at = block.to(tl.int64) * BLOCK_STRIDE + token % BLOCK_SIZE * HEAD_DIM
        # One turn ahead: were it loaded here, half of the stages would go to hiding its latency.
        block = load_blocks(table, tile + 1, kv_end, BLOCK_SIZE, N)
        at = at[:, None] + column[None, :]
        if MASKED:
            there = token < kv_end
            if WINDOWED:
                there = there & (token >= kv_begin)
            loaded = there[:, None] if D == HEAD_DIM else there[:, None] & (column < HEAD_DIM)[None, :]
            k = tl.load(k_head + at, mask=loaded, other=0.0)
            v = tl.load(v_head + at, mask=loaded, other=0.0)
        elif D == HEAD_DIM:
            k = tl.load(k_head + at)
            v = tl.load(v_head + at)
        else:
            loaded = (column < HEAD_DIM)[None, :]
            k = tl.load(k_head + at, mask=loaded, other=0.0)
            v = tl.load(v_head + at, mask=loaded, other=0.0)

        visible = True
        if MASKED:
            visible = token[None, :] <= position[:, None]
            if WINDOWED:
                visible = visible & (token[None, :] > position[:, None] - window)
        acc, peak, total = fold(acc, peak, total, q, k, v, visible, scale, MASKED, SOFTCAP, WIDEN)
    return acc, peak, total


@triton.jit
def _combine(
    partials,
    peaks,
    totals,
    sinks,
    out,
    pieces,
    count,
    stride_out,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PIECE_STRIDE: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Sum the partial results of a unit's pieces, in their order, into ``out`` (its first token and head)."""
    column = tl.arange(0, D)
    for first_row in range(0, count * GROUP, ROWS):
        row = first_row + tl.arange(0, ROWS)
        acc = tl.zeros([ROWS, D], tl.float32)
        peak = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for first in range(0, pieces, PIECES):
            # Nothing here waits for another load: one round trip.
            piece = first + tl.arange(0, PIECES)
            there = (piece < pieces)[:, None] & (row < count * GROUP)[None, :]
            at = piece[:, None] * PIECE_STRIDE + row[None, :]
            piece_peak = tl.load(peaks + at, mask=there, other=-float("inf"), cache_modifier=".cg")
            piece_total = tl.load(totals + at, mask=there, other=0.0, cache_modifier=".cg")
            part = tl.load(
                partials + at[:, :, None] * HEAD_DIM + column[None, None, :],
                mask=there[:, :, None] & (column < HEAD_DIM)[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            new_peak = tl.maximum(peak, tl.max(piece_peak, 0))
            base = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # rows past the last
            weight = tl.exp2(piece_peak - base[None, :])
            shrink = tl.exp2(peak - base)
            total = total * shrink + tl.sum(weight * piece_total, 0)
            acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * part, 0)
            peak = new_peak
        total = with_sinks(total, peak, sinks, row % GROUP, row < count * GROUP)
        total = tl.where(total == 0.0, 1.0, total)
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        to = out + (row // GROUP).to(tl.int64)[:, None] * stride_out + (row % GROUP)[:, None] * HEAD_DIM
        tl.store(to + column[None, :], result, mask=(row < count * GROUP)[:, None] & (column < HEAD_DIM)[None, :])


@triton.jit
def finish(
    acc,
    peak,
    total,
    fields,
    query,
    count,
    head,
    sinks,
    out,
    partials,
    stats,
    arrivals,
    stride_out,
    stats_size,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    COMBINE_ROWS: tl.constexpr,
    COMBINE_PIECES: tl.constexpr,
):
    """Store an item's result: to ``out`` if the item is a whole unit or the unit's last to arrive."""
    PIECE_STRIDE: tl.constexpr = KV_HEADS * QUERIES * GROUP
    row = tl.arange(0, M)
    column = tl.arange(0, D)
    there = (row < count * GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    pieces = tl.load(fields + PIECES)
    if sinks is not None:
        sinks += head * GROUP
    if pieces == 1:
        total = with_sinks(total, peak, sinks, row % GROUP, row < count * GROUP)
        total = tl.where(total == 0.0, 1.0, total)  # rows past the last token
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        to = out + (query + row // GROUP)[:, None] * stride_out + (head * GROUP + row % GROUP)[:, None] * HEAD_DIM
        tl.store(to + column[None, :], result, mask=there)
    else:
        slot = tl.load(fields + PARTIAL).to(tl.int64)
        unit = (slot * KV_HEADS + head) * (QUERIES * GROUP)
        mine = unit + tl.load(fields + PIECE) * PIECE_STRIDE + row
        tl.store(stats + mine, peak, mask=row < count * GROUP)
        tl.store(stats + stats_size + mine, total, mask=row < count * GROUP)
        tl.store(partials + mine[:, None] * HEAD_DIM + column[None, :], acc, mask=there)
        # Release: the barrier puts every thread's stores before the one thread that counts.
        tl.debug_barrier()
        arrival = arrivals + slot * KV_HEADS + head
        if tl.atomic_add(arrival, 1, sem="acq_rel") == pieces - 1:
            tl.store(arrival, 0)  # for the next launch: nobody else will come in this one
            _combine(
                partials + unit * HEAD_DIM, stats + unit, stats + stats_size + unit, sinks,
                out + query * stride_out + head * GROUP * HEAD_DIM, pieces, count, stride_out,
                GROUP, HEAD_DIM, PIECE_STRIDE, D, COMBINE_ROWS, COMBINE_PIECES,
            )  # fmt: skip


@kernel(do_not_specialize=["window", "stride_table", "stats_size"])
def _attention_kernel(
    q,
    k_cache,
    v_cache,
    kv_scales,
    sinks,
    out,
    block_tables,
    items,
    team_items,
    partials,
    stats,
    arrivals,
    scale,
    window,
    stride_q_token,
    stride_q_head,
    stride_out,
    stride_table,
    stats_size,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    QUERIES: tl.constexpr,
    ITEM_STEP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
    COMBINE_ROWS: tl.constexpr,
    COMBINE_PIECES: tl.constexpr,
    FLOAT8: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: teams x KV heads, heads of a team side by side, since their KV lies side by side in a block."""
    BLOCK_STRIDE: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM
    head = tl.program_id(0) % KV_HEADS
    team = tl.program_id(0) // KV_HEADS
    k_head = k_cache + head * BLOCK_SIZE * HEAD_DIM
    v_head = v_cache + head * BLOCK_SIZE * HEAD_DIM
    if FLOAT8:
        scale *= key_scale(kv_scales, head, KV_HEADS)
        of_values = value_scale(kv_scales, head, KV_HEADS)
    row = tl.arange(0, M)
    column = tl.arange(0, D)
    first_item = tl.load(team_items + team * TEAM + FIRST)
    last_item = tl.load(team_items + team * TEAM + LAST)
    pdl_kernels.wait(PDL)
    for item in range(first_item, last_item, ITEM_STEP):
        fields = items + item * ITEM
        query = tl.load(fields + QUERY).to(tl.int64)
        count = tl.load(fields + COUNT)
        first_position = tl.load(fields + POSITION)
        begin = tl.load(fields + BEGIN)
        end = tl.load(fields + END)
        table = block_tables + tl.load(fields + SLOT).to(tl.int64) * stride_table

        there = (row < count * GROUP)[:, None] & (column < HEAD_DIM)[None, :]
        token = query + row // GROUP
        at = token[:, None] * stride_q_token + (head * GROUP + row % GROUP)[:, None] * stride_q_head
        queries = tl.load(q + at + column[None, :], mask=there, other=0.0)
        if FLOAT8:
            queries = for_products(queries)
        position = first_position + row // GROUP
        last_position = first_position + count - 1
        kv_begin = tl.maximum(first_position - window + 1, 0)
        kv_end = last_position + 1

        acc = tl.zeros([M, D], tl.float32)
        peak = tl.full([M], -float("inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        full_begin, full_end = begin, begin
        if not ONE_LOOP:
            # Tiles that every query of the item sees whole go through a loop without masks.
            if WINDOWED:
                full_begin = tl.minimum(tl.cdiv(tl.maximum(last_position - window + 1, begin * N), N), end)
                acc, peak, total = _attend(
                    acc, peak, total, queries, k_head, v_head, table, position, begin, full_begin, kv_begin,
                    kv_end, scale, window, True, WINDOWED, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, N, D, STAGES, SOFTCAP,
                    WIDEN,
                )  # fmt: skip
            full_end = tl.maximum(tl.minimum((first_position + 1) // N, end), full_begin)
            acc, peak, total = _attend(
                acc, peak, total, queries, k_head, v_head, table, position, full_begin, full_end, kv_begin,
                kv_end, scale, window, False, WINDOWED, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, N, D, STAGES, SOFTCAP,
                WIDEN,
            )  # fmt: skip
        acc, peak, total = _attend(
            acc, peak, total, queries, k_head, v_head, table, position, full_end, end, kv_begin, kv_end, scale, window,
            True, WINDOWED, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, N, D, STAGES, SOFTCAP, WIDEN,
        )  # fmt: skip

        if FLOAT8:
            acc *= of_values
        finish(
            acc, peak, total, fields, query, count, head, sinks, out, partials, stats, arrivals, stride_out, stats_size,
            GROUP, KV_HEADS, HEAD_DIM, QUERIES, M, D, COMBINE_ROWS, COMBINE_PIECES,
        )  # fmt: skip
