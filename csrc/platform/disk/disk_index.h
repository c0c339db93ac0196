// Index of the blocks in a directory, in the order of their last use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/digest.h"

namespace asyncengine {

// A hash table with a list through its entries. It allocates in the constructor alone, about 60 bytes a block. Not
// thread-safe.
class DiskIndex {
 public:
  explicit DiskIndex(size_t capacity);  // 1 to 2^30 blocks

  size_t size() const { return size_; }
  bool contains(const BlockKey& key) const { return find(key) >= 0; }
  // Makes the block the most recently used one. Returns whether it is known.
  bool touch(const BlockKey& key);
  // Enters a block as the most or the least recently used one, unless it is known. False: there is no room for it.
  bool insert(const BlockKey& key) { return insert(key, head().next); }
  bool insert_oldest(const BlockKey& key) { return insert(key, 0); }
  bool erase(const BlockKey& key);
  // The key of the block used least recently. The table must not be empty.
  const BlockKey& oldest() const { return entries_[static_cast<size_t>(head().previous)].key; }

 private:
  // Entry 0 closes the ring: its next is the block used most recently, its previous the one used least recently.
  struct Entry {
    BlockKey key;
    int32_t previous = 0, next = 0;
  };

  const Entry& head() const { return entries_.front(); }
  bool insert(const BlockKey& key, int32_t before);
  int32_t find(const BlockKey& key) const;  // entry, or -1
  size_t home(const BlockKey& key) const { return static_cast<size_t>(key.hash()) & (cells_.size() - 1); }
  void link(int32_t entry, int32_t before);
  void unlink(int32_t entry);

  size_t size_ = 0;
  std::vector<Entry> entries_;
  std::vector<int32_t> free_;
  std::vector<int32_t> cells_;  // linear probing, at most half full; 0: empty
};

}  // namespace asyncengine
