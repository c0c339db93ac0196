"""A chi-square test: draws follow a distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def check_draws(tokens: Sequence[int] | Tensor, probabilities: Tensor, least: int) -> None:
    """Nothing impossible was drawn, and chi-square lies far from its tail.

    Over cells of at least ``least`` expected draws; what is rarer shares one cell.
    """
    expected = probabilities * len(tokens)
    counts = torch.bincount(torch.as_tensor(tokens), minlength=len(expected)).double()
    assert counts[expected == 0].sum() == 0
    big = expected >= least
    observed = torch.cat((counts[big], counts[~big].sum()[None]))
    wanted = torch.cat((expected[big], expected[~big].sum()[None]))
    present = wanted > 1
    chi2 = float(((observed - wanted) ** 2 / wanted)[present].sum())
    freedom = int(present.sum()) - 1
    assert freedom >= 2
    assert chi2 < freedom + 4.5 * math.sqrt(2 * freedom) + 8, f"chi2 {chi2:.1f} with {freedom} degrees"
