// A fixed set of workers that split loops with their caller.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace asyncengine {

// num_threads - 1 workers plus the caller. One caller at a time; nested calls are not allowed.
// A loop allocates nothing and ends when its items are done: a worker that is still asleep is not waited for.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);  // throws std::invalid_argument below 1
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(item, thread) for every item in [0, num_items), in any order, with thread in [0, num_threads()).
  // body must not throw.
  template <class Body>
  void parallel_for(int64_t num_items, Body&& body) {
    if (num_items <= 1 || workers_.empty()) {
      for (int64_t item = 0; item < num_items; ++item) body(item, 0);
      return;
    }
    auto call = [](void* context, int64_t item, int thread) {
      (*static_cast<std::remove_reference_t<Body>*>(context))(item, thread);
    };
    run(num_items, call, &body);
  }

 private:
  using Call = void (*)(void* context, int64_t item, int thread);

  void run(int64_t num_items, Call call, void* context);
  void work(int thread, uint32_t generation);
  void worker_main(int thread);

  // generation << 32 | items not yet taken. Taking an item is a compare-exchange on the whole word, so that a
  // worker that wakes late can never take an item of a loop that it has not seen; and while an item is taken but
  // not done the caller stays in run(), so call_, context_ and num_items_ are stable for whoever holds one.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};  // what sleeping workers wait on
  std::atomic<bool> stop_{false};
  Call call_ = nullptr;
  void* context_ = nullptr;
  uint32_t num_items_ = 0;
  std::vector<std::thread> workers_;
};

}  // namespace asyncengine
