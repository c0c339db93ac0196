// What the step thread sleeps on.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

namespace asyncengine {

// A wake-up that is remembered when nobody waits. notify() costs one atomic exchange unless the step thread sleeps.
class Notifier {
 public:
  void notify() {
    if (notified_.exchange(true, std::memory_order_acq_rel)) return;
    { std::lock_guard lock(mutex_); }  // the waiter is either before its check or inside wait
    condition_.notify_one();
  }
  // Returns after a notify(), or after `limit` at the latest; forgets the notify().
  void wait(std::chrono::nanoseconds limit) {
    if (!notified_.exchange(false, std::memory_order_acq_rel)) {
      std::unique_lock lock(mutex_);
      // A system-clock deadline: the form of timed wait that thread sanitizers understand.
      condition_.wait_until(lock, std::chrono::system_clock::now() + limit,
                            [this] { return notified_.load(std::memory_order_acquire); });
      notified_.store(false, std::memory_order_release);
    }
  }

 private:
  std::atomic<bool> notified_{false};
  std::mutex mutex_;
  std::condition_variable condition_;
};

}  // namespace asyncengine
