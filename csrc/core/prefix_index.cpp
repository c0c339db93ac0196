#include "core/prefix_index.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>
#include <utility>

namespace asyncengine {
namespace {

// 64x64 -> 128 bit multiply, halves folded: one multiplication mixes both words well enough for a hash table.
uint64_t fold_multiply(uint64_t a, uint64_t b) {
  __extension__ using uint128 = unsigned __int128;
  const uint128 product = uint128{a} * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15;
constexpr uint64_t kOffset = 0xD1B54A32D192ED03;

}  // namespace

PrefixIndex::PrefixIndex(int32_t num_blocks, int32_t block_size)
    : block_size_(block_size),
      cells_(std::bit_ceil(static_cast<size_t>(num_blocks) * 2 + 2)),
      entries_(static_cast<size_t>(num_blocks)),
      tokens_(static_cast<size_t>(num_blocks) * static_cast<size_t>(block_size)) {
  shift_ = 32 - std::countr_zero(cells_.size());
}

uint64_t PrefixIndex::hash(Chain parent, const int32_t* tokens) const {
  // Two accumulators, so that the multiplications of one block overlap.
  uint64_t a = parent.id ^ kOffset, b = (parent.root ? ~parent.id : parent.id) + kMultiplier;
  for (int32_t i = 0; i < block_size_; i += 4) {  // block_size is a multiple of 16
    uint64_t words[2];
    std::memcpy(words, tokens + i, sizeof(words));
    a = fold_multiply(a ^ words[0], kMultiplier);
    b = fold_multiply(b ^ words[1], kOffset);
  }
  return fold_multiply(a ^ std::rotl(b, 32), kMultiplier);
}

int32_t PrefixIndex::find(Chain parent, const int32_t* tokens) const { return find(parent, tokens, hash(parent, tokens)); }

int32_t PrefixIndex::find(Chain parent, const int32_t* tokens, uint64_t h) const {
  const size_t mask = cells_.size() - 1;
  for (size_t cell = home(tag(h)); cells_[cell].block >= 0; cell = (cell + 1) & mask) {
    if (cells_[cell].tag != tag(h)) continue;
    const int32_t block = cells_[cell].block;
    const Entry& entry = entries_[static_cast<size_t>(block)];
    if (entry.hash == h && entry.parent == parent && std::equal(tokens, tokens + block_size_, tokens_of(block))) {
      return block;
    }
  }
  return -1;
}

int32_t PrefixIndex::find_or_insert(int32_t block, Chain parent, const int32_t* tokens, uint64_t h) {
  assert(h == hash(parent, tokens));
  const int32_t known = find(parent, tokens, h);
  if (known >= 0 && contains(block)) return known;
  if (contains(block)) erase(block);
  std::copy_n(tokens, block_size_, tokens_.begin() + int64_t{block} * block_size_);
  if (known >= 0) return known;
  Entry& entry = entries_[static_cast<size_t>(block)];
  entry = {h, parent, next_chain_++};
  const size_t mask = cells_.size() - 1;
  size_t cell = home(tag(h));
  while (cells_[cell].block >= 0) cell = (cell + 1) & mask;
  cells_[cell] = {block, tag(h)};
  if (tells_of(block)) [[unlikely]]
    events_->add(BlockEvent::kStored, block, entry.chain, parent, tokens);
  return block;
}

uint64_t PrefixIndex::prefetch(int32_t block, Chain parent, const int32_t* tokens) const {
  __builtin_prefetch(&entries_[static_cast<size_t>(block)], /*write=*/1);
  __builtin_prefetch(tokens_of(block), /*write=*/1);
  const uint64_t h = hash(parent, tokens);
  __builtin_prefetch(&cells_[home(tag(h))], /*write=*/1);
  return h;
}

void PrefixIndex::erase(int32_t block) {
  const size_t mask = cells_.size() - 1;
  size_t hole = find_cell(block);
  const Entry& entry = entries_[static_cast<size_t>(block)];
  if (tells_of(block)) [[unlikely]]
    events_->add(BlockEvent::kRemoved, block, entry.chain, entry.parent, nullptr);
  entries_[static_cast<size_t>(block)] = {};
  // Backward shift: move up every later entry of the run that may live in the hole, so that no tombstone is needed.
  for (size_t cell = (hole + 1) & mask; cells_[cell].block >= 0; cell = (cell + 1) & mask) {
    const size_t wanted = home(cells_[cell].tag);
    if (((cell - wanted) & mask) >= ((cell - hole) & mask)) {
      cells_[hole] = cells_[cell];
      hole = cell;
    }
  }
  cells_[hole] = {};
}

void PrefixIndex::rename(int32_t from, int32_t to) {
  assert(contains(from) && !contains(to));
  cells_[find_cell(from)].block = to;
  entries_[static_cast<size_t>(to)] = std::exchange(entries_[static_cast<size_t>(from)], {});
  std::copy_n(tokens_of(from), block_size_, tokens_.begin() + int64_t{to} * block_size_);
  if (!tells_of(to)) [[likely]]
    return;
  const Entry& entry = entries_[static_cast<size_t>(to)];
  events_->add(BlockEvent::kMoved, to, entry.chain, entry.parent, tokens_of(to));
}

void PrefixIndex::tell_of_companion(BlockEvent::Kind kind, int32_t entry, int32_t group) const {
  if (!tells_of(entry)) return;
  const Entry& known = entries_[static_cast<size_t>(entry)];
  events_->add(kind, entry, known.chain, known.parent, kind == BlockEvent::kStored ? tokens_of(entry) : nullptr, group + 1);
}

size_t PrefixIndex::find_cell(int32_t block) const {
  assert(contains(block));
  const size_t mask = cells_.size() - 1;
  size_t cell = home(tag(entries_[static_cast<size_t>(block)].hash));
  while (cells_[cell].block != block) cell = (cell + 1) & mask;
  return cell;
}

bool PrefixIndex::consistent() const {
  const auto used = std::count_if(cells_.begin(), cells_.end(), [](const Cell& cell) { return cell.block >= 0; });
  const auto live = std::count_if(entries_.begin(), entries_.end(), [](const Entry& e) { return e.chain != 0; });
  if (used != live) return false;
  for (size_t b = 0; b < entries_.size(); ++b) {
    const auto block = static_cast<int32_t>(b);
    if (contains(block) && find(entries_[b].parent, tokens_of(block)) < 0) return false;
  }
  return true;
}

}  // namespace asyncengine
