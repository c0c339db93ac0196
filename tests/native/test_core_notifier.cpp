// The notifier of the step thread: a notification is remembered, never lost, and no wait is without a limit.
#include <atomic>
#include <thread>

#include "check.h"
#include "step_loop/notifier.h"

namespace {

using namespace asyncengine;
using namespace std::chrono_literals;

}  // namespace

TEST(notifier_remembers_one_notification) {
  Notifier notifier;
  notifier.notify();
  notifier.notify();
  const auto start = std::chrono::steady_clock::now();
  notifier.wait(60s);
  CHECK(std::chrono::steady_clock::now() - start < 30s);  // at once, not after the limit
  notifier.wait(1ms);  // both were one; returns all the same
}

TEST(notifier_loses_no_wake_up) {
  // Ping-pong on relaxed counters: only the notifier says when to look again.
  Notifier there, back;
  std::atomic<int> sent{0}, received{0};
  constexpr int kRounds = 20'000;
  const auto await = [](Notifier& notifier, const std::atomic<int>& counter, int value) {
    const auto start = std::chrono::steady_clock::now();
    while (counter.load(std::memory_order_relaxed) < value) {
      if (std::chrono::steady_clock::now() - start >= 20s) return false;
      notifier.wait(20s);
    }
    return true;
  };
  std::thread other([&] {
    for (int i = 1; i <= kRounds && await(there, sent, i); ++i) {
      received.store(i, std::memory_order_relaxed);
      back.notify();
    }
  });
  int i = 1;
  for (; i <= kRounds; ++i) {
    sent.store(i, std::memory_order_relaxed);
    there.notify();
    if (!await(back, received, i)) break;
  }
  other.join();
  CHECK_EQ(i, kRounds + 1);
}
