#include "platform/disk/disk_index.h"

#include <bit>

namespace asyncengine {

DiskIndex::DiskIndex(size_t capacity) : entries_(capacity + 1), free_(capacity), cells_(std::bit_ceil(2 * capacity)) {
  for (size_t i = 0; i < capacity; ++i) free_[i] = static_cast<int32_t>(capacity - i);
}

bool DiskIndex::touch(const BlockKey& key) {
  const int32_t entry = find(key);
  if (entry < 0) return false;
  unlink(entry);
  link(entry, head().next);
  return true;
}

bool DiskIndex::insert(const BlockKey& key, int32_t before) {
  if (contains(key)) return true;
  if (free_.empty()) return false;
  const int32_t entry = free_.back();
  free_.pop_back();
  entries_[static_cast<size_t>(entry)].key = key;
  link(entry, before);
  size_t cell = home(key);
  while (cells_[cell] != 0) cell = (cell + 1) & (cells_.size() - 1);
  cells_[cell] = entry;
  ++size_;
  return true;
}

bool DiskIndex::erase(const BlockKey& key) {
  const int32_t entry = find(key);
  if (entry < 0) return false;
  unlink(entry);
  free_.push_back(entry);
  --size_;
  const size_t mask = cells_.size() - 1;
  size_t hole = home(key);
  while (cells_[hole] != entry) hole = (hole + 1) & mask;
  // Backward shift: move up every later entry of the run that may live in the hole, so that no tombstone is needed.
  for (size_t cell = (hole + 1) & mask; cells_[cell] != 0; cell = (cell + 1) & mask) {
    const size_t wanted = home(entries_[static_cast<size_t>(cells_[cell])].key);
    if (((cell - wanted) & mask) >= ((cell - hole) & mask)) {
      cells_[hole] = cells_[cell];
      hole = cell;
    }
  }
  cells_[hole] = 0;
  return true;
}

int32_t DiskIndex::find(const BlockKey& key) const {
  for (size_t cell = home(key); cells_[cell] != 0; cell = (cell + 1) & (cells_.size() - 1)) {
    if (entries_[static_cast<size_t>(cells_[cell])].key == key) return cells_[cell];
  }
  return -1;
}

void DiskIndex::link(int32_t entry, int32_t before) {
  Entry& next = entries_[static_cast<size_t>(before)];
  Entry& here = entries_[static_cast<size_t>(entry)];
  here.previous = next.previous;
  here.next = before;
  entries_[static_cast<size_t>(here.previous)].next = entry;
  next.previous = entry;
}

void DiskIndex::unlink(int32_t entry) {
  const Entry& here = entries_[static_cast<size_t>(entry)];
  entries_[static_cast<size_t>(here.previous)].next = here.next;
  entries_[static_cast<size_t>(here.next)].previous = here.previous;
}

}  // namespace asyncengine
