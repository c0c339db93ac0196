"""Lengths and counts of a benchmark's prompts and outputs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Self

from asyncengine.errors import ConfigError


def check_counts(*, least: int = 1, **counts: int | None) -> None:
    """Raises ConfigError that names the first count below ``least``."""
    for name, count in counts.items():
        if count is not None and count < least:
            raise ConfigError(f"{name} must be at least {least}, got {count}")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A range of lengths, both ends included."""

    low: int
    high: int

    @classmethod
    def parse(cls, name: str, text: str) -> Self:
        """``16`` or ``16-128``. Raises ConfigError that names the option."""
        low, dash, high = text.partition("-")
        try:
            lengths = cls(int(low), int(high if dash else low))
        except ValueError:
            raise ConfigError(f"{name} must be a number or a range such as 16-128, got {text!r}") from None
        if not 1 <= lengths.low <= lengths.high:
            raise ConfigError(f"{name} must be a range of positive numbers, the smaller one first, got {text!r}")
        return lengths

    def draw(self, rng: random.Random) -> int:
        """A length, all equally likely."""
        return rng.randint(self.low, self.high)
