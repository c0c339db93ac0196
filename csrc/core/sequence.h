// Request and Sequence: what the scheduler knows of the work.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/mask_board.h"
#include "core/record.h"
#include "core/step_batch.h"
#include "core/tokens.h"

namespace asyncengine {

struct Request;
struct Tenant;  // tenants.h

enum class FinishReason : int8_t {
  kNone = 0,
  kStop = 1,
  kLength = 2,
  kAborted = 3,
  kFailed = 4,      // its logits were not finite
  kStepFailed = 5,  // a step that it was part of failed
};

enum class SequenceState : uint8_t {
  kDormant,     // n > 1: waits for its sibling's prompt to be computed
  kWaiting,     // in the queue, holds nothing
  kLoading,     // blocks of its prefix are on their way from the host; then it waits again
  kRunning,     // holds a slot and blocks
  kPreempting,  // gives them back as soon as no step in flight touches them, then waits again
  kFinished,    // likewise, then is released
  kReleased,
  kHosted,      // holds a slot and blocks of the host, and decodes there; or is on its way
};

// Entries, one behind the other (entry_header in step_input.h).
struct EntryWords : std::vector<int32_t> {
  using vector::vector;
};
using MaskChannels = std::vector<std::shared_ptr<MaskChannel>>;

struct RequestExtras {
#define RECORD RequestExtras
#define FIELDS "core/request_extras.inl"
#include "core/record.inl"

  bool any() const { return result_words > 0 || score_from >= 0 || tokens_per_step > 1 || !masks.empty(); }
  // True if records are written where it has room for some: a missing one fails the engine.
  bool writes_records() const { return result_words == 0 || (needs & kRecordNeeds) != 0; }
  Needs all_needs() const { return needs | (tokens_per_step > 1 ? kNeedDrafts : 0u) | (masks.empty() ? 0u : kNeedMask); }
};

// While it runs, most of what changes is with its Slot (slot.h).
struct alignas(64) Sequence {
  static constexpr int kInlineStops = 4;

  Request* request = nullptr;
  int32_t index = 0;               // among the n of its request
  int32_t slot = -1;
  SequenceState state = SequenceState::kDormant;
  FinishReason finish = FinishReason::kNone;
  Tokens tokens;
  int32_t max_total = 0;           // prompt and output tokens at most
  int32_t num_stops = 0;           // the first few are here, all of them with the request
  int32_t stops[kInlineStops] = {};
  SamplingState sampling;
  Needs needs = 0;                 // those of `sampling` included
  uint64_t first_sample_step = 0;  // the step that computed the last of its prompt, since it has its slot
  int32_t scored = 0;              // tokens of the prompt that need no scoring any more
  MaskChannel* masks = nullptr;    // of one whose tokens have masks
  bool frozen = false;             // it found no mask: until that comes, no row is planned
  uint64_t frozen_until = 0;       // rows of steps up to this one came to nothing
  bool loading = false;            // the host tier holds blocks for it
  bool loaded = false;             // it did, since the sequence last ran: what is still missing is computed
  int32_t reads_from = 0;          // blocks of its prefix that must be known before the disk is read for it again
  int32_t resumes_at = 0;          // tokens that it had computed when it gave way, if its state was kept
  uint64_t answer_chain = 0;       // leads to the newest snapshot of its answer; 0: there is none
  int32_t blocks_coming = 0;       // while retiring: blocks that settling will give back
  std::atomic<bool> abort_requested{false};  // set by the loop, read by the step thread
  size_t queue_place = 0;          // in the heap of those that wait, while it does
  uint64_t drain_epoch = 0;        // loop side: the drain that last saw this sequence, and its place in it
  size_t drain_place = 0;

  // The first token of the prompt that is still to be scored, or -1.
  inline int32_t scores_from() const;
  // Words of the entries that its slot is filled with.
  inline int32_t update_words() const;
};

// Built on the loop's thread, then owned by it throughout: the step thread never allocates or frees one.
struct Request {
  uint64_t id = 0;
  int64_t order = 0;        // smaller runs sooner: arrival plus priority times ageing, so that nothing starves
  uint64_t sequence_number = 0;  // breaks ties of order: first come, first served
  uint64_t salt = 0;
  Tenant* tenant = nullptr;  // null: none
  int32_t priority = 0;
  int32_t prompt_len = 0;
  std::vector<int32_t> stop_tokens;
  RequestExtras extras;
  std::vector<Sequence> sequences;  // n of them, fixed at construction
  int32_t unreleased = 0;
  int32_t cached_tokens = 0;
  int32_t fork_state = -1;   // a snapshot behind the whole blocks of the prompt but its last token, with which siblings begin
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

inline int32_t Sequence::scores_from() const {
  const int32_t from = index == 0 ? request->extras.score_from : -1;
  return from < 0 || scored >= request->prompt_len ? -1 : std::max(from, scored);
}

inline int32_t Sequence::update_words() const {
  const RequestExtras& extras = request->extras;
  return static_cast<int32_t>(extras.entries.size()) + (extras.history ? 1 + tokens.size() : 0);
}

// True if `a` comes before `b` in the order of service.
inline bool runs_before(const Sequence* a, const Sequence* b) {
  return a->request != b->request ? a->request->before(*b->request) : a->index < b->index;
}

// A request as it is submitted.
struct RequestSpec {
#define RECORD RequestSpec
#define FIELDS "core/request_spec.inl"
#include "core/record.inl"

  Needs needs() const { return extras.all_needs() | sampling.needs(); }
};

// Costs what one copy of the prompt does, whatever n is. `tenant` is the one of the spec's number.
std::unique_ptr<Request> make_request(const RequestSpec& spec, int64_t order, uint64_t sequence_number, int32_t block_size,
                                      Tenant* tenant = nullptr);

}  // namespace asyncengine
