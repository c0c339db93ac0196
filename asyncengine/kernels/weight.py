"""PackedWeight: the matrix of a projection, a head or an embedding, in the form in which it is stored.

The source of a model's weights makes packed weights, a model hands them on, and a kernel package makes a handle of
them. A model never looks inside. The names of the formats and of their tensors are agreed on here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

FormT = TypeVar("FormT")

DENSE = "dense"
"""One tensor, "weight" [N, K] in the model's dtype. It may be the transposed view of a contiguous tensor."""
FLOAT8 = "float8"
"""Two tensors: "values" float8 [N, K], and "scale" float32 [N] by which the rows of values are multiplied."""
INT4 = "int4"
"""Numbers of 4 bits in groups of columns that share a scale (see kernels/grouped.py).

- "codes": uint8 [N, K / 2], the code of an even column in the low half of a byte.
- "scales": float32 or float16 [N, K / G].
- "offsets": like "scales"; absent: none.
- "table": float32 [16], the number of each code; absent: a code stands for itself less 8.
- "order": int32 [K], absent: as it is.

The group size G is K, or a power of two from 16 that divides K. An element is scale * number + offset. Column k
multiplies x[:, order[k]].
"""
INT8 = "int8"
"""As INT4, with "codes" int8 [N, K] that stand for themselves, and no table."""
FLOAT8_GROUPS = "float8_groups"
"""As INT8, with "codes" in float8 (e4m3). Blocks of 128 x 128 that share a scale repeat it in each of their rows."""

GROUPED = (INT4, INT8, FLOAT8_GROUPS)
BLOCKS = "blocks"
"""One tensor, "blocks" uint8 [N, bytes of a row], on the CPU: blocks of a type of GGUF (see kernels/blocks.py)."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix [out_features, in_features] in a format."""

    format: str
    tensors: Mapping[str, Tensor]
    """The format's tensors by name."""
    out_features: int
    in_features: int
    inputs: torch.dtype | None = None
    """dtype of the rows that a packed weight multiplies, or of an embedding's, where the tensors do not tell it"""
    block_type: int = 0
    """The type of a weight in the format BLOCKS. Weights side by side may differ in it."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def dense(weight: Tensor) -> PackedWeight:
    """Pack a weight [N, K] that stays as it is."""
    return PackedWeight(DENSE, {"weight": weight}, *weight.shape)


def common_format(weights: Sequence[PackedWeight]) -> str:
    """Return the format of weights that lie side by side. Raises ValueError if they have several."""
    formats = {weight.format for weight in weights}
    if len(formats) != 1:
        raise ValueError(f"weights side by side must have one format, got {', '.join(sorted(formats)) or 'none'}")
    return formats.pop()


def form_in(forms: Mapping[str, FormT], weights: Sequence[PackedWeight]) -> FormT:
    """Return the entry for the format of weights that lie side by side. Raises ValueError if there is none."""
    if (name := common_format(weights)) not in forms:
        raise ValueError(f"weights in the format {name!r} are not implemented here, but {', '.join(forms)}")
    return forms[name]


def tensors_of(weights: Sequence[PackedWeight], name: str, form: str) -> list[Tensor]:
    """Return the tensor of that name of each weight. Raises ValueError for a weight in another format."""
    form_in({form: form}, weights)
    return [weight.tensors[name] for weight in weights]
