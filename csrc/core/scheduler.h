// Which sequences run in the next step, with which blocks; and what the results of a step mean for them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/backoff.h"
#include "core/block_manager.h"
#include "core/block_table.h"
#include "core/hybrid/host_rows.h"
#include "core/tier/host_tier.h"
#include "core/mask_board.h"
#include "core/outbox.h"
#include "core/sequence.h"
#include "core/slot.h"
#include "core/stats.h"
#include "core/step_costs.h"
#include "core/step_input.h"
#include "core/step_plan.h"
#include "core/tenants.h"

namespace asyncengine {

// How long a step may take in which sequences decode, so that their tokens come evenly: chunks of prompts beside them are
// as large as that leaves time for. 0: as long as it takes.
struct ItlTargets {
  int64_t ns = 0;                                          // of the priority classes that are not named
  std::vector<std::pair<int32_t, int64_t>> of_class = {};  // priority, nanoseconds

  bool any() const { return ns > 0 || !of_class.empty(); }
  int64_t of(int32_t priority) const {
    for (const auto& [named, its_ns] : of_class) {
      if (named == priority) return its_ns;
    }
    return ns;
  }
};

// Whether sequences may decode on the host (host_rows.h).
struct HybridConfig {
  int32_t lanes = 0;   // of each step that has host rows; 0: nobody decodes on the host
  int32_t layers = 0;  // that attend
  int32_t workers = 1;
  double attend_ns = 0;  // of one worker, for a token of context in a layer; 0: not known
  double exchange_ns = 0;  // what lanes add to a step beside their tokens
  double min_gain = 0.05;  // of throughput, as predicted: for less nobody is moved to the host
  int32_t max_rows = 0;    // sequences on the host at most; 0: as many as keep the workers busy
  int64_t host_tokens = 0;  // that the host's pool has room for, when the gain is predicted; 0: for all
  int64_t job_timeout_ns = 10'000'000'000;  // of attention of a row in a layer: the row's request fails

  // Tokens of context that were attended to: from then on their times tell more than what was measured beforehand.
  static constexpr int64_t kEnoughTokens = 20'000'000;
  struct Gain {
    double busy_rows = 0;  // host rows that together make as many tokens as workers and lanes can
    double share = 0;      // of throughput, with the host rows that there is room for: 0.1 is a tenth more
  };
  // Beside `rows` on the device that see `attended` tokens in all, where one who attends takes so long (as `attend_ns`).
  // Precondition: costs are known, and there is a row.
  Gain gain(const StepCosts& costs, double attending_ns, int32_t rows, int64_t attended) const;
};

struct SchedulerConfig {
  int32_t num_blocks = 0;
  int32_t block_size = 16;
  int32_t max_num_seqs = 256;
  int32_t max_num_batched_tokens = 2048;
  int32_t prefill_chunk_size = 0;  // 0: as many as the step has room for
  int32_t max_model_len = 0;
  bool prefix_caching = true;
  // Sizes of step that the executor has graphs for, ascending. A chunk that does not finish its prompt ends where it
  // fills one of them. Empty: any size is as good as another.
  std::vector<int32_t> token_buckets = {};
  // Budgets of a step: samples (0: one for each sequence), words of slot updates' entries and words of records.
  int32_t max_samples = 0;
  int32_t max_update_words = 0;
  int32_t max_result_words = 0;
  int32_t mask_words = 0;  // of a bit per token of the vocabulary; 0: no sequence has masks
  int32_t num_host_blocks = 0;  // of a host tier
  StepCosts costs = {};    // with none known, targets are not heeded
  ItlTargets targets = {};
  int32_t paced_chunk_size = 0;  // in place of prefill_chunk_size where a target decides; 0: no limit but the step's
  HybridConfig hybrid = {};      // needs host blocks

  // The most that a request may have as tokens_per_step: then every sequence may decode in one step. A slot has a byte for
  // all that kMostStepsInFlight may append.
  static constexpr int kMostStepsInFlight = 8, kMostStepTokens = 15;
  int32_t max_step_tokens() const {
    return std::clamp(std::min(max_samples, max_num_batched_tokens) / max_num_seqs, 1, kMostStepTokens);
  }
};

// Single-threaded: everything happens on the step thread. schedule() may run ahead of commit(): the values of
// tokens in flight are unknown, their count is not.
//
// Order: decode rows first, then prompts of running sequences, then new sequences, each in order of Request::order.
// When blocks run out, the running sequence that is last in that order gives its own back and is computed again later;
// the first one never has to, so the engine always makes progress. While several tenants have requests, those beyond their
// shares give way first (scheduler_shares.cpp).
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
  // Takes in the masks, and the tokens that need no sampling, that were posted for its sequences.
  void take_masks(MaskInbox& inbox, Outbox& outbox, int64_t now_ns);
  // Who moves blocks to the host and back, where the configuration has host blocks: before the first sequence.
  void move_blocks_with(BlockMover& mover, BlockDisk* disk = nullptr);
  // Takes in copies that are over, and starts others. True: something moved. Limits of time, and pauses after failures, are
  // counted in `awake_ns`: see TimeLimit::awake().
  bool move_blocks(Outbox& outbox, int64_t now_ns, int64_t awake_ns);
  const HostTier* tier() const { return tier_.get(); }
  // Copies are under way, or workers are busy with host rows: not those that hang.
  bool moves_blocks() const;
  // Copies of blocks are under way, or a sequence waits for some.
  bool copies_blocks() const { return tier_ != nullptr && tier_->busy(); }
  // Who attends for host rows, where the configuration has lanes: before the first sequence.
  void attend_on_host_with(HostAttention& attention) { attention_ = &attention; }
  // Where it writes masks: before the first sequence that has some.
  void write_masks_to(const MaskBoard& board) { board_ = board; }
  // Instead of commit(): the step computed nothing, and every request with a row in it ends with kStepFailed. What later
  // steps in flight compute for other requests stands: a request shares blocks with others once a commit published them.
  void fail_step(StepPlan& plan, Outbox& outbox, int64_t now_ns);

  bool idle() const { return running_.empty() && waiting_.empty() && retiring_ == 0 && hosted_.empty() && (tier_ == nullptr || !tier_->busy()); }
  BlockTables& tables() { return tables_; }
  BlockManager& blocks() { return blocks_; }
  // The scheduler's own are up to date. The others are the caller's.
  Stats& stats();
  StepLimits limits() const;
  // A step has taken so long, from the end of the one before if that was later than its launch.
  void took(const StepPlan& plan, int64_t ns);
  const StepCosts& costs() const { return config_.costs; }
  // Whether what the request wants beyond tokens fits into a step that has nothing else. From any thread.
  bool can_fit(const RequestSpec& spec) const;
  // Nothing runs: every block and slot is back. For tests and leak checks.
  bool quiescent() const;

  // A host row, as it is between two calls.
  enum class HostPhase : uint8_t {
    kNone,
    kDraining,   // steps in flight have rows of it, from when it was on the device
    kStoring,    // its blocks are copied out
    kReady,      // it may enter the next step, at `stage`
    kAttending,  // a worker has its job, or waits for that; then it is ready for `stage`
    kSampling,   // a step in flight ends its token
  };
  struct HostRow {
    HostPhase phase = HostPhase::kNone;
    bool leaves = false;  // it is to go back to the device
    int32_t stage = 0;
    int64_t since_ns = 0;  // awake: it attends, and its step is over
  };
  // Calls visit(slot, row, host blocks) for each of them. For tests.
  template <typename Visit>
  void visit_host_rows(Visit&& visit) const {
    for (const int32_t i : hosted_) visit(slots_[static_cast<size_t>(i)], host_rows_[static_cast<size_t>(i)], host_tables_.blocks(i));
  }

  // Called once per request when it leaves the queue for good (scheduled or ended): the limits on queued work.
  struct QueueObserver {
    virtual void left_queue(const Request& request) = 0;
   protected:
    ~QueueObserver() = default;
  };
  void observe(QueueObserver* observer) { observer_ = observer; }

 private:
  // A walk over many slots asks for the one that comes so many rows later: some 250 ns of decode rows.
  static constexpr size_t kAhead = 16;
  static void prefetch(const void* address) { __builtin_prefetch(address, /*write=*/1); }

  // schedule()
  size_t add_plain_rows(size_t i, StepPlan& plan);
  void schedule_decodes(StepPlan& plan);
  void schedule_decodes_with_results(StepPlan& plan);
  void schedule_prefills(StepPlan& plan);
  void set_pace(const StepPlan& plan);
  bool has_time(int32_t context_len, const StepPlan& plan) const;
  int64_t predict(int32_t chunk, int64_t context_len, const StepPlan& plan) const;
  int32_t paced_chunk(int32_t context_len, int32_t most, const StepPlan& plan);
  void admit(StepPlan& plan, int64_t now_ns, bool only_within);
  bool admit_one(Sequence& sequence, StepPlan& plan, int64_t now_ns);
  bool load_from_host(Sequence& sequence, int32_t whole);
  void start_loading(Sequence& sequence);
  int32_t prefix_limit(const Sequence& sequence) const;
  bool copying_pays(int32_t blocks, int32_t context_blocks) const;
  bool fits_budgets(const Sequence& sequence, const StepPlan& plan);
  bool add_decode(Slot& slot, StepPlan& plan);
  bool add_decode_extras(Slot& slot, StepPlan& plan);
  Sequence* fork_source(const Sequence& sequence, const StepPlan& plan) const;
  int32_t find_prefix(const Sequence& sequence, const Sequence* source, bool with_host = false);
  void start_chain(Slot& slot, const Sequence* source, int32_t shared_blocks);
  bool reserve(Slot& slot, int32_t num_tokens, StepPlan& plan) {
    return (num_tokens <= slot.capacity && !slot.forked) || reserve_blocks(slot, num_tokens, plan);
  }
  bool reserve_blocks(Slot& slot, int32_t num_tokens, StepPlan& plan);
  int32_t count_missing(const Slot& slot, int32_t num_tokens) const;
  void copy_shared(const Slot& slot, int32_t entry, StepPlan& plan);
  int32_t prefill_chunk(const Slot& slot, const StepPlan& plan);
  int32_t count_samples(const Slot& slot, int32_t begin, int32_t query_len, bool last) const;
  int32_t fit_samples(const Slot& slot, int32_t query_len, const StepPlan& plan);
  void add_extras(Slot& slot, PlanRow& row, StepPlan& plan) const;
  bool add_chunk(Slot& slot, StepPlan& plan);
  // Its next row would find no mask.
  bool waits_for_mask(const Slot& slot) const { return (slot.needs & kNeedMask) != 0 && slot.sequence->frozen; }
  void begin_masks(Slot& slot);
  void offer_mask(Slot& slot, Outbox& outbox, int64_t now_ns);
  void force_tokens(Slot& slot, Outbox& outbox, int64_t now_ns);
  void freeze(Slot& slot, uint64_t step, Outbox& outbox, int64_t now_ns);
  void add_row(Slot& slot, int32_t query_len, bool from_device, StepPlan& plan);
  bool make_room(const Slot& slot, int32_t num_blocks, const StepPlan& plan);
  void preempt(Sequence& sequence);
  void wake_siblings();
  void note_first_sample(Sequence& sequence, const StepPlan& plan);

  // shares of tenants (scheduler_shares.cpp)
  void share_out(const StepPlan& plan);
  void share_slots();
  void measure_blocks(const StepPlan& plan);
  bool over_share(const Sequence& sequence, const StepPlan& plan);
  bool step_back(Sequence& sequence, const StepPlan& plan);
  void yield(Slot& slot);
  bool is_excess(const Slot& slot, int32_t priority) const;
  void take_excess(int32_t priority, int32_t num_blocks, const StepPlan& plan);
  bool make_room_of_excess(const Slot& slot, int32_t num_blocks, const StepPlan& plan);

  // host rows (scheduler_hybrid.cpp)
  bool is_hosted(int32_t slot) const { return !host_rows_.empty() && host_rows_[static_cast<size_t>(slot)].phase != HostPhase::kNone; }
  bool attends(int32_t slot) const;
  bool hangs(int32_t slot) const;
  void find_ready_rows(StepPlan& plan);
  void schedule_lanes(StepPlan& plan);
  bool enter_lane(Slot& slot, StepPlan& plan);
  void add_lane_row(Slot& slot, int32_t lane, StepPlan& plan);
  void place_sequences(const StepPlan& plan);
  bool hybrid_pays(const StepPlan& plan);
  bool may_be_hosted(const Slot& slot, int32_t promised) const;
  void move_out(Slot& slot);
  void move_back();
  bool advance_host_rows(Outbox& outbox, int64_t now_ns);
  bool advance_host_row(Slot& slot, Outbox& outbox, int64_t now_ns);
  void start_storing(Slot& slot);
  void take_stored(Sequence& sequence, std::span<const int32_t> hosts, Outbox& outbox);
  void resume(Slot& slot);
  void leave_host(Slot& slot);
  void release_host_blocks(Slot& slot);
  void lanes_retired(const StepPlan& plan);
  void note_host_tokens(size_t first, Outbox& outbox);

  // commit()
  template <typename OnPlainRow, typename OnRow>
  void retire_rows(const StepPlan& plan, Outbox& outbox, OnPlainRow&& on_plain_row, OnRow&& on_row);
  void take_token(Slot& slot, int32_t token, Outbox& outbox, int64_t now_ns);
  void take_samples(const PlanRow& row, Slot& slot, uint64_t step, const int32_t* tokens, const int32_t* records, Outbox& outbox,
                    int64_t now_ns);
  void fail(Sequence& sequence, FinishReason reason, Outbox& outbox, int64_t now_ns);
  void publish_blocks(const StepPlan& plan);
  void publish_blocks(const PlanRow& row, uint64_t step, uint64_t hash);
  void name_block(const Slot& slot, const int32_t* tokens);
  uint64_t prefetch_block(Slot& slot);
  int32_t block_to_publish(const Slot& slot) const {
    return tables_.at(index(slot), slot.published_end / config_.block_size);
  }
  PublishedBlocks published(const Slot& slot) const { return {blocks_, tables_, index(slot)}; }
  const int32_t* tokens_to_publish(Slot& slot) {
    return slot.sequence->tokens.unpublished(slot.tail, slot.published_end, published(slot));
  }
  // A row that was launched behind one that found no mask: what it wrote is of a token that there never was.
  static bool came_to_nothing(const PlanRow& row, uint64_t step) {
    return row.extras && step <= row.sequence->frozen_until;
  }
  // Once the row's step has retired: whether the prefix cache could know a block more.
  bool has_full_block(const Slot& slot, const PlanRow& row, uint64_t step) const {
    if (came_to_nothing(row, step)) [[unlikely]] return false;
    const int32_t end = std::min(row.context_len + row.query_len, slot.num_tokens());  // the former is an upper bound
    return blocks_.prefix_caching() && end - slot.published_end >= config_.block_size;
  }
  void finish(Sequence& sequence, FinishReason reason);
  void retire(Sequence& sequence, SequenceState state);
  void settle(Sequence& sequence, Outbox* outbox);
  void release_blocks(int32_t slot);

  void enqueue(Sequence* sequence);
  void dequeue(const Sequence* sequence);
  void leave_queue(Request& request);
  void compact_running();
  void prefetch_slot(int32_t slot) const {
    __builtin_prefetch(&slots_[static_cast<size_t>(slot)], /*write=*/1);
    slots_[static_cast<size_t>(slot)].tail.prefetch();
  }
  int32_t index(const Slot& slot) const { return static_cast<int32_t>(&slot - slots_.data()); }
  Slot& slot_of(const Sequence& sequence) { return slots_[static_cast<size_t>(sequence.slot)]; }
  const Slot& slot_of(const Sequence& sequence) const { return slots_[static_cast<size_t>(sequence.slot)]; }
  // Its blocks may still be read or written.
  bool in_flight(const Sequence& sequence) const {
    return sequence.loading || (sequence.slot >= 0 && (slot_of(sequence).in_flight > 0 || attends(sequence.slot)));
  }
  int32_t blocks_coming() const { return blocks_coming_ + (tier_ != nullptr ? tier_->blocks_coming() : 0); }

  SchedulerConfig config_;
  BlockManager blocks_;
  std::unique_ptr<HostTier> tier_;
  BlockTables tables_;
  std::vector<Slot> slots_;
  std::vector<Slot*> running_;      // in order
  FairQueue waiting_;
  std::vector<int32_t> free_slots_;
  std::vector<int32_t> prefix_;     // scratch: blocks that a new sequence starts with
  HugeVector<int32_t> copied_from_;  // scratch, by block: where a copy of the step being planned takes it from, or -1
  std::vector<Request*> forking_;   // scratch: their siblings join in the next step
  int32_t max_blocks_per_sequence_;
  int32_t max_delta_blocks_;
  std::vector<Sequence*> deferred_;  // scratch: they wait for the next step, and those behind them do not
  size_t results_from_ = 0;     // place in running_ of the first that the last step had no room for the records of
  int32_t results_wanted_ = 0;  // words of records that a prompt's end waits for
  MaskBoard board_;
  const Sequence* blocked_ = nullptr;  // head of the queue that did not fit, and the free blocks it saw
  int32_t blocked_free_ = 0, blocked_needs_ = 0;  // and how many it needs to be free
  int32_t blocked_size_ = 0;                      // of which it would take so many
  int32_t blocks_coming_ = 0;  // given back as steps in flight retire: no need to preempt more for these
  int32_t prefilling_ = 0;     // running sequences that have prompt left to compute
  struct {
    int64_t target_ns = 0;  // of the step that is planned; 0: none
    int32_t sharers = 0;    // prompts that its time is still to be shared by
    bool chunked = false;   // a prompt has had its share
  } pace_;
  std::vector<int64_t> slot_targets_;  // by slot; empty unless priority classes have targets of their own
  bool running_changed_ = false;  // some of running_ run no more
  // Of shares of blocks, while several tenants have requests.
  std::vector<uint8_t> excess_;      // by slot: when blocks were last measured, it was beyond its tenant's share
  uint64_t measured_step_ = 0;
  bool holders_changed_ = true;      // sequences came or went since then
  int32_t short_of_ = 0, short_priority_ = 0;  // a running sequence within its share lacked so many free blocks in the last step
  int32_t token_budget_ = 0;      // of the step that is planned: lanes are taken off

  // Of host rows. The vectors are empty where nobody decodes on the host.
  HostAttention* attention_ = nullptr;
  std::vector<HostRow> host_rows_;  // by slot
  BlockTables host_tables_;
  std::vector<int32_t> hosted_;      // slots, in the order of moving
  std::vector<int32_t> lanes_used_;  // scratch, by stage
  size_t first_hosted_ = 0;          // who is asked first in the next step
  int64_t awake_ns_ = 0;
  Backoff host_rows_backoff_;
  int32_t retiring_ = 0;       // sequences that still hold something but run no more
  Stats stats_;
  QueueObserver* observer_ = nullptr;
};

}  // namespace asyncengine
