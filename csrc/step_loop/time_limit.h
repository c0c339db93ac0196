// Time limit of the oldest step in flight.
#pragma once

#include <chrono>
#include <cstdint>

#include "step_loop/executor.h"

namespace asyncengine {

// Counts the time in which the step could go on: neither a process that was stopped nor an executor that was held up counts
// against the limit. All times are nanoseconds of one steady clock.
class TimeLimit {
 public:
  // `idle`: the longest time between two looks of a thread that runs.
  TimeLimit(std::chrono::nanoseconds limit, std::chrono::nanoseconds idle) : limit_(limit.count()), idle_(idle.count()) {}

  // The thread runs. Call it once a round.
  void look(int64_t now);
  // Another step in flight is the oldest from now on.
  void restart(int64_t now);
  // True if the oldest step has used up its time.
  bool over(int64_t now, Executor& executor);
  // Time for which nobody needs to ask over().
  std::chrono::nanoseconds until_look(int64_t now) const;
  // `now` less all time in which the process was stopped, or its machine slept: the clock of every limit on work that the
  // process does itself.
  int64_t awake(int64_t now) const { return now - stopped_ns_; }
  // Time that the oldest step has taken, awake.
  int64_t took(int64_t now) const { return awake(now) - began_awake_ns_; }
  // Time at which the oldest step began to run, as far as polling shows: a little later.
  int64_t since() const { return since_ns_; }

 private:
  int64_t limit_, idle_;
  int64_t since_ns_ = 0, began_awake_ns_ = 0;
  int64_t last_look_ns_ = 0;
  int64_t stopped_ns_ = 0;        // in all: the thread did not run either
  int64_t held_up_from_ns_ = -1;  // Executor::held_up_ns() when somebody first asked about this step
};

}  // namespace asyncengine
