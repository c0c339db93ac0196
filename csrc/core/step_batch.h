// A step as a host executor sees it: flat arrays derived from a StepInput and the executor's per-slot state.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/hybrid/host_rows.h"
#include "core/record.h"

namespace asyncengine {

// Parts of the end of a step that a sampled row needs beside the greatest logit, one bit each. The graph of a step is chosen by
// the needs of its rows, and an executor says which of them it can serve.
enum Need : uint32_t {
  kNeedTemperature = 1,
  kNeedFilters = 2,  // top-k, top-p, min-p
  kNeedPenalties = 4,
  kNeedBias = 8,
  kNeedLogprobs = 16,
  kNeedMask = 32,
  kNeedDrafts = 64,   // several tokens a step, verified on the device
  kNeedVector = 128,  // a record of the hidden state
  // Beside kNeedVector: that of the whole prompt, of which no part may come from the prefix cache. Steps have it where a row
  // has it, sampled or not.
  kNeedMean = 256,
  kNeedLogits = 512,  // beside kNeedMask: a record of the logits where the mask is missing
};
using Needs = uint32_t;  // 0: argmax
constexpr Needs kSamplingNeeds = kNeedTemperature | kNeedFilters;  // every executor serves these
// Records are written for rows with one of these.
constexpr Needs kRecordNeeds = kNeedLogprobs | kNeedVector | kNeedLogits;

struct SamplingState {
#define RECORD SamplingState
#define FIELDS "core/sampling_state.inl"
#include "core/record.inl"

  // Without a temperature there is nothing to filter.
  Needs needs() const {
    if (temperature <= 0.f) return 0;
    return kNeedTemperature | (top_k > 0 || top_p < 1.f || min_p > 0.f ? kNeedFilters : 0u);
  }
};

// A token whose logits are wanted, and all that its slot and its row say of it.
struct Sample {
  int64_t position = 0;  // of the token being sampled: the generator's counter
  const SamplingState* state = nullptr;
  std::span<int32_t> records;  // where its records go; empty: none are wanted
  int32_t slot = -1;
  Needs needs = 0;       // of the slot
  int32_t* mask = nullptr;  // its slot's row of the MaskBoard, of a sequence with masks
  bool appends = true;   // the token to its sequence; false: it is a token of the prompt that is only scored
};

// Entries of a slot update (step_input.h), which begin a new life of the slot.
struct SlotEntries {
  int32_t slot = -1;
  std::span<const int32_t> words;  // of the StepInput: valid as long as that is
};

// A row whose prompt's states are summed up, from step to step.
struct MeanRow {
  int32_t row, slot;
  int32_t sample;  // the one that gives the mean, or -1: there is more of the prompt to come
};

struct StepBatch {
  int32_t num_tokens = 0;
  int32_t num_rows = 0;     // sequences in this step
  int32_t num_samples = 0;  // tokens whose logits are wanted
  Needs needs = 0;          // of the sampled rows, and of those with entries

  // One entry per token, in row order.
  std::vector<int64_t> input_ids;
  std::vector<int64_t> positions;
  std::vector<int64_t> slot_mapping;  // block * block_size + offset: where the token's KV is written

  // One entry per row; query tokens of row r are [query_start[r], query_start[r + 1]).
  std::vector<int32_t> query_start;          // num_rows + 1 entries
  std::vector<int32_t> context_len;          // tokens of KV that precede the query
  std::vector<int32_t> slots;                // where the row's sequence has its state
  std::vector<const int32_t*> block_tables;  // block ids of the row's sequence, by position / block_size
  // The tables and slots of layers in window groups: [group, row] and [group, token].
  int32_t window_groups = 0;
  std::vector<const int32_t*> window_tables;
  std::vector<int64_t> window_slots;
  std::vector<int32_t> adapters;             // of the row's sequence, 0: none; empty if no slot ever had one

  // One entry per sample.
  std::vector<int64_t> sample_index;  // token whose hidden state gives the logits
  std::vector<Sample> samples;

  // The last num_host_tokens of num_tokens are of host rows: no row holds them, and their slot_mapping is -1. Their positions
  // are those of the layer under way. The entries are [stages][num_host_tokens], in the StepInput.
  int32_t num_host_tokens = 0;
  std::span<const HostRowEntry> host_rows;
  uint64_t step = 0;

  std::vector<MeanRow> means;
  std::vector<SlotEntries> entries;  // of slots that are newly filled and have some

  // Tables of the group of a layer, one a row. Group 0 sees all; group g > 0 is window group g - 1. Throws std::out_of_range if
  // the batch has no such group: a layer of a model with groups would read beyond the tables.
  const int32_t* const* tables_of(int32_t group) const {
    check_group(group);
    return group == 0 ? block_tables.data() : window_tables.data() + static_cast<size_t>(group - 1) * static_cast<size_t>(num_rows);
  }
  // And the group's slots, one a token. Throws std::out_of_range likewise.
  const int64_t* slots_of(int32_t group) const {
    check_group(group);
    return group == 0 ? slot_mapping.data()
                      : window_slots.data() + static_cast<size_t>(group - 1) * static_cast<size_t>(num_tokens);
  }
  int32_t num_groups() const { return 1 + window_groups; }

 private:
  void check_group(int32_t group) const {
    if (group >= 0 && group < num_groups()) return;
    throw std::out_of_range("the step has block tables of " + std::to_string(num_groups()) + " groups of layers, none of group " +
                            std::to_string(group));
  }
};

// The row that has the token.
inline size_t row_of(const StepBatch& batch, int64_t token) {
  return static_cast<size_t>(std::ranges::upper_bound(batch.query_start, token) - batch.query_start.begin() - 1);
}

// The step of the sampled tokens alone, each a row of one token over keys and values that are in the cache. It has no samples
// to draw, and block tables of `batch`.
inline StepBatch only_sampled(const StepBatch& batch) {
  StepBatch out;
  out.num_tokens = out.num_rows = out.num_samples = batch.num_samples;
  out.needs = batch.needs;
  out.window_groups = batch.window_groups;
  out.query_start.push_back(0);
  for (int32_t group = 1; group < batch.num_groups(); ++group) {
    for (const int64_t index : batch.sample_index) {
      out.window_slots.push_back(batch.slots_of(group)[index]);
      out.window_tables.push_back(batch.tables_of(group)[row_of(batch, index)]);
    }
  }
  for (const int64_t index : batch.sample_index) {
    const auto token = static_cast<size_t>(index);
    const size_t row = row_of(batch, index);
    out.input_ids.push_back(batch.input_ids[token]);
    out.positions.push_back(batch.positions[token]);
    out.slot_mapping.push_back(batch.slot_mapping[token]);
    out.sample_index.push_back(out.query_start.back());
    out.query_start.push_back(out.query_start.back() + 1);
    out.context_len.push_back(static_cast<int32_t>(batch.positions[token]));
    out.slots.push_back(batch.slots[row]);
    out.block_tables.push_back(batch.block_tables[row]);
    if (!batch.adapters.empty()) out.adapters.push_back(batch.adapters[row]);
  }
  return out;
}

}  // namespace asyncengine
