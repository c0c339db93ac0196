"""Attention of a few one-token rows with all that surrounds it: QK-norm, rotary embedding, the write to the KV cache.

Where rows are few, a layer's attention is bound by the length of its chain of loads and not by bytes. So everything is
one launch of many small programs without a work list: a row's keys are dealt out in equal pieces to PIECES programs a
KV head, whatever its length, and the program that finishes last combines them in their order. Past keys and values lie
in the cache since earlier steps, so a program has its first tile in registers before the QKV projection has ended
(see pdl.py). There are no dots: a tile's scores are sums over threads, and each of its lines has a softmax of its own
until the end. What all lines share, the new token's heads, is loaded once for each of them: so it is where the tile's
elements are, and no barrier is needed to bring it there.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc"
# ruff: noqa: RUF005 - Triton knows no starred items in a tuple

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.compiling import kernel
from asyncengine.kernels.device_step import DeviceStep
from asyncengine.kernels.ops import HeadNorms
from asyncengine.kernels.pdl import launch_options, wait
from asyncengine.kernels.work_list import NO_WINDOW

MAX_ROWS = 16
"""Beyond, the work list's even shares are worth more."""
_MAX_PIECES = 32
_TARGET_PROGRAMS = 512
"""All of them have room at once on a Hopper GPU, so each has loaded its first tile when the projection ends."""
_USUAL_TILES = 18
"""Tiles of a row that is neither short nor long."""


def choose_pieces(rows: int, kv_heads: int) -> tuple[int, int]:
    """Into how many pieces at most a row's keys are cut, and how many tiles a piece has at least.

    The pieces are many, so that a long row occupies the GPU by itself; programs that a short one does not need end
    before they wait.
    """
    pieces = _MAX_PIECES if rows * kv_heads <= 64 else _MAX_PIECES // 2
    return pieces, max(1, rows * kv_heads * _USUAL_TILES // _TARGET_PROGRAMS)


def decode_attention(
    heads: Tensor,
    num_heads: int,
    norms: HeadNorms | None,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    step: DeviceStep,
    scale: float,
    window: int,
    out: Tensor,
    arrivals: Tensor,
    *,
    pieces: tuple[int, int] | None = None,
    pdl: bool = False,
) -> None:
    """What ``rotary_store_kv`` (or ``store_kv``) and ``paged_attention`` do, for rows of one token.

    heads is [T, num_heads + 2 Hk, D]: queries, keys and values as the QKV projection gave them; it is left as it was.
    norms and cos_sin are those of ``AttentionLayer``. A row's token is at position ``step.row_context_len``; its key
    and value are written where ``step.slot_mapping`` says (-1: nowhere). The token at position i sees position j if
    j <= i and, with a window > 0, i - window < j. out is [T, num_heads * D]; tokens of no row are left as they are.
    No row may read what another one writes in the same step; the core shares blocks from the commit of their step on.
    ``arrivals`` are int32 counters, R * Hk at least, that are 0 between launches.
    """
    _, kv_heads, block_size, dim = k_cache.shape
    group, rows = num_heads // kv_heads, step.num_rows
    _check(heads, num_heads, norms, cos_sin, k_cache, v_cache, out)
    if len(arrivals) < rows * kv_heads:
        raise ValueError(f"{rows * kv_heads} counters of arrivals are needed")
    most, least_tiles = pieces or choose_pieces(rows, kv_heads)
    half = triton.next_power_of_2(dim // 2)
    # Two times 16 bytes of each half a thread: with once, Triton lays out the heads in another way than the tiles.
    keys = max(8, (2048 if heads.dtype == torch.bfloat16 else 1024) // (2 * half))
    stats = torch.empty((2, rows * kv_heads * most * group), dtype=torch.float32, device=heads.device)
    partials = torch.empty((stats.shape[1], 2, half), dtype=torch.float32, device=heads.device)
    _decode_kernel[(most, kv_heads, rows)](
        heads,
        heads if norms is None else norms.q,
        heads if norms is None else norms.k,
        0.0 if norms is None else norms.eps,
        heads if cos_sin is None else cos_sin,
        step.row_slot,
        step.row_query_start,
        step.row_query_len,
        step.row_context_len,
        step.slot_mapping,
        step.slots.block_tables,
        k_cache,
        v_cache,
        out,
        partials,
        stats,
        arrivals,
        scale * math.log2(math.e),
        window or NO_WINDOW,
        heads.stride(0),
        out.stride(0),
        step.slots.block_tables.stride(0),
        NORM=norms is not None,
        ROTARY=cos_sin is not None,
        GROUP=group,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        H=half,
        BLOCK_SIZE=block_size,
        PIECES=most,
        LEAST=least_tiles,
        N=keys,
        num_warps=2,
        num_stages=1,
        **launch_options(pdl),
    )


def _check(
    heads: Tensor, num_heads: int, norms: HeadNorms | None, cos_sin: Tensor | None, k_cache: Tensor, v_cache: Tensor,
    out: Tensor,
) -> None:  # fmt: skip
    tokens, all_heads, dim = heads.shape
    kv_heads = k_cache.shape[1]
    expected = (
        (all_heads == num_heads + 2 * kv_heads and num_heads % kv_heads == 0, "heads"),
        (heads.stride()[1:] == (dim, 1) and dim % 2 == 0, "heads"),
        (k_cache.is_contiguous() and k_cache.shape[3] == dim and k_cache.dtype == heads.dtype, "k_cache"),
        (v_cache.is_contiguous() and v_cache.shape == k_cache.shape and v_cache.dtype == heads.dtype, "v_cache"),
        (out.shape == (tokens, num_heads * dim) and out.stride(1) == 1 and out.dtype == heads.dtype, "out"),
        (norms is None or all(w.shape == (dim,) and w.is_contiguous() for w in norms[:2]), "norms"),
        (cos_sin is None or (cos_sin.shape[1] == dim and cos_sin.dtype == torch.float32), "cos_sin"),
    )
    for ok, name in expected:
        if not ok:
            raise ValueError(f"decode_attention: {name} does not suit heads {list(heads.shape)} {heads.dtype}")


@triton.jit
def _halves(pointer, inside, HALF: tl.constexpr):
    return tl.load(pointer, mask=inside, other=0.0), tl.load(pointer + HALF, mask=inside, other=0.0)


@triton.jit
def _norm_and_rotate(
    low, high, weight_low, weight_high, cosine, sine, eps, NORM: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr
):
    """One head, in halves [N, H], the same in all lines; rounded to its dtype wherever separate operations would be."""
    dtype: tl.constexpr = low.dtype
    if NORM:
        a, b = low.to(tl.float32), high.to(tl.float32)
        factor = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)[:, None]
        low, high = (a * factor * weight_low).to(dtype), (b * factor * weight_high).to(dtype)
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


@triton.jit
def _fold(state, q, k_low, k_high, v_low, v_high, there, scale):
    """One head of the group meets a tile; every line of the tile has a softmax of its own."""
    low, high, peak, total = state
    score = tl.sum(k_low.to(tl.float32) * q[0] + k_high.to(tl.float32) * q[1], 1) * scale
    score = tl.where(there, score, -float("inf"))
    new_peak = tl.maximum(peak, score)
    base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    weight, shrink = tl.exp2(score - base), tl.exp2(peak - base)
    low = low * shrink[:, None] + weight[:, None] * v_low.to(tl.float32)
    high = high * shrink[:, None] + weight[:, None] * v_high.to(tl.float32)
    return low, high, new_peak, total * shrink + weight


@triton.jit
def _stack(parts, COUNT: tl.constexpr, RANK: tl.constexpr):
    """COUNT tensors (1, 2, 4 or 8) of one shape [N] or [N, H, 2], side by side in a thread: [..., COUNT]."""
    if COUNT == 1:
        whole = tl.expand_dims(parts[0], RANK)
    elif COUNT == 2:
        whole = tl.join(parts[0], parts[1])
    elif COUNT == 4:
        whole = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
    else:
        even = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
        whole = tl.join(even, tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7])))
    if RANK == 1:
        stacked = tl.reshape(whole, [whole.shape[0], COUNT])
    else:
        stacked = tl.reshape(whole, [whole.shape[0], whole.shape[1], whole.shape[2], COUNT])
    return stacked


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
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECES: tl.constexpr,
    LEAST: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: pieces, KV heads, rows. The first piece of a row also takes the new token."""
    piece, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(row_context_len + row)
    length = tl.load(row_query_len + row)
    first = tl.maximum(context - window + 1, 0)
    first_tile = first // N
    tiles = tl.maximum(tl.cdiv(context, N) - first_tile, 1)
    share = tl.maximum(tl.cdiv(tiles, PIECES), LEAST)
    used = tl.cdiv(tiles, share)
    if piece >= used:
        return  # without waiting: the first piece does
    if length == 0:
        wait(PDL)
        return
    begin = first_tile + piece * share
    end = tl.minimum(begin + share, first_tile + tiles)
    token = tl.load(row_query_start + row).to(tl.int64)
    cache_slot = tl.load(slot_mapping + token)
    table = block_tables + tl.load(row_slot + row).to(tl.int64) * stride_table
    line = tl.arange(0, N)
    i = tl.arange(0, H)
    all_i = line[:, None] * 0 + i[None, :]
    inside = all_i < HALF
    k_head = k_cache + head * (BLOCK_SIZE * 2 * HALF)
    v_head = v_cache + head * (BLOCK_SIZE * 2 * HALF)
    tile = _load_tile(k_head, v_head, table, begin, first, context, i, BLOCK_SIZE, HALF, KV_HEADS, N)
    cosine, sine = 1.0, 0.0
    q_low, q_high, k_low, k_high = 1.0, 1.0, 1.0, 1.0
    if ROTARY:
        cosine, sine = _halves(cos_sin + context.to(tl.int64) * (2 * HALF) + all_i, inside, HALF)
    if NORM:
        q_low, q_high = _halves(q_norm + all_i, inside, HALF)
        k_low, k_high = _halves(k_norm + all_i, inside, HALF)
        q_low, q_high, k_low, k_high = (
            q_low.to(tl.float32), q_high.to(tl.float32), k_low.to(tl.float32), k_high.to(tl.float32)
        )  # fmt: skip
    wait(PDL)

    new = heads + token * stride_heads + all_i
    raw = ()
    for g in tl.static_range(GROUP):
        raw = raw + (_halves(new + (head * GROUP + g) * (2 * HALF), inside, HALF),)
    new += (KV_HEADS * GROUP + head) * (2 * HALF)
    low, high = _halves(new, inside, HALF)
    v_low, v_high = _halves(new + KV_HEADS * (2 * HALF), inside, HALF)
    low, high = _norm_and_rotate(low, high, k_low, k_high, cosine, sine, eps, NORM, ROTARY, HALF)
    # The new token is the state that the first line of the first piece begins with.
    is_new = (line == 0) & (piece == 0)
    written = inside & is_new[:, None] & (cache_slot >= 0)
    at = (cache_slot // BLOCK_SIZE * (KV_HEADS * BLOCK_SIZE) + cache_slot % BLOCK_SIZE) * (2 * HALF) + all_i
    tl.store(k_head + at, low, mask=written)
    tl.store(k_head + at + HALF, high, mask=written)
    tl.store(v_head + at, v_low, mask=written)
    tl.store(v_head + at + HALF, v_high, mask=written)
    qs, states = (), ()
    for g in tl.static_range(GROUP):
        a, b = _norm_and_rotate(raw[g][0], raw[g][1], q_low, q_high, cosine, sine, eps, NORM, ROTARY, HALF)
        q = (a.to(tl.float32), b.to(tl.float32))
        score = tl.sum(q[0] * low.to(tl.float32) + q[1] * high.to(tl.float32), 1) * scale
        state = (
            tl.where(is_new[:, None], v_low.to(tl.float32), 0.0),
            tl.where(is_new[:, None], v_high.to(tl.float32), 0.0),
            tl.where(is_new, score, -float("inf")),
            tl.where(is_new, 1.0, 0.0),
        )
        qs = qs + (q,)
        states = states + (state,)
    for index in range(begin, end):
        last = index + 1 == end
        following = _load_tile(
            k_head, v_head, table, index + 1, first, tl.where(last, 0, context), i, BLOCK_SIZE, HALF, KV_HEADS, N
        )
        after = ()
        for g in tl.static_range(GROUP):
            folded = _fold(states[g], qs[g], tile[0], tile[1], tile[2], tile[3], tile[4], scale)
            after = after + (folded,)
        states = after
        tile = following

    # Lines into one, all heads of the group in one pass.
    GP: tl.constexpr = 1 if GROUP == 1 else 2 if GROUP == 2 else 4 if GROUP <= 4 else 8
    tl.static_assert(GROUP <= 8)
    accs, totals, peaks = (), (), ()
    for padded in tl.static_range(GP):
        low, high, line_peaks, line_totals = states[padded if padded < GROUP else GROUP - 1]
        peak = tl.max(line_peaks, 0)
        # A piece may hold nothing but what is out of the window.
        weight = tl.exp2(line_peaks - tl.where(peak == -float("inf"), 0.0, peak))
        accs = accs + (tl.join(low * weight[:, None], high * weight[:, None]),)
        totals = totals + (line_totals * weight,)
        peaks = peaks + (peak,)
    acc = tl.sum(_stack(accs, GP, 3), 0)  # [H, 2, GP]
    total = tl.sum(_stack(totals, GP, 1), 0)  # [GP]
    group = tl.arange(0, GP)
    half = tl.arange(0, 2)
    element = half[None, :] * HALF + i[:, None]
    to = out + token * stride_out + head * (GROUP * 2 * HALF) + element[:, :, None] + group[None, None, :] * (2 * HALF)
    kept = (i < HALF)[:, None, None] & (half >= 0)[None, :, None] & (group < GROUP)[None, None, :]
    if used == 1:
        tl.store(to, (acc / total[None, None, :]).to(out.dtype.element_ty), mask=kept)
        return
    unit = row * KV_HEADS + head
    size = tl.num_programs(2) * KV_HEADS * PIECES * GROUP
    mine = (unit * PIECES + piece) * GROUP
    for g in tl.static_range(GROUP):
        tl.store(stats + mine + g, peaks[g])
    tl.store(stats + size + mine + group, total, mask=group < GROUP)
    packed = (half[None, :] * H + i[:, None])[:, :, None] + group[None, None, :] * (2 * H)
    tl.store(partials + mine * (2 * H) + packed, acc, mask=kept)
    # Release: the barrier puts every thread's stores before the one thread that counts.
    tl.debug_barrier()
    if tl.atomic_add(arrivals + unit, 1, sem="acq_rel") == used - 1:
        tl.store(arrivals + unit, 0)  # for the next launch: nobody else will come in this one
        all_pieces = tl.arange(0, PIECES)
        for g in tl.static_range(GROUP):
            theirs = (unit * PIECES + all_pieces) * GROUP + g
            there = all_pieces < used
            piece_peaks = tl.load(stats + theirs, mask=there, other=-float("inf"), cache_modifier=".cg")
            piece_totals = tl.load(stats + size + theirs, mask=there, other=0.0, cache_modifier=".cg")
            columns = tl.arange(0, 2 * H)
            parts = tl.load(
                partials + theirs[:, None] * (2 * H) + columns[None, :],
                mask=there[:, None] & (columns % H < HALF)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            piece_weights = tl.exp2(piece_peaks - tl.max(piece_peaks, 0))
            whole = tl.sum(parts * piece_weights[:, None], 0) / tl.sum(piece_totals * piece_weights, 0)
            at_out = out + token * stride_out + (head * GROUP + g) * (2 * HALF) + columns // H * HALF + columns % H
            tl.store(at_out, whole.to(out.dtype.element_ty), mask=columns % H < HALF)
