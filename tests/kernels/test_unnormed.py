"""Norms that no kernel is launched for: the projection before them and the one after share the work."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncengine.kernels.cuda.linear import tma
from asyncengine.kernels.cuda.linear.plan import Plan, Site
from asyncengine.kernels.cuda.linear.residual import Residual, Unnormed
from asyncengine.kernels.cuda.linear.tiled import linear
from asyncengine.kernels.cuda.ops import CudaBatch, CudaOps
from asyncengine.kernels.cuda.step.tensors import allocate_step
from asyncengine.kernels.ops import Norm
from tests.amounts import examples
from tests.kernels.poison import poison_new_memory, surrounded, taken
from tests.kernels.test_linear import COMPILED, PLANS, Model, make_ops
from tests.kernels.twins import NO_STEP

TMA = Plan("tma", 64, 64, 4, 8, 1, 2, fused_norm=False)
ADDED = Site(128, 128, 8, "none", None, True, True)


def add_up(
    x: Tensor, weight: Tensor, plan: Plan, *, out: Tensor, norm: Norm, bias: Tensor | None, **how: bool
) -> Unnormed:
    """Compute the result of tma_sum, which only a Hopper GPU can run."""
    out += (x.float() @ weight.float().T + (0 if bias is None else bias.float())).to(out.dtype)
    tiles = out.float().T.reshape(-1, plan.columns, len(x))
    sums = [tiles.square().sum(1), tiles.sum(1)][: 1 if norm.bias is None else 2]
    return Unnormed((out.float() * norm.weight.float()).to(out.dtype), torch.stack(sums), norm.eps)


def multiplied(
    x: Unnormed | Tensor, weight: Tensor, plan: Plan, *, out: Tensor, bias: Tensor | None = None,
    shift: Tensor | None = None, activation: Any = None, add: bool = False, **how: bool,
) -> None:  # fmt: skip
    """Compute the result of tma_linear."""
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
    poison_new_memory(monkeypatch)
    if device.type == "cpu":
        monkeypatch.setattr(tma, "tma_sum", add_up)
        monkeypatch.setattr(tma, "tma_linear", multiplied)


def run(ops: CudaOps, model: Model) -> tuple[list[Tensor], list[bool]]:
    """Additions, one and two in a row, before projections and before logits; what they leave, and who waited."""
    handle, residual = model.handle(ops), Residual(model.x.clone())
    step = allocate_step(1, 1, 4, model.rows, model.device)
    step.sample_index.copy_(torch.tensor([5, 0, 0, 3]))
    results, waited = [], []
    hidden: Any = model.x
    for additions, activation in ((1, "gelu"), (2, None), (1, "gelu")):
        for _ in range(additions):
            ops.linear_add_(hidden, handle, residual, NO_STEP)
        waited.append(residual.state == "put off")
        hidden = ops.norm_linear(residual, model.norm, handle, NO_STEP, activation)
        assert residual.state == "plain"
        results += [residual.x.clone(), hidden]
    ops.linear_add_(hidden, handle, residual, NO_STEP)
    logits = ops.logits(residual, model.norm, handle, CudaBatch(step))
    assert residual.state == "plain"
    return [*results, logits, residual.settle()], waited


@pytest.mark.sampled(3)
@pytest.mark.parametrize("adder", ["tma", "skinny"])
@pytest.mark.parametrize("reader", ["tma", "skinny", "cublas"])
@pytest.mark.parametrize("layer", [False, True])
def test_what_reads_a_sum_decides_how_it_is_made(
    device: torch.device, layer: bool, reader: str, adder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(device, 6, 128, 128, layer=layer)
    kind = "layer" if layer else "rms"
    plans = {ADDED: TMA if adder == "tma" else PLANS["skinny"]}
    if reader != "cublas":
        plan = TMA if reader == "tma" else PLANS["skinny"]
        plans |= {Site(128, 128, 8, kind, activation, True, False): plan for activation in ("gelu", None)}  # type: ignore[arg-type]
    launched: list[str] = []
    for name in ("tma_sum", "tma_linear"):
        monkeypatch.setattr(tma, name, partial(_count, launched, name, getattr(tma, name)))
    got, waited = run(make_ops(device, plans), model)
    expected, _ = run(make_ops(device), model)
    assert all(waited)
    # Five additions: the first of two in a row and that before the logits have no projection to wait for.
    summed, projections = (3, 4) if reader == "tma" else (0, 0)
    by_tma = adder == "tma"
    assert launched.count("tma_sum") == by_tma * summed
    assert launched.count("tma_linear") == by_tma * (5 - summed) + projections
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=3e-2, atol=6e-2)  # a residual rounded six times


def _count(launched: list[str], name: str, launch: Any, *args: Any, **kwargs: Any) -> Any:
    launched.append(name)
    return launch(*args, **kwargs)


@settings(max_examples=examples(20))
@given(rows=st.integers(1, 18), tiles=st.integers(1, 4), inner=st.sampled_from([32, 72]), layer=st.booleans(),
       bias=st.booleans(), ahead=st.sampled_from([0, 1]), seed=st.integers(0, 99))  # fmt: skip
def test_a_skinny_plan_that_adds(
    device: torch.device, rows: int, tiles: int, inner: int, layer: bool, bias: bool, ahead: int, seed: int
) -> None:
    """The residual is what it is without a reader, to the bit; the rest follows from it."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    columns = 16 * tiles
    plan = Plan("skinny", 16, 16, 2, ahead=ahead, fused_norm=not ahead)
    x, weight, residual = random(rows, inner), random(columns, inner) * inner**-0.5, random(rows, columns)
    norm = Norm(random(columns), random(columns) if layer else None, 1e-5)
    b = surrounded(random(columns), device)[0] if bias else None
    how: dict[str, Any] = {"bias": b, "add": True, "pdl": COMPILED}
    operands = surrounded(x, device)[0], surrounded(weight, device)[0], plan
    plain, _ = surrounded(residual, device)
    linear(*operands, out=plain, **how)
    out, memory = surrounded(residual, device)
    moved_bias = None if norm.bias is None else surrounded(norm.bias, device)[0]
    moved = Norm(surrounded(norm.weight, device)[0], moved_bias, norm.eps)
    unnormed = linear(*operands, out=out, reader=moved, **how)
    got = taken(out, memory)
    assert torch.equal(got, plain.cpu())
    assert unnormed is not None
    exact = got.float()
    assert torch.equal(unnormed.x.cpu(), (exact * norm.weight.float()).to(torch.bfloat16))
    by_tile = exact.T.reshape(tiles, 16, rows)
    expected = [by_tile.square().sum(1), by_tile.sum(1)][: 1 + layer]
    torch.testing.assert_close(unnormed.sums.cpu(), torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_who_cannot_write_for_a_reader(device: torch.device) -> None:
    x, weight, out = (torch.zeros(n, 64, dtype=torch.bfloat16, device=device) for n in (4, 64, 4))
    skinny, norm = Plan("skinny", 16, 16, 2), Norm(out[0], None, 1e-5)
    for change in ({"plan": PLANS["tiled"]}, {"add": False}, {"norm": norm}):
        arguments = {"plan": skinny, "add": True} | change
        with pytest.raises(ValueError, match="does not fit the operations fused with it"):
            linear(x, weight, arguments.pop("plan"), out=out, reader=norm, **arguments)
    for other in (norm._replace(weight=out[0, :32]), norm):
        wide = out if other is not norm else out.float()
        with pytest.raises(ValueError, match="a norm of"):
            linear(x, weight, skinny, out=wide, add=True, reader=other)


def test_layer_norms_are_folded_once(device: torch.device) -> None:
    """Each weight's norm is folded once: a captured step holds on to the result."""
    plans = {ADDED: TMA, Site(128, 128, 8, "layer", None, True, False): TMA}
    ops, model = make_ops(device, plans), Model(device, 6, 128, 128, layer=True)
    first, second = model.handle(ops), model.handle(ops)
    results = []
    for handle in (first, second, first):
        residual = Residual(model.x.clone())
        ops.linear_add_(model.x, first, residual, NO_STEP)
        results.append(ops.norm_linear(residual, model.norm, handle, NO_STEP))
    assert len(ops._projections._folded) == 2
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[0], results[1]), "the same numbers at another place"
