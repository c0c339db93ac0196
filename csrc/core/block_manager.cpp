#include "core/block_manager.h"

#include <cassert>

namespace asyncengine {

BlockManager::BlockManager(int32_t num_blocks, int32_t block_size, bool prefix_caching)
    : block_size_(block_size),
      prefix_caching_(prefix_caching),
      ref_counts_(static_cast<size_t>(num_blocks), 0),
      next_(static_cast<size_t>(num_blocks) + 1),
      prev_(static_cast<size_t>(num_blocks) + 1),
      index_(num_blocks, block_size) {
  next_.back() = prev_.back() = num_blocks;
  for (int32_t b = 0; b < num_blocks; ++b) push_back(b);
}

int32_t BlockManager::allocate() {
  assert(num_free_ > 0);
  const int32_t block = next_.back();
  unlink(block);
  if (index_.contains(block)) index_.erase(block);
  ref_counts_[static_cast<size_t>(block)] = 1;
  return block;
}

void BlockManager::retain(int32_t block) {
  if (ref_counts_[static_cast<size_t>(block)]++ == 0) unlink(block);
}

void BlockManager::release(int32_t block) {
  int32_t& count = ref_counts_[static_cast<size_t>(block)];
  assert(count > 0);
  if (--count > 0) return;
  if (index_.contains(block)) {
    push_back(block);
  } else {
    push_front(block);
  }
}

int32_t BlockManager::match_prefix(const int32_t* tokens, int32_t max_blocks, uint64_t salt, int32_t* out) const {
  if (!prefix_caching_) return 0;
  uint64_t chain = PrefixIndex::root(salt);
  int32_t matched = 0;
  for (; matched < max_blocks; ++matched) {
    const int32_t block = index_.find(chain, tokens + int64_t{matched} * block_size_);
    if (block < 0) break;
    out[matched] = block;
    chain = index_.chain_of(block);
  }
  return matched;
}

uint64_t BlockManager::publish(int32_t block, uint64_t parent, const int32_t* tokens) {
  return index_.chain_of(index_.find_or_insert(block, parent, tokens));
}

bool BlockManager::consistent() const {
  const int32_t sentinel = num_blocks();
  std::vector<bool> queued(static_cast<size_t>(sentinel), false);
  int32_t count = 0;
  for (int32_t b = next_.back(); b != sentinel; b = next_[static_cast<size_t>(b)]) {
    if (count++ > sentinel || queued[static_cast<size_t>(b)]) return false;
    queued[static_cast<size_t>(b)] = true;
  }
  if (count != num_free_) return false;
  for (int32_t b = 0; b < sentinel; ++b) {
    if (queued[static_cast<size_t>(b)] != (ref_counts_[static_cast<size_t>(b)] == 0)) return false;
  }
  return index_.consistent();
}

void BlockManager::push_front(int32_t block) {
  const int32_t sentinel = num_blocks(), head = next_.back();
  next_[static_cast<size_t>(block)] = head;
  prev_[static_cast<size_t>(block)] = sentinel;
  prev_[static_cast<size_t>(head)] = block;
  next_.back() = block;
  ++num_free_;
}

void BlockManager::push_back(int32_t block) {
  const int32_t sentinel = num_blocks(), tail = prev_.back();
  prev_[static_cast<size_t>(block)] = tail;
  next_[static_cast<size_t>(block)] = sentinel;
  next_[static_cast<size_t>(tail)] = block;
  prev_.back() = block;
  ++num_free_;
}

void BlockManager::unlink(int32_t block) {
  const int32_t before = prev_[static_cast<size_t>(block)], after = next_[static_cast<size_t>(block)];
  next_[static_cast<size_t>(before)] = after;
  prev_[static_cast<size_t>(after)] = before;
  --num_free_;
}

}  // namespace asyncengine
