// The engine's heart: a thread that schedules, packs and launches the next step while the last one runs.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/outbox.h"
#include "core/scheduler.h"
#include "step_loop/executor.h"
#include "step_loop/launch_timing.h"
#include "step_loop/notifier.h"

namespace asyncengine {

// Nanoseconds of the steady clock.
int64_t steady_now_ns();

struct StepLoopConfig {
  SchedulerConfig scheduler;
  int steps_in_flight = 2;
  int64_t max_queued_requests = 4096;
  int64_t max_queued_tokens = int64_t{1} << 22;
  std::chrono::nanoseconds priority_ageing{std::chrono::seconds(30)};
  std::chrono::nanoseconds step_timeout{std::chrono::seconds(600)};
  // Plan a step shortly before the ones in flight are over, so that what arrives meanwhile is in it. Off: as soon as there
  // is room in flight, as with an executor whose steps cannot be foreseen.
  bool late_launch = false;
  int64_t (*clock)() = &steady_now_ns;  // tests bring their own
};

enum class SubmitResult { kAccepted, kQueueFull, kTooLarge, kClosed, kDuplicate, kUnserved };

// Snapshot, safe from any thread.
struct StepLoopStats {
  int64_t running, waiting, preemptions, prefix_queries, prefix_hits, prompt_tokens, generated_tokens, free_blocks,
      free_slots, num_blocks, steps, late_launches, leases, queued_requests, queued_tokens, live_requests, cached_blocks,
      block_references, failed_steps;
};

// submit, abort and drain belong to one thread, the event loop's; nothing they do makes the step thread wait, and
// nothing the step thread does waits for them.
class StepLoop {
 public:
  StepLoop(const StepLoopConfig& config, std::unique_ptr<Executor> executor);
  ~StepLoop();

  static StepLimits limits(const StepLoopConfig& config) { return Scheduler(config.scheduler).limits(); }

  // Runs on a thread of its own, pinned to core `cpu` if that is one that this process may use (Linux).
  void start(int cpu = -1);
  // Instead of start(): one round of the step thread's work, by whoever calls. Never waits; true when anything moved.
  // It exists to measure what the thread is worth.
  bool advance() noexcept;
  // How long the thread sleeps when advance() moved nothing, unless something arrives.
  std::chrono::nanoseconds patience() const;
  // Stops the thread; requests still under way are gone without a word. False: after `limit` the executor still runs, or the
  // thread hangs in a call of it. May be called again. Memory that a device may still write to is leaked on purpose.
  bool stop(std::chrono::nanoseconds limit);
  // Frees a loop that must not wait: one whose thread hangs is leaked whole. The destructor would wait for the thread.
  static void dispose(StepLoop* loop, std::chrono::nanoseconds limit);

  SubmitResult submit(const RequestSpec& spec);
  // Aborts sequence `index` of the request, or all of them.
  void abort(uint64_t id, int32_t index = -1);

  // Calls visit(news) once per sequence that has some, in the order of their first event,
  // then frees what is released. Returns false once the engine has failed: error() says why.
  // If memory runs out, here or in a visit, the exception passes through and nothing is lost: the next drain() goes on where
  // this one ended, with the same news. wake() asks for it.
  template <typename Visit>
  bool drain(Visit&& visit) {
    accept();  // of a drain that was interrupted, or else what is on offer
    while (next_news_ < num_news_) {
      visit(static_cast<const News&>(news_[next_news_]));
      ++next_news_;
    }
    free_released();
    return !failed_.load(std::memory_order_acquire);
  }
  void wake() { outbox_.wake(); }
  // Why steps have failed since the last call, one line each. For the thread that drains.
  std::string take_step_error() { return std::exchange(step_error_, {}); }
  struct News {
    const Sequence* sequence = nullptr;
    struct Record {
      uint32_t kind;
      int32_t token;  // its place among `tokens`; -1: it is of none of them
      size_t begin, words;
    };
    std::vector<int32_t> tokens;
    std::vector<Record> records;
    std::vector<int32_t> record_words;  // where their payload is
    FinishReason finish = FinishReason::kNone;
    int64_t first_ns = 0, last_ns = 0;  // of its first and last event in this delivery

    std::span<const int32_t> payload(const Record& r) const { return std::span(record_words).subspan(r.begin, r.words); }
    void add_records(std::span<const int32_t> words, bool of_next_token);
  };

  int wake_fd() const { return outbox_.wake_fd(); }
  std::string error() const { return failed_.load(std::memory_order_acquire) ? error_ : std::string(); }
  StepLoopStats stats() const;
  bool quiescent() const { return quiescent_.load(std::memory_order_acquire); }

 private:
  struct InFlightStep {
    StepPlan plan;
    int64_t launched_ns = 0;
    int kind = 0;
    bool leased = false;
    bool refused = false;  // its launch was
  };
  struct LeftQueue final : Scheduler::QueueObserver {
    explicit LeftQueue(StepLoop& step_loop) : loop(step_loop) {}
    void left_queue(const Request& request) override;
    StepLoop& loop;
  };

  // Step thread.
  void run();
  bool round();
  void note_gap(int64_t now);
  bool overdue(const InFlightStep& step, int64_t now);
  void die(const char* what) noexcept;
  bool fail_oldest(InFlightStep& step, int64_t now);
  void restart_clock(int64_t now);
  bool retire_oldest(int64_t now);
  bool launch_next(int64_t now);
  bool hold_back(int64_t now);
  int64_t foresee_end() const;
  int64_t foresee_news() const;
  void saw_pending(int64_t now);
  void saw_end(const InFlightStep& step, int64_t now);
  void launched_late(int64_t end_ns);
  int64_t now_ns() const { return config_.clock(); }
  void receive();
  void fail(std::string why);
  void publish_stats();

  // Event loop.
  void accept();
  size_t group(const Delivery& delivery);
  void collect(const Delivery& delivery);
  void free_released();

  StepLoopConfig config_;
  std::shared_ptr<Notifier> notifier_ = std::make_shared<Notifier>();
  Outbox outbox_;
  std::unique_ptr<Executor> executor_;
  Scheduler scheduler_;
  LeftQueue left_queue_{*this};
  std::vector<InFlightStep> ring_;  // step k lives in ring_[k % size], and so does its staging buffer
  uint64_t next_step_ = 1, oldest_step_ = 1;
  int64_t oldest_since_ns_ = 0;     // when the oldest step in flight began to run, as far as polling shows: a little later
  int failed_in_a_row_ = 0;         // steps
  int64_t failed_steps_ = 0;
  bool draining_ = false;           // a step failed: no launch before those in flight are over

  // What does not count against the oldest step's time limit.
  int64_t last_round_ns_ = 0;
  int64_t stopped_ns_ = 0;          // this thread did not run either
  int64_t held_up_from_ns_ = -1;    // Executor::held_up_ns() when somebody first asked about this step

  // Late launch, and when to look whether a step is over.
  LaunchTiming timing_;
  int64_t pending_ns_ = 0;          // the last look at a step that was not over
  int64_t oldest_from_ns_ = 0;      // that look at the step before the oldest: the oldest began after it
  bool held_ = false;               // the next launch was not due at the last look
  struct {
    int64_t looked_ns = 0, due_ns = 0, end_ns = 0;
  } hold_;                          // that look, and when the launch was due and what was in flight expected to end
  uint64_t watched_step_ = 0;       // held back, launched, and no look yet at whether that was in time
  int64_t late_launches_ = 0;

  std::atomic<Request*> submitted_{nullptr}, aborted_{nullptr};  // lock-free stacks; the step thread takes all at once
  std::atomic<bool> stopping_{false}, failed_{false}, quiescent_{true};
  std::atomic<bool> ended_{true};  // the step thread does not run
  bool hangs_ = false;  // stop() has waited in vain
  Notifier end_;
  std::atomic<int64_t> queued_requests_{0}, queued_tokens_{0}, live_requests_{0};
  std::string error_;  // written before failed_ is set, never after

  std::unordered_map<uint64_t, std::unique_ptr<Request>> requests_;  // event loop only
  std::vector<std::unique_ptr<Request>> released_;  // released, but still named by a message under way
  Delivery* delivery_ = nullptr;    // taken, and not yet in news_ and released_
  std::vector<News> news_;
  size_t num_news_ = 0, next_news_ = 0;  // the next one to be visited
  std::string step_error_;
  uint64_t drain_epoch_ = 0, next_sequence_number_ = 0;

  struct AtomicStats {
    std::atomic<int64_t> running{0}, waiting{0}, preemptions{0}, prefix_queries{0}, prefix_hits{0}, prompt_tokens{0},
        generated_tokens{0}, free_blocks{0}, free_slots{0}, steps{0}, late_launches{0}, leases{0}, cached_blocks{0},
        block_references{0}, failed_steps{0};
  } stats_;
  std::thread thread_;
};

}  // namespace asyncengine
