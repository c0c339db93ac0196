"""The GPU's sampler: against the CPU's token by token, against float64 twins, and against poison."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncengine import _core
from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.cuda.sampling import sample as sampler
from asyncengine.kernels.cuda.sampling.sample import Ranks
from asyncengine.kernels.cuda.step.tensors import DeviceStep, allocate_step
from tests.amounts import examples
from tests.chi_square import check_draws
from tests.kernels.poison import poison_new_memory
from tests.kernels.twins import greatest_ranks

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

COMPILED = torch.cuda.is_available()
# The interpreter takes a tenth of a second and more for a row.
EXAMPLES = 400 if COMPILED else 24
STEP_NUMBER, RING = 7, 3
POISON = -(1 << 62) + 12345


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles, chunks and an overflow of the list at vocabularies that the interpreter can bear."""
    monkeypatch.setattr(sampler, "_TILE", 64)
    monkeypatch.setattr(sampler, "_BINS", 32)
    monkeypatch.setattr(sampler, "_FINE", 16)
    monkeypatch.setattr(sampler, "_CHUNK", 64)
    monkeypatch.setattr(sampler, "_FEW", 16)
    monkeypatch.setattr(sampler, "_LIST", 48)


class Sampling(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0

    def wire(self) -> dict[str, Any]:
        """Arguments of _core.SamplingState."""
        return {name: value for name, value in self._asdict().items() if name != "position"}


GREEDY = Sampling(0.0)
SAMPLING = _core.Need.temperature | _core.Need.filters


class Case:
    """A step whose row i samples slot ``slots[i]``; unused slots and rows are poisoned."""

    def __init__(self, device: torch.device, sampling: list[Sampling], slots: list[int] | None = None) -> None:
        self.slots = slots if slots is not None else [2 * i + 1 for i in range(len(sampling))]
        num_slots = 2 * len(sampling) + 3
        self.step: DeviceStep = allocate_step(num_slots, 1, len(sampling) + 1, 1, device)
        state = self.step.slots
        for row, (slot, one) in enumerate(zip(self.slots, sampling, strict=True)):
            self.step.sample_slot[row] = slot
            self.step.sample_position[row] = one.position
            if slot >= 0:
                state.temperature[slot], state.top_k[slot] = one.temperature, one.top_k
                state.top_p[slot], state.min_p[slot] = one.top_p, one.min_p
                state.seed[slot] = one.seed - (1 << 64) if one.seed >= 1 << 63 else one.seed
        self.unused = [slot for slot in range(num_slots) if slot not in self.slots]
        state.temperature[self.unused] = math.nan
        state.last_token[:] = -77
        self.words = torch.full((RING + 1, len(sampling) + 2), POISON, device=device)
        self.header = torch.tensor([STEP_NUMBER, RING], device=device)

    def run(self, logits: Tensor, greedy_only: bool = False, ranks_of: int = 0) -> list[int]:
        """The tokens, with everything checked that is the same whatever they are.

        With ``ranks_of`` the sampler gets the ranks of tiles of so many logits instead.
        """
        before = self.step.slots.finished[self.unused].tolist()
        device = self.step.input_ids.device
        moved = Ranks(greatest_ranks(logits, ranks_of).to(device)) if ranks_of else logits.to(device)
        needs = 0 if greedy_only else SAMPLING
        sampler.sample(moved, self.step, self.header, self.words, needs=needs, pdl=COMPILED)
        assert (self.words[:RING] == POISON).all()
        assert (self.step.sample_arrivals == 0).all()
        words, state = self.words[RING].tolist(), self.step.slots
        assert words[len(logits) :] == [POISON] * (len(words) - len(logits))
        assert state.last_token[self.unused].eq(-77).all()
        assert state.finished[self.unused].tolist() == before
        tokens = []
        for slot, word in zip(self.slots, words, strict=False):
            if slot < 0:
                assert word == POISON
                continue
            assert word >> 32 == STEP_NUMBER
            low = word & 0xFFFFFFFF
            tokens.append(low - (1 << 32) if low >= 1 << 31 else low)
            assert state.last_token[slot] == (-77 if tokens[-1] < 0 else tokens[-1])
        return tokens


def draw(device: torch.device, logits: Tensor, sampling: list[Sampling], greedy_only: bool = False) -> list[int]:
    return Case(device, sampling).run(logits, greedy_only)


def draw_on_cpu(logits: Tensor, sampling: list[Sampling]) -> list[int]:
    rows = len(sampling)
    zeros = [0] * rows
    batch = _core.StepBatch(
        zeros,
        zeros,
        zeros,
        list(range(rows + 1)),
        zeros,
        [[0]] * rows,
        list(range(rows)),
        [one.position for one in sampling],
        [_core.SamplingState(**one.wire()) for one in sampling],
    )
    return CpuOps(1).sample(logits, batch).tolist()


def filtered(logits: Tensor, one: Sampling) -> Tensor:
    """The distribution as the filters define it, in float64, by sorting."""
    weights = (logits.double() / one.temperature).softmax(-1)
    ranked, order = weights.sort(descending=True, stable=True)
    if one.top_k:
        ranked[one.top_k :] = 0
    ranked /= ranked.sum()
    ranked[ranked.cumsum(-1) - ranked >= one.top_p] = 0
    ranked[ranked < one.min_p * ranked[0]] = 0
    return torch.zeros_like(ranked).scatter(0, order, ranked / ranked.sum())


def random_logits(rows: int, vocab: int, seed: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    match kind:
        case "ties":
            logits = logits.round()
        case "equal":
            logits = torch.full_like(logits, -1.5)
        case "masked":  # as a grammar leaves them
            logits[torch.rand(rows, vocab, generator=generator) < 0.7] = -math.inf
            logits[:, -1] = 0.0
        case "peaked":
            logits *= 30
        case "zeros":
            logits = torch.where(torch.rand(rows, vocab, generator=generator) < 0.5, 0.0, -0.0)
        case "far":  # beyond what bins of a fixed range would cover, and coarse in float32
            logits = logits + torch.tensor([1e4, -1e4, 1e7])[torch.arange(rows) % 3, None]
        case "wide":
            logits *= torch.rand(rows, vocab, generator=generator).reciprocal() * 100
        case "one":  # a single element has practically all the mass; tiles know nothing of each other
            logits[:, vocab // 2] = 1e4
        case "stairs":  # every tile has a range of its own
            logits += torch.arange(vocab) // 64 * 20
        case "flat":
            logits *= 1e-6
        case "huge":  # the range itself is not finite
            logits *= 1e37
    return logits


KINDS = ["normal", "ties", "equal", "masked", "peaked", "zeros", "far", "wide", "one", "stairs", "flat", "huge"]
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 200, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31 - 1),
)


# ---- the same tokens as on the CPU ----


@given(
    sampling=st.lists(samplings, min_size=1, max_size=3 if COMPILED else 2),
    vocab=st.integers(1, 70) | st.sampled_from([128, 150, 301]),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(EXAMPLES))
def test_tokens_are_the_cpus(device: torch.device, sampling: list[Sampling], vocab: int, kind: str, seed: int) -> None:
    logits = random_logits(len(sampling), vocab, seed, kind)
    assert draw(device, logits, sampling) == draw_on_cpu(logits, sampling)


@given(
    rows=st.integers(1, 4), vocab=st.integers(1, 200), kind=st.sampled_from(KINDS), seed=st.integers(0, 1000),
    width=st.sampled_from([1, 7, 64, 128]),
)  # fmt: skip
@settings(max_examples=examples(EXAMPLES // 3))
def test_greedy_takes_the_first_maximum(
    device: torch.device, rows: int, vocab: int, kind: str, seed: int, width: int
) -> None:
    logits = random_logits(rows, vocab, seed, kind)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert draw(device, logits, [GREEDY] * rows, greedy_only=True) == expected
    assert draw(device, logits, [GREEDY] * rows) == expected
    assert draw_on_cpu(logits, [GREEDY] * rows) == expected
    assert Case(device, [GREEDY] * rows).run(logits, True, width) == expected


@pytest.mark.parametrize(
    "one", [Sampling(0.8), Sampling(0.8, 40, 0.9, 0.02), Sampling(1.5, 0, 0.95), Sampling(2.0, 300)]
)
def test_real_tiles(device: torch.device, one: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    poison_new_memory(monkeypatch)
    assert sampler._TILE == 4096
    sampling = [one._replace(seed=5 * i, position=i) for i in range(2)]
    logits = random_logits(2, 9001, 1, "normal")
    assert draw(device, logits, sampling) == draw_on_cpu(logits, sampling)


@pytest.mark.parametrize("flat", [0, 2, 7] if COMPILED else [2])
def test_a_real_vocabulary(device: torch.device, flat: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Normal logits, and ``flat`` rows of flat ones, whose candidates are many."""
    monkeypatch.undo()
    poison_new_memory(monkeypatch)
    sampling = [
        Sampling(0.8, 0, 0.95),
        Sampling(1.5, 0, 0.9999),
        Sampling(0.8),
        Sampling(0.8, 50),
        Sampling(1.0, 1000, 0.9, 0.001),
        Sampling(1.0, 0, 1.0, 0.05),
        GREEDY,
    ]
    sampling = [one._replace(seed=3 * i + 1, position=i) for i, one in enumerate(sampling)]
    logits = random_logits(len(sampling), 151_936, 2, "normal")
    logits[:flat] *= 0.1
    assert draw(device, logits, sampling) == draw_on_cpu(logits, sampling)


# ---- what is kept, and how often it is drawn ----


@pytest.mark.skipif(not COMPILED, reason="few draws show nothing: there the tokens are the CPU's")
@pytest.mark.parametrize(
    ("one", "draws"),
    [
        (Sampling(0.7), 6000),
        (Sampling(1.6, top_k=9), 1500),
        (Sampling(1.0, top_p=0.6), 1500),
        (Sampling(1.0, min_p=0.1), 3000),
        (Sampling(1.3, top_k=12, top_p=0.9, min_p=0.05), 1500),
    ],
)
def test_distribution(device: torch.device, one: Sampling, draws: int) -> None:
    logits = random_logits(1, 1000, 4, "normal")[0] * 0.4
    sampling = [one._replace(seed=11, position=i) for i in range(draws)]
    tokens = draw(device, logits.expand(draws, -1).contiguous(), sampling)
    check_draws(tokens, filtered(logits, one), least=5)


@pytest.mark.parametrize("kind", ["equal", "zeros"])
def test_top_k_keeps_exactly_k_of_equals(device: torch.device, kind: str) -> None:
    logits = random_logits(1, 70, 3, kind)
    for k in (1, 4) if COMPILED else (2,):
        kept = (-logits[0] + 0.0).sort(stable=True).indices[:k].tolist()
        sampling = [Sampling(50.0, top_k=k, seed=k, position=i) for i in range(4 * k)]
        assert set(draw(device, logits.expand(len(sampling), -1).contiguous(), sampling)) == set(kept)


@given(vocab=st.integers(2, 200), kind=st.sampled_from(KINDS), one=samplings, seed=st.integers(0, 1000))
@settings(max_examples=examples(EXAMPLES // 4))
def test_only_what_is_kept_is_drawn(device: torch.device, vocab: int, kind: str, one: Sampling, seed: int) -> None:
    if one.temperature == 0:
        one = one._replace(temperature=0.5)
    logits = random_logits(1, vocab, seed, kind)
    draws = 4 if COMPILED else 2
    sampling = [one._replace(position=i) for i in range(draws)]
    tokens = draw(device, logits.expand(draws, -1).contiguous(), sampling)
    # A slightly wider top-p and min-p, for what lies on the edge to within rounding.
    wider = one._replace(top_p=min(1.0, one.top_p + 1e-6), min_p=max(0.0, one.min_p - 1e-6))
    assert (filtered(logits[0], wider)[tokens] > 0).all()


@given(
    vocab=st.integers(1, 300),
    kind=st.sampled_from(KINDS),
    one=samplings.filter(lambda one: one.temperature > 0),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(EXAMPLES // 3))
def test_bounds_enclose_where_filters_end(
    device: torch.device, vocab: int, kind: str, one: Sampling, seed: int
) -> None:
    """Elements that are certain after the first read are so: else a filter would end beyond the candidates, or before
    them."""
    logits = random_logits(1, vocab, seed, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_BINS", 64)
        coarse = draw(device, logits, [one])
        patch.setattr(sampler, "_BINS", 256)
        patch.setattr(sampler, "_FINE", 64)
        patch.setattr(sampler, "_LIST", 1024)
        patch.setattr(sampler, "_TILE", 128)
        assert draw(device, logits, [one]) == coarse


# ---- a row depends on itself alone ----


def test_a_row_depends_on_nothing_but_itself(device: torch.device) -> None:
    rows, vocab = 8 if COMPILED else 4, 150
    generator = torch.Generator().manual_seed(0)
    logits = random_logits(rows, vocab, 5, "normal")
    kinds = [GREEDY, Sampling(1.0, seed=2**64 - 1), Sampling(0.8, 30, 0.9, 0.1, 5), Sampling(2.0, 0, 0.5, 0.0, 6)]
    positions = torch.randint(0, 10000, (rows,), generator=generator).tolist()
    sampling = [kinds[i % 4]._replace(position=p) for i, p in enumerate(positions)]
    together = draw(device, logits, sampling)
    assert together == draw(device, logits, sampling)
    assert together == [draw(device, logits[i : i + 1], sampling[i : i + 1])[0] for i in range(rows)]
    order = torch.randperm(rows, generator=generator).tolist()
    assert draw(device, logits[order], [sampling[i] for i in order]) == [together[i] for i in order]
    wide = torch.full((rows, vocab + 37), math.nan)
    wide[:, :vocab] = logits
    assert draw(device, wide[:, :vocab], sampling) == together


def test_a_draw_changes_with_seed_and_position(device: torch.device) -> None:
    sampling = [
        Sampling(seed=seed + 3, position=position) for position in (0, 1, 2**31 - 1) for seed in (0, 1, 2**32, 2**63)
    ]
    logits = torch.zeros(12, 1000)
    tokens = draw(device, logits, sampling)
    assert len(set(tokens)) == 12
    assert tokens == draw_on_cpu(logits, sampling)


# ---- what happens to slots ----


def test_unused_rows_neither_read_nor_write(device: torch.device) -> None:
    sampling = [Sampling(1.0, 5, 0.9, seed=1), Sampling(), GREEDY, Sampling(0.5, seed=4)]
    logits = random_logits(4, 130, 8, "normal")
    expected = draw_on_cpu(logits, sampling)
    logits[1] = math.nan
    case = Case(device, sampling, [4, -1, 0, 2])
    assert case.run(logits) == [expected[0], expected[2], expected[3]]
    expected = draw_on_cpu(logits, [GREEDY] * 4)
    for ranks_of in (0, 64):
        case = Case(device, [GREEDY] * 4, [4, -1, 0, 2])
        assert case.run(logits, True, ranks_of) == [expected[0], expected[2], expected[3]]


@pytest.mark.parametrize(("greedy_only", "ranks_of"), [(False, 0), (True, 0), (True, 64)])
def test_a_stop_token_finishes_its_slot(device: torch.device, greedy_only: bool, ranks_of: int) -> None:
    sampling = [GREEDY] * 4 if greedy_only else [GREEDY, Sampling(seed=1), Sampling(0.7, 9, seed=2), Sampling(seed=3)]
    logits = random_logits(4, 90, 9, "normal")
    expected = draw_on_cpu(logits, sampling)
    case = Case(device, sampling)
    state = case.step.slots
    for slot, stops in zip(
        case.slots,
        [[expected[0], -1, -1, -1], [-1] * 4, [89, 88, 87, expected[2]], [(expected[3] + 1) % 90, -1, -1, -1]],
        strict=True,
    ):
        state.stops[slot] = torch.tensor(stops, dtype=torch.int32)
    assert case.run(logits, greedy_only, ranks_of) == expected
    ended = [expected[2] >= 0 and i in (0, 2) for i in range(4)]
    assert state.finished[case.slots].tolist() == [int(e) for e in ended]
    # The surplus rows of the finished: no token, and the slot as it was.
    state.last_token[case.slots] = torch.where(torch.tensor(ended, device=device), 5, -77).int()
    finished = state.finished.clone()
    given = Ranks(greatest_ranks(logits, ranks_of).to(device)) if ranks_of else logits.to(device)
    sampler.sample(given, case.step, case.header, case.words, needs=0 if greedy_only else SAMPLING)
    words = case.words[RING, :4].tolist()
    assert [w & 0xFFFFFFFF for w in words] == [0xFFFFFFFF if e else t for e, t in zip(ended, expected, strict=True)]
    assert {w >> 32 for w in words} == {STEP_NUMBER}
    assert state.last_token[case.slots].tolist() == [5 if e else t for e, t in zip(ended, expected, strict=True)]
    assert torch.equal(state.finished, finished)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, "none"])
@pytest.mark.parametrize("one", [GREEDY, Sampling(1.0), Sampling(0.7, 10, 0.9), Sampling(1.0, min_p=0.1)])
def test_broken_logits_fail_their_row_only(device: torch.device, bad: float | str, one: Sampling) -> None:
    logits = random_logits(3, 133, 2, "normal")
    sampling = [one._replace(position=i) for i in range(3)]
    healthy = draw_on_cpu(logits, sampling)
    if isinstance(bad, float):
        logits[1, 132] = bad
    else:
        logits[1] = -math.inf
    for greedy_only, ranks_of in [(False, 0), (True, 0), (True, 64)][: 3 if one == GREEDY else 1]:
        case = Case(device, sampling)
        case.step.slots.stops.fill_(200)  # none is unused, which an invalid token equals
        assert case.run(logits, greedy_only, ranks_of) == [healthy[0], -1, healthy[2]]
        # Steps in flight of the sequence must not run on a token that is none.
        assert case.step.slots.finished[case.slots].tolist() == [0, 1, 0]


def test_step_numbers_keep_all_their_bits(device: torch.device) -> None:
    case = Case(device, [GREEDY])
    case.header[0] = (1 << 31) - 1
    sampler.sample(torch.zeros(1, 9, device=device), case.step, case.header, case.words, needs=0)
    assert case.words[RING, 0] == ((1 << 31) - 1) << 32


# ---- misuse ----


def test_wrong_arguments_raise(device: torch.device) -> None:
    case = Case(device, [GREEDY] * 2)
    logits = torch.zeros(2, 9, device=device)

    def refused(match: str, logits: Tensor | Ranks = logits, **changed: Tensor) -> None:
        arguments = {"header": case.header, "out_words": case.words, **changed}
        with pytest.raises(ValueError, match=match):
            sampler.sample(logits, case.step, arguments["header"], arguments["out_words"], needs=0)

    ranks = torch.zeros(2, 3, dtype=torch.int64, device=device)
    refused("logits must be", logits.bfloat16())
    refused("ranks must be", Ranks(ranks.int()))
    refused("ranks must be", Ranks(ranks[:, :2]))
    refused("samples 3", Ranks(ranks.repeat(2, 1)))
    with pytest.raises(ValueError, match="greedy sampling alone"):
        sampler.sample(Ranks(ranks), case.step, case.header, case.words, needs=SAMPLING)
    refused("contiguous rows", torch.zeros(9, 2, device=device).T)
    refused("vocabulary", torch.zeros(2, 0, device=device))
    refused("samples 3", torch.zeros(4, 9, device=device))
    refused("header", header=case.header[:1])
    refused("out_words", out_words=case.words[:, :1])
    step = replace(case.step, sample_slot=case.step.sample_slot[:1])
    with pytest.raises(ValueError, match="rows of logits"):
        sampler.sample(logits, step, case.header, case.words, needs=0)
