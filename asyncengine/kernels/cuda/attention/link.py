"""Attention of rows that live in the host's memory, which the device reads over its link.

A launch computes a batch of jobs: each is the attention of one row in one layer, whose query, key and value are in its
mailbox (csrc/core/hybrid/host_rows.h). It runs beside the steps, on few multiprocessors: the link has a hundredth of
the bandwidth of the device's memory.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.attention.paged import dot
from asyncengine.kernels.cuda.gpu import Gpu, describe
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import must_widen

PROGRAMS, WARPS, STAGES = 4, 4, 12
"""Enough reads under way for the link's rate. Few programs: many kernels of a step have as many as there are
multiprocessors, or a few less, and take twice as long where some of them find no room."""
_KEYS_OF_WARP, _LEAST_KEYS = 8, 16


@dataclass(frozen=True, slots=True)
class LinkRows:
    """Memory of the host that the kernel reads and writes, and the attention of each layer."""

    jobs: Tensor
    """int32: how many jobs, then of each its slot, layer, position and ``max_blocks`` blocks of the host"""
    pool: Tensor
    """[num_host_blocks, layers, 2, Hk, block_size, D]"""
    mailboxes: Tensor
    """int64 [S, num_heads + 2 Hk, words of a head]"""
    results: Tensor
    """[S, num_heads * D] in the model's dtype"""
    scales: Tensor
    """float32 [layers, 2]: of scores, and their softcap or 0"""
    windows: Tensor
    """int32 [layers]: as in AttentionLayer"""
    kv_scales: Tensor | None
    """float32 [layers, 2, 2, Hk], as LayerKVCache.scales; None: keys and values are in the model's dtype"""
    max_blocks: int


def attend(
    rows: LinkRows, programs: int = PROGRAMS, warps: int = WARPS, stages: int = STAGES, gpu: Gpu | None = None
) -> None:
    """Store the jobs' keys and values in their blocks, and their results.

    There are fewer ``stages``, and of wide heads fewer keys in each, where the shared memory of ``gpu``, or else of the
    rows' device, has no room for so many.
    """
    blocks = rows.pool
    _, _, _, kv_heads, block_size, head_dim = blocks.shape
    keys, gpu = _KEYS_OF_WARP * warps, gpu or describe(rows.scales.device)
    # First keys and values that are computed with, and copies of them. Then those under way, as the cache has them, in
    # half of the stages: in the other half the numbers of their blocks are.
    while gpu.tile_bytes < 4 * keys * head_dim * rows.results.element_size() and keys > _LEAST_KEYS:
        keys //= 2
    stages = max(2, min(stages, gpu.tile_bytes // (keys * head_dim * blocks.element_size())))
    heads = rows.mailboxes.shape[1] - 2 * kv_heads
    _link_attention[(programs,)](
        rows.jobs, blocks, rows.mailboxes, rows.results, rows.scales, rows.windows,
        rows.scales if rows.kv_scales is None else rows.kv_scales,
        rows.max_blocks, blocks.stride(0), blocks.stride(2), rows.mailboxes.stride(0), rows.results.stride(0),
        GROUP=heads // kv_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        FLOAT8=rows.kv_scales is not None, ROWS=max(16, triton.next_power_of_2(heads // kv_heads)),
        HALF=max(16, triton.next_power_of_2(head_dim // 2)), KEYS=keys, STAGES=stages,
        WIDEN=must_widen(rows.results.dtype), num_warps=warps,
    )  # fmt: skip


@triton.jit
def _halves(words, there, HEAD_DIM: tl.constexpr, DTYPE: tl.constexpr):
    """The two halves of heads in a mailbox, whose first words are at ``words``, in float32."""
    if tl.float32 == DTYPE:
        low = tl.load(words, mask=there, other=0).to(tl.int32).to(tl.float32, bitcast=True)
        high = tl.load(words + HEAD_DIM // 2, mask=there, other=0).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        payload = tl.load(words, mask=there, other=0).to(tl.int32)
        low = (payload << 16).to(tl.float32, bitcast=True)
        high = ((payload >> 16) << 16).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def _as_kept(x, scale, inverse, DTYPE: tl.constexpr, FLOAT8: tl.constexpr):
    """Return the value of x that the cache keeps, and that value in float32 as attention reads it."""
    if FLOAT8:
        kept = tl.clamp(x * inverse, -448.0, 448.0).to(DTYPE)
        return kept, kept.to(tl.float32) * scale
    return x.to(DTYPE), x


@triton.jit
def _capped(score, softcap):
    if softcap > 0:
        # tanh by an exponential that cannot overflow
        e = tl.exp(-2.0 * tl.abs(score) / softcap)
        capped = softcap * (1 - e) / (1 + e)
        score = tl.where(score < 0, -capped, capped)
    return score


@kernel(do_not_specialize=["max_blocks"])
def _link_attention(
    jobs, pool, mailboxes, results, scales, windows, kv_scales, max_blocks, block_stride, plane, mailbox_stride,
    result_stride, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FLOAT8: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs, which take the KV heads of jobs in turn."""
    DTYPE: tl.constexpr = results.dtype.element_ty
    CACHED: tl.constexpr = pool.dtype.element_ty
    WORDS: tl.constexpr = HEAD_DIM if tl.float32 == DTYPE else HEAD_DIM // 2
    row, i, key = tl.arange(0, ROWS), tl.arange(0, HALF), tl.arange(0, KEYS)
    columns = i < HEAD_DIM // 2
    for item in range(tl.program_id(0), tl.load(jobs) * KV_HEADS, tl.num_programs(0)):
        job = jobs + 1 + item // KV_HEADS * (3 + max_blocks)
        head = item % KV_HEADS
        slot, layer, position = tl.load(job).to(tl.int64), tl.load(job + 1), tl.load(job + 2)
        scale, softcap, window = tl.load(scales + 2 * layer), tl.load(scales + 2 * layer + 1), tl.load(windows + layer)
        k_scale, k_inverse, v_scale, v_inverse = 1.0, 1.0, 1.0, 1.0
        if FLOAT8:
            of_head = kv_scales + layer * 4 * KV_HEADS + head
            k_scale, k_inverse = tl.load(of_head), tl.load(of_head + KV_HEADS)
            v_scale, v_inverse = tl.load(of_head + 2 * KV_HEADS), tl.load(of_head + 3 * KV_HEADS)
        words = mailboxes + slot * mailbox_stride + i
        there = (row < GROUP)[:, None] & columns[None, :]
        q_low, q_high = _halves(words[None, :] + (head * GROUP + row)[:, None] * WORDS, there, HEAD_DIM, DTYPE)
        k_low, k_high = _halves(words + (GROUP * KV_HEADS + head) * WORDS, columns, HEAD_DIM, DTYPE)
        v_low, v_high = _halves(words + (GROUP * KV_HEADS + KV_HEADS + head) * WORDS, columns, HEAD_DIM, DTYPE)

        # The program's own key and value come first: they are stored, and not read back in this launch.
        keys = pool + layer.to(tl.int64) * 2 * plane + head * BLOCK_SIZE * HEAD_DIM + i
        values = keys + plane
        own = tl.load(job + 3 + position // BLOCK_SIZE).to(tl.int64) * block_stride + position % BLOCK_SIZE * HEAD_DIM
        kept, k_low = _as_kept(k_low, k_scale, k_inverse, CACHED, FLOAT8)
        tl.store(keys + own, kept, mask=columns)
        kept, k_high = _as_kept(k_high, k_scale, k_inverse, CACHED, FLOAT8)
        tl.store(keys + own + HEAD_DIM // 2, kept, mask=columns)
        kept, v_low = _as_kept(v_low, v_scale, v_inverse, CACHED, FLOAT8)
        tl.store(values + own, kept, mask=columns)
        kept, v_high = _as_kept(v_high, v_scale, v_inverse, CACHED, FLOAT8)
        tl.store(values + own + HEAD_DIM // 2, kept, mask=columns)

        peak = (tl.sum(q_low * k_low[None, :], 1) + tl.sum(q_high * k_high[None, :], 1)) * scale
        peak = _capped(peak, softcap)
        total = tl.full([ROWS], 1.0, tl.float32)
        low = tl.zeros([ROWS, HALF], tl.float32) + v_low[None, :]
        high = tl.zeros([ROWS, HALF], tl.float32) + v_high[None, :]
        q_low, q_high = q_low.to(DTYPE), q_high.to(DTYPE)
        first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
        for start in tl.range(first // KEYS * KEYS, position, KEYS, num_stages=STAGES):
            token = start + key
            seen = (token >= first) & (token < position)
            block = tl.load(job + 3 + token // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
            at = (block * block_stride + token % BLOCK_SIZE * HEAD_DIM)[:, None]
            mask = seen[:, None] & columns[None, :]
            key_low = tl.load(keys[None, :] + at, mask=mask, other=0.0).to(DTYPE)
            key_high = tl.load(keys[None, :] + at + HEAD_DIM // 2, mask=mask, other=0.0).to(DTYPE)
            value_low = tl.load(values[None, :] + at, mask=mask, other=0.0).to(DTYPE)
            value_high = tl.load(values[None, :] + at + HEAD_DIM // 2, mask=mask, other=0.0).to(DTYPE)
            score = dot(q_low, tl.trans(key_low), WIDEN) + dot(q_high, tl.trans(key_high), WIDEN)
            score = tl.where(seen[None, :], _capped(score * (scale * k_scale), softcap), -float("inf"))
            new_peak = tl.maximum(peak, tl.max(score, 1))
            weight = tl.exp(score - new_peak[:, None])
            shrink = tl.exp(peak - new_peak)
            total = total * shrink + tl.sum(weight, 1)
            weight = (weight * v_scale).to(DTYPE)
            low = low * shrink[:, None] + dot(weight, value_low, WIDEN)
            high = high * shrink[:, None] + dot(weight, value_high, WIDEN)
            peak = new_peak
        out = results + slot * result_stride + (head * GROUP + row)[:, None] * HEAD_DIM + i[None, :]
        tl.store(out, (low / total[:, None]).to(DTYPE), mask=there)
        tl.store(out + HEAD_DIM // 2, (high / total[:, None]).to(DTYPE), mask=there)
