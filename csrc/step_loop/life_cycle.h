// The life of a step loop: its thread, how the thread stops, and how the engine fails.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "core/outbox.h"
#include "step_loop/executor.h"
#include "step_loop/notifier.h"

namespace asyncengine {

// Begins with start(), and ends with stop() or fail(), whichever comes first. A loop without a thread of its own skips start().
class LifeCycle {
 public:
  // The longest sleep of the thread: nothing waits without a limit.
  static constexpr std::chrono::nanoseconds kIdle = std::chrono::milliseconds(200);

  // All three outlive this object. `notifier` wakes the thread.
  LifeCycle(Executor& executor, Notifier& notifier, Outbox& outbox) : executor_(executor), notifier_(notifier), outbox_(outbox) {}

  // Runs `body` on a thread pinned to core `cpu`, if the process may use that core (Linux). `body` returns soon after
  // running() has turned false.
  void start(int cpu, std::function<void()> body);
  // Stops the thread, then closes the executor. False: after `limit` one of them still hangs. May be called again.
  bool stop(std::chrono::nanoseconds limit);
  // The last stop(): waits for the thread itself, however long that takes. False: the executor may still write to its
  // buffers, which therefore must never be freed.
  bool end();

  // Any thread.
  bool running() const { return !stopping_.load(std::memory_order_acquire) && !failed(); }
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  bool ended() const { return ended_.load(std::memory_order_acquire); }  // no thread runs
  std::string error() const { return failed() ? error_ : std::string(); }

  // Step thread. The engine is dead: the event loop hears it once, and the thread ends.
  void fail(std::string why);
  // An exception of unknown effect: fail(), even when memory has run out.
  void die(const char* what) noexcept;

 private:
  Executor& executor_;
  Notifier& notifier_;
  Outbox& outbox_;
  std::atomic<bool> stopping_{false}, failed_{false}, ended_{true};
  std::string error_;   // written before failed_ is set, never after
  bool hangs_ = false;  // stop() has waited in vain
  Notifier end_;        // of the thread
  std::thread thread_;
};

}  // namespace asyncengine
