// Python's view of core/: costs and settings, the block manager and the scheduler's harness.
#include "bindings/bindings.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/harness.h"
#include "bindings/records.h"
#include "core/scheduler.h"
#include "core/state_pool.h"
#include "step_loop/step_loop.h"

namespace asyncengine {
namespace {

// For its Python model: misuse is refused here, as the core never does it.
void bind_state_pool(py::module_& m) {
  const auto pinned = [](const StatePool& self, int32_t state) {
    require(self.pins(state) > 0, "the state is no pinned snapshot");
  };
  py::class_<StatePool>(m, "StatePool")
      .def(py::init([](int32_t num_slots, int32_t num_state_slots) {
             require(num_slots > 0 && (num_state_slots == 0 || num_state_slots >= num_slots), "a state for each slot, or none");
             return StatePool(num_slots, num_state_slots);
           }),
           py::arg("num_slots"), py::arg("num_state_slots"))
      .def_property_readonly("num_snapshots", &StatePool::num_snapshots)
      .def_property_readonly("num_pinned", &StatePool::num_pinned)
      .def_property_readonly("num_cached", &StatePool::num_cached)
      .def("take", &StatePool::take)
      .def("pin",
           [](StatePool& self, int32_t state) {
             require(self.pins(state) >= 0, "the state is no snapshot");
             self.pin(state);
           })
      .def(
          "unpin",
          [pinned](StatePool& self, int32_t state, bool in_place) {
            pinned(self, state);
            self.unpin(state, in_place);
          },
          py::arg("state"), py::arg("in_place") = false)
      .def("take_at_rest", &StatePool::take_at_rest)
      .def("retire", &StatePool::retire)
      .def("enter",
           [pinned](StatePool& self, int32_t state, uint64_t chain) {
             pinned(self, state);
             require(chain != 0 && !self.known(state), "an unknown snapshot and a chain");
             self.enter(state, chain);
           })
      .def("find", &StatePool::find)
      .def("use",
           [](StatePool& self, int32_t state, uint64_t step) {
             require(self.pins(state) >= 0, "the state is no snapshot");
             self.use(state, step);
           })
      .def("forget", &StatePool::forget)
      .def("consistent", &StatePool::consistent);
}

void check_hybrid(const HybridConfig& hybrid) {
  require(hybrid.lanes >= 0 && hybrid.lanes <= 64 && hybrid.layers >= 0, "lanes must be 0 to 64, and layers not negative");
  require(hybrid.workers >= 1 && hybrid.attend_ns >= 0 && hybrid.exchange_ns >= 0 && hybrid.max_rows >= 0 &&
              hybrid.host_tokens >= 0 && hybrid.job_timeout_ns > 0,
          "counts and times must not be negative");
}

void check_targets(const ItlTargets& targets) {
  require(targets.ns >= 0 && std::ranges::all_of(targets.of_class, [](const auto& target) { return target.second > 0; }),
          "targets must be positive");
}

void check_config(const SchedulerConfig& c) {
  require(c.num_blocks >= 1 && c.max_num_seqs >= 1 && c.max_model_len >= 1 && c.prefill_chunk_size >= 0, "counts must be positive");
  require(c.block_size >= 16 && c.block_size % 16 == 0, "block_size must be a multiple of 16");
  require(c.max_num_batched_tokens >= c.max_num_seqs, "max_num_batched_tokens must be at least max_num_seqs");
  require(std::ranges::is_sorted(c.token_buckets), "token_buckets must ascend");
  require(c.max_samples >= 0 && c.max_update_words >= 0 && c.max_result_words >= 0 && c.mask_words >= 0,
          "budgets must not be negative");
  require(c.num_host_blocks >= 0 && (c.num_host_blocks == 0 || c.prefix_caching), "a host tier needs prefix_caching");
  require(c.num_host_states >= 0 && (c.num_host_states == 0 || (c.num_host_blocks > 0 && c.num_state_slots > 0)),
          "states of a host tier need one, and state slots");
  require(!c.hybrid.any() || (c.num_host_blocks > 0 && c.hybrid.layers >= 1), "host rows need a host tier and layers");
  require(c.max_num_batched_tokens >= c.max_num_seqs + c.hybrid.lanes,
          "max_num_batched_tokens must leave room for lanes beside max_num_seqs");
  require(c.paced_chunk_size >= 0, "chunks must not be negative");
  require(c.window >= 0, "window must not be negative");
  require(c.window_groups >= 0 && (c.window_groups == 0) == (c.group_window == 0) && c.group_window >= 0,
          "window groups have a window");
  require(c.window_groups == 0 || (c.window == 0 && c.num_host_blocks == 0 && c.num_state_slots == 0),
          "window groups go with neither a window of all layers, host blocks nor states");
  require(c.num_block_events >= 0, "num_block_events must not be negative");
  require(c.num_state_slots == 0 || c.num_state_slots >= c.max_num_seqs, "num_state_slots must be 0, or max_num_seqs at least");
  require(c.state_snapshot_tokens >= 0 && c.state_snapshot_tokens % c.block_size == 0,
          "state_snapshot_tokens must be a multiple of block_size");
  require(c.answer_snapshot_tokens >= 1, "answer_snapshot_tokens must be at least 1");
  require(c.num_state_slots == 0 || !c.hybrid.any(), "sequences with a state do not decode on the host");
}

void check_point(const StepCosts::Point& point) {
  require(point.tokens >= 1 && point.base_ns >= 0 && point.context_ns >= 0, "a point has tokens, and times are not negative");
}

void check_factors(const StepCosts::Factors& f) {
  require(f.decode > 0 && f.rest > 0 && f.attention > 0 && f.hybrid > 0, "factors must be positive");
}

using CostPoints = std::vector<StepCosts::Point>;

StepCosts make_step_costs(CostPoints decode, CostPoints prompt, StepCosts::Copy to_device, StepCosts::Copy to_host,
                          const StepCosts::Factors& factors) {
  for (const CostPoints& points : {decode, prompt}) {
    require(std::ranges::is_sorted(points, std::ranges::less_equal(), &StepCosts::Point::tokens), "tokens of points must ascend");
  }
  return {std::move(decode), std::move(prompt), to_device, to_host, factors};
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
  bind_record<StepCosts::Point>(m, "CostPoint", check_point);
  bind_record<StepCosts::Copy>(m, "CostCopy", [](const StepCosts::Copy&) {});
  bind_record<StepCosts::Factors>(m, "CostFactors", check_factors);
  py::class_<StepCosts>(m, "StepCosts")
      .def(py::init(&make_step_costs), py::arg("decode") = CostPoints(), py::arg("prompt") = CostPoints(),
           py::arg("to_device") = StepCosts::Copy(), py::arg("to_host") = StepCosts::Copy(),
           py::arg("factors") = StepCosts::Factors())
      .def_property_readonly("known", &StepCosts::known)
      .def("decode_ns", &StepCosts::decode_ns)
      .def("lanes_ns", &StepCosts::hybrid_ns)
      .def("mixed_ns", &StepCosts::mixed_ns)
      .def("attention_ns", &StepCosts::attention_ns)
      .def("recompute_ns", &StepCosts::recompute_ns)
      .def("copy_ns", &StepCosts::copy_ns);

  bind_record<HybridConfig>(m, "HybridConfig", check_hybrid)
      .def("gain",
           [](const HybridConfig& self, const StepCosts& costs, int32_t rows, int64_t attended) -> std::optional<double> {
             require(rows >= 1 && attended >= 1, "a row and a token at least");
             if (!costs.known() || self.attend_ns == 0) return std::nullopt;
             return self.gain(costs, self.attend_ns, rows, attended).share;
           })
      .def_readonly_static("ENOUGH_TOKENS", &HybridConfig::kEnoughTokens);

  bind_block_changes(m);
  bind_record<ItlTargets>(m, "ItlTargets", check_targets);
  bind_record<SchedulerConfig>(m, "SchedulerConfig", check_config);

  py::class_<BlockManager>(m, "BlockManager")
      .def(py::init<int32_t, int32_t, bool, int32_t, int32_t, int32_t>(), py::arg("num_blocks"), py::arg("block_size"),
           py::arg("prefix_caching"), py::arg("num_host_blocks") = 0, py::arg("num_events") = 0, py::arg("window_groups") = 0)
      .def("accompany", &BlockManager::accompany)
      .def("companion", &BlockManager::companion)
      .def("match_windows",
           [](const BlockManager& self, const std::vector<int32_t>& chain, int32_t window) {
             const auto first_seen = [&](int32_t blocks) {
               return std::max(0, (blocks * self.block_size() - window + 1) / self.block_size());
             };
             return self.match_windows(chain.data(), static_cast<int32_t>(chain.size()), first_seen);
           })
      .def(
          "changes", [](BlockManager& self, size_t most) { return block_changes(self.events(), most); }, py::arg("most"))
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

  bind_state_pool(m);

  py::class_<SchedulerHarness>(m, "SchedulerHarness")
      .def(py::init<const SchedulerConfig&, int>(), py::arg("config"), py::arg("steps_in_flight"))
      .def("add", &SchedulerHarness::add, py::arg("spec"), py::arg("order"))
      .def("abort", &SchedulerHarness::abort, py::arg("id"), py::arg("index") = -1)
      .def("schedule", &SchedulerHarness::schedule)
      .def("commit", &SchedulerHarness::commit)
      .def("news", &SchedulerHarness::news)
      .def_property_readonly("step_input", &SchedulerHarness::step_input)
      .def_property_readonly("state_copies", &SchedulerHarness::state_copies)
      .def_property_readonly("slots", &SchedulerHarness::slots)
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
      .def(
          "moves", [](SchedulerHarness& self, bool states) { return self.mover(states).under_way(); }, py::arg("states") = false)
      .def(
          "finish_moves",
          [](SchedulerHarness& self, int transfer, bool done, bool states) { self.mover(states).finish(transfer, done); },
          py::arg("transfer"), py::arg("done"), py::arg("states") = false)
      .def(
          "refuse_moves", [](SchedulerHarness& self, int count, bool states) { self.mover(states).refuses = count; },
          py::arg("count"), py::arg("states") = false)
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
