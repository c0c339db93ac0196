"""The tensors of a checkpoint, and what a format makes of them.

A format reads the tensors that it needs by the name of the module ("model.layers.0.mlp.up_proj"), checks their shapes,
and takes the part of a rank.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from asyncengine.kernels.weight import DENSE, PackedWeight, dense
from asyncengine.models.weights.shard import WHOLE, Part


class TensorSource(Protocol):
    """The tensors of a checkpoint by name, or something that stands in for one."""

    owned_bytes: int
    """Bytes of the tensors that are no mapped file."""

    @property
    def rotates_neighbours(self) -> bool:
        """Return whether queries and keys lie in an order in which neighbours are rotated together, whatever their
        family's is."""

    def __contains__(self, name: str) -> bool:
        """Return whether there is a tensor of that name."""

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype, that of the tensors that ``get`` returns."""

    def stored(self) -> dict[str, Tensor] | None:
        """All tensors in host memory, as a checkpoint stores them; None for random ones."""

    def equal(self, name: str, other: str) -> bool:
        """Return whether two tensors that are there have the same elements."""

    def get(self, name: str, *shape: int, part: Part = WHOLE) -> Tensor:
        """A part of the tensor of this shape, in the model's dtype, contiguous.

        Raises MissingWeightError if there is none, WeightMismatchError if its shape is another.
        """

    def float32(self, name: str, count: int) -> Tensor:
        """A vector [count] in float32. Raises as ``get`` does."""

    def uint8(self, name: str, *shape: int) -> Tensor:
        """A tensor of bytes of this shape, for weights that are packed. Raises as ``get`` does."""

    @property
    def is_random(self) -> bool:
        """Return whether random numbers stand in for a checkpoint: then every tensor is there."""

    def is_float(self, name: str) -> bool:
        """Return whether there is a tensor of that name whose numbers are floats of 16 bits or more."""

    def raw(
        self,
        name: str,
        *shapes: tuple[int, ...],
        kinds: tuple[torch.dtype, ...],
        parameters: int = 0,
        elements: bool = False,
    ) -> Tensor:
        """A whole tensor as it is stored, of one of the shapes and dtypes, for as many parameters of the model.

        On the device "meta" it holds nothing, unless its ``elements`` are asked for. Raises as ``get`` does.
        """

    def sized(self, name: str) -> int | None:
        """Number of elements of a tensor; None for random ones. Raises MissingWeightError if there is none."""

    def release(self, given: Tensor, owned: int) -> None:
        """Take back the count of a tensor of ``get``, which is dropped; ``owned`` are the ``owned_bytes`` before it."""

    def keep(self, weight: PackedWeight) -> PackedWeight:
        """Count the memory of a weight that is made of ``raw`` tensors, and return it."""

    def get_transposed(self, name: str, *shape: int, part: Part = WHOLE) -> Tensor:
        """A matrix that is stored as the transpose of ``shape``: a transposed view, to be copied once."""


class WeightFormat(Protocol):
    """A way in which a checkpoint stores its matrices."""

    def weight(
        self, tensors: TensorSource, module: str, shape: tuple[int, int], part: Part, *, transposed: bool
    ) -> PackedWeight:
        """The part of a projection's weight [N, K], which a dense checkpoint may hold as [K, N]."""

    def table(self, tensors: TensorSource, module: str, shape: tuple[int, int], part: Part) -> PackedWeight:
        """The part of an embedding or of a head [V, K]."""


class Dense:
    """Each matrix is one tensor of floats, named MODULE.weight."""

    packed = DENSE
    """Format of the packed weights of projections."""

    def weight(
        self, tensors: TensorSource, module: str, shape: tuple[int, int], part: Part, *, transposed: bool
    ) -> PackedWeight:
        get = tensors.get_transposed if transposed else tensors.get
        return dense(get(f"{module}.weight", *shape, part=part))

    def table(self, tensors: TensorSource, module: str, shape: tuple[int, int], part: Part) -> PackedWeight:
        return dense(tensors.get(f"{module}.weight", *shape, part=part))
