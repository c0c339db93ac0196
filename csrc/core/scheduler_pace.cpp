// Scheduler: how much of a prompt fits into the time of a step in which others decode.
#include <algorithm>
#include <limits>

#include "core/scheduler.h"

namespace asyncengine {
namespace {

constexpr int32_t kLeastChunk = 16;  // the first prompt in a step gets so much however long it takes: prompts make progress
constexpr size_t kMostSharers = 4;   // prompts that a step's time is divided by at most

}  // namespace

// The decode rows are planned. The strictest of their targets is the step's.
void Scheduler::set_pace(const StepPlan& plan) {
  pace_ = {};
  if (!config_.costs.known() || !config_.targets.any() || plan.num_decode_rows == 0) return;
  int64_t strictest = config_.targets.ns;
  if (!slot_targets_.empty()) {
    strictest = std::numeric_limits<int64_t>::max();
    for (const PlanRow& row : plan.rows) {
      const int64_t target = slot_targets_[static_cast<size_t>(row.slot)];
      if (target > 0) strictest = std::min(strictest, target);
    }
    if (strictest == std::numeric_limits<int64_t>::max()) return;
  }
  const bool blocked = waiting_.empty() || &waiting_.front() == blocked_;
  const size_t coming = blocked ? 0 : std::min(waiting_.size(), free_slots_.size());
  const size_t sharers = std::clamp<size_t>(static_cast<size_t>(prefilling_) + coming, 1, kMostSharers);
  pace_ = {strictest, static_cast<int32_t>(sharers), /*chunked=*/false};
}

// Whether another prompt, of which so much is computed, may have a chunk in this step.
bool Scheduler::has_time(int32_t context_len, const StepPlan& plan) const {
  return pace_.target_ns == 0 || !pace_.chunked || predict(kLeastChunk, context_len, plan) <= pace_.target_ns;
}

// Nanoseconds of the step with one chunk more, or with 0 as it is.
int64_t Scheduler::predict(int32_t chunk, int64_t context_len, const StepPlan& plan) const {
  const StepCosts& costs = config_.costs;
  const double exchange_ns = plan.num_lanes > 0 ? config_.hybrid.exchange_ns : 0;
  if (chunk == 0 && !plan.has_chunks()) {
    return plan.num_lanes > 0 ? costs.lanes_ns(plan.num_decode_rows, plan.num_lanes, plan.decode_attended, exchange_ns)
                              : costs.decode_ns(plan.num_decode_rows, plan.decode_attended);
  }
  int32_t tokens = plan.num_tokens + plan.num_lanes + chunk;
  const auto bucket = std::ranges::lower_bound(config_.token_buckets, tokens);
  if (bucket != config_.token_buckets.end()) tokens = *bucket;
  const double chunk_ns = chunk == 0 ? 0 : costs.attention_ns(chunk, context_len);
  return costs.mixed_ns(tokens, plan.num_decode_rows, plan.decode_attended, plan.chunks_ns + chunk_ns) + static_cast<int64_t>(exchange_ns);
}

void Scheduler::took(const StepPlan& plan, int64_t ns) {
  if (plan.has_chunks()) {
    config_.costs.learn_mixed(plan.predicted_ns, plan.chunks_ns, ns);
  } else if (plan.num_lanes > 0) {
    config_.costs.learn_lanes(plan.predicted_ns, ns);
  } else if (hosted_.empty()) {  // attention on the host slows steps down that have no lanes, too
    config_.costs.learn_decode(plan.predicted_ns, ns);
  }
}

// At most `most`, and as much as its share of the time that is left allows.
int32_t Scheduler::paced_chunk(int32_t context_len, int32_t most, const StepPlan& plan) {
  const int64_t spent = predict(0, 0, plan);
  const int64_t limit = spent + (pace_.target_ns - spent) / std::max(pace_.sharers--, 1);
  int32_t low = std::min(kLeastChunk, most), high = most;
  while (low < high) {  // the longest that is in time; predictions grow with it
    const int32_t middle = high - (high - low) / 2;
    if (predict(middle, context_len, plan) <= limit) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace asyncengine
