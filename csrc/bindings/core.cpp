// Block manager and scheduler without their thread, which property tests and the core benchmark drive; and the size of
// a JSON document, which the server asks for.
#include "bindings/bindings.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "core/batch_packer.h"
#include "core/scheduler.h"
#include "platform/json_scan.h"

namespace asyncengine {
namespace {

int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

SchedulerConfig make_scheduler_config(int32_t num_blocks, int32_t block_size, int32_t max_num_seqs,
                                      int32_t max_num_batched_tokens, int32_t prefill_chunk_size, int32_t max_model_len,
                                      bool prefix_caching, std::vector<int32_t> token_buckets, int32_t max_samples,
                                      int32_t max_update_words, int32_t max_result_words, int32_t mask_words,
                                      int32_t num_host_blocks, const StepCosts& costs, int64_t target_itl_ns,
                                      std::vector<std::pair<int32_t, int64_t>> target_itl_ns_by_priority, int32_t paced_chunk_size,
                                      const HybridConfig& hybrid) {
  require(num_blocks >= 1 && max_num_seqs >= 1 && max_model_len >= 1 && prefill_chunk_size >= 0, "counts must be positive");
  require(block_size >= 16 && block_size % 16 == 0, "block_size must be a multiple of 16");
  require(max_num_batched_tokens >= max_num_seqs, "max_num_batched_tokens must be at least max_num_seqs");
  require(std::ranges::is_sorted(token_buckets), "token_buckets must ascend");
  require(max_samples >= 0 && max_update_words >= 0 && max_result_words >= 0 && mask_words >= 0, "budgets must not be negative");
  require(num_host_blocks >= 0 && (num_host_blocks == 0 || prefix_caching), "a host tier needs prefix_caching");
  require(!hybrid.any() || (num_host_blocks > 0 && hybrid.layers >= 1), "host rows need a host tier and layers");
  require(max_num_batched_tokens >= max_num_seqs + hybrid.lanes, "max_num_batched_tokens must leave room for lanes beside max_num_seqs");
  require(target_itl_ns >= 0 && paced_chunk_size >= 0, "targets and chunks must not be negative");
  require(std::ranges::all_of(target_itl_ns_by_priority, [](const auto& target) { return target.second > 0; }), "targets must be positive");
  return {num_blocks, block_size, max_num_seqs, max_num_batched_tokens, prefill_chunk_size, max_model_len, prefix_caching,
          std::move(token_buckets), max_samples, max_update_words, max_result_words, mask_words, num_host_blocks, costs,
          {target_itl_ns, std::move(target_itl_ns_by_priority)}, paced_chunk_size, hybrid};
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
  return {to_points(decode), to_points(prompt), {to_device.first, to_device.second}, {to_host.first, to_host.second},
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

// Transfers that end when the test says so.
class HarnessMover final : public BlockMover {
 public:
  explicit HarnessMover(int32_t num_host_blocks) : num_host_blocks_(num_host_blocks) {}
  int32_t num_host_blocks() const override { return num_host_blocks_; }
  int32_t max_moves() const override { return 4; }
  size_t block_bytes() const override { return 0; }
  std::byte* host_block(int32_t) override { return nullptr; }
  bool start(int transfer, std::span<const BlockMove> moves) override {
    if (refuses > 0 && refuses-- > 0) return false;
    Transfer& t = transfers_.at(static_cast<size_t>(transfer));
    t.moves.assign(moves.begin(), moves.end());
    t.status = MoveStatus::kPending;
    return true;
  }
  MoveStatus poll(int transfer) override {
    Transfer& t = transfers_.at(static_cast<size_t>(transfer));
    if (t.status != MoveStatus::kPending) t.moves.clear();
    return t.status;
  }
  // (transfer, block, host) of what is under way.
  std::vector<std::tuple<int, int32_t, int32_t>> under_way() const {
    std::vector<std::tuple<int, int32_t, int32_t>> all;
    for (int i = 0; i < kTransfers; ++i) {
      const Transfer& t = transfers_.at(static_cast<size_t>(i));
      if (t.status != MoveStatus::kPending) continue;
      for (const BlockMove& move : t.moves) all.emplace_back(i, move.block, move.host);
    }
    return all;
  }
  void finish(int transfer, bool done) {
    transfers_.at(static_cast<size_t>(transfer)).status = done ? MoveStatus::kDone : MoveStatus::kFailed;
  }
  int refuses = 0;

 private:
  struct Transfer {
    std::vector<BlockMove> moves;
    MoveStatus status = MoveStatus::kDone;
  };
  int32_t num_host_blocks_;
  std::array<Transfer, kTransfers> transfers_;
};

// Attention that ends when the test says so.
class HarnessAttention final : public HostAttention {
 public:
  struct Job {
    int32_t slot, layer;
    uint32_t step;
    int32_t position;
    std::vector<int32_t> blocks;
    bool cancelled = false;
  };
  HarnessAttention(int32_t num_layers, int32_t num_slots, int32_t block_size)
      : num_layers_(num_layers), block_size_(block_size), status_(static_cast<size_t>(num_slots), HostAttentionStatus::kDone) {}
  int32_t num_layers() const override { return num_layers_; }
  void post(const HostAttentionJob& job) override {
    require(status_.at(static_cast<size_t>(job.slot)) != HostAttentionStatus::kPending, "the slot has a job");
    status_.at(static_cast<size_t>(job.slot)) = HostAttentionStatus::kPending;
    jobs.push_back({job.slot, job.layer, job.step, job.position, {job.blocks, job.blocks + job.position / block_size_ + 1}});
  }
  HostAttentionStatus poll(int32_t slot) override { return status_.at(static_cast<size_t>(slot)); }
  void cancel(int32_t slot) override {
    for (Job& job : jobs) job.cancelled |= job.slot == slot;
  }
  bool close(std::chrono::nanoseconds) override { return true; }
  void end(int32_t slot, bool done) {
    require(std::erase_if(jobs, [&](const Job& job) { return job.slot == slot; }) == 1, "the slot has no job");
    status_.at(static_cast<size_t>(slot)) = done ? HostAttentionStatus::kDone : HostAttentionStatus::kFailed;
  }
  std::vector<Job> jobs;  // that have not ended, in the order of posting

 private:
  int32_t num_layers_, block_size_;
  std::vector<HostAttentionStatus> status_;  // by slot
};

// The scheduler without its thread: tests and bench/core play executor and event loop.
class SchedulerHarness {
 public:
  SchedulerHarness(const SchedulerConfig& config, int steps_in_flight)
      : block_size_(config.block_size), scheduler_(config), outbox_(1024), staging_(scheduler_.limits().max_bytes()),
        records_(static_cast<size_t>(scheduler_.limits().max_result_words)) {
    for (int i = 0; i < steps_in_flight; ++i) spare_.push_back(std::make_unique<StepPlan>());
    if (config.num_host_blocks == 0) return;
    mover_ = std::make_unique<HarnessMover>(config.num_host_blocks);
    scheduler_.move_blocks_with(*mover_);
    if (!config.hybrid.any()) return;
    attention_ = std::make_unique<HarnessAttention>(config.hybrid.layers, config.max_num_seqs, config.block_size);
    scheduler_.attend_on_host_with(*attention_);
  }
  bool move_blocks() { return scheduler_.move_blocks(outbox_, now, now); }
  HarnessAttention& attention() {
    require(attention_ != nullptr, "there are no lanes");
    return *attention_;
  }
  // (stage, lane, slot, position) of the step that was scheduled last.
  std::vector<std::tuple<int32_t, int32_t, int32_t, int32_t>> lanes() const {
    std::vector<std::tuple<int32_t, int32_t, int32_t, int32_t>> all;
    const HostRowsPlan& plan = flight_.back()->host_rows;
    for (size_t i = 0; i < plan.entries.size(); ++i) {
      const auto place = static_cast<int32_t>(i);
      if (plan.entries[i].slot < 0) continue;
      all.emplace_back(place / plan.num_lanes, place % plan.num_lanes, plan.entries[i].slot, plan.entries[i].position);
    }
    return all;
  }
  // (request, index, slot, phase, stage, leaves, blocks of the host) of each host row.
  py::list host_rows() const {
    static constexpr std::array kNames{"", "draining", "storing", "ready", "attending", "sampling"};
    py::list all;
    for (const HostRowView& view : scheduler_.host_rows()) {
      const Sequence& sequence = *view.slot->sequence;
      all.append(py::make_tuple(sequence.request->id, sequence.index, sequence.slot, kNames.at(static_cast<size_t>(view.row.phase)),
                                view.row.stage, view.row.leaves, std::vector<int32_t>(view.blocks.begin(), view.blocks.end())));
    }
    return all;
  }
  std::vector<int32_t> host_pins() {
    std::vector<int32_t> pins;
    for (int32_t h = 0; h < scheduler_.blocks().num_host_blocks(); ++h) pins.push_back(scheduler_.blocks().host_pins(h));
    return pins;
  }
  std::vector<int32_t> pinned_by_tier() const {
    std::vector<int32_t> pinned;
    if (scheduler_.tier() != nullptr) scheduler_.tier()->visit_pinned([&](int32_t host) { pinned.push_back(host); });
    return pinned;
  }
  py::dict stats() {
    py::dict all;
    visit_stats(scheduler_.stats(), [&](const char* name, int64_t value) { all[name] = value; });
    return all;
  }
  std::vector<int32_t> held_by_tier() const {
    std::vector<int32_t> held;
    if (scheduler_.tier() != nullptr) scheduler_.tier()->visit_held([&](int32_t block) { held.push_back(block); });
    return held;
  }
  // Request and index of each.
  std::vector<std::pair<uint64_t, int32_t>> loading() const {
    std::vector<std::pair<uint64_t, int32_t>> all;
    for (const auto& [id, request] : requests_) {
      for (const Sequence& sequence : request->sequences) {
        if (sequence.loading) all.emplace_back(id, sequence.index);
      }
    }
    return all;
  }
  // Request and index of each that runs on the device.
  std::vector<std::pair<uint64_t, int32_t>> running() const {
    std::vector<std::pair<uint64_t, int32_t>> all;
    for (const auto& [id, request] : requests_) {
      for (const Sequence& sequence : request->sequences) {
        if (sequence.state == SequenceState::kRunning) all.emplace_back(id, sequence.index);
      }
    }
    return all;
  }
  HarnessMover& mover() {
    require(mover_ != nullptr, "there is no host tier");
    return *mover_;
  }
  void add(const RequestSpec& spec, int64_t order) {
    auto request = make_request(spec, order, ++sequence_number_, block_size_, tenants_.find(spec.tenant));
    Request* raw = request.get();
    Tenants::enter(raw->tenant);
    requests_[spec.id] = std::move(request);
    scheduler_.add(raw);
  }
  // Sequence `index` of the request, or all of them.
  void abort(uint64_t id, int32_t index) {
    Request* request = requests_.at(id).get();
    for (Sequence& sequence : request->sequences) sequence.abort_requested = index < 0 || sequence.index == index;
    scheduler_.abort(request, outbox_);
    scheduler_.after_aborts();
  }
  // Rows (request, index, query_len, context_len, sample, from_device, blocks) and copies of the next step; None when
  // nothing can run.
  py::object schedule() {
    if (spare_.empty()) return py::none();
    StepPlan& plan = *spare_.back();
    plan.step = ++step_;
    scheduler_.schedule(plan, now);
    if (plan.empty()) return py::none();
    py::list rows, copies;
    for (const PlanRow& row : plan.rows) {
      const auto blocks = scheduler_.tables().blocks(row.slot);
      rows.append(py::make_tuple(row.sequence->request->id, row.sequence->index, row.query_len, row.context_len, row.num_appends > 0,
                                 row.from_device, std::vector<int32_t>(blocks.begin(), blocks.end())));
    }
    for (const BlockCopy& copy : plan.copies) copies.append(py::make_tuple(copy.source, copy.target));
    packed_ = pack_step(plan, scheduler_.tables(), staging_);
    flight_.push_back(std::move(spare_.back()));
    spare_.pop_back();
    return py::make_tuple(rows, copies);
  }
  // Retires the oldest step, which failed if there are no tokens; returns [(request, index, token, finish)] and the
  // requests released.
  std::pair<py::list, std::vector<uint64_t>> commit(const std::optional<std::vector<int32_t>>& tokens) {
    require(!flight_.empty(), "no step is in flight");
    StepPlan& plan = *flight_.front();
    if (tokens) {
      require(static_cast<int32_t>(tokens->size()) == plan.num_samples, "one token per sample");
      scheduler_.commit(plan, {tokens->data(), records_.data()}, outbox_, now);
    } else {
      scheduler_.fail_step(plan, outbox_, now);
    }
    plan.clear();
    spare_.push_back(std::move(flight_.front()));
    flight_.pop_front();
    return news();
  }
  std::pair<py::list, std::vector<uint64_t>> news() {
    py::list events;
    std::vector<uint64_t> released;
    Delivery& delivery = outbox_.filling();
    for (const OutputEvent& event : delivery.events) {
      events.append(py::make_tuple(event.sequence->request->id, event.sequence->index, event.token, to_python(event.finish)));
    }
    for (const Request* request : delivery.released) {
      released.push_back(request->id);
      tenants_.leave(request->tenant);
      requests_.erase(request->id);
    }
    delivery.clear();
    return {std::move(events), std::move(released)};
  }
  // Of the step that was scheduled last.
  py::bytes step_input() const { return {reinterpret_cast<const char*>(staging_.data()), packed_}; }
  int in_flight() const { return static_cast<int>(flight_.size()); }
  bool quiescent() const { return scheduler_.quiescent(); }
  int64_t free_blocks() { return scheduler_.stats().num_free_blocks; }
  int64_t preemptions() { return scheduler_.stats().num_preemptions; }
  std::vector<int32_t> ref_counts() {
    std::vector<int32_t> counts;
    for (int32_t b = 0; b < scheduler_.blocks().num_blocks(); ++b) counts.push_back(scheduler_.blocks().ref_count(b));
    return counts;
  }
  bool consistent() { return scheduler_.blocks().consistent(); }
  int64_t now = 1;  // nanoseconds

  // Nanoseconds of schedule + pack + commit, averaged over `steps` steady decode steps.
  double time_steps(int steps) {
    StepPlan& plan = *spare_.at(0);
    std::vector<int32_t> tokens(static_cast<size_t>(scheduler_.limits().samples()), 1);
    const int64_t start = now_ns();
    for (int i = 0; i < steps; ++i) {
      plan.step = ++step_;
      scheduler_.schedule(plan, 1);
      pack_step(plan, scheduler_.tables(), staging_);
      scheduler_.commit(plan, {tokens.data(), records_.data()}, outbox_, 2);
      plan.clear();
      outbox_.filling().clear();
    }
    return static_cast<double>(now_ns() - start) / steps;
  }

 private:
  int32_t block_size_;
  std::unique_ptr<HarnessMover> mover_;  // of a host tier
  std::unique_ptr<HarnessAttention> attention_;  // of host rows
  Scheduler scheduler_;
  Outbox outbox_;
  std::vector<std::byte> staging_;
  std::vector<int32_t> records_;  // none
  size_t packed_ = 0;             // bytes of the last step
  std::vector<std::unique_ptr<StepPlan>> spare_;
  std::deque<std::unique_ptr<StepPlan>> flight_;
  Tenants tenants_;
  std::unordered_map<uint64_t, std::unique_ptr<Request>> requests_;
  uint64_t step_ = 0, sequence_number_ = 0;
};

}  // namespace

void bind_core(py::module_& m) {
  py::class_<StepCosts>(m, "StepCosts")
      .def(py::init(&make_step_costs), py::arg("decode") = std::vector<CostPoint>(), py::arg("prompt") = std::vector<CostPoint>(),
           py::arg("to_device") = std::pair(0.0, 0.0), py::arg("to_host") = std::pair(0.0, 0.0), py::arg("factors") = std::tuple(1.0, 1.0, 1.0, 1.0))
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
           }), py::kw_only(), py::arg("lanes") = 0, py::arg("layers") = 0, py::arg("workers") = 1, py::arg("attend_ns") = 0.0,
           py::arg("exchange_ns") = 0.0, py::arg("min_gain") = HybridConfig().min_gain, py::arg("max_rows") = 0,
           py::arg("host_tokens") = 0, py::arg("job_timeout_ns") = HybridConfig().job_timeout_ns)
      .def("gain", [](const HybridConfig& self, const StepCosts& costs, int32_t rows, int64_t attended) -> std::optional<double> {
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
           py::arg("max_result_words") = 0, py::arg("mask_words") = 0, py::arg("num_host_blocks") = 0, py::arg("costs") = StepCosts(),
           py::arg("target_itl_ns") = 0, py::arg("target_itl_ns_by_priority") = std::vector<std::pair<int32_t, int64_t>>(),
           py::arg("paced_chunk_size") = 0, py::arg("hybrid") = HybridConfig());

  py::class_<BlockManager>(m, "BlockManager")
      .def(py::init<int32_t, int32_t, bool>(), py::arg("num_blocks"), py::arg("block_size"), py::arg("prefix_caching"))
      .def_property_readonly("num_free", &BlockManager::num_free)
      .def("ref_count", &BlockManager::ref_count)
      .def("writable", &BlockManager::writable)
      .def("allocate", [](BlockManager& self) {
        require(self.num_free() > 0, "no free block");
        return self.allocate();
      })
      .def("retain", &BlockManager::retain)
      .def("release", [](BlockManager& self, int32_t block) {
        require(self.ref_count(block) > 0, "the block is not held");
        self.release(block);
      })
      .def("publish", [](BlockManager& self, int32_t block, const py::int_& parent, const std::vector<int32_t>& tokens) {
        require(static_cast<int32_t>(tokens.size()) == self.block_size(), "tokens of exactly one block");
        const Chain chain = to_chain(parent);
        return to_python(self.publish(block, chain, tokens.data(), self.prefetch(block, chain, tokens.data())));
      })
      .def("match_prefix", [](const BlockManager& self, const std::vector<int32_t>& tokens, uint64_t salt) {
        std::vector<int32_t> blocks(tokens.size() / static_cast<size_t>(self.block_size()));
        const auto tokens_at = [&](int32_t position) { return tokens.data() + position; };
        blocks.resize(static_cast<size_t>(self.match_prefix(tokens_at, static_cast<int32_t>(blocks.size()), salt, blocks.data())));
        return blocks;
      })
      .def("time_match_prefix", [](const BlockManager& self, const std::vector<int32_t>& tokens, int repeats) {
        std::vector<int32_t> blocks(tokens.size() / static_cast<size_t>(self.block_size()));
        const auto tokens_at = [&](int32_t position) { return tokens.data() + position; };
        const int64_t start = now_ns();
        for (int i = 0; i < repeats; ++i) self.match_prefix(tokens_at, static_cast<int32_t>(blocks.size()), 0, blocks.data());
        return static_cast<double>(now_ns() - start) / repeats;
      }, NoGil())
      .def_static("root_chain", [](uint64_t salt) { return to_python({salt, /*root=*/true}); })
      .def("consistent", &BlockManager::consistent);

  py::class_<SchedulerHarness>(m, "SchedulerHarness")
      .def(py::init<const Config&, int>(), py::arg("config"), py::arg("steps_in_flight"))
      .def("add", [](SchedulerHarness& self, uint64_t id, std::vector<int32_t> prompt, int32_t n, int32_t max_tokens,
                     std::vector<int32_t> stop_tokens, int64_t order, uint64_t salt, RequestExtras extras, uint64_t tenant,
                     int32_t priority) {
        self.add(make_spec(id, std::move(prompt), n, max_tokens, priority, salt, {}, std::move(stop_tokens), std::move(extras), 0,
                           false, tenant), order);
      }, py::arg("id"), py::arg("prompt"), py::arg("n"), py::arg("max_tokens"), py::arg("stop_tokens"), py::arg("order"), py::arg("salt"),
           py::arg("extras") = RequestExtras(), py::arg("tenant") = 0, py::arg("priority") = 0)
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
      .def("finish_moves", [](SchedulerHarness& self, int transfer, bool done) { self.mover().finish(transfer, done); },
           py::arg("transfer"), py::arg("done"))
      .def("refuse_moves", [](SchedulerHarness& self, int count) { self.mover().refuses = count; }, py::arg("count"))
      .def_property_readonly("lanes", &SchedulerHarness::lanes)
      .def_property_readonly("host_rows", &SchedulerHarness::host_rows)
      .def_property_readonly("jobs", [](SchedulerHarness& self) {
        py::list all;
        for (const HarnessAttention::Job& job : self.attention().jobs) {
          all.append(py::make_tuple(job.slot, job.layer, job.step, job.position, job.blocks, job.cancelled));
        }
        return all;
      })
      .def("end_job", [](SchedulerHarness& self, int32_t slot, bool done) { self.attention().end(slot, done); }, py::arg("slot"), py::arg("done"))
      .def_readwrite("now", &SchedulerHarness::now)
      .def_property_readonly("host_pins", &SchedulerHarness::host_pins)
      .def_property_readonly("pinned_by_tier", &SchedulerHarness::pinned_by_tier)
      .def_property_readonly("stats", &SchedulerHarness::stats)
      .def("time_steps", &SchedulerHarness::time_steps, NoGil());

  m.def("json_extent", [](const py::buffer& document) {
    const py::buffer_info bytes = document.request();  // while it is held, a bytearray cannot be resized
    require(bytes.itemsize == 1 && bytes.ndim == 1, "bytes are needed");
    JsonExtent extent;
    {
      py::gil_scoped_release unlocked;
      extent = scan_json(static_cast<const char*>(bytes.ptr), static_cast<size_t>(bytes.size));
    }
    return std::make_pair(extent.values, extent.depth);
  }, py::arg("document"), py::pos_only());

  m.def("json_shape", [](const py::buffer& document, size_t long_size) {
    const py::buffer_info bytes = document.request();
    require(bytes.itemsize == 1 && bytes.ndim == 1, "bytes are needed");
    require(long_size > 0, "long_size must be positive");
    const char* data = static_cast<const char*>(bytes.ptr);
    JsonExtent extent;
    {
      py::gil_scoped_release unlocked;
      extent = scan_json(data, static_cast<size_t>(bytes.size), long_size);
    }
    py::list members;
    for (const JsonMember& member : extent.long_members) {
      members.append(py::make_tuple(py::bytes(data + member.name, member.name_size), member.size));
    }
    return py::make_tuple(extent.values, extent.depth, members);
  }, py::arg("document"), py::arg("long_size"), py::pos_only());
}

}  // namespace asyncengine
