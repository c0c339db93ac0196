// Python's view of core/: costs and settings, the block manager and the scheduler's harness.
#include "bindings/bindings.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/harness.h"
#include "core/scheduler.h"
#include "step_loop/step_loop.h"

namespace asyncengine {
namespace {

SchedulerConfig make_scheduler_config(int32_t num_blocks, int32_t block_size, int32_t max_num_seqs, int32_t max_num_batched_tokens,
                                      int32_t prefill_chunk_size, int32_t max_model_len, bool prefix_caching,
                                      std::vector<int32_t> token_buckets, int32_t max_samples, int32_t max_update_words,
                                      int32_t max_result_words, int32_t mask_words, int32_t num_host_blocks, const StepCosts& costs,
                                      int64_t target_itl_ns, std::vector<std::pair<int32_t, int64_t>> target_itl_ns_by_priority,
                                      int32_t paced_chunk_size, const HybridConfig& hybrid) {
  require(num_blocks >= 1 && max_num_seqs >= 1 && max_model_len >= 1 && prefill_chunk_size >= 0, "counts must be positive");
  require(block_size >= 16 && block_size % 16 == 0, "block_size must be a multiple of 16");
  require(max_num_batched_tokens >= max_num_seqs, "max_num_batched_tokens must be at least max_num_seqs");
  require(std::ranges::is_sorted(token_buckets), "token_buckets must ascend");
  require(max_samples >= 0 && max_update_words >= 0 && max_result_words >= 0 && mask_words >= 0, "budgets must not be negative");
  require(num_host_blocks >= 0 && (num_host_blocks == 0 || prefix_caching), "a host tier needs prefix_caching");
  require(!hybrid.any() || (num_host_blocks > 0 && hybrid.layers >= 1), "host rows need a host tier and layers");
  require(max_num_batched_tokens >= max_num_seqs + hybrid.lanes,
          "max_num_batched_tokens must leave room for lanes beside max_num_seqs");
  require(target_itl_ns >= 0 && paced_chunk_size >= 0, "targets and chunks must not be negative");
  require(std::ranges::all_of(target_itl_ns_by_priority, [](const auto& target) { return target.second > 0; }),
          "targets must be positive");
  return {num_blocks,
          block_size,
          max_num_seqs,
          max_num_batched_tokens,
          prefill_chunk_size,
          max_model_len,
          prefix_caching,
          std::move(token_buckets),
          max_samples,
          max_update_words,
          max_result_words,
          mask_words,
          num_host_blocks,
          costs,
          {target_itl_ns, std::move(target_itl_ns_by_priority)},
          paced_chunk_size,
          hybrid};
}

using CostPoint = std::tuple<int32_t, double, double>;

std::vector<StepCosts::Point> to_points(const std::vector<CostPoint>& tuples) {
  std::vector<StepCosts::Point> points;
  for (const auto& [tokens, base_ns, context_ns] : tuples) {
    require(tokens > (points.empty() ? 0 : points.back().tokens), "tokens of points must ascend");
    require(base_ns >= 0 && context_ns >= 0, "times must not be negative");
    points.push_back({tokens, base_ns, context_ns});
  }
  return points;
}

StepCosts make_step_costs(const std::vector<CostPoint>& decode, const std::vector<CostPoint>& prompt,
                          std::pair<double, double> to_device, std::pair<double, double> to_host,
                          std::tuple<double, double, double, double> factors) {
  const auto [of_decode, of_rest, of_attention, of_lanes] = factors;
  require(of_decode > 0 && of_rest > 0 && of_attention > 0 && of_lanes > 0, "factors must be positive");
  return {to_points(decode),
          to_points(prompt),
          {to_device.first, to_device.second},
          {to_host.first, to_host.second},
          {of_decode, of_rest, of_attention, of_lanes}};
}

// Python has chains as integers: a root's is 2**64 and its salt.
py::int_ to_python(Chain chain) {
  const py::int_ id(chain.id);
  return chain.root ? py::int_(id + (py::int_(1) << py::int_(64))) : id;
}

Chain to_chain(const py::int_& value) {
  const bool root = !py::int_(value >> py::int_(64)).equal(py::int_(0));
  return {(value & py::int_(UINT64_MAX)).cast<uint64_t>(), root};
}

}  // namespace

void bind_core(py::module_& m) {
  py::class_<StepCosts>(m, "StepCosts")
      .def(py::init(&make_step_costs), py::arg("decode") = std::vector<CostPoint>(), py::arg("prompt") = std::vector<CostPoint>(),
           py::arg("to_device") = std::pair(0.0, 0.0), py::arg("to_host") = std::pair(0.0, 0.0),
           py::arg("factors") = std::tuple(1.0, 1.0, 1.0, 1.0))
      .def_property_readonly("known", &StepCosts::known)
      .def("decode_ns", &StepCosts::decode_ns)
      .def("lanes_ns", &StepCosts::hybrid_ns)
      .def("mixed_ns", &StepCosts::mixed_ns)
      .def("attention_ns", &StepCosts::attention_ns)
      .def("recompute_ns", &StepCosts::recompute_ns)
      .def("copy_ns", &StepCosts::copy_ns);

  py::class_<HybridConfig>(m, "HybridConfig")
      .def(py::init([](int32_t lanes, int32_t layers, int32_t workers, double attend_ns, double exchange_ns, double min_gain,
                       int32_t max_rows, int64_t host_tokens, int64_t job_timeout_ns) {
             require(lanes >= 0 && lanes <= 64 && layers >= 0, "lanes must be 0 to 64, and layers not negative");
             require(workers >= 1 && attend_ns >= 0 && exchange_ns >= 0 && max_rows >= 0 && host_tokens >= 0 && job_timeout_ns > 0,
                     "counts and times must not be negative");
             return HybridConfig{lanes, layers, workers, attend_ns, exchange_ns, min_gain, max_rows, host_tokens, job_timeout_ns};
           }),
           py::kw_only(), py::arg("lanes") = 0, py::arg("layers") = 0, py::arg("workers") = 1, py::arg("attend_ns") = 0.0,
           py::arg("exchange_ns") = 0.0, py::arg("min_gain") = HybridConfig().min_gain, py::arg("max_rows") = 0,
           py::arg("host_tokens") = 0, py::arg("job_timeout_ns") = HybridConfig().job_timeout_ns)
      .def("gain",
           [](const HybridConfig& self, const StepCosts& costs, int32_t rows, int64_t attended) -> std::optional<double> {
             require(rows >= 1 && attended >= 1, "a row and a token at least");
             if (!costs.known() || self.attend_ns == 0) return std::nullopt;
             return self.gain(costs, self.attend_ns, rows, attended).share;
           })
      .def_readonly_static("ENOUGH_TOKENS", &HybridConfig::kEnoughTokens);

  using Config = SchedulerConfig;
  py::class_<Config>(m, "SchedulerConfig")
      .def(py::init(&make_scheduler_config), py::kw_only(), py::arg("num_blocks"), py::arg("block_size"), py::arg("max_num_seqs"),
           py::arg("max_num_batched_tokens"), py::arg("prefill_chunk_size"), py::arg("max_model_len"), py::arg("prefix_caching"),
           py::arg("token_buckets") = std::vector<int32_t>(), py::arg("max_samples") = 0, py::arg("max_update_words") = 0,
           py::arg("max_result_words") = 0, py::arg("mask_words") = 0, py::arg("num_host_blocks") = 0,
           py::arg("costs") = StepCosts(), py::arg("target_itl_ns") = 0,
           py::arg("target_itl_ns_by_priority") = std::vector<std::pair<int32_t, int64_t>>(), py::arg("paced_chunk_size") = 0,
           py::arg("hybrid") = HybridConfig());

  py::class_<BlockManager>(m, "BlockManager")
      .def(py::init<int32_t, int32_t, bool>(), py::arg("num_blocks"), py::arg("block_size"), py::arg("prefix_caching"))
      .def_property_readonly("num_free", &BlockManager::num_free)
      .def("ref_count", &BlockManager::ref_count)
      .def("writable", &BlockManager::writable)
      .def("allocate",
           [](BlockManager& self) {
             require(self.num_free() > 0, "no free block");
             return self.allocate();
           })
      .def("retain", &BlockManager::retain)
      .def("release",
           [](BlockManager& self, int32_t block) {
             require(self.ref_count(block) > 0, "the block is not held");
             self.release(block);
           })
      .def("publish",
           [](BlockManager& self, int32_t block, const py::int_& parent, const std::vector<int32_t>& tokens) {
             require(static_cast<int32_t>(tokens.size()) == self.block_size(), "tokens of exactly one block");
             const Chain chain = to_chain(parent);
             return to_python(self.publish(block, chain, tokens.data(), self.prefetch(block, chain, tokens.data())));
           })
      .def("match_prefix",
           [](const BlockManager& self, const std::vector<int32_t>& tokens, uint64_t salt) {
             std::vector<int32_t> blocks(tokens.size() / static_cast<size_t>(self.block_size()));
             const auto tokens_at = [&](int32_t position) { return tokens.data() + position; };
             blocks.resize(
                 static_cast<size_t>(self.match_prefix(tokens_at, static_cast<int32_t>(blocks.size()), salt, blocks.data())));
             return blocks;
           })
      .def(
          "time_match_prefix",
          [](const BlockManager& self, const std::vector<int32_t>& tokens, int repeats) {
            std::vector<int32_t> blocks(tokens.size() / static_cast<size_t>(self.block_size()));
            const auto tokens_at = [&](int32_t position) { return tokens.data() + position; };
            const int64_t start = steady_now_ns();
            for (int i = 0; i < repeats; ++i) self.match_prefix(tokens_at, static_cast<int32_t>(blocks.size()), 0, blocks.data());
            return static_cast<double>(steady_now_ns() - start) / repeats;
          },
          NoGil())
      .def_static("root_chain", [](uint64_t salt) { return to_python({salt, /*root=*/true}); })
      .def("consistent", &BlockManager::consistent);

  py::class_<SchedulerHarness>(m, "SchedulerHarness")
      .def(py::init<const Config&, int>(), py::arg("config"), py::arg("steps_in_flight"))
      .def(
          "add",
          [](SchedulerHarness& self, uint64_t id, std::vector<int32_t> prompt, int32_t n, int32_t max_tokens,
             std::vector<int32_t> stop_tokens, int64_t order, uint64_t salt, RequestExtras extras, uint64_t tenant,
             int32_t priority) {
            self.add(make_spec(id, std::move(prompt), n, max_tokens, priority, salt, {}, std::move(stop_tokens), std::move(extras),
                               0, false, tenant),
                     order);
          },
          py::arg("id"), py::arg("prompt"), py::arg("n"), py::arg("max_tokens"), py::arg("stop_tokens"), py::arg("order"),
          py::arg("salt"), py::arg("extras") = RequestExtras(), py::arg("tenant") = 0, py::arg("priority") = 0)
      .def("abort", &SchedulerHarness::abort, py::arg("id"), py::arg("index") = -1)
      .def("schedule", &SchedulerHarness::schedule)
      .def("commit", &SchedulerHarness::commit)
      .def("news", &SchedulerHarness::news)
      .def_property_readonly("step_input", &SchedulerHarness::step_input)
      .def_property_readonly("in_flight", &SchedulerHarness::in_flight)
      .def_property_readonly("quiescent", &SchedulerHarness::quiescent)
      .def_property_readonly("free_blocks", &SchedulerHarness::free_blocks)
      .def_property_readonly("preemptions", &SchedulerHarness::preemptions)
      .def_property_readonly("ref_counts", &SchedulerHarness::ref_counts)
      .def("consistent", &SchedulerHarness::consistent)
      .def("move_blocks", &SchedulerHarness::move_blocks)
      .def_property_readonly("held_by_tier", &SchedulerHarness::held_by_tier)
      .def_property_readonly("loading", &SchedulerHarness::loading)
      .def_property_readonly("running", &SchedulerHarness::running)
      .def("moves", [](SchedulerHarness& self) { return self.mover().under_way(); })
      .def(
          "finish_moves", [](SchedulerHarness& self, int transfer, bool done) { self.mover().finish(transfer, done); },
          py::arg("transfer"), py::arg("done"))
      .def(
          "refuse_moves", [](SchedulerHarness& self, int count) { self.mover().refuses = count; }, py::arg("count"))
      .def_property_readonly("lanes", &SchedulerHarness::lanes)
      .def_property_readonly("host_rows", &SchedulerHarness::host_rows)
      .def_property_readonly("jobs",
                             [](SchedulerHarness& self) {
                               py::list all;
                               for (const HarnessAttention::Job& job : self.attention().jobs) {
                                 all.append(py::make_tuple(job.slot, job.layer, job.step, job.position, job.blocks, job.cancelled));
                               }
                               return all;
                             })
      .def(
          "end_job", [](SchedulerHarness& self, int32_t slot, bool done) { self.attention().end(slot, done); }, py::arg("slot"),
          py::arg("done"))
      .def_readwrite("now", &SchedulerHarness::now)
      .def_property_readonly("host_pins", &SchedulerHarness::host_pins)
      .def_property_readonly("pinned_by_tier", &SchedulerHarness::pinned_by_tier)
      .def_property_readonly("stats", &SchedulerHarness::stats)
      .def("time_steps", &SchedulerHarness::time_steps, NoGil());
}

}  // namespace asyncengine
