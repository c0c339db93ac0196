"""Blocks of GGUF's types as codes in groups, which kernels of a GPU multiply: the same numbers in another order.

Scales of Q4_0 and Q8_0 stay in float16. The others are products of float16 and integers of 6 or 8 bits, in float32,
and offsets belong to codes from which 8 is subtracted: they may differ from the block's by a rounding of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from asyncengine.kernels.blocks import SIZES, BlockType
from asyncengine.kernels.grouped import make_grouped, pack_nibbles
from asyncengine.kernels.weight import INT4, INT8, PackedWeight

_Parts = tuple[str, Tensor, Tensor, Tensor | None]
"""The format, codes [N, blocks, numbers of a block], and scales and offsets [N, blocks, groups of a block]."""


def regroup(weight: PackedWeight) -> PackedWeight:
    """A weight in the format BLOCKS, of one of the types of ``REGROUPED``, in INT4 or INT8."""
    kind, n = BlockType(weight.block_type), weight.out_features
    blocks = weight.tensors["blocks"].view(n, -1, SIZES[kind].num_bytes)
    form, codes, scales, offsets = REGROUPED[kind](blocks)
    codes = codes.reshape(n, -1)
    made = make_grouped(
        form,
        pack_nibbles(codes) if form == INT4 else codes,
        scales.reshape(n, -1),
        None if offsets is None else offsets.reshape(n, -1),
    )
    return replace(made, inputs=weight.inputs)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 of each block at this byte, [N, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _nibbles(codes: Tensor, run: int) -> Tensor:
    """The low halves of ``run`` bytes, then their high halves, and so on: as many codes as two for each byte."""
    runs = codes.reshape(*codes.shape[:-1], -1, 1, run)
    return torch.cat((runs & 15, runs >> 4), -2).flatten(-3)


def _q8_0(b: Tensor) -> _Parts:
    return INT8, b[..., 2:].contiguous().view(torch.int8), _half(b, 0), None


def _q4_0(b: Tensor) -> _Parts:
    return INT4, _nibbles(b[..., 2:], 16), _half(b, 0), None


def _q4_1(b: Tensor) -> _Parts:
    scales = _half(b, 0).float()
    return INT4, _nibbles(b[..., 4:], 16), scales, 8 * scales + _half(b, 2).float()


def _q4_k(b: Tensor) -> _Parts:
    low, high, rest = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = _half(b, 0).float() * torch.cat((low & 63, (rest & 15) | ((low >> 2) & 48)), -1)
    offsets = _half(b, 2).float() * torch.cat((high & 63, (rest >> 4) | ((high >> 2) & 48)), -1)
    return INT4, _nibbles(b[..., 16:], 32), scales, 8 * scales - offsets


def _q6_k(b: Tensor) -> _Parts:
    """Codes of 6 bits take 8: their two upper bits lie in bytes of their own."""
    pairs = b[..., 128:192].reshape(*b.shape[:-1], 2, 1, 32)
    upper = torch.cat([(pairs >> shift) & 3 for shift in (0, 2, 4, 6)], -2).flatten(-3)
    codes = (_nibbles(b[..., :128], 64) | (upper << 4)).to(torch.int8) - 32
    return INT8, codes, _half(b, 208).float() * b[..., 192:208].contiguous().view(torch.int8), None


REGROUPED: dict[BlockType, Callable[[Tensor], _Parts]] = {
    BlockType.Q8_0: _q8_0, BlockType.Q4_0: _q4_0, BlockType.Q4_1: _q4_1, BlockType.Q4_K: _q4_k, BlockType.Q6_K: _q6_k,
}  # fmt: skip
"""The types that ``regroup`` takes: groups of 32 columns, those of Q6_K of 16."""
