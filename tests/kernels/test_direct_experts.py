"""The kernel of experts in codes for few rows of each (experts/direct.py), executed in torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncengine.kernels.cuda.experts import direct, mix
from asyncengine.kernels.cuda.experts.plan import DirectTiles
from asyncengine.kernels.cuda.experts.stack import stack_experts
from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.linear import ends, operands
from asyncengine.kernels.grouped import round_to_groups
from asyncengine.kernels.ops import Routing
from asyncengine.kernels.weight import INT4
from tests.kernels.gluon_twin import mma, run_in_torch
from tests.kernels.test_experts import in_mxfp4, plainly, spread, weights_of

CASES: dict[str, tuple[Any, str, torch.dtype, tuple[int, int], DirectTiles, bool]] = {
    "mxfp4": (in_mxfp4, "clamped_silu_mul", torch.bfloat16, (96, 320), DirectTiles(8, 32, 1, True, 2, 1), True),
    "mxfp4, two warps of columns": (
        in_mxfp4, "silu_mul", torch.bfloat16, (160, 96), DirectTiles(16, 64, 2, False, 1, 2), False,
    ),
    "int4": (
        partial(round_to_groups, INT4), "gelu_tanh_mul", torch.bfloat16, (256, 128),
        DirectTiles(16, 16, 1, True, 2, 1), True,
    ),
    "int4 in half tiles, float16": (
        partial(round_to_groups, INT4, size=64, scale_dtype=torch.float16), "silu_mul", torch.float16, (192, 64),
        DirectTiles(8, 32, 2, False, 2, 2), False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_mixtures_of_few_rows_are_those_of_plain_operations(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights fill neither the last program nor the last step, and experts have more rows than a tile."""
    form, activation, dtype, (hidden, inner), tiles, biased = CASES[case]
    run_in_torch(
        monkeypatch, "direct_experts_kernel", direct, operands, ends, mma_v2=mma, along=lambda *_: None,
        _sigmoid=torch.sigmoid, pairs_layout=lambda *_: None,
    )  # fmt: skip
    monkeypatch.setattr(mix, "direct_tiles_for", lambda *_: tiles)
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
