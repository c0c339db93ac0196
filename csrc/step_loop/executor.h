// What runs a packed step: a device with graphs, or a host function.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "core/step_input.h"
#include "step_loop/notifier.h"

namespace asyncengine {

enum class StepStatus { kPending, kReady, kFailed };

// The step loop leases staging buffer i from pack until poll(i) has answered kReady; then i is free again.
// Steps run in the order of their launch and none overtakes another. All calls come from the step thread.
class Executor {
 public:
  virtual ~Executor() = default;

  // One buffer per step in flight; allocated before the loop starts.
  virtual int num_staging() const = 0;
  virtual std::span<std::byte> staging(int i) = 0;
  // Sampled tokens of the step in buffer i, in row order; valid while poll(i) is kReady and i is leased.
  virtual const int32_t* tokens(int i) const = 0;

  // Enqueues the step; never waits for it. False: the executor has failed, see error().
  virtual bool launch(int i, size_t bytes) = 0;
  virtual StepStatus poll(int i) = 0;
  virtual std::string error() const = 0;

  // Steps of one kind take the same time, apart from attention. 0: how long a step takes cannot be told beforehand.
  virtual int num_kinds() const { return 0; }
  // Of the step packed in buffer i.
  virtual int kind(int /*i*/) const { return 0; }

  // How long to sleep between polls; an executor that calls notify() on completion returns a long time.
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
