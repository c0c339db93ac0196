"""Attention of one-token rows with all that surrounds it: QK-norm, rotary embedding, the write to the KV cache.

A step in which every row has one token needs nothing of the QKV projection but each row's own heads; the keys and
values before them lie in the cache since earlier steps. So one kernel does a layer's whole attention. It takes the
new key and value from registers, and loads what is older while the projection still runs.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.errors import ConfigError
from asyncengine.kernels import pdl as pdl_kernels
from asyncengine.kernels.device_step import DeviceStep
from asyncengine.kernels.ops import HeadNorms
from asyncengine.kernels.triton_attention import (
    attend,
    check_layout,
    combine_if_last,
    combine_options,
    finish,
    load_blocks,
    must_widen,
)
from asyncengine.kernels.work_list import (
    BEGIN,
    END,
    ITEM,
    NO_WINDOW,
    PARTIAL,
    PIECE,
    PIECES,
    POSITION,
    QUERY,
    SLOT,
    WorkList,
)


def decode_attention(
    heads: Tensor,
    num_heads: int,
    norms: HeadNorms | None,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    step: DeviceStep,
    work: WorkList,
    scale: float,
    window: int,
    out: Tensor,
    *,
    pdl: bool = False,
) -> None:
    """What ``rotary_store_kv`` (or ``store_kv``) and ``paged_attention`` do, for the rows of one token.

    heads is [T, num_heads + 2 Hk, D]: queries, keys and values as the QKV projection gave them, the heads of a token
    contiguous; it is left as it was. norms are over every head of the queries and keys, None for none. cos_sin is
    float32 [max_positions, D], D/2 cosines, then D/2 sines, element i paired with i + D/2; None for no rotation.
    A row's token is at position ``step.row_context_len``; its key and value are written where
    ``step.slot_mapping`` says (-1: nowhere), which must be where the row's block table has that position.
    Caches, step, work, scale, window and out are those of ``paged_attention``; rows of other lengths are left out.
    ``pdl``: see asyncengine.kernels.pdl. The one tensor of the previous kernel that is read is ``heads``.

    Raises ConfigError if a tensor's shape, dtype or layout is not what ``work`` was allocated for.
    """
    q = heads[:, :num_heads]
    check_layout(q, k_cache, v_cache, work.shape, out)
    _, kv_heads, block_size, head_dim = k_cache.shape
    _check(heads, num_heads + 2 * kv_heads, norms, cos_sin, step, window, work)
    section, group = work.decode, num_heads // kv_heads
    tile, width = section.tile, max(16, triton.next_power_of_2(head_dim))
    kernel = _stream_kernel if tile.rows == 1 else _dot_kernel
    kernel[(section.lanes * kv_heads,)](
        heads,
        heads if norms is None else norms.q,
        heads if norms is None else norms.k,
        0.0 if norms is None else norms.eps,
        heads if cos_sin is None else cos_sin,
        step.slot_mapping,
        k_cache,
        v_cache,
        out,
        step.slots.block_tables,
        section.items,
        section.lane_items,
        section.partials,
        section.stats,
        section.arrivals,
        scale * math.log2(math.e),
        window or NO_WINDOW,
        heads.stride(0),
        out.stride(0),
        step.slots.block_tables.stride(0),
        section.stats.stride(0),
        NORM=norms is not None,
        ROTARY=cos_sin is not None,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOWED=window > 0,
        ITEM_STEP=section.item_step,
        M=tile.rows,
        N=tile.keys,
        D=width,
        STAGES=tile.stages,
        **combine_options(section, group, width),
        WIDEN=must_widen(heads.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.registers,
        **pdl_kernels.launch_options(pdl),
    )


def _check(
    heads: Tensor,
    num_heads: int,
    norms: HeadNorms | None,
    cos_sin: Tensor | None,
    step: DeviceStep,
    window: int,
    work: WorkList,
) -> None:
    dim = work.shape.head_dim
    if window != work.window:
        raise ConfigError(f"the work list is of window {work.window}, not {window}")
    if heads.shape[1] != num_heads or heads.stride(1) != dim:
        raise ConfigError(f"heads {list(heads.shape)} are not the contiguous {num_heads} of {work.shape}")
    if len(step.slot_mapping) > len(heads):
        raise ConfigError(f"heads of {len(heads)} tokens for a step of {len(step.slot_mapping)}")
    for weight in norms[:2] if norms else ():
        if weight.shape != (dim,) or weight.dtype != heads.dtype or not weight.is_contiguous():
            raise ConfigError(f"norms must be contiguous {heads.dtype} [{dim}]")
    if cos_sin is not None:
        if cos_sin.shape[1:] != (dim,) or cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous():
            raise ConfigError(f"cos_sin must be contiguous float32 [max_positions, {dim}]")
        if dim % 2:
            raise ConfigError(f"heads of {dim} elements cannot be rotated")


@triton.jit
def _fields(items, item, there):
    """Token, position, first and last tile and slot of an item, or of one without keys."""
    fields = items + item * ITEM
    query = tl.load(fields + QUERY, mask=there, other=0).to(tl.int64)
    position = tl.load(fields + POSITION, mask=there, other=0)
    begin = tl.load(fields + BEGIN, mask=there, other=0)
    last = tl.load(fields + END, mask=there, other=1) - 1
    slot = tl.load(fields + SLOT, mask=there, other=0).to(tl.int64)
    return query, position, begin, last, slot


@triton.jit
def _is_visible(token, position, window, WINDOWED: tl.constexpr):
    visible = token < position
    if WINDOWED:
        visible = visible & (token > position - window)
    return visible


@triton.jit
def _load_past(
    k_head,
    v_head,
    block,
    position,
    tile,
    window,
    WINDOWED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """Keys and values [N, D] of a tile, as far as they are visible and precede the row's own token."""
    column = tl.arange(0, D)
    token = tile * N + tl.arange(0, N)
    there = _is_visible(token, position, window, WINDOWED)
    at = (block.to(tl.int64) * BLOCK_STRIDE + token % BLOCK_SIZE * HEAD_DIM)[:, None] + column[None, :]
    loaded = there[:, None] if D == HEAD_DIM else there[:, None] & (column < HEAD_DIM)[None, :]
    return tl.load(k_head + at, mask=loaded, other=0.0), tl.load(v_head + at, mask=loaded, other=0.0)


@triton.jit
def _partner(column, HALF: tl.constexpr):
    """The columns that the rotation pairs with these."""
    ALIGNED: tl.constexpr = HALF & -HALF
    return tl.max_contiguous(tl.multiple_of(tl.where(column < HALF, column + HALF, column - HALF), ALIGNED), ALIGNED)


@triton.jit
def _load_rotation(cos_sin, position, ROTARY: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """Factors [1, D] of an element and of its partner."""
    cosine, sine = 1.0, 0.0
    if ROTARY:
        HALF: tl.constexpr = HEAD_DIM // 2
        ALIGNED: tl.constexpr = HALF & -HALF
        column = tl.arange(0, D)[None, :]
        i = tl.max_contiguous(
            tl.multiple_of(tl.where(column < HALF, column, column - HALF), (1, ALIGNED)), (1, ALIGNED)
        )
        row = cos_sin + position.to(tl.int64) * HEAD_DIM + i
        cosine = tl.load(row, mask=column < HEAD_DIM, other=0.0)
        sine = tl.load(row + HALF, mask=column < HEAD_DIM, other=0.0)
        sine = tl.where(column < HALF, -sine, sine)
    return cosine, sine


@triton.jit
def _load_weights(weight, NORM: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """Norm weights [1, D] of every element and of its partner."""
    own, partner = 1.0, 1.0
    if NORM:
        column = tl.arange(0, D)
        inside = (column < HEAD_DIM)[None, :]
        own = tl.load(weight + column[None, :], mask=inside, other=0.0).to(tl.float32)
        other = _partner(column, HEAD_DIM // 2)
        partner = tl.load(weight + other[None, :], mask=inside, other=0.0).to(tl.float32)
    return own, partner


@triton.jit
def _load_constants(
    q_norm,
    k_norm,
    cos_sin,
    position,
    NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
):
    """What does not come from the projection: weights of queries and keys, and the rotation."""
    q_weights = _load_weights(q_norm, NORM, HEAD_DIM, D)
    k_weights = _load_weights(k_norm, NORM, HEAD_DIM, D)
    return q_weights, k_weights, _load_rotation(cos_sin, position, ROTARY, HEAD_DIM, D)


@triton.jit
def _load_heads(first, row, COUNT: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, D: tl.constexpr):
    """COUNT heads from ``first`` on, [len(row), D], and every element's partner.

    With a COUNT of 1 all lines are the same head.
    """
    column = tl.arange(0, D)
    there = (column < HEAD_DIM)[None, :] & (row[:, None] >= 0)
    at = first + row[:, None] * 0
    if COUNT > 1:
        there = there & (row < COUNT)[:, None]
        at = first + row[:, None] * HEAD_DIM
    own = tl.load(at + column[None, :], mask=there, other=0.0)
    partner = own
    if ROTARY:
        partner = tl.load(at + _partner(column, HEAD_DIM // 2)[None, :], mask=there, other=0.0)
    return own, partner


@triton.jit
def _rotate(
    x,
    partner,
    weights,
    rotation,
    eps,
    NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Norm and rotate heads [rows, D]: the arithmetic of rotary_store_kv, rounded where it rounds."""
    dtype: tl.constexpr = x.dtype
    if NORM:
        exact = x.to(tl.float32)
        factor = tl.rsqrt(tl.sum(exact * exact, 1) / HEAD_DIM + eps)[:, None]
        x = (exact * factor * weights[0]).to(dtype)
        partner = (partner.to(tl.float32) * factor * weights[1]).to(dtype)
    if ROTARY:
        x = (x.to(tl.float32) * rotation[0] + partner.to(tl.float32) * rotation[1]).to(dtype)
    return x


@triton.jit
def _stream(q, k, v, visible, state, scale, GROUP: tl.constexpr):
    """Fold a KV tile [N, D] into the state of every head of the group. Each of the N lines of a tile has a softmax of
    its own, so that nothing but the sum over a key's elements crosses threads."""
    after = ()
    for g in tl.static_range(GROUP):
        acc, peak, total = state[g]
        score = tl.where(visible, tl.sum(k.to(tl.float32) * q[g], 1) * scale, -float("inf"))
        new_peak = tl.maximum(peak, score)
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weight = tl.exp2(score - base)
        shrink = tl.exp2(peak - base)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + weight[:, None] * v.to(tl.float32)
        after += ((acc, new_peak, total),)
    return after


@triton.jit
def _load_token(
    heads,
    head,
    query,
    stride_heads,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """The heads of one token: those of the group, its key, its value. Each is [N, D], the same in all lines: so it is
    where a KV tile's elements are, and comes there without a barrier."""
    line = tl.arange(0, N)
    at = heads + query * stride_heads
    q = ()
    for g in tl.static_range(GROUP):
        q += (_load_heads(at + (head * GROUP + g) * HEAD_DIM, line, 1, HEAD_DIM, ROTARY, D),)
    at += (KV_HEADS * GROUP + head) * HEAD_DIM
    k = _load_heads(at, line, 1, HEAD_DIM, ROTARY, D)
    v, _ = _load_heads(at + KV_HEADS * HEAD_DIM, line, 1, HEAD_DIM, False, D)
    return q, k, v


@triton.jit(do_not_specialize=["window", "stride_table", "stats_size"])
def _dot_kernel(
    heads,
    q_norm,
    k_norm,
    eps,
    cos_sin,
    slot_mapping,
    k_cache,
    v_cache,
    out,
    block_tables,
    items,
    lane_items,
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
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    ITEM_STEP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
    COMBINE_ROWS: tl.constexpr,
    COMBINE_PIECES: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid as that of the attention kernel. What an item needs before it can load keys is loaded while the previous
    item ends or, for the first, the previous kernel."""
    BLOCK_STRIDE: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM
    head = tl.program_id(0) % KV_HEADS
    lane = tl.program_id(0) // KV_HEADS
    k_head = k_cache + head * BLOCK_SIZE * HEAD_DIM
    v_head = v_cache + head * BLOCK_SIZE * HEAD_DIM
    q_heads = heads + head * GROUP * HEAD_DIM
    new_head = heads + (KV_HEADS * GROUP + head) * HEAD_DIM
    row = tl.arange(0, M)
    one = tl.arange(0, 1)
    column = tl.arange(0, D)[None, :]

    first_item = tl.load(lane_items + 2 * lane)
    last_item = tl.load(lane_items + 2 * lane + 1)
    query, position, begin, last, slot = _fields(items, first_item, first_item < last_item)
    table = block_tables + slot * stride_table
    block = load_blocks(table, begin, position, BLOCK_SIZE, N)
    constants = _load_constants(q_norm, k_norm, cos_sin, position, NORM, ROTARY, HEAD_DIM, D)
    cache_slot = tl.load(slot_mapping + query)
    pdl_kernels.wait(PDL)
    q, q_partner = _load_heads(q_heads + query * stride_heads, row, GROUP, HEAD_DIM, ROTARY, D)
    new_k, k_partner = _load_heads(new_head + query * stride_heads, one, 1, HEAD_DIM, ROTARY, D)
    new_v, _ = _load_heads(new_head + query * stride_heads + KV_HEADS * HEAD_DIM, one, 1, HEAD_DIM, False, D)

    for item in range(first_item, last_item, ITEM_STEP):
        following = item + ITEM_STEP
        next_query, next_position, next_begin, next_last, next_slot = _fields(
            items, following, following < last_item
        )
        q_weights, k_weights, rotation = constants
        q = _rotate(q, q_partner, q_weights, rotation, eps, NORM, ROTARY, HEAD_DIM)
        new_k = _rotate(new_k, k_partner, k_weights, rotation, eps, NORM, ROTARY, HEAD_DIM)
        # The new token belongs to the item that holds the row's last tile.
        is_mine = last == position // N
        written = (column < HEAD_DIM) & (cache_slot >= 0) & is_mine
        to = cache_slot // BLOCK_SIZE * BLOCK_STRIDE + cache_slot % BLOCK_SIZE * HEAD_DIM + column
        tl.store(k_head + to, new_k, mask=written)
        tl.store(v_head + to, new_v, mask=written)
        score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1) * scale
        peak = tl.where(is_mine, score, -float("inf"))
        total = tl.broadcast_to(tl.where(is_mine, 1.0, 0.0), [M])
        acc = tl.where(is_mine, tl.broadcast_to(new_v.to(tl.float32), [M, D]), 0.0)

        # What is left to be seen is what the token before saw, through a window shorter by one.
        acc, peak, total = attend(
            acc, peak, total, q, k_head, v_head, table, block, tl.broadcast_to(position - 1, [M]),
            begin, tl.minimum(last + 1, tl.cdiv(position, N)), tl.maximum(position - window + 1, 0), position,
            scale, window - 1, True, WINDOWED, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, N, D, STAGES, WIDEN,
        )  # fmt: skip
        fields, this_query = items + item * ITEM, query
        query, position, begin, last = next_query, next_position, next_begin, next_last
        table = block_tables + next_slot * stride_table
        block = load_blocks(table, begin, position, BLOCK_SIZE, N)
        q, q_partner = _load_heads(q_heads + query * stride_heads, row, GROUP, HEAD_DIM, ROTARY, D)
        new_k, k_partner = _load_heads(new_head + query * stride_heads, one, 1, HEAD_DIM, ROTARY, D)
        new_v, _ = _load_heads(new_head + query * stride_heads + KV_HEADS * HEAD_DIM, one, 1, HEAD_DIM, False, D)
        # Norm weights again, from the L1 cache: there are no registers to keep them in.
        constants = _load_constants(q_norm, k_norm, cos_sin, position, NORM, ROTARY, HEAD_DIM, D)
        cache_slot = tl.load(slot_mapping + query)
        finish(
            acc, peak, total, fields, this_query, 1, head, out, partials, stats, arrivals, stride_out, stats_size,
            GROUP, KV_HEADS, HEAD_DIM, 1, M, D, COMBINE_ROWS, COMBINE_PIECES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["window", "stride_table", "stats_size"])
def _stream_kernel(
    heads,
    q_norm,
    k_norm,
    eps,
    cos_sin,
    slot_mapping,
    k_cache,
    v_cache,
    out,
    block_tables,
    items,
    lane_items,
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
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    ITEM_STEP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
    COMBINE_ROWS: tl.constexpr,
    COMBINE_PIECES: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """The same without dots, all in registers: a KV tile is loaded while the one before it is folded, whichever item
    and, for the first, whichever kernel that belongs to."""
    BLOCK_STRIDE: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM
    PIECE_STRIDE: tl.constexpr = KV_HEADS * GROUP
    head = tl.program_id(0) % KV_HEADS
    lane = tl.program_id(0) // KV_HEADS
    k_head = k_cache + head * BLOCK_SIZE * HEAD_DIM
    v_head = v_cache + head * BLOCK_SIZE * HEAD_DIM
    column = tl.arange(0, D)
    line = tl.arange(0, N)
    inside = column < HEAD_DIM

    first_item = tl.load(lane_items + 2 * lane)
    last_item = tl.load(lane_items + 2 * lane + 1)
    query, position, begin, last, slot = _fields(items, first_item, first_item < last_item)
    table = block_tables + slot * stride_table
    block = load_blocks(table, begin, position, BLOCK_SIZE, N)
    k, v = _load_past(
        k_head, v_head, block, position, begin, window, WINDOWED, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, N, D
    )
    block = load_blocks(table, begin + 1, position, BLOCK_SIZE, N)
    constants = _load_constants(q_norm, k_norm, cos_sin, position, NORM, ROTARY, HEAD_DIM, D)
    cache_slot = tl.load(slot_mapping + query)
    pdl_kernels.wait(PDL)
    token = _load_token(heads, head, query, stride_heads, GROUP, KV_HEADS, HEAD_DIM, ROTARY, N, D)

    for item in range(first_item, last_item, ITEM_STEP):
        following = item + ITEM_STEP
        next_query, next_position, next_begin, next_last, next_slot = _fields(
            items, following, following < last_item
        )
        next_table = block_tables + next_slot * stride_table
        next_block = load_blocks(next_table, next_begin, next_position, BLOCK_SIZE, N)

        raw_q, raw_k, new_v = token
        q_weights, k_weights, rotation = constants
        q, state = (), ()
        for g in tl.static_range(GROUP):
            own, partner = raw_q[g]
            q_head = _rotate(own, partner, q_weights, rotation, eps, NORM, ROTARY, HEAD_DIM)
            q += (q_head.to(tl.float32),)
            no_keys = (tl.zeros([N, D], tl.float32), tl.full([N], -float("inf"), tl.float32), tl.zeros([N], tl.float32))
            state += (no_keys,)
        for tile in range(begin, last):
            next_k, next_v = _load_past(
                k_head, v_head, block, position, tile + 1, window,
                WINDOWED, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, N, D,
            )  # fmt: skip
            block = load_blocks(table, tile + 2, position, BLOCK_SIZE, N)
            state = _stream(q, k, v, _is_visible(tile * N + line, position, window, WINDOWED), state, scale, GROUP)
            k, v = next_k, next_v
        next_k, next_v = _load_past(
            k_head, v_head, next_block, next_position, next_begin, window,
            WINDOWED, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, N, D,
        )  # fmt: skip
        block = load_blocks(next_table, next_begin + 1, next_position, BLOCK_SIZE, N)
        state = _stream(q, k, v, _is_visible(last * N + line, position, window, WINDOWED), state, scale, GROUP)
        k, v = next_k, next_v

        new_k = _rotate(raw_k[0], raw_k[1], k_weights, rotation, eps, NORM, ROTARY, HEAD_DIM)
        # The new token belongs to the item that holds the row's last tile.
        is_mine = (last == position // N) & (line == 0)
        written = inside[None, :] & ((cache_slot >= 0) & is_mine)[:, None]
        at = cache_slot // BLOCK_SIZE * BLOCK_STRIDE + cache_slot % BLOCK_SIZE * HEAD_DIM
        at += line[:, None] * 0 + column[None, :]
        tl.store(k_head + at, new_k, mask=written)
        tl.store(v_head + at, new_v, mask=written)
        state = _stream(q, new_k, new_v, is_mine, state, scale, GROUP)

        fields = items + item * ITEM
        pieces = tl.load(fields + PIECES)
        part = tl.load(fields + PARTIAL).to(tl.int64)
        unit = (part * KV_HEADS + head) * GROUP
        mine = unit + tl.load(fields + PIECE) * PIECE_STRIDE
        for g in tl.static_range(GROUP):
            acc, peaks, totals = state[g]
            peak = tl.max(peaks, 0)
            weights = tl.exp2(peaks - peak)
            total = tl.sum(totals * weights, 0)
            result = tl.sum(acc * weights[:, None], 0)[None, :]
            if pieces == 1:
                to = out + query * stride_out + (head * GROUP + g) * HEAD_DIM + column[None, :]
                tl.store(to, (result / total).to(out.dtype.element_ty), mask=inside[None, :])
            else:
                tl.store(stats + mine + g, peak)
                tl.store(stats + stats_size + mine + g, total)
                tl.store(partials + (mine + g) * HEAD_DIM + column[None, :], result, mask=inside[None, :])
        if pieces > 1:
            combine_if_last(
                partials, stats, arrivals, stats_size, part, unit, pieces, query, 1, head, out, stride_out,
                GROUP, KV_HEADS, HEAD_DIM, PIECE_STRIDE, D, COMBINE_ROWS, COMBINE_PIECES,
            )  # fmt: skip
        query, position, begin, last, table = next_query, next_position, next_begin, next_last, next_table
        token = _load_token(heads, head, query, stride_heads, GROUP, KV_HEADS, HEAD_DIM, ROTARY, N, D)
        constants = _load_constants(q_norm, k_norm, cos_sin, position, NORM, ROTARY, HEAD_DIM, D)
        cache_slot = tl.load(slot_mapping + query)
