"""The formats that there are on the CPU, by the names of packed weights."""

from __future__ import annotations

from collections.abc import Sequence

from asyncengine.kernels.cpu.linear.formats.base import Format
from asyncengine.kernels.cpu.linear.formats.blocks import Blocks
from asyncengine.kernels.cpu.linear.formats.dense import Dense
from asyncengine.kernels.cpu.linear.formats.float8 import Float8
from asyncengine.kernels.cpu.linear.formats.grouped import Grouped
from asyncengine.kernels.weight import BLOCKS, DENSE, FLOAT8, GROUPED, PackedWeight, form_in

FORMATS: dict[str, Format] = {DENSE: Dense(), FLOAT8: Float8(), **dict.fromkeys(GROUPED, Grouped()), BLOCKS: Blocks()}


def format_of(weights: Sequence[PackedWeight]) -> Format:
    """The format of weights that lie side by side. Raises ValueError for several, or for one that is not known."""
    return form_in(FORMATS, weights)
