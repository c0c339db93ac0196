"""Norms that no kernel is launched for: the projection before them and the one after share the work."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncengine.kernels.cuda import CudaBatch, CudaOps, Stream
from asyncengine.kernels.device_step import allocate_step
from asyncengine.kernels.gluon_linear import Unnormed
from asyncengine.kernels.linear_plans import Plan, Site
from asyncengine.kernels.ops import Norm
from tests.kernels.test_triton_linear import PLANS, Model, make_ops

STREAMED = Plan("streamed", 64, 64, 4, 8, 1, 2, fused_norm=False)
ADDED = Site(128, 128, 8, "none", None, True, True)


def add_up(
    x: Tensor, weight: Tensor, plan: Plan, *, out: Tensor, norm: Norm, bias: Tensor | None, pdl: bool
) -> Unnormed:
    """What gluon_linear.streamed_sum does, which only a Hopper GPU can."""
    out += (x.float() @ weight.float().T + (0 if bias is None else bias.float())).to(out.dtype)
    tiles = out.float().T.reshape(-1, plan.columns, len(x))
    sums = [tiles.square().sum(1), tiles.sum(1)][: 1 if norm.bias is None else 2]
    return Unnormed((out.float() * norm.weight.float()).to(out.dtype), torch.stack(sums), norm.eps)


def multiplied(
    x: Unnormed | Tensor, weight: Tensor, plan: Plan, *, out: Tensor, bias: Tensor | None = None,
    shift: Tensor | None = None, activation: Any = None, add: bool = False, pdl: bool = False,
) -> None:  # fmt: skip
    """What gluon_linear.streamed_linear does."""
    if isinstance(x, Unnormed):
        square, *means = x.sums.sum(1) / weight.shape[1]
        y = x.x.float() @ weight.float().T
        if means:
            assert shift is not None
            y, square = y - means[0][:, None] * shift, square - means[0].square()
        y *= torch.rsqrt(square + x.eps)[:, None]
    else:
        y = x.float() @ weight.float().T
    y = y if bias is None else y + bias.float()
    if activation == "gelu":
        y = torch.nn.functional.gelu(y)
    out.copy_(out.float() + y if add else y)


@pytest.fixture(autouse=True)
def hopper(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        monkeypatch.setattr("asyncengine.kernels.gluon_linear.streamed_sum", add_up)
        monkeypatch.setattr("asyncengine.kernels.gluon_linear.streamed_linear", multiplied)


def run(ops: CudaOps, model: Model) -> tuple[list[Tensor], list[bool]]:
    """Additions, one and two in a row, before projections and before logits; what they leave, and who waited."""
    handle, stream = model.handle(ops), Stream(model.x.clone())
    step = allocate_step(1, 1, 4, model.rows, model.device)
    step.sample_index.copy_(torch.tensor([5, 0, 0, 3]))
    results, waited = [], []
    hidden = model.x
    for additions, activation in ((1, "gelu"), (2, None), (1, "gelu")):
        for _ in range(additions):
            ops.linear_add_(hidden, handle, stream)
        waited.append(stream.pending is not None)
        hidden = ops.norm_linear(stream, model.norm, handle, activation)
        assert stream.pending is None
        results += [stream.x.clone(), hidden]
    ops.linear_add_(hidden, handle, stream)
    logits = ops.logits(stream, model.norm, handle, CudaBatch(step, {}))
    assert stream.pending is None
    return [*results, logits, stream.settle()], waited


@pytest.mark.parametrize("reader", ["streamed", "skinny", "cublas"])
@pytest.mark.parametrize("layer", [False, True])
def test_what_reads_a_sum_decides_how_it_is_made(
    device: torch.device, layer: bool, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(device, 6, 128, 128, layer=layer)
    kind = "layer" if layer else "rms"
    plans = {ADDED: STREAMED}
    if reader != "cublas":
        plan = STREAMED if reader == "streamed" else PLANS["skinny"]
        plans |= {Site(128, 128, 8, kind, activation, True, False): plan for activation in ("gelu", None)}  # type: ignore[arg-type]
    launched: list[str] = []
    for name in ("streamed_sum", "streamed_linear"):
        launch = getattr(__import__("asyncengine.kernels.gluon_linear", fromlist=[name]), name)
        monkeypatch.setattr(f"asyncengine.kernels.gluon_linear.{name}", partial(_count, launched, name, launch))
    got, waited = run(make_ops(device, plans), model)
    expected, _ = run(make_ops(device), model)
    assert all(waited)
    # Five additions: the first of two in a row and that before the logits have no projection to wait for.
    summed, projections = (3, 4) if reader == "streamed" else (0, 0)
    assert launched.count("streamed_sum") == summed
    assert launched.count("streamed_linear") == 5 - summed + projections
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=3e-2, atol=6e-2)  # a stream rounded six times


def _count(launched: list[str], name: str, launch: Any, *args: Any, **kwargs: Any) -> Any:
    launched.append(name)
    return launch(*args, **kwargs)


def test_layer_norms_are_folded_once(device: torch.device) -> None:
    """And of each weight: a captured step holds on to what was made."""
    plans = {ADDED: STREAMED, Site(128, 128, 8, "layer", None, True, False): STREAMED}
    ops, model = make_ops(device, plans), Model(device, 6, 128, 128, layer=True)
    first, second = model.handle(ops), model.handle(ops)
    results = []
    for handle in (first, second, first):
        stream = Stream(model.x.clone())
        ops.linear_add_(model.x, first, stream)
        results.append(ops.norm_linear(stream, model.norm, handle))
    assert len(ops._folded) == 2
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[0], results[1]), "the same numbers at another place"
