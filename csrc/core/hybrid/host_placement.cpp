#include "core/hybrid/host_placement.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <string>

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
  const auto together = static_cast<double>(costs.hybrid_ns(rows, lanes, attended, exchange_ns));
  const double context = static_cast<double>(attended) / rows, layer_ns = attending_ns * context;
  const double tokens = std::min<double>(lanes, together * workers / (layer_ns * layers));
  const double steps_per_token = (layers + 1) * (kStepsPerStage + layer_ns / together);
  const double made = host_tokens > 0 ? std::min(tokens, static_cast<double>(host_tokens) / context / steps_per_token) : tokens;
  return {tokens * steps_per_token, (rows + made) / rows * alone / together - 1};
}

HostPlacement::HostPlacement(const SchedulerConfig& config, Roster& roster, const Pace& pace, Extras& extras,
                             HostAttention& attention)
    : config_(config.hybrid),
      block_size_(config.block_size),
      roster_(roster),
      blocks_(roster.blocks()),
      tier_(*roster.tier()),
      pace_(pace),
      extras_(extras),
      attention_(attention),
      rows_(static_cast<size_t>(config.max_num_seqs)),
      tables_(config.max_num_seqs, config.max_blocks_per_sequence()),
      lanes_used_(static_cast<size_t>(config.hybrid.layers) + 1) {
  hosted_.reserve(static_cast<size_t>(config.max_num_seqs));
}

// The sequence is a host row: a worker may still touch its host blocks.
bool HostPlacement::in_use(int32_t slot) const {
  return host_row(slot).phase == Phase::kAttending && attention_.poll(slot) == HostAttentionStatus::kPending;
}

void HostPlacement::cancel(int32_t slot) {
  if (in_use(slot)) attention_.cancel(slot);
}

// A worker does not let go of a row that is no more, though nothing of it is under way.
bool HostPlacement::hangs(int32_t slot) const {
  const Slot& owner = roster_.slot(slot);
  return owner.state != SequenceState::kHosted && owner.in_flight == 0 && in_use(slot);
}

bool HostPlacement::busy() const {
  return std::ranges::any_of(hosted_, [&](int32_t slot) { return !hangs(slot); });
}

void HostPlacement::report(Stats& stats) const {
  const HostAttentionTimes times = attention_.times();
  stats.num_host_rows = num_rows();
  stats.host_row_tokens = tokens_;
  stats.moved_to_host = moved_to_host_;
  stats.moved_from_host = moved_from_host_;
  stats.failed_host_rows = failed_rows_;
  stats.host_attention_ns = times.busy_ns;
  stats.host_attention_tokens = times.tokens;
}

std::vector<HostRowView> HostPlacement::rows() const {
  std::vector<HostRowView> views;
  for (const int32_t slot : hosted_) views.push_back({&roster_.slot(slot), host_row(slot), tables_.blocks(slot)});
  return views;
}

// ---- the lanes of a step -------------------------------------------------------------------------------------------

// The step must know its lanes before its tokens are shared out.
int32_t HostPlacement::begin(StepPlan& plan) {
  bool any = false;
  for (const int32_t slot : hosted_) {
    if (roster_.slot(slot).state != SequenceState::kHosted) continue;
    HostRow& its = host_row(slot);
    if (its.phase == Phase::kAttending && attention_.poll(slot) == HostAttentionStatus::kDone) {
      its.phase = Phase::kReady;
      backoff_.succeeded();
    }
    any |= its.phase == Phase::kReady && !(its.leaves && its.stage == 0);
  }
  if (any) plan.host_rows.num_lanes = config_.lanes;
  return plan.host_rows.num_lanes;
}

void HostPlacement::end(StepPlan& plan) {
  if (plan.host_rows.any()) fill_lanes(plan);
  place_sequences(plan);
  roster_.compact();
}

void HostPlacement::fill_lanes(StepPlan& plan) {
  const auto lanes = static_cast<size_t>(plan.host_rows.num_lanes);
  plan.host_rows.entries.assign(lanes_used_.size() * lanes, HostRowEntry{});
  std::ranges::fill(lanes_used_, 0);
  const size_t count = hosted_.size(), first = first_ < count ? first_ : 0;
  bool entered = false;
  for (size_t k = 0; k < count; ++k) {
    const int32_t slot = hosted_[first + k < count ? first + k : first + k - count];
    entered |= enter_lane(roster_.slot(slot), plan);
  }
  first_ = first + 1;  // everybody is first at some time, so nobody starves for want of a lane
  if (!entered) {
    plan.host_rows.entries.clear();
    plan.host_rows.num_lanes = 0;
    return;
  }
  for (size_t stage = 0; stage + 1 < lanes_used_.size(); ++stage) {  // in the order in which the device fills mailboxes
    for (size_t lane = 0; lane < static_cast<size_t>(lanes_used_[stage]); ++lane) {
      const HostRowEntry& entry = plan.host_rows.entries[stage * lanes + lane];
      attention_.post({entry.slot, static_cast<int32_t>(stage), static_cast<uint32_t>(plan.step), entry.position,
                       tables_.blocks(entry.slot).data()});
    }
  }
}

bool HostPlacement::enter_lane(Slot& slot, StepPlan& plan) {
  const int32_t i = roster_.index(slot), last_stage = config_.layers;
  HostRow& row = host_row(i);
  if (slot.state != SequenceState::kHosted || row.phase != Phase::kReady) return false;
  const bool begins = row.stage == 0, ends = row.stage == last_stage;
  if (begins && (row.leaves || !slot.wants_more())) return false;
  int32_t& used = lanes_used_[static_cast<size_t>(row.stage)];
  if (used == plan.host_rows.num_lanes) return false;
  if (begins && slot.computed / block_size_ == tables_.length(i)) {
    const int32_t host = blocks_.take_host_block(/*even_copies=*/true);
    row.leaves = host < 0;
    if (row.leaves) return false;
    tables_.append(i, host);
  }
  const int32_t words = ends && slot.results ? slot.sequence->request->extras.result_words : 0;
  if (!extras_.fits_records(words, plan)) return false;
  plan.host_rows.entries[static_cast<size_t>(row.stage * plan.host_rows.num_lanes + used)] = {i, slot.computed};
  ++slot.in_flight;
  if (ends) add_row(slot, used, plan);
  ++used;
  ++row.stage;
  row.phase = ends ? Phase::kSampling : Phase::kAttending;
  return true;
}

void HostPlacement::add_row(Slot& slot, int32_t lane, StepPlan& plan) {
  PlanRow& planned = plan.rows.emplace_back(slot.sequence, roster_.index(slot), 1, slot.computed, 1, 0, 1, true, bool{slot.extras},
                                            /*plain=*/false, static_cast<int8_t>(lane));
  ++plan.host_rows.num_rows;
  ++slot.computed;
  ++slot.pending;
  ++plan.num_samples;
  plan.needs |= slot.needs;
  if (slot.extras) extras_.add(slot, planned, plan);
}

// The rows that end a token are among the plan's rows, which count as in flight by themselves.
void HostPlacement::retired(const StepPlan& plan) {
  for (size_t i = 0; i < plan.host_rows.entries.size(); ++i) {
    const HostRowEntry& entry = plan.host_rows.entries[i];
    if (entry.slot < 0) continue;
    const auto stage = static_cast<int32_t>(i) / plan.host_rows.num_lanes;
    Slot& slot = roster_.slot(entry.slot);
    HostRow& row = host_row(entry.slot);
    if (stage < config_.layers) {
      --slot.in_flight;
      row.since_ns = awake_ns_;
      continue;
    }
    row.phase = Phase::kReady;
    row.stage = 0;
  }
}

void HostPlacement::failed(const StepPlan& plan, Outbox& outbox, int64_t now_ns) {
  retired(plan);
  for (const HostRowEntry& entry : plan.host_rows.entries) {
    if (entry.slot < 0 || !roster_.slot(entry.slot).alive()) continue;
    roster_.fail(*roster_.slot(entry.slot).sequence, FinishReason::kStepFailed, outbox, now_ns);
  }
}

void HostPlacement::note_tokens(size_t first_event, Outbox& outbox) {
  for (size_t i = first_event; i < outbox.filling().events.size(); ++i) {
    OutputEvent& event = outbox.filling().events[i];
    event.on_host = event.token >= 0;
    tokens_ += event.on_host;
  }
}

// ---- who decodes where ---------------------------------------------------------------------------------------------------

// One sequence moves at a time.
void HostPlacement::place_sequences(const StepPlan& plan) {
  if (!hosted_.empty()) move_back();
  const auto drains = [&](int32_t slot) { return host_row(slot).phase == Phase::kDraining; };
  if (roster_.blocked().sequence == nullptr || roster_.num_free_slots() == 0 || roster_.blocks_coming() > 0 ||
      backoff_.paused(awake_ns_) || std::ranges::any_of(hosted_, [&](int32_t slot) { return drains(slot) || hangs(slot); }) ||
      !pays(plan)) {
    return;
  }
  int32_t promised = 0;
  for (const int32_t slot : hosted_) promised += blocks_.blocks_for(roster_.slot(slot).max_total);
  const std::vector<Slot*>& running = roster_.running();
  const auto last = std::find_if(running.rbegin(), running.rend(), [&](const Slot* slot) { return may_move_out(*slot, promised); });
  if (last != running.rend()) move_out(**last);
}

// Compares the tokens that workers could add to the planned step with the cost of lanes. Where costs are not known it pays.
bool HostPlacement::pays(const StepPlan& plan) const {
  const HybridConfig& hybrid = config_;
  const int32_t rows = plan.num_decode_rows;
  if (rows == 0) return false;
  double busy_rows = hybrid.lanes * (hybrid.layers + 1) * kStepsPerStage;
  if (pace_.costs().known() && hybrid.attend_ns > 0) {
    // As soon as there is enough of it, what was measured while this engine ran.
    const HostAttentionTimes times = attention_.times();
    const double attend_ns = times.tokens < HybridConfig::kEnoughTokens
                                 ? hybrid.attend_ns
                                 : static_cast<double>(times.busy_ns) / static_cast<double>(times.tokens);
    const HybridConfig::Gain gain = hybrid.gain(pace_.costs(), attend_ns, rows, plan.decode_attended);
    if (gain.share < hybrid.min_gain) return false;
    busy_rows = gain.busy_rows;
  }
  const auto most = hybrid.max_rows > 0 ? hybrid.max_rows : static_cast<int32_t>(std::ceil(kSurplusRows * busy_rows));
  return static_cast<int32_t>(hosted_.size()) < most;
}

// A host row's token takes as many steps as the model has layers, or more: not where its class has a target below that. All
// that it may grow to has room on the host, beside what is promised to others.
bool HostPlacement::may_move_out(const Slot& slot, int32_t promised) const {
  const RequestExtras& extras = slot.sequence->request->extras;
  if (slot.state != SequenceState::kRunning || !slot.decodes() || slot.max_total - slot.total() < kLeastLeft ||
      (slot.needs & kNeedMask) != 0 || slot.step_tokens > 1 || extras.score_from >= 0) {
    return false;
  }
  const int64_t target = pace_.target_ns(slot.sequence->request->priority);
  if (target > 0 && pace_.costs().decode_ns(1, slot.total()) * (config_.layers + 1) > target) return false;
  if (!tier_.can_store(blocks_.blocks_for(slot.total()))) return false;
  return promised + blocks_.blocks_for(slot.max_total) <= blocks_.num_host_blocks();
}

void HostPlacement::move_out(Slot& slot) {
  host_row(roster_.index(slot)) = {.phase = Phase::kDraining};
  hosted_.push_back(roster_.index(slot));
  roster_.begin_leaving(slot);
}

// The first in order of service, if it has room and worth there: it leaves between two tokens.
void HostPlacement::move_back() {
  if (!roster_.waiting().empty() || tier_.storing() || tier_.num_loading() > 0) return;
  const Slot* first = nullptr;
  for (const int32_t i : hosted_) {
    const HostRow& row = host_row(i);
    const Slot& slot = roster_.slot(i);
    if (slot.state == SequenceState::kFinished) continue;  // perhaps a worker hangs in it
    if (row.leaves || row.phase < Phase::kReady || slot.state != SequenceState::kHosted) return;  // others are on their way
    if (slot.max_total - slot.total() < kLeastLeft) continue;
    if (first == nullptr || runs_before(slot.sequence, first->sequence)) first = &slot;
  }
  if (first == nullptr) return;
  // As much again is left free for those that run: it shall not be preempted at once.
  const int32_t wanted = blocks_.blocks_for(first->total()) + static_cast<int32_t>(roster_.running().size()) +
                         blocks_.num_blocks() / 16;
  if (blocks_.num_free() > wanted) host_row(roster_.index(*first)).leaves = true;
}

// ---- the life of a host row, between steps -----------------------------------------------------------------------------------

bool HostPlacement::advance(Outbox& outbox, int64_t now_ns, int64_t awake_ns) {
  awake_ns_ = awake_ns;
  if (hosted_.empty()) return false;
  bool moved = false;
  for (size_t k = hosted_.size(); k-- > 0;) {
    if (k < hosted_.size()) moved |= advance(roster_.slot(hosted_[k]), outbox, now_ns);
  }
  roster_.compact();  // others of a request that has failed ran
  return moved;
}

bool HostPlacement::advance(Slot& slot, Outbox& outbox, int64_t now_ns) {
  Sequence& sequence = *slot.sequence;
  HostRow& row = host_row(roster_.index(slot));
  if (slot.state != SequenceState::kHosted) {  // it has ended, or goes back
    if (roster_.in_flight(sequence)) return false;
    roster_.settle(sequence, &outbox);
    return true;
  }
  if (row.phase == Phase::kDraining && slot.in_flight == 0) {
    start_storing(slot);
    return true;
  }
  if (row.phase == Phase::kReady && row.stage == 0 && row.leaves && slot.in_flight == 0) {
    leave(slot);
    return true;
  }
  if (row.phase != Phase::kAttending) return false;
  const HostAttentionStatus status = attention_.poll(roster_.index(slot));
  if (status == HostAttentionStatus::kDone) return false;
  // A worker can do nothing before the step has filled the mailbox.
  const bool late = slot.in_flight == 0 && awake_ns_ - row.since_ns >= config_.job_timeout_ns;
  if (status == HostAttentionStatus::kPending && !late) return false;
  ++failed_rows_;
  backoff_.failed(awake_ns_);
  if (status == HostAttentionStatus::kFailed) {
    leave(slot);  // what it had is computed once more
    return true;
  }
  // The worker may write to the blocks of the sequence for ever: they come back when it ends.
  outbox.filling().step_error += "attention on the host did not finish within " +
                                 std::to_string(config_.job_timeout_ns / 1'000'000) + " ms\n";
  roster_.fail(sequence, FinishReason::kStepFailed, outbox, now_ns);
  return true;
}

void HostPlacement::start_storing(Slot& slot) {
  Sequence& sequence = *slot.sequence;
  sequence.tokens.settle(slot.tail, roster_.published(slot));
  const auto blocks = roster_.tables().blocks(roster_.index(slot)).first(static_cast<size_t>(blocks_.blocks_for(slot.computed)));
  if (!tier_.store(sequence, blocks)) return stay(slot);
  sequence.loading = true;
  host_row(roster_.index(slot)).phase = Phase::kStoring;
}

void HostPlacement::take_stored(Sequence& sequence, std::span<const int32_t> hosts, Outbox& outbox) {
  Slot& slot = roster_.slot_of(sequence);
  const int32_t i = roster_.index(slot);
  sequence.loading = false;
  if (sequence.state == SequenceState::kFinished) {
    for (const int32_t host : hosts) blocks_.drop_host_block(host);
    return roster_.settle(sequence, &outbox);
  }
  if (hosts.empty()) return stay(slot);
  for (const int32_t host : hosts) tables_.append(i, host);
  roster_.left_device(slot);
  host_row(i) = {.phase = Phase::kReady};
  ++moved_to_host_;
}

// It stays on the device after all.
void HostPlacement::stay(Slot& slot) {
  host_row(roster_.index(slot)) = {};
  std::erase(hosted_, roster_.index(slot));
  roster_.stay(slot);
}

void HostPlacement::leave(Slot& slot) {
  ++moved_from_host_;
  roster_.give_way(*slot.sequence);
}

void HostPlacement::release(Slot& slot) {
  const int32_t i = roster_.index(slot);
  const FinishReason finish = slot.sequence->finish;
  if (finish != FinishReason::kFailed && finish != FinishReason::kStepFailed) publish_blocks(slot);
  const auto held = tables_.blocks(i);
  for (auto host = held.rbegin(); host != held.rend(); ++host) {
    if (*host >= 0) blocks_.drop_host_block(*host);
  }
  tables_.clear(i);
  host_row(i) = {};
  std::erase(hosted_, i);
}

// Full blocks that it made there may be found by others from now on, and by itself.
void HostPlacement::publish_blocks(Slot& slot) {
  const int32_t i = roster_.index(slot), size = block_size_;
  Sequence& sequence = *slot.sequence;
  const int32_t full = std::min(slot.computed / size, tables_.length(i));
  if (full > 0) sequence.tokens.settle(slot.tail, roster_.published(slot));
  Chain chain = slot.prefix();
  BlockKey key = blocks_.keeps_names() ? tier_.disk()->root(sequence.request->salt) : BlockKey{};
  for (int32_t b = 0; b < full; ++b) {
    const int32_t* tokens = sequence.tokens.at(b * size);
    BlockName name{key, key};
    if (blocks_.keeps_names()) name.key = key = next_key(key, std::span(tokens, static_cast<size_t>(size)));
    const int32_t host = tables_.at(i, b);
    if (b < slot.published_end / size) continue;
    if (blocks_.host_holds(host)) {
      chain = blocks_.chain_of(blocks_.id_of_host(host));
      continue;
    }
    chain = blocks_.enter_host(host, chain, tokens, name);
    if (!blocks_.host_holds(host)) {  // somebody else's is known, and this one is free
      tables_.replace(i, b, -1);
      continue;
    }
    blocks_.pin_host(host);
    tier_.entered(host);
  }
}

}  // namespace asyncengine
