// A thread that launches steps where a launch may wait for the device.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "step_loop/notifier.h"

namespace asyncengine {

// Copies from and to memory that is not pinned make their caller wait for the device. The step thread hands such launches
// over, so that a kernel that hangs holds up this thread alone, and the step thread's time limit sees it.
class LaunchThread {
 public:
  using Launch = std::function<void(int i, size_t bytes)>;

  explicit LaunchThread(Launch launch) : launch_(std::move(launch)), thread_([this] { run(); }) {}
  // Waits for a launch under way: close() first, and free nothing that it may still use while it answers false.
  ~LaunchThread() {
    close(std::chrono::nanoseconds(0));
    if (thread_.joinable()) thread_.join();
  }
  LaunchThread(const LaunchThread&) = delete;
  LaunchThread& operator=(const LaunchThread&) = delete;

  void push(int i, size_t bytes) {
    {
      std::lock_guard lock(mutex_);
      queue_.push_back({i, bytes});
    }
    changed_.notify_all();
  }
  // Ends the thread; what is queued is never launched. False: a launch still waits after `limit`.
  bool close(std::chrono::nanoseconds limit) {
    std::unique_lock lock(mutex_);
    closing_ = true;
    changed_.notify_all();
    return changed_.wait_until(lock, WaitClock::now() + limit, [this] { return finished_; });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
      if (closing_) break;
      const auto [i, bytes] = queue_.front();
      queue_.pop_front();
      lock.unlock();
      launch_(i, bytes);
      lock.lock();
    }
    finished_ = true;
    changed_.notify_all();
  }

  Launch launch_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<int, size_t>> queue_;
  bool closing_ = false, finished_ = false;
  std::thread thread_;
};

}  // namespace asyncengine
