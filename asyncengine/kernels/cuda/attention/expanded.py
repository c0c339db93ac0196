"""Attention over keys and values that are made of latents, for chunks of prompts, on the GPU.

One product makes the keys and values of a step's own tokens. A chunk that begins its text sees no others; for a later
one the kernel of context.py makes those of its context, part by part. Each part takes a launch, and so do the own
tokens; another kernel adds up their results by the logarithms of their sums. A program has neighbouring tokens of a
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

from asyncengine.kernels.cuda.attention.context import (
    ContextPlan,
    ExpandedRows,
    allocate_context,
    choose_context,
    expand_context,
)
from asyncengine.kernels.cuda.attention.paged import dot
from asyncengine.kernels.cuda.attention.scores import LOG2_E
from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, must_widen, wait
from asyncengine.kernels.cuda.rows.tensors import check, check_strided
from asyncengine.kernels.cuda.step.tensors import DeviceStep
from asyncengine.kernels.latent import LatentLayer
from asyncengine.kernels.ops import LayerLatentCache

LEAST_TOKENS = 512
"""Tokens of the smallest steps in which chunks may take this form. The products that make keys and values pay from
about 350 tokens of one chunk on."""

_MERGED = 16
"""Results of a token and a head of one program that adds up parts."""


class ExpandedPlan(NamedTuple):
    """Tile of the kernel."""

    tokens: int
    """tokens of a program"""
    keys: int
    """keys of one turn of the loop"""
    warps: int
    stages: int
    context: ContextPlan | None = None
    """None: chunks behind the first of a text take the absorbed form."""

    def __str__(self) -> str:
        tile = f"{self.tokens} tokens of a head x {self.keys}, {self.warps} warps, {self.stages} stages"
        later, own = "", self.context
        if own is not None:
            later = f", and for those of {own.least} tokens after up to {own.parts} x {own.tokens} others"
        return f"expanded latents [{tile}] for chunks that begin their text{later} (formula)"


def choose_expanded(tokens: int, key_dim: int, layer: LatentLayer, value_dim: int, dtype: torch.dtype, gpu: Gpu) -> (
    ExpandedPlan | None
):  # fmt: skip
    """The plan for steps of so many tokens at most that may have prompts; None: chunks take the absorbed form."""
    if tokens < LEAST_TOKENS:
        return None
    context = choose_context(tokens, layer, key_dim, value_dim, dtype, gpu)
    if dtype == torch.float32:
        return ExpandedPlan(16, 16, 4, 1, context)
    of_key = _tile(key_dim) + _tile(layer.rope)
    for rows, keys, stages in ((128, 64, 2), (128, 32, 2), (64, 32, 2), (64, 32, 1)):
        if 2 * (rows * of_key + stages * keys * (of_key + _tile(value_dim))) <= gpu.tile_bytes:
            return ExpandedPlan(rows, keys, 8, stages, context)
    return None


def _tile(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


@kernel
def _expanded_kernel(
    q,
    made,
    ends,
    places,
    row_query_start,
    row_query_len,
    row_context_len,
    out,
    logs,
    scale,
    part_first,
    part_end,
    num_rows,
    q_token_stride,
    q_head_stride,
    ends_stride,
    HEADS: tl.constexpr,
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
    OWN: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend over a chunk's OWN tokens, or over its context as far as that is in the part [part_first, part_end).

    Without ``logs`` nobody adds to the results. Rows without a context in the part are left out.
    """
    wait(PDL)
    # The last tiles of a chunk see the most keys, and begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    row = tl.arange(0, ROWS)
    place = tl.load(places + row, mask=row < num_rows, other=-1)
    if not OWN:
        context = tl.load(row_context_len + row, mask=place >= 0, other=0)
        place = tl.where((context > 0) & (place < part_end) & (place + context > part_first), place, -1)
    length = tl.load(row_query_len + row, mask=place >= 0, other=0)
    tiles = tl.cdiv(length, M)
    mine = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    first = (tile - tl.sum(tl.where(row < mine, tiles, 0), 0)) * M
    length = tl.load(row_query_len + mine, mask=mine < num_rows, other=0)
    start = tl.load(row_query_start + mine, mask=mine < num_rows, other=0).to(tl.int64)

    m = first + tl.arange(0, M)
    real = (m < length)[:, None]
    column, turn, element = tl.arange(0, KEY_TILE), tl.arange(0, ROPE_TILE), tl.arange(0, VALUE_TILE)
    at = q + (start + m)[:, None] * q_token_stride + head * q_head_stride
    query = tl.load(at + column[None, :], mask=real & (column < KEY)[None, :], other=0.0)
    turned = tl.load(at + KEY + turn[None, :], mask=real & (turn < ROPE)[None, :], other=0.0)
    if OWN:
        source, begins, end, last_seen = start, 0, tl.minimum(first + M, length), m
    else:
        # Places of a context begin at that of the row, and those of the scratch memory at the part's.
        place = tl.load(places + mine, mask=mine < num_rows, other=0)
        context = tl.load(row_context_len + mine, mask=mine < num_rows, other=0)
        source, begins = (place - part_first).to(tl.int64), tl.maximum(part_first - place, 0)
        end = tl.minimum(part_end - place, context)
        last_seen = tl.zeros([M], tl.int32) + (end - 1)
    of_head = made + source * (HEADS * (KEY + VALUE)) + head * (KEY + VALUE)
    of_ends = ends + source * ends_stride

    peak = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, VALUE_TILE], tl.float32)
    for begin in tl.range(begins, end, N, num_stages=STAGES):
        n = begin + tl.arange(0, N)
        inside = (n < end)[:, None]
        stored = of_head + n.to(tl.int64)[:, None] * (HEADS * (KEY + VALUE))
        keys = tl.load(stored + column[None, :], mask=inside & (column < KEY)[None, :], other=0.0)
        rotated = of_ends + n.to(tl.int64)[:, None] * ends_stride + turn[None, :]
        rotated = tl.load(rotated, mask=inside & (turn < ROPE)[None, :], other=0.0)
        values = tl.load(stored + KEY + element[None, :], mask=inside & (element < VALUE)[None, :], other=0.0)
        score = (dot(query, tl.trans(keys), WIDEN) + dot(turned, tl.trans(rotated), WIDEN)) * scale
        # The first key is visible to each query, so that no peak stays infinite.
        score = tl.where(n[None, :] <= last_seen[:, None], score, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + dot(weight.to(values.dtype), values, WIDEN)
        peak = new_peak

    total = tl.where(total == 0, 1.0, total)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    one = (start + m) * HEADS + head
    tl.store(out + one[:, None] * VALUE + element[None, :], result, mask=real & (element < VALUE)[None, :])
    if logs is not None:
        tl.store(logs + one, peak + tl.log2(total), mask=m < length)


@kernel
def _merge_kernel(
    out,
    logs,
    sums,
    logs_of_sums,
    token_rows,
    token_slot,
    places,
    row_context_len,
    part_first,
    part_end,
    num_results,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    M: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    OWN: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program adds results of a part to the ``sums`` of those before it, or those to results of OWN tokens."""
    wait(PDL)
    one = tl.program_id(0) * M + tl.arange(0, M)
    token = one // HEADS
    slot = tl.load(token_slot + token, mask=one < num_results, other=-1)
    row = tl.load(token_rows + token, mask=slot >= 0, other=-1)
    place = tl.load(places + row, mask=row >= 0, other=0)
    context = tl.load(row_context_len + row, mask=row >= 0, other=0)
    there, began = context > 0, (context > 0) & (place < part_first)
    if not OWN:
        there = there & (place < part_end) & (place + context > part_first)
    own = tl.load(logs + one, mask=there, other=0.0)
    before = tl.load(logs_of_sums + one, mask=there & (began | OWN), other=-float("inf"))
    peak = tl.maximum(own, before)
    of_own, of_before = tl.exp2(own - peak), tl.exp2(before - peak)
    total = of_own + of_before
    element = tl.arange(0, VALUE_TILE)
    at = one.to(tl.int64)[:, None] * VALUE + element[None, :]
    inside = there[:, None] & (element < VALUE)[None, :]
    result = tl.load(out + at, mask=inside, other=0.0).to(tl.float32) * (of_own / total)[:, None]
    earlier = tl.load(sums + at, mask=inside & (began | OWN)[:, None], other=0.0) * (of_before / total)[:, None]
    if OWN:
        tl.store(out + at, (result + earlier).to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(sums + at, result + earlier, mask=inside)
        tl.store(logs_of_sums + one, peak + tl.log2(total), mask=there)


def expanded_attention(
    q: Tensor, rows: Tensor, layer: LatentLayer, cache: LayerLatentCache, step: DeviceStep, found: ExpandedRows,
    out: Tensor, plan: ExpandedPlan, *, pdl: bool = False,
) -> None:  # fmt: skip
    """Attend for the rows that ``find_expanded_rows`` found, and write to their rows of out [tokens, heads, value_dim].

    q [tokens, heads, key_dim + rope] are rotated queries, and rows [tokens, width] are latents and keys as they are
    stored. Both may be strided, but for their last axis. Raises ValueError for tensors that do not fit.
    """
    tokens, heads, value_dim = out.shape
    key_dim = layer.up.shape[1] - value_dim
    check_strided(q, out.dtype, (tokens, layer.num_heads, key_dim + layer.rope), "q")
    check_strided(rows, out.dtype, (tokens, layer.width), "rows")
    check(out, q.dtype, (step.num_tokens, layer.num_heads, value_dim), "out")
    check(layer.up, q.dtype, (heads, key_dim + value_dim, layer.rank), "up")
    own, options = plan.context, launch_options(pdl)

    def attend(made: Tensor, ends: Tensor, out: Tensor, logs: Tensor | None, part: tuple[int, int] | None) -> None:
        shortest = 1 if own is None or part is None else own.least  # of the chunks, each of which may add a tile
        tiles = triton.cdiv(tokens, plan.tokens) + min(step.num_rows, tokens // shortest)
        _expanded_kernel[(tiles, heads)](
            q, made, ends, found.places, step.row_query_start, step.row_query_len, step.row_context_len, out, logs,
            layer.scale * LOG2_E, *(part or (0, 0)), step.num_rows, q.stride(0), q.stride(1), ends.stride(0),
            HEADS=heads, ROPE=layer.rope, KEY=key_dim, VALUE=value_dim, ROWS=triton.next_power_of_2(step.num_rows),
            M=plan.tokens, N=plan.keys, KEY_TILE=_tile(key_dim), ROPE_TILE=_tile(layer.rope),
            VALUE_TILE=_tile(value_dim), STAGES=plan.stages, OWN=part is None, WIDEN=must_widen(q.dtype),
            num_warps=plan.warps, num_stages=plan.stages, **options,
        )  # fmt: skip

    def merge(part: tuple[int, int] | None) -> None:
        _merge_kernel[(triton.cdiv(tokens * heads, _MERGED),)](
            out, logs, sums, logs_of_sums, found.token_rows, step.token_slot, found.places, step.row_context_len,
            *(part or (0, 0)), tokens * heads, HEADS=heads, VALUE=value_dim, M=_MERGED, VALUE_TILE=_tile(value_dim),
            OWN=part is None, num_warps=4, **options,
        )  # fmt: skip

    made = torch.mm(rows[:, : layer.rank], layer.up.view(-1, layer.rank).t())
    ends = rows[:, layer.rank :]
    if own is None:
        attend(made, ends, out, None, None)
        return
    sums = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    logs, logs_of_sums = (torch.empty((tokens, heads), dtype=torch.float32, device=out.device) for _ in range(2))
    scratch = allocate_context(layer, own)
    for first in range(0, own.capacity, own.tokens):
        part = first, first + own.tokens
        expand_context(part, layer, cache, step, found, own, *scratch, pdl=pdl)
        if first == 0:
            attend(*scratch, sums, logs_of_sums, part)
        else:
            attend(*scratch, out, logs, part)
            merge(part)
    attend(made, ends, out, logs, None)
    merge(None)
