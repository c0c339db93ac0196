// Host rows (host_rows.h): which sequences decode on the host, and which of them enter which lane of the next step.
//
// Where a sequence waits for blocks and the device has none, the last running one moves to the host, if that is predicted to
// pay: steps in flight that have rows of it end, its blocks are copied out, and it goes on there. When the device has room and
// nobody waits, the first of them goes back: as a sequence that was preempted does, whose prefix the host tier loads.
#include <algorithm>
#include <cassert>
#include <cmath>

#include "core/scheduler.h"

namespace asyncengine {
namespace {

// A sequence with fewer tokens to come stays where it is.
constexpr int32_t kLeastLeft = 8;
// Host rows over those that keep the workers busy if each came just when the one before it is done.
constexpr double kSurplusRows = 1.25;
// Steps that a host row takes for a layer, beside the time that attention takes: its query leaves in the midst of a step, and
// its result enters with the step that is planned next (measured: bench/log/memory.md).
constexpr double kStepsPerStage = 1.5;

}  // namespace

HybridConfig::Gain HybridConfig::gain(const StepCosts& costs, double attending_ns, int32_t rows, int64_t attended) const {
  const auto alone = static_cast<double>(costs.decode_ns(rows, attended));
  const auto together = static_cast<double>(costs.lanes_ns(rows, lanes, attended, exchange_ns));
  const double context = static_cast<double>(attended) / rows, layer_ns = attending_ns * context;
  const double tokens = std::min<double>(lanes, together * workers / (layer_ns * layers));
  const double steps_per_token = (layers + 1) * (kStepsPerStage + layer_ns / together);
  const double made = host_tokens > 0 ? std::min(tokens, static_cast<double>(host_tokens) / context / steps_per_token) : tokens;
  return {tokens * steps_per_token, (rows + made) / rows * alone / together - 1};
}

// A worker may still touch the sequence's host blocks.
bool Scheduler::attends(int32_t slot) const {
  return is_hosted(slot) && host_rows_[static_cast<size_t>(slot)].phase == HostPhase::kAttending &&
         attention_->poll(slot) == HostAttentionStatus::kPending;
}

// A worker does not let go of a row that is no more, though nothing of it is under way.
bool Scheduler::hangs(int32_t slot) const {
  const Slot& owner = slots_[static_cast<size_t>(slot)];
  return owner.state != SequenceState::kHosted && owner.in_flight == 0 && attends(slot);
}

bool Scheduler::moves_blocks() const {
  return copies_blocks() || std::ranges::any_of(hosted_, [&](int32_t slot) { return !hangs(slot); });
}

// ---- the lanes of a step -------------------------------------------------------------------------------------------------

// Whether the step has lanes must be known before its tokens are shared out.
void Scheduler::find_ready_rows(StepPlan& plan) {
  bool any = false;
  for (const int32_t slot : hosted_) {
    HostRow& row = host_rows_[static_cast<size_t>(slot)];
    if (slots_[static_cast<size_t>(slot)].state != SequenceState::kHosted) continue;
    if (row.phase == HostPhase::kAttending && attention_->poll(slot) == HostAttentionStatus::kDone) {
      row.phase = HostPhase::kReady;
      host_rows_backoff_.succeeded();
    }
    any |= row.phase == HostPhase::kReady && !(row.leaves && row.stage == 0);
  }
  if (!any) return;
  plan.num_lanes = config_.hybrid.lanes;
  token_budget_ -= plan.num_lanes;
}

void Scheduler::schedule_lanes(StepPlan& plan) {
  const auto lanes = static_cast<size_t>(plan.num_lanes);
  plan.lanes.assign(lanes_used_.size() * lanes, LaneEntry{});
  std::ranges::fill(lanes_used_, 0);
  const size_t count = hosted_.size(), first = first_hosted_ < count ? first_hosted_ : 0;
  bool entered = false;
  for (size_t k = 0; k < count; ++k) {
    const int32_t slot = hosted_[first + k < count ? first + k : first + k - count];
    entered |= enter_lane(slots_[static_cast<size_t>(slot)], plan);
  }
  first_hosted_ = first + 1;  // everybody is first at some time, so nobody starves for want of a lane
  if (!entered) {
    plan.lanes.clear();
    plan.num_lanes = 0;
    return;
  }
  for (size_t stage = 0; stage + 1 < lanes_used_.size(); ++stage) {  // in the order in which the device fills mailboxes
    for (size_t lane = 0; lane < static_cast<size_t>(lanes_used_[stage]); ++lane) {
      const LaneEntry& entry = plan.lanes[stage * lanes + lane];
      attention_->post({entry.slot, static_cast<int32_t>(stage), static_cast<uint32_t>(plan.step), entry.position,
                        host_tables_.blocks(entry.slot).data()});
    }
  }
}

bool Scheduler::enter_lane(Slot& slot, StepPlan& plan) {
  const int32_t i = index(slot), last_stage = config_.hybrid.layers;
  HostRow& row = host_rows_[static_cast<size_t>(i)];
  if (slot.state != SequenceState::kHosted || row.phase != HostPhase::kReady) return false;
  const bool begins = row.stage == 0, ends = row.stage == last_stage;
  if (begins && (row.leaves || !slot.wants_more())) return false;
  int32_t& used = lanes_used_[static_cast<size_t>(row.stage)];
  if (used == plan.num_lanes) return false;
  if (begins && slot.computed / config_.block_size == host_tables_.length(i)) {
    const int32_t host = blocks_.take_host_block(/*even_copies=*/true);
    row.leaves = host < 0;
    if (row.leaves) return false;
    host_tables_.append(i, host);
  }
  const int32_t words = ends && slot.results ? slot.sequence->request->extras.result_words : 0;
  if (words > config_.max_result_words - plan.num_result_words) {
    results_wanted_ = std::max(results_wanted_, words);
    return false;
  }
  plan.lanes[static_cast<size_t>(row.stage * plan.num_lanes + used)] = {i, slot.computed};
  ++slot.in_flight;
  if (ends) add_lane_row(slot, used, plan);
  ++used;
  ++row.stage;
  row.phase = ends ? HostPhase::kSampling : HostPhase::kAttending;
  return true;
}

void Scheduler::add_lane_row(Slot& slot, int32_t lane, StepPlan& plan) {
  PlanRow& planned = plan.rows.emplace_back(slot.sequence, index(slot), 1, slot.computed, 1, 0, 1, true, bool{slot.extras}, /*plain=*/false,
                                            static_cast<int8_t>(lane));
  ++plan.num_lane_rows;
  ++slot.computed;
  ++slot.pending;
  ++plan.num_samples;
  plan.needs |= slot.needs;
  if (slot.extras) add_extras(slot, planned, plan);
}

// A step is over. The rows that end a token are among the plan's rows, which count as in flight by themselves.
void Scheduler::lanes_retired(const StepPlan& plan) {
  for (size_t i = 0; i < plan.lanes.size(); ++i) {
    const LaneEntry& entry = plan.lanes[i];
    if (entry.slot < 0) continue;
    const auto stage = static_cast<int32_t>(i) / plan.num_lanes;
    Slot& slot = slots_[static_cast<size_t>(entry.slot)];
    HostRow& row = host_rows_[static_cast<size_t>(entry.slot)];
    if (stage < config_.hybrid.layers) {
      --slot.in_flight;
      row.since_ns = awake_ns_;
      continue;
    }
    row.phase = HostPhase::kReady;
    row.stage = 0;
  }
}

// ---- who decodes where ---------------------------------------------------------------------------------------------------

// One sequence moves at a time.
void Scheduler::place_sequences(const StepPlan& plan) {
  if (!hosted_.empty()) move_back();
  const auto drains = [&](int32_t slot) { return host_rows_[static_cast<size_t>(slot)].phase == HostPhase::kDraining; };
  if (blocked_ == nullptr || free_slots_.empty() || blocks_coming() > 0 || host_rows_backoff_.paused(awake_ns_) ||
      std::ranges::any_of(hosted_, [&](int32_t slot) { return drains(slot) || hangs(slot); }) || !hybrid_pays(plan)) {
    return;
  }
  int32_t promised = 0;
  for (const int32_t slot : hosted_) promised += blocks_.blocks_for(slots_[static_cast<size_t>(slot)].max_total);
  const auto last = std::find_if(running_.rbegin(), running_.rend(), [&](const Slot* slot) { return may_be_hosted(*slot, promised); });
  if (last != running_.rend()) move_out(**last);
}

// What the workers could add to the step that is planned, and what lanes cost it. Where costs are not known it pays.
bool Scheduler::hybrid_pays(const StepPlan& plan) {
  const HybridConfig& hybrid = config_.hybrid;
  const int32_t rows = plan.num_decode_rows;
  if (rows == 0) return false;
  double busy_rows = hybrid.lanes * (hybrid.layers + 1) * kStepsPerStage;
  if (config_.costs.known() && hybrid.attend_ns > 0) {
    // As soon as there is enough of it, what was measured while this engine ran.
    const HostAttentionTimes times = attention_->times();
    const double attend_ns = times.tokens < HybridConfig::kEnoughTokens
                                 ? hybrid.attend_ns
                                 : static_cast<double>(times.busy_ns) / static_cast<double>(times.tokens);
    const HybridConfig::Gain gain = hybrid.gain(config_.costs, attend_ns, rows, plan.decode_attended);
    if (gain.share < hybrid.min_gain) return false;
    busy_rows = gain.busy_rows;
  }
  const auto most = hybrid.max_rows > 0 ? hybrid.max_rows : static_cast<int32_t>(std::ceil(kSurplusRows * busy_rows));
  return static_cast<int32_t>(hosted_.size()) < most;
}

// A host row's token takes as many steps as the model has layers, or more: not where its class has a target below that. All
// that it may grow to has room on the host, beside what is promised to others.
bool Scheduler::may_be_hosted(const Slot& slot, int32_t promised) const {
  const RequestExtras& extras = slot.sequence->request->extras;
  if (slot.state != SequenceState::kRunning || !slot.decodes() || slot.max_total - slot.total() < kLeastLeft ||
      (slot.needs & kNeedMask) != 0 || slot.step_tokens > 1 || extras.score_from >= 0) {
    return false;
  }
  const int64_t target = config_.costs.known() ? config_.targets.of(slot.sequence->request->priority) : 0;
  if (target > 0 && config_.costs.decode_ns(1, slot.total()) * (config_.hybrid.layers + 1) > target) return false;
  if (!tier_->can_store(blocks_.blocks_for(slot.total()))) return false;
  return promised + blocks_.blocks_for(slot.max_total) <= blocks_.num_host_blocks();
}

void Scheduler::move_out(Slot& slot) {
  Sequence& sequence = *slot.sequence;
  slot.state = sequence.state = SequenceState::kHosted;
  running_changed_ = holders_changed_ = true;
  host_rows_[static_cast<size_t>(index(slot))] = {.phase = HostPhase::kDraining};
  hosted_.push_back(index(slot));
  for (const int32_t block : tables_.blocks(index(slot))) sequence.blocks_coming += blocks_.ref_count(block) == 1;
  blocks_coming_ += sequence.blocks_coming;
}

// The first in order of service, if it has room and worth there: it leaves between two tokens.
void Scheduler::move_back() {
  if (!waiting_.empty() || tier_->storing() || tier_->num_loading() > 0) return;
  const Slot* first = nullptr;
  for (const int32_t i : hosted_) {
    const HostRow& row = host_rows_[static_cast<size_t>(i)];
    const Slot& slot = slots_[static_cast<size_t>(i)];
    if (slot.state == SequenceState::kFinished) continue;  // perhaps a worker hangs in it
    if (row.leaves || row.phase < HostPhase::kReady || slot.state != SequenceState::kHosted) return;  // others are on their way
    if (slot.max_total - slot.total() < kLeastLeft) continue;
    if (first == nullptr || runs_before(slot.sequence, first->sequence)) first = &slot;
  }
  if (first == nullptr) return;
  // As much again is left free for those that run: it shall not be preempted at once.
  const int32_t wanted = blocks_.blocks_for(first->total()) + static_cast<int32_t>(running_.size()) + blocks_.num_blocks() / 16;
  if (blocks_.num_free() > wanted) host_rows_[static_cast<size_t>(index(*first))].leaves = true;
}

// ---- the life of a host row, between steps -----------------------------------------------------------------------------------

bool Scheduler::advance_host_rows(Outbox& outbox, int64_t now_ns) {
  bool moved = false;
  for (size_t k = hosted_.size(); k-- > 0;) {
    if (k < hosted_.size()) moved |= advance_host_row(slots_[static_cast<size_t>(hosted_[k])], outbox, now_ns);
  }
  compact_running();  // others of a request that has failed ran
  return moved;
}

bool Scheduler::advance_host_row(Slot& slot, Outbox& outbox, int64_t now_ns) {
  Sequence& sequence = *slot.sequence;
  HostRow& row = host_rows_[static_cast<size_t>(index(slot))];
  if (slot.state != SequenceState::kHosted) {  // it has ended, or goes back
    if (in_flight(sequence)) return false;
    settle(sequence, &outbox);
    return true;
  }
  if (row.phase == HostPhase::kDraining && slot.in_flight == 0) {
    start_storing(slot);
    return true;
  }
  if (row.phase == HostPhase::kReady && row.stage == 0 && row.leaves && slot.in_flight == 0) {
    leave_host(slot);
    return true;
  }
  if (row.phase != HostPhase::kAttending) return false;
  const HostAttentionStatus status = attention_->poll(index(slot));
  if (status == HostAttentionStatus::kDone) return false;
  // A worker can do nothing before the step has filled the mailbox.
  const bool late = slot.in_flight == 0 && awake_ns_ - row.since_ns >= config_.hybrid.job_timeout_ns;
  if (status == HostAttentionStatus::kPending && !late) return false;
  ++stats_.failed_host_rows;
  host_rows_backoff_.failed(awake_ns_);
  if (status == HostAttentionStatus::kFailed) {
    leave_host(slot);  // what it had is computed once more
    return true;
  }
  // The worker may write to the blocks of the sequence for ever: they come back when it ends.
  outbox.filling().step_error += "attention on the host did not finish within " + std::to_string(config_.hybrid.job_timeout_ns / 1'000'000) + " ms\n";
  fail(sequence, FinishReason::kStepFailed, outbox, now_ns);
  return true;
}

void Scheduler::start_storing(Slot& slot) {
  Sequence& sequence = *slot.sequence;
  sequence.tokens.settle(slot.tail, published(slot));
  const auto blocks = tables_.blocks(index(slot)).first(static_cast<size_t>(blocks_.blocks_for(slot.computed)));
  if (!tier_->store(sequence, blocks)) return resume(slot);
  sequence.loading = true;
  host_rows_[static_cast<size_t>(index(slot))].phase = HostPhase::kStoring;
}

void Scheduler::take_stored(Sequence& sequence, std::span<const int32_t> hosts, Outbox& outbox) {
  Slot& slot = slot_of(sequence);
  const int32_t i = index(slot);
  sequence.loading = false;
  if (sequence.state == SequenceState::kFinished) {
    for (const int32_t host : hosts) blocks_.drop_host_block(host);
    return settle(sequence, &outbox);
  }
  if (hosts.empty()) return resume(slot);
  for (const int32_t host : hosts) host_tables_.append(i, host);
  blocks_coming_ -= std::exchange(sequence.blocks_coming, 0);
  release_blocks(i);
  slot.capacity = 0;
  slot.forked = false;
  host_rows_[static_cast<size_t>(i)] = {.phase = HostPhase::kReady};
  ++stats_.moved_to_host;
}

// It stays on the device after all.
void Scheduler::resume(Slot& slot) {
  Sequence& sequence = *slot.sequence;
  compact_running();
  host_rows_[static_cast<size_t>(index(slot))] = {};
  std::erase(hosted_, index(slot));
  blocks_coming_ -= std::exchange(sequence.blocks_coming, 0);
  slot.state = sequence.state = SequenceState::kRunning;
  holders_changed_ = true;
  running_.insert(std::upper_bound(running_.begin(), running_.end(), &slot,
                                   [](const Slot* a, const Slot* b) { return runs_before(a->sequence, b->sequence); }),
                  &slot);
}

void Scheduler::leave_host(Slot& slot) {
  Sequence& sequence = *slot.sequence;
  ++stats_.moved_from_host;
  retire(sequence, SequenceState::kPreempting);
  if (!in_flight(sequence)) settle(sequence, nullptr);
}

// Full blocks that it made there may be found by others from now on, and by itself.
void Scheduler::release_host_blocks(Slot& slot) {
  const int32_t i = index(slot), size = config_.block_size;
  Sequence& sequence = *slot.sequence;
  const bool sound = sequence.finish != FinishReason::kFailed && sequence.finish != FinishReason::kStepFailed;
  const int32_t full = sound ? std::min(slot.computed / size, host_tables_.length(i)) : 0;
  if (full > 0) sequence.tokens.settle(slot.tail, published(slot));
  Chain chain = slot.prefix();
  BlockKey key = blocks_.keeps_names() ? tier_->disk()->root(sequence.request->salt) : BlockKey{};
  for (int32_t b = 0; b < full; ++b) {
    const int32_t* tokens = sequence.tokens.at(b * size);
    BlockName name{key, key};
    if (blocks_.keeps_names()) name.key = key = next_key(key, std::span(tokens, static_cast<size_t>(size)));
    const int32_t host = host_tables_.at(i, b);
    if (b < slot.published_end / size) continue;
    if (blocks_.host_holds(host)) {
      chain = blocks_.chain_of(blocks_.id_of_host(host));
      continue;
    }
    chain = blocks_.enter_host(host, chain, tokens, name);
    if (!blocks_.host_holds(host)) {  // somebody else's is known, and this one is free
      host_tables_.replace(i, b, -1);
      continue;
    }
    blocks_.pin_host(host);
    tier_->entered(host);
  }
  const auto held = host_tables_.blocks(i);
  for (auto host = held.rbegin(); host != held.rend(); ++host) {
    if (*host >= 0) blocks_.drop_host_block(*host);
  }
  host_tables_.clear(i);
  host_rows_[static_cast<size_t>(i)] = {};
  std::erase(hosted_, i);
}

}  // namespace asyncengine
