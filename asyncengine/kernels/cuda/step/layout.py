"""The StepInput as kernels read it: csrc/core/step_input.h by name, in 32-bit words."""

from __future__ import annotations

import triton.language as tl

from asyncengine._core import STEP_INPUT_LAYOUT, Need

MAX_STOPS = STEP_INPUT_LAYOUT["max_stops"]
"""Stop tokens per slot that the device knows; more are checked at commit, by the host alone."""


def _word(name: str) -> tl.constexpr:
    return tl.constexpr(STEP_INPUT_LAYOUT[name])


HEADER_WORDS = _word("header_words")
TOTAL_WORDS = _word("header.total_words")
STEP = _word("header.step")
NUM_ROWS = _word("header.num_rows")
NUM_TOKENS = _word("header.num_tokens")
NUM_SAMPLES = _word("header.num_samples")
NUM_PROMPT_IDS = _word("header.num_prompt_ids")
NUM_COPIES = _word("header.num_copies")
NUM_SLOT_UPDATES = _word("header.num_slot_updates")
NUM_DELTA_BLOCKS = _word("header.num_delta_blocks")
NUM_LANES = _word("header.num_lanes")
NUM_LANE_STAGES = _word("header.num_lane_stages")
NUM_STATE_COPIES = _word("header.num_state_copies")

ROW_WORDS = _word("row_words")
ROW_SLOT = _word("row.slot")
ROW_QUERY_START = _word("row.query_start")
ROW_QUERY_LEN = _word("row.query_len")
ROW_CONTEXT_LEN = _word("row.context_len")
ROW_FLAGS = _word("row.flags")
ROW_PROMPT_START = _word("row.prompt_start")
ROW_SAMPLE_ROW = _word("row.sample_row")
ROW_UPDATE = _word("row.update")
ROW_DELTA_FIRST = _word("row.delta_first")
ROW_DELTA_COUNT = _word("row.delta_count")
ROW_DELTA_OFFSET = _word("row.delta_offset")
ROW_NUM_SAMPLES = _word("row.num_samples")
ROW_NUM_APPENDS = _word("row.num_appends")
ROW_RESULT_OFFSET = _word("row.result_offset")
ROW_RESULT_WORDS = _word("row.result_words")
FROM_DEVICE = _word("flag.from_device")
DEVICE_LENGTH = _word("flag.device_length")
LANE = _word("flag.lane")

LANE_WORDS = _word("lane_words")
LANE_SLOT = _word("lane.slot")
LANE_POSITION = _word("lane.position")

COPY_WORDS = _word("copy_words")
COPY_SOURCE = _word("copy.source")
COPY_TARGET = _word("copy.target")

UPDATE_WORDS = _word("update_words")
UPDATE_TEMPERATURE = _word("update.temperature")
UPDATE_TOP_P = _word("update.top_p")
UPDATE_MIN_P = _word("update.min_p")
UPDATE_TOP_K = _word("update.top_k")
UPDATE_SEED = _word("update.seed")
UPDATE_NEEDS = _word("update.needs")
UPDATE_STOPS = _word("update.stops")
UPDATE_ENTRIES = _word("update.entries")
UPDATE_ENTRY_WORDS = _word("update.entry_words")

RECORD_NEEDS = Need(STEP_INPUT_LAYOUT["record_needs"])
"""Rows with one of these needs may have records: ingest then says where those of each sample go."""
ENTRY_NEEDS = Need.penalties | Need.bias | Need.logprobs | Need.mask
"""Slots of rows with one of these needs may be filled with entries: ingest then says where those of each row lie."""
