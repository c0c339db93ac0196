"""The native sampler against torch's softmax and filters, by the distribution of many draws."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from asyncengine import _core
from asyncengine.kernels.cpu.ops import CpuOps
from tests.chi_square import check_draws

ISAS = _core.CpuKernels.available_isas()
Sampling = tuple[float, int, float, float, int]  # temperature, top_k, top_p, min_p, seed
DRAWS = 4000


@functools.cache
def make_ops(isa: str, threads: int = 2) -> CpuOps:
    return CpuOps(threads, isa)


@pytest.fixture(params=ISAS)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return make_ops(request.param)


def sample(ops: CpuOps, logits: Tensor, positions: list[int], sampling: list[Sampling]) -> list[int]:
    rows = len(positions)
    batch = _core.StepBatch(
        [0] * rows,
        [0] * rows,
        [0] * rows,
        list(range(rows + 1)),
        [0] * rows,
        [[0]] * rows,
        list(range(rows)),
        positions,
        [
            _core.SamplingState(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
            for temperature, top_k, top_p, min_p, seed in sampling
        ],
    )
    return ops.sample(logits, batch).tolist()


def filtered_softmax(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution as the filters define it, in float64, by sorting."""
    temperature, top_k, top_p, min_p, _ = sampling
    probabilities = (logits.double() / temperature).softmax(-1)
    ranked, order = probabilities.sort(descending=True, stable=True)
    if top_k:
        ranked[top_k:] = 0
    ranked /= ranked.sum()
    ranked[ranked.cumsum(-1) - ranked >= top_p] = 0
    ranked[ranked < min_p * ranked[0]] = 0
    return torch.zeros_like(ranked).scatter(0, order, ranked / ranked.sum())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "sampling",
    [
        (1.0, 0, 1.0, 0.0, 3),
        (0.7, 0, 1.0, 0.0, 4),
        (1.6, 9, 1.0, 0.0, 5),
        (1.0, 0, 0.6, 0.0, 6),
        (1.0, 0, 1.0, 0.2, 7),
        (1.3, 25, 0.8, 0.05, 8),
    ],
)
@pytest.mark.parametrize("vocab", [53, 3000])
def test_distribution(ops: CpuOps, vocab: int, sampling: Sampling) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    tokens = sample(ops, logits.expand(DRAWS, -1).contiguous(), list(range(DRAWS)), [sampling] * DRAWS)
    check_draws(tokens, filtered_softmax(logits, sampling), least=8)


def test_a_row_depends_on_nothing_but_itself(ops: CpuOps) -> None:
    rows, vocab = 40, 1000
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    positions = torch.randint(0, 10000, (rows,), generator=generator).tolist()
    kinds: list[Sampling] = [
        (0.0, 0, 1.0, 0.0, 0),
        (1.0, 0, 1.0, 0.0, 2**64 - 1),
        (0.8, 30, 0.9, 0.1, 5),
        (2.0, 0, 0.5, 0.0, 6),
    ]
    sampling = [kinds[i % 4] for i in range(rows)]
    together = sample(ops, logits, positions, sampling)
    alone = [sample(ops, logits[i : i + 1], positions[i : i + 1], sampling[i : i + 1])[0] for i in range(rows)]
    assert together == alone
    order = torch.randperm(rows, generator=generator).tolist()
    shuffled = sample(make_ops(ops.isa, 3), logits[order], [positions[i] for i in order], [sampling[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_a_draw_changes_with_seed_and_position(ops: CpuOps) -> None:
    logits = torch.zeros(1, 1 << 20)  # wide enough that two draws hardly meet
    drawn = {
        sample(ops, logits, [position], [(1.0, 0, 1.0, 0.0, seed)])[0]
        for position in (0, 1, 2**32, 2**40)
        for seed in (0, 1, 2**32, 2**63)
    }
    assert len(drawn) == 16


def test_greedy_agrees_with_argmax(ops: CpuOps) -> None:
    for vocab in (1, 2, 15, 16, 17, 1001):
        logits = torch.randint(-4, 4, (50, vocab), generator=torch.Generator().manual_seed(vocab)).float()
        tokens = sample(ops, logits, [0] * 50, [(0.0, 0, 1.0, 0.0, 1)] * 50)
        assert tokens == [row.index(max(row)) for row in logits.tolist()]


def test_top_k_of_one_is_greedy_and_large_vocabularies_work(ops: CpuOps) -> None:
    logits = torch.randn(4, 150_000, generator=torch.Generator().manual_seed(1)) * 3
    best = logits.argmax(-1).tolist()
    for sampling in ((1.5, 1, 1.0, 0.0, 9), (1.5, 0, 1e-9, 0.0, 9), (1.5, 0, 1.0, 1.0, 9)):
        assert sample(ops, logits, [1, 2, 3, 4], [sampling] * 4) == best
    logits[2] = -1e30
    logits[2, 77] = 0
    assert sample(ops, logits, [1, 2, 3, 4], [(1.0, 0, 0.999999, 0.0, 9)] * 4)[2] == 77


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_fail_their_row_only(ops: CpuOps, bad: float, temperature: float) -> None:
    logits = torch.randn(5, 333, generator=torch.Generator().manual_seed(2))
    sampling = [(temperature, 10, 0.9, 0.0, 1)] * 5
    healthy = sample(ops, logits, [1, 2, 3, 4, 5], sampling)
    logits[3, 332] = bad
    tokens = sample(ops, logits, [1, 2, 3, 4, 5], sampling)
    assert tokens[3] == -1
    assert tokens[:3] + tokens[4:] == healthy[:3] + healthy[4:]
