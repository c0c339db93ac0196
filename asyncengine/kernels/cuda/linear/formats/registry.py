"""The formats that there are, by the names of packed weights and by the kinds of weight in a site."""

from __future__ import annotations

from asyncengine.kernels.cuda.linear.formats.base import Format, Matrix
from asyncengine.kernels.cuda.linear.formats.dense import Dense
from asyncengine.kernels.cuda.linear.formats.float8 import Float8
from asyncengine.kernels.cuda.linear.plan import WeightKind
from asyncengine.kernels.float8 import Quantized
from asyncengine.kernels.weight import DENSE, FLOAT8

FORMATS: dict[str, Format] = {DENSE: Dense(), FLOAT8: Float8()}
_NAMES: dict[WeightKind, str] = {"bf16": DENSE, "fp32": DENSE, "fp8": FLOAT8}


def format_of(weight: Matrix) -> Format:
    """The format of a weight that is packed."""
    return FORMATS[FLOAT8 if isinstance(weight, Quantized) else DENSE]


def format_of_kind(kind: WeightKind) -> Format:
    """The format of the weights of a site."""
    return FORMATS[_NAMES[kind]]
