"""Attention over keys and values that are made of latents, for chunks that begin their text, on the GPU.

Such a chunk sees no token but its own, whose keys and values one product makes. A program has neighbouring tokens of a
chunk and one head. It finds them by itself, in the step's rows on the device. The absorbed form takes 2 to 3 times the
arithmetic for each key, and no product that makes keys.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.attention.paged import dot
from asyncengine.kernels.cuda.attention.scores import LOG2_E
from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, must_widen, wait
from asyncengine.kernels.cuda.rows.tensors import check, check_strided
from asyncengine.kernels.cuda.step.tensors import DeviceStep
from asyncengine.kernels.latent import LatentLayer

LEAST_TOKENS = 512
"""Tokens of the smallest steps in which chunks may take this form. The products that make keys and values pay from
about 350 tokens of one chunk on."""


class ExpandedPlan(NamedTuple):
    """Tile of the kernel."""

    tokens: int
    """tokens of a program"""
    keys: int
    """keys of one turn of the loop"""
    warps: int
    stages: int

    def __str__(self) -> str:
        tile = f"{self.tokens} tokens of a head x {self.keys}, {self.warps} warps, {self.stages} stages"
        return f"expanded latents [{tile}] for chunks that begin their text (formula)"


def choose_expanded(tokens: int, key_dim: int, layer: LatentLayer, value_dim: int, dtype: torch.dtype, gpu: Gpu) -> (
    ExpandedPlan | None
):  # fmt: skip
    """The plan for steps of so many tokens at most that may have prompts; None: chunks take the absorbed form."""
    if tokens < LEAST_TOKENS:
        return None
    if dtype == torch.float32:
        return ExpandedPlan(16, 16, 4, 1)
    of_key = _tile(key_dim) + _tile(layer.rope)
    for rows, keys, stages in ((128, 64, 2), (128, 32, 2), (64, 32, 2), (64, 32, 1)):
        if 2 * (rows * of_key + stages * keys * (of_key + _tile(value_dim))) <= gpu.tile_bytes:
            return ExpandedPlan(rows, keys, 8, stages)
    return None


def _tile(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


@kernel
def _expanded_kernel(
    q,
    made,
    rows,
    row_query_start,
    row_query_len,
    row_context_len,
    out,
    scale,
    num_rows,
    q_token_stride,
    q_head_stride,
    row_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    KEY_TILE: tl.constexpr,
    ROPE_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    # The last tiles of a chunk see the most keys, and begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    row = tl.arange(0, ROWS)
    length = tl.load(row_query_len + row, mask=row < num_rows, other=0)
    begins = tl.load(row_context_len + row, mask=length > 0, other=1) == 0
    tiles = tl.where(begins, tl.cdiv(length, M), 0)
    mine = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    first = (tile - tl.sum(tl.where(row < mine, tiles, 0), 0)) * M
    length = tl.load(row_query_len + mine, mask=mine < num_rows, other=0)
    start = tl.load(row_query_start + mine, mask=mine < num_rows, other=0).to(tl.int64)

    m = first + tl.arange(0, M)
    real = (m < length)[:, None]
    column, place, element = tl.arange(0, KEY_TILE), tl.arange(0, ROPE_TILE), tl.arange(0, VALUE_TILE)
    at = q + (start + m)[:, None] * q_token_stride + head * q_head_stride
    query = tl.load(at + column[None, :], mask=real & (column < KEY)[None, :], other=0.0)
    turned = tl.load(at + KEY + place[None, :], mask=real & (place < ROPE)[None, :], other=0.0)
    of_head = made + start * (HEADS * (KEY + VALUE)) + head * (KEY + VALUE)
    of_rows = rows + start * row_stride + RANK

    peak = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, VALUE_TILE], tl.float32)
    end = tl.minimum(first + M, length)
    for begin in tl.range(0, end, N, num_stages=STAGES):
        n = begin + tl.arange(0, N)
        inside = (n < end)[:, None]
        stored = of_head + n.to(tl.int64)[:, None] * (HEADS * (KEY + VALUE))
        keys = tl.load(stored + column[None, :], mask=inside & (column < KEY)[None, :], other=0.0)
        ends = of_rows + n.to(tl.int64)[:, None] * row_stride + place[None, :]
        ends = tl.load(ends, mask=inside & (place < ROPE)[None, :], other=0.0)
        values = tl.load(stored + KEY + element[None, :], mask=inside & (element < VALUE)[None, :], other=0.0)
        score = (dot(query, tl.trans(keys), WIDEN) + dot(turned, tl.trans(ends), WIDEN)) * scale
        # The first key is visible to each query, so that no peak stays infinite.
        score = tl.where(n[None, :] <= m[:, None], score, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + dot(weight.to(values.dtype), values, WIDEN)
        peak = new_peak

    result = (acc / tl.where(total == 0, 1.0, total)[:, None]).to(out.dtype.element_ty)
    at = out + (start + m)[:, None] * (HEADS * VALUE) + head * VALUE + element[None, :]
    tl.store(at, result, mask=real & (element < VALUE)[None, :])


def expanded_attention(
    q: Tensor, rows: Tensor, layer: LatentLayer, step: DeviceStep, out: Tensor, plan: ExpandedPlan, *, pdl: bool = False
) -> None:
    """Attend for chunks that begin their text, and write to their rows of out [tokens, heads, value_dim] alone.

    q [tokens, heads, key_dim + rope] are rotated queries, and rows [tokens, width] are latents and keys as they are
    stored. Both may be strided, but for their last axis. Raises ValueError for tensors that do not fit.
    """
    tokens, heads, value_dim = out.shape
    key_dim = layer.up.shape[1] - value_dim
    check_strided(q, out.dtype, (tokens, layer.num_heads, key_dim + layer.rope), "q")
    check_strided(rows, out.dtype, (tokens, layer.width), "rows")
    check(out, q.dtype, (step.num_tokens, layer.num_heads, value_dim), "out")
    check(layer.up, q.dtype, (heads, key_dim + value_dim, layer.rank), "up")
    made = torch.mm(rows[:, : layer.rank], layer.up.view(-1, layer.rank).t())
    tiles = triton.cdiv(tokens, plan.tokens) + min(step.num_rows, tokens)
    _expanded_kernel[(tiles, heads)](
        q, made, rows, step.row_query_start, step.row_query_len, step.row_context_len, out, layer.scale * LOG2_E,
        step.num_rows, q.stride(0), q.stride(1), rows.stride(0), HEADS=heads, RANK=layer.rank, ROPE=layer.rope,
        KEY=key_dim, VALUE=value_dim, ROWS=triton.next_power_of_2(step.num_rows), M=plan.tokens, N=plan.keys,
        KEY_TILE=_tile(key_dim), ROPE_TILE=_tile(layer.rope), VALUE_TILE=_tile(value_dim), STAGES=plan.stages,
        WIDEN=must_widen(q.dtype), num_warps=plan.warps, num_stages=plan.stages, **launch_options(pdl),
    )  # fmt: skip
