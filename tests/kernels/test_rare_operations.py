"""Operations that few models ask for: a scale of the embedding, norms before the addition, a cap of logits, gates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from asyncengine.kernels.cuda.gpu import INTERPRETER
from asyncengine.kernels.cuda.linear.plan import Plan, Site
from asyncengine.kernels.cuda.linear.residual import Residual
from asyncengine.kernels.cuda.linear.tables import PlanTable
from asyncengine.kernels.cuda.ops import CudaBatch, CudaOps, CudaOptions
from asyncengine.kernels.cuda.rows.activation import activate_rows, soft_cap_
from asyncengine.kernels.cuda.step.tensors import allocate_step
from asyncengine.kernels.ops import Activation, Norm
from asyncengine.kernels.weight import dense
from tests.kernels.poison import poison_new_memory
from tests.kernels.twins import NO_STEP


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


def random(device: torch.device, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("positions", [False, True])
def test_a_scale_of_the_embedding(device: torch.device, positions: bool) -> None:
    """The rows of the table are scaled and rounded, and then those of positions added."""
    table, by_position = random(device, 9, 40), random(device, 5, 40, seed=1) if positions else None
    ops, step = CudaOps(device), allocate_step(1, 1, 1, 3, device)
    step.input_ids.copy_(torch.tensor([8, 0, 3]))
    step.positions.copy_(torch.tensor([4, 1, 0]))
    handle = ops.make_embedding(dense(table), tied=False)
    got = ops.embed(CudaBatch(step), handle, by_position, scale=6.3).settle()
    expected = (table[[8, 0, 3]].float() * 6.3).bfloat16()
    if by_position is not None:
        expected = (expected.float() + by_position[[4, 1, 0]].float()).bfloat16()
    assert torch.equal(got, expected)


@pytest.mark.parametrize("before", ["plain", "put off"])
def test_a_norm_of_the_product_before_it_is_added(device: torch.device, before: str) -> None:
    """The sum is right also for a residual whose last addition still waits."""
    site = Site(32, 64, 8, "none", None, False, True)
    plan = Plan("skinny", 16, 16, 2)
    plans = PlanTable({site: plan, site._replace(add=False): plan})
    ops = CudaOps(device, CudaOptions(plans, gpu=replace(INTERPRETER, tma=before == "put off")))
    x, weight, residual = random(device, 5, 64), random(device, 32, 64, seed=1) * 0.2, random(device, 5, 32, seed=2)
    norm = Norm(random(device, 32, seed=3), None, 1e-5)
    handle, state = ops.make_linear([dense(weight)], [None]), Residual(residual.clone())
    ops.linear_add_(x, handle, state, NO_STEP)
    assert state.state == before
    ops.linear_add_(x, handle, state, NO_STEP, norm)
    assert state.state == "put off", "the sum waits for the norm that reads it"
    lone = Residual(residual[:1].clone())
    ops.linear_add_(x[:1], handle, lone, NO_STEP, norm)
    assert lone.state == "plain", "a product norms a lone row itself"
    product = x.float() @ weight.float().T
    expected = residual.float() + product + F.rms_norm(product, (32,), norm.weight.float(), 1e-5)
    reader = Norm(random(device, 32, seed=4), None, 1e-5)
    assert_near(state.read_by_kernel(reader), F.rms_norm(expected, (32,), reader.weight.float(), 1e-5))
    assert state.state == "plain"
    assert_near(state.settle(), expected)


@pytest.mark.parametrize("plan", [None, Plan("skinny", 16, 16, 2), Plan("tiled", 16, 32, 4, 16, stages=2)], ids=str)
@pytest.mark.parametrize("activation", [None, "silu_mul"])
def test_a_product_of_the_residual_without_a_norm(
    device: torch.device, plan: Plan | None, activation: Activation | None
) -> None:
    """The product is of the sum, where the last addition still waits."""
    site = Site(32 if activation else 64, 64, 8, "none", activation, False, False)
    adds = Site(64, 32, 8, "none", None, False, True)
    plans = PlanTable({adds: Plan("skinny", 16, 16, 2)} | ({site: plan} if plan else {}))
    ops = CudaOps(device, CudaOptions(plans, gpu=replace(INTERPRETER, tma=True)))
    x, weight, state = random(device, 5, 32), random(device, 64, 32, seed=1) * 0.2, random(device, 5, 64, seed=2)
    gate, up = random(device, 32, 64, seed=3) * 0.2, random(device, 32, 64, seed=4) * 0.2
    residual = Residual(state.clone())
    ops.linear_add_(x, ops.make_linear([dense(weight)], [None]), residual, NO_STEP)
    assert residual.state == "put off"
    handle = ops.make_linear([dense(gate), dense(up)], [None, None])
    got = ops.norm_linear(residual, None, handle, NO_STEP, activation)
    summed = (state.float() + x.float() @ weight.float().T).bfloat16().float()
    left, right = summed @ gate.float().T, summed @ up.float().T
    assert_near(got, F.silu(left) * right if activation else torch.cat((left, right), 1))
    assert residual.state == "plain"
    assert ops.choices.missing == (set() if plan else {site})


@pytest.mark.parametrize("out_features", [48, 50])
def test_a_cap_and_a_scale_of_logits(device: torch.device, out_features: int) -> None:
    """A greedy batch has neither: the order is the same."""
    ops, step = CudaOps(device), allocate_step(1, 1, 2, 4, device)
    step.sample_index.copy_(torch.tensor([3, 1]))
    x, norm = random(device, 4, 64), Norm(random(device, 64, seed=1), None, 1e-5)
    head = ops.make_head(dense(random(device, out_features, 64, seed=2)))
    plain = ops.logits(Residual(x), norm, head, CudaBatch(step))
    capped = ops.logits(Residual(x), norm, head, CudaBatch(step), softcap=5.0)
    assert isinstance(plain, torch.Tensor)
    assert plain.abs().max() > 5
    torch.testing.assert_close(capped, 5.0 * torch.tanh(plain / 5.0), rtol=1e-5, atol=1e-5)
    scaled = ops.logits(Residual(x), norm, head, CudaBatch(step), softcap=5.0, scale=0.3)
    torch.testing.assert_close(scaled, 5.0 * torch.tanh(plain * 0.3 / 5.0), rtol=1e-5, atol=1e-5)
    greedy = CudaBatch(step, needs=0)
    assert torch.equal(ops.logits(Residual(x), norm, head, greedy, softcap=5.0, scale=0.3), plain)


def test_a_cap_leaves_what_lies_between_rows(device: torch.device) -> None:
    memory = torch.linspace(-90, 90, 3 * 1030, device=device).view(3, 1030)
    x, before = memory[:, :1027], memory.clone()
    soft_cap_(x, 30.0)
    torch.testing.assert_close(x, 30 * torch.tanh(before[:, :1027] / 30), rtol=1e-5, atol=1e-5)
    assert torch.equal(memory[:, 1027:], before[:, 1027:])
    with pytest.raises(ValueError, match="a cap"):
        soft_cap_(x, 0.0)
    with pytest.raises(ValueError, match="a cap"):
        soft_cap_(x.bfloat16(), 30.0)


@pytest.mark.parametrize("known", [False, True])
def test_a_gate_with_gelu(device: torch.device, known: bool) -> None:
    """A kernel of its own behind a product, by whatever plan."""
    site = Site(64, 64, 8, "rms", None, False, False)
    ops = CudaOps(device, CudaOptions(PlanTable({site: Plan("skinny", 16, 16, 2)} if known else {})))
    x, norm = random(device, 5, 64), Norm(random(device, 64, seed=1), None, 1e-5)
    gate, up = random(device, 32, 64, seed=2) * 0.2, random(device, 32, 64, seed=3) * 0.2
    got = ops.norm_linear(
        Residual(x), norm, ops.make_linear([dense(gate), dense(up)], [None, None]), NO_STEP, "gelu_tanh_mul"
    )
    normed = F.rms_norm(x.float(), (64,), norm.weight.float(), 1e-5)
    assert_near(got, F.gelu(normed @ gate.float().T, approximate="tanh") * (normed @ up.float().T))
    assert ops.choices.missing == (set() if known else {site})
    with pytest.raises(ValueError, match="even"):
        activate_rows(x[:, :63], "gelu_tanh_mul")
