"""Hybrid attention's switches: what is refused, what the scheduler is told, and which models can."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncengine import ConfigError, _core
from asyncengine.api.model_info import ModelInfo
from asyncengine.bundled import path as bundled_path
from asyncengine.config import EngineConfig
from asyncengine.runner.backend import load_backend
from asyncengine.runner.costs.table import CostTable, HostAttention
from asyncengine.runner.loop_config import decodes_on_host, hybrid_config
from asyncengine.runner.steps.model_runner import CpuModelRunner

ON: dict[str, Any] = {"hybrid_attention": "auto", "host_kv_memory_bytes": 1 << 20}
INFO = ModelInfo(
    name="m", path=Path(), architecture="", dtype="float32", device="a GPU", vocab_size=9, max_model_len=64,
    eos_token_ids=(), num_parameters=0, weight_bytes=0, num_kv_blocks=8, block_size=16, kv_bytes_per_block=1,
    num_host_kv_blocks=4, num_kv_layers=3, can_decode_on_host=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hybrid_attention": "auto"}, "hybrid_attention needs host_kv_memory_bytes"),
        ({**ON, "hybrid_attention": "on"}, "hybrid_attention must be one of off, auto, always"),
        ({**ON, "hybrid_workers": 0}, "hybrid_workers must be at least 1"),
        ({**ON, "hybrid_workers": 5000}, "hybrid_workers must be at most 4096"),
        ({**ON, "hybrid_lanes": 0}, r"hybrid_lanes must be in \[1, 64\]"),
        ({**ON, "hybrid_lanes": 65}, r"hybrid_lanes must be in \[1, 64\]"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **config)


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (3, 1), (16, 14)])
def test_workers_leave_two_cores(monkeypatch: pytest.MonkeyPatch, cores: int, workers: int) -> None:
    monkeypatch.setattr("asyncengine.config.os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert EngineConfig(model="m").num_hybrid_workers == workers
    assert EngineConfig(model="m", hybrid_workers=7).num_hybrid_workers == 7
    assert EngineConfig(model="m").num_threads == cores


@pytest.mark.parametrize(
    ("device", "settings", "lanes"),
    [
        ("NVIDIA H100 80GB HBM3", {}, 4), ("NVIDIA H200", {}, 4), ("NVIDIA H200", {"kv_cache_dtype": "fp8"}, 8),
        ("NVIDIA L4", {}, 8), ("cpu", {}, 8), ("NVIDIA H200", {"hybrid_lanes": 6}, 6),
    ],
)  # fmt: skip
def test_short_steps_have_fewer_lanes(device: str, settings: dict[str, Any], lanes: int) -> None:
    config = EngineConfig(model="m", hybrid_attention="always", host_kv_memory_bytes=1, **settings)
    assert config.hybrid_lanes_on(device) == lanes


def test_the_scheduler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncengine.runner.loop_config.HybridConfig", SimpleNamespace)
    costs = CostTable([], [], host_attention=[HostAttention(4, 2048, 1.5)], exchange_ns=7.0)
    config = EngineConfig(model="m", hybrid_workers=4, hybrid_lanes=6, hybrid_form="workers", **ON)
    told = {"lanes": 6, "layers": 3, "workers": 4, "attend_ns": 1.5, "exchange_ns": 7.0, "min_gain": 0.05}
    told["host_tokens"] = INFO.num_host_kv_blocks * config.block_size
    assert hybrid_config(config, INFO, costs) == SimpleNamespace(**told)
    unknown = SimpleNamespace(**told | {"attend_ns": 0.0, "exchange_ns": 0.0})
    assert hybrid_config(config, INFO) == unknown
    always: Any = hybrid_config(replace(config, hybrid_attention="always"), INFO, costs)
    assert always.min_gain < -1e6
    off = SimpleNamespace()
    assert hybrid_config(replace(config, hybrid_attention="off"), INFO, costs) == off
    assert hybrid_config(config, replace(INFO, num_host_kv_blocks=0), costs) == off
    assert hybrid_config(config, replace(INFO, can_decode_on_host=False), costs) == off


def test_the_core_takes_what_it_is_told() -> None:
    costs = CostTable([], [], host_attention=[HostAttention(4, 2048, 1.5)])
    for mode in ("off", "auto", "always"):
        config = EngineConfig(model="m", **ON | {"hybrid_attention": mode})
        assert isinstance(hybrid_config(config, INFO, costs), _core.HybridConfig)
        assert decodes_on_host(config, INFO) == (mode != "off")


def test_the_cpu_gains_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    on_cpu = replace(INFO, device="cpu")
    assert not decodes_on_host(EngineConfig(model="m", **ON), on_cpu)
    assert decodes_on_host(EngineConfig(model="m", **ON | {"hybrid_attention": "always"}), on_cpu)
    config = EngineConfig(model=str(bundled_path()), device="cpu", num_kv_blocks=4, max_model_len=64, **ON)
    backend = load_backend(config, progress=False)
    assert "hybrid_attention=auto is off on the CPU" in caplog.text
    assert backend.stop(5.0)


def test_the_bundled_model_can() -> None:
    info = CpuModelRunner.load(EngineConfig(model=str(bundled_path()), device="cpu", num_kv_blocks=4)).info
    assert info.can_decode_on_host
    assert info.num_kv_layers > 0


def write_gpt2(directory: Path, **values: Any) -> str:
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 300, "model_type": "gpt2"}
    (directory / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], **shape, **values}))
    return str(directory)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"n_embd": 30}, "heads of an odd size"),
        ({"architectures": ["GPT2ForSequenceClassification"], "num_labels": 2, "pad_token_id": 0}, "it classifies"),
    ],
    ids=["odd", "classifier"],
)
def test_a_model_that_cannot_says_so_and_runs_without(
    tmp_path: Path, values: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCENGINE_CACHE", str(tmp_path))
    monkeypatch.setattr("asyncengine.runner.costs.cpu.time_attention", lambda *shape, **options: 1.0)
    model = write_gpt2(tmp_path, **values)
    config = EngineConfig(model=model, device="cpu", load_format="dummy", dtype="float32", max_num_seqs=2, **ON)
    backend = load_backend(config, progress=False)
    assert "hybrid_attention=auto is off" in caplog.text
    assert why in caplog.text
    assert not backend.model_info.can_decode_on_host
    assert backend.model_info.num_host_kv_blocks > 0
    assert backend.stop(5.0)
