"""Every kept seed through its target, without a fuzzer: what was found once is not lost, and no target is broken."""

from __future__ import annotations

import importlib
import random
from pathlib import Path

import pytest

from tests.fuzz.run import TARGETS, seeds

FILES = [path for target in TARGETS for path in sorted(seeds(target).iterdir())]


def test_every_target_has_seeds() -> None:
    assert {path.parent.name for path in FILES} == set(TARGETS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_seed(path: Path) -> None:
    importlib.import_module(f"tests.fuzz.targets.{path.parent.name}").one_input(path.read_bytes())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", TARGETS)
def test_random_bytes(target: str) -> None:
    module = importlib.import_module(f"tests.fuzz.targets.{target}")
    rng = random.Random(target)
    for _ in range(300):
        module.one_input(rng.randbytes(rng.randrange(200)))
