#include "step_loop/slot_state.h"

#include <algorithm>

namespace asyncengine {

SlotState::SlotState(const StepLimits& limits, int32_t max_blocks, int32_t block_size)
    : max_blocks_(max_blocks),
      block_size_(block_size),
      last_token_(static_cast<size_t>(limits.max_rows), -1),
      tables_(static_cast<size_t>(limits.max_rows) * static_cast<size_t>(max_blocks), -1),
      sampling_(static_cast<size_t>(limits.max_rows)) {
  const auto tokens = static_cast<size_t>(limits.max_tokens), rows = static_cast<size_t>(limits.max_rows);
  batch_.input_ids.reserve(tokens);
  batch_.positions.reserve(tokens);
  batch_.slot_mapping.reserve(tokens);
  batch_.query_start.reserve(rows + 1);
  batch_.context_len.reserve(rows);
  batch_.block_tables.reserve(rows);
  batch_.sample_index.reserve(rows);
  batch_.sample_position.reserve(rows);
  batch_.sample_state.reserve(rows);
}

StepBatch& SlotState::ingest(const StepInputView& input) {
  for (const SlotUpdate& u : input.slot_updates()) {
    sampling_[static_cast<size_t>(u.slot)] = {u.temperature, u.top_p, u.min_p, u.top_k,
                                              uint64_t{u.seed_high} << 32 | u.seed_low};
  }

  const auto rows = input.rows();
  StepBatch& b = batch_;
  b.num_rows = static_cast<int32_t>(rows.size());
  b.num_tokens = input.header().num_tokens;
  b.num_samples = input.header().num_samples;
  b.input_ids.clear();
  b.positions.clear();
  b.slot_mapping.clear();
  b.query_start.assign(1, 0);
  b.context_len.clear();
  b.block_tables.clear();
  b.sample_index.clear();
  b.sample_position.clear();
  b.sample_state.clear();
  for (const StepInputRow& row : rows) {
    int32_t* blocks = table(row.slot);
    std::ranges::copy(input.delta_blocks(row), blocks + row.delta_first);
    for (int32_t i = 0; i < row.query_len; ++i) {
      const int32_t position = row.context_len + i;
      // A negative token says that the logits were not finite. The rows launched meanwhile are surplus, but they run.
      b.input_ids.push_back(row.flags & kRowFromDevice ? std::max(0, last_token_[static_cast<size_t>(row.slot)])
                                                       : input.prompt_ids()[static_cast<size_t>(row.prompt_start + i)]);
      b.positions.push_back(position);
      b.slot_mapping.push_back(int64_t{blocks[position / block_size_]} * block_size_ + position % block_size_);
    }
    const int32_t end = row.query_start + row.query_len;
    b.query_start.push_back(end);
    b.context_len.push_back(row.context_len);
    b.block_tables.push_back(blocks);
    if (row.flags & kRowSample) {
      b.sample_index.push_back(end - 1);
      b.sample_position.push_back(row.context_len + row.query_len);
      b.sample_state.push_back(&sampling_[static_cast<size_t>(row.slot)]);
    }
  }
  return b;
}

void SlotState::remember(const StepInputView& input, const int32_t* tokens) {
  for (const StepInputRow& row : input.rows()) {
    if (row.sample_row >= 0) last_token_[static_cast<size_t>(row.slot)] = tokens[row.sample_row];
  }
}

}  // namespace asyncengine
