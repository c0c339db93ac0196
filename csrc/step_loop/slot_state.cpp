#include "step_loop/slot_state.h"

#include <algorithm>

namespace asyncengine {

SlotState::SlotState(const StepLimits& limits, int32_t max_blocks, int32_t block_size, const MaskBoard& masks)
    : max_blocks_(max_blocks),
      block_size_(block_size),
      window_groups_(limits.window_groups),
      masks_(masks),
      max_drafts_(static_cast<size_t>(limits.max_drafts())),
      last_token_(static_cast<size_t>(limits.max_rows), -1),
      length_(max_drafts_ > 0 ? static_cast<size_t>(limits.max_rows) : 0, 0),
      drafts_(static_cast<size_t>(limits.max_rows) * max_drafts_, 0),
      tables_(static_cast<size_t>(limits.max_rows) * static_cast<size_t>(max_blocks), -1),
      window_tables_(static_cast<size_t>(limits.window_groups) * tables_.size(), -1),
      sampling_(static_cast<size_t>(limits.max_rows)),
      needs_(static_cast<size_t>(limits.max_rows), 0),
      adapters_(static_cast<size_t>(limits.max_rows), 0) {
  const auto tokens = static_cast<size_t>(limits.max_tokens), rows = static_cast<size_t>(limits.max_rows);
  const auto samples = static_cast<size_t>(limits.samples());
  batch_.input_ids.reserve(tokens);
  batch_.positions.reserve(tokens);
  batch_.slot_mapping.reserve(tokens);
  batch_.query_start.reserve(rows + 1);
  batch_.context_len.reserve(rows);
  batch_.slots.reserve(rows);
  batch_.block_tables.reserve(rows);
  batch_.window_tables.reserve(static_cast<size_t>(window_groups_) * rows);
  batch_.window_slots.reserve(static_cast<size_t>(window_groups_) * tokens);
  batch_.adapters.reserve(rows);
  batch_.sample_index.reserve(samples);
  batch_.samples.reserve(samples);
  batch_.means.reserve(rows);
  batch_.entries.reserve(rows);
}

StepBatch& SlotState::ingest(const StepInputView& input, std::span<int32_t> records) {
  StepBatch& b = batch_;
  b.entries.clear();
  for (const SlotUpdate& u : input.slot_updates()) {
    sampling_[static_cast<size_t>(u.slot)] = {u.temperature, u.top_p, u.min_p, u.top_k, uint64_t{u.seed_high} << 32 | u.seed_low};
    needs_[static_cast<size_t>(u.slot)] = u.needs;
    const std::span<const int32_t> entries = input.entries(u);
    if (!entries.empty() || has_adapters_) take_adapter(u.slot, entries);
    if (!entries.empty()) b.entries.push_back({u.slot, entries});
  }
  std::ranges::fill(records.first(std::min(records.size(), static_cast<size_t>(input.header().num_result_words))), 0);

  b.num_rows = input.header().num_rows - input.header().host_rows.num_rows;
  b.num_tokens = input.header().num_tokens + input.header().host_rows.num_tokens();
  b.num_samples = input.header().num_samples;
  b.needs = input.header().needs;
  b.input_ids.clear();
  b.positions.clear();
  b.slot_mapping.clear();
  b.query_start.assign(1, 0);
  b.context_len.clear();
  b.slots.clear();
  b.block_tables.clear();
  b.window_groups = window_groups_;
  b.window_tables.resize(static_cast<size_t>(window_groups_ * b.num_rows));
  b.window_slots.resize(static_cast<size_t>(window_groups_ * b.num_tokens));
  b.adapters.clear();
  b.sample_index.clear();
  b.samples.clear();
  b.means.clear();
  for (const StepInputRow& row : input.rows()) {
    if ((row.flags & kRowOnHost) == 0) add_row(input, row);
    add_samples(input, row, records);
  }
  add_host_rows(input);
  return b;
}

void SlotState::take_adapter(int32_t slot, std::span<const int32_t> entries) {
  int32_t& adapter = adapters_[static_cast<size_t>(slot)] = 0;
  for_each_entry(entries, [&](uint32_t kind, std::span<const int32_t> words) {
    if (kind == kAdapter && !words.empty()) adapter = words[0];
  });
  has_adapters_ |= adapter != 0;
}

// Tokens that rows on the host share. Which row has which token changes from layer to layer, and with it the position.
void SlotState::add_host_rows(const StepInputView& input) {
  StepBatch& b = batch_;
  b.num_host_tokens = input.header().host_rows.num_tokens();
  b.host_rows = input.host_rows();
  b.step = input.header().step;
  for (const HostRowEntry& entry : b.host_rows.first(static_cast<size_t>(b.num_host_tokens))) {
    b.input_ids.push_back(entry.slot < 0 ? 0 : std::max(0, last_token_[static_cast<size_t>(entry.slot)]));
    b.positions.push_back(entry.position);
    b.slot_mapping.push_back(-1);
  }
}

int32_t SlotState::context_of(const StepInputRow& row) const {
  constexpr int32_t kBoth = kRowFromDevice | kRowDeviceLength;
  return (row.flags & kBoth) == kBoth ? length_[static_cast<size_t>(row.slot)] : row.context_len;
}

void SlotState::add_row(const StepInputView& input, const StepInputRow& row) {
  StepBatch& b = batch_;
  const auto slot = static_cast<size_t>(row.slot);
  const bool from_device = (row.flags & kRowFromDevice) != 0;
  const int32_t context = context_of(row);
  if (!from_device && (row.flags & kRowDeviceLength) != 0) length_[slot] = context + row.query_len;
  int32_t* blocks = table(row.slot);
  std::ranges::copy(input.delta_blocks(row), blocks + row.delta_first);
  const size_t first_token = b.positions.size();
  for (int32_t i = 0; i < row.query_len; ++i) {
    const int32_t position = context + i;
    if (from_device) {
      // A negative token says that the logits were not finite. The rows launched meanwhile are surplus, but they run.
      b.input_ids.push_back(std::max(0, i == 0 ? last_token_[slot] : drafts(row.slot)[static_cast<size_t>(i - 1)]));
    } else {
      b.input_ids.push_back(input.prompt_ids()[static_cast<size_t>(row.prompt_start + i)]);
    }
    b.positions.push_back(position);
    b.slot_mapping.push_back(int64_t{blocks[position / block_size_]} * block_size_ + position % block_size_);
  }
  if (window_groups_ > 0) add_windows(input, row, first_token);
  b.query_start.push_back(row.query_start + row.query_len);
  if ((needs_[slot] & kNeedMean) != 0) {
    b.needs |= kNeedMean;
    b.means.push_back({static_cast<int32_t>(b.context_len.size()), row.slot, row.num_samples > 0 ? row.sample_row : -1});
  }
  b.context_len.push_back(context);
  b.slots.push_back(row.slot);
  b.block_tables.push_back(blocks);
  if (has_adapters_) b.adapters.push_back(adapters_[slot]);
}

// The tables of window groups, and the slots of the row's tokens in them. The first is at `first_token` of the step.
void SlotState::add_windows(const StepInputView& input, const StepInputRow& row, size_t first_token) {
  StepBatch& b = batch_;
  const size_t r = b.block_tables.size();
  for (int32_t group = 0; group < window_groups_; ++group) {
    int32_t* blocks = window_table(group, row.slot);
    std::ranges::copy(input.window_blocks(row, group), blocks + row.delta_first);
    b.window_tables[static_cast<size_t>(group * b.num_rows) + r] = blocks;
    int64_t* slots = b.window_slots.data() + int64_t{group} * b.num_tokens;
    for (size_t i = first_token; i < b.positions.size(); ++i) {
      const int64_t position = b.positions[i];
      slots[i] = int64_t{blocks[position / block_size_]} * block_size_ + position % block_size_;
    }
  }
}

void SlotState::add_samples(const StepInputView& input, const StepInputRow& row, std::span<int32_t> records) {
  StepBatch& b = batch_;
  const auto slot = static_cast<size_t>(row.slot);
  const int32_t context = context_of(row);
  const int32_t first_token = row.query_start + ((row.flags & kRowOnHost) != 0 ? input.header().num_tokens : 0);
  const int32_t end = first_token + row.query_len;
  for (int32_t i = 0; i < row.num_samples; ++i) {
    const int32_t back = row.num_samples - i;
    b.sample_index.push_back(end - back);
    b.samples.push_back({
        .position = context + row.query_len - back + 1,
        .state = &sampling_[slot],
        .records = records.empty() ? records
                                   : records.subspan(static_cast<size_t>(row.result_offset + i * row.result_words),
                                                     static_cast<size_t>(row.result_words)),
        .slot = row.slot,
        .needs = needs_[slot],
        .mask = (needs_[slot] & kNeedMask) != 0 ? masks_.row(row.slot) : nullptr,
        .appends = back <= row.num_appends,
    });
  }
}

void SlotState::remember(const StepInputView& input, const int32_t* tokens) {
  for (const StepInputRow& row : input.rows()) {
    if (row.num_appends == 0) continue;
    const auto slot = static_cast<size_t>(row.slot);
    const int32_t first = row.sample_row + row.num_samples - row.num_appends;
    int32_t appended = 1;  // if there is none, the first head says why
    while (appended < row.num_appends && tokens[first + appended] >= 0) ++appended;
    last_token_[slot] = tokens[first + appended - 1];
    if ((row.flags & kRowFromDevice) && (row.flags & kRowDeviceLength)) length_[slot] += appended;
  }
}

}  // namespace asyncengine
