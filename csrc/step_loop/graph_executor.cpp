#include "step_loop/graph_executor.h"

#include <algorithm>
#include <cassert>
#include <thread>
#include <utility>

namespace asyncengine {

GraphExecutor::GraphExecutor(const CudaDevice& device, std::shared_ptr<Staging> staging, Graphs graphs,
                             std::chrono::nanoseconds poll_interval)
    : device_(device, std::move(staging), static_cast<StepDevice::Graphs&&>(graphs)),
      mover_(std::move(graphs.mover)),
      state_mover_(std::move(graphs.state_mover)),
      host_attention_(std::move(graphs.host_attention)),
      poll_interval_(poll_interval),
      steps_(static_cast<size_t>(device_.staging().num_steps())) {
  devices_.push_back(&device_);
  for (Rank& rank : graphs.others) {
    others_.push_back(std::make_unique<StepDevice>(rank.device, std::move(rank.staging), std::move(rank.graphs)));
    devices_.push_back(others_.back().get());
  }
  for (Step& step : steps_) {
    step.tokens.resize(this->staging().records_begin());
    step.records.resize(this->staging().output_words() - this->staging().records_begin());
  }
  if (this->staging().mode() == StagingMode::kPageable) {
    launch_thread_ = std::make_unique<LaunchThread>([this](int i, size_t bytes) {
      adopt_thread();
      (void)start(i, bytes);  // poll() tells
      if (notifier_ != nullptr) notifier_->notify();
    });
  }
}

GraphExecutor::~GraphExecutor() { launch_thread_.reset(); }

void GraphExecutor::keep_error(std::string text) {
  std::lock_guard lock(error_mutex_);
  if (error_.empty()) error_ = std::move(text);  // the first one is the cause of the others
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

bool GraphExecutor::send(int i, size_t bytes, CallFailure& failure) {
  return std::ranges::all_of(devices_, [&](StepDevice* device) { return device->send(i, bytes, failure); });
}

// Returns the number of devices that have launched the step whole; if it is not all, the next one may have begun it.
size_t GraphExecutor::launch_all(int i, CallFailure& failure) {
  size_t launched = 0;
  while (launched < devices_.size() && devices_[launched]->launch(i, failure)) ++launched;
  return launched;
}

bool GraphExecutor::record_all(int i, bool enqueued, CallFailure& failure) {
  bool recorded = true;
  for (StepDevice* device : devices_) recorded = device->record_done(i, enqueued, failure) && recorded;
  return recorded;
}

// An error if a device has one, else whether one is not ready; `answers` is the device that says so.
int GraphExecutor::query_all(int i, const StepDevice*& answers) {
  int found = kCudaSuccess;
  for (const StepDevice* device : devices_) {
    const int error = device->query_done(i);
    if (error == kCudaSuccess || (error == kCudaErrorNotReady && found != kCudaSuccess)) continue;
    found = error;
    answers = device;
    if (error != kCudaErrorNotReady) break;
  }
  return found;
}

// Devices that wait for another go on, and what they compute is void.
void GraphExecutor::release() {
  if (!others_.empty()) std::atomic_ref(*staging().released()).store(1, std::memory_order_release);
}

LaunchStatus GraphExecutor::start(int i, size_t bytes) {
  Step& step = steps_[static_cast<size_t>(i)];
  CallFailure failure, unrecorded;
  const size_t launched = !refusing_ && send(i, bytes, failure) ? launch_all(i, failure) : 0;
  const bool enqueued = launched == devices_.size();
  const bool intact = enqueued || refusing_ || (failure.code == kCudaErrorMemoryAllocation && launched == 0);
  if (!enqueued && intact) step.error = refusing_ ? "the step before it was not launched" : std::move(failure.text);
  if (!intact) keep_error(std::move(failure.text));
  // Whatever became of the step, the event is to say when nothing uses its buffers any more.
  const bool recorded = record_all(i, enqueued, unrecorded);
  if (!recorded) keep_error(std::move(unrecorded.text));
  if (!recorded || !intact) {
    release();
    step.state.store(StepState::kUnknown, std::memory_order_release);
    return LaunchStatus::kFailed;
  }
  // Steps that the launch thread still has to launch were planned upon this step: the device would miss its block
  // tables.
  if (!enqueued && launch_thread_ != nullptr) refusing_ = true;
  step.state.store(enqueued ? StepState::kRunning : StepState::kRefused, std::memory_order_release);
  return enqueued ? LaunchStatus::kLaunched : LaunchStatus::kRefused;
}

StepStatus GraphExecutor::poll(int i) {
  Step& step = steps_[static_cast<size_t>(i)];
  const StepState state = step.state.load(std::memory_order_acquire);
  if (state == StepState::kQueued) return StepStatus::kPending;
  if (state == StepState::kUnknown) return StepStatus::kFailed;
  const StepDevice* answers = nullptr;
  const int error = query_all(i, answers);
  if (error == kCudaErrorNotReady) return StepStatus::kPending;
  if (error != kCudaSuccess) {
    release();
    keep_error(answers->device().describe(error, "cudaEventQuery"));
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
  const StepInputView input(staging().input(i).data());
  const StepInputHeader& header = input.header();
  if (header.num_heads != header.num_samples || header.num_result_words > 0) {
    return std::ranges::all_of(input.rows(), [&](const StepInputRow& row) { return take_row(i, row); });
  }
  const int64_t* words = staging().output(i);
  std::vector<int32_t>& tokens = steps_[static_cast<size_t>(i)].tokens;
  for (int32_t sample = 0; sample < header.num_samples; ++sample) {
    if (!take_word(words[sample], static_cast<uint32_t>(header.step), tokens[static_cast<size_t>(sample)])) {
      return found_stale(header, "token for sample " + std::to_string(sample));
    }
  }
  return true;
}

bool GraphExecutor::take_row(int i, const StepInputRow& row) {
  const StepInputHeader& header = StepInputView(staging().input(i).data()).header();
  const auto number = static_cast<uint32_t>(header.step);
  const int64_t* words = staging().output(i);
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
    if (!take_records(words + staging().records_begin() + offset, std::span(step.records).subspan(offset, length), number)) {
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

bool GraphExecutor::is_busy(int i) {
  Step& step = steps_[static_cast<size_t>(i)];
  const StepState state = step.state.load(std::memory_order_acquire);
  if (state == StepState::kFree || state == StepState::kQueued) return false;
  CallFailure failure;
  if (state == StepState::kUnknown && record_all(i, /*enqueued=*/true, failure)) {
    step.state.store(StepState::kRunning, std::memory_order_release);  // the event comes after all that was enqueued
  }
  bool busy = false, failed = false;
  for (const StepDevice* device : devices_) {
    const int error = device->query_done(i);
    busy = busy || error == kCudaErrorNotReady;
    failed = failed || (error != kCudaSuccess && error != kCudaErrorNotReady);
  }
  // A failed device runs nothing any more; a busy one may still write to the buffers.
  return busy || (!failed && step.state.load(std::memory_order_relaxed) == StepState::kUnknown);
}

bool GraphExecutor::close(std::chrono::nanoseconds limit) {
  const auto start = std::chrono::steady_clock::now();
  release();
  // First: they may wait for a step that hangs.
  const bool attends = host_attention_ != nullptr && !host_attention_->close(limit);
  if (launch_thread_ != nullptr && !launch_thread_->close(limit)) return false;
  const auto moves = [this] {
    return (mover_ != nullptr && !mover_->at_rest()) || (state_mover_ != nullptr && !state_mover_->at_rest());
  };
  const auto steps = [this] {
    for (int i = 0; i < num_staging(); ++i) {
      if (is_busy(i)) return true;
    }
    return false;
  };
  while (steps() || moves()) {
    if (std::chrono::steady_clock::now() - start >= limit) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return !attends;
}

}  // namespace asyncengine
