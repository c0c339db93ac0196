#include "step_loop/simulated_model.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace asyncengine {
namespace {

constexpr uint64_t kEmpty = TokenHash::kEmpty;
constexpr auto mix = TokenHash::mix;
constexpr auto extend = TokenHash::extend;

size_t record_length(uint64_t hash, size_t room) { return std::min<size_t>(hash >> 8 & 3, room); }
int32_t record_word(uint64_t hash, size_t i) { return static_cast<int32_t>(static_cast<uint32_t>(mix(hash + i))); }

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
      sampled_hash_(static_cast<size_t>(limits.samples())),
      tokens_(static_cast<size_t>(limits.samples())),
      saved_(limits.host_rows.max_lanes > 0 ? static_cast<size_t>(limits.max_rows) : 0) {
  states_ = allocate_device(device.cuda(),
                            static_cast<size_t>(std::max(limits.max_rows, config.num_state_slots)) * sizeof(uint64_t));
  std::ranges::fill(states_.bytes(), std::byte{0});
  output_ = allocate_device(device.cuda(), limits.output_words() * sizeof(int64_t));
  kv_ = allocate_device(device_.cuda(), static_cast<size_t>(num_blocks) * static_cast<size_t>(block_size) * sizeof(int32_t));
}

bool SimulatedMeeting::meet(int rank, uint64_t step, uint64_t digest) {
  std::unique_lock lock(mutex_);
  digests_[static_cast<size_t>(rank)].emplace(step, digest);
  changed_.notify_all();
  const auto here = [step](const auto& of_rank) { return of_rank.contains(step); };
  while (!std::ranges::all_of(digests_, here)) {
    if (std::atomic_ref(*const_cast<int32_t*>(released_)).load(std::memory_order_acquire) != 0) return false;
    changed_.wait_for(lock, std::chrono::milliseconds(1));
  }
  const bool alike = std::ranges::all_of(digests_, [&](const auto& of_rank) { return of_rank.at(step) == digest; });
  // Nobody asks for a step again that all have left behind.
  for (auto& of_rank : digests_) of_rank.erase(of_rank.begin(), of_rank.lower_bound(step - std::min<uint64_t>(step, 2)));
  return alike;
}

StepDevice::Graphs SimulatedModel::make_graphs(std::shared_ptr<Staging> staging) {
  staging_ = std::move(staging);
  const auto inputs = static_cast<size_t>(staging_->mode() == StagingMode::kAhead ? staging_->num_steps() : 1);
  input_ = allocate_device(device_.cuda(), inputs * staging_->input_stride());
  staging_->set_device_buffers({input_.data(), reinterpret_cast<int64_t*>(output_.data())});
  StepDevice::Graphs graphs;
  for (int32_t lanes = 0; lanes <= limits_.host_rows.max_lanes; lanes += std::max(1, limits_.host_rows.max_lanes)) {
    for (const int32_t share : {16, 4, 1}) {
      GraphBucket bucket{
          std::max(1, limits_.max_rows / share), std::max(1, limits_.max_tokens / share), false, kAnyContext, {}, lanes};
      const CudaGraphExec graph = device_.add_graph([this] { step(); },
                                                    config_.step_latency + config_.token_latency * bucket.max_tokens);
      bucket.variants = {{0, graph}, {config_.needs, graph}};
      graphs.buckets.push_back(bucket);
    }
  }
  graphs.copy_blocks = device_.add_graph([this] { copy_blocks(); }, std::chrono::nanoseconds(0));
  return graphs;
}

std::unique_ptr<GraphExecutor> SimulatedModel::make_executor(int steps_in_flight, std::chrono::nanoseconds poll_interval,
                                                             StagingMode mode, int32_t num_host_blocks,
                                                             std::span<SimulatedModel* const> others) {
  GraphExecutor::Graphs graphs;
  static_cast<StepDevice::Graphs&>(graphs) = make_graphs(std::make_shared<Staging>(device_.cuda(), limits_, steps_in_flight, mode));
  if (!others.empty()) {
    meeting_ = std::make_shared<SimulatedMeeting>(1 + static_cast<int>(others.size()), staging_->released());
  }
  for (SimulatedModel* other : others) {
    auto staging = std::make_shared<Staging>(staging_);
    other->meeting_ = meeting_;
    other->rank_ = 1 + static_cast<int>(graphs.others.size());
    graphs.others.push_back({other->device_.cuda(), staging, other->make_graphs(staging)});
  }
  if (num_host_blocks > 0) graphs.mover = make_mover(num_host_blocks);
  if (config_.num_host_states > 0) {
    const std::vector<HostStates::Layer> layers{{states_.data(), sizeof(uint64_t)}};
    graphs.state_mover = std::make_shared<StateMover>(
        device_.cuda(), std::make_shared<HostStates>(device_.cuda(), layers, config_.num_host_states));
  }
  auto executor = std::make_unique<GraphExecutor>(device_.cuda(), staging_, std::move(graphs), poll_interval);
  if (attention_ != nullptr) executor->attend_on_host_with(attention_);
  return executor;
}

std::unique_ptr<GraphMover> SimulatedModel::make_mover(int32_t num_host_blocks) {
  constexpr int32_t kMoves = 4;
  const auto bytes = static_cast<size_t>(block_size_) * sizeof(int32_t);
  auto pool = std::make_shared<HostPool>(device_.cuda(), bytes, num_host_blocks, kMoves);
  gathered_ = allocate_device(device_.cuda(), BlockMover::kTransfers * kMoves * bytes);
  pool->set_gathered(gathered_.data());
  if (limits_.host_rows.max_lanes > 0) {
    const SimulatedAttention::Config attention{limits_.host_rows.num_stages - 1, limits_.max_rows, block_size_,
                                               config_.host_workers, config_.before_attending};
    attention_ = std::make_shared<SimulatedAttention>(attention, pool);
  }
  GraphMover::Graphs graphs;
  for (int i = 0; i < BlockMover::kTransfers; ++i) {
    graphs[static_cast<size_t>(i)] = device_.add_graph([this, pool, i] { gather(*pool, i); }, std::chrono::nanoseconds(0));
  }
  return std::make_unique<GraphMover>(device_.cuda(), std::move(pool), graphs);
}

// Or scatter, of a transfer that brings in.
void SimulatedModel::gather(const HostPool& pool, int transfer) {
  const int32_t* list = pool.list(transfer);
  for (int32_t i = 0; i < list[0]; ++i) {
    std::byte* block = kv_.data() + static_cast<size_t>(list[1 + i]) * pool.block_bytes();
    std::byte* gathered = pool.gathered(transfer) + static_cast<size_t>(i) * pool.block_bytes();
    const bool in = BlockMover::brings_in(transfer);
    std::memcpy(in ? block : gathered, in ? gathered : block, pool.block_bytes());
  }
}

int32_t SimulatedModel::next_token(const SimulatedModelConfig& config, std::span<const int32_t> tokens,
                                   const SamplingState& sampling) {
  uint64_t hash = kEmpty;
  for (const int32_t token : tokens) hash = extend(hash, token);
  return pick(config, hash, sampling);
}

std::vector<int32_t> SimulatedModel::record(std::span<const int32_t> tokens, size_t room) {
  uint64_t hash = kEmpty;
  for (const int32_t token : tokens) hash = extend(hash, token);
  std::vector<int32_t> payload(record_length(hash, room));
  for (size_t i = 0; i < payload.size(); ++i) payload[i] = record_word(hash, i);
  return payload;
}

int SimulatedModel::place() const { return static_cast<int>(launch_ % static_cast<size_t>(staging_->num_steps())); }

const std::byte* SimulatedModel::input() const {
  return staging_->mode() == StagingMode::kMapped ? staging_->input(place()).data() : staging_->device_input(place());
}

int64_t* SimulatedModel::output() const {
  return staging_->writes_output() && !staging_->follows() ? staging_->output(place()) : reinterpret_cast<int64_t*>(output_.data());
}

void SimulatedModel::copy_blocks() {
  auto* kv = reinterpret_cast<int32_t*>(kv_.data());
  const auto block_bytes = static_cast<size_t>(block_size_) * sizeof(int32_t);
  for (const BlockCopy& copy : StepInputView(input()).copies()) {
    std::memcpy(kv + int64_t{copy.target} * block_size_, kv + int64_t{copy.source} * block_size_, block_bytes);
  }
  for (const BlockCopy& copy : StepInputView(input()).state_copies()) {
    if (copy.source < 0) continue;
    hash_of(copy.target) = hash_of(copy.source);
  }
}

void SimulatedModel::step() {
  const StepInputView view(input());
  const StepBatch& batch = slots_.ingest(view);
  for (const SlotEntries& e : batch.entries) entries_.emplace_back(e.words.begin(), e.words.end());
  forward(view, batch);
  pass_host_rows(view, batch);
  for (const StepInputRow& row : view.rows()) sample(row, batch, view.header().step);
  if (meeting_ != nullptr) {
    uint64_t digest = kEmpty;
    for (int32_t i = 0; i < view.header().num_samples; ++i) digest = extend(digest, tokens_[static_cast<size_t>(i)]);
    if (!meeting_->meet(rank_, view.header().step, digest)) device_.fault();
  }
  slots_.remember(view, tokens_.data());
  for (const StepInputRow& row : view.rows()) {
    if (row.num_appends > 0) propose(row, *batch.samples[static_cast<size_t>(row.sample_row)].state);
  }
  ++launch_;
}

// Heads and records of a row. A draft is right if it is what was sampled before it; behind a wrong one nothing counts.
void SimulatedModel::sample(const StepInputRow& row, const StepBatch& batch, uint64_t step) {
  const auto put = [&](size_t place, int32_t payload) {
    output()[place] = static_cast<int64_t>(step << 32 | static_cast<uint32_t>(payload));
  };
  const int32_t first = row.num_samples - row.num_appends;
  bool accepted = true;
  for (int32_t i = 0; i < row.num_samples; ++i) {
    const auto s = static_cast<size_t>(row.sample_row + i);
    if (i > first) accepted = accepted && batch.input_ids[static_cast<size_t>(batch.sample_index[s])] == tokens_[s - 1];
    tokens_[s] = accepted ? pick(config_, sampled_hash_[s], *batch.samples[s].state) : kNoToken;
    if (i >= first) put(s, tokens_[s]);
    if (!accepted || row.result_words == 0) continue;
    const size_t place = static_cast<size_t>(limits_.samples() + row.result_offset + i * row.result_words);
    const auto room = static_cast<size_t>(row.result_words);
    const size_t length = record_length(sampled_hash_[s], room - 1);
    put(place, entry_header(kLogprobs, length));
    for (size_t k = 0; k < length; ++k) put(place + 1 + k, record_word(sampled_hash_[s], k));
    if (1 + length < room) put(place + 1 + length, kEndOfRecords);
  }
}

// Proposes drafts for the next row. A pseudo-random number of them is right.
void SimulatedModel::propose(const StepInputRow& row, const SamplingState& sampling) {
  const auto drafts = slots_.drafts(row.slot);
  size_t last = static_cast<size_t>(row.sample_row + row.num_samples) - 1;
  while (tokens_[last] < 0) --last;  // the first head is a token
  uint64_t hash = extend(sampled_hash_[last], tokens_[last]);
  const size_t right = drafts.empty() ? 0 : mix(hash) % (drafts.size() + 1);
  for (size_t i = 0; i < drafts.size(); ++i) {
    const int32_t next = pick(config_, hash, sampling);
    drafts[i] = i < right ? next : (next + 1) % config_.vocab_size;
    hash = extend(hash, next);
  }
}

void SimulatedModel::forward(const StepInputView& input, const StepBatch& batch) {
  auto* kv = reinterpret_cast<int32_t*>(kv_.data());
  for (int32_t i = 0; i < batch.num_tokens; ++i) {
    const int64_t place = batch.slot_mapping[static_cast<size_t>(i)];
    if (place >= 0) kv[place] = static_cast<int32_t>(batch.input_ids[static_cast<size_t>(i)]);
  }
  for (size_t r = 0; r < static_cast<size_t>(batch.num_rows); ++r) {
    const StepInputRow& row = input.rows()[r];
    uint64_t& hash = hash_of(row.slot);
    const int32_t context = batch.context_len[r], end = context + row.query_len;
    const bool reads_kv = config_.read_kv || !(row.flags & kRowFromDevice) || (row.flags & kRowDeviceLength);
    const bool from_start = config_.num_state_slots > 0 ? context == 0 : reads_kv;
    if (from_start) hash = kEmpty;
    for (int32_t p = from_start ? 0 : context; p < end; ++p) {
      hash = extend(hash, kv[int64_t{batch.block_tables[r][p / block_size_]} * block_size_ + p % block_size_]);
      if (p >= end - row.num_samples) sampled_hash_[static_cast<size_t>(row.sample_row + row.num_samples - (end - p))] = hash;
    }
  }
}

// A row that enters brings the hash of its tokens from its worker, which must be the same at each stage. Else its token is
// garbage.
void SimulatedModel::pass_host_rows(const StepInputView& input, const StepBatch& batch) {
  for (size_t i = 0; i < batch.host_rows.size(); ++i) {
    const HostRowEntry& entry = batch.host_rows[i];
    if (entry.slot < 0) continue;
    const auto lanes = static_cast<size_t>(batch.num_host_tokens);
    const auto stage = static_cast<int32_t>(i / lanes);
    SavedRow& saved = saved_[static_cast<size_t>(entry.slot)];
    if (stage == 0) {
      const auto token = static_cast<size_t>(batch.num_tokens) - lanes + i;
      saved = {stage, entry.position, static_cast<int32_t>(batch.input_ids[token]), 0};
    } else {
      const uint64_t hash = attention_->enter(entry.slot, stage - 1);
      const bool right = saved.stage == stage - 1 && saved.position == entry.position && (stage == 1 || saved.hash == hash);
      saved.stage = stage;
      saved.hash = right ? hash : mix(hash + 1);
    }
    if (stage + 1 < limits_.host_rows.num_stages) attention_->leave(entry.slot, batch.step, saved.token);
  }
  for (const StepInputRow& row : input.rows().last(static_cast<size_t>(input.header().host_rows.num_rows))) {
    sampled_hash_[static_cast<size_t>(row.sample_row)] = saved_[static_cast<size_t>(row.slot)].hash;
  }
}

}  // namespace asyncengine
