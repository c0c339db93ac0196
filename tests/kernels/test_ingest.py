"""Ingest against the StepInputs that the scheduler packs: several samples a row, lengths and drafts on the device."""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from asyncengine import _core
from asyncengine.kernels.cuda.sampling import results
from asyncengine.kernels.cuda.step.ingest import ingest, make_source
from asyncengine.kernels.cuda.step.tensors import DeviceStep, allocate_step

LAYOUT = _core.STEP_INPUT_LAYOUT
BLOCK, ROWS, TOKENS, SAMPLES, BLOCKS = 16, 4, 32, 12, 12
EVERYTHING = int(_core.Need.logprobs | _core.Need.penalties | _core.Need.drafts)


def structures(words: Any, kind: str, begin: int, count: int) -> list[dict[str, int]]:
    size, prefix = LAYOUT[f"{kind}_words"], f"{kind}."
    fields = {name.removeprefix(prefix): place for name, place in LAYOUT.items() if name.startswith(prefix)}
    return [{name: int(words[begin + i * size + at]) for name, at in fields.items()} for i in range(count)]


class Twin:
    """State that the device must keep of its slots, made from the bytes alone."""

    def __init__(self) -> None:
        self.tables = np.zeros((ROWS, BLOCKS), np.int64)
        self.last, self.length = [0] * ROWS, [0] * ROWS
        self.drafts = [[0] * (SAMPLES // ROWS - 1) for _ in range(ROWS)]

    def check(self, words: Any, step: DeviceStep) -> list[dict[str, int]]:
        (header,) = structures(words, "header", 0, 1)
        rows = structures(words, "row", LAYOUT["header_words"], header["num_rows"])
        prompt = LAYOUT["header_words"] + LAYOUT["row_words"] * len(rows)
        at = prompt + header["num_prompt_ids"] + LAYOUT["copy_words"] * header["num_copies"]
        updates = structures(words, "update", at, header["num_slot_updates"])
        deltas = at + LAYOUT["update_words"] * len(updates)
        token = sample = 0
        for i, row in enumerate(rows):
            slot, from_device = row["slot"], bool(row["flags"] & LAYOUT["flag.from_device"])
            behind = bool(row["flags"] & LAYOUT["flag.device_length"])
            first = deltas + row["delta_offset"]
            self.tables[slot, row["delta_first"] :][: row["delta_count"]] = words[first : first + row["delta_count"]]
            context = self.length[slot] if behind and from_device else row["context_len"]
            assert context <= row["context_len"]
            if behind and not from_device:
                self.length[slot] = context + row["query_len"]
            count, own = row["query_len"], slice(token, token + row["query_len"])
            start = prompt + row["prompt_start"]
            given = words[start : start + count].tolist()
            ids = [self.last[slot], *self.drafts[slot]][:count] if from_device else given
            positions = np.arange(context, context + count)
            assert step.input_ids[own].tolist() == ids
            assert step.positions[own].tolist() == positions.tolist()
            kv = self.tables[slot][positions // BLOCK] * BLOCK + positions % BLOCK
            assert step.slot_mapping[own].tolist() == kv.tolist()
            assert step.row_context_len[i] == context
            samples = range(row["num_samples"])
            mine = slice(sample, sample + len(samples))
            back = [len(samples) - j for j in samples]
            scored = len(samples) - row["num_appends"]
            assert step.sample_index[mine].tolist() == [token + count - b for b in back]
            assert step.sample_position[mine].tolist() == [context + count - b + 1 for b in back]
            assert step.sample_slot[mine].tolist() == [slot if j >= scored else -2 - slot for j in samples]
            region = row["result_words"]
            assert step.sample_records[mine].tolist() == [[row["result_offset"] + j * region, region] for j in samples]
            update = updates[row["update"]] if row["update"] >= 0 else None
            entries = (update["entries"], update["entry_words"]) if update else (None, 0)
            assert step.row_entries[i, 1] == entries[1]
            if update:
                assert step.slots.needs[slot] == update["needs"]
                assert step.row_entries[i, 0] == entries[0]
            token, sample = token + count, sample + len(samples)
        assert (step.sample_slot[sample:] == -1).all()
        assert (step.sample_records[sample:, 1] == 0).all()
        assert (step.row_entries[len(rows) :, 1] == 0).all()
        assert (step.slot_mapping[token:] == -1).all()
        return rows


def sampled(draw: random.Random, rows: list[dict[str, int]], twin: Twin, step: DeviceStep) -> list[int]:
    """Some count of tokens for each row, as the kernel that verifies drafts would leave them."""
    heads: list[int] = []
    slots = step.slots
    assert slots.length is not None
    assert slots.draft_tokens is not None
    for row in rows:
        slot, appends = row["slot"], row["num_appends"]
        heads += [LAYOUT["no_token"]] * (row["num_samples"] - appends)
        if not appends:
            continue
        count = draw.randint(1, appends)
        tokens = [draw.randrange(100) for _ in range(count)]
        heads += tokens + [LAYOUT["no_token"]] * (appends - count)
        twin.last[slot] = tokens[-1]
        if row["flags"] == LAYOUT["flag.device_length"] | LAYOUT["flag.from_device"]:
            twin.length[slot] += count
        twin.drafts[slot] = [draw.randrange(100) for _ in twin.drafts[slot]]
        slots.last_token[slot], slots.length[slot] = tokens[-1], twin.length[slot]
        slots.draft_tokens[slot] = torch.tensor(twin.drafts[slot])
    return heads


@pytest.mark.parametrize("seed", range(2))
def test_rows_with_several_samples_and_lengths_on_the_device(device: torch.device, seed: int) -> None:
    draw = random.Random(seed)
    config = _core.SchedulerConfig(
        num_blocks=24, block_size=BLOCK, max_num_seqs=ROWS, max_num_batched_tokens=TOKENS, prefill_chunk_size=0,
        max_model_len=BLOCK * BLOCKS, prefix_caching=False, max_samples=SAMPLES, max_update_words=80,
        max_result_words=40,
    )  # fmt: skip
    harness = _core.SchedulerHarness(config, 1)
    for i in range(7):
        extras = _core.RequestExtras(
            needs=EVERYTHING, entries=[(_core.EntryKind.parameters, [i])], history=i % 2 == 0,
            result_words=draw.randrange(5), score_from=draw.choice([-1, 3]), tokens_per_step=1 + i % 3,
        )  # fmt: skip
        prompt = [draw.randrange(100) for _ in range(draw.randint(4, 50))]
        harness.add(_core.RequestSpec(id=i, prompt=prompt, max_tokens=12, extras=extras), order=i)
    step = allocate_step(ROWS, BLOCKS, ROWS, TOKENS, device, SAMPLES, SAMPLES // ROWS - 1)
    for poisoned in (step.sample_records, step.row_entries, step.slots.length, step.slots.draft_tokens):
        assert poisoned is not None
        poisoned.fill_(1 << 20)
    inputs = torch.zeros(1, 1024, dtype=torch.int32, device=device)
    source = make_source(inputs, torch.zeros(1, 64, dtype=torch.int64, device=device), device, fetch=False)
    twin, steps = Twin(), 0
    while harness.schedule() is not None:
        words = np.frombuffer(harness.step_input, np.int32)
        inputs[0, : len(words)] = torch.from_numpy(words.copy())
        ingest(source, step, BLOCK, needs=EVERYTHING)
        harness.commit(sampled(draw, twin.check(words, step), twin, step))
        steps += 1
    assert steps > 10
    assert harness.quiescent


def test_words_are_stored_as_the_core_reads_them(device: torch.device) -> None:
    assert results.NO_TOKEN.value == LAYOUT["no_token"]
    header = torch.tensor([7 << 32 | 5, 1], device=device)
    words = torch.full((2, 16), -1, device=device)
    payload = torch.tensor([3.0, -0.5, 9.0, 9.0], device=device)
    _store[(1,)](header, words, words.stride(0), payload, 2, 6, KIND=_core.RecordKind.vector.value)
    low = (words[1] & 0xFFFFFFFF).tolist()
    bits = payload.view(torch.int32)[:2].tolist()
    assert (words[0] == -1).all()
    assert low[4] == LAYOUT["not_finite"] & 0xFFFFFFFF
    assert low[8:12] == [_core.RecordKind.vector << 24 | 2, *(b & 0xFFFFFFFF for b in bits), 0]
    assert [word >> 32 for word in words[1, [4, 8, 9, 10, 11]].tolist()] == [5] * 5
    assert (words[1, [0, 7, 12, 13]] == -1).all()
    _store[(1,)](header, words, words.stride(0), payload, 2, 2, KIND=1)  # no room: nothing is stored
    assert words[1, 8] & 0xFFFFFFFF == low[8]
    _store_constant[(1,)](header, words, words.stride(0), payload, KIND=_core.RecordKind.logprobs.value)
    assert (words[1, 12:] & 0xFFFFFFFF).tolist() == [_core.RecordKind.logprobs << 24 | 2, *low[9:11], 0]


@triton.jit
def _store(header, words, stride, payload, count, room, KIND: tl.constexpr):
    results.store_word(header, words, stride, 4, results.NOT_FINITE)
    values = tl.load(payload + tl.arange(0, 4))
    results.store_record(header, words, stride, count + 6, room, KIND, values, count, 4)


@triton.jit
def _store_constant(header, words, stride, payload, KIND: tl.constexpr):
    """A record whose place, room and length are constants."""
    results.store_record(header, words, stride, 12, 4, KIND, tl.load(payload + tl.arange(0, 2)), 2, 2)
