// Runs steps by calling a function on a thread of its own: the CPU's forward pass.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "step_loop/executor.h"
#include "step_loop/slot_state.h"

namespace asyncengine {

// Ends the samples that need a vector: row i of `vectors` [num_samples, width] becomes the record of sample i, whose token
// becomes kNoToken; or kNotFinite where a number is not finite, or the record has no room for the row.
void give_vectors(const StepBatch& batch, const float* vectors, size_t width, int32_t* tokens);

// Blocks in memory of the host that move at once, by its caller.
class HostMover final : public BlockMover {
 public:
  // Memory of which each block occupies `bytes_per_block` consecutive bytes: where block copies take place.
  struct BlockRegion {
    std::byte* base;
    size_t bytes_per_block;
  };
  HostMover(std::vector<BlockRegion> regions, int32_t num_host_blocks);

  int32_t num_host_blocks() const override { return num_host_blocks_; }
  int32_t max_moves() const override { return 8; }
  size_t block_bytes() const override { return block_bytes_; }
  std::byte* host_block(int32_t host) override { return memory_.get() + static_cast<size_t>(host) * block_bytes_; }
  const std::shared_ptr<std::byte[]>& memory() const { return memory_; }
  bool start(int transfer, std::span<const BlockMove> moves) override;
  MoveStatus poll(int) override { return MoveStatus::kDone; }

 private:
  std::vector<BlockRegion> regions_;
  int32_t num_host_blocks_;
  size_t block_bytes_ = 0;
  std::shared_ptr<std::byte[]> memory_;
};

class CallbackExecutor final : public Executor {
 public:
  // Computes the batch and writes one token per sample, or kNotFinite or kNoToken, and the records of samples that want
  // some. An exception fails the step; its what() becomes error().
  using Forward = std::function<void(const StepBatch& batch, int32_t* tokens)>;
  using BlockRegion = HostMover::BlockRegion;

  // held_up_ns() asks `held_up`, if there is one.
  using HeldUp = std::function<int64_t(int64_t now)>;

  // `needs`: those that `forward` serves. `states`: memory where a state slot takes the place of a block, of which the host
  // tier has `num_host_states`.
  CallbackExecutor(const StepLimits& limits, int32_t max_blocks, int32_t block_size, int steps_in_flight,
                   std::vector<BlockRegion> regions, Needs needs, Forward forward, HeldUp held_up = {}, int32_t num_host_blocks = 0,
                   std::vector<BlockRegion> states = {}, int32_t num_host_states = 0);
  ~CallbackExecutor() override;

  int num_staging() const override { return static_cast<int>(steps_.size()); }
  std::span<std::byte> staging(int i) override { return steps_[static_cast<size_t>(i)].input; }
  StepResults results(int i) const override {
    const Step& step = steps_[static_cast<size_t>(i)];
    return {step.tokens.data(), step.records.data()};
  }
  Needs needs() const override { return needs_; }
  MaskBoard masks() override { return masks_; }
  HostMover* mover() override { return mover_.get(); }
  HostMover* state_mover() override { return state_mover_.get(); }
  HostAttention* host_attention() override { return host_attention_.get(); }
  // Sets the workers that attend for host rows. To be called before the first step.
  void attend_on_host_with(std::shared_ptr<HostAttention> attention) { host_attention_ = std::move(attention); }
  LaunchStatus launch(int i, size_t bytes) override;
  StepStatus poll(int i) override;
  std::string error() const override;
  int64_t held_up_ns(int64_t now) override { return held_up_ ? held_up_(now) : 0; }
  std::chrono::nanoseconds poll_interval() const override { return std::chrono::seconds(1); }
  bool close(std::chrono::nanoseconds limit) override;

 private:
  struct Step {
    std::vector<std::byte> input;
    std::vector<int32_t> tokens, records;
    std::atomic<StepStatus> status{StepStatus::kPending};
  };
  void run();
  void execute(Step& step);
  StepStatus compute(Step& step);
  void keep_error(const char* what) noexcept;

  std::vector<int32_t> board_;
  MaskBoard masks_;
  SlotState slots_;
  std::vector<Step> steps_;
  std::vector<BlockRegion> regions_, states_;
  std::unique_ptr<HostMover> mover_, state_mover_;
  std::shared_ptr<HostAttention> host_attention_;
  Needs needs_;
  Forward forward_;
  HeldUp held_up_;

  mutable std::mutex mutex_;
  std::condition_variable work_, idle_;
  std::deque<int> queue_;
  bool closing_ = false, finished_ = false;
  std::string error_;
  std::thread thread_;
};

}  // namespace asyncengine
