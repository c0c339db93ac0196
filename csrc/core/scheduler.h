// Scheduler: chooses the sequences of the next step and their blocks, and applies the results of a step to them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/admission.h"
#include "core/extras.h"
#include "core/hybrid/host_rows.h"
#include "core/hybrid/placement.h"
#include "core/mask_board.h"
#include "core/outbox.h"
#include "core/pace.h"
#include "core/preemption.h"
#include "core/publisher.h"
#include "core/reservation.h"
#include "core/roster.h"
#include "core/scheduler_config.h"
#include "core/stats.h"
#include "core/step_plan.h"
#include "core/tier/block_mover.h"

namespace asyncengine {

// Single-threaded: everything happens on the step thread. schedule() may run ahead of commit(): the values of
// tokens in flight are unknown, their count is not.
//
// Order: decode rows first, then prompts of running sequences, then new sequences, each in order of Request::order.
// When blocks run out, the running sequence that is last in that order gives its own back and is computed again later;
// the first one never has to, so the engine always makes progress. While several tenants have requests, those beyond their
// shares give way first (preemption.h).
//
// The scheduler has the order and the budgets of a step. Each other question has a class of its own, and so has its data:
//   Roster      who waits, who runs, and what each holds
//   Admission   who gets a slot, and what of its prompt is there already
//   Pace        how long a step takes
//   Extras      records, scored prompts, several tokens a step, masks
//   Preemption  who gives way
//   Reservation which blocks a row writes to, and which its sequence sees no more
//   Publisher   which blocks others may share
//   Placement   who decodes on the host
class Scheduler {
 public:
  explicit Scheduler(const SchedulerConfig& config);

  void add(Request* request);
  // Ends the sequences whose abort is requested; blocks come back when no step in flight touches them. To be followed,
  // after as many as there are, by one after_aborts().
  void abort(Request* request, Outbox& outbox);
  void after_aborts();

  // Fills `plan` (empty when nothing can run). The plan's rows count as in flight until commit() sees it.
  void schedule(StepPlan& plan, int64_t now_ns);
  // Takes in the results of the oldest step in flight.
  void commit(StepPlan& plan, StepResults results, Outbox& outbox, int64_t now_ns);
  // Instead of commit(): the step computed nothing, and every request with a row in it ends with kStepFailed. What later
  // steps in flight compute for other requests stands: a request shares blocks with others once a commit published them.
  void fail_step(StepPlan& plan, Outbox& outbox, int64_t now_ns);
  // Takes in the masks, and the tokens that need no sampling, that were posted for its sequences.
  void take_masks(MaskInbox& inbox, Outbox& outbox, int64_t now_ns) { extras_.take_masks(inbox, outbox, now_ns); }
  // Takes in copies that are over, and starts others. True: something moved. Limits of time, and pauses after failures, are
  // counted in `awake_ns`: see TimeLimit::awake().
  bool move_blocks(Outbox& outbox, int64_t now_ns, int64_t awake_ns);
  // A step has taken so long, from the end of the one before if that was later than its launch.
  void took(const StepPlan& plan, int64_t ns) { pace_.took(plan, ns); }

  // ---- before the first sequence

  // Sets the mover of blocks to the host and back, for a configuration with host blocks, and that of states, if there are some.
  void move_blocks_with(BlockMover& mover, BlockDisk* disk = nullptr, BlockMover* states = nullptr);
  // Sets the attention of host rows, for a configuration that has some, after move_blocks_with().
  void attend_on_host_with(HostAttention& attention);
  void write_masks_to(const MaskBoard& board) { extras_.write_masks_to(board); }
  void observe(QueueObserver* observer) { admission_.observe(observer); }

  // ---- how it is

  bool idle() const;
  // Nothing runs: every block and slot is back. For tests and leak checks.
  bool quiescent() const { return idle() && roster_.quiescent(); }
  // Copies of blocks are under way, or a sequence waits for some.
  bool copies_blocks() const { return roster_.tier() != nullptr && roster_.tier()->busy(); }
  // Copies are under way, or workers are busy with host rows: not those that hang.
  bool moves_blocks() const { return copies_blocks() || (placement_ != nullptr && placement_->busy()); }
  // True if the needs of the request beyond tokens fit into a step that has nothing else. From any thread.
  bool can_fit(const RequestSpec& spec) const { return extras_.can_fit(spec); }
  StepLimits limits() const { return config_.limits(); }
  // The scheduler's own are up to date. The others are the caller's.
  Stats& stats();
  const StepCosts& costs() const { return pace_.costs(); }
  BlockTables& tables() { return roster_.tables(); }
  BlockManager& blocks() { return roster_.blocks(); }
  const HostTier* tier() const { return roster_.tier(); }
  // For tests.
  std::vector<HostRowView> host_rows() const { return placement_ != nullptr ? placement_->rows() : std::vector<HostRowView>(); }

 private:
  // schedule()
  size_t add_plain_rows(size_t i, StepPlan& plan);
  void schedule_decodes(StepPlan& plan);
  void schedule_prefills(StepPlan& plan);
  void admit(StepPlan& plan, int64_t now_ns, bool only_within);
  void begin(Slot& slot, StepPlan& plan);
  bool add_decode(Slot& slot, StepPlan& plan);
  bool add_decode_extras(Slot& slot, StepPlan& plan);
  bool add_chunk(Slot& slot, StepPlan& plan);
  int32_t prefill_chunk(const Slot& slot, const StepPlan& plan);
  int32_t snapshot_position(const Slot& slot, int32_t from) const;
  int32_t prefix_end(const Slot& slot) const;
  void keep_newest(Sequence& sequence, int32_t state, uint64_t chain);
  bool has_snapshot(const Slot& slot, int32_t position) const;
  bool forks(const Slot& slot) const;
  void save_state(const Slot& slot, int32_t position, bool for_siblings, StepPlan& plan);
  void save_answer(const Slot& slot, int32_t position, StepPlan& plan);
  void settle_saved(const StepPlan& plan, bool computed);
  void save_left_states(StepPlan& plan);
  void add_row(Slot& slot, int32_t query_len, bool from_device, StepPlan& plan);
  bool reserve(Slot& slot, int32_t num_tokens, StepPlan& plan) {
    return (num_tokens <= slot.capacity && !slot.forked) || reservation_.reserve_blocks(slot, num_tokens, plan);
  }

  // commit()
  template <typename OnPlainRow, typename OnRow>
  void retire_rows(const StepPlan& plan, Outbox& outbox, OnPlainRow&& on_plain_row, OnRow&& on_row);

  SchedulerConfig config_;
  Roster roster_;
  Pace pace_;
  Extras extras_;
  Admission admission_;
  Preemption preemption_;
  Reservation reservation_;
  Publisher publisher_;
  std::unique_ptr<Placement> placement_;  // null: nobody decodes on the host
  int32_t token_budget_ = 0;              // of the step that is planned, without the tokens of sequences on the host
  int32_t prefilling_ = 0;                // running sequences that have prompt left to compute
  int64_t prompt_tokens_ = 0, plain_tokens_ = 0, kept_states_ = 0;
  Stats stats_;
};

}  // namespace asyncengine
