"""Types of GGUF: numbers in blocks that lie along the rows of a matrix, with the scales of a block before its codes.

The layouts and their numbers are those of ggml's quants (ggml-common.h). K types have blocks of 256, others of 32.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncengine.kernels.weight import PackedWeight

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]


class BlockType(IntEnum):
    """The number of a type in a file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    BF16 = 30


class BlockSize(NamedTuple):
    numbers: int
    num_bytes: int


SIZES = {
    BlockType.F32: BlockSize(1, 4), BlockType.F16: BlockSize(1, 2), BlockType.BF16: BlockSize(1, 2),
    BlockType.Q4_0: BlockSize(32, 18), BlockType.Q4_1: BlockSize(32, 20), BlockType.Q5_0: BlockSize(32, 22),
    BlockType.Q5_1: BlockSize(32, 24), BlockType.Q8_0: BlockSize(32, 34), BlockType.IQ4_NL: BlockSize(32, 18),
    BlockType.Q2_K: BlockSize(256, 84), BlockType.Q3_K: BlockSize(256, 110), BlockType.Q4_K: BlockSize(256, 144),
    BlockType.Q5_K: BlockSize(256, 176), BlockType.Q6_K: BlockSize(256, 210), BlockType.IQ4_XS: BlockSize(256, 136),
}  # fmt: skip
FLOATS = {BlockType.F32: torch.float32, BlockType.F16: torch.float16, BlockType.BF16: torch.bfloat16}
"""Types that are plain floats."""
_IQ4 = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32
)  # the number of each code of 4 bits


def row_bytes(kind: BlockType, columns: int) -> int:
    """Bytes of a row. Raises ValueError if it is no whole number of blocks."""
    size = SIZES[kind]
    if columns % size.numbers:
        raise ValueError(f"a row of {columns} is no whole number of {kind.name} blocks of {size.numbers}")
    return columns // size.numbers * size.num_bytes


def dequantize(kind: BlockType, blocks: Tensor) -> Tensor:
    """The numbers float32 [..., K] of rows of blocks, uint8 [..., bytes] on the CPU."""
    if kind in FLOATS:
        return blocks.contiguous().view(FLOATS[kind]).float()
    size = SIZES[kind]
    flat: Bytes = blocks.contiguous().view(-1, size.num_bytes).numpy()
    numbers = _READERS[kind](flat).reshape(*blocks.shape[:-1], -1)
    return torch.from_numpy(np.ascontiguousarray(numbers, np.float32))


def unpack(weight: PackedWeight) -> Tensor:
    """The matrix float32 [N, K] of a weight in the format ``BLOCKS``."""
    blocks = weight.tensors["blocks"]
    if blocks.is_meta:
        return torch.empty(weight.out_features, weight.in_features, device="meta")
    return dequantize(BlockType(weight.block_type), blocks)


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 of each block at this byte, [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(codes: Bytes, run: int) -> Bytes:
    """[n, 2 * bytes]: the low halves of ``run`` bytes, then their high halves, and so on."""
    runs = codes.reshape(len(codes), -1, 1, run)
    return np.concatenate((runs & 15, runs >> 4), 2).reshape(len(codes), -1)


def _bits(codes: Bytes, run: int, width: int) -> Bytes:
    """[n, bytes * 8 / width]: the lowest ``width`` bits of ``run`` bytes, then their next ones, and so on."""
    shifts = np.arange(0, 8, width, dtype=np.uint8).reshape(1, 1, -1, 1)
    parts = (codes.reshape(len(codes), -1, 1, run) >> shifts) & np.uint8((1 << width) - 1)
    return parts.reshape(len(codes), -1).astype(np.uint8)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """16 for each of 32 codes whose bit is set in the four bytes from ``at``, else 0."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") * np.uint8(16)


def _q4_0(b: Bytes) -> Floats:
    return _half(b, 0) * (_nibbles(b[:, 2:], 16).astype(np.float32) - 8)


def _q4_1(b: Bytes) -> Floats:
    return _half(b, 0) * _nibbles(b[:, 4:], 16) + _half(b, 2)


def _q5_0(b: Bytes) -> Floats:
    return _half(b, 0) * ((_nibbles(b[:, 6:], 16) | _fifth_bits(b, 2)).astype(np.float32) - 16)


def _q5_1(b: Bytes) -> Floats:
    return _half(b, 0) * (_nibbles(b[:, 8:], 16) | _fifth_bits(b, 4)) + _half(b, 2)


def _q8_0(b: Bytes) -> Floats:
    return _half(b, 0) * b[:, 2:].view(np.int8)


def _iq4_nl(b: Bytes) -> Floats:
    return _half(b, 0) * _IQ4[_nibbles(b[:, 2:], 16)]


def _grouped(codes: npt.NDArray[np.generic], scales: Floats, offsets: Floats | None = None) -> Floats:
    """scale * code - offset, with a scale and an offset [n, groups] for each group of columns."""
    numbers = scales[..., None] * codes.reshape(*scales.shape, -1).astype(np.float32)
    return (numbers if offsets is None else numbers - offsets[..., None]).reshape(len(codes), -1)


def _q2_k(b: Bytes) -> Floats:
    packed = b[:, :16]
    return _grouped(_bits(b[:, 16:80], 32, 2), _half(b, 80) * (packed & 15), _half(b, 82) * (packed >> 4))


def _q3_k(b: Bytes) -> Floats:
    packed = b[:, 96:108]
    scales = _nibbles(packed[:, :8], 8) | (_bits(packed[:, 8:], 4, 2) << 4)
    codes = _bits(b[:, 32:96], 32, 2).astype(np.float32) - 4 * (1 - _bits(b[:, :32], 32, 1).astype(np.float32))
    return _grouped(codes, _half(b, 108) * (scales.astype(np.float32) - 32))


def _scales_of_k(b: Bytes) -> tuple[Floats, Floats]:
    """Scales and offsets [n, 8] of Q4_K and Q5_K: six bits each in the twelve bytes behind two halves."""
    low, high, rest = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate((low & 63, (rest & 15) | ((low >> 2) & 48)), 1)
    offsets = np.concatenate((high & 63, (rest >> 4) | ((high >> 2) & 48)), 1)
    return _half(b, 0) * scales, _half(b, 2) * offsets


def _q4_k(b: Bytes) -> Floats:
    return _grouped(_nibbles(b[:, 16:], 32), *_scales_of_k(b))


def _q5_k(b: Bytes) -> Floats:
    return _grouped(_nibbles(b[:, 48:], 32) | (_bits(b[:, 16:48], 32, 1) << 4), *_scales_of_k(b))


def _q6_k(b: Bytes) -> Floats:
    codes = _nibbles(b[:, :128], 64) | (_bits(b[:, 128:192], 32, 2) << 4)
    return _grouped(codes.astype(np.float32) - 32, _half(b, 208) * b[:, 192:208].view(np.int8))


def _iq4_xs(b: Bytes) -> Floats:
    high = np.ascontiguousarray(b[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    low = np.stack((b[:, 4:8] & 15, b[:, 4:8] >> 4), -1).reshape(len(b), 8)
    scales = (low | ((high & 3) << 4)).astype(np.float32) - 32
    return _grouped(_IQ4[_nibbles(b[:, 8:], 16)], _half(b, 0) * scales)


_READERS: dict[BlockType, Callable[[Bytes], Floats]] = {
    BlockType.Q4_0: _q4_0, BlockType.Q4_1: _q4_1, BlockType.Q5_0: _q5_0, BlockType.Q5_1: _q5_1, BlockType.Q8_0: _q8_0,
    BlockType.Q2_K: _q2_k, BlockType.Q3_K: _q3_k, BlockType.Q4_K: _q4_k, BlockType.Q5_K: _q5_k, BlockType.Q6_K: _q6_k,
    BlockType.IQ4_NL: _iq4_nl, BlockType.IQ4_XS: _iq4_xs,
}  # fmt: skip
