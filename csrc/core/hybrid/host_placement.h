// Host rows (host_rows.h): which sequences decode on the host, and which of them enter which lane of the next step.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/backoff.h"
#include "core/block_table.h"
#include "core/extras.h"
#include "core/hybrid/host_rows.h"
#include "core/hybrid/placement.h"
#include "core/pace.h"
#include "core/roster.h"

namespace asyncengine {

// While a sequence waits for blocks and the device has none, the last running one moves to the host, if that is predicted to
// pay: steps in flight that have rows of it end, its blocks are copied out, and it goes on there. When the device has room and
// nobody waits, the first of them goes back: as a sequence that was preempted does, whose prefix the host tier loads.
class HostPlacement final : public Placement {
 public:
  // Precondition: the roster has a host tier, and the configuration has lanes.
  HostPlacement(const SchedulerConfig& config, Roster& roster, const Pace& pace, Extras& extras, HostAttention& attention);

  bool on_host(int32_t slot) const override { return host_row(slot).phase != Phase::kNone; }
  bool in_use(int32_t slot) const override;
  void cancel(int32_t slot) override;
  void release(Slot& slot) override;

  int32_t begin(StepPlan& plan) override;
  void end(StepPlan& plan) override;
  void retired(const StepPlan& plan) override;
  void failed(const StepPlan& plan, Outbox& outbox, int64_t now_ns) override;
  void note_tokens(size_t first_event, Outbox& outbox) override;

  void take_stored(Sequence& sequence, std::span<const int32_t> hosts, Outbox& outbox) override;
  bool advance(Outbox& outbox, int64_t now_ns, int64_t awake_ns) override;
  int32_t num_rows() const override { return static_cast<int32_t>(hosted_.size()); }
  bool busy() const override;

  void report(Stats& stats) const override;
  std::vector<HostRowView> rows() const override;

 private:
  using Phase = HostRow::Phase;

  HostRow& host_row(int32_t slot) { return rows_[static_cast<size_t>(slot)]; }
  const HostRow& host_row(int32_t slot) const { return rows_[static_cast<size_t>(slot)]; }
  bool hangs(int32_t slot) const;
  // the lanes of a step
  void fill_lanes(StepPlan& plan);
  bool enter_lane(Slot& slot, StepPlan& plan);
  void add_row(Slot& slot, int32_t lane, StepPlan& plan);
  // who decodes where
  void place_sequences(const StepPlan& plan);
  bool pays(const StepPlan& plan) const;
  bool may_move_out(const Slot& slot, int32_t promised) const;
  void move_out(Slot& slot);
  void move_back();
  // the life of a host row, between steps
  bool advance(Slot& slot, Outbox& outbox, int64_t now_ns);
  void start_storing(Slot& slot);
  void stay(Slot& slot);
  void leave(Slot& slot);
  void publish_blocks(Slot& slot);

  HybridConfig config_;
  int32_t block_size_;
  Roster& roster_;
  BlockManager& blocks_;
  HostTier& tier_;
  const Pace& pace_;
  Extras& extras_;
  HostAttention& attention_;
  std::vector<HostRow> rows_;  // by slot
  BlockTables tables_;         // of blocks of the host
  std::vector<int32_t> hosted_;      // slots, in the order of moving
  std::vector<int32_t> lanes_used_;  // scratch, by stage
  size_t first_ = 0;                 // who is asked first in the next step
  int64_t awake_ns_ = 0;
  Backoff backoff_;
  int64_t tokens_ = 0, moved_to_host_ = 0, moved_from_host_ = 0, failed_rows_ = 0;
};

}  // namespace asyncengine
