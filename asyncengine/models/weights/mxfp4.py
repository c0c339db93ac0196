"""MXFP4 (Open Compute Project, "Microscaling Formats" 1.0): numbers of 4 bits in blocks of 32 that share a power of 2.

A byte has two numbers, the first in its low half: a sign, two bits of an exponent and one of a fraction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncengine.kernels.grouped import FP4_NUMBERS, make_grouped
from asyncengine.kernels.weight import INT4, PackedWeight

BLOCK = 32
BIAS = 127


def unpack_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K] of blocks uint8 [N, K / 32, 16] and scales uint8 [N, K / 32], exactly."""
    values = torch.tensor(FP4_NUMBERS, dtype=dtype, device=blocks.device)
    pairs = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).to(torch.int32)
    factors = torch.exp2(scales.float() - BIAS).to(dtype)
    return (values[pairs] * factors[..., None]).flatten(1)


def pack_mxfp4(blocks: Tensor, scales: Tensor) -> PackedWeight:
    """The same matrix in its codes, with the scales in float32."""
    numbers = torch.tensor(FP4_NUMBERS, device=blocks.device)
    return make_grouped(INT4, blocks.flatten(1), torch.exp2(scales.float() - BIAS), table=numbers)
