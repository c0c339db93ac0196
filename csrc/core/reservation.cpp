#include "core/reservation.h"

#include <algorithm>

namespace asyncengine {

Reservation::Reservation(const SchedulerConfig& config, Roster& roster, Preemption& preemption)
    : config_(config), roster_(roster), preemption_(preemption), copied_from_(static_cast<size_t>(config.num_blocks)) {
  std::ranges::fill(copied_from_, -1);
}

void Reservation::end_step(const StepPlan& plan) {
  for (const BlockCopy& copy : plan.copies) copied_from_[static_cast<size_t>(copy.target)] = -1;
}

// Blocks that positions [computed, num_tokens) of the sequence need: for new entries, and for copies of shared ones.
int32_t Reservation::count_missing(const Slot& slot, int32_t num_tokens) const {
  const int32_t row = roster_.index(slot), held = roster_.tables().length(row), wanted = roster_.blocks().blocks_for(num_tokens);
  int32_t missing = std::max(0, wanted - held) * config_.num_groups();
  const int32_t first = slot.computed / config_.block_size, end = std::min(held, wanted);
  for (int32_t i = first; i < end; ++i) missing += !roster_.blocks().writable(roster_.tables().at(row, i));
  const auto count = [&](int32_t block) { missing += !roster_.blocks().writable(block); };
  roster_.tables().windows().for_each(row, first, end, count);
  return missing;
}

// Makes these positions writable: own blocks, copied if they are shared.
bool Reservation::reserve_blocks(Slot& slot, int32_t num_tokens, StepPlan& plan) {
  // A sibling that gives way may leave a shared block to this sequence alone: fewer are missing then.
  for (int32_t missing; (missing = count_missing(slot, num_tokens)) > roster_.blocks().num_free();) {
    if (config_.window_groups > 0 && release_unseen(slot)) continue;
    if (!preemption_.make_room(slot, missing, plan)) return false;
  }
  const int32_t row = roster_.index(slot), held = roster_.tables().length(row), wanted = roster_.blocks().blocks_for(num_tokens);
  for (int32_t i = slot.computed / config_.block_size; i < std::min(held, wanted); ++i) {
    copy_shared(slot, i, plan);
  }
  WindowTables& windows = roster_.tables().windows();
  for (int32_t i = held; i < wanted; ++i) {
    roster_.tables().append(row, roster_.blocks().allocate());
    for (int32_t group = 0; group < windows.num_groups(); ++group) windows.at(group, row, i) = roster_.blocks().allocate();
  }
  if (wanted > held) slot.capacity = wanted * config_.block_size;
  slot.forked = false;
  if (config_.window > 0) let_go_unseen(slot, plan);
  if (windows.any()) let_go_in_groups(slot, plan);
  return true;
}

// Lets go of blocks that no row of the sequence sees any more, from the one that is about to be planned on. Rows in flight may
// see them: the blocks come back when this step is over. A step whose tokens come to nothing is computed again from the last
// known token.
void Reservation::let_go_unseen(Slot& slot, StepPlan& plan) {
  const int32_t row = roster_.index(slot), first = roster_.tables().first_held(row);
  const int32_t end = config_.unseen_blocks(std::min(slot.computed, slot.num_tokens() - 1), slot.published_end);
  if (end <= first) return;
  slot.sequence->tokens.settle(slot.tail, roster_.published(slot));  // some of its tokens may be with these blocks alone
  for (const int32_t block : roster_.tables().held(row).first(static_cast<size_t>(end - first))) give_back(block, plan);
  roster_.tables().let_go(row, end);
}

// The block comes back when the step that is planned is over.
void Reservation::give_back(int32_t block, StepPlan& plan) {
  plan.held_blocks.push_back(block);
  plan.blocks_coming += roster_.blocks().ref_count(block) == 1;
  roster_.expect_blocks(roster_.blocks().ref_count(block) == 1);
}

// The same of the tables of window groups. Tokens are read from the full group's blocks, which stay.
void Reservation::let_go_in_groups(const Slot& slot, StepPlan& plan) {
  WindowTables& windows = roster_.tables().windows();
  const int32_t row = roster_.index(slot), first = windows.first_held(row), end = unseen_in_groups(slot);
  if (end <= first) return;
  windows.for_each(row, first, end, [&](int32_t block) { give_back(block, plan); });
  windows.let_go(row, end);
}

// Blocks of window groups that no row in flight can see come back at once, for a sequence that lacks room. True: there were some.
bool Reservation::release_unseen(const Slot& slot) {
  WindowTables& windows = roster_.tables().windows();
  const int32_t row = roster_.index(slot), first = windows.first_held(row), end = unseen_in_groups(slot);
  if (slot.in_flight > 0 || end <= first) return false;
  windows.for_each(row, first, end, [&](int32_t block) { roster_.blocks().release(block); });
  windows.let_go(row, end);
  return true;
}

// Makes the entry writable in each table: a block that somebody else may see is copied.
void Reservation::copy_shared(const Slot& slot, int32_t entry, StepPlan& plan) {
  const int32_t row = roster_.index(slot), block = roster_.tables().at(row, entry);
  if (!roster_.blocks().writable(block)) roster_.tables().replace(row, entry, copy_block(block, plan));
  WindowTables& windows = roster_.tables().windows();
  for (int32_t group = 0; group < windows.num_groups(); ++group) {
    int32_t& own = windows.at(group, row, entry);
    if (roster_.blocks().writable(own)) continue;
    own = copy_block(own, plan);
    roster_.tables().mark_dirty(row, entry);
  }
}

// Returns the block that holds the copy from this step on.
int32_t Reservation::copy_block(int32_t source, StepPlan& plan) {
  const int32_t target = roster_.blocks().allocate();
  // A sibling may have copied the block in this very step: both then copy from where it came from.
  const int32_t origin = copied_from_[static_cast<size_t>(source)];
  copied_from_[static_cast<size_t>(target)] = origin < 0 ? source : origin;
  plan.copies.push_back({copied_from_[static_cast<size_t>(target)], target});
  plan.held_blocks.push_back(source);
  return target;
}

}  // namespace asyncengine
