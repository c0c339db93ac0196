// The slots of state: what layers keep of a sequence in a fixed number of bytes. The pool counts slots, and knows no bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace asyncengine {

// A state of layers cannot go back to an earlier token, as the tables of blocks can. So a prefix of another prompt is of use
// as far as there is a snapshot: a copy of the state as it was when these tokens, and no others, were computed.
//
// State slot i < num_slots() is that of the sequence in slot i. The state slots behind them hold snapshots. A snapshot is
//   free     worthless
//   pinned   a step is about to write it, or siblings wait to begin with it
//   cached   known by the chain of the blocks before it, until it is evicted by least recent use or its chain is
// and a pinned one may be known by its chain, too. Without states there are no slots, and nothing is ever found.
class StatePool {
 public:
  // `num_state_slots` of all, 0 or at least `num_slots`.
  StatePool(int32_t num_slots, int32_t num_state_slots);

  bool any() const { return num_slots_ > 0; }
  int32_t num_slots() const { return num_slots_; }
  int32_t num_snapshots() const { return static_cast<int32_t>(snapshots_.size()); }
  int32_t num_pinned() const { return num_pinned_; }
  // References to a snapshot; -1: the state slot is none of a snapshot.
  int32_t pins(int32_t state) const { return is_snapshot(state) ? at(index(state)).pins : -1; }
  // The snapshot is known by a chain.
  bool known(int32_t state) const { return is_snapshot(state) && at(index(state)).chain != 0; }
  // Snapshots that find() may give.
  int32_t num_cached() const { return num_cached_; }

  // A state slot for a snapshot, pinned once: a free one, or the least recently used is evicted. -1: all are pinned, or what
  // would be evicted is read in this step, whose copies have no order among each other.
  int32_t take(uint64_t step);
  // Likewise, for somebody who writes to it beside the steps: -1 also if a step in flight reads what would be evicted.
  int32_t take_at_rest();
  // Steps up to this one are over.
  void retire(uint64_t step) { retired_ = step; }
  bool retired(uint64_t step) const { return step <= retired_; }
  void pin(int32_t state);
  // `in_place`: among the known ones it keeps its place of before it was pinned; else it is the one that was used last.
  void unpin(int32_t state, bool in_place = false);
  // The pinned snapshot holds the state behind the chain. One that is known for it already stays.
  void enter(int32_t state, uint64_t chain);
  // The state slot of the snapshot behind the chain, or -1.
  int32_t find(uint64_t chain) const;
  // The step reads the snapshot, and it is the one that was used last.
  void use(int32_t state, uint64_t step);
  // Nobody can find the chain any more.
  void forget(uint64_t chain);
  // The other pool forgets what this one does.
  void forget_with(StatePool& other) { other_ = &other; }
  // The first of the `count` snapshots that are evicted next which is known by a chain with this property; -1: there is none.
  template <typename Wanted>
  int32_t next_known(int32_t count, Wanted&& wanted) const {
    for (int32_t i = ends_.next; i != num_snapshots() && count > 0; i = at(i).next, --count) {
      if (at(i).chain != 0 && wanted(at(i).chain)) return num_slots_ + i;
    }
    return -1;
  }
  uint64_t chain_of(int32_t state) const { return at(index(state)).chain; }
  // The last step that read the snapshot.
  uint64_t last_read(int32_t state) const { return at(index(state)).step; }

  // Every snapshot is in one state, and the queue and the table agree with the counts; for tests and idle checks.
  bool consistent() const;

 private:
  struct Snapshot {
    uint64_t chain = 0;  // 0: unknown
    uint64_t step = 0;   // the last that read it
    uint64_t order = 0;  // in the queue, among the known ones
    int32_t pins = 0;
    int32_t next = -1, prev = -1;  // in the queue of those that are not pinned: free ones, then least recently used first
  };
  bool is_snapshot(int32_t state) const { return state >= num_slots_ && index(state) < num_snapshots(); }
  int32_t index(int32_t state) const { return state - num_slots_; }
  Snapshot& at(int32_t i) { return i == num_snapshots() ? ends_ : snapshots_[static_cast<size_t>(i)]; }
  const Snapshot& at(int32_t i) const { return i == num_snapshots() ? ends_ : snapshots_[static_cast<size_t>(i)]; }
  int32_t take_next();
  void link(int32_t i, bool in_place = false);
  void unlink(int32_t i);
  void forget_snapshot(int32_t i);
  size_t cell_of(uint64_t chain) const;
  size_t home(uint64_t chain) const { return static_cast<size_t>(chain * 0x9E3779B97F4A7C15 >> 32) & (cells_.size() - 1); }

  int32_t num_slots_;
  int32_t num_pinned_ = 0, num_cached_ = 0;
  uint64_t retired_ = 0, last_order_ = 0;
  StatePool* other_ = nullptr;
  std::vector<Snapshot> snapshots_;
  Snapshot ends_;                // the sentinel of the queue
  std::vector<int32_t> cells_;   // by chain, linear probing, at most half full: a snapshot, or -1
};

}  // namespace asyncengine
