// Scheduler: who gives way when blocks or slots run out. It is the last in order, and while several tenants have requests the
// last of those beyond their tenants' shares (tenants.h).
//
// A tenant gives no sequence that is within its share, and its first one is. The sequence that gives way waits behind all
// tenants within their shares, so it does not take back what it gave. The first of all that run never gives way.
#include <algorithm>
#include <tuple>
#include <utility>

#include "core/scheduler.h"

namespace asyncengine {
namespace {

// Steps after which shares of blocks are measured again though no sequence came or went. Running sequences grow meanwhile.
constexpr uint64_t kMeasureEvery = 16;

}  // namespace

bool Scheduler::make_room(const Slot& slot, int32_t num_blocks, const StepPlan& plan) {
  const Sequence& sequence = *slot.sequence;
  const bool shared = waiting_.shared();
  if (shared) {
    if (make_room_of_excess(slot, num_blocks, plan)) return true;
    if (excess_[static_cast<size_t>(index(slot))] != 0) return false;
  }
  for (size_t i = running_.size(); blocks_.num_free() < num_blocks; --i) {
    if (blocks_.num_free() + blocks_coming() >= num_blocks) return false;  // they are on their way
    const auto stays = [&](const Slot& other) {
      return other.state != SequenceState::kRunning || other.planned_step == static_cast<uint32_t>(plan.step);
    };
    while (i > 0 && stays(*running_[i - 1])) --i;
    if (i == 0 || !runs_before(&sequence, running_[i - 1]->sequence)) {
      if (shared && short_of_ == 0) std::tie(short_of_, short_priority_) = std::pair(num_blocks, sequence.request->priority);
      return false;
    }
    preempt(*running_[i - 1]->sequence);
  }
  return true;
}

void Scheduler::preempt(Sequence& sequence) {
  ++stats_.num_preemptions;
  retire(sequence, SequenceState::kPreempting);
  if (!in_flight(sequence)) settle(sequence, nullptr);
}

// Before the rows of the step are planned: who gives way has none in it.
void Scheduler::share_out(const StepPlan& plan) {
  if (waiting_.any_above()) share_slots();
  if (const int32_t missing = std::exchange(short_of_, 0); missing > 0) take_excess(short_priority_, missing, plan);
  if (!waiting_.empty() && blocked_ == &waiting_.front() && blocked_->request->tenant != nullptr) {
    if (!over_share(*blocked_, plan)) take_excess(blocked_->request->priority, blocked_needs_, plan);
  }
  compact_running();
}

// One slot a step for each tenant that waits: a short request costs others one sequence and not half of theirs.
void Scheduler::share_slots() {
  const Sequence* first = waiting_.first_within();
  if (first == nullptr) return;
  int32_t room = config_.max_num_seqs - waiting_.held();  // some of it perhaps when the steps in flight are over
  const int32_t wanted = waiting_.count_waiting(config_.max_num_seqs);
  for (size_t i = running_.size(); i > 1 && room < wanted; --i) {
    Slot& slot = *running_[i - 1];
    const Request& request = *slot.sequence->request;
    if (slot.state != SequenceState::kRunning || request.tenant == nullptr || !request.tenant->above) continue;
    if (request.priority < first->request->priority) continue;
    preempt(*slot.sequence);
    ++room;
  }
}

// What each tenant's running sequences hold, and which of them are beyond its share.
void Scheduler::measure_blocks(const StepPlan& plan) {
  if (!std::exchange(holders_changed_, false) && plan.step - measured_step_ < kMeasureEvery) return;
  measured_step_ = plan.step;
  for (const Slot* slot : running_) {
    if (Tenant* tenant = slot->sequence->request->tenant) tenant->blocks = 0;
  }
  const int64_t share = waiting_.block_share();
  for (const Slot* slot : running_) {
    Tenant* tenant = slot->sequence->request->tenant;
    if (tenant == nullptr || slot->state != SequenceState::kRunning) continue;
    const bool first = tenant->blocks == 0;
    for (const int32_t block : tables_.blocks(index(*slot))) tenant->blocks += Tenant::kBlock / blocks_.ref_count(block);
    excess_[static_cast<size_t>(index(*slot))] = !first && tenant->blocks > share;
  }
}

// Whether the waiting sequence, which lacks blocks, would bring its tenant above its share.
bool Scheduler::over_share(const Sequence& sequence, const StepPlan& plan) {
  measure_blocks(plan);
  const Tenant& tenant = *sequence.request->tenant;
  return tenant.blocks > 0 && tenant.blocks + blocked_size_ * Tenant::kBlock > waiting_.block_share();
}

// The head of the queue lacks blocks. True: somebody else goes first.
bool Scheduler::step_back(Sequence& sequence, const StepPlan& plan) {
  if (!waiting_.shared() || blocked_ != &sequence || sequence.request->tenant == nullptr) return false;
  if (!over_share(sequence, plan)) return false;
  waiting_.step_back(*sequence.request->tenant, blocked_size_ * Tenant::kBlock);
  return &waiting_.front() != &sequence;
}

void Scheduler::yield(Slot& slot) {
  waiting_.step_back(*slot.sequence->request->tenant, tables_.length(index(slot)) * Tenant::kBlock);
  preempt(*slot.sequence);
}

// Whether it is one to give way to a sequence of that class.
bool Scheduler::is_excess(const Slot& slot, int32_t priority) const {
  return slot.state == SequenceState::kRunning && excess_[static_cast<size_t>(index(slot))] != 0 &&
         slot.sequence->request->priority >= priority;
}

// For one that found no room: until so many blocks are free, or on their way.
void Scheduler::take_excess(int32_t priority, int32_t num_blocks, const StepPlan& plan) {
  if (blocks_.num_free() + blocks_coming() >= num_blocks) return;
  measure_blocks(plan);
  for (size_t i = running_.size(); i > 1 && blocks_.num_free() + blocks_coming() < num_blocks; --i) {
    if (is_excess(*running_[i - 1], priority)) yield(*running_[i - 1]);
  }
}

// For one that runs: sequences beyond their tenants' shares give way before all others, in the order in which the last
// gives way first. True: there is room. False: whoever is within its share asks others.
bool Scheduler::make_room_of_excess(const Slot& slot, int32_t num_blocks, const StepPlan& plan) {
  measure_blocks(plan);
  const bool excess = excess_[static_cast<size_t>(index(slot))] != 0;
  for (size_t i = running_.size(); i > 1 && blocks_.num_free() + blocks_coming() < num_blocks; --i) {
    Slot& other = *running_[i - 1];
    if (excess && !runs_before(slot.sequence, other.sequence)) break;
    if (&other == &slot || other.planned_step == static_cast<uint32_t>(plan.step)) continue;
    if (is_excess(other, slot.sequence->request->priority)) yield(other);
  }
  return blocks_.num_free() >= num_blocks;
}

}  // namespace asyncengine
