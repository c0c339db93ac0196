// Time of the next launch: early enough that the device never waits, and no sooner, so that requests that arrive until
// then are in the step.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace asyncengine {

// Knows how long steps have taken and how long a launch takes. All times are nanoseconds. Every guess errs towards an early
// launch, which costs nothing but the wait of requests that arrive after it; a late one is a bubble.
class LaunchTiming {
 public:
  // Steps of one kind do the same work but for attention, of which `attended` is the measure (StepPlan::attended). Without
  // kinds nothing is known of any step.
  explicit LaunchTiming(int num_kinds) : kinds_(static_cast<size_t>(num_kinds)) {}

  // A step has taken so long.
  void ran(int kind, int64_t attended, int64_t duration);
  // Durations of earlier steps of a kind hold no longer.
  void forget(int kind);
  // Least duration of a step: the least of the last ones of its kind that attended to as much or less. 0: unknown.
  int64_t expected(int kind, int64_t attended) const;

  // Time before the end of the work in flight at which the next launch is due.
  int64_t lead() const { return cost_ + slack_; }
  // A step was planned, packed and launched, which took `cost` from the moment it was due.
  void launched(int64_t cost);
  // A launch came too late, because what was in flight ended before it was expected to.
  void ended_early();

 private:
  static constexpr size_t kRemembered = 8;
  struct Run {
    int64_t attended, duration;
  };
  struct Kind {
    std::array<Run, kRemembered> runs;
    size_t num_runs = 0;
  };
  // Covers what a launch takes to reach the device once it is enqueued (10 to 30 us) and jitter of the step's end.
  static constexpr int64_t kLeastSlack = 100'000;
  static constexpr int64_t kMostSlack = 10'000'000;
  static constexpr int64_t kMostCost = 100'000'000;  // longer than steps take: then every launch is at once

  std::vector<Kind> kinds_;
  int64_t cost_ = 0;
  int64_t slack_ = kLeastSlack;
};

}  // namespace asyncengine
