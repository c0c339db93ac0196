"""Formats in which a dense checkpoint's weights are wanted: they are packed when they are read."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import torch

from asyncengine.kernels.float8 import Quantization, pack_float8
from asyncengine.kernels.grouped import round_to_groups, squared_error
from asyncengine.kernels.weight import FLOAT8, FLOAT8_GROUPS, INT4, INT8, PackedWeight
from asyncengine.models.weights.formats.base import Dense, TensorSource
from asyncengine.models.weights.shard import Part

logger = logging.getLogger(__name__)

_LAYER = re.compile(r".*?\.\d+(?=\.)")
"""The part of a module's name that names its layer."""


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


class GroupedAtLoad(Dense):
    """A dense checkpoint whose projections become INT4 or INT8 when they are read. Embedding and head stay dense."""

    def __init__(self, form: str) -> None:
        self.packed = form
        self._errors: dict[str, list[float]] = {}
        """Sums of squares by layer: of what rounding changes, and of the weights."""

    def weight(
        self, tensors: TensorSource, module: str, shape: tuple[int, int], part: Part, *, transposed: bool
    ) -> PackedWeight:
        before = tensors.owned_bytes
        given = super().weight(tensors, module, shape, part, transposed=transposed).tensors["weight"]
        packed = round_to_groups(self.packed, given)
        if not given.is_meta:
            layer = match[0] if (match := _LAYER.match(module)) else module
            sums = self._errors.setdefault(layer, [0.0, 0.0])
            sums[0] += squared_error(packed, given)
            sums[1] += torch.linalg.vector_norm(given, dtype=torch.float32).item() ** 2
        tensors.release(given, before)
        return tensors.keep(replace(packed, inputs=tensors.dtype))

    def errors(self) -> dict[str, float]:
        """The relative error of the weights of each layer: the norm of what rounding changed, in norms of theirs."""
        return {layer: (change / (size or 1.0)) ** 0.5 for layer, (change, size) in self._errors.items()}

    def log_errors(self) -> None:
        for layer, error in self.errors().items():
            logger.info("%s in %s: the weights' relative error is %.2f%%", layer, self.packed, 100 * error)


HEAD_FORMS: dict[str, str | None] = {"none": None, "int8": INT8, "fp8": FLOAT8_GROUPS}
"""Formats of heads by the values of head_quantization."""


def at_load(quantization: Quantization) -> Dense:
    """The format in which a dense checkpoint's weights are wanted."""
    match quantization:
        case "fp8":
            return Float8AtLoad()
        case "int8" | "int4":
            return GroupedAtLoad(INT4 if quantization == "int4" else INT8)
    return Dense()
