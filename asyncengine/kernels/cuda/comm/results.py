"""Results of the GPUs that hold a model together: parts of the logits for the first one, and its tokens for all.

Both follow sums of the same step. So a GPU that sends has got what the others sent for these sums, and they have read
what the step before brought.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton.language as tl

from asyncengine.kernels.cuda.comm.peers import (
    ENDS,
    FLAG_STRIDE,
    FLAGS,
    FLAGS_OF_RANK,
    GATHER,
    GATHERED,
    MANY,
    TOKENS,
    await_flag,
    peer,
    set_flag,
)
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import start_next, wait


@kernel
def gather_kernel(
    part, addresses, flags, calls, together, rows, columns, stride,
    OFFSET: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store part [rows, columns], less OFFSET, beside those of the other ranks at the first one.

    Grid: at most GATHER programs, which take tiles in turn. Rank 0 ends when all parts are there.
    """
    start_next(PDL)
    block, blocks = tl.program_id(0), tl.num_programs(0)
    tiles = tl.cdiv(columns, TILE)
    wait(PDL)
    call = tl.load(calls + block) + 1
    to = peer(addresses, GATHERED, 0, RANKS, part.dtype.element_ty)
    for i in range(block, rows * tiles, blocks):
        row, column = (i // tiles).to(tl.int64), i % tiles * TILE + tl.arange(0, TILE)
        data = tl.load(part + row * stride + column, mask=column < columns)
        if OFFSET > 0:
            data -= OFFSET
        tl.store(to + (row * RANKS + RANK) * columns + column, data, mask=column < columns)
    if RANK > 0:
        own = peer(addresses, FLAGS, 0, RANKS, tl.int32) + (RANK * FLAGS_OF_RANK + MANY + block) * FLAG_STRIDE
        set_flag(own, call)
    else:
        for rank in tl.static_range(1, RANKS):
            await_flag(flags + (rank * FLAGS_OF_RANK + MANY + block) * FLAG_STRIDE, call, together, addresses, RANKS)
    tl.store(calls + block, call)


@kernel
def share_kernel(
    tokens, ends, addresses, flags, calls, together, count,
    RANK: tl.constexpr, RANKS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rank 0 writes to the slots of the others, which have read theirs: they have exchanged products of this step."""
    wait(PDL)
    call = tl.load(calls) + 1
    if RANK == 0:
        for rank in tl.static_range(1, RANKS):
            to_tokens = peer(addresses, TOKENS, rank, RANKS, tl.int32)
            to_ends = peer(addresses, ENDS, rank, RANKS, tl.int32)
            for first in range(0, count, TILE):
                at = first + tl.arange(0, TILE)
                tl.store(to_tokens + at, tl.load(tokens + at, mask=at < count), mask=at < count)
                tl.store(to_ends + at, tl.load(ends + at, mask=at < count), mask=at < count)
        for rank in tl.static_range(1, RANKS):
            flag = peer(addresses, FLAGS, rank, RANKS, tl.int32) + (MANY + GATHER) * FLAG_STRIDE
            set_flag(flag, call)
    else:
        await_flag(flags + (MANY + GATHER) * FLAG_STRIDE, call, together, addresses, RANKS)
    tl.store(calls, call)
