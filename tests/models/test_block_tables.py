"""A layer whose group has no block table in a step raises an error, and reads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncengine import EngineConfig, _core
from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.cpu.reference import ReferenceOps
from asyncengine.kernels.ops import AttentionCall, AttentionLayer, LayerKVCache
from asyncengine.runner.steps.model_runner import CpuModelRunner
from tests.models import tiny

PROMPT = list(range(40))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt-oss")
    tiny.build_model("gpt-oss").save_pretrained(path)
    return path


def load(path: Path, ops: CpuOps | ReferenceOps) -> CpuModelRunner:
    settings = {
        "num_kv_blocks": 16,
        "max_model_len": 128,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "dtype": "float32",
    }
    runner = CpuModelRunner.load(EngineConfig.from_kwargs(str(path), settings), ops=ops)
    assert runner.info.window_groups == 1
    return runner


def one_table() -> _core.StepBatch:
    places = list(range(len(PROMPT)))
    return _core.StepBatch(PROMPT, places, places, [0, len(PROMPT)], [0], [[0, 1, 2]], [len(PROMPT) - 1])


@pytest.mark.parametrize("ops", [CpuOps(1), ReferenceOps()], ids=["native", "reference"])
def test_a_step_of_one_table_is_refused_by_a_model_of_two_groups(gpt_oss: Path, ops: CpuOps | ReferenceOps) -> None:
    runner = load(gpt_oss, ops)
    batch = one_table()
    assert batch.num_groups == 1
    with pytest.raises(IndexError, match="tables of 1 groups of layers, none of group 1"):
        runner.forward(batch)


def test_a_driver_gives_each_group_a_table_of_its_own(gpt_oss: Path) -> None:
    driver = tiny.Driver(load(gpt_oss, CpuOps(1)), native=True)
    sequence = driver.add(PROMPT, 64)
    full, window = (set(table.tolist()) for table in sequence.tables)
    assert len(full) == len(window) == 4
    assert not full & window
    driver.run([sequence], 8, 7)
    assert sequence.generated == tiny.generate(tiny.build_model("gpt-oss"), PROMPT, 8)


@pytest.mark.parametrize("group", [1, 7, -1])
def test_native_calls_refuse_a_group_that_the_step_lacks(group: int) -> None:
    ops, heads = CpuOps(1), torch.zeros(len(PROMPT), 4, 16)
    caches = torch.full((3, 1, 16, 16), torch.nan), torch.full((3, 1, 16, 16), torch.nan)
    cache, layer = LayerKVCache(*caches, group=group), AttentionLayer(2, None, None, 1.0, 0)
    k, v = heads[:, 2:3], heads[:, 3:]
    calls: list[Any] = [
        lambda: ops.attention(heads.flatten(1), layer, cache, one_table()),
        lambda: ops.paged_attention(AttentionCall(heads[:, :2], layer, cache, one_table())),
        lambda: ops.store_kv(k, v, cache, one_table()),
    ]
    for call in calls:
        with pytest.raises(IndexError, match=f"none of group {group}"):
            call()
    assert all(plane.isnan().all() for plane in caches)


def test_a_step_has_a_table_and_a_slot_for_every_row_and_token_of_a_group() -> None:
    places = [0, 1]
    made = _core.StepBatch(
        places, places, places, [0, 2], [0], [[0]], [1], window_tables=[[[5]], [[3]]], window_slots=[[80, 81], [48, 49]]
    )
    assert made.num_groups == 3
    assert made.block_table(0, 1, 2).tolist() == [3]
    assert made.slots_of(1).tolist() == [80, 81]
    sampled = made.only_sampled()
    assert sampled.num_groups == 3
    assert sampled.slots_of(2).tolist() == [49]
    assert sampled.block_table(0, 1, 1).tolist() == [5]
    with pytest.raises(IndexError, match="tables of 3 groups"):
        made.slots_of(3)
    for tables, slots in (([[[5]]], []), ([[]], [[80, 81]]), ([[[5]]], [[80]])):
        with pytest.raises(ValueError, match="group"):
            _core.StepBatch(places, places, places, [0, 2], [0], [[0]], [1], window_tables=tables, window_slots=slots)
