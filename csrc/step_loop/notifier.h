// The notifier on which the step thread sleeps.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "core/wait_clock.h"

namespace asyncengine {

// A wake-up that is remembered when nobody waits. notify() costs one atomic exchange unless the step thread sleeps.
class Notifier {
 public:
  void notify() {
    if (notified_.exchange(true, std::memory_order_acq_rel)) return;
    {
      std::lock_guard lock(mutex_);
    }  // the waiter is either before its check or inside wait
    condition_.notify_one();
  }
  // Returns after a notify(), or after `limit` at the latest; forgets the notify().
  void wait(std::chrono::nanoseconds limit) {
    if (!notified_.exchange(false, std::memory_order_acq_rel)) {
      std::unique_lock lock(mutex_);
      condition_.wait_until(lock, WaitClock::now() + limit, [this] { return notified_.load(std::memory_order_acquire); });
      // An exchange, not a store: a notify() that found the flag still set has returned, and what it announced must
      // be visible to the waiter from here on.
      notified_.exchange(false, std::memory_order_acq_rel);
    }
  }

 private:
  std::atomic<bool> notified_{false};
  std::mutex mutex_;
  std::condition_variable condition_;
};

}  // namespace asyncengine
