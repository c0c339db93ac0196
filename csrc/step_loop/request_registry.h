// The requests of a step loop: the event loop submits, aborts and drains them here, and the step thread receives them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/outbox.h"
#include "core/scheduler.h"
#include "core/sequence.h"
#include "core/tenants.h"

namespace asyncengine {

enum class SubmitResult { kAccepted, kQueueFull, kTooLarge, kClosed, kDuplicate, kUnserved };

struct RegistryConfig {
  int64_t max_total = 0;   // computed tokens of a sequence: all of prompt and output but the last
  int32_t block_size = 0;
  Needs needs = 0;         // that the executor serves
  int64_t max_queued_requests = 0;
  int64_t max_queued_tokens = 0;  // of prompts
  std::chrono::nanoseconds priority_ageing{};
};

// Owns every request from submit() until nothing refers to it any more. Two threads use it, and neither waits for the other.
class RequestRegistry final : public QueueObserver {
 public:
  explicit RequestRegistry(const RegistryConfig& config) : config_(config) {}

  // ---- the event loop's side

  // kAccepted: submit() would take the request if the queue had room.
  SubmitResult check(const RequestSpec& spec, const Scheduler& scheduler) const;
  // kAccepted: the step thread finds the request at its next receive(). `scheduler` says whether the request can ever run.
  SubmitResult submit(const RequestSpec& spec, const Scheduler& scheduler, int64_t now_ns);
  // Aborts sequence `index` of the request, or all of them. True: the step thread has to receive() that.
  bool abort(uint64_t id, int32_t index);

  struct News {
    const Sequence* sequence = nullptr;
    struct Record {
      uint32_t kind;
      int32_t token;  // its place among `tokens`, behind them if that is still to come; -1: it is of none of them
      size_t begin, words;
    };
    std::vector<int32_t> tokens;
    int32_t host_tokens = 0;  // of these, those of a host row
    std::vector<Record> records;
    std::vector<int32_t> record_words;  // where their payload is
    FinishReason finish = FinishReason::kNone;
    int64_t first_ns = 0, last_ns = 0;  // of its first and last event in this delivery

    std::span<const int32_t> payload(const Record& r) const { return std::span(record_words).subspan(r.begin, r.words); }
    void add_records(std::span<const int32_t> words, bool of_next_token);
  };
  // Calls visit(news) once per sequence that has some, in the order of their first event, then frees what is released.
  // If memory runs out, here or in a visit, the exception passes through and nothing is lost: the next drain() goes on where
  // this one ended, with the same news.
  template <typename Visit>
  void drain(Outbox& outbox, Visit&& visit) {
    accept(outbox);  // of a drain that was interrupted, or else what is on offer
    while (next_news_ < num_news_) {
      visit(static_cast<const News&>(news_[next_news_]));
      ++next_news_;
    }
    free_released();
  }
  // Reasons why steps have failed since the last call, one line each.
  std::string take_step_error() { return std::exchange(step_error_, {}); }

  // ---- the step thread's side

  // Takes in what was submitted and aborted since the last call.
  void receive(Scheduler& scheduler, Outbox& outbox);
  void left_queue(const Request& request) override;

  // ---- any thread

  int64_t queued_requests() const { return queued_requests_.load(std::memory_order_relaxed); }
  int64_t queued_tokens() const { return queued_tokens_.load(std::memory_order_relaxed); }
  int64_t live_requests() const { return live_requests_.load(std::memory_order_relaxed); }

 private:
  void accept(Outbox& outbox);
  size_t group(const Delivery& delivery);
  void collect(const Delivery& delivery);
  void free_released();

  RegistryConfig config_;
  std::atomic<Request*> submitted_{nullptr}, aborted_{nullptr};  // lock-free stacks; the step thread takes all at once
  std::atomic<int64_t> queued_requests_{0}, queued_tokens_{0}, live_requests_{0};

  // The event loop's alone.
  Tenants tenants_;
  std::unordered_map<uint64_t, std::unique_ptr<Request>> requests_;
  std::vector<std::unique_ptr<Request>> released_;  // released, but still named by a message under way
  Delivery* delivery_ = nullptr;    // taken, and not yet in news_ and released_
  std::vector<News> news_;
  size_t num_news_ = 0, next_news_ = 0;  // the next one to be visited
  std::string step_error_;
  uint64_t drain_epoch_ = 0, next_sequence_number_ = 0;
};

}  // namespace asyncengine
