// The settings of a scheduler, and the largest step that they allow.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/hybrid/hybrid_config.h"
#include "core/record.h"
#include "core/step_costs.h"
#include "core/step_input.h"

namespace asyncengine {

// The longest time of a step in which sequences decode, so that their tokens come evenly: chunks of prompts beside them are
// as large as that leaves time for. 0: as long as it takes.
using ClassTargets = std::vector<std::pair<int32_t, int64_t>>;

struct ItlTargets {
#define RECORD ItlTargets
#define FIELDS "core/itl_targets.inl"
#include "core/record.inl"

  bool any() const { return ns > 0 || !of_class.empty(); }
  int64_t of(int32_t priority) const {
    for (const auto& [named, its_ns] : of_class) {
      if (named == priority) return its_ns;
    }
    return ns;
  }
};

struct SchedulerConfig {
#define RECORD SchedulerConfig
#define FIELDS "core/scheduler_config.inl"
#include "core/record.inl"

  // The window behind which running sequences let go of blocks; 0: they keep all. Sequences that may move to the host keep
  // all: there their tables have no holes.
  int32_t window_of_blocks() const { return hybrid.any() ? 0 : window; }
  // Entries at the beginning of a sequence's block table that no later query sees, the first of which is at `position`. Blocks
  // that the prefix cache does not know yet are not among them, nor the last that it knows, which names the next.
  int32_t unseen_blocks(int32_t position, int32_t published_end) const {
    const int32_t seen = window_of_blocks();
    if (seen == 0 || position < seen) return 0;
    const int32_t unseen = (position - seen + 1) / block_size;
    return prefix_caching ? std::clamp(published_end / block_size - 1, 0, unseen) : unseen;
  }

  // The same of the tables of window groups. The full group's block names the next: the last that is known may go, too.
  int32_t unseen_in_groups(int32_t position, int32_t published_end) const {
    if (position < group_window) return 0;
    const int32_t unseen = (position - group_window + 1) / block_size;
    return prefix_caching ? std::min(unseen, published_end / block_size) : unseen;
  }
  // Tables that a sequence has.
  int32_t num_groups() const { return 1 + window_groups; }
  // Blocks that one window group holds at most of a sequence with so many entries: those of the window, of the largest chunk
  // behind it and of a chunk in flight.
  int32_t blocks_in_group(int32_t entries) const {
    return std::min(entries, blocks_for(int64_t{group_window} + 2 * max_num_batched_tokens) + 1);
  }
  // Blocks that must be there for a sequence of so many tokens.
  int32_t blocks_for_sequence(int32_t num_tokens) const {
    const int32_t blocks = blocks_for(num_tokens);
    return blocks + window_groups * blocks_in_group(blocks);
  }
  int32_t blocks_for(int64_t num_tokens) const { return static_cast<int32_t>((num_tokens + block_size - 1) / block_size); }

  // The most that a request may have as tokens_per_step: then every sequence may decode in one step. A slot has a byte for
  // all that kMostStepsInFlight may append.
  static constexpr int kMostStepsInFlight = 8, kMostStepTokens = 15;
  // Admission of long cached prefixes may fill this many block-table entries per step beside what running rows need.
  static constexpr int32_t kDeltaBlocksForPrefixes = 4096;
  int32_t max_step_tokens() const {
    return std::clamp(std::min(max_samples, max_num_batched_tokens) / max_num_seqs, 1, kMostStepTokens);
  }
  int32_t max_blocks_per_sequence() const { return (max_model_len + block_size - 1) / block_size; }
  int32_t max_delta_blocks() const {
    return num_groups() *
           (2 * max_num_seqs + max_num_batched_tokens / block_size + std::max(max_blocks_per_sequence(), kDeltaBlocksForPrefixes));
  }
  // Needs that sequences may have. A state cannot go back to an earlier token, as rows that find no mask and rejected drafts do.
  Needs needs() const { return num_state_slots > 0 ? ~(kNeedMask | kNeedDrafts) : ~Needs{0}; }
  StepLimits limits() const {
    return {max_num_seqs, max_num_batched_tokens, max_delta_blocks(),
            max_samples,  max_update_words,       max_result_words,
            mask_words,   hybrid.limits(),        num_state_slots > 0 ? max_num_seqs : 0,
            window_groups};
  }
};

}  // namespace asyncengine
