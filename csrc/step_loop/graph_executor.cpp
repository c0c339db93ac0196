#include "step_loop/graph_executor.h"

#include <algorithm>
#include <cassert>
#include <thread>

namespace asyncengine {

GraphExecutor::GraphExecutor(const CudaRuntime& cuda, int device, std::shared_ptr<Staging> staging, int32_t max_rows,
                             Graphs graphs, std::chrono::nanoseconds poll_interval)
    : cuda_(cuda),
      device_(device),
      staging_(std::move(staging)),
      graphs_(std::move(graphs)),
      poll_interval_(poll_interval),
      steps_(static_cast<size_t>(staging_->num_steps())) {
  check_cuda(cuda_, cuda_.set_device(device_), "cudaSetDevice");
  if (graphs_.stream == nullptr) {
    check_cuda(cuda_, cuda_.stream_create(&own_stream_, kCudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  stream_ = graphs_.stream != nullptr ? graphs_.stream : own_stream_;
  const bool ahead = staging_->mode() == StagingMode::kAhead;
  if (ahead) check_cuda(cuda_, cuda_.stream_create(&copy_stream_, kCudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  for (Step& step : steps_) {
    step.tokens.resize(static_cast<size_t>(max_rows));
    check_cuda(cuda_, cuda_.event_create(&step.done, kCudaEventDisableTiming), "cudaEventCreateWithFlags");
    if (ahead) check_cuda(cuda_, cuda_.event_create(&step.arrived, kCudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
}

GraphExecutor::~GraphExecutor() {
  for (Step& step : steps_) {
    if (step.done != nullptr) cuda_.event_destroy(step.done);
    if (step.arrived != nullptr) cuda_.event_destroy(step.arrived);
  }
  if (copy_stream_ != nullptr) cuda_.stream_destroy(copy_stream_);
  if (own_stream_ != nullptr) cuda_.stream_destroy(own_stream_);
}

bool GraphExecutor::ok(int error, const char* call) {
  if (error == kCudaSuccess) return true;
  if (error_.empty()) error_ = describe_cuda_error(cuda_, error, call);
  return false;
}

bool GraphExecutor::launch(int i, size_t bytes) {
  if (!device_set_) {
    if (!ok(cuda_.set_device(device_), "cudaSetDevice")) return false;
    device_set_ = true;
  }
  Step& step = steps_[static_cast<size_t>(i)];
  step.in_flight = enqueue(i, bytes) && ok(cuda_.event_record(step.done, stream_), "cudaEventRecord");
  return step.in_flight;
}

bool GraphExecutor::enqueue(int i, size_t bytes) {
  const StepInputHeader& header = StepInputView(staging_->input(i).data()).header();
  if (staging_->mode() != StagingMode::kMapped && !send_input(i, bytes)) return false;
  const GraphVariant variant = variant_for(header);
  if (header.num_copies > 0 && !run(-1, variant, graphs_.copy_blocks)) return false;
  const int bucket = bucket_for(header);
  if (!run(bucket, variant, graphs_.buckets[static_cast<size_t>(bucket)].graphs[variant])) return false;
  const size_t output_bytes = static_cast<size_t>(header.num_samples) * sizeof(int64_t);
  return staging_->writes_output() || output_bytes == 0 ||
         ok(cuda_.memcpy_async(staging_->output(i), staging_->device_buffers().output, output_bytes,
                               kCudaMemcpyDeviceToHost, stream_),
            "cudaMemcpyAsync");
}

bool GraphExecutor::send_input(int i, size_t bytes) {
  const bool ahead = staging_->mode() == StagingMode::kAhead;
  const CudaEvent arrived = steps_[static_cast<size_t>(i)].arrived;
  // Nobody reads that place of the ring any more: the step that did is over, or the buffer would not be ours.
  return ok(cuda_.memcpy_async(staging_->device_input(i), staging_->input(i).data(), bytes, kCudaMemcpyHostToDevice,
                               ahead ? copy_stream_ : stream_),
            "cudaMemcpyAsync") &&
         (!ahead || (ok(cuda_.event_record(arrived, copy_stream_), "cudaEventRecord") &&
                     ok(cuda_.stream_wait_event(stream_, arrived, 0), "cudaStreamWaitEvent")));
}

bool GraphExecutor::run(int bucket, GraphVariant variant, CudaGraphExec graph) {
  if (graphs_.eager) {
    error_ = graphs_.eager(bucket, variant, stream_);
    return error_.empty();
  }
  return ok(cuda_.graph_launch(graph, stream_), "cudaGraphLaunch");
}

int GraphExecutor::bucket_for(const StepInputHeader& header) const {
  const bool single = header.num_tokens == header.num_rows;
  const auto found = std::find_if(graphs_.buckets.begin(), graphs_.buckets.end(), [&](const GraphBucket& b) {
    return header.num_rows <= b.max_rows && header.num_tokens <= b.max_tokens && header.max_context <= b.max_context &&
           (single || !b.single_token_rows);
  });
  assert(found != graphs_.buckets.end());
  return static_cast<int>(found - graphs_.buckets.begin());
}

int GraphExecutor::kind(int i) const {
  const StepInputHeader& header = StepInputView(staging_->input(i).data()).header();
  return bucket_for(header) * kNumVariants + variant_for(header);
}

StepStatus GraphExecutor::poll(int i) {
  Step& step = steps_[static_cast<size_t>(i)];
  const int error = cuda_.event_query(step.done);
  if (error == kCudaErrorNotReady) return StepStatus::kPending;
  if (!ok(error, "cudaEventQuery")) return StepStatus::kFailed;
  step.in_flight = false;
  return take_tokens(i) ? StepStatus::kReady : StepStatus::kFailed;
}

// Every word names its step: one left over from another step would be a token nobody sampled.
bool GraphExecutor::take_tokens(int i) {
  const StepInputHeader& header = StepInputView(staging_->input(i).data()).header();
  const int64_t* words = staging_->output(i);
  std::vector<int32_t>& tokens = steps_[static_cast<size_t>(i)].tokens;
  for (int32_t row = 0; row < header.num_samples; ++row) {
    const auto word = static_cast<uint64_t>(words[row]);
    if (static_cast<uint32_t>(word >> 32) != static_cast<uint32_t>(header.step)) {
      error_ = "step " + std::to_string(header.step) + " left no token for row " + std::to_string(row);
      return false;
    }
    tokens[static_cast<size_t>(row)] = static_cast<int32_t>(static_cast<uint32_t>(word));
  }
  return true;
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
