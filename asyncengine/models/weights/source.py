"""Source of a model's weights: the model asks for each by name and shape."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """A checkpoint, or something that stands in for one."""

    def __contains__(self, name: str) -> bool:
        """Return whether there is a tensor of that name."""

    def equal(self, name: str, other: str) -> bool:
        """Return whether two tensors that are there have the same elements."""

    def get(self, name: str, *shape: int) -> Tensor:
        """The tensor in the model's dtype, contiguous.

        Raises MissingWeightError if there is none, WeightMismatchError if its shape is another.
        """

    def get_transposed(self, name: str, *shape: int) -> Tensor:
        """A matrix that the checkpoint holds as the transpose of ``shape``: a transposed view, to be copied once."""
