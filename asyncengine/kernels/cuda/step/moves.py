"""Blocks of the KV cache gathered side by side for one copy to the host, and scattered after one from there."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.launch.compiling import kernel

_PROGRAMS = 8
"""Programs for each plane. A step's kernels run beside them."""


def move_blocks(wanted: Tensor, planes: Tensor, gathered: Tensor, *, scatter: bool) -> None:
    """Copy blocks from the cache's planes to where they lie side by side, or with ``scatter`` back.

    wanted is int32, which the device can read: how many blocks, then their numbers. planes is int32
    [P, num_blocks, words]; gathered is int32 [at least that many blocks, P * words], the last dimension contiguous.
    """
    count, _, words = planes.shape
    _move_blocks[(_PROGRAMS, count)](
        wanted, planes, gathered, planes.shape[1], words, gathered.stride(0), SCATTER=scatter, CHUNK=1024, num_warps=4
    )


@kernel(do_not_specialize=["num_blocks"])
def _move_blocks(wanted, planes, gathered, num_blocks, words, stride, SCATTER: tl.constexpr, CHUNK: tl.constexpr):
    plane = tl.program_id(1).to(tl.int64)
    for i in range(tl.program_id(0), tl.load(wanted), tl.num_programs(0)):
        block = planes + (plane * num_blocks + tl.load(wanted + 1 + i)) * words
        place = gathered + plane * words + i * stride
        for start in range(0, words, CHUNK):
            word = start + tl.arange(0, CHUNK)
            if SCATTER:
                tl.store(block + word, tl.load(place + word, mask=word < words), mask=word < words)
            else:
                tl.store(place + word, tl.load(block + word, mask=word < words), mask=word < words)
