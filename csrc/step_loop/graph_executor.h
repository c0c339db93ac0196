// Runs steps on a device by launching graphs through the CUDA function table: no Python, no GIL, no wait.
#pragma once

#include <string>
#include <vector>

#include "platform/cuda_runtime.h"
#include "platform/pinned_memory.h"
#include "step_loop/executor.h"

namespace asyncengine {

// A captured graph that reads a StepInput of at most this many rows and tokens at the executor's input address.
struct GraphBucket {
  int32_t max_rows, max_tokens;
  CudaGraphExec forward, sample;
};

// Per step: copy the StepInput in, launch the forward graph of the smallest bucket that fits, launch its sampling
// graph, copy the tokens out, record the event. One stream, so steps are ordered behind each other; two input and
// output buffers in host memory, because the CPU is a step ahead, but one on the device, because the stream is in order.
class GraphExecutor final : public Executor {
 public:
  // `device_input` and `device_tokens` are what the graphs were captured with. Buckets in ascending order, the last
  // one fitting every step. Throws CudaError when memory, stream or events cannot be had.
  GraphExecutor(const CudaRuntime& cuda, int device, const StepLimits& limits, int steps_in_flight,
                std::vector<GraphBucket> buckets, std::byte* device_input, int32_t* device_tokens,
                std::chrono::nanoseconds poll_interval);
  ~GraphExecutor() override;

  int num_staging() const override { return static_cast<int>(steps_.size()); }
  std::span<std::byte> staging(int i) override { return steps_[static_cast<size_t>(i)].input.bytes(); }
  const int32_t* tokens(int i) const override {
    return reinterpret_cast<const int32_t*>(steps_[static_cast<size_t>(i)].output.data());
  }
  bool launch(int i, size_t bytes) override;
  StepStatus poll(int i) override;
  std::string error() const override { return error_; }
  std::chrono::nanoseconds poll_interval() const override { return poll_interval_; }
  bool close(std::chrono::nanoseconds limit) override;

 private:
  struct Step {
    PinnedBuffer input, output;
    CudaEvent done = nullptr;
    bool in_flight = false;
  };
  bool ok(int error, const char* call);

  const CudaRuntime& cuda_;
  int device_;
  bool device_set_ = false;  // cudaSetDevice is per thread: the first launch makes it for the step thread
  std::vector<GraphBucket> buckets_;
  std::byte* device_input_;
  int32_t* device_tokens_;
  std::chrono::nanoseconds poll_interval_;
  CudaStream stream_ = nullptr;
  std::vector<Step> steps_;
  std::string error_;
};

}  // namespace asyncengine
