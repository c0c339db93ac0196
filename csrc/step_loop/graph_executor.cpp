#include "step_loop/graph_executor.h"

#include <algorithm>
#include <cassert>
#include <thread>
#include <utility>

namespace asyncengine {
namespace {

constexpr int kEagerFailed = -1;  // in place of a CUDA error

}  // namespace

GraphExecutor::GraphExecutor(const CudaRuntime& cuda, int device, std::shared_ptr<Staging> staging, Graphs graphs,
                             std::chrono::nanoseconds poll_interval)
    : cuda_(cuda),
      device_(device),
      staging_(std::move(staging)),
      graphs_(std::move(graphs)),
      poll_interval_(poll_interval),
      steps_(static_cast<size_t>(staging_->num_steps())) {
  for (const GraphBucket& bucket : graphs_.buckets) {
    first_kind_.push_back(num_kinds_);
    num_kinds_ += static_cast<int>(bucket.variants.size());
    needs_ &= bucket.variants.back().needs;
  }
  if (staging_->mode() == StagingMode::kPageable) needs_ &= ~Needs{kNeedMask};  // the device cannot read the host's memory
  check_cuda(cuda_, cuda_.set_device(device_), "cudaSetDevice");
  if (graphs_.cuda_stream == nullptr) {
    check_cuda(cuda_, cuda_.stream_create(&own_cuda_stream_, kCudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  cuda_stream_ = graphs_.cuda_stream != nullptr ? graphs_.cuda_stream : own_cuda_stream_;
  const bool ahead = staging_->mode() == StagingMode::kAhead;
  if (ahead) check_cuda(cuda_, cuda_.stream_create(&copy_cuda_stream_, kCudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  for (Step& step : steps_) {
    step.tokens.resize(staging_->records_begin());
    step.records.resize(staging_->output_words() - staging_->records_begin());
    check_cuda(cuda_, cuda_.event_create(&step.done, kCudaEventDisableTiming), "cudaEventCreateWithFlags");
    if (ahead) check_cuda(cuda_, cuda_.event_create(&step.arrived, kCudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
  if (staging_->mode() == StagingMode::kPageable) {
    launch_thread_ = std::make_unique<LaunchThread>([this](int i, size_t bytes) {
      (void)start(i, bytes);  // poll() tells
      if (notifier_ != nullptr) notifier_->notify();
    });
  }
}

GraphExecutor::~GraphExecutor() {
  launch_thread_.reset();
  for (Step& step : steps_) {
    if (step.done != nullptr) cuda_.event_destroy(step.done);
    if (step.arrived != nullptr) cuda_.event_destroy(step.arrived);
  }
  if (copy_cuda_stream_ != nullptr) cuda_.stream_destroy(copy_cuda_stream_);
  if (own_cuda_stream_ != nullptr) cuda_.stream_destroy(own_cuda_stream_);
}

bool GraphExecutor::ok(int error, const char* call) {
  if (error == kCudaSuccess) return true;
  failed_code_ = error;
  keep_error(describe_cuda_error(cuda_, error, call));
  return false;
}

void GraphExecutor::keep_error(std::string text) {
  std::lock_guard lock(error_mutex_);
  if (error_.empty()) error_ = std::move(text);  // the first one is the cause of the others
}

std::string GraphExecutor::take_error() {
  std::lock_guard lock(error_mutex_);
  return std::exchange(error_, {});
}

std::string GraphExecutor::error() const {
  std::lock_guard lock(error_mutex_);
  return error_.empty() ? step_error_ : error_;
}

LaunchStatus GraphExecutor::launch(int i, size_t bytes) {
  if (launch_thread_ == nullptr) return start(i, bytes);
  const auto is_free = [](const Step& step) { return step.state.load(std::memory_order_acquire) == StepState::kFree; };
  if (std::ranges::all_of(steps_, is_free)) refusing_ = false;
  steps_[static_cast<size_t>(i)].state.store(StepState::kQueued, std::memory_order_relaxed);
  launch_thread_->push(i, bytes);
  return LaunchStatus::kLaunched;
}

LaunchStatus GraphExecutor::start(int i, size_t bytes) {
  Step& step = steps_[static_cast<size_t>(i)];
  failed_code_ = kCudaSuccess;
  if (!device_set_) {
    if (!ok(cuda_.set_device(device_), "cudaSetDevice")) {
      step.state.store(StepState::kUnknown, std::memory_order_release);
      return LaunchStatus::kFailed;
    }
    device_set_ = true;
  }
  const bool enqueued = !refusing_ && enqueue(i, bytes);
  const bool intact = enqueued || refusing_ || failed_code_ == kCudaErrorMemoryAllocation;
  if (!enqueued && intact) step.error = refusing_ ? "the step before it was not launched" : take_error();
  // Whatever became of the step, the event is to say when nothing uses its buffers any more.
  if (!record_done(i, enqueued) || !intact) {
    step.state.store(StepState::kUnknown, std::memory_order_release);
    return LaunchStatus::kFailed;
  }
  // Steps that the launch thread still has to launch were planned upon this step: the device would miss its block
  // tables.
  if (!enqueued && launch_thread_ != nullptr) refusing_ = true;
  step.state.store(enqueued ? StepState::kRunning : StepState::kRefused, std::memory_order_release);
  return enqueued ? LaunchStatus::kLaunched : LaunchStatus::kRefused;
}

bool GraphExecutor::record_done(int i, bool enqueued) {
  const Step& step = steps_[static_cast<size_t>(i)];
  // The copy ahead of a step that was not enqueued is on a CUDA stream that the step's own may not have been told to wait for.
  const bool ordered = enqueued || step.arrived == nullptr ||
                       (ok(cuda_.event_record(step.arrived, copy_cuda_stream_), "cudaEventRecord") &&
                        ok(cuda_.stream_wait_event(cuda_stream_, step.arrived, 0), "cudaStreamWaitEvent"));
  return ordered && ok(cuda_.event_record(step.done, cuda_stream_), "cudaEventRecord");
}

bool GraphExecutor::enqueue(int i, size_t bytes) {
  const StepInputHeader& header = StepInputView(staging_->input(i).data()).header();
  if (staging_->mode() != StagingMode::kMapped && !send_input(i, bytes)) return false;
  if (header.num_copies > 0 && !run(-1, {0, graphs_.copy_blocks})) return false;
  const int number = bucket_for(header);
  const GraphBucket& bucket = graphs_.buckets[static_cast<size_t>(number)];
  if (!run(number, bucket.variants[bucket.variant_for(header.needs)])) return false;
  return staging_->writes_output() || copy_output(i, header);
}

bool GraphExecutor::copy_output(int i, const StepInputHeader& header) {
  const auto copy = [&](size_t begin, int32_t words) {
    return words == 0 || ok(cuda_.memcpy_async(staging_->output(i) + begin, staging_->device_buffers().output + begin,
                                               static_cast<size_t>(words) * sizeof(int64_t), kCudaMemcpyDeviceToHost, cuda_stream_),
                            "cudaMemcpyAsync");
  };
  return copy(0, header.num_samples) && copy(staging_->records_begin(), header.num_result_words);
}

bool GraphExecutor::send_input(int i, size_t bytes) {
  const bool ahead = staging_->mode() == StagingMode::kAhead;
  const CudaEvent arrived = steps_[static_cast<size_t>(i)].arrived;
  // Nobody reads that place of the ring any more: the step that did is over, or the buffer would not be ours.
  return ok(cuda_.memcpy_async(staging_->device_input(i), staging_->input(i).data(), bytes, kCudaMemcpyHostToDevice,
                               ahead ? copy_cuda_stream_ : cuda_stream_),
            "cudaMemcpyAsync") &&
         (!ahead || (ok(cuda_.event_record(arrived, copy_cuda_stream_), "cudaEventRecord") &&
                     ok(cuda_.stream_wait_event(cuda_stream_, arrived, 0), "cudaStreamWaitEvent")));
}

bool GraphExecutor::run(int bucket, const GraphVariant& variant) {
  if (graphs_.eager) {
    std::string error = graphs_.eager(bucket, variant.needs, cuda_stream_);
    if (error.empty()) return true;
    failed_code_ = kEagerFailed;
    keep_error(std::move(error));
    return false;
  }
  return ok(cuda_.graph_launch(variant.graph, cuda_stream_), "cudaGraphLaunch");
}

int GraphExecutor::bucket_for(const StepInputHeader& header) const {
  const bool single = header.num_tokens == header.num_rows - header.host_rows.num_rows;
  const auto found = std::find_if(graphs_.buckets.begin(), graphs_.buckets.end(), [&](const GraphBucket& b) {
    return header.num_rows <= b.max_rows && header.num_tokens + b.lanes <= b.max_tokens && header.max_context <= b.max_context &&
           header.host_rows.num_lanes == b.lanes && (single || !b.single_token_rows);
  });
  assert(found != graphs_.buckets.end());
  return static_cast<int>(found - graphs_.buckets.begin());
}

int GraphExecutor::kind(int i) const {
  const StepInputHeader& header = StepInputView(staging_->input(i).data()).header();
  const auto bucket = static_cast<size_t>(bucket_for(header));
  return first_kind_[bucket] + static_cast<int>(graphs_.buckets[bucket].variant_for(header.needs));
}

StepStatus GraphExecutor::poll(int i) {
  Step& step = steps_[static_cast<size_t>(i)];
  const StepState state = step.state.load(std::memory_order_acquire);
  if (state == StepState::kQueued) return StepStatus::kPending;
  if (state == StepState::kUnknown) return StepStatus::kFailed;
  const int error = cuda_.event_query(step.done);
  if (error == kCudaErrorNotReady) return StepStatus::kPending;
  if (error != kCudaSuccess) {
    keep_error(describe_cuda_error(cuda_, error, "cudaEventQuery"));
    return StepStatus::kFailed;
  }
  step.state.store(StepState::kFree, std::memory_order_relaxed);
  if (state == StepState::kRefused) {
    step_error_ = std::move(step.error);
    return StepStatus::kStepFailed;
  }
  return take_results(i) ? StepStatus::kReady : StepStatus::kFailed;
}

namespace {

// The payload of a word, if the word is of that step.
bool take_word(int64_t word, uint32_t step, int32_t& payload) {
  payload = static_cast<int32_t>(static_cast<uint32_t>(static_cast<uint64_t>(word)));
  return static_cast<uint32_t>(static_cast<uint64_t>(word) >> 32) == step;
}

}  // namespace

bool GraphExecutor::found_stale(const StepInputHeader& header, const std::string& missing) {
  keep_error("step " + std::to_string(header.step) + " left no " + missing);
  return false;
}

// Every word names its step: one left over from another step would be a token nobody sampled.
bool GraphExecutor::take_results(int i) {
  const StepInputView input(staging_->input(i).data());
  const StepInputHeader& header = input.header();
  if (header.num_heads != header.num_samples || header.num_result_words > 0) {
    return std::ranges::all_of(input.rows(), [&](const StepInputRow& row) { return take_row(i, row); });
  }
  const int64_t* words = staging_->output(i);
  std::vector<int32_t>& tokens = steps_[static_cast<size_t>(i)].tokens;
  for (int32_t sample = 0; sample < header.num_samples; ++sample) {
    if (!take_word(words[sample], static_cast<uint32_t>(header.step), tokens[static_cast<size_t>(sample)])) {
      return found_stale(header, "token for sample " + std::to_string(sample));
    }
  }
  return true;
}

bool GraphExecutor::take_row(int i, const StepInputRow& row) {
  const StepInputHeader& header = StepInputView(staging_->input(i).data()).header();
  const auto number = static_cast<uint32_t>(header.step);
  const int64_t* words = staging_->output(i);
  Step& step = steps_[static_cast<size_t>(i)];
  int32_t* tokens = step.tokens.data() + row.sample_row;
  for (int32_t k = row.num_samples - row.num_appends; k < row.num_samples; ++k) {
    if (!take_word(words[row.sample_row + k], number, tokens[k])) {
      return found_stale(header, "token for sample " + std::to_string(row.sample_row + k));
    }
  }
  if (row.result_words == 0) return true;
  const auto length = static_cast<size_t>(row.result_words);
  for (int32_t k = 0; k < row.num_samples; ++k) {
    if (!has_records(k, row.num_samples, row.num_appends, tokens)) continue;
    const size_t offset = static_cast<size_t>(row.result_offset) + static_cast<size_t>(k) * length;
    if (!take_records(words + staging_->records_begin() + offset, std::span(step.records).subspan(offset, length), number)) {
      return found_stale(header, "whole records for sample " + std::to_string(row.sample_row + k));
    }
  }
  return true;
}

// The chain to its end; what lies behind it is left from other steps.
bool GraphExecutor::take_records(const int64_t* words, std::span<int32_t> region, uint32_t step) {
  for (size_t k = 0; k < region.size();) {
    if (!take_word(words[k], step, region[k])) return false;
    if (entry_kind(region[k]) == kEndOfRecords) return true;
    const size_t end = k + 1 + entry_count(region[k]);
    if (end > region.size()) return false;
    for (++k; k < end; ++k) {
      if (!take_word(words[k], step, region[k])) return false;
    }
  }
  return true;
}

bool GraphExecutor::is_busy(Step& step) {
  const StepState state = step.state.load(std::memory_order_acquire);
  if (state == StepState::kFree || state == StepState::kQueued) return false;
  if (state == StepState::kUnknown && cuda_.event_record(step.done, cuda_stream_) == kCudaSuccess) {
    step.state.store(StepState::kRunning, std::memory_order_release);  // the event comes after all that was enqueued
  }
  const int error = cuda_.event_query(step.done);
  // A failed device runs nothing any more; a busy one may still write to the buffers.
  if (error != kCudaSuccess && error != kCudaErrorNotReady) return false;
  return error == kCudaErrorNotReady || step.state.load(std::memory_order_relaxed) == StepState::kUnknown;
}

bool GraphExecutor::close(std::chrono::nanoseconds limit) {
  const auto start = std::chrono::steady_clock::now();
  // First: they may wait for a step that hangs.
  const bool attends = graphs_.host_attention != nullptr && !graphs_.host_attention->close(limit);
  if (launch_thread_ != nullptr && !launch_thread_->close(limit)) return false;
  const auto moves = [this] { return graphs_.mover != nullptr && !graphs_.mover->at_rest(); };
  while (std::ranges::any_of(steps_, [this](Step& step) { return is_busy(step); }) || moves()) {
    if (std::chrono::steady_clock::now() - start >= limit) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return !attends;
}

}  // namespace asyncengine
