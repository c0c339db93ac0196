#include "core/block_manager.h"

#include <cassert>

namespace asyncengine {

BlockManager::BlockManager(int32_t num_blocks, int32_t block_size, bool prefix_caching, int32_t num_host_blocks, int32_t num_events)
    : block_size_(block_size),
      prefix_caching_(prefix_caching),
      states_(static_cast<size_t>(num_blocks) + 1),
      index_(num_blocks + num_host_blocks, block_size),
      events_(static_cast<size_t>(num_events), block_size, num_blocks) {
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
  if (index_.contains(block)) evict(block);
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
  if (index_.contains(block)) {
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
    cached += index_.contains(b);
  }
  if (count != num_free_ || cached != num_cached_) return false;
  int64_t references = 0;
  for (int32_t b = 0; b < sentinel; ++b) {
    if (queued[static_cast<size_t>(b)] != (ref_count(b) == 0)) return false;
    references += ref_count(b);
  }
  if (references != num_references_) return false;
  return index_.consistent() && host_consistent();
}

void BlockManager::link(int32_t block, int32_t prev, int32_t next) {
  state(block).prev = prev;
  state(block).next = next;
  state(prev).next = state(next).prev = block;
  ++num_free_;
  num_cached_ += index_.contains(block);
  num_clean_ += has_copy(block);
}

void BlockManager::unlink(int32_t block) {
  const int32_t next = state(block).next, prev = state(block).prev;
  state(prev).next = next;
  state(next).prev = prev;
  --num_free_;
  num_cached_ -= index_.contains(block);
  num_clean_ -= has_copy(block);
}

}  // namespace asyncengine
