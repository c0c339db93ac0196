// The statistics of a step loop; stats.inl lists them.
#pragma once

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

}  // namespace asyncengine
