// An executor runs packed steps: on a device with graphs, or by a host function.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "core/hybrid/host_rows.h"
#include "core/mask_board.h"
#include "core/step_input.h"
#include "core/tier/block_mover.h"
#include "step_loop/notifier.h"

namespace asyncengine {

enum class StepStatus {
  kPending,
  kReady,
  // The step computed nothing that counts. Steps before it stand; steps that were launched behind it may have failed
  // with it, and nothing may be launched before they are over.
  kStepFailed,
  kFailed,      // the executor has failed, and every step with it
};

enum class LaunchStatus {
  kLaunched,
  // The step will not run, for a reason that leaves the executor as it was. Nothing may be launched before poll() has
  // answered kStepFailed for it, and then its number is the next step's.
  kRefused,
  kFailed,  // the executor has failed
};

// The step loop leases staging buffer i from pack until poll(i) has answered kReady or kStepFailed; then i is free again.
// Steps run in the order of their launch and none overtakes another. All calls come from the step thread.
class Executor {
 public:
  virtual ~Executor() = default;

  // One buffer per step in flight; allocated before the loop starts.
  virtual int num_staging() const = 0;
  virtual std::span<std::byte> staging(int i) = 0;
  // Results of the step in buffer i, its samples in row order; valid while poll(i) is kReady and i is leased.
  virtual StepResults results(int i) const = 0;

  // Needs of the rows that the executor can run; submit refuses a request that needs more. From any thread, always the
  // same.
  virtual Needs needs() const { return kSamplingNeeds; }
  // The board where the sampler looks for masks. Steps under way see the writes of the step thread.
  virtual MaskBoard masks() { return {}; }

  // The mover of blocks to the host and back; null: there is no host tier.
  virtual BlockMover* mover() { return nullptr; }
  // The mover of states, of which each is a block to it; null: none goes to the host.
  virtual BlockMover* state_mover() { return nullptr; }
  // Attention for host rows; null: nobody decodes on the host.
  virtual HostAttention* host_attention() { return nullptr; }

  // Called once by the step thread, if there is one, before all else that it calls.
  virtual void adopt_thread() {}
  // Enqueues the step; never waits for it, nor for any other.
  virtual LaunchStatus launch(int i, size_t bytes) = 0;
  virtual StepStatus poll(int i) = 0;
  // The reason why the executor has failed, or the step that poll() has just called failed.
  virtual std::string error() const = 0;

  // Nanoseconds, in all and up to `now`, for which no step could go on though nothing was wrong with it. They do not count
  // against its time limit.
  virtual int64_t held_up_ns(int64_t /*now*/) { return 0; }

  // Steps of one kind take the same time, apart from attention. 0: how long a step takes cannot be told beforehand.
  virtual int num_kinds() const { return 0; }
  // Kind of the step packed in buffer i.
  virtual int kind(int /*i*/) const { return 0; }

  // Time to sleep between polls; an executor that calls notify() on completion returns a long time.
  virtual std::chrono::nanoseconds poll_interval() const = 0;
  // Shared, because a hung executor outlives its loop.
  void attach(std::shared_ptr<Notifier> notifier) { notifier_ = std::move(notifier); }

  // Stops the executor's own threads. False: something still runs after `limit` and may write to its buffers, which
  // therefore must never be freed.
  virtual bool close(std::chrono::nanoseconds limit) = 0;

 protected:
  std::shared_ptr<Notifier> notifier_;
};

}  // namespace asyncengine
