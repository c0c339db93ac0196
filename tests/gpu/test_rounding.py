"""Errors of rounding that are measured with products on a GPU, beside those of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncengine import EngineConfig, bundled_model
from asyncengine.runner.rounding import measure


@pytest.mark.parametrize("bits", ["int4", "int8", "fp8"])
def test_errors_are_those_of_the_cpu(bits: Any) -> None:
    config = EngineConfig(model=str(bundled_model()), dtype="float32")
    here, there = (measure(config, bits, torch.device(name)) for name in ("cuda", "cpu"))
    assert here.errors == pytest.approx(there.errors, rel=0.01)
