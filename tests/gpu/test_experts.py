"""Mixtures of experts of the real shapes against torch in float32, and in a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncengine.kernels.cuda.linear.grouped import CodedRows
from asyncengine.kernels.cuda.linear.residual import Residual
from asyncengine.kernels.cuda.ops import CudaBatch, CudaOps, CudaOptions
from asyncengine.kernels.cuda.step.tensors import allocate_step
from asyncengine.kernels.cuda.trials import examine
from asyncengine.kernels.experts import choose_experts
from asyncengine.kernels.float8 import pack_float8, quantize
from asyncengine.kernels.grouped import FP4_NUMBERS, pack_nibbles, round_to_groups, unpack
from asyncengine.kernels.ops import Routing, RoutingRule
from asyncengine.kernels.weight import INT4, PackedWeight, dense
from asyncengine.models.weights.dummy import DummyWeights
from asyncengine.models.weights.mxfp4 import pack_mxfp4

SHAPES = {
    "qwen3-30b-a3b": (128, 8, 2048, 768, "none"), "qwen3.6-35b-a3b": (257, 8, 2048, 512, "gated"),
    "glm-4.5-air": (129, 8, 4096, 1408, "plain"), "gpt-oss-20b": (32, 4, 2880, 2880, "none"),
    "mixtral-8x7b": (8, 2, 4096, 14336, "none"),
}  # fmt: skip
"""Experts with the shared one, those that a row chooses, sizes, and the kind of the shared expert."""


def round_to_mxfp4(weight: Tensor) -> PackedWeight:
    """Codes of the nearest numbers of 4 bits, with a power of 2 for 32 columns."""
    parts = weight.float().view(len(weight), -1, 32)
    exponents = parts.abs().amax(-1).clamp(min=2.0**-100).div(6).log2().ceil().to(torch.int32) + 127
    table = torch.tensor(FP4_NUMBERS, device=weight.device)
    scaled = parts / torch.exp2(exponents.float() - 127)[..., None]
    steps = torch.bucketize(scaled.abs(), (table[:7] + table[1:8]) / 2).to(torch.uint8) + 8 * (scaled < 0).to(
        torch.uint8
    )
    return pack_mxfp4(pack_nibbles(steps), exponents.to(torch.uint8))


class Mixture:
    """A layer of experts of a real shape, and its results by torch."""

    def __init__(self, shape: str, form: str = "bf16") -> None:
        self.experts, top_k, self.hidden, inner, shared = SHAPES[shape]
        self.device = torch.device("cuda")
        gpu = examine(self.device)
        self.ops = CudaOps(self.device, CudaOptions(pdl=gpu.dependent_launch, gpu=gpu))
        self.rule = RoutingRule(top_k, sums_to_one=True, shared=shared)
        self.up = self.random(self.experts, 2 * inner, self.hidden, std=self.hidden**-0.5)
        self.down = self.random(self.experts, self.hidden, inner, std=inner**-0.5)
        logits = self.experts - (shared == "plain")
        self.router = self.random(logits, self.hidden, std=self.hidden**-0.5)
        packings: dict[str, Callable[[Tensor], PackedWeight]] = {
            "bf16": dense, "fp8": pack_float8, "mxfp4": round_to_mxfp4, "int4": partial(round_to_groups, INT4),
        }  # fmt: skip
        pack = packings[form]
        halves = [[pack(part) for part in weight.chunk(2)] for weight in self.up]
        self.handle = self.ops.make_experts(halves, [pack(weight) for weight in self.down], "silu_mul")
        self.to_logits = self.ops.make_linear([dense(self.router)], [None])
        assert all(isinstance(one.weight, CodedRows) == (form in ("mxfp4", "int4")) for one in self.handle.up)
        for weight in (*self.up, *self.down):
            if form == "fp8":
                weight.copy_(quantize(weight).dequantize())
            elif form != "bf16":
                weight.copy_(unpack(pack(weight)))

    def random(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(std=std)

    def batch(self, rows: int) -> CudaBatch:
        return CudaBatch(allocate_step(rows, 1, rows, rows, self.device))

    def route(self, x: Tensor, batch: CudaBatch) -> Routing:
        return self.ops.route(Residual(x), None, self.to_logits, self.rule, batch)[1]

    def by_torch(self, x: Tensor, routing: Routing) -> Tensor:
        """float32 [T, H]"""
        out = torch.zeros(len(x), self.hidden, device=self.device)
        for expert in routing.ids.unique().tolist():
            row, place = (routing.ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[row].float(), self.up[expert].float()).chunk(2, -1)
            inner = (F.silu(gate) * up).bfloat16().float()
            result = F.linear(inner, self.down[expert].float())
            out[row] += result * routing.weights[row, place, None].float()
        return out

    def check(self, got: Tensor, expected: Tensor) -> None:
        error = (got.float() - expected).std() / expected.std()
        assert error < 0.01, float(error)


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("form", ["bf16", "fp8", "mxfp4", "int4"])
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_experts_of_real_shapes(shape: str, form: str) -> None:
    """Random routing, and all rows to the same experts; one row to a prompt of 1,500 tokens."""
    mixture = Mixture(shape, form)
    for rows in (1, 2, 3, 8, 64, 256, 1500):
        x = mixture.random(rows, mixture.hidden)
        routing = mixture.route(x, mixture.batch(rows))
        plain = choose_experts(F.linear(x.float(), mixture.router.float()), mixture.rule)
        torch.testing.assert_close(routing.weights.sum(1), plain.weights.sum(1))
        assert (routing.ids.sort(1)[0] == plain.ids.sort(1)[0]).float().mean() > 0.99
        same = Routing(routing.weights, routing.ids[:1].expand(rows, -1).contiguous())
        for one in (routing, same):
            expected = mixture.by_torch(x, one)
            mixture.check(mixture.ops.experts(x, one, mixture.handle, mixture.batch(rows)), expected)
            residual = Residual(torch.ones_like(x))
            mixture.ops.experts_add_(x, one, mixture.handle, residual, mixture.batch(rows))
            mixture.check(residual.settle(), expected + 1)


@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "qwen3.6-35b-a3b"])
@torch.inference_mode()
def test_a_captured_mixture_follows_its_rows(shape: str) -> None:
    """A replay with other rows routes them to their own experts, and equal rows give equal bits."""
    mixture = Mixture(shape)
    for rows in (1, 64):
        x, batch = mixture.random(rows, mixture.hidden), mixture.batch(rows)

        def step(x: Tensor = x, batch: CudaBatch = batch) -> Tensor:
            return mixture.ops.experts(x, mixture.route(x, batch), mixture.handle, batch)

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        seen = []
        for seed in (1, 2, 1):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            seen.append(out.clone())
            logits = F.linear(x.float(), mixture.router.float())
            mixture.check(out, mixture.by_torch(x, choose_experts(logits, mixture.rule)))
        assert torch.equal(seen[0], seen[2])
        assert not torch.equal(seen[0], seen[1])


def test_random_codes_are_drawn_on_the_gpu() -> None:
    """Experts in MXFP4 are bytes: a shape alone gives random ones, the same for the same seed."""
    drawn = [DummyWeights(torch.bfloat16, 0.02, 1, device=torch.device("cuda")).uint8("blocks", 64, 64) for _ in "ab"]
    assert drawn[0].device.type == "cuda"
    assert torch.equal(*drawn)
    assert len(drawn[0].unique()) > 200
