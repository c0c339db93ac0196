// What one step runs: the scheduler's decision, before it becomes bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "core/sequence.h"

namespace asyncengine {

struct PlanRow {
  Sequence* sequence = nullptr;
  int32_t slot = -1;
  int32_t query_len = 0;
  int32_t context_len = 0;   // tokens whose KV precedes the query
  bool sample = false;       // the query reaches the end of what is known: sample the next token
  bool from_device = false;  // the single input token is last_token[slot]
};

struct BlockCopy {
  int32_t source = -1, target = -1;
};

// Reused from step to step; its vectors are reserved once.
struct StepPlan {
  uint64_t step = 0;
  std::vector<PlanRow> rows;          // decode rows first
  std::vector<BlockCopy> copies;      // run, in any order, before the forward pass reads or writes any KV
  std::vector<int32_t> filled_slots;  // slots whose sampling state the executor needs
  std::vector<int32_t> full_rows;     // rows, as indices, that may complete a block
  std::vector<int32_t> held_blocks;   // replaced by copies: kept from reuse until the step has retired
  int32_t num_tokens = 0;
  int32_t num_decode_rows = 0;
  int32_t num_samples = 0;
  Needs needs = 0;                    // of the sampled rows together
  int32_t num_delta_blocks = 0;       // block-table entries of its rows that the executor has not seen
  int64_t attended = 0;               // pairs of a token and one that it may attend to, or a few more

  bool empty() const { return rows.empty(); }
  void reserve(int32_t max_rows) {
    const auto count = static_cast<size_t>(max_rows);
    rows.reserve(count);
    copies.reserve(count);
    for (auto* list : {&filled_slots, &full_rows, &held_blocks}) list->reserve(count);
  }
  void clear() {
    rows.clear();
    copies.clear();
    filled_slots.clear();
    full_rows.clear();
    held_blocks.clear();
    num_tokens = num_decode_rows = num_samples = num_delta_blocks = 0;
    attended = 0;
    needs = 0;
  }
};

}  // namespace asyncengine
