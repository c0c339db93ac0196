"""Amounts of work for tests whose cases are no parameters: less in ``make test`` than in ``make exhaustive``."""

from __future__ import annotations

import os
from typing import TypeVar

import torch

EXHAUSTIVE = "TESTS_EXHAUSTIVE"
"""Environment variable that tests/conftest.py sets for --exhaustive, before it imports modules with tests."""
T = TypeVar("T")


def has_all_cases() -> bool:
    """Return whether all cases of all tests run: with --exhaustive, and where there is a GPU."""
    return EXHAUSTIVE in os.environ or torch.cuda.is_available()


def sample_of(everything: T, sample: T) -> T:
    """Return ``everything`` where all cases run, and ``sample`` in ``make test``."""
    return everything if has_all_cases() else sample


def examples(count: int) -> int:
    """Return the number of examples that Hypothesis draws for a test: a quarter of ``count`` in ``make test``."""
    return sample_of(count, max(2, count // 4))
