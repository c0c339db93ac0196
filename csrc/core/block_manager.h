// The pool of KV blocks: reference counts, the free queue in LRU order, and the prefix cache over it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/prefix_index.h"
#include "core/state_pool.h"
#include "core/tier/block_disk.h"

namespace asyncengine {

// A block is in one of three states:
//   held     ref_count > 0, in no queue
//   free     ref_count 0, at the front of the free queue, content worthless
//   cached   ref_count 0, at the back of the free queue, found by match_prefix until it is evicted
// Both free and cached blocks count as free: allocate() evicts the least recently used cached block
// when nothing worthless is left.
//
// With a host tier (host_tier.h) there are host blocks beside them, whose ids follow: block h of the host is num_blocks() + h
// to the prefix cache. A host block is free, or holds what a cached block of the device held (known by its own id since that
// was evicted), or a copy of a block that is still on the device. The last two are evicted by least recent use unless pinned.
class BlockManager {
 public:
  // `num_events`: changes of the prefix cache that events() has room for; 0: none is recorded.
  // `window_groups`: groups of layers with a window, whose blocks are companions of those that the index knows.
  BlockManager(int32_t num_blocks, int32_t block_size, bool prefix_caching, int32_t num_host_blocks = 0, int32_t num_events = 0,
               int32_t window_groups = 0);

  int32_t num_blocks() const { return static_cast<int32_t>(states_.size()) - 1; }
  int32_t block_size() const { return block_size_; }
  int32_t num_free() const { return num_free_; }
  // Number of free blocks that match_prefix may find.
  int32_t num_cached() const { return num_cached_; }
  // The sum of all reference counts.
  int64_t num_references() const { return num_references_; }
  int32_t ref_count(int32_t block) const { return state(block).ref_count; }
  // True if match_prefix may find the block.
  bool findable(int32_t block) const { return index_.contains(block); }
  int32_t blocks_for(int64_t num_tokens) const { return static_cast<int32_t>((num_tokens + block_size_ - 1) / block_size_); }

  // Precondition: num_free() > 0. The block is held once.
  int32_t allocate();
  void retain(int32_t block);
  void release(int32_t block);

  // True when nobody else may see what is written into the block.
  bool writable(int32_t block) const { return ref_count(block) == 1 && !cached(block); }

  // The longest chain of cached blocks that holds the first tokens, as block ids in `out`; at most `max_blocks`.
  // `tokens_at(p)` are the tokens of the block that begins at position p.
  // Takes no reference: the caller retains what it uses before anything else is allocated. `with_host`: blocks of the host
  // too; without, the chain ends before the first of them.
  template <typename TokensAt>
  int32_t match_prefix(TokensAt&& tokens_at, int32_t max_blocks, uint64_t salt, int32_t* out, bool with_host = false) const {
    if (!prefix_caching_) return 0;
    Chain chain{salt, /*root=*/true};
    int32_t matched = 0;
    for (; matched < max_blocks; ++matched) {
      const int32_t block = index_.find(chain, tokens_at(matched * block_size_));
      if (block < 0 || (block >= num_blocks() && !with_host)) break;
      out[matched] = block;
      chain = index_.chain_of(block);
    }
    return matched;
  }

  // Makes a full block, whose KV is in memory, findable. `parent` is the chain so far: the salt as root, or the value
  // this returned for the block before. When an equal block is cached already, that one stays and its chain is returned.
  // `hash` is what prefetch() of the same returned. `entry` gets the block that is known.
  Chain publish(int32_t block, Chain parent, const int32_t* tokens, uint64_t hash, int32_t* entry = nullptr) {
    const uint64_t before = window_groups_ > 0 ? chain_of(block).id : 0;
    const int32_t known = index_.find_or_insert(block, parent, tokens, hash);
    if (before != 0 && chain_of(block).id != before) [[unlikely]]
      tell_of_companions(block);
    if (entry != nullptr) *entry = known;
    if (known >= num_blocks() && !index_.contains(block)) [[unlikely]] {
      moved_in(known - num_blocks(), block);
      return index_.chain_of(block);
    }
    return index_.chain_of(known);
  }
  // The block that is known behind the chain, or -1. `with_host`: as in match_prefix().
  int32_t find(Chain parent, const int32_t* tokens, bool with_host) const {
    const int32_t block = prefix_caching_ ? index_.find(parent, tokens) : -1;
    return block < num_blocks() || with_host ? block : -1;
  }
  // The block is known no more, nor a copy on the host: who holds it alone may write to it. A snapshot behind it stays.
  void take_back(int32_t block);
  // The tokens of a block that was published since it was allocated.
  const int32_t* tokens_of(int32_t block) const { return index_.tokens_of(block); }
  // Asks for the memory that publish() is about to touch, and returns the hash.
  uint64_t prefetch(int32_t block, Chain parent, const int32_t* tokens) const { return index_.prefetch(block, parent, tokens); }
  Chain chain_of(int32_t block) const { return index_.chain_of(block); }

  bool prefix_caching() const { return prefix_caching_; }
  // Changes of the prefix cache. Another thread may drain them.
  BlockEvents& events() { return events_; }
  const BlockEvents& events() const { return events_; }
  // Snapshots of states go with the chains that they are known by.
  void tell_of_evictions(StatePool& snapshots) { snapshots_ = &snapshots; }

  // ---- companions: blocks of window groups with the same tokens as a block that the index knows. They are found through it, and
  // are worthless without it.

  // Makes a full block of the group findable through `entry`, unless that has one already.
  void accompany(int32_t entry, int32_t group, int32_t block) {
    int32_t& companion = companions_[companion_place(entry, group)];
    if (companion >= 0 || entry_of_[static_cast<size_t>(block)] >= 0) return;
    companion = block;
    entry_of_[static_cast<size_t>(block)] = entry * window_groups_ + group;
    index_.tell_of_companion(BlockEvent::kStored, entry, group);
  }
  // The block of the group, or -1.
  int32_t companion(int32_t entry, int32_t group) const { return companions_[companion_place(entry, group)]; }
  // The part of a chain of findable blocks with which a sequence may begin: the longest that has all companions from the entry
  // first_seen(its length) on.
  template <typename FirstSeen>
  int32_t match_windows(const int32_t* chain, int32_t length, FirstSeen&& first_seen) const {
    int32_t longest = 0, complete_from = 0;
    for (int32_t i = 0; i < length; ++i) {
      for (int32_t group = 0; group < window_groups_; ++group) {
        if (companion(chain[i], group) < 0) complete_from = i + 1;
      }
      if (complete_from <= first_seen(i + 1)) longest = i + 1;
    }
    return longest;
  }

  // ---- the host tier's. A host block that is pinned keeps what it holds, or what a copy under way writes.

  int32_t num_host_blocks() const { return static_cast<int32_t>(host_.size()) - (host_.empty() ? 0 : 1); }
  // Number of the host's blocks that hold something.
  int32_t num_host_cached() const { return num_host_cached_; }
  int32_t num_host_pinned() const { return num_host_pinned_; }
  // Free blocks that can be evicted, or used, without losing what only the device knows.
  int32_t num_spare() const { return num_free_ - num_cached_ + num_clean_; }
  // The cached block that was released first among those without a copy, or -1: the same until it is retained.
  int32_t next_without_copy();
  // Pinned, and empty: a free one, or the least recently used is evicted. -1: all are pinned, or that one is a copy of a
  // cached block, unless `even_copies` are taken.
  int32_t take_host_block(bool even_copies = false);
  // The host block that holds a copy of the block, or -1.
  int32_t host_copy_of(int32_t block) const { return copies_.empty() ? -1 : copies_[static_cast<size_t>(block)]; }
  // Releases a host block that was taken or pinned.
  void drop_host_block(int32_t host) { host_state(host).cached ? unpin_host(host) : give_back_host_block(host); }
  // The host block, taken for it, holds a copy of the block now. It is pinned no more.
  void copied_out(int32_t block, int32_t host);
  // It holds nothing after all.
  void give_back_host_block(int32_t host);
  void pin_host(int32_t host);
  void unpin_host(int32_t host);
  // Now it is the one that was used last.
  void touch_host(int32_t host) {
    pin_host(host);
    unpin_host(host);
  }
  // The block holds a copy of the host block, and is known in its place.
  void moved_in(int32_t host, int32_t block);
  // As release(), of a block that was copied out meanwhile: it is evicted where its turn was, before those without a copy.
  void release_moved(int32_t block);
  // Enters a host block that is pinned and empty, and unpins it: the block with these tokens and this name was read into it from
  // a disk. A block that is known already stays as it is. Returns the chain, as publish().
  Chain enter_host(int32_t host, Chain parent, const int32_t* tokens, const BlockName& name);
  int32_t host_pins(int32_t host) const { return host_state(host).pins; }
  bool host_holds(int32_t host) const { return host_state(host).cached; }
  // By which match_prefix finds what the host block holds.
  int32_t id_of_host(int32_t host) const { return host_state(host).block >= 0 ? host_state(host).block : num_blocks() + host; }

  // With a disk behind the host, blocks have names: those of published blocks, and of host blocks that hold something.
  void keep_names() { names_.resize(static_cast<size_t>(num_blocks() + num_host_blocks())); }
  bool keeps_names() const { return !names_.empty(); }
  BlockName& name_of(int32_t id) { return names_[static_cast<size_t>(id)]; }

  // True if match_prefix may find the host block, by its own id.
  bool host_findable(int32_t host) const { return index_.contains(num_blocks() + host); }

  // Every block is in exactly one state and the queue agrees with the counts; O(num_blocks), for tests and idle checks.
  bool consistent() const;

 private:
  struct State {
    int32_t ref_count = 0;
    int32_t next = -1, prev = -1;  // in the free queue
    bool without_copy = false;     // it is in that ring
  };
  struct HostState {
    int32_t pins = 0;
    int32_t next = -1, prev = -1;  // in the queue of those that are not pinned
    int32_t block = -1;            // it is a copy of
    bool cached = false;           // it holds something
  };
  State& state(int32_t block) { return states_[static_cast<size_t>(block)]; }
  const State& state(int32_t block) const { return states_[static_cast<size_t>(block)]; }
  // A prefix may be found in the block: it is worth keeping.
  bool cached(int32_t block) const {
    return index_.contains(block) || (!entry_of_.empty() && entry_of_[static_cast<size_t>(block)] >= 0);
  }
  size_t companion_place(int32_t entry, int32_t group) const {
    return static_cast<size_t>(entry) * static_cast<size_t>(window_groups_) + static_cast<size_t>(group);
  }
  void leave_entry(int32_t block);
  void drop_companions(int32_t entry);
  void tell_of_companions(int32_t entry) const;
  bool companions_consistent() const;
  void link(int32_t block, int32_t prev, int32_t next);
  void unlink(int32_t block);
  void evict(int32_t block);
  void erase(int32_t id);
  void note_without_copy(int32_t block);
  HostState& host_state(int32_t host) { return host_[static_cast<size_t>(host)]; }
  const HostState& host_state(int32_t host) const { return host_[static_cast<size_t>(host)]; }
  int32_t& copy_of(int32_t block) { return copies_[static_cast<size_t>(block)]; }
  bool has_copy(int32_t block) const { return !copies_.empty() && copies_[static_cast<size_t>(block)] >= 0; }
  void set_copy(int32_t block, int32_t host);
  void link_host(int32_t host, bool last);
  void unlink_host(int32_t host);
  bool host_consistent() const;

  int32_t block_size_;
  bool prefix_caching_;
  int32_t num_free_ = 0, num_cached_ = 0, num_clean_ = 0;  // clean: cached, with a copy
  int64_t num_references_ = 0;
  HugeVector<State> states_;  // by block; the last one is the sentinel of the free queue
  PrefixIndex index_;
  BlockEvents events_;
  StatePool* snapshots_ = nullptr;
  int32_t window_groups_;
  std::vector<int32_t> companions_;  // [block, group]: the companion of a block that is known, or -1
  std::vector<int32_t> entry_of_;    // by block: the place in companions_ that has it, or -1

  std::vector<HostState> host_;      // by host block; the last one is the sentinel of their queue, least recently used first
  std::vector<int32_t> copies_;      // by block: the host block that holds a copy of it, or -1
  std::vector<int32_t> without_copy_;  // a ring, in the order of release: blocks that were cached without a copy
  size_t without_copy_begin_ = 0, without_copy_count_ = 0;
  int32_t num_host_cached_ = 0, num_host_pinned_ = 0;
  std::vector<BlockName> names_;     // by id
};

}  // namespace asyncengine
