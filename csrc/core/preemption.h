// Preemption: chooses the sequence that gives way when blocks or slots run out.
#pragma once

#include <cstdint>
#include <vector>

#include "core/roster.h"
#include "core/step_plan.h"

namespace asyncengine {

// It is the last in order, and while several tenants have requests the last of those beyond their tenants' shares (tenants.h).
//
// A tenant gives no sequence that is within its share, and its first one is. The sequence that gives way waits behind all
// tenants within their shares, so it does not take back what it gave. The first of all that run never gives way.
class Preemption {
 public:
  Preemption(const SchedulerConfig& config, Roster& roster)
      : roster_(roster), max_num_seqs_(config.max_num_seqs), excess_(static_cast<size_t>(config.max_num_seqs)) {}

  // Sequences that have given way.
  int64_t count() const { return count_; }
  // A sequence has got the slot.
  void took_slot(const Slot& slot) { beyond_share(slot) = 0; }
  // While several tenants have requests, before the rows of the step are planned: who gives way has none in it.
  void share_out(const StepPlan& plan);
  // For one that runs: until so many blocks are free. False: they are not, or not yet.
  bool make_room(const Slot& slot, int32_t num_blocks, const StepPlan& plan);
  // The head of the queue lacks blocks. True: somebody else goes first.
  bool step_back(const Sequence& sequence, const StepPlan& plan);

 private:
  void preempt(Sequence& sequence);
  void yield(Slot& slot);
  void share_slots();
  void measure_blocks(const StepPlan& plan);
  bool over_share(const Sequence& sequence, const StepPlan& plan);
  bool is_excess(const Slot& slot, int32_t priority) const;
  void take_excess(int32_t priority, int32_t num_blocks, const StepPlan& plan);
  bool make_room_of_excess(const Slot& slot, int32_t num_blocks, const StepPlan& plan);
  uint8_t& beyond_share(const Slot& slot) { return excess_[static_cast<size_t>(roster_.index(slot))]; }
  bool planned(const Slot& slot, const StepPlan& plan) const { return slot.planned_step == static_cast<uint32_t>(plan.step); }
  bool lacks(int32_t num_blocks) const { return roster_.blocks().num_free() + roster_.blocks_coming() < num_blocks; }

  Roster& roster_;
  int32_t max_num_seqs_;
  int64_t count_ = 0;
  std::vector<uint8_t> excess_;  // by slot: when blocks were last measured, it was beyond its tenant's share
  uint64_t measured_step_ = 0, measured_changes_ = 0;  // and the roster's changes() then
  int32_t short_of_ = 0, short_priority_ = 0;  // a running sequence within its share lacked so many free blocks in the last step
};

}  // namespace asyncengine
