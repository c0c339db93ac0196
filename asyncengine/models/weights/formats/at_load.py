"""Formats in which a dense checkpoint's weights are wanted: they are packed when they are read."""

from __future__ import annotations

from asyncengine.kernels.float8 import Quantization, pack_float8
from asyncengine.kernels.weight import FLOAT8, PackedWeight
from asyncengine.models.weights.formats.base import Dense, TensorSource
from asyncengine.models.weights.shard import Part


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


_AT_LOAD: dict[Quantization, Dense] = {"none": Dense(), "fp8": Float8AtLoad()}


def at_load(quantization: Quantization) -> Dense:
    """The format in which a dense checkpoint's weights are wanted."""
    return _AT_LOAD[quantization]
