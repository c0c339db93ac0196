"""Attention of one-token rows over a WorkList, with all that surrounds it: QK-norm, rotary embedding, the KV write.

The way of steps with more rows or longer ones than are for few_keys.py. An item of the list is a stretch of one
row's keys for a KV head. Its program norms and rotates the group's queries itself, which is next to nothing for one
token, and so no kernel of its own need come between the projection and this one. The item with the last of the row's
keys also takes the new token: it writes key and value to the cache, and begins its softmax with them. Nobody reads what
is written here, and what an item reads lies in the cache since earlier steps: so its first tile of keys and values
is asked for in the L2 cache before its queries are there, and a program's first one before the projection has ended
(see programmatic.py). On Hopper tma_decode.py does the same, faster.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

import math

import triton
import triton.language as tl

from asyncengine.errors import ConfigError
from asyncengine.kernels.cuda.attention.call import KernelCall
from asyncengine.kernels.cuda.attention.few_keys import check_heads, surroundings
from asyncengine.kernels.cuda.attention.paged import combine_options, finish, fold, load_blocks
from asyncengine.kernels.cuda.attention.plan import AttentionShape, Launch, LayerKind, Tile
from asyncengine.kernels.cuda.attention.scores import base2_scale, score_constants, transform_scores
from asyncengine.kernels.cuda.attention.work.items import BEGIN, END, FIRST, ITEM, LAST, POSITION, QUERY, SLOT, TEAM
from asyncengine.kernels.cuda.attention.work.lists import NO_WINDOW, Section, WorkList
from asyncengine.kernels.cuda.launch import programmatic as pdl_kernels
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.rows.float8_cache import (
    for_products,
    key_inverse,
    key_scale,
    to_float8,
    value_inverse,
    value_scale,
)


def run(launch: Launch, call: KernelCall) -> None:
    """Attend as ``run`` of run.py says, for rows of one token, whose heads this kernel prepares as few_keys does.

    Raises ConfigError if ``work`` was allocated for something else, ValueError if the other tensors do not fit.
    """
    section = section_of_heads(launch, call)
    heads, out, layer, step, (k_cache, v_cache, scales, *_) = call.heads, call.out, call.layer, call.step, call.cache
    _, kv_heads, block_size, head_dim = k_cache.shape
    group = layer.num_heads // kv_heads
    tile = section.tile
    width = max(16, triton.next_power_of_2(head_dim))  # what a dot takes at least
    _paged_decode_kernel[(section.teams * kv_heads,)](
        heads,
        *surroundings(call),
        step.slot_mapping,
        k_cache,
        v_cache,
        heads if scales is None else scales,
        layer.sinks,
        out,
        step.slots.block_tables,
        *section.operands,
        base2_scale(layer),
        layer.window or NO_WINDOW,
        heads.stride(0),
        out.stride(0),
        step.slots.block_tables.stride(0),
        section.stats.stride(0),
        NORM=layer.norms is not None,
        ROTARY=layer.cos_sin is not None,
        GROUP=group,
        G=triton.next_power_of_2(group),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOWED=layer.window > 0,
        PREFETCH=_PREFETCH,
        THREADS=32 * tile.warps,
        M=tile.rows,
        N=tile.keys,
        RUN=math.gcd(tile.keys, block_size),
        D=width,
        STAGES=tile.stages,
        FLOAT8=scales is not None,
        **combine_options(section, group, width),
        **score_constants(layer),
        WIDEN=pdl_kernels.must_widen(heads.dtype),
        num_warps=tile.warps,
        maxnreg=_registers(tile),
        num_stages=tile.stages,
        **pdl_kernels.launch_options(call.pdl),
    )


def section_of_heads(launch: Launch, call: KernelCall) -> Section:
    """Return the section of the work list that a kernel that prepares heads walks. Raises as ``run`` does."""
    check_heads(call)
    layer, keys, float8 = call.layer, call.cache.k, call.cache.scales is not None
    shape = AttentionShape(layer.num_heads, keys.shape[1], keys.shape[3], call.heads.dtype, float8)
    work, kind = call.work, LayerKind(shape, layer.window)
    section = work.section(launch, kind) if isinstance(work, WorkList) else None
    if section is None:
        raise ConfigError("a work list with rows of one token is needed")
    return section


def _registers(tile: Tile) -> int:
    """Registers of a thread such that a multiprocessor's 65,536 suffice for the tile's programs. The compiler would
    take more."""
    return min(255, 65536 // (tile.programs_per_sm * tile.warps * 32) // 8 * 8)


# A bulk copy's own instruction, so nothing but the addresses takes registers. It needs Hopper, as PDL does.
_PREFETCH = """{
    .reg .pred there;
    setp.ne.s32 there, $3, 0;
    @there cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.u32 $0, 0;
}"""


@triton.jit
def _prefetch(
    k_head, v_head, table, tile, context, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr, N: tl.constexpr, RUN: tl.constexpr, THREADS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Ask for a tile in the L2 cache: a thread for each RUN tokens, which lie in one block."""
    BYTES: tl.constexpr = RUN * HEAD_DIM * k_head.dtype.element_ty.primitive_bitwidth // 8
    run = tl.arange(0, THREADS)
    token = tile * N + run * RUN
    there = (run < N // RUN) & (token < context)
    block = tl.load(table + token // BLOCK_SIZE, mask=there, other=0)
    at = block.to(tl.int64) * BLOCK_STRIDE + token % BLOCK_SIZE * HEAD_DIM
    there = there.to(tl.int32)
    tl.inline_asm_elementwise(PREFETCH, "=r,l,r,r", [k_head + at, BYTES, there], dtype=tl.int32, is_pure=False, pack=1)
    tl.inline_asm_elementwise(PREFETCH, "=r,l,r,r", [v_head + at, BYTES, there], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def norm_and_rotate(
    x, other, gain, gain_other, cosine, sine, eps, NORM: tl.constexpr, ROTARY: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Heads [R, D], ``other`` their halves the other way round; rounded wherever separate operations would round."""
    dtype: tl.constexpr = x.dtype
    if NORM:
        exact = x.to(tl.float32)
        factor = tl.rsqrt(tl.sum(exact * exact, 1) / HEAD_DIM + eps)[:, None]
        x = (exact * factor * gain.to(tl.float32)).to(dtype)
        other = (other.to(tl.float32) * factor * gain_other.to(tl.float32)).to(dtype)
    if ROTARY:
        x = (x.to(tl.float32) * cosine + other.to(tl.float32) * sine).to(dtype)
    return x


@triton.jit
def _load_tile(
    k_head, v_head, tile, block, first, context, WINDOWED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Keys and values [N, D] of a tile, as far as they are past and in the window, and which those are."""
    column = tl.arange(0, D)
    token = tile * N + tl.arange(0, N)
    line = block * (BLOCK_STRIDE // HEAD_DIM) + token % BLOCK_SIZE
    at = line.to(tl.int64)[:, None] * HEAD_DIM + column[None, :]
    there = token < context
    if WINDOWED:
        there = there & (token >= first)
    loaded = there[:, None] if D == HEAD_DIM else there[:, None] & (column < HEAD_DIM)[None, :]
    k = tl.load(k_head + at, mask=loaded, other=0.0)
    v = tl.load(v_head + at, mask=loaded, other=0.0)
    return k, v, there[None, :]


@kernel(do_not_specialize=["window", "stride_table", "stats_size"])
def _paged_decode_kernel(
    heads,
    q_norm,
    k_norm,
    eps,
    cos_sin,
    slot_mapping,
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
    stride_heads,
    stride_out,
    stride_table,
    stats_size,
    NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    PREFETCH: tl.constexpr,
    THREADS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    RUN: tl.constexpr,
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
    HALF: tl.constexpr = HEAD_DIM // 2
    head = tl.program_id(0) % KV_HEADS
    team = tl.program_id(0) // KV_HEADS
    k_head = k_cache + head * BLOCK_SIZE * HEAD_DIM
    v_head = v_cache + head * BLOCK_SIZE * HEAD_DIM
    if FLOAT8:
        scale *= key_scale(kv_scales, head, KV_HEADS)
        of_values = value_scale(kv_scales, head, KV_HEADS)
        of_new_keys = key_inverse(kv_scales, head, KV_HEADS)
        of_new_values = value_inverse(kv_scales, head, KV_HEADS)
    member = tl.arange(0, G)[:, None]
    column = tl.arange(0, D)[None, :]
    inside = column < HEAD_DIM
    in_half = tl.where(column < HALF, column, column - HALF)
    across = tl.where(column < HALF, column + HALF, column - HALF)
    first_item = tl.load(team_items + team * TEAM + FIRST)
    last_item = tl.load(team_items + team * TEAM + LAST)
    if first_item == last_item:
        pdl_kernels.wait(PDL)
    for item in range(first_item, last_item):
        fields = items + item * ITEM
        query = tl.load(fields + QUERY).to(tl.int64)
        context = tl.load(fields + POSITION)
        begin = tl.load(fields + BEGIN)
        end = tl.load(fields + END)
        table = block_tables + tl.load(fields + SLOT).to(tl.int64) * stride_table
        first = tl.maximum(context - window + 1, 0)
        takes_new = end * N > context
        cache_slot = tl.load(slot_mapping + query)

        block = load_blocks(table, begin, context, BLOCK_SIZE, N)
        if PDL:
            _prefetch(
                k_head, v_head, table, begin, context, BLOCK_SIZE, BLOCK_STRIDE, HEAD_DIM, N, RUN, THREADS, PREFETCH
            )
        cosine, sine, q_gain, q_gain_across, k_gain, k_gain_across = 1.0, 0.0, 1.0, 1.0, 1.0, 1.0
        if ROTARY:
            angle = cos_sin + context.to(tl.int64) * HEAD_DIM + in_half
            cosine = tl.load(angle, mask=inside, other=0.0)
            sine = tl.load(angle + HALF, mask=inside, other=0.0)
            sine = tl.where(column < HALF, -sine, sine)
        if NORM:
            q_gain = tl.load(q_norm + column, mask=inside, other=0.0)
            q_gain_across = tl.load(q_norm + across, mask=inside, other=0.0)
            k_gain = tl.load(k_norm + column, mask=inside, other=0.0)
            k_gain_across = tl.load(k_norm + across, mask=inside, other=0.0)
        if item == first_item:
            pdl_kernels.wait(PDL)

        q_new = heads + query * stride_heads + (head * GROUP + member) * HEAD_DIM
        k_new = heads + query * stride_heads + (KV_HEADS * GROUP + head) * HEAD_DIM
        there_q = inside & (member < GROUP)
        there_k = inside & takes_new
        q = tl.load(q_new + column, mask=there_q, other=0.0)
        key = tl.load(k_new + column, mask=there_k, other=0.0)
        value = tl.load(k_new + KV_HEADS * HEAD_DIM + column, mask=there_k, other=0.0)
        q_across, key_across = q, key
        if ROTARY:
            q_across = tl.load(q_new + across, mask=there_q, other=0.0)
            key_across = tl.load(k_new + across, mask=there_k, other=0.0)
        q = norm_and_rotate(q, q_across, q_gain, q_gain_across, cosine, sine, eps, NORM, ROTARY, HEAD_DIM)
        key = norm_and_rotate(key, key_across, k_gain, k_gain_across, cosine, sine, eps, NORM, ROTARY, HEAD_DIM)
        if FLOAT8:
            q = for_products(q)
            key, value = to_float8(key, of_new_keys), to_float8(value, of_new_values)
        written = there_k & (cache_slot >= 0)
        at = cache_slot // BLOCK_SIZE * BLOCK_STRIDE + cache_slot % BLOCK_SIZE * HEAD_DIM + column
        tl.store(k_head + at, key, mask=written)
        tl.store(v_head + at, value, mask=written)

        # The new token is the state that the softmax begins with. What the dot has too many rows for are copies.
        score = transform_scores(tl.sum(q.to(tl.float32) * key.to(tl.float32), 1), scale, SOFTCAP)
        peak = tl.where(takes_new, score, -float("inf"))
        peak = tl.reshape(tl.broadcast_to(peak[None, :], [M // G, G]), [M])
        q = tl.reshape(tl.broadcast_to(q[None, :, :], [M // G, G, D]), [M, D])
        total = tl.zeros([M], tl.float32) + tl.where(takes_new, 1.0, 0.0)
        acc = tl.zeros([M, D], tl.float32) + value.to(tl.float32)
        for tile in tl.range(begin, end, num_stages=STAGES):
            k, v, there = _load_tile(
                k_head, v_head, tile, block, first, context, WINDOWED, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, N, D
            )
            # One turn ahead: were it loaded with its tile, half of the stages would go to hiding its latency.
            block = load_blocks(table, tile + 1, context, BLOCK_SIZE, N)
            acc, peak, total = fold(acc, peak, total, q, k, v, there, scale, True, SOFTCAP, WIDEN)

        if FLOAT8:
            acc *= of_values
        finish(
            acc, peak, total, fields, query, 1, head, sinks, out, partials, stats, arrivals, stride_out, stats_size,
            GROUP, KV_HEADS, HEAD_DIM, 1, M, D, COMBINE_ROWS, COMBINE_PIECES,
        )  # fmt: skip
