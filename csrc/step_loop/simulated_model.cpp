#include "step_loop/simulated_model.h"

#include <algorithm>
#include <cstring>

namespace asyncengine {
namespace {

constexpr uint64_t kEmpty = 0x243F6A8885A308D3;

// splitmix64's finaliser.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

uint64_t extend(uint64_t hash, int64_t token) { return mix(hash + 0x9E3779B97F4A7C15 * (static_cast<uint64_t>(token) + 1)); }

int32_t pick(const SimulatedModelConfig& config, uint64_t hash, const SamplingState& sampling) {
  if (sampling.temperature > 0) hash = mix(hash ^ mix(sampling.seed + 1));
  const auto range = static_cast<uint64_t>(config.vocab_size - config.first_token);
  return config.first_token + static_cast<int32_t>(hash % range);
}

}  // namespace

SimulatedModel::SimulatedModel(SimulatedDevice& device, const SimulatedModelConfig& config, const StepLimits& limits,
                               int32_t num_blocks, int32_t block_size, int32_t max_blocks)
    : device_(device),
      config_(config),
      limits_(limits),
      block_size_(block_size),
      slots_(limits, max_blocks, block_size),
      slot_hash_(static_cast<size_t>(limits.max_rows)),
      sampled_hash_(static_cast<size_t>(limits.max_rows)) {
  const CudaRuntime& cuda = SimulatedDevice::runtime();
  check_cuda(cuda, cuda.set_device(device.ordinal()), "cudaSetDevice");
  input_ = allocate_device(cuda, limits.max_bytes());
  tokens_ = allocate_device(cuda, static_cast<size_t>(limits.max_rows) * sizeof(int32_t));
  kv_ = allocate_device(cuda, static_cast<size_t>(num_blocks) * static_cast<size_t>(block_size) * sizeof(int32_t));
}

std::unique_ptr<GraphExecutor> SimulatedModel::make_executor(int steps_in_flight, std::chrono::nanoseconds poll_interval) {
  std::vector<GraphBucket> buckets;
  for (const int32_t share : {16, 4, 1}) {
    GraphBucket bucket{std::max(1, limits_.max_rows / share), std::max(1, limits_.max_tokens / share), nullptr, nullptr};
    bucket.forward = device_.add_graph([this] { forward(); }, config_.step_latency + config_.token_latency * bucket.max_tokens);
    bucket.sample = device_.add_graph([this] { sample(); }, std::chrono::nanoseconds(0));
    buckets.push_back(bucket);
  }
  return std::make_unique<GraphExecutor>(SimulatedDevice::runtime(), device_.ordinal(), limits_, steps_in_flight, buckets,
                                         input_.data(), reinterpret_cast<int32_t*>(tokens_.data()), poll_interval);
}

int32_t SimulatedModel::next_token(const SimulatedModelConfig& config, std::span<const int32_t> tokens,
                                   const SamplingState& sampling) {
  uint64_t hash = kEmpty;
  for (const int32_t token : tokens) hash = extend(hash, token);
  return pick(config, hash, sampling);
}

void SimulatedModel::forward() {
  const StepInputView input(input_.data());
  auto* kv = reinterpret_cast<int32_t*>(kv_.data());
  const auto block_bytes = static_cast<size_t>(block_size_) * sizeof(int32_t);
  for (const BlockCopy& copy : input.copies()) {
    std::memcpy(kv + int64_t{copy.target} * block_size_, kv + int64_t{copy.source} * block_size_, block_bytes);
  }
  const StepBatch& batch = slots_.ingest(input);
  batch_ = &batch;
  for (int32_t i = 0; i < batch.num_tokens; ++i) {
    kv[batch.slot_mapping[static_cast<size_t>(i)]] = static_cast<int32_t>(batch.input_ids[static_cast<size_t>(i)]);
  }
  for (size_t r = 0; r < input.rows().size(); ++r) {
    const StepInputRow& row = input.rows()[r];
    uint64_t& hash = slot_hash_[static_cast<size_t>(row.slot)];
    const bool from_start = config_.read_kv || !(row.flags & kRowFromDevice);
    if (from_start) hash = kEmpty;
    for (int32_t p = from_start ? 0 : row.context_len; p < row.context_len + row.query_len; ++p) {
      hash = extend(hash, kv[int64_t{batch.block_tables[r][p / block_size_]} * block_size_ + p % block_size_]);
    }
    if (row.sample_row >= 0) sampled_hash_[static_cast<size_t>(row.sample_row)] = hash;
  }
}

void SimulatedModel::sample() {
  const StepInputView input(input_.data());
  auto* tokens = reinterpret_cast<int32_t*>(tokens_.data());
  for (size_t s = 0; s < static_cast<size_t>(batch_->num_samples); ++s) {
    tokens[s] = pick(config_, sampled_hash_[s], *batch_->sample_state[s]);
  }
  slots_.remember(input, tokens);
}

}  // namespace asyncengine
