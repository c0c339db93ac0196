"""Norms and rotation of a step's heads, and the write of its keys and values to the cache, on the GPU."""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, start_next, wait
from asyncengine.kernels.cuda.rows.float8_cache import cached_dtype, check_scales, to_float8
from asyncengine.kernels.cuda.rows.tensors import ELEMENTWISE_TILE, check, check_caches, check_heads, gain_dtype

_HEAD_TILE = 1024
"""Elements of a half head tile: 16 heads of 128. With 128 threads each access is of 16 bytes in bfloat16."""


@triton.jit
def load_gains(
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    v_norm: tl.tensor,
    is_q: tl.tensor,
    is_v: tl.tensor,
    i: tl.tensor,
    NORM_VALUES: tl.constexpr,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load the gains of each head for ``norm_and_rotate``, in halves, from the norms [D] of queries, keys and
    values."""
    q_low = tl.load(q_norm + i, mask=i < HALF, other=0.0).to(tl.float32)
    q_high = tl.load(q_norm + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    k_low = tl.load(k_norm + i, mask=i < HALF, other=0.0).to(tl.float32)
    k_high = tl.load(k_norm + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    low, high = tl.where(is_q, q_low, k_low), tl.where(is_q, q_high, k_high)
    if NORM_VALUES:
        low = tl.where(is_v, tl.load(v_norm + i, mask=i < HALF, other=0.0).to(tl.float32), low)
        high = tl.where(is_v, tl.load(v_norm + HALF + i, mask=i < HALF, other=0.0).to(tl.float32), high)
    return low, high


@triton.jit
def norm_and_rotate(
    low: tl.tensor,
    high: tl.tensor,
    is_v: tl.tensor,
    gain_low: tl.tensor,
    gain_high: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    eps: tl.tensor,
    dtype: tl.constexpr,
    NORM: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Heads in float32 halves [heads, HALF_TILE], rounded to their dtype. Values are not rotated, and normed only with
    NORM_VALUES."""
    a, b = low, high
    if NORM:
        scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)[:, None]
        # Rounded between norm and rotation, as they are where the two are separate operations.
        a = (a * scale * gain_low).to(dtype).to(tl.float32)
        b = (b * scale * gain_high).to(dtype).to(tl.float32)
        if NORM_VALUES:
            low, high = a, b
    if ROTARY:
        a, b = a * cosine - b * sine, b * cosine + a * sine
    return tl.where(is_v, low, a).to(dtype), tl.where(is_v, high, b).to(dtype)


@kernel
def _rotary_store_kernel(
    heads: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    v_norm: tl.tensor,
    eps: tl.tensor,
    cos_sin: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    kv_scales: tl.tensor,
    token_stride: tl.tensor,
    NORM: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
    FLOAT8: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    position = tl.where(slot < 0, 0, tl.load(positions + token)).to(tl.int64)
    dtype: tl.constexpr = heads.dtype.element_ty
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)[:, None]
    i = tl.arange(0, HALF_TILE)[None, :]
    inside = (head < Q_HEADS + 2 * KV_HEADS) & (i < HALF)
    is_q = head < Q_HEADS
    is_v = head >= Q_HEADS + KV_HEADS
    table = cos_sin + position * (2 * HALF) + i
    cosine = tl.load(table, mask=i < HALF, other=0.0)
    sine = tl.load(table + HALF, mask=i < HALF, other=0.0)
    gain_low, gain_high = 1.0, 1.0
    if NORM:
        gain_low, gain_high = load_gains(q_norm, k_norm, v_norm, is_q, is_v, i, NORM_VALUES, HALF)
    wait(PDL)
    source = heads + token * token_stride + head * (2 * HALF) + i
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    rotated_low, rotated_high = norm_and_rotate(
        low, high, is_v, gain_low, gain_high, cosine, sine, eps, dtype, NORM, NORM_VALUES, True, HALF
    )

    inside &= slot >= 0
    tl.store(source, rotated_low, mask=inside & is_q)
    tl.store(source + HALF, rotated_high, mask=inside & is_q)
    kv_head = tl.where(is_v, head - (Q_HEADS + KV_HEADS), head - Q_HEADS)
    base = (slot // BLOCK_SIZE) * (KV_HEADS * BLOCK_SIZE) + slot % BLOCK_SIZE
    target = (base + kv_head * BLOCK_SIZE) * (2 * HALF) + i
    is_k = inside & (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    if FLOAT8:
        kept = tl.where(is_v, 3 * KV_HEADS, KV_HEADS) + kv_head
        inverse = tl.load(kv_scales + kept, mask=(head >= Q_HEADS) & (head < Q_HEADS + 2 * KV_HEADS), other=0.0)
        rotated_low, rotated_high = to_float8(rotated_low, inverse), to_float8(rotated_high, inverse)
    tl.store(k_cache + target, rotated_low, mask=is_k)
    tl.store(k_cache + target + HALF, rotated_high, mask=is_k)
    tl.store(v_cache + target, rotated_low, mask=inside & is_v)
    tl.store(v_cache + target + HALF, rotated_high, mask=inside & is_v)


def rotary_store_kv(
    heads: Tensor,
    num_q_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    v_norm: Tensor | None = None,
    scales: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """QK-norm, rotary embedding and the write to the KV cache.

    heads [T, Hq + 2Hk, D] is what the QKV projection gave, its tokens may be strided. q is rotated in place; k and v
    are left as they were and go to the caches [num_blocks, Hk, block_size, D]. q_norm and k_norm are [D], or both
    None; with a v_norm [D] beside them values are normed too. cos_sin is float32 [max_positions, D]: D/2 cosines,
    then D/2 sines; element i is paired with element i + D/2. positions is int32 [T], each below max_positions (not
    checked). slot_mapping is int64 [T]: block * block_size + offset, or -1 for a token that is not there, for which
    nothing is written. With ``LayerKVCache.scales`` the caches are in float8.
    """
    _, num_heads, dim = heads.shape
    kv_heads, block_size = check_caches(k_cache, v_cache, cached_dtype(heads.dtype, scales), dim)
    check_scales(scales, kv_heads)
    check_heads(heads, "heads")
    if num_heads != num_q_heads + 2 * kv_heads or dim % 2:
        raise ValueError(f"heads {list(heads.shape)} do not fit {num_q_heads} q heads and {kv_heads} KV heads")
    if (q_norm is None) != (k_norm is None) or (q_norm is None and v_norm is not None):
        raise ValueError("q_norm and k_norm go together, and v_norm with both")
    _prepare(heads, num_q_heads, (q_norm, k_norm, v_norm), eps, cos_sin, positions, slot_mapping, (k_cache, v_cache),
             scales, block_size, pdl)  # fmt: skip


def rotate_queries(
    heads: Tensor, norm: Tensor | None, eps: float, cos_sin: Tensor, positions: Tensor, slot_mapping: Tensor, *,
    pdl: bool = False,
) -> None:  # fmt: skip
    """Norm and rotary embedding of heads [T, Hq, D] that are all queries, in place. All else is as in
    ``rotary_store_kv``."""
    check_heads(heads, "heads")
    if heads.shape[2] % 2:
        raise ValueError(f"heads {list(heads.shape)} have no halves")
    norms = norm, norm, None
    _prepare(heads, heads.shape[1], norms, eps, cos_sin, positions, slot_mapping, None, None, 1, pdl)


def _prepare(
    heads: Tensor, num_q_heads: int, norms: tuple[Tensor | None, ...], eps: float, cos_sin: Tensor, positions: Tensor,
    slot_mapping: Tensor, caches: tuple[Tensor, Tensor] | None, scales: Tensor | None, block_size: int, pdl: bool,
) -> None:  # fmt: skip
    tokens, num_heads, dim = heads.shape
    for norm in norms:
        if norm is not None:
            check(norm, gain_dtype(norm, heads), (dim,), "q_norm, k_norm and v_norm")
    check(cos_sin, torch.float32, (cos_sin.shape[0], dim), "cos_sin")
    check(positions, torch.int32, (tokens,), "positions")
    check(slot_mapping, torch.int64, (tokens,), "slot_mapping")
    half_tile = triton.next_power_of_2(dim // 2)
    head_tile = min(triton.next_power_of_2(num_heads), max(1, _HEAD_TILE // half_tile))
    _rotary_store_kernel[(tokens, triton.cdiv(num_heads, head_tile))](
        heads,
        *(heads if norm is None else norm for norm in norms),
        eps,
        cos_sin,
        positions,
        slot_mapping,
        *(caches or (heads, heads)),
        heads if scales is None else scales,
        heads.stride(0),
        NORM=norms[0] is not None,
        NORM_VALUES=norms[2] is not None,
        Q_HEADS=num_q_heads,
        KV_HEADS=(num_heads - num_q_heads) // 2,
        HALF=dim // 2,
        BLOCK_SIZE=block_size,
        HEAD_TILE=head_tile,
        HALF_TILE=half_tile,
        FLOAT8=scales is not None,
        num_warps=4,
        **launch_options(pdl),
    )


@kernel
def _scale_queries_kernel(
    heads: tl.tensor,
    scales: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    token_stride: tl.tensor,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    there = tl.load(slot_mapping + token) >= 0
    scale = tl.load(scales + tl.where(there, tl.load(positions + token), 0))
    wait(PDL)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (column < WIDTH) & there
    at = heads + token * token_stride + column
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(at, value.to(heads.dtype.element_ty), mask=inside)


def scale_queries(
    heads: Tensor, num_q_heads: int, scales: Tensor, positions: Tensor, slot_mapping: Tensor, *, pdl: bool = False
) -> None:
    """Multiply the queries of heads [T, Hq + 2 Hk, D], its first heads, by the factors of their positions, in place.

    scales is float32 [max_positions]; positions and slot_mapping are as in ``rotary_store_kv``.
    """
    check_heads(heads, "heads")
    check(scales, torch.float32, (len(scales),), "scales")
    check(positions, torch.int32, (len(heads),), "positions")
    check(slot_mapping, torch.int64, (len(heads),), "slot_mapping")
    width = num_q_heads * heads.shape[2]
    _scale_queries_kernel[(len(heads), triton.cdiv(width, ELEMENTWISE_TILE))](
        heads, scales, positions, slot_mapping, heads.stride(0), WIDTH=width, TILE=ELEMENTWISE_TILE, num_warps=4,
        **launch_options(pdl),
    )  # fmt: skip


@kernel
def _store_kernel(
    k: tl.tensor,
    v: tl.tensor,
    slot_mapping: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    kv_scales: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
    FLOAT8: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)[:, None]
    i = tl.arange(0, DIM_TILE)[None, :]
    inside = (head < KV_HEADS) & (i < DIM)
    base = (slot // BLOCK_SIZE) * (KV_HEADS * BLOCK_SIZE) + slot % BLOCK_SIZE
    target = (base + head * BLOCK_SIZE) * DIM + i
    key = tl.load(k + token * k_stride + head * DIM + i, mask=inside)
    value = tl.load(v + token * v_stride + head * DIM + i, mask=inside)
    if FLOAT8:
        key = to_float8(key, tl.load(kv_scales + KV_HEADS + head, mask=head < KV_HEADS))
        value = to_float8(value, tl.load(kv_scales + 3 * KV_HEADS + head, mask=head < KV_HEADS))
    tl.store(k_cache + target, key, mask=inside & (slot >= 0))
    tl.store(v_cache + target, value, mask=inside & (slot >= 0))


def store_kv(
    k: Tensor, v: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor, *, scales: Tensor | None = None,
    pdl: bool = False,
) -> None:  # fmt: skip
    """Write the views k, v [T, Hk, D] to the caches [num_blocks, Hk, block_size, D].

    slot_mapping is int64 [T]: block * block_size + offset, or -1 for a token that is not there. With
    ``LayerKVCache.scales`` the caches are in float8.
    """
    tokens, heads, dim = k.shape
    kv_heads, block_size = check_caches(k_cache, v_cache, cached_dtype(k.dtype, scales), dim)
    check_scales(scales, kv_heads)
    for x in (k, v):
        check_heads(x, "k and v")
        if x.shape != (tokens, kv_heads, dim) or x.dtype != k.dtype:
            wanted = [tokens, kv_heads, dim]
            raise ValueError(f"k and v must be {k.dtype} {wanted}, got {x.dtype} {list(x.shape)}")
    check(slot_mapping, torch.int64, (tokens,), "slot_mapping")
    dim_tile = triton.next_power_of_2(dim)
    head_tile = min(triton.next_power_of_2(heads), max(1, _HEAD_TILE // dim_tile))
    _store_kernel[(tokens, triton.cdiv(heads, head_tile))](
        k,
        v,
        slot_mapping,
        k_cache,
        v_cache,
        k if scales is None else scales,
        k.stride(0),
        v.stride(0),
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK_SIZE=block_size,
        HEAD_TILE=head_tile,
        DIM_TILE=dim_tile,
        FLOAT8=scales is not None,
        num_warps=4,
        **launch_options(pdl),
    )
