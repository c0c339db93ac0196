// The engine's heart: a thread that schedules, packs and launches the next step while the last one runs.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/outbox.h"
#include "core/record.h"
#include "core/scheduler.h"
#include "step_loop/disk_blocks.h"
#include "step_loop/executor.h"
#include "step_loop/late_launch.h"
#include "step_loop/life_cycle.h"
#include "step_loop/notifier.h"
#include "step_loop/request_registry.h"
#include "step_loop/step_watch.h"
#include "step_loop/time_limit.h"

namespace asyncengine {

// Nanoseconds of the steady clock.
int64_t steady_now_ns();

struct StepLoopConfig {
#define RECORD StepLoopConfig
#define FIELDS "step_loop/step_loop_config.inl"
#include "core/record.inl"

  const FileOperations* files = &system_files();  // tests bring their own files and clock
  int64_t (*clock)() = &steady_now_ns;
};

// The round: hear what is new, take in results, launch. The requests are the RequestRegistry's, the thread is the
// LifeCycle's, the time of a launch is LateLaunch's, and the longest time of a step is TimeLimit's.
//
// submit, abort and drain belong to one thread, the event loop's; nothing they do makes the step thread wait, and
// nothing the step thread does waits for them.
class StepLoop {
 public:
  StepLoop(const StepLoopConfig& config, std::unique_ptr<Executor> executor);
  ~StepLoop();

  static StepLimits limits(const StepLoopConfig& config) { return config.scheduler.limits(); }

  // Runs on a thread of its own, pinned to core `cpu` if that is one that this process may use (Linux).
  void start(int cpu = -1);
  // Does one round of the step thread's work in the calling thread, instead of start(). Never waits; true when anything
  // moved. It exists to measure what the thread is worth.
  bool advance() noexcept;
  // Time that the thread sleeps when advance() moved nothing, unless something arrives.
  std::chrono::nanoseconds patience() const;
  // Stops the thread; requests still under way are gone without a word. False: after `limit` the executor still runs, or the
  // thread hangs in a call of it. May be called again. Memory that a device may still write to is leaked on purpose.
  // No call of the disk is waited for beyond a second: then the memory of blocks is leaked, and true is answered.
  bool stop(std::chrono::nanoseconds limit);
  // Frees a loop that must not wait: one whose thread hangs is leaked whole. The destructor would wait for the thread.
  static void dispose(StepLoop* loop, std::chrono::nanoseconds limit);

  SubmitResult submit(const RequestSpec& spec);
  // As submit() with an empty queue, and nothing happens.
  SubmitResult check(const RequestSpec& spec) const;
  // Aborts sequence `index` of the request, or all of them.
  void abort(uint64_t id, int32_t index = -1);

  using News = RequestRegistry::News;
  // RequestRegistry::drain(). Returns false once the engine has failed: error() says why. wake() asks for another drain().
  template <typename Visit>
  bool drain(Visit&& visit) {
    registry_.drain(outbox_, std::forward<Visit>(visit));
    return !life_.failed();
  }
  void wake() { outbox_.wake(); }
  // Reasons why steps have failed since the last call, one line each. For the thread that drains.
  std::string take_step_error() { return registry_.take_step_error(); }

  int wake_fd() const { return outbox_.wake_fd(); }
  std::string error() const { return life_.error(); }
  Stats stats() const;  // for any thread, as is the next
  const StepTokens& step_tokens() const { return step_tokens_; }  // of steps that succeeded
  // Turns the recording of steps on or off. For the thread that submits, as the next two.
  void watch(bool on) { watch_.watch(on); }
  // The last `most` steps that were recorded.
  std::vector<StepRecord> last_steps(size_t most) const { return watch_.last(most); }
  // The map as it was found last time, and how many blocks a cell has; the next one is made meanwhile.
  std::pair<std::vector<BlockCell>, int32_t> block_map();
  // Changes of the prefix cache, for one thread to drain.
  BlockEvents& block_events() { return scheduler_.blocks().events(); }
  bool quiescent() const { return quiescent_.load(std::memory_order_acquire); }

 private:
  struct InFlightStep {
    StepPlan plan;
    StepRecord times;
    bool leased = false;
    bool refused = false;  // its launch was
  };

  void run();
  bool round();
  bool retire_oldest(int64_t now);
  bool fail_oldest(InFlightStep& step, int64_t now);
  bool launch_next(int64_t now);
  void record(const InFlightStep& step, int64_t ready);
  bool none_in_flight() const { return oldest_step_ == next_step_; }
  int64_t now_ns() const { return config_.clock(); }
  void publish_stats();
  void close_disk();

  StepLoopConfig config_;
  std::shared_ptr<Notifier> notifier_ = std::make_shared<Notifier>();
  Outbox outbox_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<DiskBlocks> disk_;
  bool disk_closed_ = false, disk_at_rest_ = true;
  LifeCycle life_;
  RequestRegistry registry_;
  Scheduler scheduler_;
  std::shared_ptr<MaskInbox> mask_inbox_;
  TimeLimit limit_;
  LateLaunch late_launch_;
  std::vector<InFlightStep> ring_;  // step k lives in ring_[k % size], and so does its staging buffer
  uint64_t next_step_ = 1, oldest_step_ = 1;
  int failed_in_a_row_ = 0;         // steps
  int64_t failed_steps_ = 0;
  int64_t moved_ns_ = 0;            // the last round that moved something, or had no blocks to move
  bool draining_ = false;           // a step failed: no launch before those in flight are over
  std::atomic<bool> quiescent_{true};
  PublishedStats stats_;
  StepTokens step_tokens_;
  StepWatch watch_;
};

}  // namespace asyncengine
