// Blocks that a step has filled: the prefix cache may share them from then on.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/roster.h"
#include "core/step_plan.h"

namespace asyncengine {

class Publisher {
 public:
  explicit Publisher(Roster& roster) : roster_(roster), block_size_(roster.blocks().block_size()) {}
  // The step is over.
  void publish(const StepPlan& plan);

 private:
  void publish(const PlanRow& row, uint64_t step, uint64_t hash);
  void publish_windows(const Slot& slot, int32_t entry);
  void name_block(const Slot& slot, const int32_t* tokens);
  uint64_t prefetch_block(Slot& slot);
  int32_t block_to_publish(const Slot& slot) const {
    return roster_.tables().at(roster_.index(slot), slot.published_end / block_size_);
  }
  const int32_t* tokens_to_publish(Slot& slot) {
    return slot.sequence->tokens.unpublished(slot.tail, slot.published_end, roster_.published(slot));
  }
  // True if the prefix cache could know a block more.
  bool has_full_block(const Slot& slot, const PlanRow& row, uint64_t step) const {
    if (row.came_to_nothing(step)) [[unlikely]] {
      return false;
    }
    const int32_t end = std::min(row.context_len + row.query_len, slot.num_tokens());  // the former is an upper bound
    return roster_.blocks().prefix_caching() && end - slot.published_end >= block_size_;
  }

  Roster& roster_;
  int32_t block_size_;
};

}  // namespace asyncengine
