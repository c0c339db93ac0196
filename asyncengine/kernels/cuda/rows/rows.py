"""Row kernels on the GPU: norms, embedding, activations, rotary embedding and writes to the KV cache, one launch each.

Twins of the operations of ``asyncengine.kernels.cpu.reference``: arithmetic in float32, results rounded once to
the model's dtype. A row's result depends on nothing but the row. Results are new tensors, so that in a captured graph
they come from its private pool; whatever else is passed must stay where it is as long as the graph.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, start_next, wait
from asyncengine.kernels.ops import Activation, Norm

_ELEMENTWISE_TILE = 1024
_HEAD_TILE = 1024
"""Elements of a half head tile: 16 heads of 128. With 128 threads each access is of 16 bytes in bfloat16."""


def empty_rows(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, columns], and behind it memory for the rest of the last tile of whatever plan multiplies these rows."""
    tile = min(256, triton.next_power_of_2(rows))
    return torch.empty((triton.cdiv(rows, tile) * tile, columns), dtype=dtype, device=device)[:rows]


# ---- norms ----


@kernel
def _norm_kernel(
    x: tl.tensor,
    index: tl.tensor,
    parts: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    part_stride: tl.tensor,
    eps: tl.tensor,
    GATHER: tl.constexpr,
    PARTS: tl.constexpr,
    CENTER: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < WIDTH
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if CENTER:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    source = row
    if GATHER:
        source = tl.load(index + row)
    at = x + source * x_stride + column
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        value += tl.load(parts + part * part_stride + source * WIDTH + column, mask=inside, other=0.0)
    if PARTS > 0:
        value = value.to(x.dtype.element_ty).to(tl.float32)
        if not GATHER:
            tl.store(at, value.to(x.dtype.element_ty), mask=inside)
    if CENTER:
        mean = tl.sum(value, 0) / WIDTH
        value = tl.where(inside, value - mean, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps) * scale
    if CENTER:
        value += shift
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)


def norm(
    x: Tensor, norm: Norm, index: Tensor | None = None, parts: Tensor | None = None, *, pdl: bool = False
) -> Tensor:
    """The norm of the rows of x [M, N], which may be strided: [M, N]. With an ``index`` int64 [S], of those: [S, N].

    ``parts`` float32 [P, M, N] are first added to x, in their order; x itself takes the sum, but not with an index.
    """
    _check_rows(x, "x")
    width = x.shape[1]
    if parts is not None:
        _check(parts, torch.float32, (len(parts), *x.shape), "parts")
    for name, parameter in (("weight", norm.weight), ("bias", norm.bias)):
        if parameter is not None:
            _check(parameter, x.dtype, (width,), name)
    if index is not None:
        _check(index, torch.int64, (len(index),), "index")
    rows = len(x) if index is None else len(index)
    out = empty_rows(rows, width, x.dtype, x.device)
    tile = triton.next_power_of_2(width)
    _norm_kernel[(rows,)](
        x,
        x if index is None else index,
        x if parts is None else parts,
        norm.weight,
        norm.weight if norm.bias is None else norm.bias,
        out,
        x.stride(0),
        0 if parts is None else parts.stride(0),
        norm.eps,
        GATHER=index is not None,
        PARTS=0 if parts is None else len(parts),
        CENTER=norm.bias is not None,
        WIDTH=width,
        TILE=tile,
        num_warps=min(16, max(1, tile // 256)),
        **launch_options(pdl),
    )
    return out


@triton.jit
def store_unnormed(
    y: tl.tensor,
    gain: tl.tensor,
    scaled: tl.tensor,
    sums: tl.tensor,
    tile: tl.tensor,
    tiles: tl.tensor,
    column: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    WRITES: tl.constexpr,
) -> None:
    """Of a stream's tile y [columns, rows], as it is stored, what the projection behind needs (see residual.py)."""
    there = (row < rows)[None, :] & (column < columns)[:, None]
    y = tl.where(there, y.to(tl.float32), 0.0)
    to = scaled + row.to(tl.int64)[None, :] * columns + column[:, None]
    tl.store(to, (y * gain.to(tl.float32)[:, None]).to(scaled.dtype.element_ty), mask=there)
    at = sums + tile * rows + row
    tl.store(at, tl.sum(y * y, 0), mask=row < rows)
    if WRITES == 2:
        tl.store(at + tiles * rows, tl.sum(y, 0), mask=row < rows)


# ---- embedding ----


@kernel
def _embed_kernel(
    ids: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    position_table: tl.tensor,
    out: tl.tensor,
    POSITIONS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < WIDTH
    value = tl.load(table + tl.load(ids + token).to(tl.int64) * WIDTH + column, mask=inside)
    if POSITIONS:
        row = tl.load(position_table + tl.load(positions + token).to(tl.int64) * WIDTH + column, mask=inside)
        value = (value.to(tl.float32) + row.to(tl.float32)).to(value.dtype)
    tl.store(out + token * WIDTH + column, value, mask=inside)


def embed(
    ids: Tensor, table: Tensor, positions: Tensor, position_table: Tensor | None, *, pdl: bool = False
) -> Tensor:
    """Rows ids int32 [T] of table [V, H], plus rows positions int32 [T] of position_table [P, H]: [T, H].

    Ids and positions are not checked.
    """
    tokens, width = len(ids), table.shape[1]
    for name, rows in (("table", table), ("position_table", position_table)):
        if rows is not None:
            _check(rows, table.dtype, (len(rows), width), name)
    _check(ids, torch.int32, (tokens,), "ids")
    _check(positions, torch.int32, (tokens,), "positions")
    out = torch.empty((tokens, width), dtype=table.dtype, device=table.device)
    _embed_kernel[(tokens, triton.cdiv(width, _ELEMENTWISE_TILE))](
        ids,
        positions,
        table,
        table if position_table is None else position_table,
        out,
        POSITIONS=position_table is not None,
        WIDTH=width,
        TILE=_ELEMENTWISE_TILE,
        num_warps=4,
        **launch_options(pdl),
    )
    return out


# ---- activations ----


@triton.jit
def gelu_gate(value: tl.tensor) -> tl.tensor:
    """2u of 0.5 x (1 + tanh(u)), u = sqrt(2/π) (x + 0.044715 x³): x sigmoid(2u), where nothing cancels for x << 0."""
    return value * (1.5957691216057308 + 0.07135481627260025 * value * value)


@triton.jit
def activate(value: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """GELU of float32, in its tanh approximation or not."""
    if KIND == "gelu_tanh":
        return value * tl.sigmoid(gelu_gate(value))
    return 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))


@kernel
def _activation_kernel(
    x: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    start_next(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < WIDTH
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == "silu_mul":
        up = tl.load(x + row * x_stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        value = value * tl.sigmoid(value) * up
    else:
        value = activate(value, KIND)
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)


def activation(x: Tensor, kind: Activation, *, pdl: bool = False) -> Tensor:
    """x [M, N] activated, its rows may be strided; silu_mul takes an even N and halves it."""
    _check_rows(x, "x")
    if kind == "silu_mul" and x.shape[1] % 2:
        raise ValueError(f"x must have an even last axis, got {list(x.shape)}")
    width = x.shape[1] // 2 if kind == "silu_mul" else x.shape[1]
    out = empty_rows(len(x), width, x.dtype, x.device)
    _activation_kernel[(x.shape[0], triton.cdiv(width, _ELEMENTWISE_TILE))](
        x, out, x.stride(0), KIND=kind, WIDTH=width, TILE=_ELEMENTWISE_TILE, num_warps=4, **launch_options(pdl)
    )
    return out


# ---- rotary embedding and the KV cache ----


@kernel
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
    if NORM:
        q_low = tl.load(q_norm + i, mask=i < HALF, other=0.0).to(tl.float32)
        q_high = tl.load(q_norm + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
        k_low = tl.load(k_norm + i, mask=i < HALF, other=0.0).to(tl.float32)
        k_high = tl.load(k_norm + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    wait(PDL)
    source = heads + token * token_stride + head * (2 * HALF) + i
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)

    a, b = low, high
    if NORM:
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
    *,
    pdl: bool = False,
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
        **launch_options(pdl),
    )


@kernel
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
    tl.store(k_cache + target, key, mask=inside & (slot >= 0))
    tl.store(v_cache + target, value, mask=inside & (slot >= 0))


def store_kv(
    k: Tensor, v: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor, *, pdl: bool = False
) -> None:
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
        **launch_options(pdl),
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
