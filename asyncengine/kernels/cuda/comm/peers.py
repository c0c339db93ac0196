"""The memory that GPUs show each other: addresses of the others' part, and waits for a flag."""
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

INBOX, PACKETS, FLAGS, GATHERED, TOKENS, ENDS, RELEASED = (tl.constexpr(row) for row in range(7))
"""Rows of ``Exchange.addresses``."""
ADDRESS_ROWS = 7
FEW, MANY, GATHER = tl.constexpr(128), tl.constexpr(256), tl.constexpr(128)
"""Programs of the largest calls: of sums of few rows, of sums of many, and of logits that are gathered."""
FLAGS_OF_RANK = tl.constexpr(MANY.value + GATHER.value + 1)
"""Flags that a GPU has for what a rank sends: of sums of many rows, of parts of logits, and of tokens."""
FLAG_STRIDE = tl.constexpr(32)
"""Words from one flag to the next, each in a cache line of its own."""
PATIENCE = tl.constexpr(1 << 16)
"""Looks at a flag between two looks at the host's word, some 50 ms. When all programs look at it, an answer takes a
millisecond, in which their peers wait: with a patience that is shorter than that, GPUs keep each other waiting."""


@triton.jit
def peer(addresses: tl.tensor, row: tl.constexpr, rank: tl.constexpr, ranks: tl.constexpr, dtype: tl.constexpr):
    """Address that a row of the table holds for a rank, as a pointer."""
    return tl.multiple_of(tl.load(addresses + row * ranks + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit
def set_flag(flag, value):
    """Publish what all threads of the program have written. Another GPU may have the flag."""
    tl.debug_barrier()
    tl.atomic_xchg(flag, value, sem="release", scope="sys")


@triton.jit
def still_waits(released, together):
    """Ask the host whether to wait on. After a no, no later wait of this GPU looks for as long."""
    waits = tl.load(released, volatile=True) == 0
    if not waits:
        tl.store(together, 0)
    return waits


@triton.jit
def await_flag(flag, value, together, addresses, RANKS: tl.constexpr):
    """Wait until a flag has come to this value, or nobody is to wait any more. Values may wrap around."""
    released = peer(addresses, RELEASED, 0, RANKS, tl.int32)
    waits = tl.load(together) != 0
    looks = 0
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while (seen - value < 0) & waits:
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        looks += 1
        if looks % PATIENCE == 0:
            waits = still_waits(released, together)
