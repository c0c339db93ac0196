#include "core/preemption.h"

#include <tuple>
#include <utility>

namespace asyncengine {
namespace {

// Steps after which shares of blocks are measured again though no sequence came or went. Running sequences grow meanwhile.
constexpr uint64_t kMeasureEvery = 16;

}  // namespace

bool Preemption::make_room(const Slot& slot, int32_t num_blocks, const StepPlan& plan) {
  const Sequence& sequence = *slot.sequence;
  const bool shared = roster_.waiting().shared();
  if (shared) {
    if (make_room_of_excess(slot, num_blocks, plan)) return true;
    if (beyond_share(slot) != 0) return false;
  }
  for (size_t i = roster_.running().size(); roster_.blocks().num_free() < num_blocks; --i) {
    if (!lacks(num_blocks)) return false;  // they are on their way
    const auto stays = [&](const Slot& other) { return other.state != SequenceState::kRunning || planned(other, plan); };
    while (i > 0 && stays(*roster_.running()[i - 1])) --i;
    if (i == 0 || !runs_before(&sequence, roster_.running()[i - 1]->sequence)) {
      if (shared && short_of_ == 0) std::tie(short_of_, short_priority_) = std::pair(num_blocks, sequence.request->priority);
      return false;
    }
    preempt(*roster_.running()[i - 1]->sequence);
  }
  return true;
}

void Preemption::preempt(Sequence& sequence) {
  ++count_;
  roster_.give_way(sequence);
}

void Preemption::share_out(const StepPlan& plan) {
  if (roster_.waiting().any_above()) share_slots();
  if (const int32_t missing = std::exchange(short_of_, 0); missing > 0) take_excess(short_priority_, missing, plan);
  const Roster::Blocked& blocked = roster_.blocked();
  if (!roster_.waiting().empty() && blocked.sequence == &roster_.waiting().front() &&
      blocked.sequence->request->tenant != nullptr) {
    if (!over_share(*blocked.sequence, plan)) take_excess(blocked.sequence->request->priority, blocked.needs, plan);
  }
  roster_.compact();
}

// One slot a step for each tenant that waits: a short request costs others one sequence and not half of theirs.
void Preemption::share_slots() {
  const Sequence* first = roster_.waiting().first_within();
  if (first == nullptr) return;
  int32_t room = max_num_seqs_ - roster_.waiting().held();  // some of it perhaps when the steps in flight are over
  const int32_t wanted = roster_.waiting().count_waiting(max_num_seqs_);
  for (size_t i = roster_.running().size(); i > 1 && room < wanted; --i) {
    Slot& slot = *roster_.running()[i - 1];
    const Request& request = *slot.sequence->request;
    if (slot.state != SequenceState::kRunning || request.tenant == nullptr || !request.tenant->above) continue;
    if (request.priority < first->request->priority) continue;
    preempt(*slot.sequence);
    ++room;
  }
}

// Counts the blocks of each tenant's running sequences, and finds the sequences beyond its share.
void Preemption::measure_blocks(const StepPlan& plan) {
  if (std::exchange(measured_changes_, roster_.changes()) == roster_.changes() && plan.step - measured_step_ < kMeasureEvery) {
    return;
  }
  measured_step_ = plan.step;
  for (const Slot* slot : roster_.running()) {
    if (Tenant* tenant = slot->sequence->request->tenant) tenant->blocks = 0;
  }
  const int64_t share = roster_.waiting().block_share();
  for (const Slot* slot : roster_.running()) {
    Tenant* tenant = slot->sequence->request->tenant;
    if (tenant == nullptr || slot->state != SequenceState::kRunning) continue;
    const bool first = tenant->blocks == 0;
    for (const int32_t block : roster_.tables().held(roster_.index(*slot))) {
      tenant->blocks += Tenant::kBlock / roster_.blocks().ref_count(block);
    }
    roster_.tables().for_each_window_block(
        roster_.index(*slot), [&](int32_t block) { tenant->blocks += Tenant::kBlock / roster_.blocks().ref_count(block); });
    beyond_share(*slot) = !first && tenant->blocks > share;
  }
}

// True if the waiting sequence, which lacks blocks, would bring its tenant above its share.
bool Preemption::over_share(const Sequence& sequence, const StepPlan& plan) {
  measure_blocks(plan);
  const Tenant& tenant = *sequence.request->tenant;
  return tenant.blocks > 0 && tenant.blocks + roster_.blocked().size * Tenant::kBlock > roster_.waiting().block_share();
}

bool Preemption::step_back(const Sequence& sequence, const StepPlan& plan) {
  if (!roster_.waiting().shared() || roster_.blocked().sequence != &sequence || sequence.request->tenant == nullptr) return false;
  if (!over_share(sequence, plan)) return false;
  roster_.waiting().step_back(*sequence.request->tenant, roster_.blocked().size * Tenant::kBlock);
  return &roster_.waiting().front() != &sequence;
}

void Preemption::yield(Slot& slot) {
  auto held = static_cast<int64_t>(roster_.tables().held(roster_.index(slot)).size());
  roster_.tables().for_each_window_block(roster_.index(slot), [&](int32_t) { ++held; });
  roster_.waiting().step_back(*slot.sequence->request->tenant, held * Tenant::kBlock);
  preempt(*slot.sequence);
}

// True if the sequence may give way to a sequence of that class.
bool Preemption::is_excess(const Slot& slot, int32_t priority) const {
  return slot.state == SequenceState::kRunning && excess_[static_cast<size_t>(roster_.index(slot))] != 0 &&
         slot.sequence->request->priority >= priority;
}

// For one that found no room: until so many blocks are free, or on their way.
void Preemption::take_excess(int32_t priority, int32_t num_blocks, const StepPlan& plan) {
  if (!lacks(num_blocks)) return;
  measure_blocks(plan);
  for (size_t i = roster_.running().size(); i > 1 && lacks(num_blocks); --i) {
    if (is_excess(*roster_.running()[i - 1], priority)) yield(*roster_.running()[i - 1]);
  }
}

// For one that runs: sequences beyond their tenants' shares give way before all others, in the order in which the last
// gives way first. True: there is room. False: whoever is within its share asks others.
bool Preemption::make_room_of_excess(const Slot& slot, int32_t num_blocks, const StepPlan& plan) {
  measure_blocks(plan);
  const bool excess = beyond_share(slot) != 0;
  for (size_t i = roster_.running().size(); i > 1 && lacks(num_blocks); --i) {
    Slot& other = *roster_.running()[i - 1];
    if (excess && !runs_before(slot.sequence, other.sequence)) break;
    if (&other == &slot || planned(other, plan)) continue;
    if (is_excess(other, slot.sequence->request->priority)) yield(other);
  }
  return roster_.blocks().num_free() >= num_blocks;
}

}  // namespace asyncengine
