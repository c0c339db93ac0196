"""The part of a head's state that a program holds in registers."""

from __future__ import annotations

import triton

_NARROW, _WIDE = (8, 1), (32, 4)
"""Numbers of a head for one program, and its warps: of a size of 128, 32 numbers of the state a thread. The narrow one
sums within its warp, as is best for the tokens of a prompt one after another."""
_ENOUGH = 256
"""Wide programs that fill a card. Each reads, and convolves, the keys of its head once more."""


def head_tile(heads: int, dim: int, *, single: bool) -> tuple[int, int]:
    """Numbers and warps of a program for so many heads of ``dim`` numbers, those of all rows together.

    ``single``: each row has one token.
    """
    tile, warps = _WIDE if single and heads * triton.cdiv(dim, _WIDE[0]) >= _ENOUGH else _NARROW
    return min(tile, triton.next_power_of_2(dim)), warps
