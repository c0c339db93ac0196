// The statistics of a step loop; stats.inl lists them.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

namespace asyncengine {

struct Stats {
#define STAT(name) int64_t name = 0;
#include "core/stats.inl"
#undef STAT
};

// Calls visit(name, value) for each statistic.
template <typename Visit>
void visit_stats(const Stats& stats, Visit&& visit) {
#define STAT(name) visit(#name, stats.name);
#include "core/stats.inl"
#undef STAT
}

// The statistics as one thread last stored them, for any thread to load. Each value is whole; two of them may be of
// different rounds.
class PublishedStats {
 public:
  void store(const Stats& stats) {
#define STAT(name) name##_.store(stats.name, std::memory_order_relaxed);
#include "core/stats.inl"
#undef STAT
  }
  Stats load() const {
    Stats stats;
#define STAT(name) stats.name = name##_.load(std::memory_order_relaxed);
#include "core/stats.inl"
#undef STAT
    return stats;
  }

 private:
#define STAT(name) std::atomic<int64_t> name##_{0};
#include "core/stats.inl"
#undef STAT
};

// A histogram of the tokens that steps computed. One thread adds, any thread reads: each number is whole, and two of them
// may be of different steps.
class StepTokens {
 public:
  // The most tokens of the steps that a count is of; the last count is of all larger steps.
  static constexpr std::array<int64_t, 13> kBounds{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};

  void add(int64_t tokens) {
    const auto i = std::lower_bound(kBounds.begin(), kBounds.end(), tokens) - kBounds.begin();
    grow(counts_[static_cast<size_t>(i)], 1);
    grow(sum_, tokens);
  }
  std::array<int64_t, kBounds.size() + 1> counts() const {
    std::array<int64_t, kBounds.size() + 1> counts;
    for (size_t i = 0; i < counts.size(); ++i) counts[i] = counts_[i].load(std::memory_order_relaxed);
    return counts;
  }
  int64_t sum() const { return sum_.load(std::memory_order_relaxed); }

 private:
  // Without a locked instruction, as there is one writer.
  static void grow(std::atomic<int64_t>& value, int64_t by) {
    value.store(value.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
  }

  std::array<std::atomic<int64_t>, kBounds.size() + 1> counts_{};
  std::atomic<int64_t> sum_{0};
};

}  // namespace asyncengine
