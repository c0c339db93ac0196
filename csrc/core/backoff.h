// When something that fails again and again is tried once more.
#pragma once

#include <algorithm>
#include <cstdint>

namespace asyncengine {

// After eight failures in a row it is left alone for a second, and after each further one for twice as long, up to a minute.
// All times are nanoseconds of one steady clock.
class Backoff {
 public:
  static constexpr int kPatience = 8;
  static constexpr int64_t kFirstPauseNs = 1'000'000'000, kLongestPauseNs = 60'000'000'000;

  bool paused(int64_t now_ns) const { return now_ns < until_ns_; }
  void succeeded() { *this = {}; }
  void failed(int64_t now_ns) {
    if (++failures_ >= kPatience) pause(now_ns);
  }
  // A failure that counts for eight. During a pause there is none: what fails then was begun before it.
  void pause(int64_t now_ns) {
    if (paused(now_ns)) return;
    failures_ = kPatience;
    until_ns_ = now_ns + pause_ns_;
    pause_ns_ = std::min(2 * pause_ns_, kLongestPauseNs);
  }

 private:
  int failures_ = 0;
  int64_t pause_ns_ = kFirstPauseNs, until_ns_ = INT64_MIN;
};

}  // namespace asyncengine
