"""The kernel that writes the items of fixed splits (see work/lists.py)."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from asyncengine.kernels.cuda.attention.work.items import kv_tiles, store_items, store_teams
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import wait


@triton.jit
def _count_items(
    row_query_len, row_context_len, num_rows, row, window, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Items of the rows before ``row``, then of all."""
    items_before, items = 0, 0
    for first in range(0, num_rows, ROWS):
        r = first + tl.arange(0, ROWS)
        length = tl.load(row_query_len + r, mask=r < num_rows, other=0)
        context = tl.load(row_context_len + r, mask=r < num_rows, other=0)
        units = tl.cdiv(length, QUERIES)
        row_items = tl.zeros([ROWS], tl.int32)
        for index in range(0, tl.max(units, 0)):
            begin, end = kv_tiles(context, length, index, window, QUERIES, KEYS)
            row_items += tl.where(index < units, tl.cdiv(end, SPLIT) - begin // SPLIT, 0)
        items_before += tl.sum(tl.where(r < row, row_items, 0), 0)
        items += tl.sum(row_items, 0)
    return items_before, items


@kernel(do_not_specialize=["num_rows", "window"])
def build_split_kernel(
    row_slot,
    row_query_start,
    row_query_len,
    row_context_len,
    items,
    team_items,
    num_rows,
    window,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    TEAMS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the items of rows of any length. There is one program per row, which counts the items before its own for
    itself."""
    wait(PDL)
    row = tl.program_id(0)
    piece = tl.arange(0, WIDTH)
    length = tl.load(row_query_len + row)
    item, all_items = _count_items(row_query_len, row_context_len, num_rows, row, window, QUERIES, KEYS, SPLIT, ROWS)
    if row == 0:
        store_teams(team_items, piece, piece, all_items, piece < TEAMS, piece < TEAMS)
    slot = tl.load(row_slot + row)
    query = tl.load(row_query_start + row)
    context = tl.load(row_context_len + row)
    for index in range(0, tl.cdiv(length, QUERIES)):
        begin, end = kv_tiles(context, length, index, window, QUERIES, KEYS)
        first_split = begin // SPLIT
        pieces = tl.cdiv(end, SPLIT) - first_split
        low = tl.maximum((first_split + piece) * SPLIT, begin)
        high = tl.minimum((first_split + piece + 1) * SPLIT, end)
        to, count = item + piece, tl.minimum(length - index * QUERIES, QUERIES)
        store_items(
            items, team_items, to, to, (piece < pieces) & (to < TEAMS), slot, query + index * QUERIES, count,
            context + index * QUERIES, low, high, item, piece, pieces,
        )  # fmt: skip
        item += pieces
