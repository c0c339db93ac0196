"""Errors of rounding are those of a projection's results for the inputs that it has in the model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncengine import bundled_model
from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError
from asyncengine.runner.backend import load_backend
from asyncengine.runner.rounding import measure, rounded
from asyncengine.runner.state.kv_scales import fixed_prompt
from tests.models import tiny

CPU = torch.device("cpu")


def settings_of(path: Path, **settings: Any) -> EngineConfig:
    return EngineConfig.from_kwargs(str(path), {"device": "cpu", "dtype": "float32", "num_kv_blocks": 16} | settings)


@pytest.mark.parametrize("bits", ["int4", "int8", "fp8"])
def test_errors_are_those_of_the_inputs_that_transformers_computes(bits: Any, tmp_path: Path) -> None:
    model = tiny.build_model("llama")
    model.save_pretrained(tmp_path)
    measured = measure(settings_of(tmp_path), bits, CPU)
    expected: dict[str, float] = {}

    def note(name: str, module: torch.nn.Linear, x: Tensor) -> None:
        change = x @ (rounded(module.weight.data, bits) - module.weight.data).T
        expected[name] = float(change.norm() / (x @ module.weight.data.T).norm())

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_hook(lambda own, given, _, name=name: note(name, own, given[0][0]))
    ids = fixed_prompt(model.config.vocab_size, measured.tokens)
    with torch.no_grad():
        model(ids[None])
    assert not measured.text
    assert measured.errors == pytest.approx(expected, rel=1e-3)


def test_experts_are_measured_on_the_tokens_that_are_routed_to_them(tmp_path: Path) -> None:
    tiny.build_model("lfm2-moe").save_pretrained(tmp_path)
    errors = measure(settings_of(tmp_path), "int4", CPU).errors
    experts = {module for module in errors if ".experts." in module}
    assert {module.rpartition(".")[2] for module in experts} == {"w1", "w2", "w3"}
    assert {module: error for module, error in errors.items() if not 0.01 < error < 0.5} == {}


def test_a_start_tells_the_median_and_the_worst_of_a_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncengine")
    load_backend(settings_of(bundled_model(), quantization="int8", measure_quantization=True), progress=False)
    [line] = [record.getMessage() for record in caplog.records if "tokens of a text" in record.getMessage()]
    measured = measure(settings_of(bundled_model()), "int8", CPU)
    assert measured.text
    assert line == f"int8, {measured.summary()}"
    worst = max(measured.errors, key=lambda module: measured.errors[module])
    assert line.endswith(f"of {worst}")
    assert 0 < measured.errors[worst] < 0.05


def test_nothing_is_measured_where_nothing_is_rounded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="measure_quantization needs quantization"):
        settings_of(tmp_path, measure_quantization=True)
