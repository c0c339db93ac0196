"""Float8 weights: rows quantised, and products of every kernel against float64 twins of the same quantised numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncengine.kernels.cuda.gpu import B200, H200, L40S, Gpu
from asyncengine.kernels.cuda.linear.choose import default_plan
from asyncengine.kernels.cuda.linear.formats.registry import runs_on
from asyncengine.kernels.cuda.linear.plan import INVARIANT, MAX_ROWS, Plan, Site, round_rows
from asyncengine.kernels.cuda.linear.residual import Residual
from asyncengine.kernels.cuda.linear.tables import PlanTable
from asyncengine.kernels.cuda.linear.tiled import linear
from asyncengine.kernels.cuda.ops import CudaOps, CudaOptions
from asyncengine.kernels.cuda.rows.quantise import quantize_rows
from asyncengine.kernels.float8 import FLOAT8, FLOAT8_MAX, Quantized, join, pack_float8, quantize, scaled_product
from asyncengine.kernels.ops import Activation, Norm
from tests.amounts import examples
from tests.kernels.poison import poison_new_memory, surrounded, taken
from tests.kernels.twins import NO_STEP, activated, assert_within

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

COMPILED = torch.cuda.is_available()
# A sum in float32, relative to the sum of the terms' sizes; Hopper's tensor cores keep 14 bits for a while.
SUM, TENSOR_CORE_SUM = 1e-6, 2.0**-12 if COMPILED else 1e-6
BFLOAT16 = 2.0**-8


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


def make_random(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(torch.bfloat16)


def twin_rows(x: Tensor, norm: Norm | None = None, activation: Activation | None = None) -> Quantized:
    """Return the result that quantize_rows must make: values bit for bit."""
    wide = x.float()
    if activation is not None:
        gate, up = wide.chunk(2, 1)
        return quantize((gate * (1 / (1 + torch.exp(-gate))) * up).to(x.dtype))
    if norm is None:
        return quantize(x)
    made = quantize(wide * norm.weight.float())
    return Quantized(made.values, made.scale * torch.rsqrt(wide.square().mean(1) + norm.eps))


def assert_same_rows(got: Quantized, expected: Quantized, *, wrong: int = 0) -> None:
    assert got.values.shape == expected.values.shape
    assert int((got.values.cpu().float() != expected.values.float()).sum()) <= wrong
    torch.testing.assert_close(got.scale.cpu(), expected.scale, rtol=2e-6, atol=0)


# ---- rows ----


@given(rows=st.integers(1, 5), width=st.sampled_from([1, 7, 48, 80, 129, 520]), seed=st.integers(0, 1000),
       stride=st.sampled_from([0, 8, 13]), made_by=st.sampled_from(["nothing", "norm", "silu_mul"]),
       spread=st.integers(0, 20))  # fmt: skip
@settings(max_examples=examples(60))
def test_rows(device: torch.device, rows: int, width: int, seed: int, stride: int, made_by: str, spread: int) -> None:
    """Elements differ by up to 2^20 within a row, so that some are float8's subnormals and some are lost."""
    random = make_random(seed)
    gated = made_by == "silu_mul"
    x = random(rows, width * (1 + gated)) * torch.exp2(spread * -random(rows, width * (1 + gated)).float().abs())
    x = x.to(torch.bfloat16)
    norm = Norm(random(width), None, 1e-5) if made_by == "norm" else None
    activation: Activation | None = "silu_mul" if gated else None
    moved = None if norm is None else Norm(surrounded(norm.weight, device)[0], None, norm.eps)
    got = quantize_rows(surrounded(x, device, stride)[0], moved, activation, pdl=COMPILED)
    # An exponential of the GPU's may round another way, and then so may bfloat16 and float8.
    assert_same_rows(got, twin_rows(x, norm, activation), wrong=rows if gated else 0)
    assert got.values.float().abs().amax() <= FLOAT8_MAX


def test_rows_of_zeros_and_of_the_smallest_numbers(device: torch.device) -> None:
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    x[1, 3], x[2] = -1e-38, 3e38
    got = quantize_rows(x.to(device))
    assert_same_rows(got, twin_rows(x))
    assert (got.values[0].float() == 0).all()
    assert (got.values[2].float() == FLOAT8_MAX).all()
    assert got.scale.isfinite().all()
    assert (got.scale > 0).all()


def test_nan_and_infinity_poison_their_row_alone(device: torch.device) -> None:
    x = torch.ones(4, 64, dtype=torch.bfloat16)
    x[1, 5], x[2, 7] = math.nan, math.inf
    got = quantize_rows(x.to(device)).dequantize().cpu()
    assert got[[0, 3]].eq(1).all()
    assert got[1].isnan().any()
    assert got[2].isnan().any()


@given(rows=st.lists(st.integers(1, 40), min_size=1, max_size=3), inner=st.integers(1, 70), seed=st.integers(0, 100))
@settings(max_examples=examples(20))
def test_weights_one_by_one_are_weights_together(rows: list[int], inner: int, seed: int) -> None:
    weights = [w * 2.0**i for i, w in enumerate(make_random(seed)(sum(rows), inner).split(rows))]
    got = join([quantize(w) for w in weights])
    whole = torch.cat(weights)
    assert got.values.dtype == FLOAT8
    assert_same_rows(got, quantize(whole))
    error = (got.dequantize() - whole.float()).abs()
    top = whole.float().abs().amax(1, keepdim=True)
    # Half a step of 3 bits, or of the smallest numbers.
    assert (error <= torch.maximum(whole.float().abs() / 16, top * 2.0**-10 / FLOAT8_MAX) * 1.001).all()


def test_wrong_rows_raise(device: torch.device) -> None:
    x = torch.zeros(4, 64, dtype=torch.bfloat16, device=device)
    for norm, activation, match in (
        (None, "gelu", "gelu"),
        (Norm(x[0], x[0], 1e-5), None, "RMS norm"),
        (Norm(x[0], None, 1e-5), "silu_mul", "RMS norm or from"),
        (Norm(x[0, :32], None, 1e-5), None, r"\[64\]"),
    ):
        with pytest.raises(ValueError, match=match):
            quantize_rows(x, norm, activation)  # type: ignore[arg-type]
    for wrong in (x.T, x[0], x.half()):
        with pytest.raises(ValueError, match="contiguous rows"):
            quantize_rows(wrong)


# ---- products ----


@dataclass(frozen=True)
class Case:
    rows: int
    columns: int
    inner: int
    seed: int = 0
    norm: bool = False
    activation: Activation | None = None
    bias: bool = False
    add: bool = False
    stride: int = 0
    before: bool = False
    """x is quantised before, and not by the kernel"""

    def run(self, plan: Plan, device: torch.device, only: int | None = None) -> Tensor:
        """Return linear's result, of one row or of all, checked against the twin. Other memory must stay as it was."""
        random = make_random(self.seed)

        def moved(x: Tensor, stride: int = 0) -> Tensor:
            return surrounded(x, device, stride)[0]

        weight_rows = self.columns * (2 if self.activation == "silu_mul" else 1)
        x = random(self.rows, self.inner) + random(self.rows, 1)
        weight = quantize(random(weight_rows, self.inner) * self.inner**-0.5)
        bias = random(weight_rows) if self.bias else None
        norm = Norm(random(self.inner), None, 1e-5) if self.norm else None
        residual = random(self.rows, self.columns)
        if only is not None:
            x, residual = x[only : only + 1], residual[only : only + 1]
        out, memory = surrounded(residual if self.add else torch.full_like(residual, math.nan), device, self.stride)
        given: Tensor | Quantized = moved(x, self.stride)
        given_norm = None if norm is None else Norm(moved(norm.weight), None, norm.eps)
        if self.before:
            made = quantize_rows(given, given_norm)
            given, given_norm = Quantized(moved(made.values.cpu()), moved(made.scale.cpu())), None
        arrivals = torch.zeros(64, dtype=torch.int32, device=device)
        linear(
            given,
            Quantized(moved(weight.values), moved(weight.scale)),
            plan,
            out=out,
            bias=None if bias is None else moved(bias),
            norm=given_norm,
            activation=self.activation,
            add=self.add,
            arrivals=arrivals,
            pdl=COMPILED,
        )
        got = taken(out, memory)
        assert (arrivals == 0).all()
        expected, bound = self.twin(twin_rows(x, norm), weight, bias, TENSOR_CORE_SUM if plan.kind == "tiled" else SUM)
        if self.add:
            expected = expected + residual.double()
        assert_within(got, expected, bound + BFLOAT16 * expected.abs())
        return got

    def twin(self, x: Quantized, weight: Quantized, bias: Tensor | None, relative: float) -> tuple[Tensor, Tensor]:
        """Compute the result in float64, and how far sums on the way may take a result from it."""
        wide, wide_weight = (q.values.double() * q.scale.double()[:, None] for q in (x, weight))
        y, error = wide @ wide_weight.T, 4 * relative * (wide.abs() @ wide_weight.abs().T)
        if bias is not None:
            y, error = y + bias.double(), error + SUM * bias.double().abs()
        y, error = activated(y, error, self.activation)
        return y, error + SUM


operands = {
    "seed": st.integers(0, 1000),
    "activation": st.sampled_from([None, "silu_mul"]),
    "bias": st.booleans(),
    "add": st.booleans(),
    "stride": st.sampled_from([0, 8, 13]),
}
fused = {**operands, "norm": st.booleans(), "before": st.booleans()}
INNER = st.sampled_from([64, 80, 96, 128])


@given(case=st.builds(Case, rows=st.integers(1, 2), columns=st.sampled_from([8, 12, 24]), inner=INNER, **fused),
       columns=st.sampled_from([4, 8]), inner=st.sampled_from([32, 64, 128]))  # fmt: skip
@settings(max_examples=examples(40))
def test_vector(device: torch.device, case: Case, columns: int, inner: int) -> None:
    case.run(Plan("vector", 4 if case.columns % columns else columns, inner, 1), device)


@given(case=st.builds(Case, rows=st.integers(1, 16), columns=st.sampled_from([16, 32, 48]), inner=INNER, **fused),
       ahead=st.integers(0, 2), inner=st.sampled_from([16, 32]))  # fmt: skip
@settings(max_examples=examples(50))
def test_skinny(device: torch.device, case: Case, ahead: int, inner: int) -> None:
    ahead = min(ahead, case.inner // (2 * inner))
    case = replace(case, before=case.before or ahead > 0)
    case.run(Plan("skinny", 16, inner, 2, ahead=ahead, fused_norm=not case.before), device)


@given(case=st.builds(Case, rows=st.integers(1, 70), columns=st.integers(1, 70), inner=INNER, norm=st.booleans(),
                      before=st.just(True), **operands),
       rows=st.sampled_from([16, 32, 64]), columns=st.sampled_from([16, 64]), inner=st.sampled_from([32, 64, 128]),
       split=st.integers(1, 2), stages=st.integers(1, 3))  # fmt: skip
@settings(max_examples=examples(50))
def test_tiled(device: torch.device, case: Case, rows: int, columns: int, inner: int, split: int, stages: int) -> None:
    if case.inner % (split * inner):
        split = 1
    case.run(Plan("tiled", columns, inner, 4, rows, split, stages), device)


@given(case=st.builds(Case, rows=st.integers(1, 140), columns=st.integers(1, 70), inner=INNER, norm=st.booleans(),
                      before=st.just(True), **operands),
       row=st.integers(0, 139))  # fmt: skip
@settings(max_examples=examples(20))
def test_a_row_alone_is_the_row_in_a_batch(device: torch.device, case: Case, row: int) -> None:
    row %= case.rows
    assert torch.equal(case.run(INVARIANT, device, only=row), case.run(INVARIANT, device)[row : row + 1])


@pytest.mark.parametrize("bias", [False, True])
def test_scaled_product(device: torch.device, bias: bool) -> None:
    random = make_random(1)
    x, weight, b = quantize(random(37, 64) * 3), quantize(random(48, 64)), random(48) if bias else None
    moved_x, moved_weight = (Quantized(q.values.to(device), q.scale.to(device)) for q in (x, weight))
    got = scaled_product(moved_x, moved_weight, None if b is None else b.to(device))
    assert got.dtype == torch.bfloat16
    expected = x.dequantize() @ weight.dequantize().T + (0 if b is None else b.float())
    torch.testing.assert_close(got.float().cpu(), expected, rtol=2 * BFLOAT16, atol=2e-2)


def test_what_does_not_go_together_raises(device: torch.device) -> None:
    plain = torch.ones(2, 96, dtype=torch.bfloat16, device=device)
    x, weight = quantize(plain), quantize(torch.ones(32, 96, dtype=torch.bfloat16, device=device))
    out = torch.zeros(2, 32, dtype=torch.bfloat16, device=device)
    vector, skinny, tiled = Plan("vector", 8, 32, 1), Plan("skinny", 16, 16, 2), Plan("tiled", 16, 32, 4, 16)
    rms, layer = Norm(plain[0], None, 1e-5), Norm(plain[0], plain[0], 1e-5)
    index = torch.zeros(2, dtype=torch.int64, device=device)
    for plan, rows, matrix, more in (
        (tiled, plain, weight, {}),
        (tiled, x, weight.values, {}),
        (replace(skinny, ahead=1), plain, weight, {}),
        (replace(vector, ahead=1), x, weight, {}),
        (vector, plain, weight, {"norm": layer}),
        (skinny, plain, weight, {"norm": layer}),
        (skinny, plain, weight, {"index": index}),
        (skinny, x, weight, {"norm": rms}),
        (vector, x, plain, {}),
        (Plan("cublas"), x, weight, {}),
    ):
        with pytest.raises(ValueError, match="does not fit the operations fused with it"):
            linear(rows, matrix, plan, out=out, **more)
    assert (out == 0).all()


# ---- as a model calls them ----


def make_ops(device: torch.device, plans: dict[Site, Plan] | None = None, *, invariant: bool = False) -> CudaOps:
    return CudaOps(device, CudaOptions(PlanTable(plans), COMPILED, invariant))


@dataclass(frozen=True)
class Mlp:
    """Gate and up with their norm, and down. Its twin quantises what the kernels quantise."""

    device: torch.device
    hidden: int = 64
    inner: int = 96
    bias: bool = False

    def weights(self) -> tuple[list[Tensor], Tensor, list[Tensor | None], Tensor | None, Norm]:
        random = make_random(7)
        parts = [random(self.inner, self.hidden) * self.hidden**-0.5 for _ in range(2)]
        down = random(self.hidden, self.inner) * self.inner**-0.5
        biases = [random(self.inner), None] if self.bias else [None, None]
        return parts, down, biases, random(self.hidden) if self.bias else None, Norm(random(self.hidden), None, 1e-5)

    def run(self, ops: CudaOps, x: Tensor) -> Tensor:
        def moved(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.to(self.device)

        gate_up, down, biases, bias, norm = self.weights()
        residual = Residual(x.to(self.device, copy=True))
        first = ops.make_linear([pack_float8(w.to(self.device)) for w in gate_up], [moved(b) for b in biases])
        second = ops.make_linear([pack_float8(down.to(self.device))], [moved(bias)])
        assert isinstance(first.weight, Quantized)
        hidden = ops.norm_linear(
            residual, Norm(norm.weight.to(self.device), None, norm.eps), first, NO_STEP, "silu_mul"
        )
        assert hidden.shape == (len(x), self.inner)
        ops.linear_add_(hidden, second, residual, NO_STEP)
        return residual.x.cpu()

    def twin(self, x: Tensor) -> Tensor:
        gate_up, down, biases, bias, norm = self.weights()
        y = twin_rows(x, norm).dequantize() @ quantize(torch.cat(gate_up)).dequantize().T
        if biases[0] is not None:
            y += F.pad(biases[0].float(), (0, self.inner))
        hidden = twin_rows(y.to(torch.bfloat16), None, "silu_mul").dequantize()
        y = hidden @ quantize(down).dequantize().T
        return x + y + (0 if bias is None else bias.float())


def assert_near(got: Tensor, expected: Tensor) -> None:
    """Compare norms: where the hidden rows are rounded to bfloat16 some elements get another float8, up to an eighth
    away."""
    assert got.shape == expected.shape
    assert float((got.float() - expected).norm() / expected.norm()) < 0.025


PLANS: dict[str, Plan | None] = {
    "none": None,
    "vector": Plan("vector", 8, 32, 1),
    "vector apart": Plan("vector", 8, 32, 1, fused_norm=False),
    "skinny": Plan("skinny", 16, 16, 2),
    "skinny ahead": Plan("skinny", 16, 16, 2, ahead=1, fused_norm=False),
    "tiled": Plan("tiled", 16, 32, 4, 16, stages=2, fused_norm=False),
    "scaled product": Plan("cublas", fused_norm=False),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("first", "second", "rows"),
    [
        (first, second, 1 + (i + j) % 2)  # each plan meets every other one, and both counts of rows
        for i, first in enumerate(PLANS)
        for j, second in enumerate(["none", "vector", "skinny ahead", "scaled product"])
    ],
)
def test_an_mlp(device: torch.device, first: str, second: str, rows: int) -> None:
    """The MLP is right whichever plan makes the hidden rows, and whichever reads them."""
    mlp = Mlp(device, bias=rows == 2)
    sites = [
        Site(mlp.inner, mlp.hidden, round_rows(rows), "rms", "silu_mul", mlp.bias, False, "fp8"),
        Site(mlp.hidden, mlp.inner, round_rows(rows), "none", None, mlp.bias, True, "fp8"),
    ]
    chosen = {site: plan for site, plan in zip(sites, (PLANS[first], PLANS[second]), strict=True) if plan}
    ops = make_ops(device, chosen)
    x = make_random(3)(rows, mlp.hidden)
    got = mlp.run(ops, x)
    assert ops.choices.missing == set(sites) - set(chosen)
    assert_near(got, mlp.twin(x))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("hidden", "inner"), [(64, 96), (48, 88), (50, 70)])
def test_many_rows_and_odd_shapes(device: torch.device, hidden: int, inner: int) -> None:
    """The scaled product takes multiples of 16; a kernel of ours multiplies the others."""
    mlp = Mlp(device, hidden, inner)
    ops = make_ops(device)
    x = make_random(5)(MAX_ROWS + 1, hidden)
    assert_near(mlp.run(ops, x), mlp.twin(x))
    assert not ops.choices.missing


def test_batch_invariant(device: torch.device) -> None:
    mlp, ops = Mlp(device, bias=True), make_ops(device, invariant=True)
    x = make_random(5)(70, mlp.hidden)
    together = mlp.run(ops, x)
    for rows in (1, 2, 9):
        assert torch.equal(mlp.run(ops, x[:rows]), together[:rows])


@given(columns=st.integers(1, 1 << 16), inner=st.integers(1, 1 << 15), rows=st.integers(1, MAX_ROWS),
       gated=st.booleans(), gpu=st.sampled_from([L40S, H200, B200]))  # fmt: skip
def test_default_plans_fit(columns: int, inner: int, rows: int, gated: bool, gpu: Gpu) -> None:
    site = Site(columns, inner, round_rows(rows), "none", "silu_mul" if gated else None, False, not gated, "fp8")
    plan = default_plan(site, gpu)
    assert plan.fits(columns, inner, gated)
    assert runs_on(plan, gpu, "fp8")
    if plan.kind == "cublas":
        assert site.weight_rows % 16 == 0
        assert inner % 16 == 0
