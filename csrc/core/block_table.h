// Block tables of all slots, and which part of each the executor has not seen yet.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/huge_pages.h"

namespace asyncengine {

class BlockTables {
 public:
  BlockTables(int32_t num_slots, int32_t max_blocks)
      : max_blocks_(max_blocks),
        blocks_(static_cast<size_t>(num_slots) * static_cast<size_t>(max_blocks)),
        length_(static_cast<size_t>(num_slots), 0),
        first_held_(static_cast<size_t>(num_slots), 0),
        clean_(static_cast<size_t>(num_slots), 0) {}

  int32_t length(int32_t slot) const { return length_[static_cast<size_t>(slot)]; }
  int32_t at(int32_t slot, int32_t i) const { return row(slot)[i]; }
  std::span<const int32_t> blocks(int32_t slot) const { return {row(slot), static_cast<size_t>(length(slot))}; }
  // Entries before this one are holes: the sequence has let go of their blocks, and nothing reads them. The numbers stay, so
  // that a kernel which loads more of a table than it uses finds a block there.
  int32_t first_held(int32_t slot) const { return first_held_[static_cast<size_t>(slot)]; }
  // The blocks that the sequence holds: those behind the holes.
  std::span<const int32_t> held(int32_t slot) const { return blocks(slot).subspan(static_cast<size_t>(first_held(slot))); }

  void append(int32_t slot, int32_t block) { row(slot)[length_[static_cast<size_t>(slot)]++] = block; }
  void replace(int32_t slot, int32_t i, int32_t block) {
    row(slot)[i] = block;
    clean_[static_cast<size_t>(slot)] = std::min(clean_[static_cast<size_t>(slot)], i);
  }
  // Makes holes of the entries before `first`.
  void let_go(int32_t slot, int32_t first) { first_held_[static_cast<size_t>(slot)] = first; }
  void clear(int32_t slot) {
    const auto i = static_cast<size_t>(slot);
    length_[i] = clean_[i] = first_held_[i] = 0;
  }

  // Entries [dirty_begin, length) changed since mark_clean.
  int32_t dirty_begin(int32_t slot) const { return clean_[static_cast<size_t>(slot)]; }
  void mark_clean(int32_t slot) { clean_[static_cast<size_t>(slot)] = length(slot); }

 private:
  int32_t* row(int32_t slot) { return blocks_.data() + int64_t{slot} * max_blocks_; }
  const int32_t* row(int32_t slot) const { return blocks_.data() + int64_t{slot} * max_blocks_; }

  int32_t max_blocks_;
  HugeVector<int32_t> blocks_;
  std::vector<int32_t> length_, first_held_, clean_;
};

}  // namespace asyncengine
