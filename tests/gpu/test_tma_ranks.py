"""Heads that leave ranks in place of logits, and the tokens that are made of them.

Operands are small integers, whose sums are exact in any order: there are ties, and ranks must be equal bit for bit.
"""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncengine.kernels.cuda.gpu import describe
from asyncengine.kernels.cuda.linear import tma_ranks as room
from asyncengine.kernels.cuda.linear.handle import CudaLinear
from asyncengine.kernels.cuda.linear.plan import CUBLAS, Plan, Site, round_rows
from asyncengine.kernels.cuda.linear.residual import Residual
from asyncengine.kernels.cuda.linear.tables import PlanTable
from asyncengine.kernels.cuda.linear.tma import tma_linear
from asyncengine.kernels.cuda.linear.tma_ranks import tma_ranks
from asyncengine.kernels.cuda.ops import CudaBatch, CudaOps, CudaOptions
from asyncengine.kernels.cuda.sampling.filters import MAX_VOCAB
from asyncengine.kernels.cuda.sampling.sample import Ranks, sample
from asyncengine.kernels.cuda.step.tensors import DeviceStep, allocate_step
from asyncengine.kernels.cuda.trials import examine
from asyncengine.kernels.ops import Norm
from asyncengine.kernels.weight import dense
from tests.gpu.conftest import needs_hopper
from tests.kernels.poison import poison_new_memory, surrounded
from tests.kernels.twins import greatest_ranks

pytestmark = needs_hopper

# Columns, warps and rows of a tile.
TILES = [
    (64, 4, 8), (128, 4, 16), (128, 4, 32), (256, 8, 32), (64, 4, 64), (128, 8, 64), (256, 4, 64), (128, 4, 128),
    (128, 8, 128), (256, 8, 128), (64, 8, 256), (128, 8, 256),
]  # fmt: skip
POISON = -(1 << 62) + 12345


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda")


def integers(*shape: int, seed: int, largest: int = 2) -> Tensor:
    """bfloat16 from 1 to ``largest``, of either sign."""
    generator = torch.Generator().manual_seed(seed)
    sign = 1 - 2 * torch.randint(0, 2, shape, generator=generator)
    return (torch.randint(1, largest + 1, shape, generator=generator) * sign).to(torch.bfloat16)


def plan_of(tile: tuple[int, int, int], stages: int = 2) -> Plan:
    columns, warps, rows = tile
    return Plan("tma", columns, 64, warps, rows, 1, stages, fused_norm=False)


def assert_same_ranks(got: Tensor, logits: Tensor, width: int) -> None:
    """An index beside NaN may be any."""
    expected = greatest_ranks(logits, width)
    assert got.shape == expected.shape
    assert torch.equal(got >> 20, expected >> 20)
    broken = torch.stack([tile.isnan().any(1) for tile in logits.split(width, 1)], 1)
    assert torch.equal(got[~broken], expected[~broken])


@given(
    tile=st.sampled_from(TILES), rows=st.integers(1, 300), columns=st.integers(1, 700), stages=st.integers(2, 4),
    inner=st.sampled_from([64, 104, 200, 704]), bias=st.booleans(), seed=st.integers(0, 999),
    programs=st.sampled_from([1, 2, 3, 6, 1000]),
    kind=st.sampled_from(["ties", "ties", "negative", "zero", "nan", "inf", "-inf", "one inf"]),
)  # fmt: skip
@settings(max_examples=80)
def test_ranks_are_those_of_the_logits(
    device: torch.device, tile: tuple[int, int, int], rows: int, columns: int, stages: int, inner: int, bias: bool,
    seed: int, kind: str, programs: int,
) -> None:  # fmt: skip
    """Rows and columns that are not there do not win, nor does what lies beyond them in memory, nor a tile before."""
    x, weight, b = integers(rows, inner, seed=seed), integers(columns, inner, seed=seed + 1), None
    if bias:
        b = integers(columns, seed=seed + 2, largest=9)
    row, column = seed % rows, seed % columns
    match kind:
        case "negative":  # whoever took a column of zeros for one of them would take it
            x, weight, b = x.abs(), -weight.abs(), None if b is None else -b.abs()
        case "zero":
            x[row], b = -0.0, None
        case "nan":
            x[row, seed % inner] = math.nan
        case "inf" | "-inf":
            x[row, 0], weight[:, 0] = math.inf, 1.0 if kind == "inf" else -1.0
        case "one inf":
            x[:, 0], weight[column, 0] = 1.0, math.inf
    stages = stages if (tile[0] + tile[2]) * 128 * stages < 220_000 else 2
    with mock.patch.object(room, "num_programs", return_value=programs):
        got = tma_ranks(
            surrounded(x, device)[0], surrounded(weight, device)[0], plan_of(tile, stages), gpu=describe(device),
            bias=None if b is None else surrounded(b, device)[0], pdl=True,
        )  # fmt: skip
    logits = x.double() @ weight.double().T
    if b is not None:
        logits += b.double()
    assert_same_ranks(got.cpu(), logits.float(), tile[0])


class Head:
    """A padded head behind a norm that changes nothing, and a step that samples its rows in an order of its own."""

    VOCAB, INNER = 1001, 128

    def __init__(self, device: torch.device, rows: int) -> None:
        self.device, self.rows = device, rows
        self.norm = Norm(torch.ones(self.INNER, dtype=torch.bfloat16, device=device), None, 1e-5)
        self.weight = integers(self.VOCAB, self.INNER, seed=1).to(device)
        self.x = integers(rows, self.INNER, seed=2, largest=1).to(device)
        self.words = torch.full((1, rows), POISON, device=device)
        self.header = torch.tensor([7, 0], device=device)
        self.step = self.make_step()

    def make_step(self) -> DeviceStep:
        step = allocate_step(self.rows, 1, self.rows, self.rows, self.device)
        step.sample_index.copy_(torch.randperm(self.rows, generator=torch.Generator().manual_seed(3)))
        step.sample_slot.copy_(torch.arange(self.rows).flip(0))
        return step

    def ops(self, plan: Plan, *, fused: bool) -> CudaOps:
        """Return operations that compute logits by the same plan, either way."""
        site = Site(1024, self.INNER, round_rows(self.rows), "rms", None, False, False)
        ranking = site._replace(activation="argmax")
        plans = {ranking: plan} if fused else {ranking: CUBLAS, site: plan}
        return CudaOps(self.device, CudaOptions(PlanTable(plans), pdl=True, gpu=examine(self.device)))

    def run(self, ops: CudaOps, handle: CudaLinear) -> Tensor | Ranks:
        batch = CudaBatch(self.step, needs=0)
        logits = ops.logits(Residual(self.x), self.norm, handle, batch)
        sample(logits, self.step, self.header, self.words, needs=0, pdl=True)
        return logits


@pytest.mark.parametrize(
    ("rows", "tile"), [(5, TILES[0]), (13, TILES[1]), (64, TILES[4]), (61, TILES[5]), (130, TILES[9]), (256, TILES[11])]
)
def test_tokens_are_those_of_logits_by_the_same_plan(
    device: torch.device, rows: int, tile: tuple[int, int, int]
) -> None:
    found = []
    for fused in (False, True):
        head = Head(device, rows)
        step, ops = head.step, head.ops(plan_of(tile), fused=fused)
        broken, inert, done, ending = (int(step.sample_slot[row]) for row in range(4))
        head.x[step.sample_index[0]] = math.nan
        step.sample_slot[1] = -1
        step.slots.finished[done] = 1
        step.slots.last_token[:] = -77
        tokens = head.x[step.sample_index].float() @ head.weight.float().T
        ends_with = tokens[3].argmax().int()
        step.slots.stops[ending, 2] = ends_with
        logits = head.run(ops, ops.make_head(dense(head.weight)))
        assert isinstance(logits, Ranks) == fused
        words = head.words[0].cpu()
        assert words[1] == POISON
        assert [word & 0xFFFFFFFF for word in words[[0, 2]].tolist()] == [0xFFFFFFFF] * 2
        assert words[3] == (7 << 32) + ends_with.item()
        assert step.slots.finished[[broken, inert, done, ending]].tolist() == [1, 0, 1, 1]
        assert step.slots.finished.sum() == 3
        found.append((words, step.slots.last_token.cpu()))
    for got, expected in zip(found[1], found[0], strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(found[1][0][4:] & 0xFFFFFFFF, tokens[4:].argmax(1).cpu()), "the lowest index of equals"


@pytest.mark.parametrize(("rows", "tile"), [(8, TILES[0]), (64, TILES[4]), (256, TILES[11])])
def test_replays(device: torch.device, rows: int, tile: tuple[int, int, int]) -> None:
    """Kernels that start early, one step behind another: each reads what its own step has written."""
    head, stream = Head(device, rows), torch.cuda.Stream(device)
    ops = head.ops(plan_of(tile), fused=True)
    handle = ops.make_head(dense(head.weight))
    inputs = [integers(rows, head.INNER, seed=seed, largest=1).to(device) for seed in range(6)]
    words = [torch.zeros_like(head.words) for _ in inputs]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.inference_mode(), torch.cuda.stream(stream):
        head.run(ops, handle)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for head.x, head.words in zip(inputs, words, strict=True):
                head.run(ops, handle)
        for replay in range(10):
            for x, out in zip(inputs, words, strict=True):
                x.copy_(x.roll(1, 0))
                out.fill_(POISON)
            graph.replay()
            stream.synchronize()
            for x, out in zip(inputs, words, strict=True):
                expected = (x[head.step.sample_index].float() @ head.weight.float().T).argmax(1)
                assert torch.equal(out[0] & 0xFFFFFFFF, expected), replay


SHIPPED = [
    (site, plan) for site, plan in PlanTable.shipped().items() if site.activation == "argmax" and plan.kind == "tma"
]


@pytest.mark.parametrize(("site", "plan"), SHIPPED, ids=[f"{s.columns}x{s.inner}-{s.rows}" for s, _ in SHIPPED])
def test_shipped_plans(device: torch.device, site: Site, plan: Plan) -> None:
    """Check plans at their own sizes, against logits by the same plan of random numbers, equal to within rounding."""
    rows = site.rows - 1
    x = torch.randn(rows, site.inner, device=device).to(torch.bfloat16)
    weight = (torch.randn(site.columns, site.inner, device=device) * site.inner**-0.5).to(torch.bfloat16)
    logits = torch.zeros(rows, site.columns, device=device)
    tma_linear(x, weight, plan, out=logits, pdl=True)
    got = tma_ranks(x, weight, plan, gpu=describe(x.device), pdl=True)
    expected = greatest_ranks(logits, plan.columns)
    near = logits.gather(1, ~got & (MAX_VOCAB - 1))
    torch.testing.assert_close(near, logits.gather(1, ~expected & (MAX_VOCAB - 1)), rtol=1e-4, atol=1e-4)
    token, wanted = ~got.amax(1) & (MAX_VOCAB - 1), logits.argmax(1)
    first, second = logits.topk(2, 1).values.T
    clear = first - second > 1e-3
    assert clear.sum() > rows // 2
    assert torch.equal(token[clear], wanted[clear])


def test_what_does_not_fit_raises(device: torch.device) -> None:
    x, weight = (torch.zeros(n, 128, dtype=torch.bfloat16, device=device) for n in (2, 64))
    parts, narrow = Plan("tma", 64, 64, 4, 16, 2, 2), Plan("tma", 32, 64, 4, 16, stages=2)
    for plan in (parts, narrow, Plan("tma", 64, 64, 4, 16), Plan("tiled", 64, 64, 4, 16, stages=2)):
        with pytest.raises(ValueError, match="does not fit"):
            tma_ranks(x, weight, plan, gpu=describe(x.device))
    with pytest.raises(ValueError, match="do not fit"):
        tma_ranks(x[:, :64], weight, plan_of(TILES[0]), gpu=describe(x.device))
    with pytest.raises(ValueError, match="tell"):
        tma_ranks(x, weight[:1].expand(MAX_VOCAB + 1, -1), plan_of(TILES[0]), gpu=describe(x.device))
