"""Weights in groups that share scales: what they stand for, and products of every kernel against it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from asyncengine._core import CpuKernels
from asyncengine.kernels.cpu.linear.handle import CpuLinearHandle
from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.cuda.linear.formats.base import as_tensor
from asyncengine.kernels.cuda.linear.grouped import GroupedMatrix
from asyncengine.kernels.cuda.ops import CudaBatch, CudaOps, CudaOptions
from asyncengine.kernels.cuda.rows.norms import norm_rows
from asyncengine.kernels.cuda.step.tensors import allocate_step
from asyncengine.kernels.grouped import group_size, make_grouped, pack_nibbles, round_to_groups, unpack, unpack_nibbles
from asyncengine.kernels.ops import Norm
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


def exact_products(
    weights: list[PackedWeight], x: torch.Tensor, bias: torch.Tensor, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return products in float64 with the bias of the first weight, and the sums of their terms' sizes."""
    matrix = torch.cat([unpack(weight) for weight in weights])
    if rounded:
        matrix = matrix.to(x.dtype)
    biases = torch.cat((bias, torch.zeros(len(matrix) - len(bias)).to(bias))).double()
    return F.linear(x.double(), matrix.double(), biases), F.linear(x.double().abs(), matrix.double().abs()) + 1


@pytest.mark.parametrize("isa", CpuKernels.available_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_the_cpu(kind: str, dtype: torch.dtype, isa: str) -> None:
    """Two weights side by side, the first with a bias. A row's result does not depend on the other rows."""
    ops = CpuOps(2, isa)
    settings = KINDS[kind]
    weights = [replace(random_grouped(rows=n, columns=192, seed=7, **settings), inputs=dtype) for n in (40, 23)]
    bias = torch.randn(40).to(dtype)
    handle = ops.make_linear(weights, [bias, None])
    assert isinstance(handle, CpuLinearHandle)
    x = torch.randn(70, 192, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact, sizes = exact_products(weights, x, bias, isa == "amx" and dtype == torch.bfloat16)
    made = ops.multiply(x, handle, NO_STEP, torch.float32)
    assert_within(made, exact, sizes * 1e-6)
    for rows in (1, 2, 16, 17, 25, 32, 33):
        assert torch.equal(ops.multiply(x[:rows], handle, NO_STEP, torch.float32), made[:rows])


@pytest.mark.parametrize(("rows", "columns"), [(3, 50), (16, 18), (130, 2080), (33, 801)])
@pytest.mark.parametrize("form", [INT4, INT8])
@pytest.mark.parametrize("isa", CpuKernels.available_isas())
def test_shapes_that_fill_no_tile(form: str, rows: int, columns: int, isa: str) -> None:
    """One group for each row, whose length is no multiple of anything."""
    columns += columns % 2
    for dtype in (torch.float32, torch.bfloat16):
        ops = CpuOps(2, isa)
        weight = replace(random_grouped(form, rows, columns, columns, 3), inputs=dtype)
        x = torch.randn(61, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
        bias = torch.zeros(rows, dtype=dtype)
        exact, sizes = exact_products([weight], x, bias, isa == "amx" and dtype == torch.bfloat16)
        made = ops.multiply(x, ops.make_linear([weight], [None]), NO_STEP, torch.float32)
        assert_within(made, exact, sizes * 2e-6)
        for count in (1, 7):
            assert torch.equal(
                ops.multiply(x[:count], ops.make_linear([weight], [None]), NO_STEP, torch.float32), made[:count]
            )


def test_weights_that_say_no_dtype_are_unpacked() -> None:
    """The products of two weights in different orders too."""
    weights = [random_grouped(INT4, 24, 64, 32, seed, order=True) for seed in (1, 2)]
    x = torch.randn(5, 64)
    ops = CpuOps(2)
    exact, sizes = exact_products(weights, x, torch.zeros(24), False)
    assert_within(ops.multiply(x, ops.make_linear(weights, [None, None]), NO_STEP), exact, sizes * 1e-6)


CODED = {
    "int4": {"form": INT4, "group": 128},
    "int4 in half tiles": {"form": INT4, "group": 64, "offsets": True},
    "int4 with offsets": {"form": INT4, "group": 256, "offsets": True, "order": True, "dtype": torch.float16},
    "int8": {"form": INT8, "group": 512},
    "int8 with offsets": {"form": INT8, "group": 128, "offsets": True},
    "float8": {"form": FLOAT8_GROUPS, "group": 128},
}
"""Weights that the kernel of coded.py multiplies."""
ON_THE_GPU = [*((settings, 192) for settings in KINDS.values()), *((settings, 512) for settings in CODED.values())]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("settings", "columns"), ON_THE_GPU, ids=[*KINDS, *(f"{name}, coded" for name in CODED)])
def test_products_of_the_gpu(settings: dict[str, Any], columns: int, dtype: torch.dtype, device: torch.device) -> None:
    """By one row, by tensor cores, and for many rows by a library, behind a norm and with an activation."""
    ops = CudaOps(device)
    weights = [random_grouped(rows=40, columns=columns, seed=7, **settings) for _ in range(2)]
    weights = [replace(w, tensors={name: t.to(device) for name, t in w.tensors.items()}) for w in weights]
    bias = torch.randn(40).to(dtype).to(device)
    handle = ops.make_linear(weights, [bias, None])
    assert isinstance(handle.weight, GroupedMatrix)
    coded = columns == 512  # by a kernel that rounds no weight
    assert handle.weight.scales_sums == coded
    for rows in (1, 20, 257):
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
        exact, sizes = exact_products(weights, x, bias, not coded)
        bound = sizes * (2e-6 if dtype == torch.float32 else 2.0**-7)
        assert_within(ops.linear(x, handle, NO_STEP), exact, bound)
        if rows == 20:
            norm = Norm((torch.rand(columns) / (16 if coded else 1)).to(dtype).to(device), None, 1e-6)
            made = ops.norm_linear(ops.residual(x, NO_STEP), norm, handle, NO_STEP, "silu_mul")
            gate, up = exact_products(weights, norm_rows(x, norm, pdl=False), bias, not coded)[0].chunk(2, 1)
            assert_within(made, F.silu(gate) * up, 2.0**-6 * (gate.abs() * up.abs() + up.abs() + gate.abs() + 1))
            residual = ops.residual(torch.ones(20, 80, dtype=dtype, device=device), NO_STEP)
            ops.linear_add_(x, handle, residual, NO_STEP)
            assert_within(ops.plain(residual, NO_STEP), exact + 1, 2 * bound)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("settings", "columns"), ON_THE_GPU, ids=[*KINDS, *(f"{name}, coded" for name in CODED)])
def test_results_of_invariant_products_do_not_depend_on_the_rows(
    settings: dict[str, Any], columns: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Alone, in a tile, and among more rows than are multiplied without a library otherwise."""
    ops = CudaOps(device, CudaOptions(batch_invariant=True))
    weight = random_grouped(rows=40, columns=columns, seed=7, **settings)
    weight = replace(weight, tensors={name: t.to(device) for name, t in weight.tensors.items()})
    handle = ops.make_linear([weight], [None])
    x = torch.randn(257, columns, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    many = ops.linear(x, handle, NO_STEP).clone()
    exact, sizes = exact_products([weight], x, torch.zeros(40, device=device), not handle.weight.scales_sums)
    assert_within(many, exact, sizes * (2e-6 if dtype == torch.float32 else 2.0**-7))
    for rows in ((0,), (256,), range(100, 120)):
        assert torch.equal(ops.linear(x[list(rows)], handle, NO_STEP), many[list(rows)])
        residual = ops.residual(torch.ones(len(rows), 40, dtype=dtype, device=device), NO_STEP)
        ops.linear_add_(x[list(rows)], handle, residual, NO_STEP)
        among = ops.residual(torch.ones(257, 40, dtype=dtype, device=device), NO_STEP)
        ops.linear_add_(x, handle, among, NO_STEP)
        assert torch.equal(ops.plain(residual, NO_STEP), ops.plain(among, NO_STEP)[list(rows)])


@pytest.mark.parametrize("form", [INT8, FLOAT8_GROUPS])
@pytest.mark.parametrize("needs", [0, -1])
def test_logits_of_a_packed_head(form: str, needs: int, device: torch.device) -> None:
    """The tokens that are sampled have them, in float32; a greedy batch gets them as well."""
    ops, weight = CudaOps(device), random_grouped(form, 200, 256, 128)
    on_device = replace(weight, tensors={name: tensor.to(device) for name, tensor in weight.tensors.items()})
    x = torch.randn(5, 256).bfloat16().to(device)
    norm = Norm(torch.rand(256).bfloat16().to(device), None, 1e-6)
    step = replace(allocate_step(3, 1, 3, 5, device), sample_index=torch.tensor([0, 2, 4], device=device))
    made = ops.logits(ops.residual(x, NO_STEP), norm, ops.make_head(on_device), CudaBatch(step, needs=needs))
    assert isinstance(made, torch.Tensor)
    assert made.dtype == torch.float32
    exact, sizes = exact_products([weight], norm_rows(x, norm, pdl=False)[[0, 2, 4]], torch.zeros(200), False)
    assert_within(made, exact, sizes * 2.0**-7)


def test_experts_of_the_gpu_are_unpacked(device: torch.device) -> None:
    up = [[replace(random_grouped(INT4, 32, 64, 32, seed), inputs=torch.float32)] * 2 for seed in range(3)]
    down = [replace(random_grouped(INT8, 64, 32, 32, seed), inputs=torch.float32) for seed in range(3)]
    experts = CudaOps(device).make_experts(up, down, "silu_mul")
    assert torch.equal(as_tensor(experts.up[0].weight), torch.cat([unpack(w) for of_one in up for w in of_one]))


@pytest.mark.parametrize(("form", "most"), [(INT4, 0.12), (INT8, 0.007), (FLOAT8_GROUPS, 0.03)])
def test_rounding_to_groups(form: str, most: float) -> None:
    """The error is a share of the weights, and clipping never makes it larger than rounding alone."""
    weight = torch.randn(24, 192, generator=torch.Generator().manual_seed(2))
    packed = round_to_groups(form, weight)
    assert group_size(packed) == 64
    assert ((unpack(packed) - weight).norm() / weight.norm()).item() < most
    if form == FLOAT8_GROUPS:
        return
    parts, top = weight.view(24, 3, 64), 7 if form == INT4 else 127
    scales = parts.abs().amax(-1, keepdim=True) / top
    plain = ((parts / scales).round() * scales).view(24, 192)
    assert (unpack(packed) - weight).norm() <= (plain - weight).norm() * 1.0001
