// PrefixIndex: finds the block that holds given tokens after a given prefix. The open-addressing table never allocates after
// construction.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/block_events.h"
#include "core/huge_pages.h"
#include "core/prefix_chain.h"

namespace asyncengine {

// Every entry has a chain id that is never used again. An entry is keyed by (chain before it, tokens of the block), so
// equality of one block implies, by induction, equality of the whole prefix and of the salt: the hash only finds
// candidates, and a collision cannot hand out another prompt's KV.
class PrefixIndex {
 public:
  PrefixIndex(int32_t num_blocks, int32_t block_size);

  int32_t find(Chain parent, const int32_t* tokens) const;  // block, or -1
  // The block that is known for this key: an older one, or `block`, which is then entered (and forgotten under any other
  // key: shared by forks, it may be known under a chain whose beginning was evicted, where nobody can find it).
  // Either way the tokens are kept with `block`. The hash is what prefetch() of the same returned.
  int32_t find_or_insert(int32_t block, Chain parent, const int32_t* tokens, uint64_t hash_value);
  const int32_t* tokens_of(int32_t block) const { return tokens_.data() + int64_t{block} * block_size_; }
  void erase(int32_t block);
  // Moves the entry of `from`, with its chain, to `to`: a copy of it that had no entry.
  void rename(int32_t from, int32_t to);
  // Asks for the memory that find_or_insert() is about to touch, and returns the hash.
  uint64_t prefetch(int32_t block, Chain parent, const int32_t* tokens) const;
  bool contains(int32_t block) const { return entries_[static_cast<size_t>(block)].chain != 0; }
  Chain chain_of(int32_t block) const { return {entries_[static_cast<size_t>(block)].chain, false}; }
  bool consistent() const;
  // Changes are recorded there from now on.
  void tell(BlockEvents& events) { events_ = &events; }
  // Records that a block of window group `group` is found through `entry` now (kStored), or no more (kRemoved). It goes with
  // the entry, untold, where that is removed.
  void tell_of_companion(BlockEvent::Kind kind, int32_t entry, int32_t group) const;

 private:
  struct Cell {
    int32_t block = -1;
    uint32_t tag = 0;  // of its hash: a probe leaves alone the entries of others, which lie scattered in memory
  };
  struct Entry {
    uint64_t hash = 0;
    Chain parent;
    uint64_t chain = 0;  // 0: no entry
  };
  uint64_t hash(Chain parent, const int32_t* tokens) const;
  // A part of a block (Roster::rest_of) is no reader's.
  bool tells_of(int32_t block) const { return events_ != nullptr && tokens_of(block)[block_size_ - 1] >= 0; }
  // A cell's tag is enough to tell where it wants to be: the table has at most 2^32 cells.
  static uint32_t tag(uint64_t hash_value) { return static_cast<uint32_t>(hash_value >> 32); }
  size_t home(uint32_t tag_value) const { return static_cast<size_t>(uint64_t{tag_value} >> shift_); }
  int32_t find(Chain parent, const int32_t* tokens, uint64_t hash_value) const;
  size_t find_cell(int32_t block) const;

  int32_t block_size_;
  int shift_;
  uint64_t next_chain_ = 1;
  BlockEvents* events_ = nullptr;
  HugeVector<Cell> cells_;      // linear probing, at most half full
  HugeVector<Entry> entries_;  // by block
  HugeVector<int32_t> tokens_;  // by block, block_size each
};

}  // namespace asyncengine
