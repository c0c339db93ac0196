// Scheduler, packer and prefix cache without the step thread, for property tests and the core benchmark.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/batch_packer.h"
#include "core/scheduler.h"
#include "step_loop/step_loop.h"

namespace asyncengine {

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
      : block_size_(config.block_size),
        scheduler_(config),
        outbox_(1024),
        staging_(scheduler_.limits().max_bytes()),
        records_(static_cast<size_t>(scheduler_.limits().max_result_words)) {
    for (int i = 0; i < steps_in_flight; ++i) spare_.push_back(std::make_unique<StepPlan>());
    if (config.num_host_blocks == 0) return;
    mover_ = std::make_unique<HarnessMover>(config.num_host_blocks);
    if (config.num_host_states > 0) state_mover_ = std::make_unique<HarnessMover>(config.num_host_states);
    scheduler_.move_blocks_with(*mover_, nullptr, state_mover_.get());
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
  HarnessMover& mover(bool states) {
    const auto& mover = states ? state_mover_ : mover_;
    require(mover != nullptr, "there is no host tier");
    return *mover;
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
  // nothing can run. Holes of block tables are -1.
  py::object schedule() {
    if (spare_.empty()) return py::none();
    StepPlan& plan = *spare_.back();
    plan.step = ++step_;
    scheduler_.schedule(plan, now);
    if (plan.empty()) return py::none();
    py::list rows, copies;
    for (const PlanRow& row : plan.rows) {
      const auto all = scheduler_.tables().blocks(row.slot);
      std::vector<int32_t> blocks(all.begin(), all.end());
      std::fill_n(blocks.begin(), scheduler_.tables().first_held(row.slot), -1);
      rows.append(py::make_tuple(row.sequence->request->id, row.sequence->index, row.query_len, row.context_len,
                                 row.num_appends > 0, row.from_device, std::move(blocks)));
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
  // The bytes of the step that was scheduled last.
  py::bytes step_input() const { return {reinterpret_cast<const char*>(staging_.data()), packed_}; }
  // Copies of state slots in that step: (source or -1, target).
  std::vector<std::pair<int32_t, int32_t>> state_copies() const {
    std::vector<std::pair<int32_t, int32_t>> all;
    for (const BlockCopy& copy : StepInputView(staging_.data()).state_copies()) all.emplace_back(copy.source, copy.target);
    return all;
  }
  std::vector<int32_t> slots() const {
    std::vector<int32_t> all;
    for (const StepInputRow& row : StepInputView(staging_.data()).rows()) all.push_back(row.slot);
    return all;
  }
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
    const int64_t start = steady_now_ns();
    for (int i = 0; i < steps; ++i) {
      plan.step = ++step_;
      scheduler_.schedule(plan, 1);
      pack_step(plan, scheduler_.tables(), staging_);
      if (plan.num_result_words > words_written_) [[unlikely]]
        write_records(plan);
      scheduler_.commit(plan, {tokens.data(), records_.data()}, outbox_, 2);
      plan.clear();
      outbox_.filling().clear();
    }
    return static_cast<double>(steady_now_ns() - start) / steps;
  }

 private:
  // A log probability of the chosen token for each sample. While the rows stay the same, later steps find them in place.
  void write_records(const StepPlan& plan) {
    words_written_ = plan.num_result_words;
    for (const PlanRow& row : plan.rows) {
      const int32_t words = row.sequence->request->extras.result_words;
      for (int32_t i = 0; i < row.num_samples && words >= 4; ++i) {
        const std::span region(records_.data() + row.result_offset + i * words, static_cast<size_t>(words));
        std::ranges::copy(std::array{1, 1, 0}, RecordWriter(region).add(RecordKind::kLogprobs, 3).begin());
      }
    }
  }

  int32_t block_size_;
  std::unique_ptr<HarnessMover> mover_, state_mover_;  // of a host tier
  std::unique_ptr<HarnessAttention> attention_;  // of host rows
  Scheduler scheduler_;
  Outbox outbox_;
  std::vector<std::byte> staging_;
  std::vector<int32_t> records_;  // empty ones, except of timed steps
  int32_t words_written_ = 0;     // of them
  size_t packed_ = 0;             // bytes of the last step
  std::vector<std::unique_ptr<StepPlan>> spare_;
  std::deque<std::unique_ptr<StepPlan>> flight_;
  Tenants tenants_;
  std::unordered_map<uint64_t, std::unique_ptr<Request>> requests_;
  uint64_t step_ = 0, sequence_number_ = 0;
};

}  // namespace asyncengine
