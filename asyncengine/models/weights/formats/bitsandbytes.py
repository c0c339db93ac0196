"""Checkpoints of bitsandbytes: nf4 and fp4 by blocks of a row, and int8 by rows."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from asyncengine.errors import UnsupportedModelError, WeightMismatchError
from asyncengine.kernels.grouped import make_grouped
from asyncengine.kernels.weight import INT4, INT8, PackedWeight
from asyncengine.models.files import excerpt
from asyncengine.models.weights.formats.base import TensorSource
from asyncengine.models.weights.formats.packed import Packed, Shape, check_finite, read_scales, swap_nibbles
from asyncengine.models.weights.formats.settings import QuantSettings

_KEYS = (
    "quant_method", "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_quant_type",
    "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage", "llm_int8_threshold",
    "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
)  # fmt: skip
_MAX_STATE_BYTES = 1 << 12
_FLOAT32 = (torch.float32,)


class BitsAndBytes(Packed):
    """4 bits: MODULE.weight uint8 [N * K / 2, 1] with its state beside it; 8 bits: int8 [N, K] and MODULE.SCB.

    Outliers of inputs, which bitsandbytes multiplies by weights in floats, need nothing here: no input is rounded.
    """

    codes = "weight"

    def __init__(self, settings: QuantSettings) -> None:
        settings.only(*_KEYS)
        self._in_8 = settings.flag("load_in_8bit", False)
        if self._in_8 == settings.flag("load_in_4bit", False):
            raise settings.unsupported("load_in_4bit = load_in_8bit")
        self._kind = settings.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        settings.one_of("bnb_4bit_quant_storage", ("uint8",), "uint8")
        self._dense = settings.names("llm_int8_skip_modules", parts=True)

    def is_packed(self, tensors: TensorSource, module: str) -> bool:
        return module not in self._dense and super().is_packed(tensors, module)

    def read(self, tensors: TensorSource, module: str, shape: Shape) -> PackedWeight:
        rows, columns = shape
        if self._in_8:
            codes = tensors.raw(f"{module}.weight", shape, kinds=(torch.int8,), parameters=rows * columns)
            scales = read_scales(tensors, f"{module}.SCB", (rows,)).float()
            return make_grouped(INT8, codes, (scales / 127)[:, None].contiguous())
        return self._read_4(tensors, module, shape)

    def _read_4(self, tensors: TensorSource, module: str, shape: Shape) -> PackedWeight:
        count = shape[0] * shape[1]
        state = self._state(tensors, f"{module}.weight.quant_state.bitsandbytes__{self._kind}", shape)
        block = state["blocksize"]
        if shape[1] % block:
            raise WeightMismatchError(f"tensor {module}.weight: blocks of {block} go beyond rows of {shape[1]}")
        stored = ((count // 2, 1), (1, count // 2))
        packed = tensors.raw(f"{module}.weight", *stored, kinds=(torch.uint8,), parameters=count)
        table = read_scales(tensors, f"{module}.weight.quant_map", (16,)).float()
        scales = self._block_scales(tensors, f"{module}.weight", count // block, state)
        codes = swap_nibbles(packed).view(shape[0], -1)  # the first number lies in the high half
        return make_grouped(INT4, codes, scales.view(shape[0], -1), table=table)

    def _block_scales(self, tensors: TensorSource, name: str, count: int, state: dict[str, Any]) -> Tensor:
        """float32 [count], which may be codes of 8 bits with scales of their own."""
        if "nested_blocksize" not in state:
            return read_scales(tensors, f"{name}.absmax", (count,), kinds=_FLOAT32)
        blocks = -(-count // state["nested_blocksize"])
        codes = tensors.raw(f"{name}.absmax", (count,), kinds=(torch.uint8,))
        table = read_scales(tensors, f"{name}.nested_quant_map", (256,), kinds=_FLOAT32)
        factors = read_scales(tensors, f"{name}.nested_absmax", (blocks,), kinds=_FLOAT32)
        by_code = factors.repeat_interleave(state["nested_blocksize"])[:count]
        return check_finite(f"{name}.absmax", table[codes.int()] * by_code + state["nested_offset"])

    def _state(self, tensors: TensorSource, name: str, shape: Shape) -> dict[str, Any]:
        """Sizes of blocks, which the checkpoint has as JSON in a tensor of bytes."""
        if tensors.is_random:
            return {"blocksize": 64}
        size = tensors.sized(name) or 0
        if size > _MAX_STATE_BYTES:
            raise WeightMismatchError(f"tensor {name} has {size} bytes, and at most {_MAX_STATE_BYTES} are read")
        read = tensors.raw(name, (size,), kinds=(torch.uint8,), elements=True)
        try:
            state = json.loads(bytes(read.tolist()))
            given = tuple(state["shape"])
            sizes = [state[key] for key in ("blocksize", "nested_blocksize") if key in state]
            offset = float(state.get("nested_offset", 0.0))
        except (ValueError, TypeError, KeyError, RecursionError) as e:
            raise WeightMismatchError(f"tensor {name} has no state of a weight: {excerpt(str(e))}") from e
        if given != shape or state.get("quant_type") != self._kind:
            raise WeightMismatchError(f"tensor {name}: expected {self._kind} of {shape}, found {excerpt(state)}")
        if not all(type(size) is int and 16 <= size <= 4096 and not size & (size - 1) for size in sizes):
            raise UnsupportedModelError(f"tensor {name}: blocks of {excerpt(sizes)} are not supported")
        if abs(offset) > 1e6 or offset != offset:
            raise WeightMismatchError(f"tensor {name}: the offset {offset} is no scale")
        return {"blocksize": sizes[0], "nested_offset": offset} | (
            {"nested_blocksize": sizes[1]} if len(sizes) > 1 else {}
        )
