"""Native products with blocks of GGUF's types, beside their numbers in floats."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from asyncengine._core import CpuKernels, CpuLinear, Dtype, StepBatch
from asyncengine.kernels.blocks import FLOATS, SIZES, BlockType, dequantize
from asyncengine.kernels.cpu.linear.formats.blocks import Blocks
from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.weight import BLOCKS, PackedWeight
from tests.models.gguf_files import random_blocks

N = 37


def packed(kind: int, rows: int, k: int, seed: int = 0) -> PackedWeight:
    blocks = torch.from_numpy(random_blocks(Type(kind), rows, k, seed))
    return PackedWeight(BLOCKS, {"blocks": blocks}, rows, k, torch.bfloat16, kind)


CODED = [kind for kind in SIZES if kind not in FLOATS]


@pytest.mark.parametrize("kind", CODED)
def test_products(kind: BlockType) -> None:
    """Instruction sets and the plain path agree; threads and the number of rows change no bit."""
    k = 768 if SIZES[kind].numbers == 256 else 352
    first, second = packed(kind, N, k), packed(BlockType.Q8_0, 3, k)
    weight = torch.cat([dequantize(BlockType(w.block_type), w.tensors["blocks"]) for w in (first, second)]).double()
    bias = torch.randn(3, generator=torch.Generator().manual_seed(3)).bfloat16()
    x = torch.randn(64, k, generator=torch.Generator().manual_seed(0)).bfloat16()
    parts = (rounded(x, SIZES[kind].numbers) @ weight[:N].T, rounded(x, 32) @ weight[N:].T + bias.double())
    exact = torch.cat(parts, dim=1)
    for isa in CpuKernels.available_isas():
        whole = product(isa, 2, [first, second], bias, x)
        torch.testing.assert_close(whole.double(), exact, rtol=1e-4, atol=1e-4 * exact.abs().mean().item())
        for rows in (1, 3, 7, 8, 16, 17, 33):
            assert torch.equal(product(isa, 1, [first, second], bias, x[:rows]), whole[:rows])
        assert torch.equal(product(isa, 1, [first, second], bias, x[20:]), whole[20:])


@pytest.mark.parametrize("kind", CODED)
def test_instruction_sets_that_fuse_give_the_same_bits(kind: BlockType) -> None:
    """Rows by tiles of AMX are rows by AVX-512 and AVX2, also where a weight has more rows than a task takes."""
    k = SIZES[kind].numbers * 3
    weights = [packed(kind, 8 * N, k), packed(BlockType.Q4_1, 5, k)]
    x = torch.randn(81, k, generator=torch.Generator().manual_seed(0)).bfloat16()
    bias = torch.ones(5).bfloat16()
    found = [product(isa, 1, weights, bias, x) for isa in CpuKernels.available_isas() if isa != "portable"]
    assert all(torch.equal(y, found[0]) for y in found)


def test_kernels_have_a_name() -> None:
    """An instruction set's name is also that of its products with blocks; AVX-512 may lack VNNI, and AMX bytes."""
    names = {isa: CpuKernels(1, isa).block_kernels for isa in CpuKernels.available_isas()}
    allowed = {"amx": {"amx", "vnni", "avx2"}, "avx512": {"vnni", "avx2"}, "avx2": {"avx2"}, "portable": {"portable"}}
    assert all(name in allowed[isa] for isa, name in names.items())


def rounded(x: torch.Tensor, columns: int) -> torch.Tensor:
    """Rows in codes of 8 bits, with a scale for so many columns."""
    groups = x.float().view(len(x), -1, columns)
    largest = groups.abs().amax(-1, keepdim=True)
    return ((groups * (torch.full_like(largest, 127) / largest)).round() * (largest / 127)).view(x.shape).double()


def product(isa: str, threads: int, weights: list[PackedWeight], bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    ops = CpuOps(threads, isa)
    handle = ops.make_linear(weights, [None, bias])
    return ops.multiply(x, handle, None, torch.float32).clone()  # type: ignore[arg-type]  # it is not read


def test_rows_that_no_code_holds() -> None:
    """Zeros and numbers too small to divide by give zeros; NaN and infinity give no finite number."""
    weight = packed(BlockType.Q8_0, N, 64)
    x = torch.zeros(4, 64).bfloat16()
    x[1] = 1e-38
    x[2, 40] = torch.nan
    x[3, 5] = -torch.inf
    for isa in CpuKernels.available_isas():
        y = product(isa, 1, [weight, packed(BlockType.Q4_1, 1, 64)], torch.zeros(1).bfloat16(), x)
        assert torch.equal(y[:2], torch.zeros(2, N + 1))
        assert not y[2:].isfinite().any()


def test_other_blocks_are_refused() -> None:
    for kind, columns, message in ((99, 96, "no kernel"), (0, 96, "no kernel"), (8, 40, "whole blocks")):
        linear = CpuLinear([64], [1], [0], columns, Dtype.bfloat16)
        with pytest.raises(ValueError, match=message):
            linear.set_blocks([kind])
    with pytest.raises(ValueError, match="every matrix"):
        CpuLinear([64], [1], [0], 96, Dtype.bfloat16).set_blocks([])
    short = packed(BlockType.Q8_0, N, 64).tensors["blocks"][:, 1:]
    wrong = PackedWeight(BLOCKS, {"blocks": short}, N, 64, torch.bfloat16, BlockType.Q8_0)
    with pytest.raises(ValueError, match="blocks"):
        CpuOps(1).make_linear([wrong], [None])


@pytest.mark.parametrize("kind", CODED)
def test_rows_of_a_table(kind: BlockType) -> None:
    k = 512 if SIZES[kind].numbers == 256 else 352
    weight = packed(kind, N, k)
    ids = [3, 36, 3, 0]
    found = Blocks().rows(weight, torch.tensor(ids))
    assert torch.equal(found, Blocks().unpack(weight)[ids])
    batch = StepBatch(ids, [0] * 4, [0] * 4, [0, 4], [0], [[0]], [])
    for isa in CpuKernels.available_isas():
        ops = CpuOps(2, isa)
        table = ops.make_embedding(weight, tied=True)
        for scale in (1.0, 1.3):
            assert torch.equal(ops.embed(batch, table, None, scale).x, (found * scale).bfloat16())
        with pytest.raises(ValueError, match="positions"):
            ops.embed(batch, table, torch.zeros(4, k).bfloat16())
