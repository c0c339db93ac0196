"""Block tables in ingest: entries that a row brings, the places of its tokens, and both for groups with a window."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def take_blocks(table, delta_blocks, delta_first, delta_count, CHUNK: tl.constexpr):
    """Entries of a slot's table that are new, from delta_first on."""
    for start in range(0, delta_count, CHUNK):
        entry = start + tl.arange(0, CHUNK)
        fresh = entry < delta_count
        tl.store(table + delta_first + entry, tl.load(delta_blocks + entry, mask=fresh), mask=fresh)


@triton.jit
def find_slots(table, delta_blocks, delta_first, delta_count, position, valid, BLOCK_SIZE: tl.constexpr):
    """The places of positions in the cache, int64.

    Blocks just written to the table are taken from their source, so that no barrier is needed between the two.
    """
    entry = position // BLOCK_SIZE
    fresh = (entry >= delta_first) & (entry < delta_first + delta_count)
    block = tl.load(table + entry, mask=valid & (fresh == 0), other=0)
    block = tl.where(fresh, tl.load(delta_blocks + entry - delta_first, mask=valid & fresh, other=0), block)
    return block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def take_windows(
    tables, table_stride, slots, slot_stride, delta_blocks, delta_first, delta_count, context_len, num_tokens, inert,
    WINDOWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The same for each window group: their blocks follow those of the full group's table.

    tables are the slot's, of the first window group, and slots those of the row's first token.
    """
    for group in range(WINDOWS):
        table, blocks = tables + group * table_stride, delta_blocks + (1 + group) * delta_count
        take_blocks(table, blocks, delta_first, delta_count, CHUNK)
        for start in range(0, num_tokens, CHUNK):
            i = start + tl.arange(0, CHUNK)
            valid = i < num_tokens
            place = find_slots(table, blocks, delta_first, delta_count, context_len + i, valid, BLOCK_SIZE)
            tl.store(slots + group * slot_stride + i, tl.where(inert, -1, place), mask=valid)


@triton.jit
def clear_windows(slots, slot_stride, token, unused, WINDOWS: tl.constexpr):
    """Tokens that a step does not use have no place in any window group."""
    for group in range(WINDOWS):
        tl.store(slots + group * slot_stride + token, -1, mask=unused)
