"""Ingest of block tables of groups of layers, against the StepInputs that the scheduler packs."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from asyncengine import _core
from asyncengine.kernels.cuda.step.ingest import ingest, make_source
from asyncengine.kernels.cuda.step.tensors import DeviceStep, allocate_step
from tests.kernels.test_ingest import LAYOUT, structures

BLOCK, ROWS, TOKENS, BLOCKS, GROUPS = 16, 3, 27, 9, 3
UNWRITTEN = 1 << 20


class Tables:
    """Block tables [group, slot, entry] that the device must have, made from the bytes alone."""

    def __init__(self) -> None:
        self.known = np.full((GROUPS, ROWS, BLOCKS), UNWRITTEN, np.int64)

    def check(self, words: np.ndarray, step: DeviceStep) -> int:
        """Take in a step and compare; returns the tokens that were compared."""
        (header,) = structures(words, "header", 0, 1)
        rows = structures(words, "row", LAYOUT["header_words"], header["num_rows"])
        deltas = LAYOUT["header_words"] + LAYOUT["row_words"] * len(rows) + header["num_prompt_ids"]
        deltas += LAYOUT["copy_words"] * header["num_copies"] + LAYOUT["update_words"] * header["num_slot_updates"]
        token = 0
        for row in rows:
            slot, first, count = row["slot"], row["delta_first"], row["delta_count"]
            begin = deltas + row["delta_offset"]
            fresh = words[begin : begin + GROUPS * count].reshape(GROUPS, count)
            self.known[:, slot, first : first + count] = fresh
            positions = row["context_len"] + np.arange(row["query_len"])
            for group in range(GROUPS):
                seen, blocks = step.of_group(group), self.known[group, slot]
                assert seen.slots.block_tables[slot].tolist() == blocks.tolist(), (group, slot)
                places = blocks[positions // BLOCK] * BLOCK + positions % BLOCK
                assert seen.slot_mapping[token : token + len(positions)].tolist() == places.tolist(), (group, slot)
            token += len(positions)
        for group in range(GROUPS):
            assert (step.of_group(group).slot_mapping[token:] == -1).all(), group
        return token


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(2))
def test_each_group_has_its_tables_and_slots(device: torch.device, seed: int) -> None:
    draw = random.Random(seed)
    config = _core.SchedulerConfig(
        num_blocks=36, block_size=BLOCK, max_num_seqs=ROWS, max_num_batched_tokens=TOKENS, prefill_chunk_size=11,
        max_model_len=BLOCK * BLOCKS, prefix_caching=True, window_groups=GROUPS - 1, group_window=20,
    )  # fmt: skip
    harness = _core.SchedulerHarness(config, 1)
    for i in range(6):
        prompt = [draw.randrange(3)] * draw.randint(40, 90)
        harness.add(_core.RequestSpec(id=i, prompt=prompt, max_tokens=12, n=1 + i % 2), order=i)
    step = allocate_step(ROWS, BLOCKS, ROWS, TOKENS, device, window_groups=GROUPS - 1)
    assert step.slots.window_tables is not None
    for tables in (step.slots.block_tables, step.slots.window_tables):
        tables.fill_(UNWRITTEN)
    inputs = torch.zeros(1, 2048, dtype=torch.int32, device=device)
    source = make_source(inputs, torch.zeros(1, 64, dtype=torch.int64, device=device), device, fetch=False)
    twin, tokens = Tables(), 0
    while harness.schedule() is not None:
        words = np.frombuffer(harness.step_input, np.int32)
        inputs[0, : len(words)] = torch.from_numpy(words.copy())
        ingest(source, step, BLOCK)
        tokens += twin.check(words, step)
        samples = structures(words, "header", 0, 1)[0]["num_samples"]
        harness.commit([draw.randrange(3) for _ in range(samples)])
    assert tokens > 300
    assert harness.quiescent
    assert harness.free_blocks == 36


def test_a_bucket_sees_the_same_memory() -> None:
    step = allocate_step(3, 5, 3, 7, torch.device("cpu"), window_groups=2)
    small = step.bucket(2, 4)
    assert small.num_window_groups == 2
    for group in (0, 1, 2):
        whole, part = step.of_group(group), small.of_group(group)
        part.slot_mapping.fill_(group)
        part.slots.block_tables.fill_(10 + group)
        assert whole.slot_mapping.tolist() == [group] * 4 + [-1] * 3
        assert whole.slots.block_tables.eq(10 + group).all()
        assert part.slots.block_tables.is_contiguous()
        assert part.slots.block_tables.data_ptr() % 16 == part.slot_mapping.data_ptr() % 16 == 0


def test_a_step_of_one_table_has_no_other_group() -> None:
    step = allocate_step(3, 5, 3, 7, torch.device("cpu"))
    assert step.of_group(0) is step
    with pytest.raises(IndexError, match="tables of 1 groups of layers, none of group 1"):
        step.of_group(1)
    with pytest.raises(IndexError, match="tables of 3 groups of layers, none of group 3"):
        allocate_step(3, 5, 3, 7, torch.device("cpu"), window_groups=2).of_group(3)
