#include "step_loop/launch_timing.h"

#include <algorithm>

namespace asyncengine {
namespace {

constexpr size_t kEnough = 3;  // one alone may have been an exception
// Contexts shrink a little whenever a sequence is replaced by another: that makes no step unknown.
int64_t with_tolerance(int64_t attended) { return attended + attended / 16; }

}  // namespace

void LaunchTiming::ran(int kind, int64_t attended, int64_t duration) {
  if (kinds_.empty()) return;
  Kind& k = kinds_[static_cast<size_t>(kind)];
  k.runs[k.num_runs++ % kRemembered] = {attended, duration};
}

void LaunchTiming::forget(int kind) {
  if (!kinds_.empty()) kinds_[static_cast<size_t>(kind)].num_runs = 0;
}

int64_t LaunchTiming::expected(int kind, int64_t attended) const {
  if (kinds_.empty()) return 0;
  const Kind& k = kinds_[static_cast<size_t>(kind)];
  int64_t least = INT64_MAX;
  size_t found = 0;
  for (size_t i = 0; i < std::min(k.num_runs, kRemembered); ++i) {
    if (k.runs[i].attended > with_tolerance(attended)) continue;
    least = std::min(least, k.runs[i].duration);
    ++found;
  }
  return found < kEnough ? 0 : least;
}

// Follows a rise at once, and forgets half of it in 89 launches. Beyond the limit it was the process that was stopped.
void LaunchTiming::launched(int64_t cost) {
  cost = std::min(cost, kMostCost);
  cost_ = std::max(cost, cost_ + (cost - cost_) / 128);
  slack_ = std::max(kLeastSlack, slack_ - slack_ / 512);
}

// Doubled here and halved by 355 launches in time: whatever the steps are like, one in some 350 ends too early.
void LaunchTiming::ended_early() { slack_ = std::min(kMostSlack, 2 * slack_); }

}  // namespace asyncengine
