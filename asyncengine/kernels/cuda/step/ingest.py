"""Ingest: the first kernel of a step takes a StepInput apart, on the device.

It reads the bytes that csrc/core/step_input.h lays out, brings the slots up to date and writes the step's
tensors (DeviceStep). Every row names all that concerns its slot, so rows are taken in independently.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, wait
from asyncengine.kernels.cuda.step.layout import (
    COPY_SOURCE,
    COPY_TARGET,
    COPY_WORDS,
    DEVICE_LENGTH,
    ENTRY_NEEDS,
    FROM_DEVICE,
    HEADER_WORDS,
    LANE,
    LANE_POSITION,
    LANE_SLOT,
    LANE_WORDS,
    MAX_STOPS,
    NUM_COPIES,
    NUM_DELTA_BLOCKS,
    NUM_LANE_STAGES,
    NUM_LANES,
    NUM_PROMPT_IDS,
    NUM_ROWS,
    NUM_SAMPLES,
    NUM_SLOT_UPDATES,
    NUM_TOKENS,
    RECORD_NEEDS,
    ROW_CONTEXT_LEN,
    ROW_DELTA_COUNT,
    ROW_DELTA_FIRST,
    ROW_DELTA_OFFSET,
    ROW_FLAGS,
    ROW_NUM_APPENDS,
    ROW_NUM_SAMPLES,
    ROW_PROMPT_START,
    ROW_QUERY_LEN,
    ROW_QUERY_START,
    ROW_RESULT_OFFSET,
    ROW_RESULT_WORDS,
    ROW_SAMPLE_ROW,
    ROW_SLOT,
    ROW_UPDATE,
    ROW_WORDS,
    STEP,
    TOTAL_WORDS,
    UPDATE_ENTRIES,
    UPDATE_ENTRY_WORDS,
    UPDATE_MIN_P,
    UPDATE_NEEDS,
    UPDATE_SEED,
    UPDATE_STOPS,
    UPDATE_TEMPERATURE,
    UPDATE_TOP_K,
    UPDATE_TOP_P,
    UPDATE_WORDS,
)
from asyncengine.kernels.cuda.step.tables import clear_windows, find_slots, take_blocks, take_windows
from asyncengine.kernels.cuda.step.tensors import DeviceStep

_MAX_STOPS = tl.constexpr(MAX_STOPS)
_CHUNK = 128
_FETCH_WORDS = 1024
_EAGER_WORDS = tl.constexpr(4096)
"""Fetched before it is known how long the StepInput is: asking first takes a trip over the bus, 1.5 us."""


@dataclass(frozen=True, slots=True)
class StepSource:
    """Source of StepInputs and target of tokens: a ring of buffers whose next place each launch takes."""

    inputs: Tensor
    """int32 [ring, words]: on the device, or host memory that the device can read; a ring of one where copies share the
    steps' CUDA stream"""
    fetched: Tensor | None
    """int32 [words] on the device, where a StepInput in host memory is fetched to"""
    outputs: Tensor
    """int64 [ring, words]: what csrc/core/step_output.h says, number of the step << 32 | payload"""
    state: Tensor
    """int64 [4]: number of the running step, its place in the ring, number of the next step, and how many programs of
    ingest have read that"""

    @property
    def header(self) -> Tensor:
        """int64 [2]: number of the running step and its place in the ring, for the kernels after ingest."""
        return self.state[:2]

    @property
    def running(self) -> tuple[Tensor, int]:
        """Return the place of the running StepInput for kernels after ingest: words int32, and the stride of places in
        the ring.

        It begins at words + header[1] * stride; DeviceStep.row_entries count from there.
        """
        return (self.inputs, self.inputs.shape[1]) if self.fetched is None else (self.fetched, 0)

    def restart(self, next_step: int = 1) -> None:
        """Forget launches that the host did not count: the next one is its step ``next_step``, from 1."""
        self.state.copy_(torch.tensor([0, 0, next_step, 0], dtype=torch.int64))


def make_source(inputs: Tensor, outputs: Tensor, device: torch.device, *, fetch: bool) -> StepSource:
    """A source whose next step is the first. ``fetch``: the inputs lie on the host."""
    fetched = torch.zeros(inputs.shape[1], dtype=torch.int32, device=device) if fetch else None
    source = StepSource(inputs, fetched, outputs, torch.zeros(4, dtype=torch.int64, device=device))
    source.restart()
    return source


def ingest(
    source: StepSource,
    step: DeviceStep,
    block_size: int,
    pdl: bool = False,
    needs: int = 0,
    several: bool = False,
) -> None:
    """Take in the next StepInput, which must fit the step's bucket. One launch, or two if it lies on the host.

    needs: bits of _core.Need that its rows may have. several: a row may have several samples, or one that appends
    nothing, also where the step has no more samples than rows.
    """
    slots = step.slots
    ring, words = source.inputs.shape
    if source.fetched is not None:
        grid = (triton.cdiv(words, _FETCH_WORDS),)
        _fetch[grid](
            source.inputs, source.state, source.fetched, words, RING=ring, CHUNK=_FETCH_WORDS, num_warps=4,
            **launch_options(pdl),
        )  # fmt: skip
    rows, tokens, lanes = step.num_rows, step.num_tokens, step.lane_slots
    entries = 0 if lanes is None else lanes.numel()
    _ingest[(rows + triton.cdiv(max(tokens, entries), _CHUNK),)](
        source.inputs if source.fetched is None else source.fetched,
        source.state,
        slots.block_tables,
        slots.last_token,
        slots.finished,
        slots.temperature,
        slots.top_p,
        slots.min_p,
        slots.top_k,
        slots.seed,
        slots.stops,
        slots.needs,
        slots.length,
        slots.draft_tokens,
        step.input_ids,
        step.positions,
        step.slot_mapping,
        step.token_slot,
        step.row_slot,
        step.row_query_start,
        step.row_query_len,
        step.row_context_len,
        step.sample_index,
        step.sample_slot,
        step.sample_position,
        step.sample_records,
        step.row_entries,
        step.input_ids if step.lane_slots is None else step.lane_slots,
        step.input_ids if step.lane_positions is None else step.lane_positions,
        slots.window_tables,
        step.window_slots,
        0 if slots.window_tables is None else slots.window_tables.stride(0),
        0 if step.window_slots is None else step.window_slots.stride(0),
        slots.block_tables.shape[1],
        words if source.fetched is None else 0,
        rows,
        tokens,
        step.num_samples,
        MULTI=several or step.num_samples > rows,
        DRAFTS=0 if slots.draft_tokens is None else slots.draft_tokens.shape[1],
        RECORDS=bool(needs & RECORD_NEEDS),
        ENTRIES=bool(needs & ENTRY_NEEDS),
        LANES=step.num_lanes,
        LANE_ENTRIES=entries,
        WINDOWS=step.num_window_groups,
        RING=ring,
        BLOCK_SIZE=block_size,
        CHUNK=_CHUNK,
        num_warps=4,
        **launch_options(pdl),
    )


def copy_blocks(source: StepSource, kv: Tensor) -> None:
    """Run the block copies of the next StepInput, which stays the next one.

    kv is [planes, num_blocks, ...]: a block is copied in every plane (layers times keys and values).
    """
    ring, words = source.inputs.shape
    block_words = kv[0, 0].nbytes // 4
    _copy_blocks[(64, len(kv))](
        source.inputs, source.state, kv.view(torch.int32), words, kv.shape[1], block_words, RING=ring, CHUNK=1024
    )


@kernel
def _fetch(inputs, state, fetched, words, RING: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    wait(PDL)
    source = inputs + (tl.load(state + 2) % RING) * words
    word = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    if tl.program_id(0) * CHUNK < _EAGER_WORDS:
        tl.store(fetched + word, tl.load(source + word, mask=word < words), mask=word < words)
    else:
        there = word < tl.load(source + TOTAL_WORDS)
        tl.store(fetched + word, tl.load(source + word, mask=there), mask=there)


@triton.jit
def _find_lanes(source):
    """The table of lanes of the StepInput."""
    words = HEADER_WORDS + tl.load(source + NUM_ROWS) * ROW_WORDS + tl.load(source + NUM_PROMPT_IDS)
    words += tl.load(source + NUM_COPIES) * COPY_WORDS + tl.load(source + NUM_SLOT_UPDATES) * UPDATE_WORDS
    return source + words + tl.load(source + NUM_DELTA_BLOCKS)


@triton.jit
def _take_lanes(
    source, i, first, last_token, input_ids, positions, slot_mapping, token_slot, lane_slots, lane_positions,
    LANES: tl.constexpr, LANE_ENTRIES: tl.constexpr,
):  # fmt: skip
    """Entries i of the table of lanes, and of the first stage the tokens too, from ``first`` on."""
    there = i < LANE_ENTRIES
    filled = i < tl.load(source + NUM_LANES) * tl.load(source + NUM_LANE_STAGES)
    entry = _find_lanes(source) + i * LANE_WORDS
    slot = tl.load(entry + LANE_SLOT, mask=there & filled, other=-1)
    position = tl.load(entry + LANE_POSITION, mask=slot >= 0, other=0)
    tl.store(lane_slots + i, slot, mask=there)
    tl.store(lane_positions + i, position, mask=there)
    begins = i < LANES
    given = tl.load(last_token + slot, mask=begins & (slot >= 0), other=0)
    tl.store(input_ids + first + i, given, mask=begins)
    tl.store(positions + first + i, position, mask=begins)
    tl.store(slot_mapping + first + i, -1, mask=begins)
    tl.store(token_slot + first + i, -1, mask=begins)


@kernel(do_not_specialize=["R", "T", "N"])  # one compilation for all buckets
def _ingest(
    source,
    state,
    block_tables,
    last_token,
    finished,
    temperature,
    top_p,
    min_p,
    top_k,
    seed,
    stops,
    needs,
    length,
    draft_tokens,
    input_ids,
    positions,
    slot_mapping,
    token_slot,
    row_slot,
    row_query_start,
    row_query_len,
    row_context_len,
    sample_index,
    sample_slot,
    sample_position,
    sample_records,
    row_entries,
    lane_slots,
    lane_positions,
    window_tables,
    window_slots,
    table_stride,
    slot_stride,
    max_blocks,
    stride,
    R,
    T,
    N,
    MULTI: tl.constexpr,
    DRAFTS: tl.constexpr,
    RECORDS: tl.constexpr,
    ENTRIES: tl.constexpr,
    LANES: tl.constexpr,
    LANE_ENTRIES: tl.constexpr,
    WINDOWS: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    pid = tl.program_id(0)
    next_step = tl.load(state + 2)
    source += next_step % RING * stride
    num_rows = tl.load(source + NUM_ROWS)
    num_tokens = tl.load(source + NUM_TOKENS)
    num_samples = tl.load(source + NUM_SAMPLES)
    offsets = tl.arange(0, CHUNK)
    # The last program to know which step this is may say which is next. All threads do: their loads wait for it.
    tl.debug_barrier()
    arrived = tl.atomic_add(state + 3 + offsets, tl.full([CHUNK], 1, tl.int64), mask=offsets == 0, sem="relaxed")

    if pid >= R:
        # Tokens and samples that the step does not use.
        token = (pid - R) * CHUNK + offsets
        unused = (token >= num_tokens) & (token < T - LANES)
        tl.store(input_ids + token, 0, mask=unused)
        tl.store(positions + token, 0, mask=unused)
        tl.store(slot_mapping + token, -1, mask=unused)
        tl.store(token_slot + token, -1, mask=unused)
        if WINDOWS > 0:
            clear_windows(window_slots, slot_stride, token, unused, WINDOWS)
        if MULTI:  # N is no more than T
            unused = (token >= num_samples) & (token < N)
            tl.store(sample_index + token, tl.zeros([CHUNK], tl.int64), mask=unused)
            tl.store(sample_slot + token, -1, mask=unused)
            tl.store(sample_position + token, 0, mask=unused)
            if RECORDS:
                tl.store(sample_records + 2 * token + 1, 0, mask=unused)
        if LANES > 0:
            _take_lanes(
                source, token, T - LANES, last_token, input_ids, positions, slot_mapping, token_slot, lane_slots,
                lane_positions, LANES, LANE_ENTRIES,
            )  # fmt: skip
    elif pid >= num_rows:
        tl.store(row_slot + pid, -1)
        tl.store(row_query_start + pid, 0)
        tl.store(row_query_len + pid, 0)
        tl.store(row_context_len + pid, 0)
        if ENTRIES:
            tl.store(row_entries + 2 * pid + 1, 0)
    else:
        row = source + HEADER_WORDS + pid * ROW_WORDS
        slot = tl.load(row + ROW_SLOT)
        query_start = tl.load(row + ROW_QUERY_START)
        query_len = tl.load(row + ROW_QUERY_LEN)
        context_len = tl.load(row + ROW_CONTEXT_LEN)
        flags = tl.load(row + ROW_FLAGS)
        prompt_start = tl.load(row + ROW_PROMPT_START)
        sample_row = tl.load(row + ROW_SAMPLE_ROW)
        update = tl.load(row + ROW_UPDATE)
        delta_first = tl.load(row + ROW_DELTA_FIRST)
        delta_count = tl.load(row + ROW_DELTA_COUNT)
        delta_offset = tl.load(row + ROW_DELTA_OFFSET)

        prompt_ids = source + HEADER_WORDS + num_rows * ROW_WORDS
        updates = prompt_ids + tl.load(source + NUM_PROMPT_IDS) + COPY_WORDS * tl.load(source + NUM_COPIES)
        delta_blocks = updates + tl.load(source + NUM_SLOT_UPDATES) * UPDATE_WORDS + delta_offset
        table = block_tables + slot.to(tl.int64) * max_blocks

        # A sequence that met a stop token keeps its row until the host has heard of it; the row does nothing.
        from_device = (flags & FROM_DEVICE) != 0
        inert = from_device & (tl.load(finished + slot) != 0)
        tl.store(finished + slot, 0, mask=from_device == 0)  # of a sequence that begins, or goes on with its mask

        if update >= 0:
            changed = updates + update * UPDATE_WORDS
            tl.store(temperature + slot, tl.load(changed + UPDATE_TEMPERATURE).to(tl.float32, bitcast=True))
            tl.store(top_p + slot, tl.load(changed + UPDATE_TOP_P).to(tl.float32, bitcast=True))
            tl.store(min_p + slot, tl.load(changed + UPDATE_MIN_P).to(tl.float32, bitcast=True))
            tl.store(top_k + slot, tl.load(changed + UPDATE_TOP_K))
            low = tl.load(changed + UPDATE_SEED).to(tl.int64) & 0xFFFFFFFF
            tl.store(seed + slot, (tl.load(changed + UPDATE_SEED + 1).to(tl.int64) << 32) | low)
            stop = tl.arange(0, _MAX_STOPS)
            tl.store(stops + slot * _MAX_STOPS + stop, tl.load(changed + UPDATE_STOPS + stop))
            tl.store(needs + slot, tl.load(changed + UPDATE_NEEDS))
            if ENTRIES:
                tl.store(row_entries + 2 * pid, tl.load(changed + UPDATE_ENTRIES))
                tl.store(row_entries + 2 * pid + 1, tl.load(changed + UPDATE_ENTRY_WORDS))
        elif ENTRIES:
            tl.store(row_entries + 2 * pid + 1, 0)

        if DRAFTS > 0:
            # The slot's context is known here alone; a prompt's end is where it begins to be.
            is_behind = (flags & DEVICE_LENGTH) != 0
            known = tl.load(length + slot, mask=is_behind & from_device, other=0)
            context_len = tl.where(is_behind & from_device, known, context_len)
            tl.store(length + slot, context_len + query_len, mask=is_behind & (from_device == 0))

        take_blocks(table, delta_blocks, delta_first, delta_count, CHUNK)

        num_own = query_len  # tokens that are the row's
        if LANES > 0:
            is_lane = (flags & LANE) != 0  # whose token the table of lanes brings
            query_start = tl.where(is_lane, T - LANES + query_start, query_start)
            num_own = tl.where(is_lane, 0, query_len)

        last = tl.load(last_token + slot)
        for start in range(0, num_own, CHUNK):
            i = start + offsets
            valid = i < num_own
            position = context_len + i
            kv_slot = find_slots(table, delta_blocks, delta_first, delta_count, position, valid, BLOCK_SIZE)
            prompt = tl.load(prompt_ids + prompt_start + i, mask=valid & (from_device == 0), other=0)
            token = query_start + i
            given = last
            if DRAFTS > 0:
                draft = tl.load(draft_tokens + slot * DRAFTS + i - 1, mask=valid & from_device & (i > 0), other=0)
                given = tl.where(i > 0, draft, last)
            tl.store(input_ids + token, tl.where(from_device, given, prompt), mask=valid)
            tl.store(positions + token, position, mask=valid)
            tl.store(slot_mapping + token, tl.where(inert, -1, kv_slot), mask=valid)
            tl.store(token_slot + token, tl.where(inert, -1, slot), mask=valid)

        if WINDOWS > 0:
            take_windows(
                window_tables + slot.to(tl.int64) * max_blocks, table_stride, window_slots + query_start, slot_stride,
                delta_blocks, delta_first, delta_count, context_len, num_own, inert, WINDOWS, BLOCK_SIZE, CHUNK,
            )  # fmt: skip

        tl.store(row_slot + pid, slot)
        tl.store(row_query_start + pid, query_start)
        tl.store(row_query_len + pid, tl.where(inert, 0, num_own))
        tl.store(row_context_len + pid, context_len)
        if MULTI:
            row_samples = tl.load(row + ROW_NUM_SAMPLES)
            first = row_samples - tl.load(row + ROW_NUM_APPENDS)
            for start in range(0, row_samples, CHUNK):
                i = start + offsets
                valid = i < row_samples
                end = query_len - row_samples + i
                tl.store(sample_index + sample_row + i, (query_start + end).to(tl.int64), mask=valid)
                tl.store(sample_slot + sample_row + i, tl.where(i < first, -2 - slot, slot), mask=valid)
                tl.store(sample_position + sample_row + i, context_len + end + 1, mask=valid)
                if RECORDS:
                    words = tl.load(row + ROW_RESULT_WORDS)
                    place = sample_records + 2 * (sample_row + i)
                    tl.store(place, tl.load(row + ROW_RESULT_OFFSET) + i * words, mask=valid)
                    tl.store(place + 1, tl.where(valid, words, 0), mask=valid)
        elif sample_row >= 0:
            if RECORDS:
                tl.store(sample_records + 2 * sample_row, tl.load(row + ROW_RESULT_OFFSET))
                tl.store(sample_records + 2 * sample_row + 1, tl.load(row + ROW_RESULT_WORDS))
            tl.store(sample_index + sample_row, (query_start + query_len - 1).to(tl.int64))
            tl.store(sample_slot + sample_row, slot)
            tl.store(sample_position + sample_row, context_len + query_len)

    if (pid < R) & (pid >= num_samples) & (MULTI == 0):  # place pid of the samples is no row's
        tl.store(sample_index + pid, tl.zeros((), tl.int64))
        tl.store(sample_slot + pid, -1)
        tl.store(sample_position + pid, 0)
        if RECORDS:
            tl.store(sample_records + 2 * pid + 1, 0)

    if pid == 0:
        low = tl.load(source + STEP).to(tl.int64) & 0xFFFFFFFF
        tl.store(state, (tl.load(source + STEP + 1).to(tl.int64) << 32) | low)
        tl.store(state + 1, next_step % RING)
    if tl.max(tl.where(offsets == 0, arrived, 0), 0) == tl.num_programs(0) - 1:
        tl.store(state + 2, next_step + 1)
        tl.store(state + 3, tl.zeros((), tl.int64))


@kernel(do_not_specialize=["num_blocks"])  # compiled before it is known
def _copy_blocks(inputs, state, kv, words, num_blocks, block_words, RING: tl.constexpr, CHUNK: tl.constexpr):
    source = inputs + (tl.load(state + 2) % RING) * words
    copies = source + HEADER_WORDS + tl.load(source + NUM_ROWS) * ROW_WORDS + tl.load(source + NUM_PROMPT_IDS)
    plane = kv + tl.program_id(1).to(tl.int64) * num_blocks * block_words
    for copy in range(tl.program_id(0), tl.load(source + NUM_COPIES), tl.num_programs(0)):
        origin = plane + tl.load(copies + COPY_WORDS * copy + COPY_SOURCE).to(tl.int64) * block_words
        target = plane + tl.load(copies + COPY_WORDS * copy + COPY_TARGET).to(tl.int64) * block_words
        for start in range(0, block_words, CHUNK):
            word = start + tl.arange(0, CHUNK)
            tl.store(target + word, tl.load(origin + word, mask=word < block_words), mask=word < block_words)
