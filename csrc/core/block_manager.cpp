#include "core/block_manager.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace asyncengine {

BlockManager::BlockManager(int32_t num_blocks, int32_t block_size, bool prefix_caching, int32_t num_host_blocks, int32_t num_events,
                           int32_t window_groups)
    : block_size_(block_size),
      prefix_caching_(prefix_caching),
      states_(static_cast<size_t>(num_blocks) + 1),
      index_(num_blocks + num_host_blocks, block_size),
      events_(static_cast<size_t>(num_events), block_size, num_blocks),
      window_groups_(window_groups),
      companions_(static_cast<size_t>(num_blocks) * static_cast<size_t>(window_groups), -1),
      entry_of_(window_groups > 0 ? static_cast<size_t>(num_blocks) : 0, -1) {
  if (events_.on()) index_.tell(events_);
  states_.back() = {0, num_blocks, num_blocks};
  for (int32_t b = 0; b < num_blocks; ++b) link(b, states_.back().prev, num_blocks);
  if (num_host_blocks == 0) return;
  host_.resize(static_cast<size_t>(num_host_blocks) + 1);
  host_state(num_host_blocks).prev = host_state(num_host_blocks).next = num_host_blocks;
  for (int32_t h = 0; h < num_host_blocks; ++h) link_host(h, /*last=*/true);
  copies_.assign(static_cast<size_t>(num_blocks), -1);
  without_copy_.resize(static_cast<size_t>(num_blocks));
}

int32_t BlockManager::allocate() {
  assert(num_free_ > 0);
  const int32_t block = states_.back().next;
  unlink(block);
  if (index_.contains(block)) {
    evict(block);
  } else if (cached(block)) {
    const int32_t place = entry_of_[static_cast<size_t>(block)];
    index_.tell_of_companion(BlockEvent::kRemoved, place / window_groups_, place % window_groups_);
    leave_entry(block);
  }
  state(block).ref_count = 1;
  ++num_references_;
  return block;
}

void BlockManager::retain(int32_t block) {
  if (state(block).ref_count++ == 0) unlink(block);
  ++num_references_;
}

void BlockManager::release(int32_t block) {
  assert(ref_count(block) > 0);
  --num_references_;
  if (--state(block).ref_count > 0) return;
  const int32_t sentinel = num_blocks();
  if (cached(block)) {
    link(block, states_.back().prev, sentinel);
    if (!host_.empty() && !has_copy(block)) note_without_copy(block);
  } else {
    link(block, sentinel, states_.back().next);
  }
}

bool BlockManager::consistent() const {
  const int32_t sentinel = num_blocks();
  std::vector<bool> queued(static_cast<size_t>(sentinel), false);
  int32_t count = 0, cached = 0;
  for (int32_t b = states_.back().next; b != sentinel; b = state(b).next) {
    if (count++ > sentinel || queued[static_cast<size_t>(b)]) return false;
    queued[static_cast<size_t>(b)] = true;
    cached += this->cached(b);
  }
  if (count != num_free_ || cached != num_cached_) return false;
  int64_t references = 0;
  for (int32_t b = 0; b < sentinel; ++b) {
    if (queued[static_cast<size_t>(b)] != (ref_count(b) == 0)) return false;
    references += ref_count(b);
  }
  if (references != num_references_) return false;
  return index_.consistent() && host_consistent() && companions_consistent();
}

// The block is no companion any more.
void BlockManager::leave_entry(int32_t block) {
  companions_[static_cast<size_t>(std::exchange(entry_of_[static_cast<size_t>(block)], -1))] = -1;
}

// The entry is known under another chain now, with the companions that it had.
void BlockManager::tell_of_companions(int32_t entry) const {
  for (int32_t group = 0; group < window_groups_; ++group) {
    if (companion(entry, group) >= 0) index_.tell_of_companion(BlockEvent::kStored, entry, group);
  }
}

// The entry is evicted: nobody finds its companions any more, and those that are free are the next to be used.
void BlockManager::drop_companions(int32_t entry) {
  for (int32_t group = 0; group < window_groups_; ++group) {
    const int32_t block = companion(entry, group);
    if (block < 0) continue;
    const bool free = ref_count(block) == 0;
    if (free) unlink(block);
    leave_entry(block);
    if (free) link(block, num_blocks(), states_.back().next);
  }
}

bool BlockManager::companions_consistent() const {
  for (size_t place = 0; place < companions_.size(); ++place) {
    const int32_t block = companions_[place];
    if (block < 0) continue;
    if (entry_of_[static_cast<size_t>(block)] != static_cast<int32_t>(place) || index_.contains(block)) return false;
    if (!index_.contains(static_cast<int32_t>(place) / window_groups_)) return false;
  }
  const auto there = [](int32_t id) { return id >= 0; };
  return std::ranges::count_if(companions_, there) == std::ranges::count_if(entry_of_, there);
}

void BlockManager::link(int32_t block, int32_t prev, int32_t next) {
  state(block).prev = prev;
  state(block).next = next;
  state(prev).next = state(next).prev = block;
  ++num_free_;
  num_cached_ += cached(block);
  num_clean_ += has_copy(block);
}

void BlockManager::unlink(int32_t block) {
  const int32_t next = state(block).next, prev = state(block).prev;
  state(prev).next = next;
  state(next).prev = prev;
  --num_free_;
  num_cached_ -= cached(block);
  num_clean_ -= has_copy(block);
}

}  // namespace asyncengine
