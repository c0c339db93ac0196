#include "step_loop/late_launch.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace asyncengine {

using std::chrono::nanoseconds;

bool LateLaunch::hold_back(int64_t now) {
  const int64_t end_ns = foresee_end(), due_ns = end_ns - timing_.lead();
  if (now >= due_ns) return false;
  held_ = true;
  hold_ = {now, due_ns, end_ns};
  return true;
}

void LateLaunch::begin(int64_t asked, int64_t now) {
  const bool held = std::exchange(held_, false);
  planned_ = {held, asked, held ? std::max(hold_.due_ns, hold_.looked_ns) : now};
}

void LateLaunch::launching(int kind, int64_t attended, int64_t now) {
  assert(next_ - oldest_ < steps_.size());
  step(next_) = {now, attended, kind};
  watched_ = planned_.held ? next_ : 0;
  if (planned_.held && none_in_flight()) too_late(planned_.asked_ns);
  ++next_;
}

void LateLaunch::pending(int64_t now) {
  pending_ns_ = now;
  watched_ = 0;
}

void LateLaunch::ended(int64_t since, int64_t now) {
  const Step& over = step(oldest_);
  const int64_t foreseen = foresee_news();
  if (pending_ns_ > since && pending_ns_ >= foreseen) {
    timing_.ran(over.kind, over.attended, now - since);
  } else if (now - since < expected(over)) {
    timing_.forget(over.kind);  // over before the look that was to see its end: nobody knows by how much
  } else if (foreseen > since) {
    // The look that was to see the end came late. The time that the thread oversleeps is no part of the step, or the
    // thread would sleep longer and longer.
    timing_.ran(over.kind, over.attended, foreseen - since);
  }
  oldest_from_ns_ = pending_ns_;
  if (watched_ == ++oldest_) too_late(now);
}

// A step that was held back found nothing in flight, or what was in flight was over at the first look after it.
void LateLaunch::too_late(int64_t end_ns) {
  ++count_;
  watched_ = 0;
  // Otherwise the launch itself took too long, which its cost tells.
  if (end_ns < hold_.end_ns) timing_.ended_early();
}

// The earliest time at which the steps in flight will be over; 0: unknown, or there are none.
int64_t LateLaunch::foresee_end() const {
  if (!enabled_ || none_in_flight()) return 0;
  int64_t end = oldest_from_ns_;
  for (uint64_t k = oldest_; k != next_; ++k) {
    const int64_t duration = expected(step(k));
    if (duration == 0) return 0;
    end = std::max(end, step(k).launched_ns) + duration;
  }
  return end;
}

// The time from which on the oldest step may be over; where nobody knows, that of its beginning. Looks every 5 us take
// half of a core.
int64_t LateLaunch::foresee_news() const {
  const Step& oldest = step(oldest_);
  const int64_t duration = expected(oldest);
  return std::max(oldest_from_ns_, oldest.launched_ns) + duration - duration / 16;
}

nanoseconds LateLaunch::until_due(int64_t now) const { return held_ ? nanoseconds(hold_.due_ns - now) : nanoseconds::max(); }

nanoseconds LateLaunch::until_news(int64_t now) const {
  // A step that lasts long past that is looked at less and less: its end may be seen late by half a percent of its
  // time.
  const int64_t past = now - foresee_news();
  return nanoseconds(std::max(-past, past / 200));
}

}  // namespace asyncengine
