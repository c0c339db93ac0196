#include "step_loop/graph_executor.h"

#include <algorithm>
#include <cassert>
#include <thread>

namespace asyncengine {

GraphExecutor::GraphExecutor(const CudaRuntime& cuda, int device, const StepLimits& limits, int steps_in_flight,
                             std::vector<GraphBucket> buckets, std::byte* device_input, int32_t* device_tokens,
                             std::chrono::nanoseconds poll_interval)
    : cuda_(cuda),
      device_(device),
      buckets_(std::move(buckets)),
      device_input_(device_input),
      device_tokens_(device_tokens),
      poll_interval_(poll_interval),
      steps_(static_cast<size_t>(steps_in_flight)) {
  check_cuda(cuda_, cuda_.set_device(device_), "cudaSetDevice");
  check_cuda(cuda_, cuda_.stream_create(&stream_, kCudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  for (Step& step : steps_) {
    step.input = allocate_pinned(cuda_, limits.max_bytes());
    step.output = allocate_pinned(cuda_, static_cast<size_t>(limits.max_rows) * sizeof(int32_t));
    check_cuda(cuda_, cuda_.event_create(&step.done, kCudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
}

GraphExecutor::~GraphExecutor() {
  for (Step& step : steps_) {
    if (step.done != nullptr) cuda_.event_destroy(step.done);
  }
  if (stream_ != nullptr) cuda_.stream_destroy(stream_);
}

bool GraphExecutor::ok(int error, const char* call) {
  if (error == kCudaSuccess) return true;
  if (error_.empty()) error_ = std::string(call) + ": " + cuda_.get_error_string(error) + " (" + std::to_string(error) + ")";
  return false;
}

bool GraphExecutor::launch(int i, size_t bytes) {
  if (!device_set_) {
    if (!ok(cuda_.set_device(device_), "cudaSetDevice")) return false;
    device_set_ = true;
  }
  Step& step = steps_[static_cast<size_t>(i)];
  const StepInputHeader& header = StepInputView(step.input.data()).header();
  const auto bucket = std::find_if(buckets_.begin(), buckets_.end(), [&](const GraphBucket& b) {
    return header.num_rows <= b.max_rows && header.num_tokens <= b.max_tokens;
  });
  assert(bucket != buckets_.end());
  const size_t token_bytes = static_cast<size_t>(header.num_samples) * sizeof(int32_t);
  step.in_flight =
      ok(cuda_.memcpy_async(device_input_, step.input.data(), bytes, kCudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync") &&
      ok(cuda_.graph_launch(bucket->forward, stream_), "cudaGraphLaunch") &&
      (header.num_samples == 0 || (ok(cuda_.graph_launch(bucket->sample, stream_), "cudaGraphLaunch") &&
                                   ok(cuda_.memcpy_async(step.output.data(), device_tokens_, token_bytes,
                                                         kCudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync"))) &&
      ok(cuda_.event_record(step.done, stream_), "cudaEventRecord");
  return step.in_flight;
}

StepStatus GraphExecutor::poll(int i) {
  Step& step = steps_[static_cast<size_t>(i)];
  const int error = cuda_.event_query(step.done);
  if (error == kCudaErrorNotReady) return StepStatus::kPending;
  if (!ok(error, "cudaEventQuery")) return StepStatus::kFailed;
  step.in_flight = false;
  return StepStatus::kReady;
}

bool GraphExecutor::close(std::chrono::nanoseconds limit) {
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    // A failed device runs nothing any more; a busy one may still write to the buffers.
    const bool busy = std::any_of(steps_.begin(), steps_.end(), [&](const Step& step) {
      return step.in_flight && cuda_.event_query(step.done) == kCudaErrorNotReady;
    });
    if (!busy) return true;
    if (std::chrono::steady_clock::now() - start >= limit) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace asyncengine
