// The settings of a scheduler, and the largest step that they allow.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/hybrid/hybrid_config.h"
#include "core/step_costs.h"
#include "core/step_input.h"

namespace asyncengine {

// How long a step may take in which sequences decode, so that their tokens come evenly: chunks of prompts beside them are
// as large as that leaves time for. 0: as long as it takes.
struct ItlTargets {
  int64_t ns = 0;                                          // of the priority classes that are not named
  std::vector<std::pair<int32_t, int64_t>> of_class = {};  // priority, nanoseconds

  bool any() const { return ns > 0 || !of_class.empty(); }
  int64_t of(int32_t priority) const {
    for (const auto& [named, its_ns] : of_class) {
      if (named == priority) return its_ns;
    }
    return ns;
  }
};

struct SchedulerConfig {
  int32_t num_blocks = 0;
  int32_t block_size = 16;
  int32_t max_num_seqs = 256;
  int32_t max_num_batched_tokens = 2048;
  int32_t prefill_chunk_size = 0;  // 0: as many as the step has room for
  int32_t max_model_len = 0;
  bool prefix_caching = true;
  // Sizes of step that the executor has graphs for, ascending. A chunk that does not finish its prompt ends where it
  // fills one of them. Empty: any size is as good as another.
  std::vector<int32_t> token_buckets = {};
  // Budgets of a step: samples (0: one for each sequence), words of slot updates' entries and words of records.
  int32_t max_samples = 0;
  int32_t max_update_words = 0;
  int32_t max_result_words = 0;
  int32_t mask_words = 0;  // of a bit per token of the vocabulary; 0: no sequence has masks
  int32_t num_host_blocks = 0;  // of a host tier
  StepCosts costs = {};    // with none known, targets are not heeded
  ItlTargets targets = {};
  int32_t paced_chunk_size = 0;  // in place of prefill_chunk_size where a target decides; 0: no limit but the step's
  HybridConfig hybrid = {};      // needs host blocks

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
    return 2 * max_num_seqs + max_num_batched_tokens / block_size + std::max(max_blocks_per_sequence(), kDeltaBlocksForPrefixes);
  }
  StepLimits limits() const {
    return {max_num_seqs,     max_num_batched_tokens, max_delta_blocks(), max_samples,
            max_update_words, max_result_words,       mask_words,         hybrid.limits()};
  }
};

}  // namespace asyncengine
