"""Native products with blocks of GGUF's types, beside their numbers in floats."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from asyncengine._core import CpuKernels
from asyncengine.kernels.blocks import dequantize
from asyncengine.kernels.cpu.linear.formats.blocks import NATIVE
from tests.models.gguf_files import random_blocks

N = 37


def product(isa: str, kind: int, blocks: torch.Tensor, x: torch.Tensor, threads: int = 2) -> torch.Tensor:
    y = torch.full((len(x), len(blocks)), torch.nan)
    kernels = CpuKernels(threads, isa)
    kernels.block_linear(
        kind, blocks.data_ptr(), len(blocks), x.shape[1], x.data_ptr(), len(x), y.data_ptr(), len(blocks)
    )
    return y


@pytest.mark.parametrize("kind", sorted(NATIVE))
def test_products(kind: int) -> None:
    """Every instruction set, numbers of rows and threads; K of an odd number of blocks."""
    k = 768 if kind >= 10 else 96
    blocks = torch.from_numpy(random_blocks(Type(kind), N, k))
    weight = dequantize(kind, blocks).double()
    x = torch.randn(64, k, generator=torch.Generator().manual_seed(0))
    scales = x.view(64, -1, 32).abs().amax(-1, keepdim=True) / 127
    rounded = ((x.view(64, -1, 32) / scales).round() * scales).view(64, k)
    exact = rounded.double() @ weight.T
    for isa in CpuKernels.available_isas():
        whole = product(isa, kind, blocks, x)
        torch.testing.assert_close(whole.double(), exact, rtol=1e-4, atol=1e-3 * exact.abs().mean().item())
        for rows in (1, 3, 16):
            assert torch.equal(product(isa, kind, blocks, x[:rows], threads=1), whole[:rows])


def test_other_types_are_refused() -> None:
    x = torch.zeros(1, 96)
    for kind, columns in ((99, 96), (8, 40)):
        with pytest.raises(ValueError, match="no kernel"):
            CpuKernels(1).block_linear(kind, x.data_ptr(), 1, columns, x.data_ptr(), 1, x.data_ptr(), 1)


def test_zeros() -> None:
    blocks = torch.from_numpy(random_blocks(Type.Q8_0, N, 64))
    assert torch.equal(product("auto", 8, blocks, torch.zeros(2, 64)), torch.zeros(2, N))
    assert np.isfinite(product("portable", 8, blocks, torch.full((1, 64), 1e-38)).numpy()).all()
