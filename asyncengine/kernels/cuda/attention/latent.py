"""Attention over latents, which all heads of a token share, on the GPU.

A program has the queries of several heads, and where rows are prompts those of several neighbouring tokens, and loads
a tile of latents once for all of them: as keys, and as the values. Tokens of several rows in a program take turns. Few
programs share the keys of a row, in pieces that another kernel adds up. In a cache in float8 the scales of latents lie
where other layers have those of keys, and the scales of rotated keys where others have those of values.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.attention import latent_decode as decode
from asyncengine.kernels.cuda.attention.latent_decode import piece_count
from asyncengine.kernels.cuda.attention.paged import dot
from asyncengine.kernels.cuda.attention.scores import LOG2_E
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, must_widen, wait
from asyncengine.kernels.cuda.rows.float8_cache import (
    cached_dtype,
    check_scales,
    for_products,
    key_inverse,
    key_scale,
    to_float8,
    value_inverse,
    value_scale,
)
from asyncengine.kernels.cuda.rows.tensors import check, check_dtype, check_strided, empty_rows
from asyncengine.kernels.cuda.step.tensors import DeviceStep
from asyncengine.kernels.latent import LatentLayer
from asyncengine.kernels.ops import LayerLatentCache

_MOST_PIECES = 16
_MOST_DECODE_PIECES = 64
_PROGRAMS_PER_SM = 2
_SUMMED = 16
"""Pieces that are added up at once."""


class LatentPlan(NamedTuple):
    """Tile of the kernel that attends in the steps of a bucket."""

    tokens: int
    """tokens of a program"""
    heads: int
    """heads of a program; a power of two"""
    keys: int
    """tokens of the cache of one turn of the loop"""
    warps: int
    stages: int
    pieces: int
    """programs that share the keys of a token; a power of two"""
    transposed: bool = False
    """by the kernel of latent_decode.py, which has fewer pieces for a token with few keys"""

    def __str__(self) -> str:
        rows = f"{self.tokens} tokens of {self.heads} heads x {self.keys}"
        how = f"{self.warps} warps, {self.stages} stages, {self.pieces} pieces{', transposed' * self.transposed}"
        return f"latent [{rows}, {how}] for all rows (formula)"


def choose_plan(
    rows: int, tokens: int, num_heads: int, dtype: torch.dtype, multiprocessors: int, *, float8: bool = False,
    transposed: bool = False,
) -> LatentPlan:  # fmt: skip
    """The plan for steps of so many rows and tokens at most; ``float8``: over latents in float8; ``transposed``: single
    tokens may have the kernel of latent_decode.py, of which a multiprocessor has room for one program.

    float32 is multiplied without tensor cores, in small tiles. A tile of 64 queries of 512 numbers is as much as
    registers hold in two warp groups; with latents that become 16 bits there, 32 are.
    """
    if transposed and tokens <= rows and not float8:
        room = (multiprocessors if tokens <= 16 else 2 * multiprocessors) // tokens
        pieces = min(_MOST_DECODE_PIECES, 1 << (max(1, room).bit_length() - 1))
        return LatentPlan(1, decode.head_tile(num_heads), decode.KEYS, decode.WARPS, 2, pieces, transposed=True)
    most = 32 if float8 else 64
    if dtype == torch.float32:
        heads, keys, warps, stages = 16, 16, 4, 1
    else:
        heads, keys = max(16, min(most, triton.next_power_of_2(num_heads))), 16 if float8 else 32
        warps, stages = 4 if heads == 16 else 8, 6 if float8 else 2 if heads == 64 else 3
    groups = triton.cdiv(num_heads, heads)
    if tokens <= rows:
        programs = tokens * groups
        room = max(1, _PROGRAMS_PER_SM * multiprocessors // programs)
        return LatentPlan(1, heads, keys, warps, stages, min(_MOST_PIECES, 1 << (room.bit_length() - 1)))
    if dtype == torch.float32:
        return LatentPlan(1, heads, keys, warps, stages, 1)
    return LatentPlan(max(1, most // heads), heads, keys, 8, stages if float8 else 2, 1)


@kernel
def _latent_store_kernel(
    q_rope,
    rows,
    norm_weight,
    eps,
    cos_sin,
    positions,
    slot_mapping,
    latents,
    kv_scales,
    q_token_stride,
    q_head_stride,
    row_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    RANK_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
    WRITE_BACK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program is a token: its latent is normed, its key rotated, and both are stored; its queries are rotated.

    With WRITE_BACK rows become the stored numbers.
    """
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    there = slot >= 0
    position = tl.where(there, tl.load(positions + token), 0).to(tl.int64)
    dtype: tl.constexpr = rows.dtype.element_ty
    FLOAT8: tl.constexpr = kv_scales is not None
    column = tl.arange(0, RANK_TILE)
    known = column < RANK
    source = rows + token * row_stride
    latent = tl.load(source + column, mask=known & there, other=0.0).to(tl.float32)
    gain = tl.load(norm_weight + column, mask=known, other=0.0).to(tl.float32)
    latent = latent * tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps) * gain
    target = latents + slot * (RANK + 2 * HALF)
    latent = latent.to(dtype)
    if FLOAT8:
        latent = to_float8(latent, key_inverse(kv_scales, 0, 1))
    tl.store(target + column, latent, mask=known & there)
    if WRITE_BACK:
        if FLOAT8:
            latent = latent.to(tl.float32) * key_scale(kv_scales, 0, 1)
        tl.store(source + column, latent.to(dtype), mask=known & there)

    i = tl.arange(0, HALF_TILE)
    turned = (i < HALF) & there
    cosine = tl.load(cos_sin + position * (2 * HALF) + i, mask=turned, other=0.0)
    sine = tl.load(cos_sin + position * (2 * HALF) + HALF + i, mask=turned, other=0.0)
    key = source + RANK + i
    low = tl.load(key, mask=turned, other=0.0).to(tl.float32)
    high = tl.load(key + HALF, mask=turned, other=0.0).to(tl.float32)
    first, second = (low * cosine - high * sine).to(dtype), (high * cosine + low * sine).to(dtype)
    if FLOAT8:
        inverse = value_inverse(kv_scales, 0, 1)
        first, second = to_float8(first, inverse), to_float8(second, inverse)
    tl.store(target + RANK + i, first, mask=turned)
    tl.store(target + RANK + HALF + i, second, mask=turned)
    if WRITE_BACK:
        if FLOAT8:
            scale = value_scale(kv_scales, 0, 1)
            first, second = first.to(tl.float32) * scale, second.to(tl.float32) * scale
        tl.store(key, first.to(dtype), mask=turned)
        tl.store(key + HALF, second.to(dtype), mask=turned)

    head = tl.arange(0, HEAD_TILE)[:, None]
    query = q_rope + token * q_token_stride + head * q_head_stride + i[None, :]
    inside = (head < HEADS) & turned[None, :]
    low = tl.load(query, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(query + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(query, (low * cosine[None, :] - high * sine[None, :]).to(dtype), mask=inside)
    tl.store(query + HALF, (high * cosine[None, :] + low * sine[None, :]).to(dtype), mask=inside)


@kernel
def _latent_kernel(
    q,
    q_rope,
    latents,
    kv_scales,
    token_slot,
    positions,
    left_out,
    block_tables,
    out,
    sums,
    stats,
    scale,
    num_tokens,
    q_token_stride,
    q_head_stride,
    rope_token_stride,
    rope_head_stride,
    table_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    RANK_TILE: tl.constexpr,
    ROPE_TILE: tl.constexpr,
    PIECES: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    first_token = tl.program_id(0) * TOKENS
    piece = tl.program_id(2)
    m = tl.arange(0, M)
    token = (first_token + m // GROUP).to(tl.int64)
    head = tl.program_id(1) * GROUP + m % GROUP
    real = (m < TOKENS * GROUP) & (token < num_tokens) & (head < HEADS)
    slot = tl.load(token_slot + token, mask=real, other=-1)
    position = tl.load(positions + token, mask=real, other=0)
    real = real & (slot >= 0)
    if left_out is not None:
        real = real & (tl.load(left_out + token, mask=real, other=0) < 0)
    column, place = tl.arange(0, RANK_TILE), tl.arange(0, ROPE_TILE)
    at = q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + column[None, :]
    query = tl.load(at, mask=real[:, None] & (column < RANK)[None, :], other=0.0)
    at = q_rope + token[:, None] * rope_token_stride + head[:, None] * rope_head_stride + place[None, :]
    turned = tl.load(at, mask=real[:, None] & (place < ROPE)[None, :], other=0.0)
    FLOAT8: tl.constexpr = kv_scales is not None
    if FLOAT8:
        query, turned = for_products(query), for_products(turned)
        of_latents, of_keys = key_scale(kv_scales, 0, 1), value_scale(kv_scales, 0, 1)

    for turn in range(TOKENS):
        # A turn is for the tokens of one row, which are neighbours: the turn of the first one of them. It has sums of
        # its own, and stores them for these tokens alone: a weight of zero times a NaN of another row would be NaN.
        now = first_token + turn
        current = tl.load(token_slot + now, mask=now < num_tokens, other=-1)
        before = tl.load(token_slot + now - 1, mask=(turn > 0) & (now < num_tokens), other=-1)
        mine = real & (slot == current)
        end = tl.max(tl.where(mine, position + 1, 0), 0)
        end = tl.where((current >= 0) & (current != before), end, 0)
        share = tl.cdiv(tl.cdiv(end, N), PIECES) * N
        table = block_tables + tl.maximum(current, 0).to(tl.int64) * table_stride
        if end > 0:
            peak = tl.full([M], -float("inf"), tl.float32)
            total = tl.zeros([M], tl.float32)
            acc = tl.zeros([M, RANK_TILE], tl.float32)
            for start in tl.range(piece * share, tl.minimum(end, (piece + 1) * share), N, num_stages=STAGES):
                key = start + tl.arange(0, N)
                inside = key < end
                block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
                # The 1 is for the compiler, which otherwise takes each place for a multiple of BLOCK_SIZE, and copies
                # more numbers at once than vectors of some widths are aligned for.
                place_of_key = tl.where(inside, block * BLOCK_SIZE + key % BLOCK_SIZE, 1)
                stored = latents + place_of_key[:, None] * (RANK + ROPE)
                known = tl.load(stored + column[None, :], mask=inside[:, None] & (column < RANK)[None, :], other=0.0)
                values = known
                if FLOAT8:
                    # A second load, which differs from that of the keys for it to stay one, lets each have a layout of
                    # its own. A tile of both would go through registers, and the loop would wait for it in each turn.
                    values = tl.load(
                        stored + column[None, :],
                        mask=inside[:, None] & (column < RANK)[None, :],
                        other=0.0,
                        eviction_policy="evict_first",
                    ).to(query.dtype)
                ends = tl.load(
                    stored + RANK + place[None, :], mask=inside[:, None] & (place < ROPE)[None, :], other=0.0
                )
                known, ends = known.to(query.dtype), ends.to(query.dtype)
                if FLOAT8:
                    score = (
                        dot(query, tl.trans(known), WIDEN) * of_latents + dot(turned, tl.trans(ends), WIDEN) * of_keys
                    )
                else:
                    score = dot(query, tl.trans(known), WIDEN) + dot(turned, tl.trans(ends), WIDEN)
                score *= scale
                visible = mine[:, None] & (key[None, :] <= position[:, None])
                score = tl.where(visible, score, -float("inf"))
                new_peak = tl.maximum(peak, tl.max(score, 1))
                # A query that has seen no key yet: -inf less -inf would be NaN.
                base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
                weight = tl.exp2(score - base[:, None])
                shrink = tl.exp2(peak - base)
                total = total * shrink + tl.sum(weight, 1)
                acc = acc * shrink[:, None] + dot(weight.to(values.dtype), values, WIDEN)
                peak = new_peak
            if FLOAT8:
                acc *= of_latents
            inside = mine[:, None] & (column < RANK)[None, :]
            one = token * HEADS + head
            if PIECES == 1:
                result = acc / tl.where(total == 0, 1.0, total)[:, None]
                tl.store(out + one[:, None] * RANK + column[None, :], result.to(out.dtype.element_ty), mask=inside)
            else:
                one = one * PIECES + piece
                tl.store(sums + one[:, None] * RANK + column[None, :], acc, mask=inside)
                tl.store(stats + 2 * one, peak, mask=mine)
                tl.store(stats + 2 * one + 1, total, mask=mine)


@kernel
def _latent_sum_kernel(
    sums,
    stats,
    token_slot,
    positions,
    left_out,
    out,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_TILE: tl.constexpr,
    PIECES: tl.constexpr,
    SUMMED: tl.constexpr,
    LEAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program adds up the pieces of a head of a token."""
    wait(PDL)
    one = tl.program_id(0).to(tl.int64)
    token = one // HEADS
    slot, position = tl.load(token_slot + token), tl.load(positions + token)
    there = slot >= 0
    if left_out is not None:
        there = there & (tl.load(left_out + token) < 0)
    count = piece_count(position + 1, PIECES, LEAST)
    column = tl.arange(0, RANK_TILE)
    inside = (column < RANK) & there
    piece = tl.arange(0, PIECES)
    at = stats + 2 * (one * PIECES + piece)
    peak = tl.load(at, mask=there & (piece < count), other=-float("inf"))
    total = tl.load(at + 1, mask=there & (piece < count), other=0.0)
    top = tl.where(there, tl.max(peak, 0), 0.0)
    total = tl.sum(total * tl.exp2(peak - top), 0)
    result = tl.zeros([RANK_TILE], tl.float32)
    for first in range(0, count, SUMMED):
        part = first + tl.arange(0, SUMMED)
        known = there & (part < count)
        part += one * PIECES
        factor = tl.exp2(tl.load(stats + 2 * part, mask=known, other=-float("inf")) - top)
        place = sums + part[:, None] * RANK + column[None, :]
        parts = tl.load(place, mask=inside[None, :] & known[:, None], other=0.0)
        result += tl.sum(parts * factor[:, None], 0)
    result /= tl.where(there, total, 1.0)
    tl.store(out + one * RANK + column, result.to(out.dtype.element_ty), mask=inside)


def latent_attention(
    q: Tensor, q_rope: Tensor, rows: Tensor, layer: LatentLayer, cache: LayerLatentCache, step: DeviceStep,
    plan: LatentPlan, *, left_out: Tensor | None = None, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Store the step's latents, and attend with absorbed queries: [tokens, heads, rank].

    q [tokens, heads, rank] are the absorbed parts of queries, q_rope [tokens, heads, rope] those that are rotated, here
    and in place, and rows [tokens, width] the latents before their norm and the keys. All may be strided, but for their
    last axis. Tokens of no row are left as they are. With ``left_out``, int32 [tokens], so are those where it is
    not negative, and rows become what is stored. Raises ValueError for tensors that do not fit.
    """
    tokens, heads, latents = step.num_tokens, layer.num_heads, cache.latents
    check_dtype(q, "q")
    check_strided(q, q.dtype, (tokens, heads, layer.rank), "q")
    check_strided(q_rope, q.dtype, (tokens, heads, layer.rope), "q_rope")
    check_strided(rows, q.dtype, (tokens, layer.width), "rows")
    if layer.rank % 8 or layer.rope % 8:
        raise ValueError(f"latents and rotated parts of keys must be of 8s, got {layer.rank} and {layer.rope}")
    check(latents, cached_dtype(q.dtype, cache.scales), (len(latents), latents.shape[1], layer.width), "latents")
    check_scales(cache.scales, 1)
    check(layer.cos_sin, torch.float32, (len(layer.cos_sin), layer.rope), "cos_sin")
    check(layer.norm_weight, q.dtype, (layer.rank,), "norm_weight")
    rank_tile, options = max(16, triton.next_power_of_2(layer.rank)), launch_options(pdl)
    _latent_store_kernel[(tokens,)](
        q_rope, rows, layer.norm_weight, layer.norm_eps, layer.cos_sin, step.positions, step.slot_mapping, latents,
        cache.scales, q_rope.stride(0), q_rope.stride(1), rows.stride(0), HEADS=heads, RANK=layer.rank,
        HALF=layer.rope // 2, HEAD_TILE=triton.next_power_of_2(heads), RANK_TILE=rank_tile,
        HALF_TILE=triton.next_power_of_2(layer.rope // 2), WRITE_BACK=left_out is not None, num_warps=4, **options,
    )  # fmt: skip
    out = empty_rows(tokens, heads * layer.rank, q.dtype, q.device).view(tokens, heads, layer.rank)
    sums, stats = out, out
    if plan.pieces > 1:
        sums = torch.empty((tokens, heads, plan.pieces, layer.rank), dtype=torch.float32, device=q.device)
        stats = torch.empty((tokens, heads, plan.pieces, 2), dtype=torch.float32, device=q.device)
    if plan.transposed:
        decode.launch(q, q_rope, layer, latents, step, out, sums, stats, plan.pieces, pdl=pdl)
    else:
        _launch(q, q_rope, layer, cache, step, left_out, out, sums, stats, plan, pdl=pdl)
    if plan.pieces > 1:
        _latent_sum_kernel[(tokens * heads,)](
            sums, stats, step.token_slot, step.positions, left_out, out, HEADS=heads, RANK=layer.rank,
            RANK_TILE=rank_tile, PIECES=plan.pieces, SUMMED=min(plan.pieces, _SUMMED),
            LEAST=decode.LEAST_KEYS if plan.transposed else 0, num_warps=4, **options,
        )  # fmt: skip
    return out


def _launch(
    q: Tensor, q_rope: Tensor, layer: LatentLayer, cache: LayerLatentCache, step: DeviceStep, left_out: Tensor | None,
    out: Tensor, sums: Tensor, stats: Tensor, plan: LatentPlan, *, pdl: bool,
) -> None:  # fmt: skip
    tokens, heads, tables = step.num_tokens, layer.num_heads, step.slots.block_tables
    grid = triton.cdiv(tokens, plan.tokens), triton.cdiv(heads, plan.heads), plan.pieces
    _latent_kernel[grid](
        q, q_rope, cache.latents, cache.scales, step.token_slot, step.positions, left_out, tables, out, sums, stats,
        layer.scale * LOG2_E, tokens, q.stride(0), q.stride(1), q_rope.stride(0), q_rope.stride(1), tables.stride(0),
        HEADS=heads, RANK=layer.rank, ROPE=layer.rope, BLOCK_SIZE=cache.latents.shape[1], TOKENS=plan.tokens,
        GROUP=plan.heads, M=plan.tokens * plan.heads, N=plan.keys,
        RANK_TILE=max(16, triton.next_power_of_2(layer.rank)), ROPE_TILE=max(16, triton.next_power_of_2(layer.rope)),
        PIECES=plan.pieces, STAGES=plan.stages, WIDEN=must_widen(q.dtype), num_warps=plan.warps,
        num_stages=plan.stages, **launch_options(pdl),
    )  # fmt: skip
