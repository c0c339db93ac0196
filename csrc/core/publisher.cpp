#include "core/publisher.h"

#include <array>
#include <span>

namespace asyncengine {

// The blocks and their tokens are scattered in memory: two stages of prefetching go ahead of publishing, the first for what
// the second one needs.
void Publisher::publish(const StepPlan& plan) {
  const size_t count = plan.full_rows.size();
  const auto full_row = [&](size_t i) -> const PlanRow& { return plan.rows[static_cast<size_t>(plan.full_rows[i])]; };
  std::array<uint64_t, Roster::kAhead> hashes;
  for (size_t i = 0; i < count + Roster::kAhead; ++i) {
    if (i < count) {
      const PlanRow& row = full_row(i);
      roster_.prefetch_slot(row.slot);
      Roster::prefetch(roster_.tables().blocks(row.slot).data() + row.context_len / block_size_);
    }
    if (const size_t soon = i - Roster::kAhead / 2; soon < count) {  // wraps at first
      Slot& slot = roster_.slot(full_row(soon).slot);
      if (slot.alive()) {  // of one that has ended, surplus rows have computed more than it has tokens
        if (has_full_block(slot, full_row(soon), plan.step)) {
          hashes[soon % Roster::kAhead] = prefetch_block(slot);
        } else {
          slot.sequence->tokens.settle(slot.tail, roster_.published(slot));
        }
      }
    }
    if (const size_t now = i - Roster::kAhead; now < count) publish(full_row(now), plan.step, hashes[now % Roster::kAhead]);
  }
}

// `hash` is of the first of them.
void Publisher::publish(const PlanRow& row, uint64_t step, uint64_t hash) {
  Slot& slot = roster_.slot(row.slot);
  if (!slot.alive()) return;
  while (has_full_block(slot, row, step)) {
    const int32_t* tokens = tokens_to_publish(slot);
    if (roster_.blocks().keeps_names()) [[unlikely]] {
      name_block(slot, tokens);
    }
    int32_t entry = -1;
    slot.chain = roster_.blocks().publish(block_to_publish(slot), slot.prefix(), tokens, hash, &entry).id;
    if (roster_.tables().windows().any()) [[unlikely]] {
      publish_windows(slot, entry);
    }
    slot.published_end += block_size_;
    slot.sequence->tokens.was_published(slot.tail, tokens);
    if (has_full_block(slot, row, step)) hash = prefetch_block(slot);
  }
}

// The blocks of window groups with the same tokens as the one that is published.
void Publisher::publish_windows(const Slot& slot, int32_t entry) {
  const WindowTables& windows = roster_.tables().windows();
  const int32_t row = roster_.index(slot), i = slot.published_end / block_size_;
  if (i < windows.first_held(row)) return;
  for (int32_t group = 0; group < windows.num_groups(); ++group)
    roster_.blocks().accompany(entry, group, windows.at(group, row, i));
}

uint64_t Publisher::prefetch_block(Slot& slot) {
  return roster_.blocks().prefetch(block_to_publish(slot), slot.prefix(), tokens_to_publish(slot));
}

// A block that is about to be published, by those before it.
void Publisher::name_block(const Slot& slot, const int32_t* tokens) {
  const int32_t i = slot.published_end / block_size_;
  const BlockKey parent = i == 0 ? roster_.tier()->disk()->root(slot.sequence->request->salt)
                                 : roster_.blocks().name_of(roster_.tables().at(roster_.index(slot), i - 1)).key;
  const std::span span(tokens, static_cast<size_t>(block_size_));
  roster_.blocks().name_of(block_to_publish(slot)) = {next_key(parent, span), parent};
}

}  // namespace asyncengine
