"""Checkpoints of GPTQ: 4 or 8 bits in groups, whose columns may lie in the order in which they were quantised."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncengine.kernels.grouped import make_grouped, pack_nibbles, unpack_nibbles
from asyncengine.kernels.weight import INT4, INT8, PackedWeight
from asyncengine.models.files import excerpt
from asyncengine.models.weights.formats.base import TensorSource
from asyncengine.models.weights.formats.packed import (
    Packed,
    Shape,
    bytes_of_words,
    codes_of_words,
    groups_of,
    read_order,
    read_scales,
)
from asyncengine.models.weights.formats.settings import MAX_PATTERNS, QuantSettings, compile_pattern, spellings

_KEYS = (
    "quant_method", "bits", "group_size", "desc_act", "sym", "checkpoint_format", "format", "lm_head", "dynamic",
    "pack_dtype",
)  # fmt: skip
_SAY_NOTHING = (
    "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "model_name_or_path",
    "model_file_base_name", "meta", "backend", "use_cuda_fp16", "model_seqlen", "block_name_to_quantize",
    "module_name_preceding_first_block", "modules_in_block_to_quantize", "batch_size", "pad_token_id", "use_exllama",
    "disable_exllama", "max_input_length", "exllama_config", "cache_block_outputs", "tokenizer", "dataset", "mse",
    "act_group_aware", "parallel_packing", "rounding", "is_marlin_format",
)  # fmt: skip
"""Keys of how a checkpoint was made or is to be run elsewhere."""
_OF_LAYER = ("bits", "group_size", "desc_act", "sym")


class _Layer(NamedTuple):
    bits: int
    group: int | None
    has_order: bool
    symmetric: bool


class Gptq(Packed):
    """MODULE.qweight int32 [K * bits / 32, N], MODULE.qzeros, MODULE.scales [K / G, N] and MODULE.g_idx int32 [K].

    Zero points are stored less one, but in the layout "gptq_v2". "dynamic" has settings of modules by expressions: "+:"
    before one or nothing, or "-:" for modules that are not quantised.
    """

    def __init__(self, settings: QuantSettings) -> None:
        settings.only(*_KEYS, *_SAY_NOTHING)
        key = "checkpoint_format" if settings.values.get("checkpoint_format") is not None else "format"
        self._less_one = settings.one_of(key, ("gptq", "gptq_v2"), "gptq") == "gptq"
        settings.one_of("pack_dtype", ("int32",), "int32")
        settings.one_of("is_marlin_format", (False,), False)
        self._layer = _read_layer(settings)
        self._special: list[tuple[Any, _Layer | None]] = []
        dynamic = settings.part("dynamic", settings.get("dynamic", dict, {}))
        if len(dynamic.values) > MAX_PATTERNS:
            raise settings.unsupported(f"dynamic with more than {MAX_PATTERNS} entries")
        for text, values in dynamic.values.items():
            pattern = compile_pattern(text[2:] if text[:2] in ("+:", "-:") else text, dynamic.source)
            layer = None
            if not text.startswith("-:"):
                changed = dynamic.part(excerpt(text), values)
                changed.only(*_OF_LAYER, *_SAY_NOTHING)
                own = {name: settings.values.get(name) for name in _OF_LAYER} | changed.values
                layer = _read_layer(QuantSettings(own, changed.source))
            self._special.append((pattern, layer))

    def is_packed(self, tensors: TensorSource, module: str) -> bool:
        return self._settings_of(module) is not None and super().is_packed(tensors, module)

    def read(self, tensors: TensorSource, module: str, shape: Shape) -> PackedWeight:
        layer = self._settings_of(module)
        assert layer is not None
        (rows, columns), bits = shape, layer.bits
        in_word, groups = 32 // bits, groups_of(module, columns, layer.group)
        if rows % in_word or columns % in_word:
            raise ValueError(f"[{rows}, {columns}] are no words of {in_word}")
        kinds = (torch.int32,)
        stored = (columns // in_word, rows)
        words = tensors.raw(f"{module}.qweight", stored, kinds=kinds, parameters=rows * columns)
        packed = bytes_of_words(words.T)
        words = tensors.raw(f"{module}.qzeros", (groups, rows // in_word), kinds=kinds)
        # The sum of whole words: a zero that was stored as -1 took a unit from its neighbour.
        one = 0x11111111 if bits == 4 else 0x01010101
        zeros = codes_of_words(words + one if self._less_one else words, bits).T
        scales = read_scales(tensors, f"{module}.scales", (groups, rows)).float().T.contiguous()
        middle = 8 if bits == 4 else 128
        offsets: Tensor | None = scales * (middle - zeros.float())
        if zeros.is_meta or tensors.is_random:
            offsets = None if layer.symmetric else offsets
        elif layer.symmetric and bool((zeros == middle).all()):
            offsets = None
        order = None
        if f"{module}.g_idx" in tensors:
            order = read_order(tensors, f"{module}.g_idx", columns, groups, has_order=layer.has_order)
        if bits == 4:
            if order is not None:
                packed = pack_nibbles(unpack_nibbles(packed)[:, order.long()])
            return make_grouped(INT4, packed, scales, offsets, order=order)
        if order is not None:
            packed = packed[:, order.long()]
        return make_grouped(INT8, (packed ^ 128).view(torch.int8), scales, offsets, order=order)

    def _settings_of(self, module: str) -> _Layer | None:
        """The settings of a module; None: it is not quantised."""
        for pattern, layer in self._special:
            if any(pattern.match(name) for name in spellings(module)):
                return layer
        return self._layer


def _read_layer(settings: QuantSettings) -> _Layer:
    return _Layer(
        settings.one_of("bits", (4, 8)),
        settings.group_size("group_size", 128),
        settings.flag("desc_act", False),
        settings.flag("sym", True),
    )
