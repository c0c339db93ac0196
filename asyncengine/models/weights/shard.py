"""The part of a tensor that a rank takes, where several ranks hold a model together.

A weight [N, K] that is cut by rows gives each rank some of its outputs; one that is cut by columns reads some of the
inputs, and the ranks' products are to be added up. For one rank every part is all of its tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from asyncengine.errors import UnsupportedModelError

Cut = Literal["whole", "rows", "columns"]
"""The direction in which ranks share a weight."""


class Part(NamedTuple):
    """A range of a tensor's rows or columns."""

    axis: int = 0
    rank: int = 0
    ranks: int = 1
    """Number of parts of one size, one for each rank."""
    blocks: int = 1
    """Number of matrices that lie one after another along the axis. Each is cut by itself."""
    rows: tuple[int, int] | None = None
    """First row of a projection and the row behind its last, in a tensor that holds several one below another. The part
    is taken of this projection alone."""
    order: Tensor | None = None
    """int64 [D], the rows of each head that are taken, in their order; None: all rows stay as they are."""
    head_rows: int = 0
    """Rows of a head; 0: D."""

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a tensor that is there as a whole: a view, or a copy where there are several blocks or an order.

        Raises UnsupportedModelError if the axis cannot be cut into as many parts.
        """
        if self.rows is not None:
            tensor = tensor[self.rows[0] : self.rows[1]]
        if self.ranks > 1:
            tensor = self._cut(tensor)
        if self.order is not None:
            heads = torch.arange(0, len(tensor), self.head_rows or len(self.order), device=tensor.device)
            tensor = tensor[(heads[:, None] + self.order.to(tensor.device)).flatten()]
        return tensor

    def _cut(self, tensor: Tensor) -> Tensor:
        size = tensor.shape[self.axis]
        if size % (self.ranks * self.blocks):
            raise UnsupportedModelError(
                f"a tensor {list(tensor.shape)} cannot be cut for {self.ranks} ranks along its axis {self.axis}"
            )
        own = size // (self.ranks * self.blocks)
        starts = (own * (block * self.ranks + self.rank) for block in range(self.blocks))
        parts = [tensor.narrow(self.axis, start, own) for start in starts]
        return parts[0] if self.blocks == 1 else torch.cat(parts, self.axis)


WHOLE = Part()


@dataclass(frozen=True, slots=True)
class Shard:
    """One of the ranks that hold a model together."""

    rank: int = 0
    ranks: int = 1

    def part(self, cut: Cut, blocks: int = 1) -> Part:
        """The part of a tensor that is cut this way; see ``Part.blocks``."""
        if cut == "whole":
            return WHOLE
        return Part(0 if cut == "rows" else 1, self.rank, self.ranks, blocks)
