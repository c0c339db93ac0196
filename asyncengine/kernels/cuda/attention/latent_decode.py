"""Attention of single tokens over latents on Hopper, by transposed products.

The heads of a token are few, and the tensor cores of Hopper multiply 64 rows or more: so the keys are the rows of the
scores, and the latent numbers those of the results, and heads are columns. A program has the heads of a token and a
piece of its keys, in one tile after another, which serves as keys and as values. A tile is copied to shared memory
while the one before it is multiplied. The first one is asked for before queries are there, unless the token itself is
in it: other latents are those of earlier steps.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc, no-redef"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncengine.kernels.cuda.attention.scores import LOG2_E
from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.launch.gluon import GluonKernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options
from asyncengine.kernels.cuda.step.tensors import DeviceStep
from asyncengine.kernels.latent import LatentLayer

KEYS = 64
WARPS = 8
LEAST_KEYS = 512
"""Keys of a piece: a token with fewer for each has fewer pieces."""
_MOST_HEADS = 32


def fits_decode(layer: LatentLayer, dtype: torch.dtype, gpu: Gpu) -> bool:
    """Say if the kernel runs for single tokens of this layer, over latents in the model's dtype."""
    if not gpu.tma or dtype == torch.float32 or layer.num_heads > _MOST_HEADS:
        return False
    whole = layer.rank in (128, 256, 512) and layer.rope in (16, 32, 64)
    heads = head_tile(layer.num_heads)
    return whole and 2 * (2 * KEYS + heads) * layer.width + 2 * KEYS * heads <= gpu.tile_bytes


def head_tile(heads: int) -> int:
    """Heads of a program."""
    return 16 if heads <= 16 else _MOST_HEADS


def launch(
    q: Tensor, q_rope: Tensor, layer: LatentLayer, latents: Tensor, step: DeviceStep, out: Tensor, sums: Tensor,
    stats: Tensor, pieces: int, *, pdl: bool,
) -> None:  # fmt: skip
    """Attend as ``latent_attention`` says, which has checked the tensors, for tokens of rows of their own.

    With several ``pieces`` the results are ``sums`` [T, heads, pieces, rank] and ``stats`` [T, heads, pieces, 2], of
    as many pieces of a token as ``piece_count`` says.
    """
    tables, heads = step.slots.block_tables, layer.num_heads
    latent_decode_kernel[(pieces, step.num_tokens)](
        q, q_rope, latents, step.token_slot, step.positions, tables, out, sums, stats, layer.scale * LOG2_E,
        q.stride(0), q.stride(1), q_rope.stride(0), q_rope.stride(1), tables.stride(0), HEADS=heads, RANK=layer.rank,
        ROPE=layer.rope, BLOCK_SIZE=latents.shape[1], G=head_tile(heads), N=KEYS, PIECES=pieces, LEAST=LEAST_KEYS,
        WARPS=WARPS, num_warps=WARPS, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def piece_count(end, PIECES: tl.constexpr, LEAST: tl.constexpr):
    """Return how many pieces a token with ``end`` keys has; without a LEAST all."""
    return tl.minimum(tl.maximum(end // LEAST, 1), PIECES) if LEAST > 0 else PIECES


_piece_count = gluon.jit(piece_count.fn)


@gluon.jit
def _places(table, start, end, BLOCK_SIZE: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the places of a tile in the cache; behind the last token, the place of that one."""
    key = gl.minimum(start + gl.arange(0, N, LAYOUT), end - 1)
    return gl.load(table + key // BLOCK_SIZE).to(gl.int64) * BLOCK_SIZE + key % BLOCK_SIZE


@gluon.jit
def _copy(latents, places, ends_places, known, ends, RANK: gl.constexpr, ROPE: gl.constexpr, COPY: gl.constexpr,
          COPY_ENDS: gl.constexpr):  # fmt: skip
    """Ask for a tile of latents and keys."""
    column = gl.arange(0, RANK, gl.SliceLayout(0, COPY))
    async_copy.async_copy_global_to_shared(known, latents + places[:, None] * (RANK + ROPE) + column[None, :])
    column = gl.arange(0, ROPE, gl.SliceLayout(0, COPY_ENDS))
    async_copy.async_copy_global_to_shared(
        ends, latents + ends_places[:, None] * (RANK + ROPE) + RANK + column[None, :]
    )
    async_copy.commit_group()


@gluon.jit
def _queries(q, stride, HEADS: gl.constexpr, G: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """A token's queries [G, COLUMNS] in shared memory, zeros for heads that do not exist."""
    dtype: gl.constexpr = q.dtype.element_ty
    head = gl.arange(0, G, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
    loaded = gl.load(q + head * stride + column, mask=(head < HEADS) & (column >= 0), other=0.0)
    to: gl.constexpr = gl.NVMMASharedLayout.get_default_for([G, COLUMNS], dtype)
    return gl.allocate_shared_memory(dtype, [G, COLUMNS], to, loaded)


@partial(GluonKernel, do_not_specialize=["table_stride"])
def latent_decode_kernel(
    q,
    q_rope,
    latents,
    token_slot,
    positions,
    block_tables,
    out,
    sums,
    stats,
    scale,
    q_token_stride,
    q_head_stride,
    rope_token_stride,
    rope_head_stride,
    table_stride,
    HEADS: gl.constexpr,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    G: gl.constexpr,
    N: gl.constexpr,
    PIECES: gl.constexpr,
    LEAST: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Grid: pieces, tokens. One warp group has some heads of the scores, and some latent numbers of the results."""
    dtype: gl.constexpr = latents.dtype.element_ty
    ACROSS: gl.constexpr = ROPE // 8
    COPY: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // RANK, RANK // 8] if RANK < 256 else [1, 32], [WARPS, 1], [1, 0]
    )
    COPY_ENDS: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, G * 4 // WARPS, 16])
    RESULTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, G, 16])
    STORED: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [1, WARPS], [0, 1])
    OF_HEADS: gl.constexpr = gl.SliceLayout(0, SCORES)
    KNOWN: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, RANK], dtype)
    ENDS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, ROPE], dtype)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, G], dtype)
    known = gl.allocate_shared_memory(dtype, [2, N, RANK], KNOWN)
    ends = gl.allocate_shared_memory(dtype, [2, N, ROPE], ENDS)
    weights = gl.allocate_shared_memory(dtype, [N, G], WEIGHTS)

    piece, token = gl.program_id(0), gl.program_id(1)
    slot, position = gl.load(token_slot + token), gl.load(positions + token)
    end = position + 1
    pieces = _piece_count(end, PIECES, LEAST)
    tiles = (end + N - 1) // N
    begin, last = piece * tiles // pieces * N, gl.minimum(end, (piece + 1) * tiles // pieces * N)
    there = (slot >= 0) & (piece < pieces)
    early = there & (begin + N <= position)
    table = block_tables + gl.maximum(slot, 0).to(gl.int64) * table_stride
    places = _places(table, begin, end, BLOCK_SIZE, N, gl.SliceLayout(1, COPY))
    ends_places = _places(table, begin, end, BLOCK_SIZE, N, gl.SliceLayout(1, COPY_ENDS))
    if early:
        _copy(latents, places, ends_places, known.index(0), ends.index(0), RANK, ROPE, COPY, COPY_ENDS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if there:
        if not early:
            _copy(latents, places, ends_places, known.index(0), ends.index(0), RANK, ROPE, COPY, COPY_ENDS)
        query = _queries(q + token * q_token_stride, q_head_stride, HEADS, G, RANK, COPY)
        turned = _queries(q_rope + token * rope_token_stride, rope_head_stride, HEADS, G, ROPE, COPY_ENDS)
        places = _places(table, begin + N, end, BLOCK_SIZE, N, gl.SliceLayout(1, COPY))
        ends_places = _places(table, begin + N, end, BLOCK_SIZE, N, gl.SliceLayout(1, COPY_ENDS))
        peak = gl.full([G], -float("inf"), gl.float32, OF_HEADS)
        totals = gl.zeros([N, G], gl.float32, SCORES)
        acc = gl.zeros([RANK, G], gl.float32, RESULTS)
        row = gl.arange(0, N, gl.SliceLayout(1, SCORES))[:, None]
        for start in range(begin, last, N):
            async_copy.wait_group(0)
            fence_async_shared()
            gl.thread_barrier()  # this tile is there for all, and all have multiplied the one before
            now = (start - begin) // N % 2
            then = 1 - now
            if start + N < last:
                _copy(latents, places, ends_places, known.index(then), ends.index(then), RANK, ROPE, COPY, COPY_ENDS)
                places = _places(table, start + 2 * N, end, BLOCK_SIZE, N, gl.SliceLayout(1, COPY))
                ends_places = _places(table, start + 2 * N, end, BLOCK_SIZE, N, gl.SliceLayout(1, COPY_ENDS))
            score = gl.zeros([N, G], gl.float32, SCORES)
            score = warpgroup_mma(known.index(now), query.permute((1, 0)), score, use_acc=False, is_async=True)
            score = warpgroup_mma(ends.index(now), turned.permute((1, 0)), score, is_async=True)
            score = warpgroup_mma_wait(0, [score])
            score = gl.where(start + row < last, score * scale, -float("inf"))
            new_peak = gl.maximum(peak, gl.max(score, 0))
            weight = gl.exp2(score - new_peak[None, :])
            shrink = gl.exp2(peak - new_peak)
            weights.store(weight.to(dtype))
            totals = totals * shrink[None, :] + weight
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(0, RESULTS))[None, :]
            fence_async_shared()
            gl.thread_barrier()
            acc = warpgroup_mma(known.index(now).permute((1, 0)), weights, acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            peak = new_peak
        total = gl.sum(totals, 0)
        column = gl.arange(0, RANK, gl.SliceLayout(1, STORED))[:, None]
        head = gl.arange(0, G, gl.SliceLayout(0, STORED))[None, :]
        inside, one = (column >= 0) & (head < HEADS), token * HEADS + head
        if PIECES == 1:
            acc = acc / gl.convert_layout(total, gl.SliceLayout(0, RESULTS))[None, :]
            gl.store(out + one * RANK + column, gl.convert_layout(acc, STORED).to(out.dtype.element_ty), mask=inside)
        else:
            gl.store(sums + (one * PIECES + piece) * RANK + column, gl.convert_layout(acc, STORED), mask=inside)
            head = gl.arange(0, G, OF_HEADS)
            at = stats + ((token * HEADS + head) * PIECES + piece) * 2
            gl.store(at, peak, mask=head < HEADS)
            gl.store(at + 1, total, mask=head < HEADS)
