// The sequences of a scheduler: which wait, which run, what each holds, and how each comes to its end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/block_manager.h"
#include "core/block_table.h"
#include "core/hybrid/placement.h"
#include "core/outbox.h"
#include "core/scheduler_config.h"
#include "core/sequence.h"
#include "core/slot.h"
#include "core/state_pool.h"
#include "core/tenants.h"
#include "core/tier/host_tier.h"

namespace asyncengine {

// The life of a sequence: it is enqueued, gets a slot, runs, perhaps gives way and waits again, and finishes. What it holds
// comes back when it is settled: once no step in flight, no copy and no worker on the host can touch it.
class Roster {
 public:
  // A walk over many slots asks for the one that comes so many rows later: some 250 ns of decode rows.
  static constexpr size_t kAhead = 16;
  static void prefetch(const void* address) { __builtin_prefetch(address, /*write=*/1); }

  // The head of the queue, where it did not fit.
  struct Blocked {
    const Sequence* sequence = nullptr;
    int32_t free = 0;   // blocks, when it was tried
    int32_t needs = 0;  // blocks that must be free
    int32_t size = 0;   // of which it would take so many
  };

  explicit Roster(const SchedulerConfig& config);

  BlockManager& blocks() { return blocks_; }
  const BlockManager& blocks() const { return blocks_; }
  BlockTables& tables() { return tables_; }
  const BlockTables& tables() const { return tables_; }
  StatePool& states() { return states_; }
  const StatePool& states() const { return states_; }
  FairQueue& waiting() { return waiting_; }
  const FairQueue& waiting() const { return waiting_; }
  // Null where there is no host tier, or nobody decodes on the host.
  HostTier* tier() const { return tier_.get(); }
  Placement* placement() const { return placement_; }
  void move_blocks_with(std::unique_ptr<HostTier> tier) { tier_ = std::move(tier); }
  void place_with(Placement& placement) { placement_ = &placement; }
  // The costs say whether the state of a sequence that gives way is kept.
  void choose_with(const StepCosts& costs) { costs_ = &costs; }

  // ---- slots

  // In order. Those that run no more are among them until compact().
  const std::vector<Slot*>& running() const { return running_; }
  size_t num_free_slots() const { return free_slots_.size(); }
  // Slots whose state waits for the step that copies it are counted.
  size_t num_unused_slots() const { return free_slots_.size() + left_states_.size(); }
  int32_t index(const Slot& slot) const { return static_cast<int32_t>(&slot - slots_.data()); }
  Slot& slot(int32_t index) { return slots_[static_cast<size_t>(index)]; }
  const Slot& slot(int32_t index) const { return slots_[static_cast<size_t>(index)]; }
  // Precondition: it has one.
  Slot& slot_of(const Sequence& sequence) { return slot(sequence.slot); }
  const Slot& slot_of(const Sequence& sequence) const { return slot(sequence.slot); }
  void prefetch_slot(int32_t index) const {
    prefetch(&slot(index));
    slot(index).tail.prefetch();
  }
  bool on_host(int32_t slot) const { return placement_ != nullptr && placement_->on_host(slot); }
  // Blocks of the sequence may still be read or written.
  bool in_flight(const Sequence& sequence) const {
    return sequence.loading || (sequence.slot >= 0 &&
                                (slot_of(sequence).in_flight > 0 || (placement_ != nullptr && placement_->in_use(sequence.slot))));
  }
  PublishedBlocks published(const Slot& slot) const { return {blocks_, tables_, index(slot)}; }
  // A step that is planned will give so many blocks back; or, negative, has done so.
  void expect_blocks(int32_t count) { blocks_coming_ += count; }
  // Blocks that sequences are about to give back: nobody need be preempted for these.
  int32_t blocks_coming() const { return blocks_coming_ + (tier_ != nullptr ? tier_->blocks_coming() : 0); }
  // Grows with each sequence that comes or goes.
  uint64_t changes() const { return changes_; }
  bool idle() const { return running_.empty() && waiting_.empty() && retiring_ == 0; }
  // ---- what a sequence that gave way goes on with

  // The state of the sequence stays in its slot until a step copies it. The chain leads to all that it had computed.
  struct LeftState {
    int32_t slot = -1;
    uint64_t chain = 0;
  };
  const std::vector<LeftState>& left_states() const { return left_states_; }
  // The plan of the step has the copies of these states. Others may have the slots.
  void free_left_slots(uint64_t step);
  // Returns true while a step is still to copy the state of this sequence, or that of another.
  bool saves_state_of(const Sequence& sequence) const {
    return sequence.resumes_at > 0 && (!left_states_.empty() || !states_.retired(saved_step_));
  }
  // The key of a part of a block: the tokens before `end` that are in no whole block, and kNoToken behind them. Nobody's prompt
  // has such a block. It is there until the next call.
  const int32_t* rest_of(const Tokens& tokens, int32_t end);

  // Every block and slot is back.
  bool quiescent() const;

  // ---- the queue

  void enter(const Request& request);
  void enqueue(Sequence& sequence);
  void dequeue(const Sequence& sequence);
  const Blocked& blocked() const { return blocked_; }
  void block(const Blocked& blocked) { blocked_ = blocked; }

  // ---- a sequence that runs

  // Takes it from the queue and gives it a free slot with these blocks, which somebody else may hold too; the first `holes`
  // of them are such, and not held.
  Slot& take_slot(Sequence& sequence, std::span<const int32_t> shared, int32_t holes);
  // From now on it is among those that run. Precondition: compact().
  void run(Slot& slot);
  // Appends a token, or fails the sequence where there is none. The token may be the last one.
  void append(Slot& slot, int32_t token, Outbox& outbox, int64_t now_ns);
  int64_t appended() const { return appended_; }
  // Takes those from running() that run no more.
  void compact() {
    if (!std::exchange(running_changed_, false)) return;
    std::erase_if(running_, [](const Slot* slot) { return slot->state != SequenceState::kRunning; });
  }

  // ---- a sequence on its way to the host

  // It runs no more, and its blocks are about to come back.
  void begin_leaving(Slot& slot);
  // Its blocks are back.
  void left_device(Slot& slot);
  // It stays and runs after all.
  void stay(Slot& slot);

  // ---- ends

  // No sibling waits for the state that the request keeps for them.
  void drop_fork_state(Request& request);
  // The sequence runs no more. What it holds comes back in settle().
  void finish(Sequence& sequence, FinishReason reason);
  void retire(Sequence& sequence, SequenceState state);
  // It is computed again, or goes on, when it has got a slot once more.
  void give_way(Sequence& sequence);
  // No step in flight touches the sequence any more: its blocks and slot may be reused. One that gave way waits again, and
  // needs no outbox.
  void settle(Sequence& sequence, Outbox* outbox);
  // Ends all sequences of the request. Others than this one may have rows later in the plan being committed.
  void fail(Sequence& sequence, FinishReason reason, Outbox& outbox, int64_t now_ns);

 private:
  static constexpr int32_t kNoToken = -1;

  uint64_t keep_computed(const Slot& slot);
  bool keeping_pays(const Slot& slot) const;
  void hold_blocks(int32_t slot);
  void release_blocks(int32_t slot);
  void expect_blocks(Sequence& sequence);

  BlockManager blocks_;
  BlockTables tables_;
  StatePool states_;
  std::unique_ptr<HostTier> tier_;
  Placement* placement_ = nullptr;
  std::vector<Slot> slots_;
  std::vector<Slot*> running_;
  std::vector<int32_t> free_slots_;
  std::vector<LeftState> left_states_;
  const StepCosts* costs_ = nullptr;
  int32_t answer_snapshot_tokens_;
  std::vector<int32_t> rest_, held_;  // scratch
  uint64_t saved_step_ = 0;    // the last that copied such a state
  FairQueue waiting_;
  Blocked blocked_;
  int32_t blocks_coming_ = 0;     // of sequences that retire, or leave for the host, and of steps
  int32_t retiring_ = 0;          // sequences that still hold something but run no more
  bool running_changed_ = false;  // some of running_ run no more
  uint64_t changes_ = 1;
  int64_t appended_ = 0;  // tokens
};

}  // namespace asyncengine
