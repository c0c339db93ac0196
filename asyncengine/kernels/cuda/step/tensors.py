"""DeviceStep: what a step's kernels read and write on the device, at addresses that captured graphs keep."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    needs: Tensor
    """int32 [S]: bits of _core.Need"""
    length: Tensor | None = None
    """int32 [S], where steps may append several tokens: tokens of KV before the next row of a slot that does so. Ingest
    sets it at the end of a prompt, and the kernel that samples adds the tokens it appends."""
    draft_tokens: Tensor | None = None
    """int32 [S, D], likewise: the tokens after last_token in that row. The kernel that samples writes them."""
    window_tables: Tensor | None = None
    """int32 [W, S, max_blocks], where layers form groups: the block tables of each group with a window"""


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One step of at most T tokens, R rows and N samples; ingest writes it, every later kernel of the step reads it.

    N is R, unless steps may have more samples than rows.

    Rows and tokens that a step does not use are inert: row_slot, token_slot and sample_slot -1, row_query_len 0,
    slot_mapping -1, indices 0. So are the tokens of lanes to attention, and the row of one that is sampled: its
    row_query_len is 0, its row_query_start is the lane's token, its row_context_len that token's position.
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
    """int64 [N]: the token whose hidden state gives the logits"""
    sample_slot: Tensor
    """int32 [N]; -2 - slot where a token of a prompt is only scored"""
    sample_position: Tensor
    """int32 [N]: position of the token to be sampled, the generator's counter"""
    sample_arrivals: Tensor
    """int32 [N]: programs of a row's sampling that are done; 0 between launches"""
    sample_records: Tensor
    """int32 [N, 2]: offset of its region in the record section, and words; written in steps with RECORD_NEEDS alone"""
    sample_mask: Tensor
    """int32 [N]: of samples with Need.mask: 1: the slot's mask is applied, 0: all tokens may come, no_mask: it is not
    there yet; scratch of the sampler"""
    row_entries: Tensor
    """int32 [R, 2]: offset in the StepInput of the entries that the slot of the row is filled with, and words, or 0;
    written in steps with ENTRY_NEEDS alone"""
    lane_slots: Tensor | None = None
    """int32 [stages, lanes], in steps with lanes, which are the last of their tokens (csrc/core/hybrid/host_rows.h):
    the slot of the row that enters a lane at a stage; -1 if none does"""
    lane_positions: Tensor | None = None
    """int32 [stages, lanes]: of that row's token; 0 if there is none"""
    window_slots: Tensor | None = None
    """int64 [W, T], where layers form groups: slot_mapping in the blocks of each group with a window"""

    @property
    def num_window_groups(self) -> int:
        return 0 if self.window_slots is None else len(self.window_slots)

    def of_group(self, group: int) -> DeviceStep:
        """The step with the block tables and the slots of a group of layers (LayerKVCache.group).

        Raises IndexError if the step has no such group.
        """
        if group == 0:
            return self
        tables = self.slots.window_tables
        if tables is None or self.window_slots is None or not 0 < group <= len(tables):
            count = 1 + self.num_window_groups
            raise IndexError(f"the step has block tables of {count} groups of layers, none of group {group}")
        slots = replace(self.slots, block_tables=tables[group - 1])
        return replace(self, slots=slots, slot_mapping=self.window_slots[group - 1])

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_lanes(self) -> int:
        return 0 if self.lane_slots is None else self.lane_slots.shape[1]

    @property
    def num_rows(self) -> int:
        return len(self.row_slot)

    @property
    def num_samples(self) -> int:
        return len(self.sample_index)

    def bucket(
        self, num_rows: int, num_tokens: int, *, one_sample: bool = False, with_lanes: bool = False
    ) -> DeviceStep:
        """The same memory, seen through a smaller bucket; ``one_sample``: of steps with no more than one a row."""
        several = self.num_samples > self.num_rows and not one_sample
        num_samples = min(self.num_samples, num_tokens) if several else num_rows
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
            self.sample_index[:num_samples],
            self.sample_slot[:num_samples],
            self.sample_position[:num_samples],
            self.sample_arrivals[:num_samples],
            self.sample_records[:num_samples],
            self.sample_mask[:num_samples],
            self.row_entries[:num_rows],
            self.lane_slots if with_lanes else None,
            self.lane_positions if with_lanes else None,
            None if self.window_slots is None else self.window_slots[:, :num_tokens],
        )


def allocate_step(
    num_slots: int,
    max_blocks: int,
    max_rows: int,
    max_tokens: int,
    device: torch.device,
    max_samples: int = 0,
    drafts: int = 0,
    lanes: tuple[int, int] = (0, 0),
    window_groups: int = 0,
) -> DeviceStep:
    """An inert step of the largest bucket, with empty slots. max_samples: 0 is one a row. drafts: of a row at most.

    lanes: how many stages a step's table of lanes has, and how many lanes. window_groups: groups of layers that have
    block tables of their own.
    """
    max_samples = max(max_samples, max_rows)

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
        needs=ints(num_slots),
        length=ints(num_slots) if drafts else None,
        draft_tokens=ints(num_slots, drafts) if drafts else None,
        window_tables=ints(window_groups, _aligned(num_slots), max_blocks)[:, :num_slots] if window_groups else None,
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
        sample_index=ints(max_samples, dtype=torch.int64),
        sample_slot=ints(max_samples, fill=-1),
        sample_position=ints(max_samples),
        sample_arrivals=ints(max_samples),
        sample_records=ints(max_samples, 2),
        sample_mask=ints(max_samples),
        row_entries=ints(max_rows, 2),
        lane_slots=ints(*lanes, fill=-1) if lanes[1] else None,
        lane_positions=ints(*lanes) if lanes[1] else None,
        window_slots=(
            ints(window_groups, _aligned(max_tokens), fill=-1, dtype=torch.int64)[:, :max_tokens]
            if window_groups
            else None
        ),
    )


def _aligned(rows: int) -> int:
    """Rows of a group's tensor, so that each group begins at a multiple of 16 bytes: kernels are compiled for that."""
    return -(-rows // 4) * 4
