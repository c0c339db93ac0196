"""Products of weights in codes at a real shape on a GPU, beside those of the unpacked weights."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.linear.candidates import candidates
from asyncengine.kernels.cuda.linear.coded import coded_linear
from asyncengine.kernels.cuda.linear.direct import direct_linear, direct_sum
from asyncengine.kernels.cuda.linear.formats.grouped import Grouped
from asyncengine.kernels.cuda.linear.formats.registry import format_of
from asyncengine.kernels.cuda.linear.grouped import TILE_COLUMNS, GroupedMatrix, multiply, unpack
from asyncengine.kernels.cuda.linear.plan import Plan, Site
from asyncengine.kernels.cuda.linear.residual import Residual
from asyncengine.kernels.cuda.ops import CudaBatch, CudaOps, CudaOptions
from asyncengine.kernels.cuda.step.tensors import allocate_step
from asyncengine.kernels.cuda.trials import examine
from asyncengine.kernels.grouped import unpack as unpack_packed
from asyncengine.kernels.ops import Activation, Norm
from asyncengine.kernels.weight import FLOAT8_GROUPS, INT4, INT8
from tests.kernels.grouped import random_grouped

KINDS: dict[str, dict[str, Any]] = {
    "int4": {"form": INT4, "group": 128},
    "int4 with offsets": {"form": INT4, "group": 128, "offsets": True},
    "int4 in half tiles": {"form": INT4, "group": 64, "offsets": True},
    "nf4": {"form": INT4, "group": 64, "table": True},
    "int4 of GGUF": {"form": INT4, "group": 32, "offsets": True},
    "int8 of GGUF": {"form": INT8, "group": 32, "dtype": torch.float16},
    "six bits of GGUF": {"form": INT8, "group": 16},
    "int8": {"form": INT8, "group": 4096},
    "int8 in groups": {"form": INT8, "group": 128, "offsets": True, "dtype": torch.float16},
    "float8": {"form": FLOAT8_GROUPS, "group": 128},
}


@cache
def arrivals() -> torch.Tensor:
    """Counters that launches leave at 0."""
    return torch.zeros(1 << 12, dtype=torch.int32, device="cuda")


def grouped(kind: str, rows: int = 6144, columns: int = 4096) -> GroupedMatrix:
    settings = KINDS[kind] | {"group": min(columns, KINDS[kind]["group"])}
    weight = random_grouped(rows=rows, columns=columns, **settings)
    made = Grouped(settings["form"]).pack([weight], [None]).weight
    assert isinstance(made, GroupedMatrix)
    tensors = {
        name: None if (tensor := getattr(made, name)) is None else tensor.cuda()
        for name in ("codes", "scales", "offsets", "table", "order")
    }
    return GroupedMatrix(made.form, **tensors)


def product(
    x: torch.Tensor, weight: GroupedMatrix, *, activation: Activation | None = None, to: torch.Tensor | None = None
) -> torch.Tensor:
    """The product by the kernel of direct.py or coded.py if one takes the weight and so many rows, else by
    ``multiply``."""
    rows, inner = weight.shape
    columns, form = rows // 2 if activation == "silu_mul" else rows, format_of(weight)
    site = Site(columns, inner, len(x), "none", activation, False, to is not None, form.kind(x.dtype))
    if form.takes_library_alone(site):
        made = multiply(x, weight, None, x.dtype)
        if activation is not None:
            gate, up = made.float().chunk(2, 1)
            made = (F.silu(gate) * up).to(x.dtype)
        return made if to is None else to + made
    plan = form.pattern(site, H200)
    assert plan is not None
    out = torch.empty(len(x), columns, device="cuda", dtype=x.dtype) if to is None else to.clone()
    if plan.kind == "direct":
        direct_linear(x, weight, plan, out=out, activation=activation, add=to is not None)
    else:
        coded_linear(x, weight, plan, out=out, activation=activation, add=to is not None, arrivals=arrivals())
    return out


def assert_is_product(made: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, *label: object) -> None:
    """``made`` is x times the matrix, transposed, to the rounding of a result of 16 bits."""
    exact, sizes = F.linear(x.double(), matrix), F.linear(x.double().abs(), matrix.abs())
    excess = (made.double() - exact).abs() / (sizes * 2.0**-9 + exact.abs() * 2.0**-8)
    worst = int(excess.nan_to_num(torch.inf).argmax())
    row, column = divmod(worst, made.shape[1])
    assert excess.max() <= 1, (
        *label,
        f"row {row}, column {column}",
        made[row, column].item(),
        exact[row, column].item(),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_every_number_of_rows(kind: str) -> None:
    weight = grouped(kind)
    matrix = unpack(weight, torch.float32).double()
    for rows in (1, 2, 8, 16, 20, 32, 64, 200, 300):
        x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        assert_is_product(product(x, weight), x, matrix, kind, rows)


@pytest.mark.parametrize("kind", ["int8", "int8 in groups"])
def test_weights_of_int8_that_fill_no_tiles(kind: str) -> None:
    """Rows are no multiple of 8: few rows take the kernel of coded.py too."""
    weight = grouped(kind, 1020)
    assert not weight.tiled
    matrix = unpack(weight, torch.float32).double()
    for rows in (1, 20, 64, 300):
        x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        assert_is_product(product(x, weight), x, matrix, kind, rows)


OF_GGUF = ["int4 of GGUF", "int8 of GGUF", "six bits of GGUF"]


@pytest.mark.parametrize("kind", ["int4", "int4 in half tiles", "int8", "int8 in groups", *OF_GGUF])
def test_every_plan_for_few_rows(kind: str) -> None:
    """Weights fill neither the last program nor the last step."""
    weight = grouped(kind, 600, 1664)
    matrix = unpack(weight, torch.float32).double()
    for rows in (16,) if kind == "int8 in groups" else (3, 16, 32):
        x = torch.randn(rows, 1664, device="cuda", dtype=torch.bfloat16)
        site = Site(600, 1664, rows, "none", None, False, False, format_of(weight).kind(x.dtype))
        plans = [plan for plan in candidates(site, H200) if plan.kind == "direct"]
        assert len(plans) > 2
        for plan in (*plans, replace(plans[0], holds=True)):  # for which the weight has too few steps
            out = torch.empty(rows, 600, device="cuda", dtype=torch.bfloat16)
            direct_linear(x, weight, plan, out=out)
            assert_is_product(out, x, matrix, kind, plan)


@pytest.mark.parametrize("form", [INT8, FLOAT8_GROUPS])
def test_logits_of_a_packed_head(form: str) -> None:
    """A vocabulary's, sampled and greedy, by the plans that an engine would take."""
    ops = CudaOps(torch.device("cuda"), CudaOptions(gpu=examine(torch.device("cuda"))))
    weight = random_grouped(form, 32064, 4096, 128)
    weight = replace(weight, tensors={name: tensor.cuda() for name, tensor in weight.tensors.items()})
    head, norm = ops.make_head(weight), Norm(torch.ones(4096, device="cuda", dtype=torch.bfloat16), None, 1e-6)
    matrix = unpack_packed(weight).double()
    for rows in (1, 8, 64, 256):
        x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        normed = F.rms_norm(x.float(), (4096,), eps=1e-6).bfloat16().double()
        exact, sizes = F.linear(normed, matrix), F.linear(normed.abs(), matrix.abs())
        step = allocate_step(rows, 1, rows, rows, ops.device)
        step.sample_index.copy_(torch.arange(rows))
        for needs in (0, -1):
            made = ops.logits(Residual(x), norm, head, CudaBatch(step, needs=needs))
            assert isinstance(made, torch.Tensor), (rows, needs)
            assert ((made.double() - exact).abs() <= sizes * 2.0**-7).all(), (rows, needs)


@pytest.mark.parametrize("kind", KINDS)
def test_results_of_invariant_products_do_not_depend_on_the_rows(kind: str) -> None:
    ops = CudaOps(torch.device("cuda"), CudaOptions(gpu=examine(torch.device("cuda")), batch_invariant=True))
    weight = random_grouped(rows=1536, columns=4096, **KINDS[kind])
    weight = replace(weight, tensors={name: tensor.cuda() for name, tensor in weight.tensors.items()})
    handle = ops.make_linear([weight], [None])
    x = torch.randn(600, 4096, device="cuda", dtype=torch.bfloat16)
    batch = CudaBatch(allocate_step(1, 1, 1, 1, ops.device))
    many = ops.linear(x, handle, batch).clone()
    for first, last in ((0, 1), (599, 600), (10, 17), (100, 356)):
        assert torch.equal(ops.linear(x[first:last], handle, batch), many[first:last]), (kind, first, last)


@pytest.mark.parametrize(
    "kinds",
    [("int4", "int4 with offsets"), ("int8", "int8 in groups"), ("int8", "int8"), ("int8 of GGUF", "int8 of GGUF")],
)
def test_a_norm_between_two_products(kinds: tuple[str, str]) -> None:
    """One product adds to the residual and prepares the norm, the next one ends it."""
    first, second = grouped(kinds[0], 1024, 4096), grouped(kinds[1], 2048, 1024)
    plan = Plan("direct", 16, TILE_COLUMNS[first.form], 8, 8, stages=2, ahead=1, fused_norm=False)
    for rows in (1, 5):
        x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16) / 64
        to = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
        norm = Norm(torch.randn(1024, device="cuda", dtype=torch.bfloat16) / 32, None, 1e-5)
        bias = torch.randn(2048, device="cuda", dtype=torch.bfloat16)
        total = to.double() + F.linear(x.double(), unpack(first, torch.float32).double())
        prepared = direct_sum(x, first, plan, out=to, norm=norm)
        torch.testing.assert_close(to.double(), total, rtol=0.02, atol=0.02)
        out = torch.empty(rows, 1024, device="cuda", dtype=torch.bfloat16)
        direct_linear(prepared, second, plan, out=out, bias=bias, activation="silu_mul")
        normed = F.rms_norm(to.double(), (1024,), norm.weight.double(), norm.eps)
        gate, up = F.linear(normed, unpack(second, torch.float32).double(), bias.double()).chunk(2, 1)
        torch.testing.assert_close(out.double(), F.silu(gate) * up, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "kind", ["int4", "int4 with offsets", "int4 in half tiles", "int8", "int8 in groups", "float8", *OF_GGUF]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_and_sums_are_part_of_a_product(kind: str, dtype: torch.dtype) -> None:
    weight = grouped(kind, 512)
    matrix = unpack(weight, torch.float32).double()
    for rows in (1, 9, 32, 70):
        x = torch.randn(rows, 4096, device="cuda", dtype=dtype) / 64
        made, (gate, up) = F.linear(x.double(), matrix), F.linear(x.double(), matrix).chunk(2, 1)
        gated = product(x, weight, activation="silu_mul").double()
        torch.testing.assert_close(gated, F.silu(gate) * up, rtol=0.02, atol=0.02)
        to = torch.randn(rows, 512, device="cuda", dtype=dtype)
        torch.testing.assert_close(product(x, weight, to=to).double(), to.double() + made, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_a_product_is_captured(kind: str) -> None:
    weight = grouped(kind)
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    expected = product(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = product(x, weight)
    graph.replay()
    assert torch.equal(made, expected)


def measure(kind: str | None, rows: int, repeats: int = 50) -> float:
    """Microseconds of a product of a weight [14336, 4096], one of several that leave no room in the L2 cache.

    ``python -m tests.gpu.test_grouped`` prints them. None: bfloat16.
    """
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    if kind is None:
        dense = [torch.randn(14336, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
        calls = [partial(F.linear, x, w) for w in dense]
    else:
        packed = [grouped(kind, 14336) for _ in range(8)]
        calls = [partial(product, x, w) for w in packed]
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats // 8 + 1):
            for call in calls:
                call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / ((repeats // 8 + 1) * 8)


if __name__ == "__main__":
    for rows in (1, 8, 16, 64, 256, 512):
        print(rows, {kind or "bf16": round(measure(kind, rows), 1) for kind in (None, *KINDS)})
