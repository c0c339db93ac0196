#include "core/state_pool.h"

#include <algorithm>
#include <bit>
#include <cassert>

namespace asyncengine {

StatePool::StatePool(int32_t num_slots, int32_t num_state_slots)
    : num_slots_(num_state_slots > 0 ? num_slots : 0),
      snapshots_(static_cast<size_t>(num_state_slots > 0 ? num_state_slots - num_slots : 0)),
      cells_(std::bit_ceil(2 * snapshots_.size() + 2), -1) {
  ends_.next = ends_.prev = num_snapshots();
  for (int32_t i = num_snapshots(); i-- > 0;) link(i);
}

int32_t StatePool::take(uint64_t step) { return ends_.next == num_snapshots() || at(ends_.next).step == step ? -1 : take_next(); }

int32_t StatePool::take_at_rest() { return ends_.next == num_snapshots() || at(ends_.next).step > retired_ ? -1 : take_next(); }

int32_t StatePool::take_next() {
  const int32_t i = ends_.next;
  if (at(i).chain != 0) forget_snapshot(i);
  pin(num_slots_ + i);
  return num_slots_ + i;
}

void StatePool::pin(int32_t state) {
  if (at(index(state)).pins++ > 0) return;
  unlink(index(state));
  ++num_pinned_;
}

void StatePool::unpin(int32_t state, bool in_place) {
  assert(at(index(state)).pins > 0);
  if (--at(index(state)).pins > 0) return;
  link(index(state), in_place);
  --num_pinned_;
}

void StatePool::enter(int32_t state, uint64_t chain) {
  assert(at(index(state)).pins > 0 && at(index(state)).chain == 0);
  const size_t cell = cell_of(chain);
  if (cells_[cell] >= 0) return;
  cells_[cell] = index(state);
  at(index(state)).chain = chain;
  ++num_cached_;
}

int32_t StatePool::find(uint64_t chain) const {
  const int32_t i = cells_[cell_of(chain)];
  return i < 0 ? -1 : num_slots_ + i;
}

void StatePool::use(int32_t state, uint64_t step) {
  pin(state);
  at(index(state)).step = step;
  unpin(state);
}

void StatePool::forget(uint64_t chain) {
  if (other_ != nullptr) other_->forget(chain);
  const int32_t i = cells_[cell_of(chain)];
  if (i < 0) return;
  forget_snapshot(i);
  if (at(i).pins > 0) return;
  unlink(i);
  link(i);
}

// To the front what is worthless, to the back what is known.
void StatePool::link(int32_t i, bool in_place) {
  const int32_t sentinel = num_snapshots();
  int32_t next = at(i).chain != 0 ? sentinel : ends_.next;
  if (in_place && at(i).chain != 0) {
    const auto before = [&](const Snapshot& other) { return other.chain == 0 || other.order <= at(i).order; };
    for (next = ends_.next; next != sentinel && before(at(next));) next = at(next).next;
  } else if (at(i).chain != 0) {
    at(i).order = ++last_order_;
  }
  const int32_t prev = at(next).prev;
  at(i).prev = prev;
  at(i).next = next;
  at(prev).next = at(next).prev = i;
}

void StatePool::unlink(int32_t i) {
  at(at(i).prev).next = at(i).next;
  at(at(i).next).prev = at(i).prev;
}

void StatePool::forget_snapshot(int32_t i) {
  size_t hole = cell_of(at(i).chain);
  const size_t mask = cells_.size() - 1;
  // Backward shift, as in PrefixIndex::erase().
  for (size_t cell = (hole + 1) & mask; cells_[cell] >= 0; cell = (cell + 1) & mask) {
    if (((cell - home(at(cells_[cell]).chain)) & mask) >= ((cell - hole) & mask)) {
      cells_[hole] = cells_[cell];
      hole = cell;
    }
  }
  cells_[hole] = -1;
  at(i).chain = 0;
  --num_cached_;
}

// The cell in which the chain is, or would be.
size_t StatePool::cell_of(uint64_t chain) const {
  size_t cell = home(chain);
  while (cells_[cell] >= 0 && at(cells_[cell]).chain != chain) cell = (cell + 1) & (cells_.size() - 1);
  return cell;
}

bool StatePool::consistent() const {
  std::vector<bool> queued(snapshots_.size(), false);
  size_t count = 0;
  bool known_came = false;
  for (int32_t i = ends_.next; i != num_snapshots(); i = at(i).next) {
    if (count++ >= snapshots_.size() || queued[static_cast<size_t>(i)] || (known_came && at(i).chain == 0)) return false;
    known_came |= at(i).chain != 0;
    queued[static_cast<size_t>(i)] = true;
  }
  int32_t pinned = 0, cached = 0;
  for (int32_t i = 0; i < num_snapshots(); ++i) {
    if (queued[static_cast<size_t>(i)] != (at(i).pins == 0)) return false;
    if (at(i).chain != 0 && find(at(i).chain) != num_slots_ + i) return false;
    pinned += at(i).pins > 0;
    cached += at(i).chain != 0;
  }
  const auto used = std::ranges::count_if(cells_, [](int32_t i) { return i >= 0; });
  return pinned == num_pinned_ && cached == num_cached_ && used == cached;
}

}  // namespace asyncengine
