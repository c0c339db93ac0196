// Admission chooses the sequence that gets a slot, and finds the part of it that is there already: blocks of the prefix cache,
// of a sibling, of the host.
#pragma once

#include <cstdint>
#include <vector>

#include "core/pace.h"
#include "core/roster.h"
#include "core/step_plan.h"

namespace asyncengine {

// Called once per request when it leaves the queue for good (scheduled or ended): the limits on queued work.
struct QueueObserver {
  virtual void left_queue(const Request& request) = 0;

 protected:
  ~QueueObserver() = default;
};

class Admission {
 public:
  Admission(const SchedulerConfig& config, Roster& roster, const Pace& pace);

  void observe(QueueObserver* observer) { observer_ = observer; }
  // The request waits no more. May be called again.
  void leave_queue(Request& request);

  // ---- the head of the queue

  enum class Result : uint8_t {
    kAdmitted,  // it has a slot
    kWaits,  // there is no room for all of it
    kLeft,  // it has left the queue, to wait for blocks from the host, or for this step with those that load some
  };
  Result admit(Sequence& sequence, StepPlan& plan, int64_t now_ns);
  // It waits for the next step, and those behind it do not. False: so many do already.
  bool defer(Sequence& sequence);
  // The step is planned: those that were deferred come back to the queue.
  void end_step();

  // ---- siblings, where n > 1

  // The sequence has its prompt computed with this step: its siblings may share it from the next one on.
  void note_first_sample(Sequence& sequence, const StepPlan& plan);
  // Siblings that wait for its prompt wait in vain.
  void free_siblings(Request& request) { forking_.push_back(&request); }
  // They enter the queue.
  void wake_siblings();

  void report(Stats& stats) const;

 private:
  // The first blocks of prefix_, and the tokens in them that are computed: all, but for the last block of a sibling or of one
  // that gave way.
  struct Prefix {
    int32_t blocks = 0, tokens = 0;
  };
  bool load_from_host(Sequence& sequence, int32_t whole, const Prefix& shared);
  void start_loading(Sequence& sequence);
  bool copying_pays(int64_t bytes, int32_t tokens, int32_t context) const;
  uint64_t missing_state(int32_t blocks) const;
  int32_t prefix_limit(const Sequence& sequence) const;
  Prefix find_prefix(const Sequence& sequence, const Sequence* source, bool with_host = false);
  Prefix find_state(const Sequence& sequence, int32_t found, bool with_host);
  // The last block is one in part, which the sequence takes back.
  bool takes_back(const Sequence* source, const Prefix& prefix) const {
    return source == nullptr && prefix.tokens % block_size_ > 0;
  }
  Sequence* fork_source(const Sequence& sequence, const StepPlan& plan) const;
  bool shares_what_is_seen(const Sequence& first) const;
  int32_t deltas_to_begin(int32_t whole, int32_t shared) const;
  int32_t find_window_blocks(const Sequence* source, int32_t shared, int32_t holes);
  void take_window_blocks(int32_t slot, int32_t shared, int32_t holes);
  int32_t blocks_to_begin(const Sequence& sequence, int32_t shared) const;
  // The state of a slot at the moment when a sequence gets it.
  struct Start {
    int32_t computed = 0, published_end = 0;
    uint64_t chain = 0;  // as in Slot
    uint64_t state = 0;  // the chain whose state it begins with, unless that is its sibling's; 0: none
    int32_t holes = 0;  // of the shared blocks, those at the beginning that it never sees
    int32_t group_holes = 0;  // the same in the tables of window groups
  };
  Start start(const Sequence& sequence, const Sequence* source, const Prefix& prefix) const;
  void start_state(const Slot& slot, const Sequence* source, uint64_t chain, StepPlan& plan);
  void note_scheduled(Request& request, int32_t cached_tokens, int64_t now_ns);

  const SchedulerConfig& config_;
  Roster& roster_;
  const Pace& pace_;
  int32_t block_size_, max_num_batched_tokens_, max_delta_blocks_;
  QueueObserver* observer_ = nullptr;
  std::vector<int32_t> prefix_;  // scratch: blocks that a new sequence starts with
  std::vector<int32_t> window_prefix_;  // and those of its window groups, [group, entry]
  std::vector<Sequence*> deferred_;  // scratch
  std::vector<Request*> forking_;  // scratch: their siblings join in the next step
  int64_t prefix_cache_queries_ = 0, prefix_cache_hits_ = 0, resumed_states_ = 0;
};

}  // namespace asyncengine
