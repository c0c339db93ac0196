"""Checkpoints in float8 (e4m3): a scale for each block of a weight, for each of its rows, or for all of it."""

from __future__ import annotations

from torch import Tensor

from asyncengine.kernels.float8 import FLOAT8
from asyncengine.kernels.grouped import make_grouped
from asyncengine.kernels.weight import FLOAT8 as FLOAT8_FORMAT
from asyncengine.kernels.weight import FLOAT8_GROUPS, PackedWeight
from asyncengine.models.files import excerpt
from asyncengine.models.weights.formats.base import TensorSource
from asyncengine.models.weights.formats.packed import Packed, Shape, expand_blocks, read_scales
from asyncengine.models.weights.formats.settings import QuantSettings

_KEYS = (
    "quant_method", "activation_scheme", "fmt", "weight_block_size", "modules_to_not_convert", "ignored_layers",
    "scale_fmt", "dequantize",
)  # fmt: skip
LARGEST_BLOCK = 1 << 12


def read_block(settings: QuantSettings, key: str) -> Shape | None:
    """The rows and columns of a block that shares a scale; None: there are no blocks."""
    block = settings.get(key, list, None)
    if block is None:
        return None
    if len(block) != 2 or not all(type(size) is int and 16 <= size <= LARGEST_BLOCK for size in block):
        raise settings.unsupported(f"{key} = {excerpt(block)}")
    if block[1] & (block[1] - 1):
        raise settings.unsupported(f"{key} = {excerpt(block)}, whose columns are no power of two,")
    return block[0], block[1]


def make_float8(values: Tensor, scales: Tensor, shape: Shape, block: Shape | None, *, by_rows: bool) -> PackedWeight:
    """A weight of values [N, K] and the scales of blocks, or [1], [] or [N, 1].

    ``by_rows``: where rows have one scale, the weight takes the format FLOAT8, whose products round their inputs.
    """
    if block is not None:
        return make_grouped(FLOAT8_GROUPS, values, expand_blocks(scales.float(), shape, block)[0])
    rows = scales.float().reshape(-1).expand(shape[0]).contiguous()
    if by_rows:
        return PackedWeight(FLOAT8_FORMAT, {"values": values, "scale": rows}, *shape)
    return make_grouped(FLOAT8_GROUPS, values, rows[:, None])


def block_shape(shape: Shape, block: Shape) -> Shape:
    """Number of blocks along the rows and the columns of a weight."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


class Float8Blocks(Packed):
    """quant_method "fp8": MODULE.weight and MODULE.weight_scale_inv, the factors of blocks or of the whole weight."""

    codes = "weight"

    def __init__(self, settings: QuantSettings) -> None:
        settings.only(*_KEYS)
        settings.one_of("fmt", ("e4m3",), "e4m3")
        settings.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
        self._block = read_block(settings, "weight_block_size")
        self._dense = (
            settings.names("modules_to_not_convert", parts=True), settings.names("ignored_layers", parts=True)
        )  # fmt: skip

    def is_packed(self, tensors: TensorSource, module: str) -> bool:
        return not any(module in names for names in self._dense) and super().is_packed(tensors, module)

    def read(self, tensors: TensorSource, module: str, shape: Shape) -> PackedWeight:
        values = tensors.raw(f"{module}.weight", shape, kinds=(FLOAT8,), parameters=shape[0] * shape[1])
        if self._block is not None:
            scales = read_scales(tensors, f"{module}.weight_scale_inv", block_shape(shape, self._block))
        else:
            inverse = f"{module}.weight_scale_inv" in tensors
            name = f"{module}.weight_scale_inv" if inverse else f"{module}.weight_scale"
            scales = read_scales(tensors, name, (), (1,), (1, 1), (shape[0], 1))
        return make_float8(values, scales, shape, self._block, by_rows=self.rounds_inputs)
