"""Weights in groups that share scales: what they stand for, and products of every kernel against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.grouped import group_size, make_grouped, pack_nibbles, unpack, unpack_nibbles
from asyncengine.kernels.weight import FLOAT8_GROUPS, INT4, INT8, PackedWeight
from tests.kernels.grouped import random_grouped
from tests.kernels.twins import NO_STEP, assert_within

KINDS: dict[str, dict[str, Any]] = {
    "int4": {"form": INT4, "group": 32},
    "int4 with offsets": {"form": INT4, "group": 64, "offsets": True, "dtype": torch.float16},
    "int4 with a table": {"form": INT4, "group": 16, "table": True},
    "int4 in an order": {"form": INT4, "group": 32, "order": True},
    "int4 by rows": {"form": INT4, "group": 192},
    "int8": {"form": INT8, "group": 192},
    "int8 with all": {"form": INT8, "group": 64, "offsets": True, "order": True},
    "float8": {"form": FLOAT8_GROUPS, "group": 64},
}


def element(weight: PackedWeight, row: int, column: int) -> tuple[int, float]:
    """The input that a column of the packed matrix multiplies, and its element, one by one."""
    tensors = weight.tensors
    group = column // group_size(weight)
    if weight.format == INT4:
        byte = int(tensors["codes"][row, column // 2])
        code = byte >> 4 if column % 2 else byte & 15
        number = float(tensors["table"][code]) if "table" in tensors else code - 8
    else:
        number = float(tensors["codes"][row, column].float())
    shift = float(tensors["offsets"][row, group]) if "offsets" in tensors else 0.0
    at = int(tensors["order"][column]) if "order" in tensors else column
    return at, float(tensors["scales"][row, group]) * number + shift


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_weight_stands_for_a_matrix(kind: str) -> None:
    weight = random_grouped(rows=3, columns=192, **KINDS[kind])
    made = unpack(weight)
    for row in range(3):
        for column in range(0, 192, 5):
            at, value = element(weight, row, column)
            assert made[row, at].item() == pytest.approx(value, abs=1e-6)


def test_nibbles_come_back() -> None:
    codes = torch.randint(16, (3, 10), dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


def test_tensors_that_do_not_fit_are_refused() -> None:
    codes, scales = torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 2)
    for wrong in (
        {"codes": codes.to(torch.int8)},
        {"scales": scales.double()},
        {"scales": torch.ones(3, 2)},
        {"scales": torch.ones(4, 0)},
        {"scales": torch.ones(4, 8)},  # groups of 8
        {"scales": torch.ones(4, 3)},
        {"offsets": torch.ones(4, 1)},
        {"table": torch.ones(8)},
        {"order": torch.arange(64)},
        {"order": torch.arange(3, dtype=torch.int32)},
    ):
        with pytest.raises(ValueError, match=r"scales|offsets|table|order"):
            make_grouped(**{"form": INT4, "codes": codes, "scales": scales} | wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_the_cpu(kind: str, dtype: torch.dtype) -> None:
    """Two weights side by side, the first with a bias, for one row and for a prompt."""
    ops = CpuOps(2)
    weights = [random_grouped(rows=rows, columns=192, seed=7, **KINDS[kind]) for rows in (40, 23)]
    bias = torch.randn(40).to(dtype)
    handle = ops.make_linear(weights, [bias, None])
    x = torch.randn(70, 192, generator=torch.Generator().manual_seed(1)).to(dtype)
    matrix = torch.cat([unpack(weight) for weight in weights]).double()
    exact = F.linear(x.double(), matrix, torch.cat((bias, torch.zeros(23, dtype=dtype))).double())
    sizes = F.linear(x.double().abs(), matrix.abs()) + 1
    made = ops.multiply(x, handle, NO_STEP, torch.float32)
    assert_within(made, exact, sizes * (1e-6 if dtype == torch.float32 else 2.0**-8))
    for rows in (1, 5, 33):
        assert torch.equal(ops.multiply(x[:rows], handle, NO_STEP, torch.float32), made[:rows])
