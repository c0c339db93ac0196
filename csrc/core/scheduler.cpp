#include "core/scheduler.h"

#include <algorithm>
#include <cassert>

#include "core/hybrid/host_placement.h"

namespace asyncengine {

Scheduler::Scheduler(const SchedulerConfig& config)
    : config_(config),
      roster_(config),
      pace_(config, roster_),
      extras_(config, roster_),
      admission_(config_, roster_, pace_),
      preemption_(config, roster_),
      reservation_(config_, roster_, preemption_),
      publisher_(roster_) {
  roster_.choose_with(pace_.costs());
}

void Scheduler::move_blocks_with(BlockMover& mover, BlockDisk* disk, BlockMover* states) {
  // A step may want the next steps' chunks, and a block for each sequence.
  const int32_t wanted = std::max(256, 4 * config_.max_num_batched_tokens / config_.block_size + config_.max_num_seqs);
  const HostTier::Config config{std::min(config_.num_blocks, wanted), config_.max_blocks_per_sequence()};
  roster_.move_blocks_with(std::make_unique<HostTier>(config, roster_.blocks(), mover, disk));
  if (states != nullptr) roster_.tier()->keep_states(roster_.states(), *states);
}

void Scheduler::attend_on_host_with(HostAttention& attention) {
  placement_ = std::make_unique<HostPlacement>(config_, roster_, pace_, extras_, attention);
  roster_.place_with(*placement_);
}

void Scheduler::add(Request* request) {
  prompt_tokens_ += request->prompt_len;
  roster_.enter(*request);
  roster_.enqueue(request->sequences[0]);
}

void Scheduler::abort(Request* request, Outbox& outbox) {
  bool any_left = false;
  for (Sequence& sequence : request->sequences) {
    if (sequence.state == SequenceState::kFinished || sequence.state == SequenceState::kReleased) continue;
    if (!sequence.abort_requested.load(std::memory_order_seq_cst)) {
      any_left = true;
      continue;
    }
    if (sequence.index == 0) admission_.free_siblings(*request);
    roster_.finish(sequence, FinishReason::kAborted);
    if (!roster_.in_flight(sequence)) roster_.settle(sequence, &outbox);
  }
  if (!any_left) admission_.leave_queue(*request);
}

void Scheduler::after_aborts() {
  admission_.wake_siblings();
  roster_.compact();
}

bool Scheduler::move_blocks(Outbox& outbox, int64_t now_ns, int64_t awake_ns) {
  HostTier* tier = roster_.tier();
  if (tier == nullptr) return false;
  const auto loaded = [&](Sequence& sequence) {
    sequence.loading = false;
    if (sequence.state == SequenceState::kFinished) return roster_.settle(sequence, &outbox);
    roster_.enqueue(sequence);
  };
  const auto stored = [&](Sequence& sequence, std::span<const int32_t> hosts) { placement_->take_stored(sequence, hosts, outbox); };
  const bool moved = tier->advance(awake_ns, loaded, stored);
  return placement_ == nullptr ? moved : placement_->advance(outbox, now_ns, awake_ns) | moved;
}

bool Scheduler::idle() const {
  return roster_.idle() && (placement_ == nullptr || placement_->num_rows() == 0) && !copies_blocks();
}

Stats& Scheduler::stats() {
  const BlockManager& blocks = roster_.blocks();
  if (placement_ != nullptr) placement_->report(stats_);
  admission_.report(stats_);
  stats_.prompt_tokens = prompt_tokens_;
  stats_.generation_tokens = plain_tokens_ + roster_.appended();
  stats_.num_preemptions = preemption_.count();
  stats_.num_requests_running = static_cast<int64_t>(roster_.running().size()) + stats_.num_host_rows;
  const HostTier* tier = roster_.tier();
  stats_.num_requests_waiting = static_cast<int64_t>(roster_.waiting().size()) + (tier != nullptr ? tier->num_loading() : 0);
  stats_.num_kv_blocks = blocks.num_blocks();
  stats_.num_free_blocks = blocks.num_free();
  stats_.num_free_slots = static_cast<int64_t>(roster_.num_unused_slots());
  stats_.cached_blocks = blocks.num_cached();
  stats_.block_references = blocks.num_references();
  stats_.kv_events_lost = blocks.events().num_lost();
  stats_.num_snapshots = roster_.states().num_snapshots();
  stats_.cached_snapshots = roster_.states().num_cached();
  stats_.pinned_snapshots = roster_.states().num_pinned();
  stats_.kept_states = kept_states_;
  stats_.state_snapshot_tokens = config_.state_snapshot_tokens;
  if (tier != nullptr) tier->report(stats_);
  return stats_;
}

// ---- schedule ------------------------------------------------------------------------------------------------------

void Scheduler::schedule(StepPlan& plan, int64_t now_ns) {
  const int64_t gave_way = preemption_.count();
  if (roster_.waiting().shared()) [[unlikely]] {
    preemption_.share_out(plan);
  }
  const int64_t preemptions = preemption_.count();
  token_budget_ = config_.max_num_batched_tokens;
  if (placement_ != nullptr) [[unlikely]] {
    token_budget_ -= placement_->begin(plan);
  }
  schedule_decodes(plan);
  pace_.begin(plan, prefilling_);
  if (prefilling_ > 0) schedule_prefills(plan);
  if (plan.empty() && !roster_.left_states().empty() && roster_.blocks_coming() == 0) [[unlikely]] {
    roster_.free_left_slots(0);  // there may be no step that copies them
  }
  // A sequence that was just preempted must not take back in the same step the blocks that it gave.
  if (preemption_.count() == preemptions) admit(plan, now_ns, /*only_within=*/preemptions != gave_way);
  roster_.compact();
  admission_.wake_siblings();
  reservation_.end_step(plan);
  if (!roster_.left_states().empty()) [[unlikely]] {
    save_left_states(plan);
  }
  if (placement_ != nullptr) [[unlikely]] {
    placement_->end(plan);
  }
  if (pace_.costs().known()) plan.predicted_ns = pace_.predict(plan);
}

[[gnu::always_inline]] inline void Scheduler::add_row(Slot& slot, int32_t query_len, bool from_device, StepPlan& plan) {
  const int32_t row = roster_.index(slot), context_len = slot.computed;
  slot.computed += query_len;
  const bool sample = slot.computed >= slot.total();
  if (slot.computed == slot.capacity || !from_device || slot.extras) {
    plan.full_rows.push_back(static_cast<int32_t>(plan.rows.size()));
  }
  // In place: a copy of what was just stored piece by piece would wait for the pieces.
  PlanRow& planned = plan.rows.emplace_back(slot.sequence, row, query_len, context_len, int32_t{sample}, 0,
                                            static_cast<int8_t>(sample), from_device, bool{slot.extras}, /*plain=*/false);
  plan.num_tokens += query_len;
  plan.attended += int64_t{query_len} * (context_len + query_len);
  plan.num_decode_rows += from_device;
  plan.num_samples += sample;
  const int32_t dirty = roster_.tables().length(row) - roster_.tables().dirty_begin(row);
  plan.num_delta_blocks += std::max(0, dirty) * config_.num_groups();
  slot.planned_step = static_cast<uint32_t>(plan.step);
  ++slot.in_flight;
  if (sample) {
    ++slot.pending;
    plan.needs |= slot.needs;
    if (!from_device) {
      admission_.note_first_sample(*slot.sequence, plan);
      slot.on_device = true;
    }
  }
  if (slot.extras) extras_.add(slot, planned, plan);
}

[[gnu::always_inline]] inline bool Scheduler::add_decode(Slot& slot, StepPlan& plan) {
  if (slot.extras) [[unlikely]] {
    return add_decode_extras(slot, plan);
  }
  if (!reserve(slot, slot.computed + 1, plan)) return false;
  add_row(slot, 1, /*from_device=*/true, plan);
  if (roster_.states().any()) [[unlikely]] {
    save_answer(slot, slot.computed - 1, plan);
  }
  return true;
}

// A step that decodes from here on copies the state that the next turn may begin with.
void Scheduler::save_answer(const Slot& slot, int32_t position, StepPlan& plan) {
  const int32_t tokens = config_.answer_snapshot_tokens;
  const bool wanted = config_.prefix_caching && position % tokens == 0 && position % config_.block_size == 0;
  if (wanted && !has_snapshot(slot, position)) save_state(slot, position, /*for_siblings=*/false, plan);
}

bool Scheduler::add_decode_extras(Slot& slot, StepPlan& plan) {
  const int32_t count = std::min<int32_t>(slot.step_tokens, slot.max_total - slot.total());
  const int32_t begin = slot.computed;
  if (!reserve(slot, begin + count, plan)) return false;
  add_row(slot, count, /*from_device=*/true, plan);
  if (roster_.states().any()) save_answer(slot, begin, plan);
  return true;
}

// Adds the rows of running sequences from the `i`-th on as long as they are plain, and returns the index of the first one that
// is not. What they add to the plan is counted apart and added once, for the compiler cannot know that a row does not change
// the plan's counters.
size_t Scheduler::add_plain_rows(size_t i, StepPlan& plan) {
  const std::vector<Slot*>& running = roster_.running();
  const size_t count = running.size(), first = plan.rows.size();
  const size_t end = std::min(count, i + static_cast<size_t>(token_budget_ - plan.num_tokens));
  const auto step = static_cast<uint32_t>(plan.step);
  int64_t attended = 0;
  Needs needs = 0;
  for (; i < end; ++i) {
    if (i + Roster::kAhead < count) Roster::prefetch(running[i + Roster::kAhead]);
    Slot& slot = *running[i];
    if (!slot.is_plain()) break;
    if (slot.computed + 1 == slot.capacity) plan.full_rows.push_back(static_cast<int32_t>(plan.rows.size()));
    plan.rows.emplace_back(slot.sequence, roster_.index(slot), 1, slot.computed, 1, 0, int8_t{1}, true, false, /*plain=*/true);
    attended += ++slot.computed;
    needs |= slot.needs;
    slot.planned_step = step;
    ++slot.in_flight;
    ++slot.pending;
  }
  const auto rows = static_cast<int32_t>(plan.rows.size() - first);
  plan.num_tokens += rows;
  plan.num_decode_rows += rows;
  plan.num_samples += rows;
  plan.attended += attended;
  plan.needs |= needs;
  return i;
}

void Scheduler::schedule_decodes(StepPlan& plan) {
  const std::vector<Slot*>& running = roster_.running();
  prefilling_ = 0;
  bool results = false;
  for (size_t i = 0; i < running.size() && plan.num_tokens < token_budget_; ++i) {
    i = add_plain_rows(i, plan);
    if (i == running.size() || plan.num_tokens >= token_budget_) break;
    Slot& slot = *running[i];
    if (slot.state != SequenceState::kRunning || !slot.wants_more()) continue;
    if (!slot.decodes()) {
      ++prefilling_;
    } else if (slot.results) {
      results = true;
    } else {
      add_decode(slot, plan);
    }
  }
  if (results) extras_.share_records(plan, [&](Slot& slot) { add_decode_extras(slot, plan); });
  plan.decode_attended = plan.attended;
}

void Scheduler::schedule_prefills(StepPlan& plan) {
  const std::vector<Slot*>& running = roster_.running();
  for (size_t i = 0; i < running.size() && plan.num_tokens < token_budget_; ++i) {
    Slot& slot = *running[i];
    if (slot.state != SequenceState::kRunning || !slot.wants_more() || slot.decodes() || extras_.waits_for_mask(slot)) continue;
    if (!pace_.has_time(slot.computed, plan)) continue;
    const int32_t begin = slot.computed;
    const bool ends_prefix = roster_.states().any() && begin == snapshot_position(slot, begin);
    const bool for_siblings = ends_prefix && begin == prefix_end(slot) && forks(slot);
    const bool saves = for_siblings || (ends_prefix && begin > 0 && !has_snapshot(slot, begin));
    if (add_chunk(slot, plan) && saves) save_state(slot, begin, for_siblings, plan);
  }
}

// The next part of a prompt; false if there is no room for it.
bool Scheduler::add_chunk(Slot& slot, StepPlan& plan) {
  if (slot.needs & kNeedMask) slot.sequence->tokens.settle(slot.tail, roster_.published(slot));  // its row may bring new ones
  const int32_t query_len = prefill_chunk(slot, plan);
  if (query_len == 0 || !reserve(slot, slot.computed + query_len, plan)) return false;
  add_row(slot, query_len, /*from_device=*/false, plan);
  pace_.add_chunk(query_len, slot.computed - query_len, plan);
  return true;
}

// As much of the prompt as the step has tokens and time for and the free blocks can hold, down to a bucket; at least one token,
// unless there is no room for the samples or the records of one.
int32_t Scheduler::prefill_chunk(const Slot& slot, const StepPlan& plan) {
  const int32_t left = slot.total() - slot.computed;
  int64_t chunk = std::min(left, token_budget_ - plan.num_tokens);
  const int32_t size = pace_.decides() ? config_.paced_chunk_size : config_.prefill_chunk_size;
  if (size > 0) chunk = std::min<int64_t>(chunk, size);
  const int32_t more = roster_.blocks().num_free() / config_.num_groups();
  const int64_t room = int64_t{roster_.tables().length(roster_.index(slot)) + more} * config_.block_size - slot.computed;
  chunk = std::max<int64_t>(1, std::min(chunk, room));
  if (roster_.states().any()) {  // a chunk ends where a snapshot is to be taken
    const int32_t until = snapshot_position(slot, slot.computed + 1) - slot.computed;
    if (until > 0) chunk = std::min<int64_t>(chunk, until);
  }
  if (pace_.decides()) chunk = pace_.chunk(slot.computed, static_cast<int32_t>(chunk), plan);
  if (chunk < left) {
    const int32_t taken = plan.num_tokens + plan.host_rows.num_tokens();
    const auto above = std::ranges::upper_bound(config_.token_buckets, taken + chunk);
    if (above != config_.token_buckets.begin() && *(above - 1) > taken) chunk = *(above - 1) - taken;
  }
  return slot.extras ? extras_.fit_samples(slot, static_cast<int32_t>(chunk), plan) : static_cast<int32_t>(chunk);
}

// The end of the whole blocks before the last token that is known: as far as others with the same beginning, or siblings, may
// share it.
int32_t Scheduler::prefix_end(const Slot& slot) const { return (slot.total() - 1) / config_.block_size * config_.block_size; }

// The first position of a prompt, at or behind `from`, at which a snapshot is to be taken; -1: there is none. A sequence that
// gave way has a prompt that ends with its answer so far; its request's own prompt is where a next turn may leave it.
int32_t Scheduler::snapshot_position(const Slot& slot, int32_t from) const {
  const int32_t interval = config_.prefix_caching ? config_.state_snapshot_tokens : 0;
  int32_t next = prefix_end(slot);
  if (from > next || (!config_.prefix_caching && !forks(slot))) return -1;
  const int32_t own = (slot.sequence->request->prompt_len - 1) / config_.block_size * config_.block_size;
  if (from <= own) next = std::min(next, own);
  return interval > 0 ? std::min(next, (std::max(from, 1) + interval - 1) / interval * interval) : next;
}

// A prompt with the same beginning finds one there already.
bool Scheduler::has_snapshot(const Slot& slot, int32_t position) const {
  return slot.published_end == position && roster_.states().find(slot.chain) >= 0;
}

// Siblings are going to begin with its prompt.
bool Scheduler::forks(const Slot& slot) const {
  const Request& request = *slot.sequence->request;
  return slot.sequence->index == 0 && request.sequences.size() > 1 && slot.total() == request.prompt_len && request.fork_state < 0;
}

// The chunk that is planned begins where a snapshot is to be taken: the state is copied before the forward.
void Scheduler::save_state(const Slot& slot, int32_t position, bool for_siblings, StepPlan& plan) {
  const int32_t state = roster_.states().take(plan.step), row = roster_.index(slot);
  if (state < 0) return;
  plan.state_copies.push_back({row, state});
  plan.saved_states.push_back({row, state, position});
  if (!for_siblings) return;
  roster_.states().pin(state);
  slot.sequence->request->fork_state = state;
}

// The states of sequences that gave way are copied before others get their slots. If there is no step, or no room, they are
// computed again.
void Scheduler::save_left_states(StepPlan& plan) {
  if (plan.empty() && roster_.blocks_coming() > 0) return;  // a step waits for their blocks
  for (const Roster::LeftState& left : roster_.left_states()) {
    const int32_t state = plan.empty() ? -1 : roster_.states().take(plan.step);
    if (state < 0) continue;
    plan.state_copies.push_back({left.slot, state});
    plan.saved_states.push_back({left.slot, state, 0, left.chain});
    ++kept_states_;
  }
  roster_.free_left_slots(plan.empty() ? 0 : plan.step);
}

// The step that saved snapshots is over, and steps before it have published the blocks that lead to them. It is called before
// this step's own are published.
void Scheduler::settle_saved(const StepPlan& plan, bool computed) {
  for (const SavedState& saved : plan.saved_states) {
    const Slot& slot = roster_.slot(saved.slot);
    if (saved.chain != 0) {  // nobody finds it if the chain is forgotten meanwhile
      if (computed) roster_.states().enter(saved.state, saved.chain);
    } else if (computed && config_.prefix_caching && slot.alive() && slot.published_end == saved.position) {
      roster_.states().enter(saved.state, slot.chain);
      if (saved.position > slot.sequence->request->prompt_len) keep_newest(*slot.sequence, saved.state, slot.chain);
    }
    roster_.states().unpin(saved.state);
  }
}

// An answer keeps the snapshot that was taken last, with which the next turn begins.
void Scheduler::keep_newest(Sequence& sequence, int32_t state, uint64_t chain) {
  if (roster_.states().find(chain) != state) return;  // another has it already
  if (sequence.answer_chain != 0) roster_.states().forget(sequence.answer_chain);
  sequence.answer_chain = chain;
}

// `only_within`: of tenants that hold less than their share, for whom others gave way.
void Scheduler::admit(StepPlan& plan, int64_t now_ns, bool only_within) {
  FairQueue& waiting = roster_.waiting();
  while (!waiting.empty() && roster_.num_free_slots() > 0 && plan.num_tokens < token_budget_ && pace_.has_time(0, plan)) {
    if (only_within && waiting.first_within() == nullptr) break;
    Sequence& next = waiting.front();
    if (!extras_.fits_budgets(next, plan)) {
      if (!admission_.defer(next)) break;
      continue;
    }
    const Admission::Result result = admission_.admit(next, plan, now_ns);
    if (result == Admission::Result::kAdmitted) begin(roster_.slot_of(next), plan);
    // Nobody overtakes: the order is first come, first served.
    if (result == Admission::Result::kWaits && !preemption_.step_back(next, plan)) break;
  }
  admission_.end_step();
}

// A sequence has got the slot: the first part of its prompt, for which there is room.
void Scheduler::begin(Slot& slot, StepPlan& plan) {
  preemption_.took_slot(slot);
  pace_.took_slot(slot);
  extras_.took_slot(slot);
  [[maybe_unused]] const bool added = add_chunk(slot, plan);
  assert(added);
}

// ---- commit --------------------------------------------------------------------------------------------------------

// `on_plain_row` takes in the result of a plain row, and says whether that was all.
template <typename OnPlainRow, typename OnRow>
inline void Scheduler::retire_rows(const StepPlan& plan, Outbox& outbox, OnPlainRow&& on_plain_row, OnRow&& on_row) {
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    if (i + Roster::kAhead < plan.rows.size()) roster_.prefetch_slot(plan.rows[i + Roster::kAhead].slot);
    const PlanRow& row = plan.rows[i];
    Slot& slot = roster_.slot(row.slot);
    --slot.in_flight;
    if (row.plain && on_plain_row(slot)) continue;
    if (!row.came_to_nothing(plan.step)) slot.pending = static_cast<int8_t>(slot.pending - row.num_appends);
    on_row(row, slot);
    // A sequence that is or was on the host waits for its worker, too: Placement::advance() settles it.
    if (slot.in_flight == 0 && slot.state != SequenceState::kRunning && !roster_.on_host(row.slot)) {
      roster_.settle(*slot.sequence, &outbox);
    }
  }
  for (const int32_t block : plan.held_blocks) roster_.blocks().release(block);
  for (const uint64_t chain : plan.spent_states) roster_.states().forget(chain);
  roster_.expect_blocks(-plan.blocks_coming);
  roster_.states().retire(plan.step);
  roster_.compact();
}

void Scheduler::commit(StepPlan& plan, StepResults results, Outbox& outbox, int64_t now_ns) {
  if (!plan.saved_states.empty()) [[unlikely]] {
    settle_saved(plan, /*computed=*/true);
  }
  publisher_.publish(plan);
  if (plan.host_rows.any()) [[unlikely]] {
    placement_->retired(plan);
  }
  std::vector<OutputEvent>& events = outbox.filling().events;
  int64_t plain_tokens = 0;
  // A token that neither ends its sequence nor fills what the slot has for it: the sequence itself is not touched.
  const auto take_plain = [&](Slot& slot) {
    const int32_t token = *results.tokens;
    if (slot.state != SequenceState::kRunning || slot.tail.full() || slot.may_stop_at(token) ||
        slot.num_tokens() + 1 >= slot.max_total) {
      return false;
    }
    ++results.tokens;
    --slot.pending;
    slot.tail.append(token);
    events.push_back({slot.sequence, token, FinishReason::kNone, false, now_ns});
    ++plain_tokens;
    return true;
  };
  retire_rows(plan, outbox, take_plain, [&](const PlanRow& row, Slot& slot) {
    const int32_t* tokens = results.tokens;
    results.tokens += row.num_samples;
    // A sequence that ended, or was aborted, while this step was under way: the surplus row never shows.
    if (row.num_samples == 0 || !slot.alive()) return;
    const size_t first = events.size();
    if (row.extras) {
      extras_.take_samples(row, slot, plan.step, tokens, results.records, outbox, now_ns);
    } else {
      roster_.append(slot, *tokens, outbox, now_ns);
    }
    if (row.host_place >= 0) [[unlikely]] {
      placement_->note_tokens(first, outbox);
    }
  });
  plain_tokens_ += plain_tokens;
}

void Scheduler::fail_step(StepPlan& plan, Outbox& outbox, int64_t now_ns) {
  settle_saved(plan, /*computed=*/false);
  if (plan.host_rows.any()) [[unlikely]] {
    placement_->failed(plan, outbox, now_ns);
  }
  retire_rows(
      plan, outbox, [](Slot&) { return false; },
      [&](const PlanRow&, Slot& slot) {
        if (slot.alive()) roster_.fail(*slot.sequence, FinishReason::kStepFailed, outbox, now_ns);
      });
}

}  // namespace asyncengine
