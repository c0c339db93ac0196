// Runs steps on a device by launching graphs through the CUDA function table: no Python, no GIL, no wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "step_loop/executor.h"
#include "step_loop/graph_mover.h"
#include "step_loop/launch_thread.h"
#include "step_loop/state_mover.h"
#include "step_loop/step_device.h"

namespace asyncengine {

// Launches each step on the device, or on several that hold a model together, looks for its event and takes in its results.
//
// Several devices run the same steps and wait for each other within them: the same input is launched on one after the
// other, a step is over when it is over on all, and results are those of the first. A step that only some have launched
// would wait for ever: they are released, and what they compute then counts for nothing. Their staging is pinned: a copy
// of plain memory would wait for a step that the next device has not launched.
//
// A launch that runs out of memory fails its step alone, if no device has begun it. Any other error of a call leaves open
// what the devices will do, and ends the executor.
class GraphExecutor final : public Executor {
 public:
  // A device beside the first, with staging that follows the first one's.
  struct Rank {
    CudaDevice device;
    std::shared_ptr<Staging> staging;
    StepDevice::Graphs graphs;  // buckets and variants as those of the first
  };
  struct Graphs : StepDevice::Graphs {
    std::vector<Rank> others = {};
    std::shared_ptr<GraphMover> mover = {};  // of a host tier, or none
    std::shared_ptr<StateMover> state_mover = {};  // likewise
    std::shared_ptr<HostAttention> host_attention = {};  // for host rows, or none
  };

  // Throws CudaError when a CUDA stream or events cannot be had.
  GraphExecutor(const CudaDevice& device, std::shared_ptr<Staging> staging, Graphs graphs, std::chrono::nanoseconds poll_interval);
  ~GraphExecutor() override;

  void adopt_thread() override { (void)device_.device().adopt_thread(); }
  int num_staging() const override { return staging().num_steps(); }
  std::span<std::byte> staging(int i) override { return staging().input(i); }
  StepResults results(int i) const override {
    const Step& step = steps_[static_cast<size_t>(i)];
    return {step.tokens.data(), step.records.data()};
  }
  LaunchStatus launch(int i, size_t bytes) override;
  StepStatus poll(int i) override;
  std::string error() const override;
  MaskBoard masks() override { return staging().masks(); }
  BlockMover* mover() override { return mover_.get(); }
  BlockMover* state_mover() override { return state_mover_.get(); }
  HostAttention* host_attention() override { return host_attention_.get(); }
  // Sets the workers that attend for host rows. To be called before the first step.
  void attend_on_host_with(std::shared_ptr<HostAttention> attention) { host_attention_ = std::move(attention); }
  Needs needs() const override { return device_.needs(); }
  int num_kinds() const override { return device_.num_kinds(); }
  int kind(int i) const override { return device_.kind(i); }  // one per graph
  std::chrono::nanoseconds poll_interval() const override { return poll_interval_; }
  bool close(std::chrono::nanoseconds limit) override;

 private:
  enum class StepState : uint8_t {
    kFree,
    kQueued,   // handed to the launch thread
    kRunning,  // behind its event all is over
    kRefused,  // likewise, but its graph was not launched
    kUnknown,  // something of it may run, and no event says when it is over
  };
  struct Step {
    std::vector<int32_t> tokens, records;  // payloads of its output
    std::atomic<StepState> state{StepState::kFree};
    std::string error;  // why it was refused
  };
  LaunchStatus start(int i, size_t bytes);
  bool is_busy(int i);
  void keep_error(std::string text);
  bool take_results(int i);
  bool take_row(int i, const StepInputRow& row);
  bool take_records(const int64_t* words, std::span<int32_t> region, uint32_t step);
  bool found_stale(const StepInputHeader& header, const std::string& missing);

  Staging& staging() const { return device_.staging(); }

  bool send(int i, size_t bytes, CallFailure& failure);
  size_t launch_all(int i, CallFailure& failure);
  bool record_all(int i, bool enqueued, CallFailure& failure);
  int query_all(int i, const StepDevice*& answers);
  void release();

  StepDevice device_;
  std::vector<std::unique_ptr<StepDevice>> others_;
  std::vector<StepDevice*> devices_;  // the first, then the others
  std::shared_ptr<GraphMover> mover_;
  std::shared_ptr<StateMover> state_mover_;
  std::shared_ptr<HostAttention> host_attention_;
  std::chrono::nanoseconds poll_interval_;
  std::vector<Step> steps_;
  mutable std::mutex error_mutex_;
  std::string error_;
  std::string step_error_;  // of the last step that poll() has called failed
  std::atomic<bool> refusing_{false};  // a launch by that thread was refused, and so are those queued behind it
  std::unique_ptr<LaunchThread> launch_thread_;  // for copies of plain memory, which wait; last: it uses the rest
};

}  // namespace asyncengine
