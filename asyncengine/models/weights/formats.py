"""Formats of checkpoints: one class a format, which makes packed weights of the tensors of a module.

A format reads the tensors that it needs by the name of the module ("model.layers.0.mlp.up_proj"), checks their shapes,
and takes the part of a rank.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from asyncengine.kernels.float8 import Quantization, pack_float8
from asyncengine.kernels.weight import DENSE, FLOAT8, PackedWeight, dense
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

    def get_transposed(self, name: str, *shape: int, part: Part = WHOLE) -> Tensor:
        """A matrix that is stored as the transpose of ``shape``: a transposed view, to be copied once."""


class WeightFormat(Protocol):
    """A way in which a checkpoint stores its matrices."""

    packed: str
    """Format of the packed weights of projections."""

    def weight(
        self, tensors: TensorSource, module: str, shape: tuple[int, int], part: Part, *, transposed: bool
    ) -> PackedWeight:
        """The part of a projection's weight [N, K], which a dense checkpoint may hold as [K, N]."""

    def table(self, tensors: TensorSource, module: str, shape: tuple[int, int], part: Part) -> PackedWeight:
        """The part of an embedding or of a head [V, K]."""


class Dense:
    """Each matrix is one tensor of floats, named MODULE.weight."""

    packed = DENSE

    def weight(
        self, tensors: TensorSource, module: str, shape: tuple[int, int], part: Part, *, transposed: bool
    ) -> PackedWeight:
        get = tensors.get_transposed if transposed else tensors.get
        return dense(get(f"{module}.weight", *shape, part=part))

    def table(self, tensors: TensorSource, module: str, shape: tuple[int, int], part: Part) -> PackedWeight:
        return dense(tensors.get(f"{module}.weight", *shape, part=part))


class Float8AtLoad(Dense):
    """A dense checkpoint whose projections become float8 when they are read. Embedding and head stay dense."""

    packed = FLOAT8

    def weight(
        self, tensors: TensorSource, module: str, shape: tuple[int, int], part: Part, *, transposed: bool
    ) -> PackedWeight:
        given = super().weight(tensors, module, shape, part, transposed=transposed)
        packed = pack_float8(given.tensors["weight"])
        tensors.owned_bytes -= given.nbytes - packed.nbytes
        return packed


_AT_LOAD: dict[Quantization, WeightFormat] = {"none": Dense(), "fp8": Float8AtLoad()}


def choose_format(quantization: Quantization) -> WeightFormat:
    """The format in which a dense checkpoint's weights are wanted."""
    return _AT_LOAD[quantization]
