// A device as steps see it: its graphs, its CUDA streams, the staging of steps on their way, and an event for each.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/step_batch.h"
#include "platform/cuda/cuda_device.h"
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

// A call of a device that failed.
struct CallFailure {
  int code = kCudaSuccess;  // CUDA's, or that of an eager launch
  std::string text;         // the call, the device and the error
};

// Per step: have the StepInput where the graph reads it (Staging), launch the graph of the smallest bucket that fits,
// have the tokens on the host, record the event. One CUDA stream, so steps are ordered behind each other; copies ahead have
// another, and the step waits for its own. Nothing here waits for the device, unless a copy of plain memory makes it wait.
class StepDevice {
 public:
  // Enqueues a bucket's kernels one by one instead of its graph: for debugging, and to measure what graphs are worth.
  // Returns what went wrong, or nothing.
  using EagerLaunch = std::function<std::string(int bucket, Needs needs, CudaStream cuda_stream)>;
  static constexpr int kEagerFailed = -1;  // in place of a CUDA error

  struct Graphs {
    std::vector<GraphBucket> buckets;  // ascending; the last one fits every step; the last variant of each serves the most
    CudaGraphExec copy_blocks = nullptr;  // runs before a step that has copies of blocks or of states
    EagerLaunch eager = {};               // if set, what runs in place of graphs; bucket -1 is copy_blocks
    CudaStream cuda_stream = nullptr;     // where it all runs; none: one of this object's own
    std::shared_ptr<void> keep_alive = {};  // whatever owns the graphs
  };

  // Throws CudaError when a CUDA stream or events cannot be had.
  StepDevice(const CudaDevice& device, std::shared_ptr<Staging> staging, Graphs graphs);
  ~StepDevice();
  StepDevice(const StepDevice&) = delete;
  StepDevice& operator=(const StepDevice&) = delete;

  const CudaDevice& device() const { return device_; }
  Staging& staging() const { return *staging_; }
  // Needs for which every bucket has a variant.
  Needs needs() const { return needs_; }
  int num_kinds() const { return num_kinds_; }
  // That of the step in buffer i: one for each graph.
  int kind(int i) const;

  // Enqueues the copy of the input of the step in buffer i, if there is one to be made. False: `failure` says why not.
  bool send(int i, size_t bytes, CallFailure& failure);
  // Enqueues the rest of the step behind it, but its event. False: a part of it was not, and `failure` says why.
  bool launch(int i, CallFailure& failure);
  // Records the event of buffer i behind all that was enqueued of its step, `enqueued` if that was the whole.
  bool record_done(int i, bool enqueued, CallFailure& failure);
  // CUDA's answer whether all is over before that event.
  int query_done(int i) const { return device_.call<&CudaRuntime::event_query>(events_[static_cast<size_t>(i)].done); }

 private:
  struct Events {
    CudaEvent done = nullptr, arrived = nullptr;  // the latter: its input, if that is copied ahead
  };
  bool ok(int error, const char* call, CallFailure& failure) const;
  bool send_input(int i, size_t bytes, CallFailure& failure);
  bool run(int bucket, const GraphVariant& variant, CallFailure& failure);
  bool copy_output(int i, const StepInputHeader& header, CallFailure& failure);
  int bucket_for(const StepInputHeader& header) const;
  const CudaRuntime& cuda() const { return device_.runtime(); }

  CudaDevice device_;
  std::shared_ptr<Staging> staging_;
  Graphs graphs_;
  std::vector<int> first_kind_;  // of each bucket: its variants have kinds that follow each other
  int num_kinds_ = 0;
  Needs needs_ = ~Needs{0};
  CudaStream cuda_stream_ = nullptr, own_cuda_stream_ = nullptr, copy_cuda_stream_ = nullptr;
  std::vector<Events> events_;  // by buffer
};

}  // namespace asyncengine
