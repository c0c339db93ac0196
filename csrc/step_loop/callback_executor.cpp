#include "step_loop/callback_executor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <new>
#include <utility>

#include "core/huge_pages.h"

namespace asyncengine {

void give_vectors(const StepBatch& batch, const float* vectors, size_t width, int32_t* tokens) {
  for (size_t i = 0; i < static_cast<size_t>(batch.num_samples); ++i) {
    const Sample& sample = batch.samples[i];
    if ((sample.needs & kNeedVector) == 0) continue;
    tokens[i] = kNotFinite;
    if (vectors == nullptr || sample.records.size() < 1 + width) continue;
    const std::span row(vectors + i * width, width);
    if (!std::ranges::all_of(row, [](float x) { return std::isfinite(x); })) continue;
    std::memcpy(RecordWriter(sample.records).add(kVector, width).data(), row.data(), row.size_bytes());
    tokens[i] = kNoToken;
  }
}

HostMover::HostMover(std::vector<BlockRegion> regions, int32_t num_host_blocks)
    : regions_(std::move(regions)), num_host_blocks_(num_host_blocks) {
  for (const BlockRegion& region : regions_) block_bytes_ += region.bytes_per_block;
  memory_ = huge_memory(static_cast<size_t>(num_host_blocks) * block_bytes_);
}

bool HostMover::start(int transfer, std::span<const BlockMove> moves) {
  for (const BlockMove& move : moves) {
    std::byte* host = host_block(move.host);
    for (const BlockRegion& region : regions_) {
      std::byte* block = region.base + static_cast<size_t>(move.block) * region.bytes_per_block;
      std::memcpy(brings_in(transfer) ? block : host, brings_in(transfer) ? host : block, region.bytes_per_block);
      host += region.bytes_per_block;
    }
  }
  return true;
}

CallbackExecutor::CallbackExecutor(const StepLimits& limits, int32_t max_blocks, int32_t block_size, int steps_in_flight,
                                   std::vector<BlockRegion> regions, Needs needs, Forward forward, HeldUp held_up,
                                   int32_t num_host_blocks, std::vector<BlockRegion> states, int32_t num_host_states)
    : board_(static_cast<size_t>(limits.max_rows) * MaskBoard::stride(limits.mask_words), -1),
      masks_(board_.data(), limits.mask_words),
      slots_(limits, max_blocks, block_size, masks_),
      steps_(static_cast<size_t>(steps_in_flight)),
      regions_(std::move(regions)),
      states_(std::move(states)),
      needs_(needs),
      forward_(std::move(forward)),
      held_up_(std::move(held_up)) {
  for (Step& step : steps_) {
    step.input.resize(limits.max_bytes());
    step.tokens.resize(static_cast<size_t>(limits.samples()));
    step.records.resize(static_cast<size_t>(limits.max_result_words));
  }
  if (num_host_blocks > 0) mover_ = std::make_unique<HostMover>(regions_, num_host_blocks);
  if (num_host_states > 0) state_mover_ = std::make_unique<HostMover>(states_, num_host_states);
  thread_ = std::thread([this] { run(); });
}

CallbackExecutor::~CallbackExecutor() { close(std::chrono::nanoseconds::max()); }

LaunchStatus CallbackExecutor::launch(int i, size_t) {
  steps_[static_cast<size_t>(i)].status.store(StepStatus::kPending, std::memory_order_relaxed);
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(i);
  }
  work_.notify_one();
  return LaunchStatus::kLaunched;
}

StepStatus CallbackExecutor::poll(int i) { return steps_[static_cast<size_t>(i)].status.load(std::memory_order_acquire); }

std::string CallbackExecutor::error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

bool CallbackExecutor::close(std::chrono::nanoseconds limit) {
  {
    std::unique_lock lock(mutex_);
    closing_ = true;
    work_.notify_one();
    if (limit == std::chrono::nanoseconds::max()) {
      idle_.wait(lock, [this] { return finished_; });
    } else if (!idle_.wait_until(lock, WaitClock::now() + limit, [this] { return finished_; })) {
      return false;
    }
  }
  if (thread_.joinable()) thread_.join();
  return host_attention_ == nullptr || host_attention_->close(limit);
}

void CallbackExecutor::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (closing_) break;
    Step& step = steps_[static_cast<size_t>(queue_.front())];
    queue_.pop_front();
    lock.unlock();
    execute(step);
    lock.lock();
  }
  finished_ = true;
  idle_.notify_all();
}

void CallbackExecutor::execute(Step& step) {
  const StepStatus status = compute(step);
  step.status.store(status, std::memory_order_release);
  if (notifier_ != nullptr) notifier_->notify();
}

StepStatus CallbackExecutor::compute(Step& step) {
  const StepInputView input(step.input.data());
  for (const BlockCopy& copy : input.copies()) {
    for (const BlockRegion& region : regions_) {
      std::memcpy(region.base + static_cast<size_t>(copy.target) * region.bytes_per_block,
                  region.base + static_cast<size_t>(copy.source) * region.bytes_per_block, region.bytes_per_block);
    }
  }
  for (const BlockCopy& copy : input.state_copies()) {
    for (const BlockRegion& region : states_) {
      std::byte* target = region.base + static_cast<size_t>(copy.target) * region.bytes_per_block;
      if (copy.source < 0) {
        std::memset(target, 0, region.bytes_per_block);
      } else {
        std::memcpy(target, region.base + static_cast<size_t>(copy.source) * region.bytes_per_block, region.bytes_per_block);
      }
    }
  }
  // The slots and the copied blocks stay right for the steps behind this one, whatever comes of the forward.
  const StepBatch& batch = slots_.ingest(input, step.records);
  try {
    forward_(batch, step.tokens.data());
  } catch (const std::exception& e) {
    keep_error(e.what());
    return StepStatus::kStepFailed;
  } catch (...) {
    keep_error("an exception that is no std::exception");
    return StepStatus::kStepFailed;
  }
  slots_.remember(input, step.tokens.data());
  return StepStatus::kReady;
}

void CallbackExecutor::keep_error(const char* what) noexcept {
  std::lock_guard lock(mutex_);
  try {
    error_ = what;
  } catch (const std::bad_alloc&) {
    error_ = "out of memory";  // short enough to need none
  }
}

}  // namespace asyncengine
