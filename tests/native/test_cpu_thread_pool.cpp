#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "platform/cpu/thread_pool.h"

using asyncengine::ThreadPool;

TEST(thread_pool_runs_every_item_once) {
  for (int threads = 1; threads <= 4; ++threads) {
    ThreadPool pool(threads);
    CHECK_EQ(pool.num_threads(), threads);
    for (const int64_t items : {0, 1, 2, 3, 100, 1000}) {
      std::vector<int> runs(static_cast<size_t>(items), 0);  // plain ints: a race is TSan's to find
      pool.parallel_for(items, [&](int64_t item, int thread) {
        ++runs[static_cast<size_t>(item)];
        CHECK(thread >= 0 && thread < threads);
      });
      for (const int count : runs) CHECK_EQ(count, 1);
    }
  }
}

TEST(thread_pool_survives_many_short_loops) {
  ThreadPool pool(3);
  int64_t total = 0;
  for (int loop = 0; loop < 20000; ++loop) {
    int64_t sums[3] = {};
    const int64_t items = 2 + loop % 5;
    pool.parallel_for(items, [&](int64_t item, int thread) { sums[thread] += item; });
    total += sums[0] + sums[1] + sums[2] - items * (items - 1) / 2;
  }
  CHECK_EQ(total, 0);
}

TEST(thread_pool_wakes_workers_that_sleep) {
  ThreadPool pool(2);
  for (int round = 0; round < 3; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    // Both items wait for each other, so that each needs a thread of its own.
    std::atomic<int> arrived{0};
    pool.parallel_for(2, [&](int64_t, int) {
      arrived.fetch_add(1);
      while (arrived.load() < 2) std::this_thread::yield();
    });
    CHECK_EQ(arrived.load(), 2);
  }
}

TEST(thread_pool_rejects_no_threads) {
  bool threw = false;
  try {
    ThreadPool pool(0);
  } catch (const std::invalid_argument&) {
    threw = true;
  }
  CHECK(threw);
}
