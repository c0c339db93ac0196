// Request and Sequence: what the scheduler knows of the work.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/step_batch.h"

namespace asyncengine {

struct Request;

enum class FinishReason : int32_t { kNone = 0, kStop = 1, kLength = 2, kAborted = 3, kFailed = 4 };

enum class SequenceState : uint8_t {
  kDormant,     // n > 1: waits for its sibling's prompt to be computed
  kWaiting,     // in the queue, holds nothing
  kRunning,     // holds a slot and blocks
  kPreempting,  // gives them back as soon as no step in flight touches them, then waits again
  kFinished,    // likewise, then is released
  kReleased,
};

// Counts of tokens, in order:  committed <= computed <= total = num_tokens + pending.
//
// A decode step touches the first cache line of every running sequence to schedule it, and the second as well to commit
// its token: what belongs to neither stays out of them.
struct alignas(64) Sequence {
  Request* request = nullptr;
  uint64_t planned_step = 0;  // the last step that has a row of this sequence
  int32_t num_tokens = 0;     // known: prompt and output; the size of `tokens`
  int32_t pending = 0;        // tokens being sampled by steps in flight: placeholders
  int32_t computed = 0;       // tokens whose KV a launched step writes
  int32_t committed = 0;      // tokens whose KV a retired step has written
  int32_t max_total = 0;      // prompt and output tokens at most
  int32_t capacity = 0;       // tokens that the blocks it holds have room for
  int32_t in_flight = 0;      // rows of this sequence in steps in flight
  int32_t slot = -1;
  int32_t published_end = 0;  // tokens in blocks that the prefix cache knows
  SequenceState state = SequenceState::kDormant;
  bool on_device = false;     // last_token[slot] is, or will be, this sequence's latest token
  bool forked = false;        // the block it writes next may be shared with a sibling
  bool greedy = true;         // temperature 0

  static constexpr int kInlineStops = 4;
  alignas(64) std::vector<int32_t> tokens;  // capacity reserved for all there can be
  uint64_t chain = 0;                       // prefix chain of the blocks published so far
  int32_t num_stops = 0;                    // the first few are here, all of them with the request
  int32_t stops[kInlineStops] = {};
  int32_t index = 0;                        // among the n of its request

  FinishReason finish = FinishReason::kNone;
  SamplingState sampling;
  uint64_t first_sample_step = 0;  // the step that computed the last of its prompt, since it has its slot
  int32_t blocks_coming = 0;       // while retiring: blocks that settling will give back
  std::atomic<bool> abort_requested{false};  // set by the loop, read by the step thread
  uint64_t drain_epoch = 0;        // loop side: the drain that last saw this sequence, and its place in it
  size_t drain_place = 0;

  int32_t total() const { return num_tokens + pending; }
  void append(int32_t token) {
    tokens.push_back(token);
    ++num_tokens;
  }
  bool stops_at(int32_t token) const;
};

// Built on the loop's thread, then owned by it throughout: the step thread never allocates or frees one.
struct Request {
  uint64_t id = 0;
  int64_t order = 0;        // smaller runs sooner: arrival plus priority times ageing, so that nothing starves
  uint64_t sequence_number = 0;  // breaks ties of order: first come, first served
  uint64_t salt = 0;
  int32_t prompt_len = 0;
  std::vector<int32_t> stop_tokens;
  std::vector<Sequence> sequences;  // n of them, fixed at construction
  int32_t unreleased = 0;
  int32_t cached_tokens = 0;
  int64_t scheduled_ns = 0;  // first scheduled
  bool queued = false;      // counts against the queue limits

  // Inbox.
  Request* next_submitted = nullptr;
  Request* next_aborted = nullptr;
  std::atomic<bool> abort_under_way{false};  // a message that names this request is in the abort inbox
  std::atomic<int32_t> inbox_references{0};  // messages under way that name this request: it may not be freed before

  bool before(const Request& other) const {
    return order != other.order ? order < other.order : sequence_number < other.sequence_number;
  }
};

inline bool Sequence::stops_at(int32_t token) const {
  for (int i = 0; i < num_stops && i < kInlineStops; ++i) {
    if (stops[i] == token) return true;
  }
  return num_stops > kInlineStops &&
         std::find(request->stop_tokens.begin(), request->stop_tokens.end(), token) != request->stop_tokens.end();
}

// A request as it is submitted.
struct RequestSpec {
  uint64_t id = 0;
  std::vector<int32_t> prompt;
  int32_t n = 1;
  int32_t max_tokens = 0;
  int32_t priority = 0;  // smaller runs sooner
  uint64_t salt = 0;
  SamplingState sampling;  // sequence i samples with seed + i
  std::vector<int32_t> stop_tokens;
};

std::unique_ptr<Request> make_request(const RequestSpec& spec, int64_t order, uint64_t sequence_number);

}  // namespace asyncengine
