// The pool of KV blocks: reference counts, the free queue in LRU order, and the prefix cache over it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/prefix_index.h"

namespace asyncengine {

// A block is in one of three states:
//   held     ref_count > 0, in no queue
//   free     ref_count 0, at the front of the free queue, content worthless
//   cached   ref_count 0, at the back of the free queue, found by match_prefix until it is evicted
// Both free and cached blocks count as free: allocate() evicts the least recently used cached block
// when nothing worthless is left.
class BlockManager {
 public:
  BlockManager(int32_t num_blocks, int32_t block_size, bool prefix_caching);

  int32_t num_blocks() const { return static_cast<int32_t>(states_.size()) - 1; }
  int32_t block_size() const { return block_size_; }
  int32_t num_free() const { return num_free_; }
  // Of the free ones, those that match_prefix may find.
  int32_t num_cached() const { return num_cached_; }
  // The sum of all reference counts.
  int64_t num_references() const { return num_references_; }
  int32_t ref_count(int32_t block) const { return state(block).ref_count; }
  // Whether match_prefix may find it.
  bool findable(int32_t block) const { return index_.contains(block); }
  int32_t blocks_for(int64_t num_tokens) const {
    return static_cast<int32_t>((num_tokens + block_size_ - 1) / block_size_);
  }

  // Precondition: num_free() > 0. The block is held once.
  int32_t allocate();
  void retain(int32_t block);
  void release(int32_t block);

  // True when nobody else may see what is written into the block.
  bool writable(int32_t block) const { return ref_count(block) == 1 && !index_.contains(block); }

  // The longest chain of cached blocks that holds the first tokens, as block ids in `out`; at most `max_blocks`.
  // `tokens_at(p)` are the tokens of the block that begins at position p.
  // Takes no reference: the caller retains what it uses before anything else is allocated.
  template <typename TokensAt>
  int32_t match_prefix(TokensAt&& tokens_at, int32_t max_blocks, uint64_t salt, int32_t* out) const {
    if (!prefix_caching_) return 0;
    Chain chain{salt, /*root=*/true};
    int32_t matched = 0;
    for (; matched < max_blocks; ++matched) {
      const int32_t block = index_.find(chain, tokens_at(matched * block_size_));
      if (block < 0) break;
      out[matched] = block;
      chain = index_.chain_of(block);
    }
    return matched;
  }

  // Makes a full block, whose KV is in memory, findable. `parent` is the chain so far: the salt as root, or the value
  // this returned for the block before. When an equal block is cached already, that one stays and its chain is returned.
  // `hash` is what prefetch() of the same returned.
  Chain publish(int32_t block, Chain parent, const int32_t* tokens, uint64_t hash) {
    return index_.chain_of(index_.find_or_insert(block, parent, tokens, hash));
  }
  // The tokens of a block that was published since it was allocated.
  const int32_t* tokens_of(int32_t block) const { return index_.tokens_of(block); }
  // Asks for the memory that publish() is about to touch, and returns the hash.
  uint64_t prefetch(int32_t block, Chain parent, const int32_t* tokens) const {
    return index_.prefetch(block, parent, tokens);
  }
  Chain chain_of(int32_t block) const { return index_.chain_of(block); }

  bool prefix_caching() const { return prefix_caching_; }
  // Every block is in exactly one state and the queue agrees with the counts; O(num_blocks), for tests and idle checks.
  bool consistent() const;

 private:
  struct State {
    int32_t ref_count = 0;
    int32_t next = -1, prev = -1;  // in the free queue
  };
  State& state(int32_t block) { return states_[static_cast<size_t>(block)]; }
  const State& state(int32_t block) const { return states_[static_cast<size_t>(block)]; }
  void link(int32_t block, int32_t prev, int32_t next);
  void unlink(int32_t block);

  int32_t block_size_;
  bool prefix_caching_;
  int32_t num_free_ = 0, num_cached_ = 0;
  int64_t num_references_ = 0;
  HugeVector<State> states_;  // by block; the last one is the sentinel of the free queue
  PrefixIndex index_;
};

}  // namespace asyncengine
