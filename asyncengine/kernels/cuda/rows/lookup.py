"""Rows of an embedding on the GPU, by token and by position."""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, wait
from asyncengine.kernels.cuda.rows.tensors import ELEMENTWISE_TILE, check


@kernel
def _embed_kernel(
    ids: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    position_table: tl.tensor,
    out: tl.tensor,
    POSITIONS: tl.constexpr,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < WIDTH
    value = tl.load(table + tl.load(ids + token).to(tl.int64) * WIDTH + column, mask=inside)
    if SCALE != 1.0:
        value = (value.to(tl.float32) * SCALE).to(value.dtype)
    if POSITIONS:
        row = tl.load(position_table + tl.load(positions + token).to(tl.int64) * WIDTH + column, mask=inside)
        value = (value.to(tl.float32) + row.to(tl.float32)).to(value.dtype)
    tl.store(out + token * WIDTH + column, value, mask=inside)


def embed(
    ids: Tensor,
    table: Tensor,
    positions: Tensor,
    position_table: Tensor | None,
    *,
    scale: float = 1.0,
    pdl: bool = False,
) -> Tensor:
    """Rows ids int32 [T] of table [V, H] times scale, plus rows positions int32 [T] of position_table [P, H]: [T, H].

    Ids and positions are not checked.
    """
    tokens, width = len(ids), table.shape[1]
    for name, rows in (("table", table), ("position_table", position_table)):
        if rows is not None:
            check(rows, table.dtype, (len(rows), width), name)
    check(ids, torch.int32, (tokens,), "ids")
    check(positions, torch.int32, (tokens,), "positions")
    out = torch.empty((tokens, width), dtype=table.dtype, device=table.device)
    _embed_kernel[(tokens, triton.cdiv(width, ELEMENTWISE_TILE))](
        ids,
        positions,
        table,
        table if position_table is None else position_table,
        out,
        POSITIONS=position_table is not None,
        SCALE=scale,
        WIDTH=width,
        TILE=ELEMENTWISE_TILE,
        num_warps=4,
        **launch_options(pdl),
    )
    return out
