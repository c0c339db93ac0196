// Placement tells where running sequences live. The scheduler asks it, and does not know how a sequence decodes on the host.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/outbox.h"
#include "core/slot.h"
#include "core/stats.h"
#include "core/step_plan.h"

namespace asyncengine {

// A sequence on the host, as it is between two calls.
struct HostRow {
  enum class Phase : uint8_t {
    kNone,
    kDraining,   // steps in flight have rows of it, from when it was on the device
    kStoring,    // its blocks are copied out
    kReady,      // it may enter the next step, at `stage`
    kAttending,  // a worker has its job, or waits for that; then it is ready for `stage`
    kSampling,   // a step in flight ends its token
  };
  Phase phase = Phase::kNone;
  bool leaves = false;  // it is to go back to the device
  int32_t stage = 0;
  int64_t since_ns = 0;  // awake: it attends, and its step is over
};

struct HostRowView {
  const Slot* slot = nullptr;
  HostRow row;
  std::span<const int32_t> blocks;  // of the host
};

// All calls come from the step thread, and none waits.
class Placement {
 public:
  virtual ~Placement() = default;

  // ---- of one sequence, by its slot

  // It decodes on the host, or is on its way there or back.
  virtual bool on_host(int32_t slot) const = 0;
  // Somebody may still touch its blocks of the host, though no step in flight does.
  virtual bool in_use(int32_t slot) const = 0;
  // The sequence ends: work under way for it has no use any more.
  virtual void cancel(int32_t slot) = 0;
  // Nothing touches its blocks any more: the host gets them back, and the prefix cache those that are full.
  virtual void release(Slot& slot) = 0;

  // ---- of a step

  // Before its tokens are shared out: how many of them sequences on the host take.
  virtual int32_t begin(StepPlan& plan) = 0;
  // All else is planned: the sequences on the host enter, and one may move.
  virtual void end(StepPlan& plan) = 0;
  // The step is over.
  virtual void retired(const StepPlan& plan) = 0;
  // The step is over and computed nothing: sequences on the host that were in it fail.
  virtual void failed(const StepPlan& plan, Outbox& outbox, int64_t now_ns) = 0;
  // The delivery's events from this one on are of a sequence on the host.
  virtual void note_tokens(size_t first_event, Outbox& outbox) = 0;

  // ---- between steps

  // The host tier has copied the sequence's blocks to these of the host, or, to none, has failed.
  virtual void take_stored(Sequence& sequence, std::span<const int32_t> hosts, Outbox& outbox) = 0;
  // True: something moved.
  virtual bool advance(Outbox& outbox, int64_t now_ns, int64_t awake_ns) = 0;
  virtual int32_t num_rows() const = 0;
  // There are some, and not all hang.
  virtual bool busy() const = 0;

  virtual void report(Stats& stats) const = 0;
  // For tests.
  virtual std::vector<HostRowView> rows() const = 0;
};

}  // namespace asyncengine
