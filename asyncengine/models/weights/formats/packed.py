"""Packed: what the formats of quantised checkpoints have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from asyncengine.errors import UnsupportedModelError, WeightMismatchError
from asyncengine.kernels.grouped import make_grouped, unpack, unpack_nibbles
from asyncengine.kernels.weight import DENSE, FLOAT8, PackedWeight, dense
from asyncengine.models.weights.formats.base import Dense, TensorSource
from asyncengine.models.weights.shard import WHOLE, Part

SCALES = (torch.float32, torch.float16, torch.bfloat16)
Shape = tuple[int, int]


@contextmanager
def naming(module: str) -> Iterator[None]:
    """Turn the ValueError of a weight that cannot be made into a WeightMismatchError that names its module."""
    try:
        yield
    except ValueError as e:
        raise WeightMismatchError(f"the weight of {module}: {e}") from e


def check_finite(name: str, scales: Tensor) -> Tensor:
    """Return the scales. Raises WeightMismatchError if one is infinite or no number."""
    if not scales.is_meta and not bool(scales.isfinite().all()):
        raise WeightMismatchError(f"tensor {name} holds a scale that is no finite number")
    return scales


def read_scales(
    tensors: TensorSource, name: str, *shapes: tuple[int, ...], kinds: tuple[torch.dtype, ...] = SCALES
) -> Tensor:
    """Finite scales of one of the shapes, in float32, or in float16 if they are stored so."""
    stored = tensors.raw(name, *shapes, kinds=kinds)
    return check_finite(name, stored if stored.dtype == torch.float16 else stored.float())


def groups_of(module: str, columns: int, size: int | None) -> int:
    """Number of groups in a row. Raises WeightMismatchError if the columns are no whole number of groups."""
    if size is None or size >= columns:
        return 1
    if columns % size:
        raise WeightMismatchError(f"the weight of {module} has rows of {columns}, which are no groups of {size}")
    return columns // size


def read_order(tensors: TensorSource, name: str, columns: int, groups: int, *, has_order: bool) -> Tensor | None:
    """The columns in the order of the groups that a tensor [K] gives them; None if they lie in it.

    ``has_order`` answers for tensors without elements. Raises WeightMismatchError for groups of several sizes.
    """
    if groups == 1 or tensors.is_random:
        return None
    index = tensors.raw(name, (columns,), kinds=(torch.int32, torch.int64))
    if index.is_meta:
        return torch.empty(columns, dtype=torch.int32, device="meta") if has_order else None
    if bool((index < 0).any()) or bool((index >= groups).any()):
        raise WeightMismatchError(f"tensor {name} names groups that are not in [0, {groups})")
    if set(torch.bincount(index.long(), minlength=groups).tolist()) != {columns // groups}:
        raise WeightMismatchError(f"tensor {name} has groups of other sizes than {columns // groups}")
    order = torch.argsort(index, stable=True).to(torch.int32)
    return None if torch.equal(order, torch.arange(columns, dtype=torch.int32, device=order.device)) else order


def expand_blocks(scales: Tensor, shape: Shape, block: Shape) -> tuple[Tensor, int]:
    """Scales [ceil(N / B), ceil(K / C)] of blocks [B, C] as [N, K / G], and the size G of the groups.

    G is C, or a smaller power of two where rows do not end with a block.
    """
    (rows, columns), (high, wide) = shape, block
    group = wide
    while columns % group:
        group //= 2
    by_row = scales.repeat_interleave(high, 0)[:rows]
    return by_row.repeat_interleave(wide // group, 1)[:, : columns // group].contiguous(), group


def cut(weight: PackedWeight, part: Part) -> PackedWeight:
    """The part of a rank of a packed weight. Raises UnsupportedModelError if its groups cannot be cut so."""
    if part == WHOLE:
        return weight
    by_rows, tensors = part.axis == 0 or part.ranks == 1, dict(weight.tensors)
    if not by_rows and "order" in tensors:
        raise UnsupportedModelError(f"a weight whose columns lie in an order cannot be cut for {part.ranks} ranks")
    if weight.format == FLOAT8:
        values = part.of(tensors["values"].view(torch.uint8)).contiguous().view(tensors["values"].dtype)
        scale = part.of(tensors["scale"]) if by_rows else tensors["scale"]
        return PackedWeight(FLOAT8, {"values": values, "scale": scale.contiguous()}, *values.shape)
    of_rows = part if by_rows else part._replace(axis=0, ranks=1, rank=0)
    for name, tensor in tensors.items():
        if name == "codes" or (name in ("scales", "offsets") and (by_rows or tensor.shape[1] > 1)):
            tensors[name] = part.of(tensor).contiguous()
        elif name in ("scales", "offsets"):
            tensors[name] = of_rows.of(tensor).contiguous()
    return make_grouped(
        weight.format, tensors["codes"], tensors["scales"], tensors.get("offsets"), table=tensors.get("table"),
        order=tensors.get("order"),
    )  # fmt: skip


class Packed(Dense):
    """A format whose weights are packed. A module whose weight is there in floats stays dense."""

    rounds_inputs = False
    """Float8 weights with a scale for each row take the format FLOAT8, whose products round their inputs too."""
    codes = "qweight"
    """Name of the tensor that a module has only where it is packed; "weight": its dtype tells."""

    @abstractmethod
    def read(self, tensors: TensorSource, module: str, shape: Shape) -> PackedWeight:
        """The whole weight of a module that is packed. Raises WeightMismatchError for tensors that do not fit, and
        ValueError for others."""

    def is_packed(self, tensors: TensorSource, module: str) -> bool:
        """Return whether the tensors of the module are packed."""
        if tensors.is_random:
            return True
        if self.codes != "weight" and f"{module}.{self.codes}" in tensors:
            return True
        return f"{module}.weight" in tensors and not tensors.is_float(f"{module}.weight")

    def weight(self, tensors: TensorSource, module: str, shape: Shape, part: Part, *, transposed: bool) -> PackedWeight:
        if not self.is_packed(tensors, module):
            if f"{module}.weight" not in tensors:
                tensors.sized(f"{module}.{self.codes}")  # is missing too
            return super().weight(tensors, module, shape, part, transposed=transposed)
        if transposed:
            raise UnsupportedModelError(f"{module} is stored as the transpose of a projection, which cannot be packed")
        with naming(module):
            whole = self.read(tensors, module, shape)
            if (whole.out_features, whole.in_features) != shape:
                raise ValueError(f"expected {list(shape)}, found [{whole.out_features}, {whole.in_features}]")
            return tensors.keep(replace(cut(whole, part), inputs=tensors.dtype))

    def table(self, tensors: TensorSource, module: str, shape: Shape, part: Part) -> PackedWeight:
        """Embeddings and heads are unpacked when they are read."""
        if tensors.is_random or not self.is_packed(tensors, module):
            return super().table(tensors, module, shape, part)
        with naming(module):
            whole = self.read(tensors, module, shape)
            return tensors.keep(dense(part.of(to_dense(whole, tensors.dtype)).contiguous()))


def to_dense(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K] that a packed weight stands for."""
    if weight.format == FLOAT8:
        return (weight.tensors["values"].float() * weight.tensors["scale"][:, None]).to(dtype)
    if weight.format == DENSE:
        return weight.tensors["weight"].to(dtype)
    return unpack(weight).to(dtype)


def swap_nibbles(packed: Tensor) -> Tensor:
    """Bytes whose halves have changed places."""
    return (packed >> 4) | (packed << 4)


def nibbles_of_words(words: Tensor) -> Tensor:
    """Codes uint8 [..., 8 * W] of int32 [..., W], the lowest four bits first."""
    return unpack_nibbles(bytes_of_words(words))


def bytes_of_words(words: Tensor) -> Tensor:
    """Codes uint8 [..., 4 * W] of int32 [..., W], the lowest byte first: a view, if the words are contiguous."""
    return words.contiguous().view(torch.uint8)


def codes_of_words(words: Tensor, bits: int) -> Tensor:
    """Codes of 4 or 8 bits in int32."""
    return nibbles_of_words(words) if bits == 4 else bytes_of_words(words)
