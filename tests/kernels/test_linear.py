"""The GPU's projections of few rows: against float64 twins, against each other, and against poison."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.linear.plan import CUBLAS, INVARIANT, MAX_ROWS, Plan, Site, round_rows
from asyncengine.kernels.cuda.linear.residual import Residual
from asyncengine.kernels.cuda.linear.tables import PlanTable
from asyncengine.kernels.cuda.linear.tiled import linear
from asyncengine.kernels.cuda.ops import CudaBatch, CudaOps, CudaOptions
from asyncengine.kernels.cuda.sampling.sample import Ranks
from asyncengine.kernels.cuda.step.tensors import allocate_step
from asyncengine.kernels.ops import Activation, Norm
from asyncengine.kernels.weight import dense
from tests.kernels.poison import poison_new_memory, surrounded, taken
from tests.kernels.twins import NO_STEP, activated, assert_within, greatest_ranks

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

COMPILED = torch.cuda.is_available()
# A sum in float32, relative to the sum of the terms' sizes; what is rounded to bfloat16 on the way, likewise.
SUM, ROUNDED = 1e-6, 2.0**-8
STORED = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


PLANS = {
    "vector": Plan("vector", 8, 32, 1),
    "skinny": Plan("skinny", 16, 16, 2),
    "skinny ahead": Plan("skinny", 16, 16, 2, ahead=1, fused_norm=False),
    "tiled": Plan("tiled", 16, 32, 4, 16, stages=2, fused_norm=False),
}
plan_names = pytest.mark.parametrize("name", PLANS)


@dataclass(frozen=True)
class Case:
    """Operands, and what is asked of them."""

    rows: int
    columns: int
    inner: int
    seed: int = 0
    bfloat16: bool = False
    wide_out: bool = False
    """out is float32 whatever x is"""
    norm: str = "none"
    activation: Activation | None = None
    bias: bool = False
    add: bool = False
    index: bool = False
    stride: int = 0

    def run(
        self, plan: Plan, device: torch.device, only: int | None = None, multiply: Callable[..., object] = linear
    ) -> Tensor:
        """Return linear's result, of one row or of all, checked against the twin. Other memory must stay as it was."""
        generator = torch.Generator().manual_seed(self.seed)
        dtype = torch.bfloat16 if self.bfloat16 else torch.float32

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        def moved(x: Tensor | None, stride: int = 0) -> Any:
            return None if x is None else surrounded(x, device, stride)[0]

        weight_rows = self.columns * (2 if self.activation == "silu_mul" else 1)
        source = random(self.rows, self.inner) + random(self.rows, 1)
        weight, bias = random(weight_rows, self.inner) * self.inner**-0.5, random(weight_rows)
        gain, shift = random(self.inner), random(self.inner)
        out_dtype = torch.float32 if self.wide_out else dtype
        before = random(self.rows, self.columns).to(out_dtype) if self.add else torch.full(
            (self.rows, self.columns), math.nan, dtype=out_dtype
        )  # fmt: skip
        norm = None if self.norm == "none" else Norm(gain, shift if self.norm == "layer" else None, 1e-5)
        if only is not None:
            source, before = source[only : only + 1], before[only : only + 1]
        x, index = source, None
        if self.index:
            index = torch.randperm(2 * len(source) + 1, generator=generator)[: len(source)]
            x = torch.full((2 * len(source) + 1, self.inner), math.nan, dtype=dtype)
            x[index] = source

        out, memory = surrounded(before, device, self.stride)
        arrivals = torch.zeros(64, dtype=torch.int32, device=device)
        more = {
            "norm": None if norm is None else Norm(moved(norm.weight), moved(norm.bias), norm.eps),
            "index": None if index is None else index.to(device),
            "arrivals": arrivals,
        }
        multiply(
            moved(x, self.stride),
            moved(weight),
            plan,
            out=out,
            bias=moved(bias) if self.bias else None,
            activation=self.activation,
            add=self.add,
            pdl=COMPILED,
            **(more if multiply is linear else {}),
        )
        got = taken(out, memory)
        assert (arrivals == 0).all()
        expected, bound = self.twin(source, weight, bias if self.bias else None, norm, before if self.add else None)
        assert_within(got, expected, bound + STORED[out_dtype] * expected.abs())
        return got

    def twin(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm | None, before: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute the result in float64, and how far rounding on the way may take a result from it."""
        x, weight = x.double(), weight.double()
        relative = SUM
        if norm is not None:
            relative += ROUNDED if self.bfloat16 else SUM
            shape, gain = (self.inner,), norm.weight.double()
            if norm.bias is None:
                x = F.rms_norm(x, shape, gain, norm.eps)
            else:
                x = F.layer_norm(x, shape, gain, norm.bias.double(), norm.eps)
        y, size = x @ weight.T, x.abs() @ weight.T.abs()
        if bias is not None:
            y, size = y + bias.double(), size + bias.double().abs()
        y, error = activated(y, relative * size, self.activation)
        if before is not None:
            y = y + before.double()
        return y, error + SUM


operands = {
    "seed": st.integers(0, 1000),
    "bfloat16": st.booleans(),
    "wide_out": st.booleans(),
    "activation": st.sampled_from([None, None, "silu_mul", "gelu", "gelu_tanh"]),
    "bias": st.booleans(),
    "add": st.booleans(),
    "stride": st.sampled_from([0, 8, 13]),
}
fused = {**operands, "norm": st.sampled_from(["none", "rms", "layer"]), "index": st.booleans()}
INNER = st.sampled_from([64, 80, 96, 128])


# ---- each kernel ----


@given(case=st.builds(Case, rows=st.integers(1, 2), columns=st.sampled_from([8, 12, 24]), inner=INNER, **fused),
       columns=st.sampled_from([4, 8]), inner=st.sampled_from([32, 64, 128]))  # fmt: skip
@settings(max_examples=40)
def test_vector(device: torch.device, case: Case, columns: int, inner: int) -> None:
    if case.columns % columns:
        columns = 4
    case.run(Plan("vector", columns, inner, 1), device)


@given(case=st.builds(Case, rows=st.integers(1, 16), columns=st.sampled_from([16, 32, 48]), inner=INNER, **fused),
       ahead=st.integers(0, 2), inner=st.sampled_from([16, 32]))  # fmt: skip
@settings(max_examples=50)
def test_skinny(device: torch.device, case: Case, ahead: int, inner: int) -> None:
    ahead = min(ahead, case.inner // (2 * inner))
    if case.norm == "layer":
        ahead = 0
    case.run(Plan("skinny", 16, inner, 2, ahead=ahead), device)


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("inner", [96, 80])
@pytest.mark.parametrize("norm", ["none", "rms"])
def test_skinny_ahead(device: torch.device, ahead: int, inner: int, norm: str) -> None:
    """Three steps, the last of them whole or half."""
    if ahead * 32 > inner:
        ahead = 2
    case = Case(5, 32, inner, 3, bfloat16=True, norm=norm, activation="silu_mul", wide_out=True)
    got = case.run(Plan("skinny", 32, 16, 2, ahead=ahead), device)
    torch.testing.assert_close(got, case.run(Plan("skinny", 16, 32, 1), device), rtol=1e-4, atol=1e-5)


@given(case=st.builds(Case, rows=st.integers(1, 70), columns=st.integers(1, 70), inner=INNER, **operands),
       rows=st.sampled_from([16, 32, 64]), columns=st.sampled_from([16, 32]), inner=st.sampled_from([16, 32, 64]),
       split=st.integers(1, 2), stages=st.integers(1, 3))  # fmt: skip
@settings(max_examples=50)
def test_tiled(device: torch.device, case: Case, rows: int, columns: int, inner: int, split: int, stages: int) -> None:
    if case.inner % (split * inner):
        split = 1
    case.run(Plan("tiled", columns, inner, 4, rows, split, stages), device)


@pytest.mark.parametrize("split", [2, 4])
def test_split_sums_are_the_same_every_time(device: torch.device, split: int) -> None:
    plan, case = Plan("tiled", 16, 32, 4, 16, split, 2), Case(33, 40, 256, 1, bias=True, activation="gelu", add=True)
    got = case.run(plan, device)
    for _ in range(20 if COMPILED else 1):
        assert torch.equal(case.run(plan, device), got)


@given(case=st.builds(Case, rows=st.integers(1, 140), columns=st.integers(1, 70), inner=INNER, **operands),
       row=st.integers(0, 139))  # fmt: skip
@settings(max_examples=20)
def test_a_row_alone_is_the_row_in_a_batch(device: torch.device, case: Case, row: int) -> None:
    row %= case.rows
    assert torch.equal(case.run(INVARIANT, device, only=row), case.run(INVARIANT, device)[row : row + 1])


@plan_names
def test_poison_stays_in_its_row(device: torch.device, name: str) -> None:
    plan = PLANS[name]
    rows = 2 if plan.kind == "vector" else 5
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 96, generator=generator).to(device) for n in (rows, 32))
    norm = None if plan.kind == "tiled" else Norm(torch.ones(96, device=device), None, 1e-5)
    clean, got = (torch.empty(rows, 32, device=device) for _ in range(2))
    linear(x, weight, plan, out=clean, norm=norm)
    x[1] = math.nan
    linear(x, weight, plan, out=got, norm=norm)
    others = [row for row in range(rows) if row != 1]
    assert torch.equal(got[others], clean[others])
    assert got[1].isnan().all()


# ---- misuse ----


def test_wrong_arguments_raise(device: torch.device) -> None:
    x, weight, out = (torch.zeros(shape, device=device) for shape in ((2, 96), (32, 96), (2, 32)))
    index = torch.zeros(2, dtype=torch.int64, device=device)
    rms, layer = Norm(x[0], None, 1e-5), Norm(x[0], x[0], 1e-5)
    vector, skinny, tiled = Plan("vector", 8, 32, 1), Plan("skinny", 16, 16, 2), Plan("tiled", 16, 32, 4, 16)

    def refused(match: str, plan: Plan, x: Tensor = x, weight: Tensor = weight, out: Tensor = out, **more: Any) -> None:
        with pytest.raises(ValueError, match=match):
            linear(x, weight, plan, out=out, **more)

    refused("does not fit", Plan("cublas"))
    refused("does not fit", replace(vector, columns=64))
    refused("does not fit", replace(vector, ahead=1))
    refused("does not fit", replace(skinny, columns=64), activation="silu_mul")
    refused("does not fit", replace(skinny, ahead=4))
    refused("does not fit", replace(skinny, ahead=1), norm=layer)
    refused("does not fit", replace(tiled, split=2))
    refused("fused", tiled, norm=rms)
    refused("fused", tiled, index=index)
    for plan in (vector, skinny, tiled):
        refused("do not fit", plan, out=out[:1])
        refused("do not fit", plan, out=out[:, :16])
        refused("do not fit", plan, out=torch.zeros(32, 2, device=device).T)
        refused("do not fit", plan, x=torch.zeros(96, 2, device=device).T)
        refused("do not fit", plan, weight=torch.zeros(96, 32, device=device).T)
        refused("do not fit", plan, weight=torch.zeros(32, 80, device=device))
    refused("do not fit", tiled, weight=torch.zeros(65, 96, device=device), activation="silu_mul")
    split = replace(tiled, inner=16, split=2)
    refused("2 counters", split)
    refused("2 counters", split, arrivals=torch.zeros(1, dtype=torch.int32, device=device))
    assert (out == 0).all()


# ---- as a model calls them ----


def make_ops(device: torch.device, plans: dict[Site, Plan] | None = None, *, invariant: bool = False) -> CudaOps:
    return CudaOps(device, CudaOptions(PlanTable(plans), COMPILED, invariant, gpu=H200))


@dataclass(frozen=True)
class Model:
    """A projection's weights and input, in bfloat16: of others no table says anything."""

    device: torch.device
    rows: int
    out_features: int
    inner: int = 48
    layer: bool = False
    bias: bool = True
    dtype: torch.dtype = torch.bfloat16

    def random(self, *shape: int, seed: int) -> Tensor:
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return x.to(self.dtype).to(self.device)

    @property
    def x(self) -> Tensor:
        return self.random(MAX_ROWS + 1, self.inner, seed=1)[: self.rows]

    @property
    def norm(self) -> Norm:
        bias = self.random(self.inner, seed=3) if self.layer else None
        return Norm(self.random(self.inner, seed=2), bias, 1e-5)

    def handle(self, ops: CudaOps) -> Any:
        parts = (self.out_features // 4, self.out_features - self.out_features // 4)
        weights = [dense(self.random(n, self.inner, seed=4 + n) * self.inner**-0.5) for n in parts]
        return ops.make_linear(weights, [self.random(parts[0], seed=6) if self.bias else None, None])

    def norm_linear(self, ops: CudaOps, activation: Activation | None = None) -> Any:
        return ops.norm_linear(Residual(self.x), self.norm, self.handle(ops), NO_STEP, activation)

    def linear_add(self, ops: CudaOps) -> Tensor:
        residual = Residual(self.random(MAX_ROWS + 1, self.out_features, seed=9)[: self.rows])
        ops.linear_add_(self.x, self.handle(ops), residual, NO_STEP)
        return residual.settle()

    def logits(self, ops: CudaOps, index: list[int]) -> Tensor:
        step = allocate_step(1, 1, len(index), self.rows, self.device)
        step.sample_index.copy_(torch.tensor(index))
        got = ops.logits(Residual(self.x), self.norm, self.handle(ops), CudaBatch(step))
        assert isinstance(got, Tensor)
        assert got.dtype == torch.float32
        return got


def assert_near(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    torch.testing.assert_close(got.float(), expected.float(), rtol=2e-2, atol=2e-2)


@plan_names
@pytest.mark.parametrize(("layer", "out_features"), [(False, 48), (True, 48), (False, 52)])  # 52 is padded
@pytest.mark.parametrize("activation", [None, "silu_mul", "gelu"])
def test_norm_linear(
    device: torch.device, name: str, layer: bool, out_features: int, activation: Activation | None
) -> None:
    model = Model(device, 2 if name == "vector" else 3, out_features, layer=layer, bias=not layer)
    padded = activation is None and out_features == 52
    columns = 64 if padded else out_features // 2 if activation == "silu_mul" else out_features
    plan = PLANS[name]
    if not plan.fits(columns, model.inner, activation == "silu_mul"):
        plan = PLANS["tiled"]
    kind = "layer" if layer else "rms"
    site = Site(columns, model.inner, round_rows(model.rows), kind, activation, model.bias, False)
    cublas, planned = make_ops(device), make_ops(device, {site: plan})
    expected, got = model.norm_linear(cublas, activation), model.norm_linear(planned, activation)
    assert got.shape[1] == (out_features // 2 if activation == "silu_mul" else out_features)
    assert_near(got, expected)
    assert cublas.choices.missing == {site}
    assert not planned.choices.missing


@plan_names
@pytest.mark.parametrize("out_features", [48, 52])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_add(device: torch.device, name: str, out_features: int, bias: bool) -> None:
    model = Model(device, 1 if name == "vector" else 5, out_features, bias=bias)
    plan = PLANS[name] if PLANS[name].fits(out_features, model.inner, False) else PLANS["tiled"]
    site = Site(out_features, model.inner, round_rows(model.rows), "none", None, bias, True)
    cublas, planned = make_ops(device), make_ops(device, {site: plan})
    assert_near(model.linear_add(planned), model.linear_add(cublas))
    assert cublas.choices.missing == {site}
    assert not planned.choices.missing


@plan_names
@pytest.mark.parametrize("out_features", [48, 50])
def test_logits(device: torch.device, name: str, out_features: int) -> None:
    model = Model(device, 6, out_features)
    index = [5, 0] if name == "vector" else [5, 0, 0, 3]
    columns = 64 if out_features == 50 else 48
    site = Site(columns, model.inner, round_rows(len(index)), "rms", None, True, False)
    cublas, planned = make_ops(device), make_ops(device, {site: PLANS[name]})
    expected, got = model.logits(cublas, index), model.logits(planned, index)
    assert got.shape == (len(index), out_features)
    assert_near(got, expected)
    assert cublas.choices.missing == {site}
    assert not planned.choices.missing


def left_in_parts(x: Tensor, weight: Tensor, plan: Plan, *, bias: Tensor | None, **how: bool) -> Tensor:
    """Compute the result of tma_parts, which only a Hopper GPU can run."""
    spans = zip(x.float().chunk(plan.split, 1), weight.float().chunk(plan.split, 1), strict=True)
    parts = torch.stack([a @ b.T for a, b in spans])
    return parts if bias is None else torch.cat((parts[:1] + bias.float(), parts[1:]))


@pytest.mark.parametrize("fused", [False, True])
def test_parts_are_added_by_the_norm_that_reads_the_residual(
    device: torch.device, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two additions, a norm with its projection, a third addition and the logits, which read some rows twice."""
    if device.type == "cpu":
        monkeypatch.setattr("asyncengine.kernels.cuda.linear.tma.tma_parts", left_in_parts)
    model = Model(device, 6, 128, 128, layer=False)
    projected = Site(128, 128, 8, "rms", "gelu", True, False)
    plans = {
        Site(128, 128, 8, "none", None, True, True): Plan("tma", 64, 64, 4, 8, 2, 2, fused_norm=False),
        projected: replace(PLANS["skinny"], fused_norm=fused),
    }
    results = []
    for ops in (make_ops(device, plans), make_ops(device)):
        handle, residual = model.handle(ops), Residual(model.x.clone())
        for _ in range(2):
            ops.linear_add_(model.x, handle, residual, NO_STEP)
        assert (residual.state == "parts") == (ops.options.plans.find(projected) is not None)
        hidden = ops.norm_linear(residual, model.norm, handle, NO_STEP, "gelu")
        assert residual.state == "plain"
        after = residual.x.clone()
        ops.linear_add_(hidden, handle, residual, NO_STEP)
        step = allocate_step(1, 1, 4, model.rows, device)
        step.sample_index.copy_(torch.tensor([5, 0, 0, 3]))
        results.append((after, hidden, ops.logits(residual, model.norm, handle, CudaBatch(step)), residual.settle()))
    for got, expected in zip(*results, strict=True):
        assert_near(got, expected)


def ranked(x: Tensor, weight: Tensor, plan: Plan, *, bias: Tensor | None, **how: bool) -> Tensor:
    """Compute the result of tma_ranks, which only a Hopper GPU can run."""
    assert plan == RANKING
    return greatest_ranks(F.linear(x.float(), weight.float(), None if bias is None else bias.float()), plan.columns)


RANKING = Plan("tma", 64, 64, 4, 8, 1, 2, fused_norm=False)


@pytest.mark.parametrize("out_features", [128, 100])  # 100 is padded to 128
def test_greedy_heads_leave_ranks(device: torch.device, out_features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only greedy batches of more than one row leave ranks, and only where kernels in Gluon run."""
    if device.type == "cpu":
        monkeypatch.setattr("asyncengine.kernels.cuda.linear.tma_ranks.tma_ranks", ranked)
    model = Model(device, 6, out_features, 64)
    site = Site(128, 64, 8, "rms", "argmax", True, False)
    index = [5, 0, 0, 3]
    step = allocate_step(1, 1, len(index), model.rows, device)
    step.sample_index.copy_(torch.tensor(index))

    def head(ops: CudaOps, needs: int = 0, rows: int = 4) -> Tensor | Ranks:
        batch = CudaBatch(step.bucket(rows, model.rows), needs=needs)
        return ops.logits(Residual(model.x), model.norm, model.handle(ops), batch)

    ops = make_ops(device, {site: RANKING})
    ranks, logits = head(ops), head(ops, needs=1)
    assert isinstance(ranks, Ranks)
    assert isinstance(logits, Tensor)
    assert ranks.tiles.shape == (4, 2)
    found = ~ranks.tiles.amax(1).cpu() & (2**20 - 1)
    assert torch.equal(found, logits.argmax(1).cpu())
    assert ops.choices.missing == {site._replace(activation=None)}
    assert isinstance(head(ops, rows=1), Tensor)
    assert isinstance(head(make_ops(device, {site: RANKING}, invariant=True)), Tensor)
    without_tma = CudaOps(device, CudaOptions(PlanTable({site: RANKING}), COMPILED))
    assert isinstance(head(without_tma), Tensor)
    unknown = make_ops(device)
    assert isinstance(head(unknown), Tensor), "until it is measured"
    assert unknown.choices.missing == {site, site._replace(activation=None)}
    assert isinstance(head(known := make_ops(device, {site: CUBLAS})), Tensor)
    assert known.choices.missing == {site._replace(activation=None)}


def test_tma_plans_of_a_table_are_not_taken_where_they_do_not_run(device: torch.device) -> None:
    model = Model(device, 6, 48)
    site = Site(48, 48, 8, "none", None, True, True)
    plans = PlanTable({site: Plan("tma", 64, 64, 4, 8, 1, 2, fused_norm=False)})
    ops = CudaOps(device, CudaOptions(plans, COMPILED))
    assert torch.equal(model.linear_add(ops), model.linear_add(make_ops(device)))
    assert not ops.choices.missing


def test_only_what_a_table_could_know_is_missing(device: torch.device) -> None:
    ops = make_ops(device)
    Model(device, 2, 48, dtype=torch.float32).linear_add(ops)
    Model(device, MAX_ROWS + 1, 48, inner=4096).linear_add(ops)
    assert not ops.choices.missing
    for rows in (MAX_ROWS, 5, 6, 1):
        Model(device, rows, 48).linear_add(ops)
    assert ops.choices.missing == {Site(48, 48, rows, "none", None, True, True) for rows in (MAX_ROWS, 8, 1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_invariant(device: torch.device, dtype: torch.dtype) -> None:
    """The plan whose sums are the same for any batch, although the table knows others."""
    model = Model(device, 7, 52, dtype=dtype)
    plans = {
        Site(columns, 48, rows, norm, None, True, norm == "none"): PLANS["skinny ahead"]
        for norm, columns in (("rms", 64), ("none", 52))
        for rows in (1, 2, 4, 8)
    }
    ops = make_ops(device, plans, invariant=True)
    alone = [replace(model, rows=rows) for rows in (1, 2, 4)]
    for call, near in (
        (lambda m: m.norm_linear(ops), model.norm_linear(make_ops(device))),
        (lambda m: m.norm_linear(ops, "gelu_tanh"), model.norm_linear(make_ops(device), "gelu_tanh")),
        (lambda m: m.linear_add(ops), model.linear_add(make_ops(device))),
        (lambda m: m.logits(ops, list(range(m.rows))), model.logits(make_ops(device), list(range(7)))),
    ):
        together = call(model)
        assert_near(together, near)
        for fewer in alone:
            assert torch.equal(call(fewer), together[: fewer.rows])
    assert not ops.choices.missing
