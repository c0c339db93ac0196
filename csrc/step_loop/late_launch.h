// Holds the next launch back until shortly before the steps in flight are over, so that what arrives meanwhile is in it.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "step_loop/launch_timing.h"

namespace asyncengine {

// Hears when steps are launched, seen and over, and foresees their ends by what LaunchTiming has learned. All times are
// nanoseconds of one steady clock. Steps end in the order of their launch: the oldest in flight is the next to end.
class LateLaunch {
 public:
  // If it is not enabled, every launch is due at once. Ends are foreseen all the same, for until_news().
  LateLaunch(bool enabled, int num_kinds, int max_in_flight)
      : enabled_(enabled), timing_(num_kinds), steps_(static_cast<size_t>(max_in_flight)) {}

  // A step may be launched. True: its launch is not due yet.
  bool hold_back(int64_t now);
  // hold_back() answered false at `asked`, and planning begins at `now`. The plan may turn out empty.
  void begin(int64_t asked, int64_t now);
  // The step of that plan is about to be launched. `kind` and `attended` are the measure of its duration
  // (LaunchTiming).
  void launching(int kind, int64_t attended, int64_t now);
  // The launch of that step has returned.
  void launched(int64_t now) { timing_.launched(now - planned_.due_ns); }

  // The oldest step in flight is not over.
  void pending(int64_t now);
  // The oldest step is over, having begun at `since`: the time of the launch or the look that made it the oldest.
  void ended(int64_t since, int64_t now);
  // The oldest step has failed. Its duration means nothing.
  void failed() { ++oldest_; }

  // Time until the launch that was held back is due; the longest time if none was.
  std::chrono::nanoseconds until_due(int64_t now) const;
  // Time until it makes sense to look whether the oldest step is over. There is a step in flight.
  std::chrono::nanoseconds until_news(int64_t now) const;
  // Launches that were held back until nothing was left to do for the device, or as good as nothing.
  int64_t count() const { return count_; }

 private:
  struct Step {
    int64_t launched_ns = 0;
    int64_t attended = 0;
    int kind = 0;
  };
  bool none_in_flight() const { return oldest_ == next_; }
  Step& step(uint64_t k) { return steps_[k % steps_.size()]; }
  const Step& step(uint64_t k) const { return steps_[k % steps_.size()]; }
  int64_t expected(const Step& s) const { return timing_.expected(s.kind, s.attended); }
  int64_t foresee_end() const;
  int64_t foresee_news() const;
  void too_late(int64_t end_ns);

  bool enabled_;
  LaunchTiming timing_;
  std::vector<Step> steps_;         // in flight: step k is steps_[k % size]
  uint64_t next_ = 1, oldest_ = 1;
  int64_t pending_ns_ = 0;          // the last look at a step that was not over
  int64_t oldest_from_ns_ = 0;      // that look at the step before the oldest: the oldest began after it
  bool held_ = false;               // the next launch was not due at the last look
  struct {
    int64_t looked_ns = 0, due_ns = 0, end_ns = 0;
  } hold_;                          // that look, and when the launch was due and what was in flight expected to end
  struct {
    bool held = false;
    int64_t asked_ns = 0, due_ns = 0;
  } planned_;                       // the launch that is being planned
  uint64_t watched_ = 0;            // the step that was held back, launched, and not yet seen to be in time
  int64_t count_ = 0;
};

}  // namespace asyncengine
