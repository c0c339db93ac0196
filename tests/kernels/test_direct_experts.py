"""The kernel of experts in codes for few rows of each (experts/direct.py), executed in torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncengine.kernels.cuda.experts import direct, mix
from asyncengine.kernels.cuda.experts.codes import stack_codes
from asyncengine.kernels.cuda.experts.plan import DirectPlan, DirectTiles
from asyncengine.kernels.cuda.experts.sort import sort_pairs
from asyncengine.kernels.cuda.experts.stack import stack_experts
from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.linear import ends, operands
from asyncengine.kernels.cuda.linear.grouped import CodedRows
from asyncengine.kernels.cuda.linear.handle import CudaLinear
from asyncengine.kernels.grouped import round_to_groups
from asyncengine.kernels.ops import Routing
from asyncengine.kernels.weight import INT4
from tests.kernels.gluon_twin import mma, run_in_torch
from tests.kernels.test_experts import in_mxfp4, plainly, spread, weights_of


def both(*tiles: Any) -> DirectPlan:
    """The same tiles for both products."""
    return DirectPlan(DirectTiles(*tiles), DirectTiles(*tiles))


CASES: dict[str, tuple[Any, str, torch.dtype, tuple[int, int], DirectPlan, bool]] = {
    "mxfp4": (in_mxfp4, "clamped_silu_mul", torch.bfloat16, (96, 320), both(8, 32, 1, True, 2, 1), True),
    "mxfp4, a step of three units, and one of two": (
        in_mxfp4, "clamped_silu_mul", torch.bfloat16, (672, 224),
        DirectPlan(DirectTiles(8, 16, 3, True, 2, 1), DirectTiles(8, 32, 2, True, 1, 1)), True,
    ),
    "mxfp4, two steps and a part": (
        in_mxfp4, "silu_mul", torch.bfloat16, (96, 736),
        DirectPlan(DirectTiles(8, 32, 1, False, 1, 1), DirectTiles(8, 16, 2, True, 1, 1)), False,
    ),
    "mxfp4, two warps of columns": (
        in_mxfp4, "silu_mul", torch.bfloat16, (160, 96), both(16, 64, 2, False, 1, 2), False,
    ),
    "int4": (
        partial(round_to_groups, INT4), "gelu_tanh_mul", torch.bfloat16, (256, 128),
        both(16, 16, 1, True, 2, 1), True,
    ),
    "int4 in half tiles, float16": (
        partial(round_to_groups, INT4, size=64, scale_dtype=torch.float16), "silu_mul", torch.float16, (192, 64),
        both(8, 32, 2, False, 2, 2), False,
    ),
    "int4, with three units": (
        partial(round_to_groups, INT4), "gelu_tanh_mul", torch.bfloat16, (512, 640),
        DirectPlan(DirectTiles(16, 16, 3, False, 1, 1), DirectTiles(16, 32, 3, True, 1, 2)), True,
    ),
}  # fmt: skip


def run_kernel_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_torch(
        monkeypatch, "direct_experts_kernel", direct, operands, ends, mma_v2=mma, along=lambda *_: None,
        _sigmoid=torch.sigmoid, pairs_layout=lambda *_: None,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_mixtures_of_few_rows_are_those_of_plain_operations(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights fill neither the last program nor the last step, and experts have more rows than a tile."""
    form, activation, dtype, (hidden, inner), plan, biased = CASES[case]
    run_kernel_in_torch(monkeypatch)
    monkeypatch.setattr(mix, "direct_plan_for", lambda *_, **__: plan)
    draw = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    weights, ids = spread(rows=13, experts=3, top_k=2)
    up = [form(random(2 * inner, hidden) / 8) for _ in range(4)]
    down = [form(random(hidden, inner) / 6) for _ in range(4)]
    biases = (random(4, 2 * inner), random(4, hidden)) if biased else None
    x = random(len(ids), hidden + 8)[:, :hidden]
    of_up, of_down = (torch.stack([weights_of(w).to(dtype) for w in packed]) for packed in (up, down))
    expected = plainly(x, Routing(weights, ids), of_up, of_down, activation, biases)
    handle = stack_experts(
        [[w] for w in up], down, activation, [[b] for b in biases[0]] if biases else None,  # type: ignore[arg-type]
        list(biases[1]) if biases else None,
    )  # fmt: skip
    out = torch.empty(len(ids), hidden, dtype=dtype)
    mix.mix(x, Routing(weights, ids), handle, out=out, add=False, gpu=H200)
    assert (out.double() - expected).abs().max() <= 2.0**-6 * expected.abs().max()


def test_the_second_product_reads_weights_of_its_first_step_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and factors are there once it has waited; codes and biases are gone by then."""
    tiles = DirectTiles(8, 16, 2, True, 2, 1)
    draw = torch.Generator().manual_seed(2)
    x, factors = torch.randn(4, 416, generator=draw).bfloat16(), torch.rand(4, 1, generator=draw)
    weight = stack_codes([in_mxfp4(torch.randn(32, 416, generator=draw).bfloat16()) for _ in range(4)])
    assert isinstance(weight, CodedRows)
    pairs = sort_pairs(torch.tensor([[2], [0], [2], [3]], dtype=torch.int32), 4, 8)
    handle = CudaLinear(weight, torch.randn(128, generator=draw).bfloat16(), 128)
    before, after = [(t, t.clone()) for t in (weight.codes, handle.bias)], [(t, t.clone()) for t in (x, factors)]

    def begin(late: list[Any] = after, early: list[Any] = before) -> None:
        for gone, _ in late:
            gone.fill_(float("nan") if gone.is_floating_point() else 0)
        for tensor, known in early:
            tensor.copy_(known)

    run_kernel_in_torch(monkeypatch)
    results = []
    monkeypatch.setattr(direct, "gdc_launch_dependents", begin)
    monkeypatch.setattr(direct, "gdc_wait", partial(begin, before, after))
    for pdl in (False, True):
        out = torch.empty(4, 32, dtype=torch.bfloat16)
        direct.multiply_few(x, handle, pairs, tiles, out=out, factors=factors, pdl=pdl)
        results.append(out)
    assert torch.equal(*results)
    assert results[0].isfinite().all()
