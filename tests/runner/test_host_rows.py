"""Host rows on a GPU: the conditions for them, and an engine that goes on without."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncengine import _core
from asyncengine.config import EngineConfig
from asyncengine.kernels.cuda.ops import CudaOps
from asyncengine.runner.host.rows import HostRows
from asyncengine.runner.loop_config import step_loop_config
from asyncengine.runner.steps.device_steps import step_buckets
from asyncengine.runner.steps.model_runner import LoadedModel, load_model
from tests.models import tiny

HYBRID: dict[str, Any] = {"hybrid_attention": "always", "host_kv_memory_bytes": 1 << 20}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    config = {"architectures": ["LlamaForCausalLM"], **tiny.DECODER, "eos_token_id": None}
    (path / "config.json").write_text(json.dumps(config))
    return path


def load(model: Path, **config: Any) -> tuple[EngineConfig, LoadedModel, CudaOps]:
    small = {"load_format": "dummy", "dtype": "bfloat16", "max_num_seqs": 5, "max_num_batched_tokens": 16}
    engine_config = EngineConfig(model=str(model), **small | HYBRID | config)
    ops = CudaOps(torch.device("cpu"))
    return engine_config, load_model(engine_config, ops), ops


def make(model: Path, *, pins: bool = True, **config: Any) -> HostRows | None:
    engine_config, loaded, _ = load(model, **config)
    simulation = _core.SimulatedDevice(vocab_size=2)
    if not pins:
        simulation.refuse_pinning()
    return HostRows.make(engine_config, _core.CudaDevice.simulated(simulation), loaded)


def test_mailboxes_and_results_are_those_of_the_model(model: Path) -> None:
    rows = make(model, hybrid_lanes=3)
    assert rows is not None
    heads, kv_heads, dim = tiny.DECODER["num_attention_heads"], tiny.DECODER["num_key_value_heads"], 8
    assert rows.mailboxes.shape == (5, heads + 2 * kv_heads, dim // 2)
    assert rows.results.shape == (5, heads * dim)
    assert (rows.results.dtype, rows.mailboxes.dtype) == (torch.bfloat16, torch.int64)
    lanes = rows.lanes(torch.zeros(2, dtype=torch.int64))
    assert lanes.staged.shape == (3, 3, heads * dim)
    assert lanes.saved.shape == (5, tiny.DECODER["hidden_size"])


@pytest.mark.parametrize(
    ("how", "why"), [({"pins": False}, "cannot be pinned"), ({"staging": "pageable"}, "staging=pageable")], ids=str
)
def test_an_engine_goes_on_without(
    model: Path, caplog: pytest.LogCaptureFixture, how: dict[str, Any], why: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert make(model, **how) is None
    assert "hybrid_attention is off: " in caplog.text
    assert why in caplog.text


def test_nothing_is_allocated_where_it_is_off(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert make(model, hybrid_attention="off", pins=False) is None
    assert not caplog.records


def test_lanes_leave_room_for_other_tokens(model: Path) -> None:
    config, loaded, ops = load(model)
    with_lanes = [bucket for bucket in step_buckets(config, loaded, ops, 8) if bucket.lanes]
    assert {bucket.lanes for bucket in with_lanes} == {8}
    assert min(bucket.max_tokens for bucket in with_lanes) > 8


def test_a_step_loop_with_lanes_needs_workers(model: Path) -> None:
    config, loaded, _ = load(model, hybrid_lanes=2, num_kv_blocks=8, max_model_len=64)
    simulation = _core.SimulatedDevice(vocab_size=2)
    native = _core.CudaDevice.simulated(simulation)
    settings = step_loop_config(config, loaded.info(config, 8, 8))
    graphs = _core.CudaGraphs(native)
    graphs.add_bucket(5, 8, False, 2**31 - 1, [(0, 0)])
    moves = [simulation.add_graph(lambda: None) for _ in range(_core.HostPool.transfers)]
    graphs.set_host_pool(_core.HostPool(native, 4096, 8, 8), moves)
    staging = _core.Staging(native, settings, "ahead")
    with pytest.raises(ValueError, match="host rows need host_workers"):
        _core.StepLoop.on_cuda(settings, native, staging, graphs, None, 0, 50.0)
