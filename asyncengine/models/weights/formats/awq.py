"""Checkpoints of AWQ in the layout "gemm": 4 bits in groups, with a zero point for each."""

from __future__ import annotations

import torch

from asyncengine.kernels.grouped import make_grouped, pack_nibbles
from asyncengine.kernels.weight import INT4, PackedWeight
from asyncengine.models.weights.formats.base import TensorSource
from asyncengine.models.weights.formats.packed import Packed, Shape, groups_of, nibbles_of_words, read_scales
from asyncengine.models.weights.formats.settings import QuantSettings

_KEYS = (
    "quant_method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "modules_to_not_convert",
    "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config",
)  # fmt: skip
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word, counted from its lowest four bits, of each of eight neighbouring columns of an output."""


class Awq(Packed):
    """MODULE.qweight int32 [K, N / 8], MODULE.qzeros int32 [K / G, N / 8] and MODULE.scales [K / G, N]."""

    def __init__(self, settings: QuantSettings) -> None:
        settings.only(*_KEYS)
        settings.one_of("bits", (4,), settings.values.get("w_bit") or 4)
        settings.one_of("version", ("gemm", "GEMM"), "gemm")
        self._has_zeros = settings.flag("zero_point", True)
        key = "q_group_size" if settings.values.get("group_size") is None else "group_size"
        self._group = settings.group_size(key, 128)
        self._dense = settings.names("modules_to_not_convert", parts=True)

    def is_packed(self, tensors: TensorSource, module: str) -> bool:
        return module not in self._dense and super().is_packed(tensors, module)

    def read(self, tensors: TensorSource, module: str, shape: Shape) -> PackedWeight:
        rows, columns = shape
        groups = groups_of(module, columns, self._group)
        if rows % 8:
            raise ValueError(f"{rows} rows are no words of 8")
        kinds = (torch.int32,)
        words = tensors.raw(f"{module}.qweight", (columns, rows // 8), kinds=kinds, parameters=rows * columns)
        places = torch.tensor(_PLACES, device=words.device)
        codes = nibbles_of_words(words).view(columns, -1, 8)[..., places].reshape(columns, rows).T
        scales = read_scales(tensors, f"{module}.scales", (groups, rows)).float().T.contiguous()
        offsets = None
        if self._has_zeros:
            words = tensors.raw(f"{module}.qzeros", (groups, rows // 8), kinds=kinds)
            zeros = nibbles_of_words(words).view(groups, -1, 8)[..., places].reshape(groups, rows).T
            offsets = scales * (8 - zeros.float())
        return make_grouped(INT4, pack_nibbles(codes.contiguous()), scales, offsets)
