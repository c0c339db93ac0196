"""bench/tune_steps.py: what it tries, and what it makes of the times."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tune_steps
from gpu_common import SHAPES, read_model

from asyncengine.kernels.cuda.gpu import H200
from asyncengine.kernels.cuda.linear.candidates import candidates
from asyncengine.kernels.cuda.linear.formats.registry import weight_bytes
from asyncengine.kernels.cuda.linear.plan import CUBLAS, Plan, Site
from asyncengine.kernels.cuda.linear.tables import PlanTable

A, B = (Site(columns, 64, 8, "none", None, False, True) for columns in (64, 128))
SLOW, FAST, FASTER = (Plan("tma", 64, 64, 4, 8, 1, stages) for stages in (2, 3, 4))


@pytest.mark.parametrize("model", SHAPES)
def test_every_matrix_of_a_greedy_step_has_plans(model: str) -> None:
    tried = tune_steps.candidate_plans(model, 64, most=7)
    c = read_model(model)
    assert [site.activation for site in tried].count("argmax") == 1, "and the head that samples otherwise is not there"
    assert len(tried) == 5
    bytes_ = [weight_bytes(site) for site in tried]
    assert bytes_ == sorted(bytes_, reverse=True)
    for site, plans in tried.items():
        assert 0 < len(plans) <= 7
        assert all(plan.fits(site.columns, site.inner, site.activation == "silu_mul") for plan in plans)
    assert {site.inner for site in tried} <= {c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim}


def test_most_plans_of_the_package_are_likely() -> None:
    """Twenty of up to 180 hold five of six; chance would hold half."""
    found, by_chance = [], 0.0
    for site, plan in PlanTable.shipped().items():
        if plan.kind == "tma":
            by_tma = [other for other in candidates(site, H200) if other.kind == "tma"]
            ordered = sorted(by_tma, key=lambda other: tune_steps.expected_us(site, other))
            found.append(plan in ordered[:20])
            by_chance += min(1, 20 / len(by_tma))
    assert len(found) > 50
    assert sum(found) > 0.8 * len(found) > 1.4 * by_chance


def test_half_of_what_is_tried_is_likely() -> None:
    [(site, plans), *_] = tune_steps.candidate_plans("qwen3-0.6b", 64, most=8).items()
    by_tma = [plan for plan in candidates(site, H200) if plan.kind == "tma"]
    assert set(sorted(by_tma, key=lambda plan: tune_steps.expected_us(site, plan))[:4]) <= set(plans)
    assert len(set(plans)) == 8


@pytest.mark.parametrize("model", SHAPES)
def test_a_short_model_is_of_the_same_shape(model: str, tmp_path: Path) -> None:
    tune_steps.shorten(model, 2, tmp_path)
    whole, short = read_model(model), read_model(str(tmp_path))
    assert short.num_layers == 2
    assert (short.hidden_size, short.intermediate_size, short.num_kv_heads, short.vocab_size) == (
        whole.hidden_size, whole.intermediate_size, whole.num_kv_heads, whole.vocab_size
    )  # fmt: skip
    assert len(json.loads((tmp_path / "config.json").read_text())) > 5


class Fake:
    """Steps whose time is a sum over their plans, but for surprises: what a first look at a plan shows instead."""

    name = "fake"

    def __init__(self, cost: Mapping[tuple[Site, Plan], float], surprises: Mapping[Plan, float] | None = None) -> None:
        self.plans = PlanTable({A: SLOW, B: SLOW})
        self._cost, self._surprises = cost, dict(surprises or {})

    def time(self, rows: int, some: Sequence[dict[Site, Plan]], repeats: int = 3, **_: Any) -> list[float]:
        assert rows == 8
        return [sum(self._one(site, plan, repeats) for site, plan in plans.items()) for plans in some]

    def _one(self, site: Site, plan: Plan, repeats: int) -> float:
        if repeats == 3 and plan in self._surprises:
            return self._surprises[plan]
        return self._cost.get((site, plan), float("inf"))


def search(
    steps: Fake, tried: dict[Site, list[Plan]], turns: int = 2, pairs: Sequence[tuple[Site, Site]] = ()
) -> dict[Site, Plan]:
    return tune_steps.search(steps, 8, tried, turns, pairs)  # type: ignore[arg-type]


def test_the_fastest_of_each_site_stays() -> None:
    cost = {(A, SLOW): 10, (A, FAST): 9, (A, FASTER): 8, (B, SLOW): 5, (B, FAST): 6}
    steps = Fake(cost)
    assert search(steps, {A: [FAST, FASTER], B: [FAST, CUBLAS]}) == {A: FASTER, B: SLOW}
    assert steps.plans.find(A) == SLOW, "the table is left as it was"


def test_what_is_not_faster_again_does_not_stay() -> None:
    steps = Fake({(A, SLOW): 10, (A, FAST): 11, (B, SLOW): 5}, surprises={FAST: 1})
    assert search(steps, {A: [FAST], B: []}) == {A: SLOW, B: SLOW}


def test_a_gain_within_noise_is_none() -> None:
    steps = Fake({(A, SLOW): 10, (A, FAST): 9.99, (B, SLOW): 5})
    assert search(steps, {A: [FAST], B: []}) == {A: SLOW, B: SLOW}


class FakeNorm(Fake):
    """A norm between A and B takes 3, which FAST of A and FASTER of B together do without."""

    def time(self, rows: int, some: Sequence[dict[Site, Plan]], repeats: int = 3, **_: Any) -> list[float]:
        times = super().time(rows, some, repeats)
        return [t - 3 * ((p[A], p[B]) == (FAST, FASTER)) for t, p in zip(times, some, strict=True)]


def test_two_sites_change_together_if_only_that_spares_a_norm() -> None:
    cost = {(A, SLOW): 10, (A, FAST): 11, (B, SLOW): 10, (B, FASTER): 11}
    tried = {A: [FAST], B: [FASTER]}
    assert search(FakeNorm(cost), tried) == {A: SLOW, B: SLOW}
    assert search(FakeNorm(cost), tried, pairs=[(A, B)]) == {A: FAST, B: FASTER}


def test_a_plan_that_leaves_parts_is_no_half_of_a_pair() -> None:
    parts = Plan("tma", 64, 64, 4, 8, 2, 3)
    cost = {(A, SLOW): 10, (A, parts): 11, (B, SLOW): 10, (B, FASTER): 11}
    steps = FakeNorm(cost)
    assert search(steps, {A: [parts], B: [FASTER]}, pairs=[(A, B)]) == {A: SLOW, B: SLOW}


@pytest.mark.parametrize("model", SHAPES)
def test_a_norm_is_between_sites_of_one_width(model: str) -> None:
    hidden = read_model(model).hidden_size
    for adder, reader in tune_steps.norm_between(model, 8):
        assert (adder.add, adder.columns) == (True, hidden)
        assert (reader.norm == "none", reader.inner) == (False, hidden)
