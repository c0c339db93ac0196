#include "step_loop/time_limit.h"

#include <algorithm>
#include <utility>

namespace asyncengine {

void TimeLimit::look(int64_t now) {
  const int64_t gap = now - std::exchange(last_look_ns_, now);
  if (gap > 2 * idle_) stopped_ns_ += gap - idle_;  // the process was stopped, or its machine was
}

void TimeLimit::restart(int64_t now) {
  since_ns_ = now;
  began_awake_ns_ = awake(now);
  held_up_from_ns_ = -1;
}

bool TimeLimit::over(int64_t now, Executor& executor) {
  const int64_t waited = took(now);
  if (waited <= limit_ / 4) return false;
  // The executor is asked only now: looking may cost the executor something.
  const int64_t held_up = executor.held_up_ns(now);
  if (held_up_from_ns_ < 0) held_up_from_ns_ = held_up;
  return waited - (held_up - held_up_from_ns_) > limit_;
}

std::chrono::nanoseconds TimeLimit::until_look(int64_t now) const {
  constexpr int64_t kSurelyPast = 100'000, kPast = 10'000'000;
  const int64_t left = limit_ - took(now) + kSurelyPast;
  // Before the limit, over() wants to look when a quarter of it is gone. Past the limit, only the time for which the step
  // could not go on keeps the step alive.
  return std::chrono::nanoseconds(left > 0 ? std::min(left, limit_ / 4) : kPast);
}

}  // namespace asyncengine
