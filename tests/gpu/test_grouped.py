"""Products of weights in codes at a real shape on a GPU, beside those of the unpacked weights."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.linear.coded import coded_linear
from asyncengine.kernels.cuda.linear.formats.grouped import Grouped
from asyncengine.kernels.cuda.linear.formats.registry import FORMATS
from asyncengine.kernels.cuda.linear.grouped import MAX_ROWS, GroupedMatrix, multiply, unpack
from asyncengine.kernels.cuda.linear.plan import Site
from asyncengine.kernels.ops import Activation
from asyncengine.kernels.weight import FLOAT8_GROUPS, INT4, INT8
from tests.kernels.grouped import random_grouped

KINDS: dict[str, dict[str, Any]] = {
    "int4": {"form": INT4, "group": 128},
    "int4 with offsets": {"form": INT4, "group": 128, "offsets": True},
    "nf4": {"form": INT4, "group": 64, "table": True},
    "int8": {"form": INT8, "group": 4096},
    "float8": {"form": FLOAT8_GROUPS, "group": 128},
}


@cache
def arrivals() -> torch.Tensor:
    """Counters that launches leave at 0."""
    return torch.zeros(1 << 12, dtype=torch.int32, device="cuda")


def grouped(kind: str, rows: int = 6144, columns: int = 4096) -> GroupedMatrix:
    settings = KINDS[kind]
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
    """The product by the kernel of coded.py if it takes the weight and so many rows, else by ``multiply``."""
    if not weight.scales_sums or len(x) > MAX_ROWS:
        return multiply(x, weight, None, torch.bfloat16)
    rows, inner = weight.shape
    columns = rows // 2 if activation == "silu_mul" else rows
    site = Site(columns, inner, len(x), "none", activation, False, to is not None, weight.form)
    plan = FORMATS[weight.form].pattern(site, H200)
    assert plan is not None
    out = torch.empty(len(x), columns, device="cuda", dtype=x.dtype) if to is None else to.clone()
    coded_linear(x, weight, plan, out=out, activation=activation, add=to is not None, arrivals=arrivals())
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_every_number_of_rows(kind: str) -> None:
    weight = grouped(kind)
    matrix = unpack(weight, torch.float32).double()
    for rows in (1, 2, 16, 64, 200, 300):
        x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        exact, sizes = F.linear(x.double(), matrix), F.linear(x.double().abs(), matrix.abs())
        error = (product(x, weight).double() - exact).abs()
        assert (error <= sizes * 2.0**-9 + exact.abs() * 2.0**-8).all()


@pytest.mark.parametrize("kind", ["int4", "int4 with offsets", "int8", "float8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_and_sums_are_part_of_a_product(kind: str, dtype: torch.dtype) -> None:
    weight = grouped(kind, 512)
    matrix = unpack(weight, torch.float32).double()
    for rows in (1, 9, 70):
        x = torch.randn(rows, 4096, device="cuda", dtype=dtype) / 64
        made, (gate, up) = F.linear(x.double(), matrix), F.linear(x.double(), matrix).chunk(2, 1)
        gated = product(x, weight, activation="silu_mul").double()
        torch.testing.assert_close(gated, F.silu(gate) * up, rtol=0.02, atol=0.02)
        to = torch.randn(rows, 512, device="cuda", dtype=dtype)
        torch.testing.assert_close(product(x, weight, to=to).double(), to.double() + made, rtol=0.02, atol=0.02)


def test_a_product_is_captured() -> None:
    weight = grouped("int4")
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
