"""Products of weights in codes at a real shape on a GPU, beside those of the unpacked weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from asyncengine.kernels.cuda.linear.formats.grouped import Grouped
from asyncengine.kernels.cuda.linear.grouped import GroupedMatrix, multiply, unpack
from asyncengine.kernels.weight import FLOAT8_GROUPS, INT4, INT8
from tests.kernels.grouped import random_grouped

KINDS: dict[str, dict[str, Any]] = {
    "int4": {"form": INT4, "group": 128},
    "int4 with offsets": {"form": INT4, "group": 128, "offsets": True},
    "nf4": {"form": INT4, "group": 64, "table": True},
    "int8": {"form": INT8, "group": 4096},
    "float8": {"form": FLOAT8_GROUPS, "group": 128},
}


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


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_every_number_of_rows(kind: str) -> None:
    weight = grouped(kind)
    matrix = unpack(weight, torch.bfloat16)
    for rows in (1, 2, 16, 64, 200, 300):
        x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        exact = F.linear(x.double(), matrix.double())
        sizes = F.linear(x.double().abs(), matrix.double().abs())
        error = (multiply(x, weight, None, torch.bfloat16).double() - exact).abs()
        assert (error <= sizes * 2.0**-9 + exact.abs() * 2.0**-8).all()


def test_a_product_is_captured() -> None:
    weight = grouped("int4")
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    expected = multiply(x, weight, None, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = multiply(x, weight, None, torch.bfloat16)
    graph.replay()
    assert torch.equal(made, expected)


def measure(kind: str | None, rows: int, repeats: int = 50) -> float:
    """Microseconds of a product of a weight [14336, 4096], one of several that leave no room in the L2 cache.

    ``python -m tests.gpu.test_grouped`` prints them. None: bfloat16.
    """
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    if kind is None:
        dense = [torch.randn(14336, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
        run = [lambda w=w: F.linear(x, w) for w in dense]
    else:
        packed = [grouped(kind, 14336) for _ in range(8)]
        run = [lambda w=w: multiply(x, w, None, torch.bfloat16) for w in packed]
    for product in run:
        product()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats // 8 + 1):
            for product in run:
                product()
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
