// A scheduler on one thread, whose caller plays executor and event loop.
#pragma once

#include <map>
#include <memory>
#include <random>
#include <vector>

#include "core/batch_packer.h"
#include "core/scheduler.h"

namespace asyncengine::testing {

class Bench {
 public:
  Bench(const SchedulerConfig& config, int steps_in_flight) : scheduler(config), outbox(1024), block_size_(config.block_size) {
    staging.resize(scheduler.limits().max_bytes());
    records_.resize(static_cast<size_t>(config.max_result_words));
    flight_.reserve(static_cast<size_t>(steps_in_flight));
    for (int i = 0; i < steps_in_flight; ++i) {
      spare_.push_back(std::make_unique<StepPlan>());
      spare_.back()->reserve(config.max_num_seqs);
    }
  }

  Request& add(const RequestSpec& spec, int64_t order = 0) {
    auto request = make_request(spec, order, spec.id, block_size_, tenants.find(spec.tenant));
    Tenants::enter(request->tenant);
    Request& raw = *request;
    requests[spec.id] = std::move(request);
    scheduler.add(&raw);
    return raw;
  }
  void abort(Request& request, int32_t index = -1) {
    for (Sequence& sequence : request.sequences) sequence.abort_requested = index < 0 || sequence.index == index;
    scheduler.abort(&request, outbox);
    scheduler.after_aborts();
    collect();
  }
  // Schedules a step and packs it; null if there is none or enough are in flight.
  const StepPlan* launch() {
    if (spare_.empty()) return nullptr;
    StepPlan& plan = *spare_.back();
    plan.step = ++step_;
    scheduler.schedule(plan, 1);
    if (plan.empty()) return nullptr;
    flight_.push_back(std::move(spare_.back()));
    spare_.pop_back();
    return flight_.back().get();
  }
  size_t pack() { return pack_step(*flight_.back(), scheduler.tables(), staging); }
  // Retires the oldest step with `token` for every sample.
  bool commit(int32_t token) {
    if (flight_.empty()) return false;
    StepPlan& plan = *flight_.front();
    tokens_.assign(static_cast<size_t>(plan.num_samples), token);
    scheduler.commit(plan, {tokens_.data(), records_.data()}, outbox, 2);
    plan.clear();
    spare_.push_back(std::move(flight_.front()));
    flight_.erase(flight_.begin());
    return true;
  }
  // Retires it as one that failed.
  bool fail() {
    if (flight_.empty()) return false;
    scheduler.fail_step(*flight_.front(), outbox, 2);
    flight_.front()->clear();
    spare_.push_back(std::move(flight_.front()));
    flight_.erase(flight_.begin());
    return true;
  }
  // Frees what is released. Not part of the step path: the event loop does it.
  void collect() {
    for (const Request* request : outbox.filling().released) {
      tenants.leave(request->tenant);
      requests.erase(request->id);
    }
    outbox.filling().clear();
  }

  Scheduler scheduler;
  Outbox outbox;
  std::vector<std::byte> staging;
  Tenants tenants;
  std::map<uint64_t, std::unique_ptr<Request>> requests;

 private:
  int32_t block_size_;
  std::vector<std::unique_ptr<StepPlan>> spare_;
  std::vector<std::unique_ptr<StepPlan>> flight_;  // oldest first
  std::vector<int32_t> tokens_;
  std::vector<int32_t> records_;  // none
  uint64_t step_ = 0;
};

inline RequestSpec make_spec(uint64_t id, int32_t prompt_len, int32_t max_tokens, int32_t n = 1, int32_t first_token = 0) {
  RequestSpec spec;
  spec.id = id;
  for (int32_t i = 0; i < prompt_len; ++i) spec.prompt.push_back((first_token + i) % 50);
  spec.max_tokens = max_tokens;
  spec.n = n;
  spec.sampling = {0.5f, 0.25f, 0.125f, static_cast<int32_t>(id), 0xABCDEF0123456789 + id};
  return spec;
}

}  // namespace asyncengine::testing
