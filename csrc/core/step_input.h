// StepInput: a step as one contiguous buffer of 32-bit words, and a view that reads it.
//
//   header | rows | prompt token ids | block copies | slot updates | delta blocks | host rows | entries | state copies
//
// One buffer means one copy to a device. Everything else a step needs (last tokens, block tables, sampling state)
// already lives with the executor, one row per slot. A row names all that concerns its slot, so that a device can take
// in every row independently of the others. What a slot's new sequence brings beside the fixed part of its SlotUpdate is a
// chain of typed entries, as records are in step_output.h; a step has room for StepLimits::max_update_words of them.
// asyncengine/kernels/cuda/step/ingest.py reads the same layout.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/hybrid/host_rows.h"
#include "core/step_output.h"
#include "core/step_plan.h"

namespace asyncengine {

struct StepInputHeader {
  uint32_t magic;
  uint32_t total_words;
  uint64_t step;
  int32_t num_rows, num_decode_rows, num_tokens, num_samples;
  int32_t num_prompt_ids, num_copies, num_slot_updates, num_delta_blocks;
  uint32_t needs;       // of the sampled rows, and of those with entries; kNeedMean of any row
  int32_t max_context;  // the largest context_len of a row
  int32_t num_heads;    // samples that may append a token: the others have no head word
  int32_t num_result_words;
  HostRowsHeader host_rows;
  int32_t num_state_copies;  // of state slots, run before the forward; one without a source makes its target zeros
};
static_assert(sizeof(StepInputHeader) == 80);

enum RowFlags : int32_t {
  kRowFromDevice = 1,    // its first token is last_token[slot], the others draft_tokens[slot]
  // The device keeps length[slot], the tokens of KV before the slot's next row. A row with its tokens from the device
  // begins there, and context_len is an upper bound. A row that ends a prompt sets it.
  kRowDeviceLength = 2,
  // The row is a host row's that ends a token: query_start is its place among the tokens of host rows, context_len the position
  // of its token, query_len 1, and it has one sample, which appends. Nothing attends for it and nothing is stored. At other
  // stages a host row has no row here, but a HostRowEntry (at stage 0 its token is last_token[slot]). It counts in neither
  // num_tokens nor num_decode_rows.
  kRowOnHost = 4,
};

struct StepInputRow {
  int32_t slot;
  int32_t query_start;  // first token of the row among the step's tokens
  int32_t query_len;
  int32_t context_len;
  int32_t flags;
  int32_t prompt_start;  // first of query_len prompt token ids; unused with kRowFromDevice
  int32_t sample_row;    // place of its first sample in the step's output, or -1
  int32_t update;        // the slot update of a newly filled slot, or -1
  // Entries [delta_first, delta_first + delta_count) of the slot's block table become delta_blocks[delta_offset ...]. The same
  // entries of the table of each window group follow, delta_count a group.
  int32_t delta_first, delta_count, delta_offset;
  int32_t num_samples;    // of its last tokens
  int32_t num_appends;    // the last so many samples may append a token each to the sequence
  int32_t result_offset;  // the region of its first sample in the record section; the others follow
  int32_t result_words;   // words of each region; 0: no records are wanted
  int32_t unused;
};
static_assert(sizeof(StepInputRow) == 64);

enum EntryKind : uint32_t {
  kTokenHistory = 1,   // prompt and output so far; SlotParameters::prompt_len says where the output begins
  kBias = 2,           // pairs: token, bits of what is added to its logit; no token twice
  kBannedWords = 3,    // of each word its length, then its tokens
  kGrammar = 4,
  kAdapter = 5,        // number of the weights' adapter, at least 1
  kParameters = 6,     // SlotParameters
  kEndTokens = 7,      // tokens that may not come among the first min_tokens of the output
  kAllowedTokens = 8,  // a bit per token of the vocabulary, 32 a word from the lowest
  kNamedTokens = 9,    // tokens whose log probabilities are wanted
};

// Sampling parameters beyond SamplingState: the payload of a kParameters entry.
struct SlotParameters {
  float presence_penalty = 0.f, frequency_penalty = 0.f, repetition_penalty = 1.f;
  int32_t prompt_len = 0;
  int32_t min_tokens = 0;
  int32_t no_repeat_ngram = 0;   // 0: none
  int32_t top_logprobs = -1;     // how many beside the chosen one; -1: no log probabilities
  int32_t flags = 0;             // ParameterFlags
};
static_assert(sizeof(SlotParameters) == 32);

enum ParameterFlags : int32_t {
  kProcessedLogprobs = 1,  // of the logits after penalties, biases and masks, over the temperature
  kScoreOnly = 2,          // the prompt is scored: its last sample gives no token
};

struct SlotUpdate {
  int32_t slot;
  float temperature, top_p, min_p;
  int32_t top_k;
  uint32_t seed_low, seed_high;
  uint32_t needs;
  int32_t stops[Sequence::kInlineStops];  // -1: none; a request may have more, which the host checks alone
  int32_t entries, entry_words;           // words [entries, entries + entry_words) of the StepInput
};
static_assert(sizeof(SlotUpdate) == 56);

// The largest StepInput that a configuration can produce.
struct StepLimits {
  int32_t max_rows = 0;
  int32_t max_tokens = 0;
  int32_t max_delta_blocks = 0;
  int32_t max_samples = 0;  // 0: one a row
  int32_t max_update_words = 0;
  int32_t max_result_words = 0;
  int32_t mask_words = 0;  // of a row of the MaskBoard; 0: there is none
  HostRowsLimits host_rows = {};
  int32_t max_state_copies = 0;
  int32_t window_groups = 0;  // SchedulerConfig::window_groups

  int32_t samples() const { return max_samples > max_rows ? max_samples : max_rows; }
  // Beyond the first token of a row that decodes.
  int32_t max_drafts() const { return samples() / max_rows - 1; }
  size_t output_words() const { return static_cast<size_t>(samples()) + static_cast<size_t>(max_result_words); }
  size_t max_bytes() const {
    const auto rows = static_cast<size_t>(max_rows);
    const size_t copies = rows * static_cast<size_t>(1 + window_groups);
    return sizeof(StepInputHeader) + rows * (sizeof(StepInputRow) + sizeof(SlotUpdate)) + copies * sizeof(BlockCopy) +
           (static_cast<size_t>(max_tokens) + static_cast<size_t>(max_delta_blocks) + static_cast<size_t>(max_update_words)) *
               sizeof(int32_t) +
           static_cast<size_t>(max_state_copies) * sizeof(BlockCopy) + host_rows.num_entries() * sizeof(HostRowEntry);
  }
};

class StepInputView {
 public:
  static constexpr uint32_t kMagic = 0x53744934;  // "StI4"

  explicit StepInputView(const std::byte* bytes) : bytes_(bytes) {}
  const StepInputHeader& header() const { return *reinterpret_cast<const StepInputHeader*>(bytes_); }

  std::span<const StepInputRow> rows() const { return section<StepInputRow>(sizeof(StepInputHeader), header().num_rows); }
  std::span<const int32_t> prompt_ids() const { return section<int32_t>(end(rows()), header().num_prompt_ids); }
  std::span<const BlockCopy> copies() const { return section<BlockCopy>(end(prompt_ids()), header().num_copies); }
  std::span<const SlotUpdate> slot_updates() const { return section<SlotUpdate>(end(copies()), header().num_slot_updates); }
  std::span<const int32_t> delta_blocks() const { return section<int32_t>(end(slot_updates()), header().num_delta_blocks); }
  std::span<const int32_t> delta_blocks(const StepInputRow& row) const {
    return delta_blocks().subspan(static_cast<size_t>(row.delta_offset), static_cast<size_t>(row.delta_count));
  }
  std::span<const int32_t> window_blocks(const StepInputRow& row, int32_t group) const {
    const int32_t first = row.delta_offset + (1 + group) * row.delta_count;
    return delta_blocks().subspan(static_cast<size_t>(first), static_cast<size_t>(row.delta_count));
  }
  std::span<const HostRowEntry> host_rows() const {
    return section<HostRowEntry>(end(delta_blocks()), header().host_rows.num_entries());
  }
  std::span<const BlockCopy> state_copies() const {
    const auto count = static_cast<size_t>(header().num_state_copies);
    return section<BlockCopy>(header().total_words * sizeof(int32_t) - count * sizeof(BlockCopy), header().num_state_copies);
  }
  // A state is copied. Those without a source do not count: a device takes the state before a sequence's first token for zeros.
  bool copies_states() const {
    return std::ranges::any_of(state_copies(), [](const BlockCopy& copy) { return copy.source >= 0; });
  }
  std::span<const int32_t> entries(const SlotUpdate& update) const {
    return section<int32_t>(static_cast<size_t>(update.entries) * sizeof(int32_t), update.entry_words);
  }

 private:
  template <typename T>
  std::span<const T> section(size_t offset, int32_t count) const {
    return {reinterpret_cast<const T*>(bytes_ + offset), static_cast<size_t>(count)};
  }
  template <typename T>
  size_t end(std::span<const T> part) const {
    return static_cast<size_t>(reinterpret_cast<const std::byte*>(part.data() + part.size()) - bytes_);
  }
  const std::byte* bytes_;
};

}  // namespace asyncengine
