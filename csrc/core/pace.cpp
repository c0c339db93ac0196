#include "core/pace.h"

#include <algorithm>
#include <limits>

namespace asyncengine {
namespace {

constexpr int32_t kLeastChunk = 16;  // the first prompt in a step gets so much however long it takes: prompts make progress
constexpr size_t kMostSharers = 4;   // prompts that a step's time is divided by at most

}  // namespace

Pace::Pace(const SchedulerConfig& config, const Roster& roster)
    : roster_(roster),
      costs_(config.costs),
      targets_(config.targets),
      token_buckets_(config.token_buckets),
      exchange_ns_(config.hybrid.exchange_ns) {
  if (costs_.known() && !targets_.of_class.empty()) slot_targets_.resize(static_cast<size_t>(config.max_num_seqs));
}

void Pace::took_slot(const Slot& slot) {
  if (slot_targets_.empty()) return;
  slot_targets_[static_cast<size_t>(roster_.index(slot))] = targets_.of(slot.sequence->request->priority);
}

void Pace::begin(const StepPlan& plan, int32_t prefilling) {
  target_ns_ = 0;
  sharers_ = 0;
  chunked_ = false;
  if (!costs_.known() || !targets_.any() || plan.num_decode_rows == 0) return;
  int64_t strictest = targets_.ns;
  if (!slot_targets_.empty()) {
    strictest = std::numeric_limits<int64_t>::max();
    for (const PlanRow& row : plan.rows) {
      const int64_t target = slot_targets_[static_cast<size_t>(row.slot)];
      if (target > 0) strictest = std::min(strictest, target);
    }
    if (strictest == std::numeric_limits<int64_t>::max()) return;
  }
  const FairQueue& waiting = roster_.waiting();
  const bool blocked = waiting.empty() || &waiting.front() == roster_.blocked().sequence;
  const size_t coming = blocked ? 0 : std::min(waiting.size(), roster_.num_free_slots());
  target_ns_ = strictest;
  sharers_ = static_cast<int32_t>(std::clamp<size_t>(static_cast<size_t>(prefilling) + coming, 1, kMostSharers));
}

bool Pace::has_time(int32_t context_len, const StepPlan& plan) const {
  return target_ns_ == 0 || !chunked_ || predict(kLeastChunk, context_len, plan) <= target_ns_;
}

void Pace::add_chunk(int32_t query_len, int32_t context_len, StepPlan& plan) {
  if (costs_.known()) plan.chunks_ns += costs_.attention_ns(query_len, context_len);
  chunked_ = true;
}

// Nanoseconds of the step with one chunk more, or with 0 as it is.
int64_t Pace::predict(int32_t chunk, int64_t context_len, const StepPlan& plan) const {
  const int32_t host_tokens = plan.host_rows.num_tokens();
  const double exchange_ns = host_tokens > 0 ? exchange_ns_ : 0;
  if (chunk == 0 && !plan.has_chunks()) {
    return host_tokens > 0 ? costs_.hybrid_ns(plan.num_decode_rows, host_tokens, plan.decode_attended, exchange_ns)
                           : costs_.decode_ns(plan.num_decode_rows, plan.decode_attended);
  }
  int32_t tokens = plan.num_tokens + host_tokens + chunk;
  const auto bucket = std::ranges::lower_bound(token_buckets_, tokens);
  if (bucket != token_buckets_.end()) tokens = *bucket;
  const double chunk_ns = chunk == 0 ? 0 : costs_.attention_ns(chunk, context_len);
  return costs_.mixed_ns(tokens, plan.num_decode_rows, plan.decode_attended, plan.chunks_ns + chunk_ns) +
         static_cast<int64_t>(exchange_ns);
}

void Pace::took(const StepPlan& plan, int64_t ns) {
  if (plan.has_chunks()) {
    costs_.learn_mixed(plan.predicted_ns, plan.chunks_ns, ns);
  } else if (plan.host_rows.any()) {
    costs_.learn_hybrid(plan.predicted_ns, ns);
  } else if (const Placement* placement = roster_.placement(); placement == nullptr || placement->num_rows() == 0) {
    costs_.learn_decode(plan.predicted_ns, ns);  // attention on the host slows down steps that no host row is in, too
  }
}

int32_t Pace::chunk(int32_t context_len, int32_t most, const StepPlan& plan) {
  const int64_t spent = predict(plan);
  const int64_t limit = spent + (target_ns_ - spent) / std::max(sharers_--, 1);
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
