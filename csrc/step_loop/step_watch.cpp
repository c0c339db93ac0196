#include "step_loop/step_watch.h"

#include <algorithm>
#include <bit>

namespace asyncengine {
namespace {

int32_t divide_up(int32_t a, int32_t b) { return (a + b - 1) / b; }

uint8_t share(int32_t count, int32_t of) { return static_cast<uint8_t>((int64_t{count} * 255 + of - 1) / of); }

}  // namespace

StepWatch::StepWatch(int32_t num_blocks)
    : blocks_per_cell_(std::max(1, divide_up(num_blocks, kMostCells))),
      cells_(static_cast<size_t>(divide_up(num_blocks, blocks_per_cell_))) {}

// A word is stored with release and loaded with acquire: who reads a word of a later record sees in begun_ that this one is gone.
void StepWatch::add(const StepRecord& record) {
  const uint64_t i = end_.load(std::memory_order_relaxed);
  begun_.store(i + 1, std::memory_order_relaxed);
  const auto words = std::bit_cast<Words>(record);
  for (size_t w = 0; w < kWords; ++w) records_[i % kSteps][w].store(words[w], std::memory_order_release);
  end_.store(i + 1, std::memory_order_release);
}

std::vector<StepRecord> StepWatch::last(size_t most) const {
  const uint64_t end = end_.load(std::memory_order_acquire);
  const uint64_t first = end - std::min<uint64_t>({end, most, kSteps});
  std::vector<StepRecord> found;
  found.reserve(static_cast<size_t>(end - first));
  for (uint64_t i = first; i < end; ++i) {
    Words words;
    for (size_t w = 0; w < kWords; ++w) words[w] = records_[i % kSteps][w].load(std::memory_order_acquire);
    found.push_back(std::bit_cast<StepRecord>(words));
  }
  const uint64_t begun = begun_.load(std::memory_order_relaxed);
  const uint64_t intact = begun - std::min<uint64_t>(begun, kSteps);
  if (intact > first) found.erase(found.begin(), found.begin() + static_cast<ptrdiff_t>(std::min(intact, end) - first));
  return found;
}

std::vector<BlockCell> StepWatch::cells() const {
  std::vector<BlockCell> found;
  found.reserve(cells_.size());
  for (const auto& cell : cells_) {
    const uint32_t word = cell.load(std::memory_order_relaxed);
    found.push_back({static_cast<uint8_t>(word), static_cast<uint8_t>(word >> 8), static_cast<uint8_t>(word >> 16)});
  }
  return found;
}

BlockCell StepWatch::look(const BlockManager& blocks, int32_t begin, int32_t end) const {
  int32_t held = 0, shared = 0, cached = 0;
  for (int32_t b = begin; b < end; ++b) {
    const int32_t references = blocks.ref_count(b);
    held += references == 1;
    shared += references > 1;
    cached += references == 0 && blocks.findable(b);
  }
  const int32_t all = end - begin;
  return {share(held, all), share(shared, all), share(cached, all)};
}

bool StepWatch::sweep_some(const BlockManager& blocks) {
  const int32_t cells = std::max(1, kBlocksPerRound / blocks_per_cell_);
  for (int32_t n = 0; n < cells && next_cell_ < cells_.size(); ++n, ++next_cell_) {
    const auto begin = static_cast<int32_t>(next_cell_) * blocks_per_cell_;
    const BlockCell cell = look(blocks, begin, std::min(begin + blocks_per_cell_, blocks.num_blocks()));
    const uint32_t word = cell.held | uint32_t{cell.shared} << 8 | uint32_t{cell.cached} << 16;
    cells_[next_cell_].store(word, std::memory_order_relaxed);
  }
  if (next_cell_ < cells_.size()) return true;
  next_cell_ = 0;
  asked_.store(false, std::memory_order_relaxed);
  return false;
}

}  // namespace asyncengine
