// Runs steps on a device by launching graphs through the CUDA function table: no Python, no GIL, no wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "platform/cuda/cuda_runtime.h"
#include "step_loop/executor.h"
#include "step_loop/graph_mover.h"
#include "step_loop/launch_thread.h"
#include "step_loop/staging.h"

namespace asyncengine {

constexpr int32_t kAnyContext = std::numeric_limits<int32_t>::max();

// A graph whose end serves these needs.
struct GraphVariant {
  Needs needs = 0;
  CudaGraphExec graph = nullptr;  // none where kernels are launched one by one

  bool serves(Needs wanted) const { return (wanted & ~needs) == 0; }
};

// Captured graphs for steps of at most this many rows and tokens.
struct GraphBucket {
  int32_t max_rows, max_tokens;
  bool single_token_rows;  // fits only steps whose every row has one token
  int32_t max_context;     // of a row
  std::vector<GraphVariant> variants;  // the cheapest first: the first that serves a step's needs is launched
  int32_t lanes = 0;       // of max_tokens, those for host rows (core/hybrid/host_rows.h): fits only steps with as many

  // Precondition: one of them serves these needs.
  size_t variant_for(Needs needs) const {
    size_t variant = 0;
    while (!variants[variant].serves(needs)) ++variant;
    return variant;
  }
};

// Per step: have the StepInput where the graph reads it (Staging), launch the graph of the smallest bucket that fits,
// have the tokens on the host, record the event. One CUDA stream, so steps are ordered behind each other; copies ahead have
// another, and the step waits for its own.
//
// A launch that runs out of memory fails its step alone. Any other error of a call leaves open what the device will do, and
// ends the executor.
class GraphExecutor final : public Executor {
 public:
  // Enqueues a bucket's kernels one by one instead of its graph: for debugging, and to measure what graphs are worth.
  // Returns what went wrong, or nothing.
  using EagerLaunch = std::function<std::string(int bucket, Needs needs, CudaStream cuda_stream)>;

  struct Graphs {
    std::vector<GraphBucket> buckets;  // ascending; the last one fits every step; the last variant of each serves the most
    CudaGraphExec copy_blocks = nullptr;  // runs before a step that has block copies
    EagerLaunch eager;                 // if set, what runs in place of graphs; bucket -1 is copy_blocks
    CudaStream cuda_stream = nullptr;  // where it all runs; none: one of the executor's own
    std::shared_ptr<GraphMover> mover;  // of a host tier, or none
    std::shared_ptr<HostAttention> host_attention;  // for host rows, or none
    std::shared_ptr<void> keep_alive;  // whatever owns the graphs
  };

  // Throws CudaError when a CUDA stream or events cannot be had.
  GraphExecutor(const CudaRuntime& cuda, int device, std::shared_ptr<Staging> staging, Graphs graphs,
                std::chrono::nanoseconds poll_interval);
  ~GraphExecutor() override;

  int num_staging() const override { return staging_->num_steps(); }
  std::span<std::byte> staging(int i) override { return staging_->input(i); }
  StepResults results(int i) const override {
    const Step& step = steps_[static_cast<size_t>(i)];
    return {step.tokens.data(), step.records.data()};
  }
  LaunchStatus launch(int i, size_t bytes) override;
  StepStatus poll(int i) override;
  std::string error() const override;
  MaskBoard masks() override { return staging_->masks(); }
  BlockMover* mover() override { return graphs_.mover.get(); }
  HostAttention* host_attention() override { return graphs_.host_attention.get(); }
  // Sets the workers that attend for host rows. To be called before the first step.
  void attend_on_host_with(std::shared_ptr<HostAttention> attention) { graphs_.host_attention = std::move(attention); }
  Needs needs() const override { return needs_; }
  int num_kinds() const override { return num_kinds_; }
  int kind(int i) const override;  // one per graph
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
    CudaEvent done = nullptr, arrived = nullptr;  // the latter: its input, if that is copied ahead
    std::atomic<StepState> state{StepState::kFree};
    std::string error;  // why it was refused
  };
  LaunchStatus start(int i, size_t bytes);
  bool record_done(int i, bool enqueued);
  bool is_busy(Step& step);
  bool ok(int error, const char* call);
  void keep_error(std::string text);
  std::string take_error();
  bool enqueue(int i, size_t bytes);
  bool send_input(int i, size_t bytes);
  bool run(int bucket, const GraphVariant& variant);
  int bucket_for(const StepInputHeader& header) const;
  bool copy_output(int i, const StepInputHeader& header);
  bool take_results(int i);
  bool take_row(int i, const StepInputRow& row);
  bool take_records(const int64_t* words, std::span<int32_t> region, uint32_t step);
  bool found_stale(const StepInputHeader& header, const std::string& missing);

  const CudaRuntime& cuda_;
  int device_;
  bool device_set_ = false;  // cudaSetDevice is per thread: the first launch makes it for the step thread
  std::shared_ptr<Staging> staging_;
  Graphs graphs_;
  std::vector<int> first_kind_;  // of each bucket: its variants have kinds that follow each other
  int num_kinds_ = 0;
  Needs needs_ = ~Needs{0};  // that every bucket has a variant for
  std::chrono::nanoseconds poll_interval_;
  CudaStream cuda_stream_ = nullptr, own_cuda_stream_ = nullptr, copy_cuda_stream_ = nullptr;
  std::vector<Step> steps_;
  int failed_code_ = kCudaSuccess;  // of the last call that failed, for the thread that launches
  mutable std::mutex error_mutex_;
  std::string error_;
  std::string step_error_;  // of the last step that poll() has called failed
  std::atomic<bool> refusing_{false};  // a launch by that thread was refused, and so are those queued behind it
  std::unique_ptr<LaunchThread> launch_thread_;  // for copies of plain memory, which wait; last: it uses the rest
};

}  // namespace asyncengine
