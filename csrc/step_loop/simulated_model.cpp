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
  output_ = allocate_device(cuda, static_cast<size_t>(limits.max_rows) * sizeof(int64_t));
  kv_ = allocate_device(cuda, static_cast<size_t>(num_blocks) * static_cast<size_t>(block_size) * sizeof(int32_t));
}

std::unique_ptr<GraphExecutor> SimulatedModel::make_executor(int steps_in_flight, std::chrono::nanoseconds poll_interval,
                                                             StagingMode mode) {
  const CudaRuntime& cuda = SimulatedDevice::runtime();
  staging_ = std::make_shared<Staging>(cuda, device_.ordinal(), limits_, steps_in_flight, mode);
  const auto inputs = static_cast<size_t>(staging_->mode() == StagingMode::kAhead ? steps_in_flight : 1);
  input_ = allocate_device(cuda, inputs * staging_->input_stride());
  staging_->set_device_buffers({input_.data(), reinterpret_cast<int64_t*>(output_.data())});
  GraphExecutor::Graphs graphs;
  for (const int32_t share : {16, 4, 1}) {
    GraphBucket bucket{std::max(1, limits_.max_rows / share), std::max(1, limits_.max_tokens / share), false, kAnyContext, {}};
    const CudaGraphExec graph =
        device_.add_graph([this] { step(); }, config_.step_latency + config_.token_latency * bucket.max_tokens);
    bucket.variants = {{0, graph}, {config_.needs, graph}};
    graphs.buckets.push_back(bucket);
  }
  graphs.copy_blocks = device_.add_graph([this] { copy_blocks(); }, std::chrono::nanoseconds(0));
  return std::make_unique<GraphExecutor>(cuda, device_.ordinal(), staging_, limits_.max_rows, std::move(graphs), poll_interval);
}

int32_t SimulatedModel::next_token(const SimulatedModelConfig& config, std::span<const int32_t> tokens,
                                   const SamplingState& sampling) {
  uint64_t hash = kEmpty;
  for (const int32_t token : tokens) hash = extend(hash, token);
  return pick(config, hash, sampling);
}

int SimulatedModel::place() const { return static_cast<int>(launch_ % static_cast<size_t>(staging_->num_steps())); }

const std::byte* SimulatedModel::input() const {
  return staging_->mode() == StagingMode::kMapped ? staging_->input(place()).data() : staging_->device_input(place());
}

int64_t* SimulatedModel::output() const {
  return staging_->writes_output() ? staging_->output(place()) : reinterpret_cast<int64_t*>(output_.data());
}

void SimulatedModel::copy_blocks() {
  auto* kv = reinterpret_cast<int32_t*>(kv_.data());
  const auto block_bytes = static_cast<size_t>(block_size_) * sizeof(int32_t);
  for (const BlockCopy& copy : StepInputView(input()).copies()) {
    std::memcpy(kv + int64_t{copy.target} * block_size_, kv + int64_t{copy.source} * block_size_, block_bytes);
  }
}

void SimulatedModel::step() {
  const StepInputView view(input());
  const StepBatch& batch = slots_.ingest(view);
  forward(view, batch);
  std::vector<int32_t> tokens(static_cast<size_t>(batch.num_samples));
  for (size_t s = 0; s < tokens.size(); ++s) {
    tokens[s] = pick(config_, sampled_hash_[s], *batch.sample_state[s]);
    output()[s] = static_cast<int64_t>(view.header().step << 32 | static_cast<uint32_t>(tokens[s]));
  }
  slots_.remember(view, tokens.data());
  ++launch_;
}

void SimulatedModel::forward(const StepInputView& input, const StepBatch& batch) {
  auto* kv = reinterpret_cast<int32_t*>(kv_.data());
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

}  // namespace asyncengine
