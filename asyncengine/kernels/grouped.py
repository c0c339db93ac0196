"""Weights whose columns share scales in groups: the formats INT4, INT8 and FLOAT8_GROUPS of kernels/weight.py.

    W[n, order[k]] = scale[n, k // G] * number(code[n, k]) + offset[n, k // G]

Products multiply inputs that stay in floats. The functions here are the reference of what kernels read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncengine.kernels.float8 import FLOAT8, FLOAT8_MAX
from asyncengine.kernels.weight import FLOAT8_GROUPS, GROUPED, INT4, INT8, PackedWeight

SMALLEST_GROUP = 16
FP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number of each code of a float of 4 bits: a sign, two bits of an exponent and one of a fraction."""

_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Largest elements that ``round_to_groups`` tries, in shares of a group's largest."""
_TOPS = {INT4: 7, INT8: 127, FLOAT8_GROUPS: FLOAT8_MAX}
"""The largest number of a code that ``round_to_groups`` gives to the largest element of a group."""
_ELEMENTS_AT_ONCE = {"cpu": 1 << 18, "meta": 1 << 18, "cuda": 1 << 25}
"""By device: what a processor's cache holds, and enough to keep a GPU busy."""
CODES = {INT4: torch.uint8, INT8: torch.int8, FLOAT8_GROUPS: FLOAT8}
"""dtypes of codes"""


def is_group_size(size: int, columns: int) -> bool:
    """Return whether weights of as many columns can have groups of this size."""
    power = size >= SMALLEST_GROUP and size & (size - 1) == 0
    return size == columns or (power and columns % size == 0)


def group_size(weight: PackedWeight) -> int:
    """Number of columns that share a scale."""
    return weight.in_features // weight.tensors["scales"].shape[1]


def make_grouped(
    form: str,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None = None,
    *,
    table: Tensor | None = None,
    order: Tensor | None = None,
) -> PackedWeight:
    """A weight of the tensors of its format. Raises ValueError for shapes or dtypes that do not fit."""
    n, k = codes.shape[0], codes.shape[1] * (2 if form == INT4 else 1)
    groups = scales.shape[1] if scales.dim() == 2 and scales.shape[1] else 0
    if codes.dtype != CODES[form] or scales.dtype not in (torch.float32, torch.float16):
        raise ValueError(f"{form} has codes of {CODES[form]} and scales of float32 or float16, got {codes.dtype}")
    if len(scales) != n or not groups or k % groups or not is_group_size(k // groups, k):
        raise ValueError(f"scales {list(scales.shape)} do not fit a weight [{n}, {k}]")
    tensors = {"codes": codes, "scales": scales}
    if offsets is not None:
        if offsets.shape != scales.shape or offsets.dtype != scales.dtype:
            raise ValueError(f"offsets {list(offsets.shape)} are not like scales {list(scales.shape)}")
        tensors["offsets"] = offsets
    if table is not None:
        if form != INT4 or table.shape != (16,) or table.dtype != torch.float32:
            raise ValueError(f"a table of {form} must be float32 [16], got {table.dtype} {list(table.shape)}")
        tensors["table"] = table
    if order is not None:
        if order.shape != (k,) or order.dtype != torch.int32:
            raise ValueError(f"an order must be int32 [{k}], got {order.dtype} {list(order.shape)}")
        tensors["order"] = order
    return PackedWeight(form, tensors, n, k)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes below 16 uint8 [..., K] as bytes uint8 [..., K / 2], the even columns in the low halves."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Codes uint8 [..., K] of bytes uint8 [..., K / 2]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def round_to_groups(
    form: str, weight: Tensor, size: int = 128, scale_dtype: torch.dtype = torch.float32
) -> PackedWeight:
    """Round a weight [N, K] to nearest codes of INT4, INT8 or FLOAT8_GROUPS, with a scale for each group of columns.

    Scales are numbers of ``scale_dtype``, in float32.

    The size of groups is halved until it divides K. Each scale is the best of some that clip the largest elements of
    its group: that with the smallest sum of squares of errors.
    """
    while weight.shape[1] % size and size > SMALLEST_GROUP:
        size //= 2
    size = size if weight.shape[1] % size == 0 else weight.shape[1]
    rows = _rows_at_once(weight)
    parts = [_round_rows(form, part, size, scale_dtype) for part in torch.split(weight, rows)]
    codes, scales = parts[0] if len(parts) == 1 else map(_join, zip(*parts, strict=True))
    return make_grouped(form, codes, scales)


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Torch joins no float8, but its bytes."""
    if parts[0].dtype != FLOAT8:
        return torch.cat(tuple(parts))
    return torch.cat([part.view(torch.uint8) for part in parts]).view(FLOAT8)


def _rows_at_once(weight: Tensor) -> int:
    return max(1, _ELEMENTS_AT_ONCE[weight.device.type] // weight.shape[1])


def _round_rows(form: str, weight: Tensor, size: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of some rows, whose numbers stay in the cache."""
    top = _TOPS[form]
    parts = weight.float().reshape(len(weight), -1, size)
    largest = parts.abs().amax(-1).clamp_(min=1e-30)
    scales, work = largest / top, torch.empty_like(parts)
    least = torch.full_like(largest, torch.inf)
    for clip in _CLIPS if form == INT4 else ():
        tried = largest * (clip / top)
        torch.mul(parts, (1 / tried)[..., None], out=work)
        work.round_().clamp_(-top - 1, top).mul_(tried[..., None]).sub_(parts)
        errors = work.square_().sum(-1)
        scales, least = torch.where(errors < least, tried, scales), torch.minimum(errors, least)
    scales = scales.to(scale_dtype).float()
    if form == FLOAT8_GROUPS:
        return torch.div(parts, scales[..., None], out=work).clamp_(-top, top).flatten(1).to(FLOAT8), scales
    codes = torch.div(parts, scales[..., None], out=work).round_().clamp_(-top - 1, top).flatten(1)
    return (pack_nibbles(codes.add_(8).to(torch.uint8)) if form == INT4 else codes.to(torch.int8)), scales


def squared_error(packed: PackedWeight, weight: Tensor) -> float:
    """Sum of squares of what the codes of a packed weight, in its own order, change of a weight [N, K]."""
    rows, total = _rows_at_once(weight), 0.0
    for first in range(0, len(weight), rows):
        tensors = {name: tensor[first : first + rows] for name, tensor in packed.tensors.items()}
        part = make_grouped(packed.format, tensors["codes"], tensors["scales"])
        total += unpack(part).sub_(weight[first : first + rows]).square_().sum().item()
    return total


def are_alike(weights: Sequence[PackedWeight]) -> bool:
    """Return whether weights side by side have one format, size of groups, table and order of columns."""
    first = weights[0]
    for weight in weights[1:]:
        if weight.format != first.format:
            return False
        if first.format in GROUPED:
            if group_size(weight) != group_size(first) or weight.tensors.keys() != first.tensors.keys():
                return False
            for name in ("table", "order"):
                one, other = first.tensors.get(name), weight.tensors.get(name)
                if one is not None and other is not None and not one.is_meta and not torch.equal(one, other):
                    return False
    return True


def numbers(weight: PackedWeight) -> Tensor:
    """The numbers of the codes in float32 [N, K], in the order in which they are packed."""
    codes = weight.tensors["codes"]
    if weight.format != INT4:
        return codes.float()
    codes, table = unpack_nibbles(codes), weight.tensors.get("table")
    return codes.float() - 8 if table is None else table[codes.int()]


def unpack(weight: PackedWeight) -> Tensor:
    """The matrix [N, K] in float32, its columns in the order of the inputs."""
    tensors = weight.tensors
    values = numbers(weight).view(weight.out_features, tensors["scales"].shape[1], -1)
    made = values * tensors["scales"].float()[..., None]
    if (offsets := tensors.get("offsets")) is not None:
        made = made + offsets.float()[..., None]
    made = made.flatten(1)
    if (order := tensors.get("order")) is None:
        return made
    return torch.empty_like(made).index_copy_(1, order.long(), made)
