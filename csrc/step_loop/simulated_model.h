// A language model for the simulated device whose next token is a hash of all tokens before it, read through the KV cache.
// If a step may append several tokens, the model drafts them for itself, right ones and wrong ones, and verifies them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "platform/cuda/pinned_memory.h"
#include "platform/cuda/simulated_device.h"
#include "step_loop/graph_executor.h"
#include "step_loop/simulated_attention.h"
#include "step_loop/slot_state.h"

namespace asyncengine {

struct SimulatedModelConfig {
  int32_t vocab_size = 1000;
  int32_t first_token = 0;  // generated tokens are in [first_token, vocab_size)
  std::chrono::nanoseconds step_latency{0};
  std::chrono::nanoseconds token_latency{0};  // added per token of the bucket
  // Read every token of the context back from the KV cache, at every step. A block that was reused too early, a missing
  // copy or a wrong block-table delta then changes the output. Off: O(1) per decode row, for benchmarks.
  bool read_kv = true;
  // Layers keep a state, with so many state slots: the hash of the tokens so far, which is read in place of the KV cache. 0: none
  // does. A wrong copy of a state, or one that is missing or late, then changes the output.
  int32_t num_state_slots = 0;
  int32_t num_host_states = 0;  // of a host tier
  // Needs that the model's graphs serve: argmax has a graph of its own, and all of these together another.
  Needs needs = kSamplingNeeds;
  // Workers for host rows, where the limits have lanes: see SimulatedAttention.
  int host_workers = 2;
  std::function<void(const HostAttentionJob&)> before_attending = {};
};

// Place where the ranks of a simulated model wait for each other at the end of each step, and compare what they sampled.
class SimulatedMeeting {
 public:
  SimulatedMeeting(int ranks, const int32_t* released) : digests_(static_cast<size_t>(ranks)), released_(released) {}
  // True once all ranks have come to that step, with the same digest. False: they differ, or nobody is to wait any more.
  bool meet(int rank, uint64_t step, uint64_t digest);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::map<uint64_t, uint64_t>> digests_;  // of each rank, by step
  const int32_t* released_;
};

class SimulatedModel {
 public:
  SimulatedModel(SimulatedDevice& device, const SimulatedModelConfig& config, const StepLimits& limits, int32_t num_blocks,
                 int32_t block_size, int32_t max_blocks);

  // Buckets of 1/16, 1/4 and all of the limits. With others, models like this one on devices of their own, each step runs
  // on all of them, and is over when all have sampled the same.
  std::unique_ptr<GraphExecutor> make_executor(int steps_in_flight, std::chrono::nanoseconds poll_interval,
                                               StagingMode mode = StagingMode::kAhead, int32_t num_host_blocks = 0,
                                               std::span<SimulatedModel* const> others = {});

  // The token that the model gives after these tokens: the reference for tests.
  static int32_t next_token(const SimulatedModelConfig& config, std::span<const int32_t> tokens, const SamplingState& sampling);
  // The payload of the record that it gives of a sample after these tokens, of as many words as a hash says, or of as many
  // as there is room for.
  static std::vector<int32_t> record(std::span<const int32_t> tokens, size_t room);
  // Entries that the slots were filled with, in order. To be looked at when nothing runs.
  const std::vector<std::vector<int32_t>>& entries() const { return entries_; }

 private:
  StepDevice::Graphs make_graphs(std::shared_ptr<Staging> staging);
  int place() const;  // of the running step in the rings
  const std::byte* input() const;
  int64_t* output() const;
  void copy_blocks();
  uint64_t& hash_of(int32_t state) { return reinterpret_cast<uint64_t*>(states_.data())[state]; }
  std::unique_ptr<GraphMover> make_mover(int32_t num_host_blocks);
  void gather(const HostPool& pool, int transfer);
  void step();
  void forward(const StepInputView& input, const StepBatch& batch);
  void pass_host_rows(const StepInputView& input, const StepBatch& batch);
  void sample(const StepInputRow& row, const StepBatch& batch, uint64_t step);
  void propose(const StepInputRow& row, const SamplingState& sampling);

  SimulatedDevice& device_;
  SimulatedModelConfig config_;
  StepLimits limits_;
  int32_t block_size_;
  DeviceBuffer input_, output_, gathered_, kv_;  // kv_: the token id at every position of every block
  DeviceBuffer states_;  // the hash of each state slot, or of each slot where there are none
  std::shared_ptr<Staging> staging_;
  size_t launch_ = 1;  // steps count from 1
  SlotState slots_;
  std::vector<uint64_t> sampled_hash_;  // of the tokens up to each sample
  std::vector<int32_t> tokens_;
  std::vector<std::vector<int32_t>> entries_;
  // State that a host row leaves on the device, by slot.
  struct SavedRow {
    int32_t stage = -1, position = -1, token = -1;
    uint64_t hash = 0;
  };
  std::vector<SavedRow> saved_;
  std::shared_ptr<SimulatedAttention> attention_;
  std::shared_ptr<SimulatedMeeting> meeting_;  // of several ranks
  int rank_ = 0;
};

}  // namespace asyncengine
