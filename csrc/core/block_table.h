// Block tables of all slots, and which part of each the executor has not seen yet.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/huge_pages.h"

namespace asyncengine {

// Tables of the layers with a window, where others see all: one for each group of layers, which have blocks of their own. They are
// as long as the slot's table of BlockTables, and grow with it.
class WindowTables {
 public:
  WindowTables(int32_t num_groups, int32_t num_slots, int32_t max_blocks)
      : num_groups_(num_groups),
        max_blocks_(max_blocks),
        blocks_(static_cast<size_t>(num_groups) * static_cast<size_t>(num_slots) * static_cast<size_t>(max_blocks)),
        first_held_(num_groups > 0 ? static_cast<size_t>(num_slots) : 0, 0) {}

  int32_t num_groups() const { return num_groups_; }
  bool any() const { return num_groups_ > 0; }
  int32_t& at(int32_t group, int32_t slot, int32_t i) { return blocks_[place(group, slot) + static_cast<size_t>(i)]; }
  int32_t at(int32_t group, int32_t slot, int32_t i) const { return blocks_[place(group, slot) + static_cast<size_t>(i)]; }
  const int32_t* row(int32_t group, int32_t slot) const { return blocks_.data() + place(group, slot); }
  // Entries before this one are holes in each group, as in BlockTables.
  int32_t first_held(int32_t slot) const { return any() ? first_held_[static_cast<size_t>(slot)] : 0; }
  void let_go(int32_t slot, int32_t first) { first_held_[static_cast<size_t>(slot)] = first; }
  // Calls on_block(block) for entries [first, end) of each group, the last entry first.
  template <typename OnBlock>
  void for_each(int32_t slot, int32_t first, int32_t end, OnBlock&& on_block) const {
    for (int32_t group = 0; group < num_groups_; ++group) {
      for (int32_t i = end; i-- > first;) on_block(at(group, slot, i));
    }
  }

 private:
  size_t place(int32_t group, int32_t slot) const {
    return static_cast<size_t>(int64_t{slot} * num_groups_ + group) * static_cast<size_t>(max_blocks_);
  }

  int32_t num_groups_, max_blocks_;
  HugeVector<int32_t> blocks_;
  std::vector<int32_t> first_held_;
};

class BlockTables {
 public:
  BlockTables(int32_t num_slots, int32_t max_blocks, int32_t num_window_groups = 0)
      : windows_(num_window_groups, num_slots, max_blocks),
        max_blocks_(max_blocks),
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

  WindowTables& windows() { return windows_; }
  const WindowTables& windows() const { return windows_; }
  // Calls on_block(block) for the blocks that the sequence holds in the tables of windows.
  template <typename OnBlock>
  void for_each_window_block(int32_t slot, OnBlock&& on_block) const {
    if (windows_.any()) windows_.for_each(slot, windows_.first_held(slot), length(slot), on_block);
  }

  void append(int32_t slot, int32_t block) { row(slot)[length_[static_cast<size_t>(slot)]++] = block; }
  void replace(int32_t slot, int32_t i, int32_t block) {
    row(slot)[i] = block;
    mark_dirty(slot, i);
  }
  // The executor has to see the entries from the `i`-th on.
  void mark_dirty(int32_t slot, int32_t i) { clean_[static_cast<size_t>(slot)] = std::min(clean_[static_cast<size_t>(slot)], i); }
  // Makes holes of the entries before `first`.
  void let_go(int32_t slot, int32_t first) { first_held_[static_cast<size_t>(slot)] = first; }
  void clear(int32_t slot) {
    const auto i = static_cast<size_t>(slot);
    length_[i] = clean_[i] = first_held_[i] = 0;
    if (windows_.any()) windows_.let_go(slot, 0);
  }

  // Entries [dirty_begin, length) changed since mark_clean.
  int32_t dirty_begin(int32_t slot) const { return clean_[static_cast<size_t>(slot)]; }
  void mark_clean(int32_t slot) { clean_[static_cast<size_t>(slot)] = length(slot); }

 private:
  int32_t* row(int32_t slot) { return blocks_.data() + int64_t{slot} * max_blocks_; }
  const int32_t* row(int32_t slot) const { return blocks_.data() + int64_t{slot} * max_blocks_; }

  WindowTables windows_;
  int32_t max_blocks_;
  HugeVector<int32_t> blocks_;
  std::vector<int32_t> length_, first_held_, clean_;
};

}  // namespace asyncengine
