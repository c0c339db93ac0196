// Records of a step loop for a watcher: the times of its last steps, and a map of its blocks.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/block_manager.h"
#include "core/record.h"

namespace asyncengine {

// A step that has been committed. Times are nanoseconds of the loop's clock.
struct StepRecord {
#define RECORD StepRecord
#define FIELDS "step_loop/step_record.inl"
#include "core/record.inl"
};

// Shares of the blocks of one cell of the map, 0 to 255 for none to all, rounded up: one block of many shows.
struct BlockCell {
  uint8_t held = 0;    // by one sequence
  uint8_t shared = 0;  // by several
  uint8_t cached = 0;  // by nobody, but a prompt may find them
};

// While nobody watches, a round costs the step thread two loads. The step thread never waits for a reader: a record that is
// overwritten while it is read is left out, and a map may have cells of different rounds.
class StepWatch {
 public:
  static constexpr size_t kSteps = 256;
  static constexpr int32_t kMostCells = 1024;
  static constexpr int32_t kBlocksPerRound = 2048;  // some 10 us of a sweep

  explicit StepWatch(int32_t num_blocks);

  // Any thread.
  void watch(bool on) { on_.store(on, std::memory_order_relaxed); }
  // The last `most` records, the oldest first.
  std::vector<StepRecord> last(size_t most) const;
  int32_t blocks_per_cell() const { return blocks_per_cell_; }
  // Cells as the last sweep found them. A sweep takes place when it is asked for.
  std::vector<BlockCell> cells() const;
  void ask_for_sweep() { asked_.store(true, std::memory_order_release); }

  // Step thread.
  bool on() const { return on_.load(std::memory_order_relaxed); }
  void add(const StepRecord& record);
  // One round's share of a sweep that was asked for. True: there is more to do.
  bool sweep(const BlockManager& blocks) { return asked_.load(std::memory_order_acquire) && sweep_some(blocks); }

 private:
  static constexpr size_t kWords = sizeof(StepRecord) / sizeof(int64_t);
  using Words = std::array<int64_t, kWords>;
  bool sweep_some(const BlockManager& blocks);
  BlockCell look(const BlockManager& blocks, int32_t begin, int32_t end) const;

  std::atomic<bool> on_{false}, asked_{false};
  // Record i is in place i % kSteps from i < end_ on, until begun_ > i + kSteps says that another is written there.
  std::atomic<uint64_t> begun_{0}, end_{0};
  std::array<std::array<std::atomic<int64_t>, kWords>, kSteps> records_{};
  int32_t blocks_per_cell_;
  std::vector<std::atomic<uint32_t>> cells_;
  size_t next_cell_ = 0;  // of the sweep
};

}  // namespace asyncengine
