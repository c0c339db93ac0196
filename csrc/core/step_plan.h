// The work of one step: the scheduler's decision, before it becomes bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "core/hybrid/host_rows.h"
#include "core/sequence.h"

namespace asyncengine {

struct PlanRow {
  Sequence* sequence = nullptr;
  int32_t slot = -1;
  int32_t query_len = 0;
  int32_t context_len = 0;   // tokens whose KV precedes the query, at most: the device may know of fewer
  int32_t num_samples = 0;   // of its last tokens; where the query reaches the end of what is known, one at least
  int32_t result_offset = 0; // of its records, if its sequence wants some
  int8_t num_appends = 0;    // the last so many samples may give a token each: placeholders until commit
  bool from_device = false;  // its tokens are on the device: last_token[slot], then drafts
  bool extras : 1 = false;   // its sequence has RequestExtras
  // A decode row of one token that samples one and appends it, without extras and on the device, where the executor knows all of its
  // block table: most rows of most steps. The planner, the packer and the commit have a short loop for these.
  bool plain : 1 = false;
  int8_t host_place = -1;  // among the step's tokens of host rows, of a host row that ends a token: kRowOnHost

  // It was launched behind a row that found no mask: what it wrote is of a token that there never was.
  bool came_to_nothing(uint64_t step) const { return extras && step <= sequence->frozen_until; }
};
static_assert(sizeof(PlanRow) == 32);

struct BlockCopy {
  int32_t source = -1, target = -1;
};

// A snapshot of a slot's state as it was when so many tokens were computed, which whole blocks hold.
struct SavedState {
  int32_t slot = -1, state = -1;
  int32_t position = 0;
  uint64_t chain = 0;  // of a sequence that gave way: it leads to what was computed, and the slot is another's by now
};

// Reused from step to step; its vectors are reserved once.
struct StepPlan {
  uint64_t step = 0;
  std::vector<PlanRow> rows;  // decode rows first
  std::vector<BlockCopy> copies;  // run, in any order, before the forward pass reads or writes any KV
  std::vector<BlockCopy> state_copies;  // of state slots, run as those of blocks; a slot without a source becomes zeros
  std::vector<SavedState> saved_states;  // those of them that write snapshots
  std::vector<uint64_t> spent_states;  // chains of states that its sequences begin with, and nobody again
  std::vector<int32_t> filled_slots;  // slots whose sampling state the executor needs
  std::vector<int32_t> full_rows;  // rows, as indices, that may complete a block
  std::vector<int32_t> held_blocks;  // replaced by copies, or seen no more: kept from reuse until the step has retired
  int32_t blocks_coming = 0;  // of these, those that nobody else held
  int32_t num_tokens = 0;
  int32_t num_decode_rows = 0;
  int32_t num_samples = 0;
  int32_t num_scored = 0;  // samples that may not append a token
  int32_t num_result_words = 0;
  int32_t num_update_words = 0;
  Needs needs = 0;  // of the sampled rows, and of those with entries
  int32_t num_delta_blocks = 0;  // block-table entries of its rows that the executor has not seen
  int64_t attended = 0;  // pairs of a token and one that it may attend to, or a few more
  int64_t decode_attended = 0;  // those of decode rows
  double chunks_ns = 0;  // where costs are known: what attention of chunks takes
  int64_t predicted_ns = 0;  // and all of the step
  HostRowsPlan host_rows;

  bool empty() const { return rows.empty() && host_rows.entries.empty(); }
  bool has_chunks() const { return num_decode_rows + host_rows.num_rows < static_cast<int32_t>(rows.size()); }
  void reserve(int32_t max_rows, size_t host_entries = 0) {
    const auto count = static_cast<size_t>(max_rows);
    rows.reserve(count);
    copies.reserve(count);
    host_rows.entries.reserve(host_entries);
    for (auto* list : {&filled_slots, &full_rows, &held_blocks}) list->reserve(count);
  }
  void clear() {
    rows.clear();
    copies.clear();
    state_copies.clear();
    saved_states.clear();
    spent_states.clear();
    filled_slots.clear();
    full_rows.clear();
    held_blocks.clear();
    host_rows.clear();
    num_tokens = num_decode_rows = num_samples = num_scored = num_delta_blocks = 0;
    num_result_words = num_update_words = blocks_coming = 0;
    attended = decode_attended = predicted_ns = 0;
    chunks_ns = 0;
    needs = 0;
  }
};

}  // namespace asyncengine
