"""Projections by weights in codes (see grouped.py), of up to 256 rows, with what surrounds them in the same launch.

    out = residual + activation(x W^T + bias)

Codes are converted in registers (see decode.py) and multiplied with x by tensor cores. A scale is applied to the sum
of its group's products and not to each weight, so that a weight costs two or three instructions. K is split over
programs where the weight has too few rows to fill the card; the last of them to end adds the sums up, in the order of
the splits.

A program takes 128 columns at a time. Of int4 these are 32 words of a row, whose low halves are columns 0 to 63 and
whose high ones are 64 to 127: so both halves meet neighbours in x. Rows of int8 lie in pieces of 64 bytes (see
``in_tiles``), unless a weight has no tiles.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
# mypy: disable-error-code="assignment, var-annotated, unreachable, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import INTERPRETED, launch_options, start_next, wait
from asyncengine.kernels.cuda.linear.decode import int4_unit, nibbles, whole_bytes
from asyncengine.kernels.cuda.linear.grouped import TILE, GroupedMatrix, at_tiles
from asyncengine.kernels.cuda.linear.plan import Plan
from asyncengine.kernels.cuda.linear.skinny import columns_of, finish, leave_part, load_bias, load_sum, weight_rows_of
from asyncengine.kernels.ops import Activation

_TILE = tl.constexpr(TILE)


@kernel
def coded_kernel(
    x,
    codes,
    scales,
    offsets,
    bias,
    out,
    partials,
    arrivals,
    rows,
    columns,
    x_stride,
    out_stride,
    K: tl.constexpr,
    G: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    TILED: tl.constexpr,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PLAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program multiplies BN rows of the weight with BM rows of x, over its share of K. scales are [K / G, N].

    TILED: codes are those of ``in_tiles``, as those of int4 are.
    """
    start_next(PDL)
    HALF: tl.constexpr = _TILE // 2
    PACKED: tl.constexpr = codes.dtype.element_ty == tl.uint8
    WIDTH: tl.constexpr = HALF // 2 if PACKED else _TILE
    TILES: tl.constexpr = (K // _TILE + SPLIT - 1) // SPLIT
    dtype: tl.constexpr = tl.float32 if PLAIN else x.dtype.element_ty
    program, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = weight_rows_of(program, columns, ACT == "silu_mul", BN)
    all_rows = columns * 2 if ACT == "silu_mul" else columns
    m = block * BM + tl.arange(0, BM)
    STEP: tl.constexpr = 8 * WIDTH if TILED else WIDTH
    UNIT: tl.constexpr = int4_unit(half=dtype == tl.float16) if PACKED else 1.0
    if PACKED:  # words of 16 bits
        from_codes = codes.to(tl.pointer_type(tl.int16)) + at_tiles(row, K // 4, WIDTH, 2)
    elif TILED:
        from_codes = codes + at_tiles(row, K, WIDTH, 1)
    else:
        from_codes = codes + row[:, None] * K + tl.arange(0, WIDTH)[None, :]
    k = tl.arange(0, HALF if PACKED else _TILE)[:, None]
    from_x = x + tl.minimum(m, rows - 1)[None, :].to(tl.int64) * x_stride + k
    from_scales = scales + row
    first = split * TILES
    last = tl.minimum(first + TILES, K // _TILE)
    offset = load_bias(bias, row, BIAS)
    column = columns_of(program, ACT, BN)[:, None]
    to = m[None, :].to(tl.int64) * out_stride + column
    # A scale is loaded a tile ahead: its product would wait for it.
    scale = tl.load(from_scales + first * _TILE // G * all_rows).to(tl.float32)
    wait(PDL)
    acc = tl.zeros([BN, BM], tl.float32)
    for tile in tl.range(first, last, num_stages=STAGES):
        group = tile * _TILE // G
        following = tl.load(from_scales + tl.minimum(tile + 1, last - 1) * _TILE // G * all_rows).to(tl.float32)
        part = tl.zeros([BN, BM], tl.float32)
        if PACKED:
            words = tl.reshape(tl.load(from_codes + tile * STEP), [BN, WIDTH // 8, 8])
            low, high = nibbles(words, dtype, PLAIN)
            low, high = tl.reshape(low, [BN, HALF]), tl.reshape(high, [BN, HALF])
            x_low = tl.load(from_x + tile * _TILE).to(dtype)
            x_high = tl.load(from_x + tile * _TILE + HALF).to(dtype)
            part = tl.dot(low, x_low, part, input_precision="ieee")
            if G < _TILE:
                acc += part * scale[:, None]
                part = tl.dot(high, x_high, tl.zeros([BN, BM], tl.float32), input_precision="ieee")
                acc += part * tl.load(from_scales + (group + 1) * all_rows).to(tl.float32)[:, None]
            else:
                part = tl.dot(high, x_high, part, input_precision="ieee")
                acc += part * scale[:, None]
            if offsets is not None:
                shift = tl.load(offsets + group * all_rows + row).to(tl.float32)[:, None] * UNIT
                if G < _TILE:
                    acc += shift * tl.sum(x_low.to(tl.float32), 0)[None, :]
                    shift = tl.load(offsets + (group + 1) * all_rows + row).to(tl.float32)[:, None] * UNIT
                    acc += shift * tl.sum(x_high.to(tl.float32), 0)[None, :]
                else:
                    acc += shift * tl.sum(x_low.to(tl.float32) + x_high.to(tl.float32), 0)[None, :]
        else:
            value = tl.load(from_x + tile * _TILE).to(dtype)
            w = whole_bytes(tl.load(from_codes + tile * STEP), dtype, PLAIN)
            acc += tl.dot(w, value, part, input_precision="ieee") * scale[:, None]
            if offsets is not None:
                shift = tl.load(offsets + group * all_rows + row).to(tl.float32)[:, None]
                acc += shift * tl.sum(value.to(tl.float32), 0)[None, :]
        scale = following
    if PACKED:
        acc *= 1 / UNIT
    if SPLIT > 1:
        at, size, last = leave_part(acc, partials, arrivals, program, split, block, SPLIT)
        if not last:
            return
        acc = tl.zeros([BN, BM], tl.float32)
        for i in tl.static_range(SPLIT):
            acc += tl.load(at + i * size, cache_modifier=".cg")
    there = (m < rows)[None, :] & (column < columns)
    finish(acc, offset, load_sum(out, to, there, ADD), to, there, out, ACT)


def coded_linear(
    x: Tensor,
    weight: GroupedMatrix,
    plan: Plan,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    add: bool = False,
    arrivals: Tensor,
    pdl: bool = False,
) -> None:
    """out [M, N] = activation(x [M, K] weight^T + bias), or with ``add`` out += that; see ``tiled.linear``."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, (weight_rows, inner) = len(x), weight.shape
    columns = weight_rows // 2 if activation == "silu_mul" else weight_rows
    programs, blocks = triton.cdiv(weight_rows, plan.columns), triton.cdiv(rows, plan.rows)
    if plan.split > 1 and programs * blocks > len(arrivals):
        raise ValueError(f"{programs * blocks} counters of arrivals are needed")
    size = plan.split * blocks * programs * plan.columns * plan.rows if plan.split > 1 else 0
    coded_kernel[(programs, plan.split, blocks)](
        x, weight.codes, weight.scales, weight.offsets, x if bias is None else bias, out,
        torch.empty(size, dtype=torch.float32, device=x.device), arrivals,
        rows, columns, x.stride(0), out.stride(0),
        K=inner, G=weight.group, BM=plan.rows, BN=plan.columns, SPLIT=plan.split, STAGES=plan.stages,
        TILED=weight.tiled, ACT=activation or "none", BIAS=bias is not None, ADD=add,
        PLAIN=INTERPRETED or x.dtype == torch.float32,
        num_warps=plan.warps, num_stages=plan.stages, **launch_options(pdl),
    )  # fmt: skip
