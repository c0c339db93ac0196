"""Plans measured at start: which, for how long, and what becomes of them. The card is a fake with its own clock."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.linear.candidates import candidates
from asyncengine.kernels.cuda.linear.choose import Choice, Choices
from asyncengine.kernels.cuda.linear.plan import CUBLAS, Plan, Site
from asyncengine.kernels.cuda.linear.tables import PlanTable, cache_path
from asyncengine.runner.start.prepare import likely, measure, tune_missing

KNOWN = PlanTable.shipped()
CARD = "a card that nobody measured"


def up(rows: int) -> Site:
    return Site(5120, 2560, rows, "rms", "silu_mul", False, False)


def down(rows: int) -> Site:
    return Site(2560, 5120, rows, "none", None, False, True)


class Card:
    """Likes the last plan that it is offered. Compiling takes a second, and timing a plan another."""

    def __init__(
        self,
        *,
        too_large: Iterable[Site] = (),
        runs_nothing: Iterable[Site] = (),
        likes: Mapping[Site, Plan] | None = None,
    ) -> None:
        self.now = 100.0
        self._likes = likes or {}
        self.compiled: list[Site] = []
        self.offered: dict[Site, list[Plan]] = {}
        self._too_large = set(too_large)
        self._runs_nothing = set(runs_nothing)

    def clock(self) -> float:
        return self.now

    def compile(self, plans: Mapping[Site, Iterable[Plan]], threads: int) -> None:
        assert threads == 3
        self.compiled += plans
        self.now += 1

    def fastest(self, site: Site, plans: Iterable[Plan]) -> list[tuple[float, Plan]]:
        assert site in self.compiled
        if site in self._too_large:
            raise torch.OutOfMemoryError("no")
        if site in self._runs_nothing:
            return []
        self.offered[site] = list(plans)
        self.now += len(self.offered[site])
        if site in self._likes:
            return [(1.0, self._likes[site])]
        return [(1.0 + i, plan) for i, plan in enumerate(reversed(self.offered[site]))]

    def measure(self, sites: Iterable[Site], budget_s: float = 1e9) -> dict[Site, Plan]:
        return dict(measure(sites, KNOWN, self, H200, budget_s=budget_s, threads=3, clock=self.clock).items())


def test_every_site_gets_the_fastest_of_a_few_plans() -> None:
    card, sites = Card(), [up(64), down(64), up(1), down(1), up(8)]
    measured = card.measure(sites)
    assert measured.keys() == set(sites)
    for site in sites:
        offered = card.offered[site]
        assert offered[0] == CUBLAS
        assert 4 <= len(offered) <= 9
        assert set(offered) <= set(candidates(site, H200))
        assert measured[site] == offered[-1] != CUBLAS
    assert [site.rows for site in card.offered] == [1, 1, 8, 64, 64], "few rows first"


@pytest.mark.parametrize("fused", [False, True])
def test_parts_are_left_to_norms_of_their_own(fused: bool) -> None:
    """The projection that reads the sum is measured first, which decides whether a norm of its own may add up the
    parts."""
    reader = Plan("skinny", 16, 128, 4, fused_norm=True) if fused else Plan("tiled", 64, 128, rows=16, fused_norm=False)
    card = Card(likes={up(8): reader})
    measured = card.measure([down(8), up(8)])
    assert measured[up(8)] == reader
    assert list(card.offered) == [up(8), down(8)]
    assert any(plan.leaves_parts for plan in card.offered[down(8)]) == (not fused)


def test_the_budget_ends_it() -> None:
    card, sites = Card(), [site(rows) for rows in (1, 8, 16, 32, 64) for site in (up, down)]
    measured = card.measure(sites, budget_s=20)
    assert 2 <= len(measured) <= 3
    assert card.now <= 100 + 20 + 9, "beyond the budget goes one site at most"
    assert {site.rows for site in measured} <= {1, 8}
    assert card.compiled == list(card.offered), "nothing is compiled that has no turn"
    assert card.measure(sites, budget_s=0) == {}
    rest = Card().measure(set(sites) - measured.keys())
    assert measured.keys() | rest.keys() == set(sites), "the next start goes on"


def test_what_cannot_be_measured_is_left_out() -> None:
    measured = Card(too_large=[up(1)], runs_nothing=[up(8)]).measure([up(1), down(1), up(8), down(8)])
    assert measured.keys() == {down(1), down(8)}


def test_without_a_choice_nothing_is_timed() -> None:
    tiny, card = Site(64, 32, 1, "rms", None, False, False), Card()
    assert list(candidates(tiny, H200)) == [CUBLAS]
    assert card.measure([tiny]) == {tiny: CUBLAS}
    assert card.offered == {}


# ---- which plans are likely ----


def model(site: Site) -> str:
    return "gpt2" if 768 in (site.inner, site.columns) else "qwen" if 1024 in (site.inner, site.columns) else "llama"


def test_known_plans_are_likely() -> None:
    for site, plan in KNOWN.items():
        assert plan == CUBLAS or likely(site, KNOWN, H200, 1) == [plan]


@pytest.mark.parametrize(("weight", "share"), [("bf16", 0.6), ("fp8", 0.4)])
def test_the_best_plans_of_one_model_are_likely_given_those_of_others(weight: str, share: float) -> None:
    """Three of five, where chance would find one of ten; of float8 weights, known of two models, two of five."""
    found = []
    for site, plan in KNOWN.items():
        if plan != CUBLAS and site.weight == weight:
            others = PlanTable({s: p for s, p in KNOWN.items() if model(s) != model(site)})
            found.append(plan in likely(site, others, H200, 8))
    assert sum(found) > share * len(found) > 20


def test_without_any_known_plan_there_are_still_candidates() -> None:
    found = likely(up(1), PlanTable(), H200, 5)
    assert len(set(found)) == 5
    assert CUBLAS not in found


# ---- what becomes of them ----


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ASYNCENGINE_CACHE", str(tmp_path / "cache"))
    return cache_path(CARD)


def choices_that_miss(sites: Iterable[Site]) -> Choices:
    choices = Choices(PlanTable.load(CARD), replace(H200, name=CARD))
    for site in sites:
        choices.plan(site)
    return choices


def test_measured_plans_are_used_and_kept(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    card, choices = Card(), choices_that_miss([up(1), down(8)])
    tune_missing(choices, card, threads=3)
    for site in (up(1), down(8)):
        best = card.offered[site][-1]
        assert choices.choice(site) == Choice(best, "measured")
        assert PlanTable.load(CARD).find(site) == best
    assert not choices.missing
    (message,) = [record.getMessage() for record in caplog.records]
    assert "2 of 2" in message
    assert "tune_linear=False" in message
    assert not choices_that_miss([up(1), down(8)]).missing, "the next start knows them"


@pytest.mark.parametrize("obstacle", ["a file in place of the directory", "a directory in place of the file"])
def test_plans_that_cannot_be_kept_are_used_all_the_same(
    cache: Path, caplog: pytest.LogCaptureFixture, obstacle: str
) -> None:
    if obstacle.startswith("a file"):
        cache.parent.parent.mkdir()
        cache.parent.write_text("")
    else:
        cache.mkdir(parents=True)
    choices = choices_that_miss([up(1)])
    tune_missing(choices, Card(), threads=3)
    assert choices.choice(up(1)).source == "measured"
    assert any(r.levelno == logging.WARNING and "cannot be kept" in r.getMessage() for r in caplog.records)
    assert not list(cache.parent.glob("*")) or list(cache.parent.iterdir()) == [cache]


def test_what_was_not_measured_is_still_missing(cache: Path) -> None:
    choices = choices_that_miss([up(1), up(8)])
    tune_missing(choices, Card(too_large=[up(8)]), threads=3)
    assert choices.missing == {up(8)}
    assert choices_that_miss([up(1), up(8)]).missing == {up(8)}
