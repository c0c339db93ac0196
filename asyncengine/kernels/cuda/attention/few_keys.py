"""Attention of a few one-token rows with all that surrounds it: QK-norm, rotary embedding, the write to the KV cache.

Where rows are few, a layer's attention is bound by the length of its chain of loads and not by bytes. So everything is
one launch of many small programs without a work list: a row's keys are dealt out in equal pieces to PIECES programs a
query head, whatever its length, and the program that finishes last combines them in their order. Past keys and values
lie in the cache since earlier steps, so a program has its first tile in registers before the QKV projection has ended
(programmatic.py). Query heads that share keys each read them, all but the first from the L2 cache, which costs less
than to have a program go through the group: 5.8 us a layer of the 8B shape at one row, where two heads in a program
take 8.5 and four take 14.

There are no dots: a tile's scores are sums over threads, and each of its lines has a softmax of its own until the end.
The new token's heads, which all lines share, are loaded once for each of them: so they are where the tile's elements
are, and no barrier is needed to bring them there.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc"

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.errors import ConfigError
from asyncengine.kernels.cuda.attention.call import KernelCall
from asyncengine.kernels.cuda.attention.plan import Launch
from asyncengine.kernels.cuda.attention.scores import base2_scale, score_constants, transform_scores, with_sinks
from asyncengine.kernels.cuda.attention.work.lists import NO_WINDOW, Counters
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, wait
from asyncengine.kernels.cuda.rows.float8_cache import (
    cached_dtype,
    check_scales,
    key_inverse,
    key_scale,
    to_float8,
    value_inverse,
    value_scale,
)

MIN_TILES = tl.constexpr(2)
"""A piece has no fewer tiles of keys than this, if its row has as many."""


def run(launch: Launch, call: KernelCall) -> None:
    """Attend as ``run`` of run.py says, for rows of one token; if the heads are stored, every token is a row.

    The heads are left as they were. A row's token is at position ``step.row_context_len``; its key and value are
    written where ``step.slot_mapping`` says (-1: nowhere). No row may read what another one writes in the same step;
    the core shares blocks from the commit of their step on. With stored heads the tokens of prompts are rows as well.

    ``work`` has num_heads counters for each row at least.
    """
    if launch.stored:
        call = replace(call, layer=call.layer._replace(norms=None, cos_sin=None))
    heads, layer, step, work = call.heads, call.layer, call.step, call.work
    if not isinstance(work, Counters):
        raise ConfigError("the work list is for another kernel: few_keys takes counters")
    _, kv_heads, block_size, dim = call.cache.k.shape
    stored, num_heads = launch.stored, layer.num_heads
    rows = step.num_tokens if stored else step.num_rows
    check_heads(call)
    if dim % 2:
        raise ValueError(f"few_keys: heads of {dim}, which have no halves")
    if len(work.arrivals) < rows * num_heads:
        raise ValueError(f"{rows * num_heads} counters of arrivals are needed")
    pieces = launch.pieces
    half = triton.next_power_of_2(dim // 2)
    stats = torch.empty((2, rows * num_heads * pieces), dtype=torch.float32, device=heads.device)
    partials = torch.empty((stats.shape[1], 2, half), dtype=torch.float32, device=heads.device)
    _decode_kernel[(pieces, num_heads, rows)](
        heads,
        *surroundings(call),
        step.token_slot if stored else step.row_slot,
        step.row_query_start,
        step.row_query_len,
        step.positions if stored else step.row_context_len,
        step.slot_mapping,
        step.slots.block_tables,
        call.cache.k,
        call.cache.v,
        heads if call.cache.scales is None else call.cache.scales,
        layer.sinks,
        call.out,
        partials,
        stats,
        work.arrivals,
        base2_scale(layer),
        layer.window or NO_WINDOW,
        heads.stride(0),
        call.out.stride(0),
        step.slots.block_tables.stride(0),
        NORM=layer.norms is not None,
        ROTARY=layer.cos_sin is not None,
        STORED=stored,
        GROUP=num_heads // kv_heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        H=half,
        BLOCK_SIZE=block_size,
        PIECES=pieces,
        N=launch.tile.keys,
        FLOAT8=call.cache.scales is not None,
        **score_constants(layer),
        num_warps=launch.tile.warps,
        num_stages=launch.tile.stages,
        **launch_options(call.pdl),
    )


def surroundings(call: KernelCall) -> tuple[Tensor, Tensor, float, Tensor]:
    """Norms of queries and keys, their eps, cosines and sines, as a kernel takes them: heads where there are none."""
    heads, cos_sin = call.heads, call.layer.cos_sin
    return *(call.layer.norms or (heads, heads, 0.0))[:3], heads if cos_sin is None else cos_sin


def check_heads(call: KernelCall) -> None:
    """Raises ValueError if a tensor of the call does not fit the others, for a kernel that prepares heads."""
    heads, out, (k_cache, v_cache, scales, *_) = call.heads, call.out, call.cache
    num_heads, norms, cos_sin = call.layer.num_heads, call.layer.norms, call.layer.cos_sin
    tokens, all_heads, dim = heads.shape
    kv_heads, cached = k_cache.shape[1], cached_dtype(heads.dtype, scales)
    check_scales(scales, kv_heads)
    own = 0 if call.layer.shares else kv_heads
    expected = (
        (all_heads == num_heads + 2 * own and num_heads % kv_heads == 0, "heads"),
        (heads.stride()[1:] == (dim, 1), "heads"),
        (k_cache.is_contiguous() and k_cache.shape[3] == dim and k_cache.dtype == cached, "k_cache"),
        (v_cache.is_contiguous() and v_cache.shape == k_cache.shape and v_cache.dtype == cached, "v_cache"),
        (out.shape == (tokens, num_heads * dim) and out.stride(1) == 1 and out.dtype == heads.dtype, "out"),
        (norms is None or all(w.shape == (dim,) and w.is_contiguous() for w in norms[:2]), "norms"),
        (cos_sin is None or (cos_sin.shape[1] == dim and dim % 2 == 0 and cos_sin.dtype == torch.float32), "cos_sin"),
    )
    for ok, name in expected:
        if not ok:
            raise ValueError(f"{name} does not suit heads {list(heads.shape)} {heads.dtype}")


@triton.jit
def _halves(pointer, inside, HALF: tl.constexpr):
    return tl.load(pointer, mask=inside, other=0.0), tl.load(pointer + HALF, mask=inside, other=0.0)


@triton.jit
def _norm_and_rotate(
    low, high, gain_low, gain_high, cosine, sine, eps, NORM: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr
):
    """One head, in halves [N, H], the same in all lines; rounded to its dtype wherever separate operations would be."""
    dtype: tl.constexpr = low.dtype
    if NORM:
        a, b = low.to(tl.float32), high.to(tl.float32)
        factor = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)[:, None]
        a, b = a * factor * gain_low.to(tl.float32), b * factor * gain_high.to(tl.float32)
        low, high = a.to(dtype), b.to(dtype)
    if ROTARY:
        a, b = low.to(tl.float32), high.to(tl.float32)
        low, high = (a * cosine - b * sine).to(dtype), (b * cosine + a * sine).to(dtype)
    return low, high


@triton.jit
def _load_tile(k_head, v_head, table, tile, first, context, i, BLOCK_SIZE, HALF, KV_HEADS, N: tl.constexpr):
    """Halves of the keys and values of a tile, as far as they are past and in the window, and which those are."""
    token = tile * N + tl.arange(0, N)
    there = (token >= first) & (token < context)
    block = tl.load(table + token // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    at = (block * (KV_HEADS * BLOCK_SIZE) + token % BLOCK_SIZE)[:, None] * (2 * HALF) + i[None, :]
    inside = there[:, None] & (i < HALF)[None, :]
    k_low, k_high = _halves(k_head + at, inside, HALF)
    v_low, v_high = _halves(v_head + at, inside, HALF)
    return k_low, k_high, v_low, v_high, there


@kernel(do_not_specialize=["window", "stride_table"])
def _decode_kernel(
    heads,
    q_norm,
    k_norm,
    eps,
    cos_sin,
    row_slot,
    row_query_start,
    row_query_len,
    row_context_len,
    slot_mapping,
    block_tables,
    k_cache,
    v_cache,
    kv_scales,
    sinks,
    out,
    partials,
    stats,
    arrivals,
    scale,
    window,
    stride_heads,
    stride_out,
    stride_table,
    NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    STORED: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECES: tl.constexpr,
    N: tl.constexpr,
    FLOAT8: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: pieces, query heads, rows. The first piece of a row also takes the new token."""
    piece, q_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = q_head // GROUP
    context = tl.load(row_context_len + row)
    slot = tl.load(row_slot + row).to(tl.int64)
    if STORED:
        token, empty = row.to(tl.int64), slot < 0
    else:
        token, empty = tl.load(row_query_start + row).to(tl.int64), tl.load(row_query_len + row) == 0
    first = tl.maximum(context - window + 1, 0)
    if STORED:
        context += 1  # the new token is one of those in the cache
    first_tile = first // N
    tiles = tl.maximum(tl.cdiv(context, N) - first_tile, 1)
    share = tl.maximum(tl.cdiv(tiles, PIECES), MIN_TILES)
    used = tl.cdiv(tiles, share)
    if piece >= used:
        return  # without waiting: the first piece does
    if empty:
        wait(PDL)
        return
    begin = first_tile + piece * share
    end = tl.minimum(begin + share, first_tile + tiles)
    cache_slot = tl.load(slot_mapping + token)
    table = block_tables + slot * stride_table
    line = tl.arange(0, N)
    i = tl.arange(0, H)
    all_i = line[:, None] * 0 + i[None, :]
    inside = all_i < HALF
    k_head = k_cache + head * (BLOCK_SIZE * 2 * HALF)
    v_head = v_cache + head * (BLOCK_SIZE * 2 * HALF)
    if FLOAT8:
        scale *= key_scale(kv_scales, head, KV_HEADS)
        of_values = value_scale(kv_scales, head, KV_HEADS)
        of_new_keys = key_inverse(kv_scales, head, KV_HEADS)
        of_new_values = value_inverse(kv_scales, head, KV_HEADS)
    if STORED:  # the tile may hold keys of this very step
        wait(PDL)
    tile = _load_tile(k_head, v_head, table, begin, first, context, i, BLOCK_SIZE, HALF, KV_HEADS, N)
    cosine, sine = 1.0, 0.0
    q_gain_low, q_gain_high, k_gain_low, k_gain_high = 1.0, 1.0, 1.0, 1.0
    if ROTARY:
        cosine, sine = _halves(cos_sin + context.to(tl.int64) * (2 * HALF) + all_i, inside, HALF)
    if NORM:
        q_gain_low, q_gain_high = _halves(q_norm + all_i, inside, HALF)
        k_gain_low, k_gain_high = _halves(k_norm + all_i, inside, HALF)
    if not STORED:
        wait(PDL)

    new = heads + token * stride_heads + all_i
    q_low, q_high = _halves(new + q_head * (2 * HALF), inside, HALF)
    if not STORED:
        new += (KV_HEADS * GROUP + head) * (2 * HALF)
        k_low, k_high = _halves(new, inside, HALF)
        v_low, v_high = _halves(new + KV_HEADS * (2 * HALF), inside, HALF)
    q_low, q_high = _norm_and_rotate(
        q_low, q_high, q_gain_low, q_gain_high, cosine, sine, eps, NORM, ROTARY, HALF
    )  # fmt: skip
    if STORED:
        q_low, q_high = q_low.to(tl.float32), q_high.to(tl.float32)
        low, high = tl.zeros([N, H], tl.float32), tl.zeros([N, H], tl.float32)
        peak, total = tl.full([N], -float("inf"), tl.float32), tl.zeros([N], tl.float32)
    else:
        k_low, k_high = _norm_and_rotate(
            k_low, k_high, k_gain_low, k_gain_high, cosine, sine, eps, NORM, ROTARY, HALF
        )  # fmt: skip
        if FLOAT8:
            k_low, k_high = to_float8(k_low, of_new_keys), to_float8(k_high, of_new_keys)
            v_low, v_high = to_float8(v_low, of_new_values), to_float8(v_high, of_new_values)
        is_new = (line == 0) & (piece == 0)
        written = inside & is_new[:, None] & (cache_slot >= 0) & (q_head % GROUP == 0)
        at = (cache_slot // BLOCK_SIZE * (KV_HEADS * BLOCK_SIZE) + cache_slot % BLOCK_SIZE) * (2 * HALF) + all_i
        tl.store(k_head + at, k_low, mask=written)
        tl.store(k_head + at + HALF, k_high, mask=written)
        tl.store(v_head + at, v_low, mask=written)
        tl.store(v_head + at + HALF, v_high, mask=written)
        # The new token is the state that the first line of the first piece begins with.
        q_low, q_high = q_low.to(tl.float32), q_high.to(tl.float32)
        score = tl.sum(q_low * k_low.to(tl.float32) + q_high * k_high.to(tl.float32), 1)
        score = transform_scores(score, scale, SOFTCAP)
        low = tl.where(is_new[:, None], v_low.to(tl.float32), 0.0)
        high = tl.where(is_new[:, None], v_high.to(tl.float32), 0.0)
        peak, total = tl.where(is_new, score, -float("inf")), tl.where(is_new, 1.0, 0.0)
    for index in range(begin, end):
        last = index + 1 == end
        following = _load_tile(
            k_head, v_head, table, index + 1, first, tl.where(last, 0, context), i, BLOCK_SIZE, HALF, KV_HEADS, N
        )
        k_low, k_high, v_low, v_high, there = tile
        score = tl.sum(k_low.to(tl.float32) * q_low + k_high.to(tl.float32) * q_high, 1)
        score = transform_scores(score, scale, SOFTCAP)
        score = tl.where(there, score, -float("inf"))
        new_peak = tl.maximum(peak, score)
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weight, shrink = tl.exp2(score - base), tl.exp2(peak - base)
        low = low * shrink[:, None] + weight[:, None] * v_low.to(tl.float32)
        high = high * shrink[:, None] + weight[:, None] * v_high.to(tl.float32)
        peak, total = new_peak, total * shrink + weight
        tile = following

    if FLOAT8:
        low *= of_values
        high *= of_values
    # Lines into one. A piece may hold nothing but what is out of the window.
    whole_peak = tl.max(peak, 0)
    weight = tl.exp2(peak - tl.where(whole_peak == -float("inf"), 0.0, whole_peak))
    acc = tl.sum(tl.join(low * weight[:, None], high * weight[:, None]), 0)  # [H, 2], both halves in one pass
    whole_total = tl.sum(total * weight, 0)
    half = tl.arange(0, 2)[None, :]
    kept = (i < HALF)[:, None] & (half >= 0)
    to = out + token * stride_out + q_head * (2 * HALF)
    if used == 1:
        whole_total = with_sinks(whole_total, whole_peak, sinks, q_head, True)
        tl.store(to + half * HALF + i[:, None], (acc / whole_total).to(out.dtype.element_ty), mask=kept)
        return
    unit = row * (KV_HEADS * GROUP) + q_head
    mine = unit * PIECES + piece
    size = tl.num_programs(2) * (KV_HEADS * GROUP * PIECES)
    tl.store(stats + mine, whole_peak)
    tl.store(stats + size + mine, whole_total)
    tl.store(partials + mine * (2 * H) + half * H + i[:, None], acc, mask=kept)
    # Release: the barrier puts every thread's stores before the one thread that counts.
    tl.debug_barrier()
    if tl.atomic_add(arrivals + unit, 1, sem="acq_rel") == used - 1:
        tl.store(arrivals + unit, 0)  # for the next launch: nobody else will come in this one
        theirs = unit * PIECES + tl.arange(0, PIECES)
        there = tl.arange(0, PIECES) < used
        peaks = tl.load(stats + theirs, mask=there, other=-float("inf"), cache_modifier=".cg")
        totals = tl.load(stats + size + theirs, mask=there, other=0.0, cache_modifier=".cg")
        columns = tl.arange(0, 2 * H)
        parts = tl.load(
            partials + theirs[:, None] * (2 * H) + columns[None, :],
            mask=there[:, None] & (columns % H < HALF)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        top = tl.max(peaks, 0)
        weights = tl.exp2(peaks - top)
        sum_of_all = with_sinks(tl.sum(totals * weights, 0), top, sinks, q_head, True)
        whole = tl.sum(parts * weights[:, None], 0) / sum_of_all
        tl.store(to + columns // H * HALF + columns % H, whole.to(out.dtype.element_ty), mask=columns % H < HALF)
