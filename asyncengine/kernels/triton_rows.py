"""Row kernels on the GPU: norms, activations, rotary embedding and writes to the KV cache, one launch each.

Twins of the operations of ``asyncengine.kernels.reference``: arithmetic in float32, results rounded once to
the model's dtype. A row's result depends on nothing but the row. Results are new tensors, so that in a captured graph
they come from its private pool; whatever else is passed must stay where it is as long as the graph.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTWISE_TILE = 1024
_HEAD_TILE = 1024
"""Elements of a half head tile: 16 heads of 128. With 128 threads each access is of 16 bytes in bfloat16."""
_COPY_TILE = 4096
_COPY_PROGRAMS = 128


# ---- norms ----


@triton.jit
def _norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    CENTER: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < WIDTH
    dtype: tl.constexpr = out.dtype.element_ty
    # Weights do not wait for the sums below, so they are loaded first.
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if CENTER:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        previous = tl.load(residual + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        rounded = (value + previous).to(dtype)
        tl.store(residual + row * WIDTH + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if CENTER:
        mean = tl.sum(value, 0) / WIDTH
        value = tl.where(inside, value - mean, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps) * scale
    if CENTER:
        value += shift
    tl.store(out + row * WIDTH + column, value.to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of the rows of x [M, N], which may be strided: [M, N]. weight is [N]."""
    return _norm(x, None, weight, None, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place; returns the RMS norm of the sum."""
    return _norm(x, residual, weight, None, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of the rows of x [M, N], which may be strided: [M, N]. weight and bias are [N]."""
    return _norm(x, None, weight, bias, eps)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """residual += x in place; returns the layer norm of the sum."""
    return _norm(x, residual, weight, bias, eps)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    _check_rows(x, "x")
    rows, width = x.shape
    _check(weight, x.dtype, (width,), "weight")
    if bias is not None:
        _check(bias, x.dtype, (width,), "bias")
    if residual is not None:
        _check(residual, x.dtype, (rows, width), "residual")
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    tile = triton.next_power_of_2(width)
    _norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        weight if bias is None else bias,
        out,
        x.stride(0),
        eps,
        ADD=residual is not None,
        CENTER=bias is not None,
        WIDTH=width,
        TILE=tile,
        num_warps=min(16, max(1, tile // 256)),
    )
    return out


# ---- activations ----


@triton.jit
def _activation_kernel(
    x: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < WIDTH
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == "silu_mul":
        up = tl.load(x + row * x_stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        value = value * tl.sigmoid(value) * up
    elif KIND == "gelu_tanh":
        # 0.5 x (1 + tanh(u)) with u = sqrt(2/π) (x + 0.044715 x³) is x sigmoid(2u): nothing cancels for x << 0.
        value = value * tl.sigmoid(value * (1.5957691216057308 + 0.07135481627260025 * value * value))
    else:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(x: Tensor) -> Tensor:
    """x [M, 2I] holds gate and up side by side; returns silu(gate) * up, [M, I]."""
    if x.shape[-1] % 2:
        raise ValueError(f"x must have an even last axis, got {list(x.shape)}")
    return _activation(x, "silu_mul", x.shape[-1] // 2)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU of x [M, N] in its tanh approximation."""
    return _activation(x, "gelu_tanh", x.shape[-1])


def gelu(x: Tensor) -> Tensor:
    """GELU of x [M, N]."""
    return _activation(x, "gelu", x.shape[-1])


def _activation(x: Tensor, kind: str, width: int) -> Tensor:
    _check_rows(x, "x")
    out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    grid = (x.shape[0], triton.cdiv(width, _ELEMENTWISE_TILE))
    _activation_kernel[grid](x, out, x.stride(0), KIND=kind, WIDTH=width, TILE=_ELEMENTWISE_TILE, num_warps=4)
    return out


# ---- rotary embedding and the KV cache ----


@triton.jit
def _rotary_store_kernel(
    heads: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    eps: tl.tensor,
    cos_sin: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    token_stride: tl.tensor,
    NORM: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    # No branch on the slot: every load but the table's starts at once, which is most of the time of a single token.
    slot = tl.load(slot_mapping + token)
    position = tl.where(slot < 0, 0, tl.load(positions + token)).to(tl.int64)
    dtype: tl.constexpr = heads.dtype.element_ty
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)[:, None]
    i = tl.arange(0, HALF_TILE)[None, :]
    inside = (head < Q_HEADS + 2 * KV_HEADS) & (i < HALF)
    is_q = head < Q_HEADS
    is_v = head >= Q_HEADS + KV_HEADS
    source = heads + token * token_stride + head * (2 * HALF) + i
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    table = cos_sin + position * (2 * HALF) + i
    cosine = tl.load(table, mask=i < HALF, other=0.0)
    sine = tl.load(table + HALF, mask=i < HALF, other=0.0)

    a, b = low, high
    if NORM:
        q_low = tl.load(q_norm + i, mask=i < HALF, other=0.0).to(tl.float32)
        q_high = tl.load(q_norm + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
        k_low = tl.load(k_norm + i, mask=i < HALF, other=0.0).to(tl.float32)
        k_high = tl.load(k_norm + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)[:, None]
        # Rounded between norm and rotation, as they are where the two are separate operations.
        a = (a * scale * tl.where(is_q, q_low, k_low)).to(dtype).to(tl.float32)
        b = (b * scale * tl.where(is_q, q_high, k_high)).to(dtype).to(tl.float32)
    rotated_low = tl.where(is_v, low, a * cosine - b * sine).to(dtype)
    rotated_high = tl.where(is_v, high, b * cosine + a * sine).to(dtype)

    inside &= slot >= 0
    tl.store(source, rotated_low, mask=inside & is_q)
    tl.store(source + HALF, rotated_high, mask=inside & is_q)
    kv_head = tl.where(is_v, head - (Q_HEADS + KV_HEADS), head - Q_HEADS)
    base = (slot // BLOCK_SIZE) * (KV_HEADS * BLOCK_SIZE) + slot % BLOCK_SIZE
    target = (base + kv_head * BLOCK_SIZE) * (2 * HALF) + i
    is_k = inside & (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
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
) -> None:
    """QK-norm, rotary embedding and the write to the KV cache.

    heads [T, Hq + 2Hk, D] is what the QKV projection gave, its tokens may be strided. q is rotated in place; k and v
    are left as they were and go to the caches [num_blocks, Hk, block_size, D]. q_norm and k_norm are [D], or both
    None. cos_sin is float32 [max_positions, D]: D/2 cosines, then D/2 sines; element i is paired with element
    i + D/2. positions is int32 [T], each below max_positions (not checked). slot_mapping is int64 [T]: block *
    block_size + offset, or -1 for a token that is not there, for which nothing is written.
    """
    tokens, num_heads, dim = heads.shape
    kv_heads, block_size = _check_caches(k_cache, v_cache, heads.dtype, dim)
    _check_heads(heads, "heads")
    if num_heads != num_q_heads + 2 * kv_heads or dim % 2:
        raise ValueError(f"heads {list(heads.shape)} do not fit {num_q_heads} q heads and {kv_heads} KV heads")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm go together")
    for norm in (q_norm, k_norm):
        if norm is not None:
            _check(norm, heads.dtype, (dim,), "q_norm and k_norm")
    _check(cos_sin, torch.float32, (cos_sin.shape[0], dim), "cos_sin")
    _check(positions, torch.int32, (tokens,), "positions")
    _check(slot_mapping, torch.int64, (tokens,), "slot_mapping")
    half_tile = triton.next_power_of_2(dim // 2)
    head_tile = min(triton.next_power_of_2(num_heads), max(1, _HEAD_TILE // half_tile))
    _rotary_store_kernel[(tokens, triton.cdiv(num_heads, head_tile))](
        heads,
        heads if q_norm is None else q_norm,
        heads if k_norm is None else k_norm,
        eps,
        cos_sin,
        positions,
        slot_mapping,
        k_cache,
        v_cache,
        heads.stride(0),
        NORM=q_norm is not None,
        Q_HEADS=num_q_heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        BLOCK_SIZE=block_size,
        HEAD_TILE=head_tile,
        HALF_TILE=half_tile,
        num_warps=4,
    )


@triton.jit
def _store_kernel(
    k: tl.tensor,
    v: tl.tensor,
    slot_mapping: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)[:, None]
    i = tl.arange(0, DIM_TILE)[None, :]
    inside = (head < KV_HEADS) & (i < DIM)
    base = (slot // BLOCK_SIZE) * (KV_HEADS * BLOCK_SIZE) + slot % BLOCK_SIZE
    target = (base + head * BLOCK_SIZE) * DIM + i
    key = tl.load(k + token * k_stride + head * DIM + i, mask=inside)
    value = tl.load(v + token * v_stride + head * DIM + i, mask=inside)
    tl.store(k_cache + target, key, mask=inside & (slot >= 0))
    tl.store(v_cache + target, value, mask=inside & (slot >= 0))


def store_kv(k: Tensor, v: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Write the views k, v [T, Hk, D] to the caches [num_blocks, Hk, block_size, D].

    slot_mapping is int64 [T]: block * block_size + offset, or -1 for a token that is not there.
    """
    tokens, heads, dim = k.shape
    kv_heads, block_size = _check_caches(k_cache, v_cache, k.dtype, dim)
    for x in (k, v):
        _check_heads(x, "k and v")
        if x.shape != (tokens, kv_heads, dim) or x.dtype != k_cache.dtype:
            wanted = [tokens, kv_heads, dim]
            raise ValueError(f"k and v must be {k_cache.dtype} {wanted}, got {x.dtype} {list(x.shape)}")
    _check(slot_mapping, torch.int64, (tokens,), "slot_mapping")
    dim_tile = triton.next_power_of_2(dim)
    head_tile = min(triton.next_power_of_2(heads), max(1, _HEAD_TILE // dim_tile))
    _store_kernel[(tokens, triton.cdiv(heads, head_tile))](
        k,
        v,
        slot_mapping,
        k_cache,
        v_cache,
        k.stride(0),
        v.stride(0),
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK_SIZE=block_size,
        HEAD_TILE=head_tile,
        DIM_TILE=dim_tile,
        num_warps=4,
    )


@triton.jit
def _copy_blocks_kernel(
    kv: tl.tensor,
    copies: tl.tensor,
    count: tl.tensor,
    half_stride: tl.tensor,
    block_stride: tl.tensor,
    num_halves: tl.tensor,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    tiles: tl.constexpr = (WORDS + TILE - 1) // TILE
    per_copy = num_halves * tiles
    # Items of one copy are neighbours, and programs take them in turn.
    for item in range(tl.program_id(0), tl.load(count) * per_copy, tl.num_programs(0)):
        copy = item // per_copy
        half = item % per_copy // tiles
        word = item % tiles * TILE + tl.arange(0, TILE)
        source = tl.load(copies + 2 * copy).to(tl.int64)
        target = tl.load(copies + 2 * copy + 1).to(tl.int64)
        base = kv + half.to(tl.int64) * half_stride
        words = tl.load(base + source * block_stride + word, mask=word < WORDS)
        tl.store(base + target * block_stride + word, words, mask=word < WORDS)


def copy_blocks(kv: Tensor, copies: Tensor, count: Tensor) -> None:
    """Copy whole blocks in every layer, keys and values.

    kv is contiguous [num_layers, 2, num_blocks, ...]. copies is int32 [n, 2], pairs of source and target, of which
    the first ``count`` (int32, one element, on the device, at most n) are done. No target of them is the source or the
    target of another.
    """
    if kv.dim() < 4 or kv.shape[1] != 2 or not kv.is_contiguous():
        raise ValueError(f"kv must be contiguous [num_layers, 2, num_blocks, ...], got {list(kv.shape)}")
    _check(copies, torch.int32, (copies.shape[0], 2), "copies")
    if count.dtype != torch.int32 or count.numel() != 1:
        raise ValueError(f"count must be one int32, got {count.dtype} {list(count.shape)}")
    _copy_blocks_kernel[(_COPY_PROGRAMS,)](
        kv,
        copies,
        count,
        kv.stride(1),
        kv.stride(2),
        2 * kv.shape[0],
        WORDS=kv.stride(2),
        TILE=_COPY_TILE,
        num_warps=8,
    )


# ---- checks, which run once, at capture ----


def _check(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], name: str) -> None:
    if x.dtype != dtype or x.shape != shape or not x.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {dtype} {list(shape)}, got {x.dtype} {list(x.shape)} with strides {x.stride()}"
        )


def _check_rows(x: Tensor, name: str) -> None:
    _check_dtype(x, name)
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"{name} must have contiguous rows, got {list(x.shape)} with strides {x.stride()}")


def _check_heads(x: Tensor, name: str) -> None:
    _check_dtype(x, name)
    if x.dim() != 3 or x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) != x.shape[2]):
        raise ValueError(
            f"{name} must be [tokens, heads, head_dim] with contiguous heads, "
            f"got {list(x.shape)} with strides {x.stride()}"
        )


def _check_caches(k_cache: Tensor, v_cache: Tensor, dtype: torch.dtype, dim: int) -> tuple[int, int]:
    """KV heads and block size."""
    blocks, heads, block_size, _ = k_cache.shape
    for cache in (k_cache, v_cache):
        _check(cache, dtype, (blocks, heads, block_size, dim), "k_cache and v_cache")
    return heads, block_size


def _check_dtype(x: Tensor, name: str) -> None:
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{name} must be float32 or bfloat16, got {x.dtype}")
