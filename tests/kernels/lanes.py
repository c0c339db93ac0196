"""Steps with lanes for host rows: their StepInputs, and what a worker reads of a mailbox and writes for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncengine import _core

LAYOUT = _core.STEP_INPUT_LAYOUT


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a step, with one sample. Without tokens it has one, which is on the device."""

    slot: int
    context: int
    tokens: Sequence[int] = ()
    blocks: Sequence[int] = ()
    """blocks of the slot's table, from its beginning"""
    lane: int = -1


Table = list[list[tuple[int, int]]]
"""[stages][lanes] of slot and position; slot -1 is an empty lane."""


def step_input(number: int, rows: Sequence[Row], table: Table) -> Tensor:
    """A StepInput, int32."""
    words: list[int] = []
    prompt_ids: list[int] = []
    blocks: list[int] = []
    start = longest = 0
    for i, row in enumerate(rows):
        of_lane = row.lane >= 0
        flags = LAYOUT["flag.lane"] if of_lane else 0
        words += structure(
            "row", slot=row.slot, query_start=row.lane if of_lane else start, query_len=len(row.tokens) or 1,
            context_len=row.context, flags=flags | (0 if row.tokens else LAYOUT["flag.from_device"]),
            prompt_start=len(prompt_ids), sample_row=i, num_samples=1, num_appends=1, update=-1,
            delta_count=len(row.blocks), delta_offset=len(blocks),
        )  # fmt: skip
        prompt_ids += row.tokens
        blocks += row.blocks
        if not of_lane:
            start += len(row.tokens) or 1
            longest = max(longest, row.context)
    entries = [word for stage in table for entry in stage for word in entry]
    tail = [*words, *prompt_ids, *blocks, *entries]
    lane_rows = sum(row.lane >= 0 for row in rows)
    header = structure(
        "header", total_words=LAYOUT["header_words"] + len(tail), step=number, num_rows=len(rows),
        num_decode_rows=sum(not row.tokens for row in rows) - lane_rows, num_tokens=start, num_samples=len(rows),
        num_heads=len(rows), num_prompt_ids=len(prompt_ids), num_delta_blocks=len(blocks), max_context=longest,
        num_lanes=len(table[0]) if table else 0, num_lane_stages=len(table), num_lane_rows=lane_rows,
    )  # fmt: skip
    header[0] = LAYOUT["magic"]
    return torch.tensor([*header, *tail], dtype=torch.int64).to(torch.int32)


def structure(kind: str, **fields: int) -> list[int]:
    """A field that is not named is 0."""
    words = [0] * LAYOUT[f"{kind}_words"]
    for field, value in fields.items():
        words[LAYOUT[f"{kind}.{field}"]] = value
    return words


def read_mailbox(words: Tensor, dtype: torch.dtype, step: int) -> Tensor:
    """The heads [heads, D] that a row left in the step, of words [heads, words of a head]; checks that all came."""
    words = words.cpu()
    assert (words >> 32 == step).all()
    payloads = (words & 0xFFFFFFFF).to(torch.int64)
    if dtype == torch.float32:
        return _as_int32(payloads).view(torch.float32)
    halves = [(payloads >> shift) & 0xFFFF for shift in (0, 16)]
    return _as_int32(torch.cat(halves, 1) << 16).view(torch.float32).to(torch.bfloat16)


def _as_int32(values: Tensor) -> Tensor:
    """Return the low 32 bits of the values as int32."""
    low = values & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)
