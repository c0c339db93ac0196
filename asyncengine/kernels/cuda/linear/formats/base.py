"""Format: the part of a projection that depends on how its weights are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.linear.grouped import CodedRows, GroupedMatrix
from asyncengine.kernels.cuda.linear.plan import Plan, Site, WeightKind
from asyncengine.kernels.cuda.rows.activation import activate_rows
from asyncengine.kernels.cuda.rows.norms import norm_rows
from asyncengine.kernels.float8 import Quantized
from asyncengine.kernels.ops import Activation, Norm
from asyncengine.kernels.weight import PackedWeight

Matrix: TypeAlias = Tensor | Quantized | GroupedMatrix | CodedRows
"""Rows of a weight or of its input, in the form that a kernel multiplies. Formats alone tell them apart."""


class Packed(NamedTuple):
    """Weights that share their input, as one matrix."""

    weight: Matrix
    """[N, K], with rows of zeros after the out_features that there are"""
    bias: Tensor | None
    """[N]"""
    out_features: int


class Format(Protocol):
    """Operations on weights of one format, and on the inputs of their products."""

    bits: Mapping[WeightKind, int]
    """Names of the format in a site, and the bits that an element of the weight takes."""
    needs: str
    """Words for the cards that can multiply the weights, for a message."""
    prepares_norms: bool
    """A product that adds to the residual can prepare the norm that reads the sum (see residual.py)."""
    own_rows: bool
    """Rows for a product are made by a kernel of the format, ``make_rows``, with the norm before the product."""

    def runs_on(self, gpu: Gpu) -> bool:
        """Return whether the card can multiply such weights."""

    def pack(self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None]) -> Packed:
        """Join weights. Several are copied."""

    def make(self, weight: Tensor) -> Matrix:
        """Store a weight [N, K] in bfloat16 in the format, to try kernels with."""

    def first_rows(self, weight: Matrix, count: int) -> Matrix:
        """Return a matrix without the padding behind its first rows."""

    def kind(self, dtype: torch.dtype) -> WeightKind:
        """Name the weights in a Site; ``dtype`` is the model's."""

    def fits(self, plan: Plan, x: Matrix, norm: Norm | None, index: Tensor | None) -> bool:
        """Return whether a kernel of few rows (tiled.py) can do all that in one launch."""

    def result_dtype(self, x: Matrix) -> torch.dtype:
        """The dtype of a product of x, where nobody asks for another."""

    def make_rows(self, x: Tensor, norm: Norm | None = None, *, pdl: bool) -> Matrix:
        """The rows of x, after a norm, as a product reads them whose kernel does not do that itself."""

    def operand(self, x: Matrix, plan: Plan, *, pdl: bool) -> Matrix:
        """The rows of x as the plan's kernel reads them without a norm."""

    def activate(self, y: Tensor, activation: Activation, *, pdl: bool) -> Matrix:
        """Activate the result of a library's product, for the next product to read."""

    invariant: Plan
    """A plan that adds up in the same order whatever the rows; fits any shape."""

    def product(self, x: Matrix, weight: Matrix, bias: Tensor | None, dtype: torch.dtype, tile_rows: int = 0) -> Tensor:
        """x [M, K] times weight [N, K], transposed, plus the bias: [M, N], by a library.

        ``tile_rows`` are those of a plan, 0 except for weights in codes (see ``multiply`` of grouped.py).
        """

    def add_product(self, to: Tensor, x: Matrix, weight: Matrix, bias: Tensor | None, tile_rows: int = 0) -> None:
        """Add ``product`` to a residual [M, N]."""

    def takes_tma(self, site: Site) -> bool:
        """Return whether the kernels of tma.py can multiply the site's weights, on a card that has them."""

    def takes_library_alone(self, site: Site) -> bool:
        """Return whether ``product`` alone multiplies the site's weights, whatever was measured."""

    def takes_library(self, site: Site) -> bool:
        """Return whether ``product`` can multiply the site's weights."""

    def pattern(self, site: Site, gpu: Gpu) -> Plan | None:
        """A plan by the pattern of what is fast, for a site that no table knows; None: the library's product."""


class PlainInputs:
    """The part of a ``Format`` that concerns inputs, where they stay tensors in the model's dtype."""

    own_rows = False

    def result_dtype(self, x: Matrix) -> torch.dtype:
        return as_tensor(x).dtype

    def make_rows(self, x: Tensor, norm: Norm | None = None, *, pdl: bool) -> Matrix:
        return x if norm is None else norm_rows(x, norm, pdl=pdl)

    def operand(self, x: Matrix, plan: Plan, *, pdl: bool) -> Matrix:
        return x

    def activate(self, y: Tensor, activation: Activation, *, pdl: bool) -> Matrix:
        return activate_rows(y, activation, pdl=pdl)


def as_tensor(matrix: object) -> Tensor:
    """A matrix that is a Tensor, for kernels that take no other."""
    assert isinstance(matrix, Tensor)
    return matrix


def values_and_scale(matrix: Matrix) -> tuple[Tensor, Tensor | None]:
    """The elements of a matrix and the scales of its rows, as kernels take them."""
    return (matrix.values, matrix.scale) if isinstance(matrix, Quantized) else (as_tensor(matrix), None)


def join_biases(rows: Sequence[int], biases: Sequence[Tensor | None], padding: int = 0) -> Tensor | None:
    """Join the biases of weights of so many rows, with zeros for the missing ones; None if all are missing."""
    some = next((bias for bias in biases if bias is not None), None)
    if some is None:
        return None
    filled = [some.new_zeros(n) if b is None else b for n, b in zip(rows, biases, strict=True)]
    return torch.cat((*filled, some.new_zeros(padding)))
