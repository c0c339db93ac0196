// Blocks of the rows that a step plans: room for what they write, and the end of what their sequences see no more.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/huge_pages.h"
#include "core/preemption.h"
#include "core/roster.h"
#include "core/step_plan.h"

namespace asyncengine {

class Reservation {
 public:
  Reservation(const SchedulerConfig& config, Roster& roster, Preemption& preemption);

  // Makes positions [computed, num_tokens) writable in each table: own blocks, copied if they are shared. Others may have to give
  // way. False: there is no room, and nothing changed for this sequence but blocks that it sees no more.
  bool reserve_blocks(Slot& slot, int32_t num_tokens, StepPlan& plan);
  // The step is planned.
  void end_step(const StepPlan& plan);

 private:
  int32_t count_missing(const Slot& slot, int32_t num_tokens) const;
  void copy_shared(const Slot& slot, int32_t entry, StepPlan& plan);
  int32_t copy_block(int32_t source, StepPlan& plan);
  void let_go_unseen(Slot& slot, StepPlan& plan);
  void give_back(int32_t block, StepPlan& plan);
  int32_t unseen_in_groups(const Slot& slot) const {
    return config_.unseen_in_groups(std::min(slot.computed, slot.num_tokens() - 1), slot.published_end);
  }
  void let_go_in_groups(const Slot& slot, StepPlan& plan);
  bool release_unseen(const Slot& slot);

  const SchedulerConfig& config_;
  Roster& roster_;
  Preemption& preemption_;
  HugeVector<int32_t> copied_from_;  // scratch, by block: where a copy of the step being planned takes it from, or -1
};

}  // namespace asyncengine
