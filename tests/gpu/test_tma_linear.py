"""Projections whose weights flow through shared memory, which Triton's interpreter cannot run."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.linear import tma
from asyncengine.kernels.cuda.linear.choose import plan_for_many_rows
from asyncengine.kernels.cuda.linear.plan import CUBLAS, MAX_ROWS, Plan, Site
from asyncengine.kernels.cuda.linear.residual import Residual, Unnormed, fold_norm
from asyncengine.kernels.cuda.linear.tables import PlanTable
from asyncengine.kernels.cuda.linear.tma import tma_linear, tma_parts, tma_sum
from asyncengine.kernels.cuda.ops import CudaOps, CudaOptions
from asyncengine.kernels.cuda.trials import examine, runs_tma
from asyncengine.kernels.ops import Norm
from asyncengine.kernels.weight import dense
from tests.gpu.conftest import needs_hopper
from tests.kernels.poison import poison_new_memory, surrounded, taken
from tests.kernels.test_linear import Case
from tests.kernels.twins import NO_STEP, activated, assert_within

pytestmark = needs_hopper

CASES = st.builds(
    Case,
    rows=st.integers(1, 140),
    columns=st.integers(1, 40).map(lambda n: 8 * n),
    inner=st.sampled_from([64, 104, 128, 200, 768]),
    seed=st.integers(0, 1000),
    bfloat16=st.just(True),
    wide_out=st.booleans(),
    activation=st.sampled_from([None, None, "silu_mul", "gelu", "gelu_tanh"]),
    bias=st.booleans(),
    add=st.booleans(),
    stride=st.sampled_from([0, 8]),
)
TILES = st.sampled_from([(16, 4), (32, 4), (32, 8), (64, 4), (128, 4), (128, 8), (256, 8)])
ADDING = st.sampled_from([(16, 4), (32, 4), (64, 4)])
ROWS = st.sampled_from([8, 16, 32, 64, 128])


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda")


def plan_of(tile: tuple[int, int], rows: int, inner: int, split: int = 1, stages: int = 2) -> Plan:
    """Return a plan with fewer stages if they do not fit. Small tiles have longer steps, of which each warp has its own
    K."""
    columns, warps = tile
    inner *= 2 if columns < 64 else 1
    if (columns + rows) * inner * 2 * stages > 220_000:
        stages = 2
    return Plan("tma", columns, inner, warps, rows, split, stages, fused_norm=False)


@given(case=CASES, tile=TILES, rows=ROWS, inner=st.sampled_from([64, 128]), stages=st.integers(2, 4))
@settings(max_examples=60)
def test_tma(device: torch.device, case: Case, tile: tuple[int, int], rows: int, inner: int, stages: int) -> None:
    case.run(plan_of(tile, rows, inner, stages=stages), device, multiply=tma_linear)


@given(rows=st.integers(1, 70), columns=st.integers(1, 300), spans=st.integers(1, 6), split=st.sampled_from([2, 4, 8]),
       tile=ROWS, wide=ADDING, bias=st.booleans(), seed=st.integers(0, 99))  # fmt: skip
@settings(max_examples=40)
def test_parts(
    device: torch.device, rows: int, columns: int, spans: int, split: int, tile: int, wide: tuple[int, int],
    bias: bool, seed: int,
) -> None:  # fmt: skip
    """The bias is in one of them; rows and columns that are not there are not written."""
    generator = torch.Generator().manual_seed(seed)
    plan = plan_of(wide, tile, 64, split, min(3, spans + 1))
    inner = plan.inner * spans * split

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    x, weight, b = random(rows, inner), random(columns, inner) * inner**-0.5, random(columns)
    got = tma_parts(
        surrounded(x, device)[0], surrounded(weight, device)[0], plan,
        bias=surrounded(b, device)[0] if bias else None, pdl=True,
    )  # fmt: skip
    assert got.shape == (split, rows, columns)
    x64, w64 = x.double().view(rows, split, -1), weight.double().view(columns, split, -1)
    expected = torch.einsum("msk,nsk->smn", x64, w64)
    size = torch.einsum("msk,nsk->smn", x64.abs(), w64.abs())
    if bias:
        expected[0] += b.double()
    assert_within(got.cpu(), expected, 1e-6 * (size + expected.abs()) + 1e-6)


def test_a_row_is_the_same_in_any_batch_of_a_plan(device: torch.device) -> None:
    """Nothing is added up in an order that depends on what else runs."""
    plan = Plan("tma", 64, 128, 4, 64, 1, 4, fused_norm=False)
    case = Case(130, 200, 768, 5, bfloat16=True, bias=True, activation="gelu", add=True)
    whole = case.run(plan, device, multiply=tma_linear)
    for row in (0, 63, 64, 129):
        assert torch.equal(case.run(plan, device, only=row, multiply=tma_linear), whole[row : row + 1])


def test_cache_hints_change_no_result(device: torch.device) -> None:
    case = Case(70, 200, 768, 5, bfloat16=True, bias=True, activation="gelu", add=True)
    for rows in (16, 128):  # several blocks share weights, and one reads them
        plan = Plan("tma", 64, 128, 4, rows, 1, 3, fused_norm=False)
        hinted, plain = (
            case.run(plan, device, multiply=partial(tma_linear, l2_cache_hints=hints)) for hints in (True, False)
        )
        assert torch.equal(hinted, plain)


def test_poison_stays_in_its_row(device: torch.device) -> None:
    x, weight = (torch.randn(n, 256, device=device).to(torch.bfloat16) for n in (9, 64))
    plan = Plan("tma", 64, 64, 4, 16, 1, 3, fused_norm=False)
    clean, got = (torch.empty(9, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
    tma_linear(x, weight, plan, out=clean)
    x[4] = math.nan
    tma_linear(x, weight, plan, out=got)
    others = [row for row in range(9) if row != 4]
    assert torch.equal(got[others], clean[others])
    assert got[4].isnan().all()


def test_what_does_not_fit_raises(device: torch.device) -> None:
    plan = Plan("tma", 64, 64, 4, 16, 1, 2, fused_norm=False)
    x, weight, out = (
        torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in ((2, 128), (64, 128), (2, 64))
    )
    for match, change in (
        ("leaves parts", {"plan": Plan("tma", 64, 64, 4, 16, 2, 2)}),
        ("does not fit", {"plan": Plan("tiled", 64, 64, 4, 16)}),
        ("does not fit", {"x": x[:, :100].contiguous(), "weight": weight[:, :100].contiguous()}),
        ("do not fit", {"out": out[:, :32]}),
        ("do not fit", {"weight": weight.T}),
        ("not aligned", {"x": torch.zeros(2, 129, dtype=torch.bfloat16, device=device)[:, 1:]}),
    ):
        arguments = {"x": x, "weight": weight, "plan": plan, "out": out} | change
        with pytest.raises(ValueError, match=match):
            tma_linear(**arguments)


def test_the_probe(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs_tma(torch.device("cuda", 0))
    assert not examine(torch.device("cpu")).tma
    monkeypatch.setattr(tma, "_launch", lambda *args, **how: None)
    assert not runs_tma(device), "it wrote nothing"


SHIPPED = [
    (site, plan)
    for site, plan in PlanTable.shipped().items()
    if plan.kind == "tma" and site.activation != "argmax"  # see test_tma_ranks.py
]
LARGE = [site._replace(rows=rows) for rows in (320, 1000, 2048) for site, _ in SHIPPED if site.rows == MAX_ROWS]
PLANNED = SHIPPED + [(s, p) for s in LARGE if (p := plan_for_many_rows(s, H200)) != CUBLAS]


@pytest.mark.parametrize(("site", "plan"), PLANNED, ids=[f"{s.weight_rows}x{s.inner}-{s.rows}" for s, _ in PLANNED])
def test_plans_of_known_models(device: torch.device, site: Site, plan: Plan) -> None:
    """Check plans at their own sizes, against torch; a row fewer than the site has, where that is of the same site."""
    rows = site.rows - 1
    x = torch.randn(rows, site.inner, device=device).to(torch.bfloat16)
    weight = (torch.randn(site.weight_rows, site.inner, device=device) * site.inner**-0.5).to(torch.bfloat16)
    bias = torch.randn(site.weight_rows, device=device).to(torch.bfloat16) if site.bias else None
    expected = torch.mm(x, weight.T, out_dtype=torch.float32) + (0 if bias is None else bias.float())
    if plan.split > 1:
        got = tma_parts(x, weight, plan, bias=bias, pdl=True).sum(0)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
        return
    if site.activation == "silu_mul":
        gate, up = expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    elif site.activation is not None:
        approximate = "tanh" if site.activation == "gelu_tanh" else "none"
        expected = torch.nn.functional.gelu(expected, approximate=approximate)
    before = torch.randn(rows, site.columns, device=device).to(torch.bfloat16)
    out, memory = surrounded(before, device)
    tma_linear(x, weight, plan, out=out, bias=bias, activation=site.activation, add=site.add, pdl=True)
    if site.add:
        expected = expected + before.float()
    torch.testing.assert_close(taken(out, memory), expected.to(torch.bfloat16).cpu(), rtol=2e-2, atol=2e-2)


@given(rows=st.integers(1, 140), tile=ROWS, writing=ADDING, reading=TILES, columns=st.sampled_from([64, 200, 768]),
       layer=st.booleans(), gated=st.booleans(), bias=st.booleans(), seed=st.integers(0, 99))  # fmt: skip
@settings(max_examples=60)
def test_a_norm_between_two_projections(
    device: torch.device, rows: int, tile: int, writing: tuple[int, int], reading: tuple[int, int], columns: int,
    layer: bool, gated: bool, bias: bool, seed: int,
) -> None:  # fmt: skip
    """The stream is what a plain addition makes it, and the second product that of its rows normed exactly."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16).to(device)

    x, weight, stream = random(rows, 192), random(columns, 192) * 192**-0.5, 3 * random(rows, columns) + 1
    norm = Norm(random(columns), random(columns) if layer else None, 1e-5)
    plan = plan_of(writing, tile, 64, stages=3)
    b = random(columns) if bias else None
    plain, out = stream.clone(), stream.clone()
    tma_linear(x, weight, plan, out=plain, bias=b, add=True, pdl=True)
    unnormed = tma_sum(x, weight, plan, out=out, norm=norm, bias=b, pdl=True)
    assert torch.equal(out, plain)
    assert torch.equal(unnormed.x, (out.float() * norm.weight.float()).to(torch.bfloat16))

    width = 104
    second = random(width * (1 + gated), columns) * columns**-0.5
    offset = random(len(second)) if bias else None
    got = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
    folded, shift = fold_norm(norm, second, offset) if layer else (offset, None)
    tma_linear(
        unnormed, second, plan_of(reading, tile, 64), out=got, bias=folded, shift=shift,
        activation="silu_mul" if gated else None, pdl=True,
    )  # fmt: skip
    h = out.double()
    centered = h - h.mean(1, keepdim=True) if layer else h
    scale = (centered.square().mean(1, keepdim=True) + norm.eps).rsqrt()
    normed = centered * scale * norm.weight.double() + (0 if norm.bias is None else norm.bias.double())
    y = normed @ second.double().T + (0 if offset is None else offset.double())
    # A product is rounded where the stream meets the norm's weight, and the result is.
    error = 2**-8 * ((h * scale * norm.weight.double()).abs() @ second.double().abs().T) + 1e-5 * y.abs() + 1e-5
    y, error = activated(y, error, "silu_mul" if gated else None)
    assert_within(got, y, error + 2**-8 * y.abs())


def test_what_is_not_of_a_norm_is_refused(device: torch.device) -> None:
    plan = Plan("tma", 64, 64, 4, 8, 1, 2, fused_norm=False)
    x, weight, out = (torch.zeros(n, 64, dtype=torch.bfloat16, device=device) for n in (4, 64, 4))
    norm = Norm(out[0], None, 1e-5)
    unnormed = tma_sum(x, weight, plan, out=out, norm=norm)
    with pytest.raises(ValueError, match="not those of a norm"):
        tma_linear(unnormed, weight, plan, out=out, shift=torch.zeros(64, device=device))
    with pytest.raises(ValueError, match="not those of a norm"):
        tma_linear(Unnormed(x[:2], unnormed.sums, 1e-5), weight, plan, out=out[:2])
    with pytest.raises(ValueError, match="does not fit"):
        tma_sum(x, weight, plan, out=out, norm=Norm(out[0, :32], None, 1e-5))
    with pytest.raises(ValueError, match="leaves parts"):
        tma_sum(x, weight, Plan("tma", 64, 32, 4, 8, 2, 2), out=out, norm=norm)


@pytest.mark.parametrize("rows", [300, 1000])
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_many_rows_as_a_model_calls_them(device: torch.device, family: str, rows: int) -> None:
    """Additions, norms and activations beside products: tma kernels where these pay, against cuBLAS and others."""
    torch.manual_seed(rows)
    layer, hidden, inner = family == "gpt2", 768 if family == "gpt2" else 1024, 3072

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(torch.bfloat16)

    norms = [Norm(random(hidden), random(hidden) if layer else None, 1e-5) for _ in range(2)]
    up_rows, scale = inner if layer else 2 * inner, 0.5 * hidden**-0.5
    weights = [random(n, k) * scale for n, k in ((hidden, hidden), (up_rows, hidden), (hidden, inner), (2304, hidden))]
    biases = [random(len(weight)) if layer else None for weight in weights]
    x, stream = random(rows, hidden), random(rows, hidden)

    def run(tma: bool) -> list[torch.Tensor]:
        ops = CudaOps(device, CudaOptions(pdl=True, gpu=replace(examine(device), tma=tma)))
        o, up, down, qkv = (ops.make_linear([dense(w)], [b]) for w, b in zip(weights, biases, strict=True))
        residual = Residual(stream.clone())
        ops.linear_add_(x, o, residual, NO_STEP)
        assert (residual.state == "put off") == tma
        wide = ops.norm_linear(residual, norms[0], up, NO_STEP, "gelu_tanh" if layer else "silu_mul")
        ops.linear_add_(wide, down, residual, NO_STEP)
        heads = ops.norm_linear(residual, norms[1], qkv, NO_STEP)
        return [heads, residual.settle()]

    for got, expected in zip(run(tma=True), run(tma=False), strict=True):
        assert float((got.float() - expected.float()).norm() / expected.float().norm()) < 1e-2
