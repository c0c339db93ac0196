"""Sums of a product's rows over the GPUs that hold a model together, onto the residual and through the next norm.

Every GPU sends its rows to all others and adds all parts up in the order of the ranks, so that all get the same bits. A
program has whole rows, exchanges with the programs of its number alone, and has memory of its own there. So calls of
any size may follow each other. It uses the two halves of an inbox in turn: a program that begins a call has all parts
of the call before, and so the others have read the parts of the call before that one.

There are two ways. Few rows go as packets of 64 bits, 32 of the row beside the number of the call: a reader sees by the
packet alone that it has come, which takes one way over the link. That doubles the bytes, so many rows go as they are,
some at a time, and a flag behind them; the next rows are on their way while a program adds up the last ones.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from asyncengine.kernels.cuda.comm.peers import (
    FEW,
    FLAG_STRIDE,
    FLAGS,
    FLAGS_OF_RANK,
    INBOX,
    MANY,
    PACKETS,
    PATIENCE,
    RELEASED,
    await_flag,
    peer,
    set_flag,
    still_waits,
)
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import start_next, wait
from asyncengine.kernels.cuda.rows.norms import load_gains, store_sum

CHUNK = 2
"""Rows that a program sends between two flags."""
MAX_CHUNKS = 64
"""Flags of a program's call at most: they number calls by this."""


@triton.jit
def _next(call):
    """The number of the next call, of the other parity. It is never 0, which packets have before the first one."""
    return tl.where(call == -1, 2, call + 1)


@triton.jit
def _receive(packets, inside, call, together, addresses, RANKS: tl.constexpr):
    """Load packets as soon as all have the number of this call; any packets if nobody is to wait any more."""
    released = peer(addresses, RELEASED, 0, RANKS, tl.int32)
    waits = tl.load(together) != 0
    looks = 0
    found = tl.load(packets, mask=inside, other=0, volatile=True)
    missing = tl.max((((found >> 32).to(tl.int32) != call) & inside).to(tl.int32), 0)
    while (missing > 0) & waits:
        found = tl.load(packets, mask=inside, other=0, volatile=True)
        missing = tl.max((((found >> 32).to(tl.int32) != call) & inside).to(tl.int32), 0)
        looks += 1
        if looks % PATIENCE == 0:
            waits = still_waits(released, together)
    return found


@triton.jit
def _unpack(found, dtype: tl.constexpr):
    """The numbers of packets, float32: two of 16 bits in each, or one of 32."""
    if dtype.primitive_bitwidth == 32:
        numbers = found.to(tl.int32).to(tl.float32, bitcast=True)
    else:
        low, high = found.to(tl.int16), (found >> 16).to(tl.int16)
        numbers = tl.interleave(low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)).to(tl.float32)
    return numbers


@kernel
def sum_few_kernel(
    product, onto, weight, bias, normed, addresses, packets, calls, together, rows, onto_stride, normed_stride, room,
    eps, RANK: tl.constexpr, RANKS: tl.constexpr, ONTO: tl.constexpr, NORM: tl.constexpr, CENTER: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows in packets. ``room``: packets that a program may get from a rank."""
    start_next(PDL)
    dtype: tl.constexpr = product.dtype.element_ty
    EACH: tl.constexpr = 32 // dtype.primitive_bitwidth
    PACKETS_OF_ROW: tl.constexpr = WIDTH // EACH
    block, blocks = tl.program_id(0), tl.num_programs(0)
    column, place = tl.arange(0, TILE), tl.arange(0, TILE // EACH)
    inside, there = column < WIDTH, place < PACKETS_OF_ROW
    scale, shift = load_gains(weight, bias, column, inside, NORM, CENTER)
    wait(PDL)
    call = _next(tl.load(calls + block))
    half = call & 1
    own = ((half * RANKS + RANK) * FEW + block).to(tl.int64) * room
    words = product.to(tl.pointer_type(tl.int32))
    count = tl.cdiv(rows - block, blocks)
    for i in range(count):
        row = (block + i * blocks).to(tl.int64)
        data = tl.load(words + row * PACKETS_OF_ROW + place, mask=there, other=0)
        packet = (call.to(tl.int64) << 32) | (data.to(tl.int64) & 0xFFFFFFFF)
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                to = peer(addresses, PACKETS, rank, RANKS, tl.int64) + own + i * PACKETS_OF_ROW
                tl.store(to + place, packet, mask=there)
    for i in range(count):
        row = (block + i * blocks).to(tl.int64)
        total = tl.zeros([TILE], tl.float32)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                total += tl.load(product + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
            else:
                came = packets + ((half * RANKS + rank) * FEW + block).to(tl.int64) * room + i * PACKETS_OF_ROW
                total += _unpack(_receive(came + place, there, call, together, addresses, RANKS), dtype)
        store_sum(
            total, onto, onto_stride, normed, normed_stride, row, column, inside, scale, shift, eps, WIDTH, ONTO, NORM,
            CENTER,
        )  # fmt: skip
    tl.store(calls + block, call)


@kernel
def sum_many_kernel(
    product, onto, weight, bias, normed, addresses, inbox, flags, calls, together, rows, onto_stride, normed_stride,
    room, eps, RANK: tl.constexpr, RANKS: tl.constexpr, ONTO: tl.constexpr, NORM: tl.constexpr, CENTER: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, MAX_CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows as they are. ``room``: numbers that a program may get from a rank."""
    start_next(PDL)
    dtype: tl.constexpr = product.dtype.element_ty
    block, blocks = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, TILE)
    inside = column < WIDTH
    scale, shift = load_gains(weight, bias, column, inside, NORM, CENTER)
    wait(PDL)
    call = _next(tl.load(calls + block))
    half = call & 1
    own = ((half * RANKS + RANK) * MANY + block).to(tl.int64) * room
    chunks = tl.cdiv(tl.cdiv(rows - block, blocks), CHUNK)
    for chunk in range(chunks + 1):
        if chunk < chunks:
            for j in tl.static_range(CHUNK):
                i = chunk * CHUNK + j
                row = (block + i * blocks).to(tl.int64)
                sent = inside & (row < rows)
                data = tl.load(product + row * WIDTH + column, mask=sent)
                for rank in tl.static_range(RANKS):
                    if rank != RANK:
                        to = peer(addresses, INBOX, rank, RANKS, dtype) + own + i * WIDTH
                        tl.store(to + column, data, mask=sent)
            for rank in tl.static_range(RANKS):
                if rank != RANK:
                    flag = peer(addresses, FLAGS, rank, RANKS, tl.int32) + (RANK * FLAGS_OF_RANK + block) * FLAG_STRIDE
                    set_flag(flag, call * MAX_CHUNKS + chunk + 1)
        if chunk > 0:
            for rank in tl.static_range(RANKS):
                if rank != RANK:
                    flag = flags + (rank * FLAGS_OF_RANK + block) * FLAG_STRIDE
                    await_flag(flag, call * MAX_CHUNKS + chunk, together, addresses, RANKS)
            tl.debug_barrier()
            for j in tl.static_range(CHUNK):
                i = (chunk - 1) * CHUNK + j
                row = (block + i * blocks).to(tl.int64)
                if row < rows:
                    total = tl.zeros([TILE], tl.float32)
                    for rank in tl.static_range(RANKS):
                        if rank == RANK:
                            part = tl.load(product + row * WIDTH + column, mask=inside, other=0.0)
                        else:
                            came = inbox + ((half * RANKS + rank) * MANY + block).to(tl.int64) * room + i * WIDTH
                            part = tl.load(came + column, mask=inside, other=0.0, cache_modifier=".cg")
                        total += part.to(tl.float32)
                    store_sum(
                        total, onto, onto_stride, normed, normed_stride, row, column, inside, scale, shift, eps, WIDTH,
                        ONTO, NORM, CENTER,
                    )  # fmt: skip
    tl.store(calls + block, call)
