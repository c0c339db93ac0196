// The statistics of a step loop; stats.inl lists them.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace asyncengine {

struct Stats {
#define STAT(name) int64_t name = 0;
#include "core/stats.inl"
#undef STAT
};

// Calls visit(name, value) for each statistic.
template <typename AnyStats, typename Visit>
void visit_stats(AnyStats&& stats, Visit&& visit) {
#define STAT(name) visit(#name, stats.name);
#include "core/stats.inl"
#undef STAT
}

// The statistics as one thread last stored them, for any thread to load. Each value is whole; two of them may be of
// different rounds.
class PublishedStats {
 public:
  void store(const Stats& stats) {
    auto* value = values_.data();
    visit_stats(stats, [&](const char*, int64_t now) { (value++)->store(now, std::memory_order_relaxed); });
  }
  Stats load() const {
    Stats stats;
    const auto* value = values_.data();
    visit_stats(stats, [&](const char*, int64_t& now) { now = (value++)->load(std::memory_order_relaxed); });
    return stats;
  }

 private:
  std::array<std::atomic<int64_t>, sizeof(Stats) / sizeof(int64_t)> values_{};
};

}  // namespace asyncengine
