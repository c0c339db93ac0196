// Parts of tests with host rows: workers that fail, hang and take their time on demand, a clock that jumps, and for a
// scheduler without threads a mover and an attention that are over at once.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "core/wait_clock.h"
#include "engine_fixture.h"
#include "scheduler_fixture.h"

namespace asyncengine::testing {

// One test at a time, so one for all.
struct Workers {
  std::atomic<int64_t> jobs{0};      // so many have begun
  std::atomic<int64_t> fails{-1};    // the n-th job, or
  std::atomic<bool> all_fail{false};
  std::atomic<int64_t> hangs{-1};    // the n-th job, until release()
  std::atomic<int> delay_us{0};      // up to so long, of each

  void reset() {
    jobs = 0;
    fails = hangs = -1;
    all_fail = false;
    delay_us = 0;
    released_ = false;
    hanging_ = 0;
  }
  void attend(const HostAttentionJob& job) {
    const int64_t n = jobs++;
    if (n == hangs) hang();
    if (all_fail || n == fails) throw std::runtime_error("a worker fails");
    const int most = delay_us;
    if (most > 0) std::this_thread::sleep_for(std::chrono::microseconds((n * 7919 + job.slot * 104729) % most));
  }
  void await_hanging() {
    std::unique_lock lock(mutex_);
    CHECK(changed_.wait_until(lock, WaitClock::now() + 20s, [this] { return hanging_ > 0; }));
  }
  bool hanging() {
    const std::lock_guard lock(mutex_);
    return hanging_ > 0;
  }
  void release() {
    const std::lock_guard lock(mutex_);
    released_ = true;
    changed_.notify_all();
  }

 private:
  void hang() {
    std::unique_lock lock(mutex_);
    ++hanging_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return released_; });
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool released_ = false;
  int hanging_ = 0;
};
inline Workers workers;

inline std::atomic<int64_t> clock_ahead{0}, clock_reads{0};
inline int64_t jumping_now_ns() {
  ++clock_reads;
  return steady_now_ns() + clock_ahead.load();
}

// 150 ms, of which the thread that is to see them pass takes no more than two at once for time in which it ran.
inline void pass_time(Engine& engine) {
  clock_ahead += 150'000'000;
  engine.loop->block_map();  // wakes the thread
  CHECK(engine.receive(1ms));
}

// Options with so few blocks that somebody is on the host most of the time.
inline Options crowded() {
  workers.reset();
  clock_ahead = 0;
  Options options;
  options.num_blocks = 20;
  options.num_host_blocks = 200;
  options.max_num_seqs = 8;
  options.max_model_len = 192;
  options.hybrid = {.lanes = 2, .layers = 3};
  options.hybrid.job_timeout_ns = int64_t{100} * 1'000'000'000;  // longer than any test takes
  options.step_timeout = std::chrono::hours(1000);
  options.clock = &jumping_now_ns;
  options.before_attending = [](const HostAttentionJob& job) { workers.attend(job); };
  return options;
}

class DoneMover final : public BlockMover {
 public:
  explicit DoneMover(int32_t num_host_blocks) : num_host_blocks_(num_host_blocks) {}
  int32_t num_host_blocks() const override { return num_host_blocks_; }
  int32_t max_moves() const override { return 4; }
  size_t block_bytes() const override { return 0; }
  std::byte* host_block(int32_t) override { return nullptr; }
  bool start(int, std::span<const BlockMove>) override { return !refuses; }
  MoveStatus poll(int transfer) override { return transfer == slow ? MoveStatus::kPending : MoveStatus::kDone; }
  bool refuses = false;
  int slow = -1;  // transfer

 private:
  int32_t num_host_blocks_;
};

class DoneAttention final : public HostAttention {
 public:
  int32_t num_layers() const override { return 1; }
  void post(const HostAttentionJob&) override { ++posted; }
  HostAttentionStatus poll(int32_t slot) override {
    return slot == hangs ? HostAttentionStatus::kPending : HostAttentionStatus::kDone;
  }
  void cancel(int32_t) override {}
  bool close(std::chrono::nanoseconds) override { return true; }
  int posted = 0;
  int32_t hangs = -1;  // slot
};

class HybridBench : public Bench {
 public:
  explicit HybridBench(const SchedulerConfig& config, int steps_in_flight = 1)
      : Bench(config, steps_in_flight), mover(config.num_host_blocks) {
    scheduler.move_blocks_with(mover);
    if (config.hybrid.lanes > 0) scheduler.attend_on_host_with(attention);
  }
  void round(int64_t now_ns = 1) {
    scheduler.move_blocks(outbox, now_ns, now_ns);
    while (launch() != nullptr) pack();
    commit(2);
  }
  void rounds(int count) {
    for (int i = 0; i < count; ++i) round();
  }
  Stats stats() { return scheduler.stats(); }

  DoneMover mover;
  DoneAttention attention;
};

}  // namespace asyncengine::testing
