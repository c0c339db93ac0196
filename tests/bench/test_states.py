"""bench/states.py: its shapes, and its parts with small models on the CPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import gpu_common
import pytest
import states
from gpu_common import layer_parameters, model_directory, read_model

from asyncengine.kernels.ops import StateSpec
from tests.models import tiny


@pytest.fixture
def bench(tmp_path: Path) -> states.Bench:
    args = argparse.Namespace(device="cpu", layers=None)
    return states.Bench(args, 1e9, tmp_path)


@pytest.mark.parametrize("shape", states.SHAPES)
def test_a_shape_that_does_not_fit_loses_whole_periods(
    bench: states.Bench, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = json.loads((model_directory(shape) / "config.json").read_text())
    monkeypatch.setattr(states, "device_memory", lambda device: 200 << 30)
    assert read_model(states.fitted(bench, shape, 8, 1024)) == read_model(shape)
    room = 12 << 30
    monkeypatch.setattr(states, "device_memory", lambda device: room)
    made = read_model(states.fitted(bench, shape, 8, 1024))
    assert 0 < layer_parameters(made) < layer_parameters(read_model(shape))
    left = int(list(bench.cuts.values())[-1].split()[0])
    assert (raw["num_hidden_layers"] - left) % states.period(raw) == 0
    assert left <= states.period(raw) or states.bytes_of(made, 8, 1024) <= states.MEMORY_SHARE * room


def test_the_dense_model_has_about_as_many_bytes(bench: states.Bench) -> None:
    twin = states.dense_twin(bench, "qwen3.5-9b")
    assert twin is not None
    ratio = layer_parameters(read_model(twin)) / layer_parameters(read_model("qwen3.5-9b"))
    assert ratio == pytest.approx(1, abs=0.02)
    assert states.dense_twin(bench, "qwen3.6-35b-a3b") is None


def test_layers_with_a_state_stand_alone(bench: states.Bench) -> None:
    made = states.with_states_alone(bench, "granite-4-h-small")
    assert made is not None
    specs = read_model(made).layer_caches
    assert len(specs) == 36
    assert all(isinstance(spec, StateSpec) for spec in specs)


@pytest.mark.exhaustive
def test_a_conversation_and_steps_of_a_small_model_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.build_model("qwen3.5", max_position_embeddings=1024).save_pretrained(tmp_path)
    record = tmp_path / "states.json"
    arguments = ["--device", "cpu", "--batches", "1,2", "--tokens", "2,4", "--repeats", "1", "--prompt", "600"]
    arguments += ["--turns", "3", "--short", "64", "--long", "128", "--json", str(record)]
    monkeypatch.setattr(sys, "argv", ["states.py", "--model", str(tmp_path), *arguments])
    monkeypatch.setitem(gpu_common.COPIED_BYTES, "cpu", 1 << 20)
    states.main()
    assert "there are no graphs to replay" in capsys.readouterr().out
    values = {figure["name"]: figure["value"] for figure in json.loads(record.read_text())["figures"]}
    name = tmp_path.name
    assert f"{name}, batch 2, over the floor" in values
    over, over_read = (values[f"{name}, batch 1, over dense{of}"] for of in ("", " of the bytes read"))
    assert over > 0
    assert over_read > 0
    assert values[f"{name}, prompt over dense"] > 0
    # New tokens of a turn, and what an answer's snapshot lacks.
    assert values[f"{name}, tokens of it computed"] <= 200 + 256
