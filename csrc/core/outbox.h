// From the step thread to the event loop: a buffer that only ever changes hands, and one wake-up for all that is in it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/sequence.h"

namespace asyncengine {

// Something the loop can watch: becomes readable when signalled. An eventfd on Linux, a pipe elsewhere.
class WakeUp {
 public:
  WakeUp();
  ~WakeUp();
  WakeUp(const WakeUp&) = delete;
  WakeUp& operator=(const WakeUp&) = delete;

  int fd() const { return read_fd_; }
  void signal();
  void clear();

 private:
  int read_fd_ = -1, write_fd_ = -1;
};

struct OutputEvent {
  Sequence* sequence = nullptr;
  int32_t token = -1;  // -1: an end, or records, without a token
  FinishReason finish = FinishReason::kNone;
  bool on_host = false;  // the token is a host row's
  int64_t time_ns = 0;
};
static_assert(sizeof(OutputEvent) == 24);

// Records (step_output.h) of one event.
struct EventRecords {
  size_t event = 0;  // its place in the delivery
  size_t words = 0;  // that follow those of the event before
};

struct Delivery {
  std::vector<OutputEvent> events;
  std::vector<EventRecords> records;  // of the events that have some, in order
  std::vector<int32_t> record_words;
  std::vector<Request*> released;  // requests that nothing refers to any more: the loop frees them
  std::string step_error;          // why steps failed whose requests end with kStepFailed
  bool engine_failed = false;

  bool empty() const { return events.empty() && released.empty() && !engine_failed; }
  void clear() {
    events.clear();
    records.clear();
    record_words.clear();
    released.clear();
    step_error.clear();
    engine_failed = false;
  }
  void append(const Delivery& later);
  // Adds records to the event that is pushed next.
  void add_records(std::span<const int32_t> words) {
    records.push_back({events.size(), words.size()});
    record_words.insert(record_words.end(), words.begin(), words.end());
  }
};

// Single producer, single consumer, lock-free. The producer fills a delivery of its own and, at publish, exchanges it
// for the one on offer: if the consumer has not taken that yet, the new events are appended to it, so a loop that falls
// behind gets a bigger delivery, never a longer queue.
class Outbox {
 public:
  explicit Outbox(size_t capacity_hint);

  // Step thread.
  Delivery& filling() { return *filling_; }
  void publish();  // no-op when nothing was filled in
  void wake() { wake_.signal(); }  // without a delivery: what the consumer has to hear is elsewhere

  // Event loop. `take` returns null when nothing is on offer; what it returns stays valid until the next take.
  Delivery* take();
  int wake_fd() const { return wake_.fd(); }

 private:
  std::unique_ptr<Delivery> buffers_[3];
  Delivery* filling_;
  Delivery* taken_ = nullptr;
  std::atomic<Delivery*> offered_{nullptr};
  std::atomic<Delivery*> spare_{nullptr};
  std::atomic<bool> signalled_{false};
  WakeUp wake_;
};

}  // namespace asyncengine
