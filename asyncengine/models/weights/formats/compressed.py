"""Checkpoints of compressed-tensors: groups of modules that share a scheme, each scheme in a layout of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from asyncengine.errors import UnsupportedModelError
from asyncengine.kernels.float8 import FLOAT8
from asyncengine.kernels.grouped import FP4_NUMBERS, make_grouped, pack_nibbles, unpack_nibbles
from asyncengine.kernels.weight import INT4, INT8, PackedWeight
from asyncengine.models.files import excerpt
from asyncengine.models.weights.formats.base import TensorSource
from asyncengine.models.weights.formats.fp8 import block_shape, make_float8, read_block
from asyncengine.models.weights.formats.packed import (
    Packed,
    Shape,
    bytes_of_words,
    check_finite,
    codes_of_words,
    groups_of,
    read_order,
    read_scales,
)
from asyncengine.models.weights.formats.settings import MAX_PATTERNS, ModuleNames, QuantSettings
from asyncengine.models.weights.mxfp4 import BIAS

logger = logging.getLogger(__name__)

_KEYS = (
    "quant_method", "config_groups", "format", "ignore", "kv_cache_scheme", "quantization_status",
    "global_compression_ratio", "sparsity_config", "transform_config", "version", "moe_sparsity_config",
)  # fmt: skip
_GROUP_KEYS = ("targets", "weights", "input_activations", "output_activations", "format")
_WEIGHT_KEYS = (
    "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder", "observer",
    "observer_kwargs", "scale_dtype", "zp_dtype",
)  # fmt: skip
_LINEAR = frozenset(("Linear", "re:.*Linear", "LinearBase", "torch.nn.Linear"))
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


class _Scheme(NamedTuple):
    layout: str
    bits: int
    strategy: str
    group: int | None
    block: Shape | None
    symmetric: bool
    has_order: bool
    rounds_inputs: bool = False


class CompressedTensors(Packed):
    """quant_method "compressed-tensors". A module has the scheme of the first group that names it, or of the first one
    for all linear layers; inputs are not rounded, whatever a scheme says of them."""

    def __init__(self, settings: QuantSettings) -> None:
        settings.only(*_KEYS)
        settings.one_of("quantization_status", ("compressed", "frozen"), "compressed")
        for key in ("sparsity_config", "transform_config"):
            if settings.values.get(key):
                raise settings.unsupported(f"{key} = {excerpt(settings.values[key])}")
        if settings.values.get("kv_cache_scheme") is not None:
            logger.warning(
                "%s: kv_cache_scheme is left to kv_cache_dtype, which is fp8 where it is wanted", settings.source
            )
        self._dense = settings.names("ignore")
        self._groups: list[tuple[ModuleNames, bool, _Scheme]] = []
        groups = settings.part("config_groups", settings.get("config_groups", dict))
        if len(groups.values) > MAX_PATTERNS:
            raise settings.unsupported(f"config_groups with more than {MAX_PATTERNS} entries")
        for name, values in groups.values.items():
            group = groups.part(excerpt(name), values)
            group.only(*_GROUP_KEYS)
            targets = group.get("targets", list)
            names = ModuleNames(targets, f"{group.source}: targets")
            scheme = _read_scheme(group, settings.get("format", str, ""))
            self._groups.append((names, any(isinstance(t, str) and t in _LINEAR for t in targets), scheme))

    def scheme_of(self, module: str) -> _Scheme | None:
        """The scheme of a module; None: it is not quantised."""
        if module in self._dense:
            return None
        by_name = (scheme for names, _, scheme in self._groups if module in names)
        by_class = (scheme for _, linear, scheme in self._groups if linear)
        return next(by_name, None) or next(by_class, None)

    def is_packed(self, tensors: TensorSource, module: str) -> bool:
        scheme = self.scheme_of(module)
        if scheme is None:
            return False
        packed = scheme.layout in _PACKED and f"{module}.weight_packed" in tensors
        return tensors.is_random or packed or super().is_packed(tensors, module)

    codes = "weight_packed"

    def read(self, tensors: TensorSource, module: str, shape: Shape) -> PackedWeight:
        scheme = self.scheme_of(module)
        assert scheme is not None
        scheme = scheme._replace(rounds_inputs=self.rounds_inputs)
        return _READERS[scheme.layout](tensors, module, shape, scheme)


def _read_scheme(group: QuantSettings, layout: str) -> _Scheme:
    weights = group.part("weights", group.get("weights", dict))
    weights.only(*_WEIGHT_KEYS)
    kind, bits = weights.one_of("type", ("int", "float"), "int"), weights.one_of("num_bits", (4, 8), 8)
    if group.values.get("output_activations") is not None:
        raise group.unsupported("output_activations")
    weights.one_of("dynamic", (False,), False)
    given = group.get("format", str, layout)
    inferred = "float-quantized" if kind == "float" else "int-quantized" if bits == 8 else "pack-quantized"
    layout = inferred if given in ("naive-quantized", "mixed-precision", "") else given
    wanted = _NUMBERS.get(layout)
    if wanted is None:
        raise group.unsupported(f"format = {excerpt(given)}")
    if (kind, bits) not in wanted:
        raise group.unsupported(f"{bits} bits of type {kind} in the format {layout}")
    size = weights.get("group_size", int, -1)
    inferred = "channel" if size == -1 and "group_size" in weights.values else "group" if size > 0 else "tensor"
    strategy = weights.one_of("strategy", _STRATEGIES, inferred)
    grouped = strategy in ("group", "tensor_group")
    block = read_block(weights, "block_structure") if strategy == "block" else None
    if strategy == "block" and block is None:
        raise weights.unsupported("strategy = 'block' without block_structure")
    order = weights.values.get("actorder")
    weights.one_of("actorder", (False, "weight", "static", "group", "dynamic"), False)
    return _Scheme(
        layout, bits, strategy, weights.group_size("group_size") if grouped else None, block,
        weights.flag("symmetric", True), order in ("group", "dynamic"),
    )  # fmt: skip


def _scale_shapes(module: str, shape: Shape, scheme: _Scheme) -> tuple[tuple[int, ...], ...]:
    if scheme.strategy == "tensor":
        return (1,), ()
    if scheme.strategy == "channel":
        return ((shape[0], 1),)
    if scheme.block is not None:
        return (block_shape(shape, scheme.block),)
    return ((shape[0], groups_of(module, shape[1], scheme.group)),)


def _by_rows(scales: Tensor, rows: int) -> Tensor:
    """Scales [N, groups]: one for all rows is repeated."""
    return scales.reshape(-1, 1).expand(rows, 1).contiguous() if scales.dim() < 2 else scales


def _alike(scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scales, and the offsets of their zero points."""
    return (scales, None) if zeros is None else (scales.float(), -scales.float() * zeros.float())


def _read_floats(tensors: TensorSource, module: str, shape: Shape, scheme: _Scheme) -> PackedWeight:
    values = tensors.raw(f"{module}.weight", shape, kinds=(FLOAT8,), parameters=shape[0] * shape[1])
    if not scheme.symmetric:
        raise UnsupportedModelError(f"{module}: float8 with zero points is not supported")
    scales = read_scales(tensors, f"{module}.weight_scale", *_scale_shapes(module, shape, scheme))
    if scheme.strategy == "group":
        return make_grouped("float8_groups", values, scales)
    return make_float8(values, scales, shape, scheme.block, by_rows=scheme.rounds_inputs)


def _read_ints(tensors: TensorSource, module: str, shape: Shape, scheme: _Scheme) -> PackedWeight:
    codes = tensors.raw(f"{module}.weight", shape, kinds=(torch.int8,), parameters=shape[0] * shape[1])
    shapes, zeros = _scale_shapes(module, shape, scheme), None
    if scheme.block is not None:
        raise UnsupportedModelError(f"{module}: int8 in blocks is not supported")
    scales = _by_rows(read_scales(tensors, f"{module}.weight_scale", *shapes), shape[0])
    if not scheme.symmetric:
        zeros = _by_rows(tensors.raw(f"{module}.weight_zero_point", *shapes, kinds=(torch.int8,)), shape[0])
    return make_grouped(INT8, codes, *_alike(scales, zeros))


def _read_packed(tensors: TensorSource, module: str, shape: Shape, scheme: _Scheme) -> PackedWeight:
    (rows, columns), bits, kinds = shape, scheme.bits, (torch.int32,)
    in_word, middle = 32 // bits, 1 << (bits - 1)
    if scheme.strategy not in ("group", "channel"):
        raise UnsupportedModelError(f"{module}: strategy {scheme.strategy} in the format pack-quantized")
    stored = (rows, -(-columns // in_word))
    words = tensors.raw(f"{module}.weight_packed", stored, kinds=kinds, parameters=rows * columns)
    if not tensors.is_random:
        said = tensors.raw(f"{module}.weight_shape", (2,), kinds=(torch.int64, torch.int32), elements=True).tolist()
        if tuple(said) != shape:
            raise ValueError(f"weight_shape says {excerpt(said)}, and not {list(shape)}")
    scales = read_scales(tensors, f"{module}.weight_scale", *_scale_shapes(module, shape, scheme))
    groups, zeros = scales.shape[1], None
    if not scheme.symmetric:
        name = f"{module}.weight_zero_point"
        packed = tensors.raw(name, (-(-rows // in_word), groups), kinds=kinds)
        zeros = codes_of_words(packed.T.contiguous(), bits).T[:rows].float() - middle
    name = f"{module}.weight_g_idx"
    order = read_order(tensors, name, columns, groups, has_order=True) if scheme.has_order else None
    if bits == 4:
        if columns % 2:
            raise ValueError(f"rows of {columns} are no bytes of two codes")
        codes = words.view(torch.uint8)[:, : columns // 2]
        if order is not None:
            codes = pack_nibbles(unpack_nibbles(codes)[:, order.long()])
        return make_grouped(INT4, codes.contiguous(), *_alike(scales, zeros), order=order)
    codes = bytes_of_words(words)[:, :columns] ^ 128
    if order is not None:
        codes = codes[:, order.long()]
    return make_grouped(INT8, codes.contiguous().view(torch.int8), *_alike(scales, zeros), order=order)


def _read_nvfp4(tensors: TensorSource, module: str, shape: Shape, scheme: _Scheme) -> PackedWeight:
    groups = groups_of(module, shape[1], scheme.group)
    codes = _read_fp4(tensors, module, shape)
    scales = tensors.raw(f"{module}.weight_scale", (shape[0], groups), kinds=(FLOAT8,)).float()
    divisor = read_scales(tensors, f"{module}.weight_global_scale", (1,), kinds=(torch.float32,))
    made = check_finite(f"{module}.weight_global_scale", scales / divisor)
    return make_grouped(INT4, codes, made, table=_table(codes))


def _read_mxfp4(tensors: TensorSource, module: str, shape: Shape, scheme: _Scheme) -> PackedWeight:
    groups = groups_of(module, shape[1], scheme.group)
    codes = _read_fp4(tensors, module, shape)
    exponents = tensors.raw(f"{module}.weight_scale", (shape[0], groups), kinds=(torch.uint8,))
    if not exponents.is_meta and bool((exponents == 255).any()):
        raise ValueError("weight_scale holds 255, which is no number")
    return make_grouped(INT4, codes, torch.exp2(exponents.float() - BIAS), table=_table(codes))


def _read_fp4(tensors: TensorSource, module: str, shape: Shape) -> Tensor:
    stored = (shape[0], -(-shape[1] // 2))
    return tensors.raw(f"{module}.weight_packed", stored, kinds=(torch.uint8,), parameters=shape[0] * shape[1])


def _table(codes: Tensor) -> Tensor:
    return torch.tensor(FP4_NUMBERS, device=codes.device)


_READERS: dict[str, Callable[[TensorSource, str, Shape, _Scheme], PackedWeight]] = {
    "float-quantized": _read_floats,
    "int-quantized": _read_ints,
    "pack-quantized": _read_packed,
    "nvfp4-pack-quantized": _read_nvfp4,
    "mxfp4-pack-quantized": _read_mxfp4,
}
_NUMBERS: dict[str, tuple[tuple[str, int], ...]] = {
    "float-quantized": (("float", 8),),
    "int-quantized": (("int", 8),),
    "pack-quantized": (("int", 4), ("int", 8)),
    "nvfp4-pack-quantized": (("float", 4),),
    "mxfp4-pack-quantized": (("float", 4),),
}
"""Types and bits of each layout."""
_PACKED = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
