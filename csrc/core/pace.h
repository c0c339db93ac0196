// Pace: predicts the time of a step, and chooses how much of a prompt fits into a step in which others decode.
#pragma once

#include <cstdint>
#include <vector>

#include "core/roster.h"
#include "core/step_costs.h"
#include "core/step_plan.h"

namespace asyncengine {

// Without known costs every step is as fast as another, and no target is heeded.
class Pace {
 public:
  Pace(const SchedulerConfig& config, const Roster& roster);

  const StepCosts& costs() const { return costs_; }
  // Nanoseconds that a step may take in which a sequence of the class decodes; 0: as long as it takes.
  int64_t target_ns(int32_t priority) const { return costs_.known() ? targets_.of(priority) : 0; }
  // A sequence has got the slot.
  void took_slot(const Slot& slot);

  // The decode rows are planned, and so many running sequences have prompt left. The strictest of their targets is the step's.
  void begin(const StepPlan& plan, int32_t prefilling);
  // A target decides how long chunks of prompts are.
  bool decides() const { return target_ns_ > 0; }
  // True if another prompt, of which so much is computed, may have a chunk in this step.
  bool has_time(int32_t context_len, const StepPlan& plan) const;
  // Returns the tokens of a chunk, `most` at most: as many as its share of the time that is left allows. Precondition: decides().
  int32_t chunk(int32_t context_len, int32_t most, const StepPlan& plan);
  // The step has got such a chunk.
  void add_chunk(int32_t query_len, int32_t context_len, StepPlan& plan);
  // Nanoseconds of the step as it is planned. Precondition: costs are known.
  int64_t predict(const StepPlan& plan) const { return predict(0, 0, plan); }
  // A step has taken so long.
  void took(const StepPlan& plan, int64_t ns);

 private:
  int64_t predict(int32_t chunk, int64_t context_len, const StepPlan& plan) const;

  const Roster& roster_;
  StepCosts costs_;
  ItlTargets targets_;
  std::vector<int32_t> token_buckets_;
  double exchange_ns_;
  std::vector<int64_t> slot_targets_;  // by slot; empty unless priority classes have targets of their own
  // Sums of the step that is planned.
  int64_t target_ns_ = 0;  // 0: none
  int32_t sharers_ = 0;    // prompts that its time is still to be shared by
  bool chunked_ = false;   // a prompt has had its share
};

}  // namespace asyncengine
