"""Operations for blocks that compute with tensors of their own, and mixtures of experts, in each kernel package."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from asyncengine._core import StepBatch
from asyncengine.kernels.cpu.base import Residual as HostResidual
from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.cpu.reference import ReferenceOps
from asyncengine.kernels.cuda.linear.residual import Residual as DeviceResidual
from asyncengine.kernels.cuda.ops import CudaBatch, CudaOps
from asyncengine.kernels.cuda.step.tensors import allocate_step
from asyncengine.kernels.ops import Activation, Norm, Routing, RoutingRule
from asyncengine.kernels.weight import dense
from tests.kernels.twins import NO_STEP, activated

HIDDEN, INNER, VOCAB, EXPERTS, TOP_K = 32, 24, 57, 6, 2
IDS = [3, 56, 0, 3, 17]


class Package:
    """Operations, and steps and residuals of their kind."""

    def __init__(self, name: str, device: torch.device) -> None:
        makers: dict[str, Any] = {"cpu": partial(CpuOps, 2), "reference": ReferenceOps}
        makers["cuda"] = partial(CudaOps, device)
        self.name = name
        self.ops: Any = makers[name]()
        self.device = self.ops.device

    def batch(self) -> Any:
        """A step of one prompt."""
        count = len(IDS)
        places = list(range(count))
        if self.name != "cuda":
            return StepBatch(IDS, places, places, [0, count], [0], [[0]], places)
        step = allocate_step(1, 1, 1, count, self.device)
        step.input_ids.copy_(torch.tensor(IDS))
        step.positions.copy_(torch.tensor(places))
        return CudaBatch(step)

    def residual(self, x: Tensor) -> Any:
        kind: Any = DeviceResidual if self.name == "cuda" else HostResidual
        return kind(x.clone())

    def experts(self, up: Tensor, down: Tensor, activation: Activation) -> Any:
        """A handle for weights [E, N, K], gate and up side by side, and [E, H, I]."""
        parts = 2 if activation.endswith("_mul") else 1
        first = [[dense(part) for part in weight.chunk(parts)] for weight in up]
        return self.ops.make_experts(first, [dense(weight) for weight in down], activation)

    def random(self, *shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5
        return x.to(dtype).to(self.device)


@pytest.fixture(params=["cpu", "reference", "cuda"])
def package(request: pytest.FixtureRequest, device: torch.device) -> Package:
    return Package(request.param, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_of_plain_tensors_is_the_fused_block(package: Package, dtype: torch.dtype) -> None:
    """Bit for bit, where the same kernels compute both."""
    ops, batch, random = package.ops, package.batch(), partial(package.random, dtype=dtype)
    assert ops.input_ids(batch).tolist() == IDS
    assert ops.positions(batch).tolist() == list(range(len(IDS)))
    embedding = ops.make_embedding(dense(random(VOCAB, HIDDEN, seed=1)), tied=False)
    up, down = (
        ops.make_linear([dense(random(*shape, seed=2))], [None]) for shape in ((INNER, HIDDEN), (HIDDEN, INNER))
    )
    norms = [Norm(random(HIDDEN, seed=seed) + 1, None, 1e-6) for seed in (3, 4)]

    def fused(after: Norm | None) -> Tensor:
        residual = ops.embed(batch, embedding)
        x = ops.norm_linear(residual, norms[0], up, batch)
        ops.linear_add_(x, down, residual, batch, after)
        return ops.plain(residual, batch).clone()

    def plain(after: Norm | None) -> Tensor:
        residual = ops.embed(batch, embedding)
        x = ops.linear(ops.normed(residual, norms[0], batch), up, batch)
        ops.add_(ops.linear(x, down, batch), residual, batch, after)
        return ops.plain(residual, batch).clone()

    for after in (None, norms[1]):
        got, expected = plain(after), fused(after)
        if package.name == "cuda":
            tolerance = 1e-5 if dtype == torch.float32 else 2.0**-6
            assert (got - expected).abs().max() <= tolerance * expected.abs().max()
        else:
            assert torch.equal(got, expected)


def test_the_residual_can_be_read_and_written(package: Package) -> None:
    """Between two additions: what was to be added is in it, and what a block writes is seen by the next norm."""
    ops, x, added = package.ops, package.random(4, HIDDEN, seed=1), package.random(4, HIDDEN, seed=2)
    residual, norm = package.residual(x), Norm(torch.ones(HIDDEN, device=package.device), None, 1e-6)
    ops.add_(added.clone(), residual, NO_STEP)
    seen = ops.plain(residual, NO_STEP)
    assert torch.equal(seen, x + added)
    seen.mul_(3).add_(1)
    ops.add_(added.clone(), residual, NO_STEP)
    expected = torch.nn.functional.rms_norm((x + added) * 3 + 1 + added, (HIDDEN,), eps=1e-6)
    torch.testing.assert_close(ops.normed(residual, norm, NO_STEP), expected)


def test_additions_go_through_the_reduction(package: Package) -> None:
    batch = package.batch()
    seen = []

    def double(product: Tensor, of: Any, onto: Tensor | None = None, norm: None = None) -> None:
        assert norm is None
        seen.append(of)
        product.mul_(2)
        if onto is not None:
            onto.add_(product)

    package.ops.reduction = double
    residual, x = package.residual(torch.zeros(5, HIDDEN, device=package.device)), package.random(5, HIDDEN, seed=1)
    package.ops.add_(x.clone(), residual, batch)
    assert torch.equal(package.ops.plain(residual, batch), 2 * x)
    eye = package.ops.make_linear([dense(torch.eye(HIDDEN, device=package.device))], [None])
    package.ops.linear_add_(x, eye, residual, batch)
    torch.testing.assert_close(package.ops.plain(residual, batch), 4 * x)
    assert seen == [batch, batch]


# ---- experts ----


def mixture(*, shared: bool = False) -> Any:
    """A block of Qwen3-MoE by transformers; with a shared expert of the same size, which is gated, one of Qwen2-MoE."""
    sizes = {
        "hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K
    }  # fmt: skip
    config = Qwen2MoeConfig(**sizes, shared_expert_intermediate_size=INNER) if shared else Qwen3MoeConfig(**sizes)
    config._experts_implementation = "eager"
    block = (Qwen2MoeSparseMoeBlock if shared else Qwen3MoeSparseMoeBlock)(config).eval()
    for seed, parameter in enumerate(block.parameters()):
        torch.nn.init.normal_(parameter, 0, 0.3, generator=torch.Generator().manual_seed(seed))
    return block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_those_of_transformers(package: Package, dtype: torch.dtype) -> None:
    block = mixture().to(package.device, dtype)
    x = package.random(9, HIDDEN, seed=1, dtype=dtype) * 4
    with torch.inference_mode():
        expected = block(x[None])[0]
        _, weights, ids = block.gate(x)
        assert len(ids.unique()) > TOP_K
        up, down = block.experts.gate_up_proj.detach(), block.experts.down_proj.detach()
        experts = package.experts(up, down, "silu_mul")
        got = package.ops.experts(x, Routing(weights, ids), experts, NO_STEP)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-6
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_expert_of_all_rows_is_that_of_transformers(package: Package, dtype: torch.dtype) -> None:
    """As the last expert of the stack, with its gate as the last row of a router of no multiple of 8 rows."""
    block, ops = mixture(shared=True).to(package.device, dtype), package.ops
    one, rule = block.shared_expert, RoutingRule(TOP_K, shared="gated")
    with torch.inference_mode():
        wide = torch.cat((one.gate_proj.weight, one.up_proj.weight))[None]
        up = torch.cat((block.experts.gate_up_proj, wide)).detach()
        down = torch.cat((block.experts.down_proj, one.down_proj.weight[None])).detach()
        experts = package.experts(up, down, "silu_mul")
        parts = [dense(weight.detach()) for weight in (block.gate.weight, block.shared_expert_gate.weight)]
        router = ops.make_linear(parts, [None, None])
        for rows in (1, 9):
            x = package.random(rows, HIDDEN, seed=1, dtype=dtype) * 4
            expected = block(x[None])[0]
            plain, routing = ops.route(ops.residual(x, NO_STEP), None, router, rule, NO_STEP)
            assert torch.equal(plain, x)
            got = ops.experts(plain, routing, experts, NO_STEP)
            tolerance = 1e-5 if dtype == torch.float32 else 2.0**-6
            assert got.dtype == dtype
            assert (got - expected).abs().max() <= tolerance * expected.abs().max()


def routing(package: Package, rows: int) -> Routing:
    logits = package.random(rows, EXPERTS, seed=5)
    return Routing(*logits.softmax(1).topk(TOP_K, dim=1))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu_mul", "clamped_silu_mul"])
def test_activations_of_experts(package: Package, activation: Activation) -> None:
    wide = 2 * INNER if activation.endswith("_mul") else INNER
    up, down = package.random(EXPERTS, wide, HIDDEN, seed=1), package.random(EXPERTS, HIDDEN, INNER, seed=2)
    # Some numbers are beyond the limits of the one that clamps.
    x = package.random(3, HIDDEN, seed=3) * (30 if activation.startswith("clamped") else 4)
    weights, ids = routing(package, 3)
    experts = package.experts(up, down, activation)
    got = package.ops.experts(x, Routing(weights, ids), experts, NO_STEP)
    for row in range(3):
        expected = torch.zeros(HIDDEN, dtype=torch.float64)
        for weight, index in zip(weights[row].tolist(), ids[row].tolist(), strict=True):
            inner = (x[row : row + 1].double() @ up[index].double().T).cpu()
            inner, _ = activated(inner, torch.zeros_like(inner), activation)
            expected += weight * (inner @ down[index].double().cpu().T)[0]
        torch.testing.assert_close(got[row].cpu().double(), expected, rtol=1e-5, atol=1e-6)


def test_a_row_does_not_depend_on_the_rows_of_its_experts(device: torch.device) -> None:
    package = Package("cpu", device)
    up, down = (package.random(EXPERTS, *shape, seed=1) for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
    experts = package.experts(up, down, "silu_mul")
    assert experts.down[3].tensors[0].data_ptr() == down[3].data_ptr(), "weights are read where they lie"
    x, (weights, ids) = package.random(40, HIDDEN, seed=2), routing(package, 40)
    whole = package.ops.experts(x, Routing(weights, ids), experts, NO_STEP)
    for first, last in ((0, 1), (39, 40), (3, 20)):
        part = Routing(weights[first:last], ids[first:last])
        assert torch.equal(package.ops.experts(x[first:last], part, experts, NO_STEP), whole[first:last])


def test_an_expert_that_overflows_is_seen_by_its_own_rows_alone(package: Package) -> None:
    up, down = package.random(EXPERTS, INNER, HIDDEN, seed=1), package.random(EXPERTS, HIDDEN, INNER, seed=2)
    up[4] = math.inf
    experts = package.experts(up, down, "gelu")
    ids = torch.tensor([[0, 4], [1, 2], [3, 0]], device=package.device)
    weights = torch.full((3, 2), 0.5, device=package.device)
    got = package.ops.experts(package.random(3, HIDDEN, seed=3).abs(), Routing(weights, ids), experts, NO_STEP)
    assert got.isfinite().all(1).tolist() == [False, True, True]


def test_experts_that_lack_a_weight_are_refused(package: Package) -> None:
    up, down = torch.zeros(EXPERTS, INNER, HIDDEN), torch.zeros(EXPERTS - 1, HIDDEN, INNER)
    with pytest.raises(ValueError, match="of 6 and of 5 experts"):
        package.experts(up, down, "gelu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_experts_do_not_depend_on_the_batch_or_the_threads(dtype: torch.dtype) -> None:
    """Enough rows of one expert for every way in which rows are multiplied, and biases."""
    random = partial(Package("reference", torch.device("cpu")).random, dtype=dtype)
    up, down = random(3, 2 * INNER, HIDDEN, seed=1), random(3, HIDDEN, INNER, seed=2)
    biases = [random(3, 2 * INNER, seed=3), random(3, HIDDEN, seed=4)]
    x = random(90, 2 * HIDDEN, seed=5)[:, :HIDDEN]
    weights, ids = random(90, 3, seed=6).float().softmax(1).topk(2, dim=1)
    ids[:, 0], ids[:, 1] = 2, ids[:, 0] * 0 + torch.arange(90) % 2

    def run(threads: int, first: int, last: int) -> Tensor:
        ops: Any = CpuOps(threads)
        experts = ops.make_experts(
            [[dense(part) for part in weight.chunk(2)] for weight in up], [dense(weight) for weight in down],
            "silu_mul", [list(bias.chunk(2)) for bias in biases[0]], list(biases[1]),
        )  # fmt: skip
        return ops.experts(x[first:last], Routing(weights[first:last], ids[first:last]), experts, NO_STEP)

    whole = run(2, 0, 90)
    for first, last in ((0, 1), (5, 23), (40, 90)):
        assert torch.equal(run(1, first, last), whole[first:last])
    expected = torch.zeros(90, HIDDEN, dtype=torch.float64)
    for place in range(2):
        of_row = ids[:, place]
        wide = torch.einsum("tnk,tk->tn", up[of_row].double(), x.double()) + biases[0][of_row].double()
        inner, _ = activated(wide, torch.zeros_like(wide), "silu_mul")
        result = torch.einsum("tnk,tk->tn", down[of_row].double(), inner) + biases[1][of_row].double()
        expected += weights[:, place, None] * result
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-6
    assert (whole.double() - expected).abs().max() <= tolerance * expected.abs().max()
    ops: Any = CpuOps(1)
    plain = ops.make_experts([[dense(w)] for w in up], [dense(w) for w in down], "silu_mul")
    with pytest.raises(ValueError, match="out of range"):
        ops.experts(x[:1], Routing(weights[:1], ids[:1] + 1), plain, NO_STEP)
