#include "step_loop/life_cycle.h"

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <utility>

namespace asyncengine {
namespace {

using std::chrono::nanoseconds;

#ifdef __linux__
void pin_this_thread(int cpu) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<size_t>(cpu), &cores);
  (void)pthread_setaffinity_np(pthread_self(), sizeof(cores), &cores);
}

// A thread's sleep may last 50 us longer than it asked for, unless it says less.
void sleep_no_longer_than_asked() { (void)prctl(PR_SET_TIMERSLACK, 1UL); }
#else
void pin_this_thread(int) {}
void sleep_no_longer_than_asked() {}
#endif

}  // namespace

void LifeCycle::start(int cpu, std::function<void()> body) {
  ended_.store(false, std::memory_order_relaxed);
  thread_ = std::thread([this, cpu, body = std::move(body)] {
    if (cpu >= 0) pin_this_thread(cpu);
    sleep_no_longer_than_asked();
    body();
    ended_.store(true, std::memory_order_release);
    end_.notify();
  });
}

bool LifeCycle::stop(nanoseconds limit) {
  stopping_.store(true, std::memory_order_release);
  notifier_.notify();
  const auto deadline = std::chrono::steady_clock::now() + limit;
  const auto left = [&] { return std::max<nanoseconds>(nanoseconds(0), deadline - std::chrono::steady_clock::now()); };
  // A thread that does not hang ends within kIdle, whatever the limit for the executor.
  if (!ended()) end_.wait(std::max<nanoseconds>(left(), 2 * kIdle));
  hangs_ = !ended();
  if (!hangs_ && thread_.joinable()) thread_.join();
  hangs_ = hangs_ || !executor_.close(left());
  return !hangs_;
}

bool LifeCycle::end() {
  const bool stopped = stop(std::chrono::seconds(hangs_ ? 0 : 5));
  if (thread_.joinable()) thread_.join();
  return stopped;
}

void LifeCycle::fail(std::string why) {
  error_ = std::move(why);
  failed_.store(true, std::memory_order_release);
  outbox_.filling().engine_failed = true;
  outbox_.publish();
}

void LifeCycle::die(const char* what) noexcept {
  try {
    fail(std::string("the step thread failed: ") + what);
  } catch (...) {  // no memory, not even for that
    if (!failed()) error_ = "out of memory";  // short enough to need none
    failed_.store(true, std::memory_order_release);
    outbox_.wake();
  }
}

}  // namespace asyncengine
