"""Weights in int4, int8 or float8 whose columns share scales in groups (see kernels/grouped.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncengine._core import CodeType, CpuLinear
from asyncengine.kernels.cpu.checks import check, native_dtype
from asyncengine.kernels.cpu.linear.formats.base import Format, Native
from asyncengine.kernels.cpu.linear.panels import Panels
from asyncengine.kernels.grouped import are_alike, group_size, unpack
from asyncengine.kernels.weight import FLOAT8_GROUPS, INT4, INT8, PackedWeight

_TYPES = {INT4: CodeType.int4, INT8: CodeType.int8, FLOAT8_GROUPS: CodeType.float8}
_READ_BEHIND = 16
"""Floats that kernels read behind scales."""


class Grouped(Format):
    """Matrices of codes with scales. Inputs stay as they are; native kernels read the codes where they lie."""

    def unpack(self, weight: PackedWeight) -> Tensor:
        return unpack(weight)

    def pack(
        self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None], panels: Panels, *, rearrange: bool
    ) -> Native | None:
        """Scales are copied, group by group. Without the dtype of the inputs there is no native weight."""
        dtype = weights[0].inputs
        if dtype not in (torch.float32, torch.bfloat16) or not are_alike(weights):
            return None
        codes: list[tuple[CodeType, int, int, int, int]] = []
        kept: list[Tensor] = []
        order = weights[0].tensors.get("order")
        for weight, bias in zip(weights, biases, strict=True):
            tensors = weight.tensors
            scales, offsets, table = _by_group(tensors["scales"]), tensors.get("offsets"), tensors.get("table")
            if offsets is not None:
                offsets = _by_group(offsets)
            if weight.format == INT4:
                table = torch.arange(-8, 8, dtype=torch.float32) if table is None else table.contiguous()
            if bias is not None:
                check(bias, dtype, (weight.out_features,), "bias")
            codes.append(
                (_TYPES[weight.format], group_size(weight), scales.data_ptr(), _address(offsets), _address(table))
            )
            kept += [tensor for tensor in (scales, offsets, table, bias) if tensor is not None]
        stored = [weight.tensors["codes"].contiguous() for weight in weights]
        native = CpuLinear(
            [tensor.data_ptr() for tensor in stored],
            [weight.out_features for weight in weights],
            [_address(bias) for bias in biases],
            weights[0].in_features,
            native_dtype(dtype),
        )
        native.set_codes(codes, _address(order))
        return Native(native, (*stored, *kept, *([] if order is None else [order])), dtype)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _by_group(scales: Tensor) -> Tensor:
    """Scales [N, groups] in float32 as [groups * N], and numbers behind them that nothing depends on."""
    return torch.cat((scales.T.float().flatten(), torch.zeros(_READ_BEHIND)))
