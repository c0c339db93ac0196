"""DeviceStep: what a step's kernels read and write on the device, at addresses that captured graphs keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncengine.kernels.cuda.step.layout import MAX_STOPS


@dataclass(frozen=True, slots=True)
class Slots:
    """State of the running sequences, one row per slot, S rows. It lives from step to step."""

    block_tables: Tensor
    """int32 [S, max_blocks]"""
    last_token: Tensor
    """int32 [S]: what was sampled last, the next step's input"""
    finished: Tensor
    """int32 [S]: 1 once a stop token was sampled; further rows of the slot are inert"""
    temperature: Tensor
    """float32 [S]; 0 is greedy"""
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    """int32 [S]; 0 is all"""
    seed: Tensor
    """int64 [S], the bits of an unsigned number"""
    stops: Tensor
    """int32 [S, MAX_STOPS]; -1 is none"""


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One step of at most T tokens and R rows; ingest writes it, every later kernel of the step reads it.

    Rows and tokens that a step does not use are inert: row_slot, token_slot and sample_slot -1, row_query_len 0,
    slot_mapping -1, indices 0.
    """

    slots: Slots
    input_ids: Tensor
    """int32 [T]"""
    positions: Tensor
    """int32 [T]"""
    slot_mapping: Tensor
    """int64 [T]: block * block_size + offset, where the token's KV is written"""
    token_slot: Tensor
    """int32 [T]: its row's slot; -1 where nothing is to be computed"""
    row_slot: Tensor
    """int32 [R]"""
    row_query_start: Tensor
    """int32 [R]: the row's first token among the step's"""
    row_query_len: Tensor
    """int32 [R]"""
    row_context_len: Tensor
    """int32 [R]: tokens of KV that precede the query"""
    sample_index: Tensor
    """int64 [R]: the token whose hidden state gives the logits"""
    sample_slot: Tensor
    """int32 [R]"""
    sample_position: Tensor
    """int32 [R]: position of the token to be sampled, the generator's counter"""
    sample_arrivals: Tensor
    """int32 [R]: programs of a row's sampling that are done; 0 between launches"""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_rows(self) -> int:
        return len(self.row_slot)

    def bucket(self, num_rows: int, num_tokens: int) -> DeviceStep:
        """The same memory, seen through a smaller bucket."""
        return DeviceStep(
            self.slots,
            self.input_ids[:num_tokens],
            self.positions[:num_tokens],
            self.slot_mapping[:num_tokens],
            self.token_slot[:num_tokens],
            self.row_slot[:num_rows],
            self.row_query_start[:num_rows],
            self.row_query_len[:num_rows],
            self.row_context_len[:num_rows],
            self.sample_index[:num_rows],
            self.sample_slot[:num_rows],
            self.sample_position[:num_rows],
            self.sample_arrivals[:num_rows],
        )


def allocate_step(
    num_slots: int, max_blocks: int, max_rows: int, max_tokens: int, device: torch.device
) -> DeviceStep:
    """An inert step of the largest bucket, with empty slots."""

    def ints(*shape: int, fill: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, fill, dtype=dtype, device=device)

    def floats(fill: float) -> Tensor:
        return torch.full((num_slots,), fill, dtype=torch.float32, device=device)

    slots = Slots(
        block_tables=ints(num_slots, max_blocks),
        last_token=ints(num_slots),
        finished=ints(num_slots),
        temperature=floats(0.0),
        top_p=floats(1.0),
        min_p=floats(0.0),
        top_k=ints(num_slots),
        seed=ints(num_slots, dtype=torch.int64),
        stops=ints(num_slots, MAX_STOPS, fill=-1),
    )
    return DeviceStep(
        slots,
        input_ids=ints(max_tokens),
        positions=ints(max_tokens),
        slot_mapping=ints(max_tokens, fill=-1, dtype=torch.int64),
        token_slot=ints(max_tokens, fill=-1),
        row_slot=ints(max_rows, fill=-1),
        row_query_start=ints(max_rows),
        row_query_len=ints(max_rows),
        row_context_len=ints(max_rows),
        sample_index=ints(max_rows, dtype=torch.int64),
        sample_slot=ints(max_rows, fill=-1),
        sample_position=ints(max_rows),
        sample_arrivals=ints(max_rows),
    )
