// A step loop over the simulated device, and requests whose right answers are known.
#pragma once

#include <poll.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "step_loop/simulated_model.h"
#include "step_loop/step_loop.h"

namespace asyncengine::testing {

using namespace std::chrono_literals;

struct Options {
  int32_t num_blocks = 64, block_size = 16, max_num_seqs = 8, max_num_batched_tokens = 64, prefill_chunk_size = 0,
          max_model_len = 256, steps_in_flight = 2, vocab_size = 50;
  bool prefix_caching = true, late_launch = true;
  std::chrono::nanoseconds step_timeout = 10s, latency = 0ns;
  int64_t max_queued_requests = 1 << 20;
  StagingMode staging = StagingMode::kAhead;
  int32_t max_samples = 0, max_update_words = 0, max_result_words = 0;
  int32_t num_host_blocks = 0;
  int32_t num_state_slots = 0;  // of a model that lives of its state alone, with snapshots at every block
  int32_t num_host_states = 0;
  int ranks = 1;
  std::chrono::nanoseconds latency_of_others = 0ns;  // of the ranks but the first
  HybridConfig hybrid = {};
  std::function<void(const HostAttentionJob&)> before_attending = {};
  int64_t (*clock)() = &steady_now_ns;
  std::string disk_path = {};
  const FileOperations* files = &system_files();

  StepLoopConfig loop() const {
    StepLoopConfig c;
    c.scheduler = {num_blocks,     block_size, max_num_seqs, max_num_batched_tokens, prefill_chunk_size, max_model_len,
                   prefix_caching, {},         max_samples,  max_update_words,       max_result_words,   0,
                   num_host_blocks};
    c.scheduler.hybrid = hybrid;
    c.scheduler.num_state_slots = num_state_slots;
    c.scheduler.num_host_states = num_host_states;
    c.scheduler.state_snapshot_tokens = c.scheduler.answer_snapshot_tokens = block_size;
    c.clock = clock;
    c.steps_in_flight = steps_in_flight;
    c.step_timeout_s = step_timeout;
    c.late_launch = late_launch;
    c.max_queued_requests = max_queued_requests;
    c.disk_path = disk_path;
    c.disk_bytes = 1 << 24;
    c.fingerprint = "simulated";
    c.files = files;
    return c;
  }
};

struct Result {
  std::vector<int32_t> tokens;
  FinishReason finish = FinishReason::kNone;
  std::vector<std::vector<int32_t>> records = {};  // of scored prompt tokens, then of the tokens
  bool operator==(const Result&) const = default;
};

class Engine {
 public:
  ~Engine() { loop.reset(); }  // first: copies of blocks may be under way, in memory of the model's
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  explicit Engine(const Options& options) : options_(options) {
    model_config_.vocab_size = options.vocab_size;
    model_config_.step_latency = options.latency;
    model_config_.needs = 0xFF;
    model_config_.before_attending = options.before_attending;
    model_config_.num_state_slots = options.num_state_slots;
    model_config_.num_host_states = options.num_host_states;
    const auto config = options.loop();
    model_ = std::make_unique<SimulatedModel>(device, model_config_, StepLoop::limits(config), options.num_blocks,
                                              options.block_size, options.max_model_len / options.block_size + 1);
    std::vector<SimulatedModel*> others;
    SimulatedModelConfig other = model_config_;
    other.step_latency = options.latency_of_others;
    for (int rank = 1; rank < options.ranks; ++rank) {
      devices.push_back(std::make_unique<SimulatedDevice>());
      models_.push_back(std::make_unique<SimulatedModel>(*devices.back(), other, StepLoop::limits(config), options.num_blocks,
                                                         options.block_size, options.max_model_len / options.block_size + 1));
      others.push_back(models_.back().get());
    }
    loop = std::make_unique<StepLoop>(
        config, model_->make_executor(options.steps_in_flight, 20us, options.staging, options.num_host_blocks, others));
    loop->start();
  }

  SubmitResult submit(RequestSpec spec) {
    spec.id = next_id_++;
    const SubmitResult result = loop->submit(spec);
    if (result == SubmitResult::kAccepted) {
      for (int32_t i = 0; i < spec.n; ++i) open_.insert({spec.id, i});
      specs_[spec.id] = std::move(spec);
    }
    return result;
  }
  uint64_t last_id() const { return next_id_ - 1; }
  size_t open() const { return open_.size(); }  // sequences that are still expected to end
  void abort(uint64_t id) {
    for (int32_t i = 0; i < specs_[id].n; ++i) open_.erase({id, i});
    loop->abort(id);
  }

  // Handles deliveries until nothing is expected any more (true) or the engine has failed (false).
  bool run() {
    while (!open_.empty()) {
      if (!receive(1s)) return false;
    }
    return true;
  }
  bool receive(std::chrono::milliseconds limit) {
    pollfd fd{loop->wake_fd(), POLLIN, 0};
    ::poll(&fd, 1, static_cast<int>(limit.count()));
    return loop->drain([this](const StepLoop::News& news) {
      const std::pair key{news.sequence->request->id, news.sequence->index};
      if (!open_.contains(key)) return;  // aborted: what still arrives is of no interest
      Result& result = results[key];
      for (const auto& record : news.records) {
        CHECK_EQ(record.kind, uint32_t{kLogprobs});
        // Records in order: those without a token are of the prompt.
        CHECK_EQ(record.token < 0, result.records.size() < scored(specs_[key.first], key.second));
        const auto payload = news.payload(record);
        result.records.emplace_back(payload.begin(), payload.end());
      }
      result.tokens.insert(result.tokens.end(), news.tokens.begin(), news.tokens.end());
      if (news.finish != FinishReason::kNone) {
        result.finish = news.finish;
        open_.erase(key);
      }
    });
  }
  // Every block, slot, lease and request is back.
  bool settles() {
    for (int i = 0; i < 500; ++i) {
      receive(10ms);
      const Stats s = loop->stats();
      if (loop->quiescent() && s.num_steps_in_flight == 0 && s.live_requests == 0 && s.num_free_blocks == options_.num_blocks &&
          s.num_free_slots == options_.max_num_seqs && s.queued_requests == 0 && s.queued_tokens == 0) {
        return true;
      }
    }
    return false;
  }

  Result expected(const RequestSpec& spec, int32_t index) const {
    std::vector<int32_t> tokens = spec.prompt;
    SamplingState sampling = spec.sampling;
    sampling.seed += static_cast<uint64_t>(index);
    Result result;
    const auto room = static_cast<size_t>(std::max(0, spec.extras.result_words - 1));
    const auto record = [&](size_t length) {
      if (spec.extras.result_words > 0) result.records.push_back(SimulatedModel::record(std::span(tokens).first(length), room));
    };
    for (size_t i = 0; i < scored(spec, index); ++i) record(static_cast<size_t>(spec.extras.score_from) + i + 1);
    while (result.finish == FinishReason::kNone) {
      record(tokens.size());
      const int32_t token = SimulatedModel::next_token(model_config_, tokens, sampling);
      tokens.push_back(token);
      result.tokens.push_back(token);
      if (std::find(spec.stop_tokens.begin(), spec.stop_tokens.end(), token) != spec.stop_tokens.end()) {
        result.finish = FinishReason::kStop;
      } else if (static_cast<int32_t>(result.tokens.size()) == spec.max_tokens) {
        result.finish = FinishReason::kLength;
      }
    }
    return result;
  }
  // Results that differ from the reference.
  int mismatches() const {
    int wrong = 0;
    for (const auto& [key, result] : results) {
      wrong += result.finish != FinishReason::kNone && !(result == expected(specs_.at(key.first), key.second));
    }
    return wrong;
  }

  // Prompt tokens that have records of their own.
  static size_t scored(const RequestSpec& spec, int32_t index) {
    return index > 0 || spec.extras.score_from < 0 ? 0 : spec.prompt.size() - 1 - static_cast<size_t>(spec.extras.score_from);
  }
  const SimulatedModel& model() const { return *model_; }

  SimulatedDevice device;
  std::vector<std::unique_ptr<SimulatedDevice>> devices;  // of the ranks but the first
  std::unique_ptr<StepLoop> loop;
  std::map<std::pair<uint64_t, int32_t>, Result> results;

 private:
  Options options_;
  SimulatedModelConfig model_config_;
  std::unique_ptr<SimulatedModel> model_;
  std::vector<std::unique_ptr<SimulatedModel>> models_;  // of those ranks
  std::map<uint64_t, RequestSpec> specs_;
  std::set<std::pair<uint64_t, int32_t>> open_;
  uint64_t next_id_ = 1;
};

inline RequestSpec random_spec(std::mt19937& rng, const Options& options, int32_t longest_prompt, int32_t longest_output) {
  const auto pick = [&](int32_t low, int32_t high) { return std::uniform_int_distribution<int32_t>(low, high)(rng); };
  RequestSpec spec;
  const int32_t family = pick(0, 3);  // few families of prompts, so that prefixes are shared
  for (int32_t i = 0, n = pick(1, longest_prompt); i < n; ++i) spec.prompt.push_back((family * 7 + i * 3) % options.vocab_size);
  if (pick(0, 1)) spec.prompt.back() = pick(0, options.vocab_size - 1);
  spec.max_tokens = pick(1, longest_output);
  spec.n = pick(0, 4) == 0 ? pick(2, 4) : 1;
  spec.priority = pick(-2, 2);
  spec.salt = static_cast<uint64_t>(pick(0, 1));
  spec.sampling.temperature = pick(0, 1) ? 0.f : 1.f;
  spec.sampling.seed = static_cast<uint64_t>(pick(0, 1 << 30));
  if (pick(0, 1)) spec.stop_tokens = {pick(0, options.vocab_size - 1), pick(0, options.vocab_size - 1)};
  return spec;
}

// Submits random requests to a loop that runs, and checks that each of their sequences gets the tokens of the model.
inline void check_random_requests(StepLoop& loop, const SimulatedModelConfig& model, const Options& options, std::mt19937& rng,
                                  uint64_t count, int32_t longest_prompt, int32_t longest_output) {
  std::map<uint64_t, RequestSpec> specs;
  std::map<std::pair<uint64_t, int32_t>, std::vector<int32_t>> results;
  size_t ends = 0, expected_ends = 0;
  for (uint64_t id = 1; id <= count; ++id) {
    RequestSpec spec = random_spec(rng, options, longest_prompt, longest_output);
    spec.id = id;
    spec.stop_tokens.clear();
    expected_ends += static_cast<size_t>(spec.n);
    specs[id] = spec;
    CHECK(loop.submit(spec) == SubmitResult::kAccepted);
  }
  for (int i = 0; i < 3000 && ends < expected_ends; ++i) {
    pollfd fd{loop.wake_fd(), POLLIN, 0};
    ::poll(&fd, 1, 10);
    loop.drain([&](const StepLoop::News& news) {
      auto& tokens = results[{news.sequence->request->id, news.sequence->index}];
      tokens.insert(tokens.end(), news.tokens.begin(), news.tokens.end());
      ends += news.finish == FinishReason::kLength;
    });
  }
  CHECK_EQ(ends, expected_ends);
  for (const auto& [key, tokens] : results) {
    const RequestSpec& spec = specs.at(key.first);
    SamplingState sampling = spec.sampling;
    sampling.seed += static_cast<uint64_t>(key.second);
    std::vector<int32_t> all = spec.prompt;
    for (const int32_t token : tokens) {
      CHECK_EQ(token, SimulatedModel::next_token(model, all, sampling));
      all.push_back(token);
    }
    CHECK_EQ(tokens.size(), static_cast<size_t>(spec.max_tokens));
  }
}

}  // namespace asyncengine::testing
