#include "step_loop/step_device.h"

#include <algorithm>
#include <cassert>

namespace asyncengine {

StepDevice::StepDevice(const CudaDevice& device, std::shared_ptr<Staging> staging, Graphs graphs)
    : device_(device),
      staging_(std::move(staging)),
      graphs_(std::move(graphs)),
      events_(static_cast<size_t>(staging_->num_steps())) {
  for (const GraphBucket& bucket : graphs_.buckets) {
    first_kind_.push_back(num_kinds_);
    num_kinds_ += static_cast<int>(bucket.variants.size());
    needs_ &= bucket.variants.back().needs;
  }
  if (staging_->mode() == StagingMode::kPageable) needs_ &= ~Needs{kNeedMask};  // the device cannot read the host's memory
  const auto make_stream = [this](CudaStream& cuda_stream) {
    device_.check<&CudaRuntime::stream_create>("cudaStreamCreateWithFlags", &cuda_stream, kCudaStreamNonBlocking);
  };
  const auto make_event = [this](CudaEvent& event) {
    device_.check<&CudaRuntime::event_create>("cudaEventCreateWithFlags", &event, kCudaEventDisableTiming);
  };
  if (graphs_.cuda_stream == nullptr) make_stream(own_cuda_stream_);
  cuda_stream_ = graphs_.cuda_stream != nullptr ? graphs_.cuda_stream : own_cuda_stream_;
  const bool ahead = staging_->mode() == StagingMode::kAhead;
  if (ahead) make_stream(copy_cuda_stream_);
  for (Events& events : events_) {
    make_event(events.done);
    if (ahead) make_event(events.arrived);
  }
}

StepDevice::~StepDevice() {
  const CudaDevice::Scope scope(device_);
  if (scope.error() != kCudaSuccess) return;  // of a device that is gone nothing is left to free
  for (const Events& events : events_) {
    if (events.done != nullptr) cuda().event_destroy(events.done);
    if (events.arrived != nullptr) cuda().event_destroy(events.arrived);
  }
  if (copy_cuda_stream_ != nullptr) cuda().stream_destroy(copy_cuda_stream_);
  if (own_cuda_stream_ != nullptr) cuda().stream_destroy(own_cuda_stream_);
}

bool StepDevice::ok(int error, const char* call, CallFailure& failure) const {
  if (error == kCudaSuccess) return true;
  failure = {error, device_.describe(error, call)};
  return false;
}

bool StepDevice::send(int i, size_t bytes, CallFailure& failure) {
  if (staging_->mode() == StagingMode::kMapped) return true;
  const CudaDevice::Scope scope(device_);
  return ok(scope.error(), "cudaSetDevice", failure) && send_input(i, bytes, failure);
}

bool StepDevice::launch(int i, CallFailure& failure) {
  const CudaDevice::Scope scope(device_);
  if (!ok(scope.error(), "cudaSetDevice", failure)) return false;
  const StepInputView input(staging_->input(i).data());
  const StepInputHeader& header = input.header();
  if ((header.num_copies > 0 || input.copies_states()) && !run(-1, {0, graphs_.copy_blocks}, failure)) return false;
  const int number = bucket_for(header);
  const GraphBucket& bucket = graphs_.buckets[static_cast<size_t>(number)];
  if (!run(number, bucket.variants[bucket.variant_for(header.needs)], failure)) return false;
  return staging_->writes_output() || staging_->follows() || copy_output(i, header, failure);
}

bool StepDevice::record_done(int i, bool enqueued, CallFailure& failure) {
  const CudaDevice::Scope scope(device_);
  if (!ok(scope.error(), "cudaSetDevice", failure)) return false;
  const Events& events = events_[static_cast<size_t>(i)];
  // The copy ahead of a step that was not enqueued is on a CUDA stream that the step's own may not have been told to wait for.
  const bool ordered = enqueued || events.arrived == nullptr ||
                       (ok(cuda().event_record(events.arrived, copy_cuda_stream_), "cudaEventRecord", failure) &&
                        ok(cuda().stream_wait_event(cuda_stream_, events.arrived, 0), "cudaStreamWaitEvent", failure));
  return ordered && ok(cuda().event_record(events.done, cuda_stream_), "cudaEventRecord", failure);
}

bool StepDevice::copy_output(int i, const StepInputHeader& header, CallFailure& failure) {
  const auto copy = [&](size_t begin, int32_t words) {
    return words == 0 ||
           ok(cuda().memcpy_async(staging_->output(i) + begin, staging_->device_buffers().output + begin,
                                  static_cast<size_t>(words) * sizeof(int64_t), kCudaMemcpyDeviceToHost, cuda_stream_),
              "cudaMemcpyAsync", failure);
  };
  return copy(0, header.num_samples) && copy(staging_->records_begin(), header.num_result_words);
}

bool StepDevice::send_input(int i, size_t bytes, CallFailure& failure) {
  const bool ahead = staging_->mode() == StagingMode::kAhead;
  const CudaEvent arrived = events_[static_cast<size_t>(i)].arrived;
  // Nobody reads that place of the ring any more: the step that did is over, or the buffer would not be ours.
  return ok(cuda().memcpy_async(staging_->device_input(i), staging_->input(i).data(), bytes, kCudaMemcpyHostToDevice,
                                ahead ? copy_cuda_stream_ : cuda_stream_),
            "cudaMemcpyAsync", failure) &&
         (!ahead || (ok(cuda().event_record(arrived, copy_cuda_stream_), "cudaEventRecord", failure) &&
                     ok(cuda().stream_wait_event(cuda_stream_, arrived, 0), "cudaStreamWaitEvent", failure)));
}

bool StepDevice::run(int bucket, const GraphVariant& variant, CallFailure& failure) {
  if (graphs_.eager) {
    std::string error = graphs_.eager(bucket, variant.needs, cuda_stream_);
    if (error.empty()) return true;
    failure = {kEagerFailed, std::move(error)};
    return false;
  }
  return ok(cuda().graph_launch(variant.graph, cuda_stream_), "cudaGraphLaunch", failure);
}

int StepDevice::bucket_for(const StepInputHeader& header) const {
  const bool single = header.num_tokens == header.num_rows - header.host_rows.num_rows;
  const auto found = std::find_if(graphs_.buckets.begin(), graphs_.buckets.end(), [&](const GraphBucket& b) {
    return header.num_rows <= b.max_rows && header.num_tokens + b.lanes <= b.max_tokens && header.max_context <= b.max_context &&
           header.host_rows.num_lanes == b.lanes && (single || !b.single_token_rows);
  });
  assert(found != graphs_.buckets.end());
  return static_cast<int>(found - graphs_.buckets.begin());
}

int StepDevice::kind(int i) const {
  const StepInputHeader& header = StepInputView(staging_->input(i).data()).header();
  const auto bucket = static_cast<size_t>(bucket_for(header));
  return first_kind_[bucket] + static_cast<int>(graphs_.buckets[bucket].variant_for(header.needs));
}

}  // namespace asyncengine
