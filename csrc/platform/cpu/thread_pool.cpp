#include "platform/cpu/thread_pool.h"

#include <chrono>
#include <limits>
#include <stdexcept>
#include <string>

namespace asyncengine {
namespace {

// Between two loops of a forward lie some 10-60 us of Python and of kernels too small to be split; a worker that slept
// through each of them would cost a futex wake-up (5-50 us) per kernel. Longer than this, the core belongs to somebody
// else.
constexpr auto kSpin = std::chrono::microseconds(100);

void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until value differs from old: spins, then sleeps.
void wait_while_equal(const std::atomic<uint32_t>& value, uint32_t old) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      cpu_relax();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  if (num_threads < 1) {
    throw std::invalid_argument("a thread pool needs at least 1 thread, got " + std::to_string(num_threads));
  }
  workers_.reserve(static_cast<size_t>(num_threads - 1));
  for (int thread = 1; thread < num_threads; ++thread) {
    workers_.emplace_back([this, thread] { worker_main(thread); });
  }
}

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(int64_t num_items, Call call, void* context) {
  if (num_items > std::numeric_limits<uint32_t>::max()) throw std::invalid_argument("too many items in one loop");
  call_ = call;
  context_ = context;
  num_items_ = static_cast<uint32_t>(num_items);
  done_.store(0, std::memory_order_relaxed);
  const uint32_t generation = generation_.load(std::memory_order_relaxed) + 1;
  ticket_.store(uint64_t{generation} << 32 | num_items_, std::memory_order_release);
  generation_.store(generation, std::memory_order_release);
  generation_.notify_all();

  work(0, generation);
  for (uint32_t done = done_.load(std::memory_order_acquire); done != num_items_; done = done_.load(std::memory_order_acquire)) {
    wait_while_equal(done_, done);
  }
}

void ThreadPool::work(int thread, uint32_t generation) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (ticket >> 32 == generation && static_cast<uint32_t>(ticket) != 0) {
    if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
      continue;
    }
    const uint32_t num_items = num_items_;
    call_(context_, num_items - static_cast<uint32_t>(ticket), thread);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_items) done_.notify_one();
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void ThreadPool::worker_main(int thread) {
  uint32_t seen = 0;
  while (true) {
    wait_while_equal(generation_, seen);
    seen = generation_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    work(thread, seen);
  }
}

}  // namespace asyncengine
