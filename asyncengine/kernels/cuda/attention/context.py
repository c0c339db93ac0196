"""Keys and values of a cached context, made of its latents for later chunks of a text, on the GPU.

A chunk that is long enough attends over keys and values that its context is expanded to. One kernel decides which rows
take this form, in the step's rows on the device. Their contexts lie one behind another, each from a multiple of
a tile on, and are expanded in parts that share one piece of scratch memory.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.attention.paged import dot
from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, must_widen, wait
from asyncengine.kernels.cuda.rows.float8_cache import key_scale, value_scale
from asyncengine.kernels.cuda.step.tensors import DeviceStep
from asyncengine.kernels.latent import EXPANDED_BYTES, LatentLayer
from asyncengine.kernels.ops import LayerLatentCache

_MOST_TOKENS = 16_384
_MANY_TOKENS = 2048
"""A step of so many tokens may have contexts of several parts. Each part costs every step some microseconds a layer."""
_MOST_PARTS = 4
_TOKENS, _COLUMNS, _INNER = 128, 128, 64
_STAGE_BYTES = 2 * (_TOKENS + _COLUMNS) * _INNER
_GAIN = 2
"""Steps of so many times the least tokens may have such rows: all steps pay for launches that find none."""


class ContextPlan(NamedTuple):
    """Expansion of contexts in the steps of a bucket."""

    least: int
    """tokens of the shortest chunk whose context is expanded"""
    tokens: int
    """tokens of a part of the contexts: a multiple of ``tile``"""
    parts: int
    """parts of the contexts of a step; rows whose contexts end behind the last one take the absorbed form"""
    tile: int
    """tokens of one turn of a program"""
    programs: int
    """programs that expand a part, at least: each has turns one after another"""
    stages: int
    """tiles of latents and matrices that are in flight"""

    @property
    def capacity(self) -> int:
        return self.parts * self.tokens


class ExpandedRows(NamedTuple):
    """The rows of a step that take the expanded form."""

    places: Tensor
    """int32 [R]: place of a row's context among those that are expanded; -1: the row takes the absorbed form"""
    token_rows: Tensor
    """int32 [T]: the row of each token of such rows; -1 for tokens of other rows, undefined for those of no row"""


def choose_context(tokens: int, layer: LatentLayer, key_dim: int, value_dim: int, dtype: torch.dtype, gpu: Gpu) -> (
    ContextPlan | None
):  # fmt: skip
    """The plan for steps of so many tokens at most; None: no context is expanded.

    For a head, a key of the context costs rank * (key_dim + value_dim) products to make, and then each query
    key_dim + rope + value_dim; the absorbed form costs each query 2 * rank + rope.
    """
    saved = 2 * layer.rank - key_dim - value_dim
    least = -(-layer.rank * (key_dim + value_dim) // saved) if saved > 0 else tokens + 1
    room = EXPANDED_BYTES // (dtype.itemsize * (layer.num_heads * (key_dim + value_dim) + layer.rope))
    part = min(_MOST_TOKENS, 1 << (room.bit_length() - 1)) if room else 0
    tile = 16 if dtype == torch.float32 else _TOKENS
    if tokens < _GAIN * least or part < tile:
        return None
    parts, stages = _MOST_PARTS if tokens >= _MANY_TOKENS else 1, 3 if gpu.tile_bytes >= 4 * _STAGE_BYTES else 2
    return ContextPlan(least, part, parts, tile, 2 * gpu.multiprocessors, stages)


@kernel
def _expanded_rows_kernel(
    row_query_start,
    row_query_len,
    row_context_len,
    places,
    token_rows,
    num_rows,
    least,
    capacity,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    MARKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program decides for a row, and marks its tokens."""
    wait(PDL)
    mine = tl.program_id(0)
    row = tl.arange(0, ROWS)
    length = tl.load(row_query_len + row, mask=row < num_rows, other=0)
    context = tl.load(row_context_len + row, mask=length > 0, other=0)
    wants = (context > 0) & (length >= least)
    room = tl.where(wants, tl.cdiv(context, TILE) * TILE, 0)
    end = tl.cumsum(room, 0)
    expands = (length > 0) & ((context == 0) | (wants & (end <= capacity)))
    place = tl.sum(tl.where(row == mine, tl.where(expands, end - room, -1), 0), 0)
    tl.store(places + mine, place)
    count = tl.sum(tl.where(row == mine, length, 0), 0)
    start = tl.load(row_query_start + mine, mask=count > 0, other=0).to(tl.int64)
    one = tl.arange(0, MARKS)
    for begin in range(0, count, MARKS):
        tl.store(token_rows + start + begin + one, tl.where(place >= 0, mine, -1), mask=begin + one < count)


def find_expanded_rows(step: DeviceStep, plan: ContextPlan | None, *, pdl: bool = False) -> ExpandedRows:
    """The rows of the step that begin their text, and by ``plan`` later chunks."""
    device, rows = step.row_query_len.device, step.num_rows
    found = ExpandedRows(
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(step.num_tokens, dtype=torch.int32, device=device),
    )
    _expanded_rows_kernel[(rows,)](
        step.row_query_start, step.row_query_len, step.row_context_len, found.places, found.token_rows, rows,
        plan.least if plan else 0, plan.capacity if plan else 0, ROWS=triton.next_power_of_2(rows),
        TILE=plan.tile if plan else 16, MARKS=1024, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return found


@kernel
def _context_kernel(
    latents,
    kv_scales,
    up,
    places,
    row_query_start,
    row_context_len,
    token_slot,
    block_tables,
    made,
    ends,
    first,
    end,
    num_rows,
    table_stride,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROPE_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program expands every so many-th tile of the part [first, end) of the contexts, in some columns."""
    wait(PDL)
    row = tl.arange(0, ROWS)
    place = tl.load(places + row, mask=row < num_rows, other=-1)
    context = tl.load(row_context_len + row, mask=place >= 0, other=0)
    last = tl.minimum(tl.max(tl.where(context > 0, place + context, 0), 0), end)
    column = tl.program_id(1) * N + tl.arange(0, N)
    known = column < COLUMNS
    turned = tl.arange(0, ROPE_TILE)
    dtype: tl.constexpr = made.dtype.element_ty
    FLOAT8: tl.constexpr = kv_scales is not None
    for begin in range(first + tl.program_id(0) * TILE, last, tl.num_programs(0) * TILE):
        # Contexts begin at multiples of TILE: a tile is of one row, whose context may end before it does.
        mine = tl.sum(tl.where((context > 0) & (place <= begin) & (begin < place + context), row, 0), 0)
        key = begin - tl.load(places + mine) + tl.arange(0, TILE)
        inside = key < tl.load(row_context_len + mine)
        slot = tl.load(token_slot + tl.load(row_query_start + mine)).to(tl.int64)
        block = tl.load(block_tables + slot * table_stride + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        place_of_key = tl.where(inside, block * BLOCK_SIZE + key % BLOCK_SIZE, 1)  # for the reason in _latent_kernel
        stored = latents + place_of_key[:, None] * (RANK + ROPE)
        acc = tl.zeros([TILE, N], tl.float32)
        for k in tl.range(0, RANK, K, num_stages=STAGES):
            number = k + tl.arange(0, K)
            there = number < RANK
            a = tl.load(stored + number[None, :], mask=inside[:, None] & there[None, :], other=0.0)
            if FLOAT8:
                a = (a.to(tl.float32) * key_scale(kv_scales, 0, 1)).to(dtype)
            b = tl.load(
                up + column.to(tl.int64)[:, None] * RANK + number[None, :], known[:, None] & there[None, :], 0.0
            )
            acc += dot(a, tl.trans(b), WIDEN)
        target = (begin - first + tl.arange(0, TILE)).to(tl.int64)
        at = made + target[:, None] * COLUMNS + column[None, :]
        tl.store(at, acc.to(dtype), mask=inside[:, None] & known[None, :])
        if tl.program_id(1) == 0:
            own = inside[:, None] & (turned < ROPE)[None, :]
            rotated = tl.load(stored + RANK + turned[None, :], mask=own, other=0.0)
            if FLOAT8:
                rotated = rotated.to(tl.float32) * value_scale(kv_scales, 0, 1)
            tl.store(ends + target[:, None] * ROPE + turned[None, :], rotated.to(dtype), mask=own)


def allocate_context(layer: LatentLayer, plan: ContextPlan) -> tuple[Tensor, Tensor]:
    """Memory for a part: keys and values [tokens, heads * (key_dim + value_dim)], and rotated keys [tokens, rope]."""
    heads, columns, _ = layer.up.shape
    return layer.up.new_empty(plan.tokens, heads * columns), layer.up.new_empty(plan.tokens, layer.rope)


def expand_context(
    part: tuple[int, int], layer: LatentLayer, cache: LayerLatentCache, step: DeviceStep, rows: ExpandedRows,
    plan: ContextPlan, made: Tensor, ends: Tensor, *, pdl: bool = False,
) -> None:  # fmt: skip
    """Make the keys and values of the part [first, end) of the contexts, in the memory of ``allocate_context``."""
    tokens, columns = made.shape
    tables, latents = step.slots.block_tables, cache.latents
    exact = made.dtype == torch.float32
    width, inner, warps = (16, 16, 4) if exact else (_COLUMNS, _INNER, 8)
    across = triton.cdiv(columns, width)
    along = max(1, min(tokens // plan.tile, triton.cdiv(plan.programs, across)))
    _context_kernel[(along, across)](
        latents, cache.scales, layer.up, rows.places, step.row_query_start, step.row_context_len, step.token_slot,
        tables, made, ends, *part, step.num_rows, tables.stride(0), COLUMNS=columns,
        RANK=layer.rank, ROPE=layer.rope, BLOCK_SIZE=latents.shape[1], ROWS=triton.next_power_of_2(step.num_rows),
        TILE=plan.tile, N=width, K=inner, ROPE_TILE=max(16, triton.next_power_of_2(layer.rope)), STAGES=plan.stages,
        WIDEN=must_widen(made.dtype), num_warps=warps, num_stages=plan.stages, **launch_options(pdl),
    )  # fmt: skip
