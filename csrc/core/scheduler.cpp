#include "core/scheduler.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace asyncengine {
namespace {

// Admission of long cached prefixes may fill this many block-table entries per step beside what running rows need.
constexpr int32_t kDeltaBlocksForPrefixes = 4096;

}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config)
    : config_(config),
      blocks_(config.num_blocks, config.block_size, config.prefix_caching, config.num_host_blocks),
      tables_(config.max_num_seqs, (config.max_model_len + config.block_size - 1) / config.block_size),
      slots_(static_cast<size_t>(config.max_num_seqs)),
      waiting_(config.max_num_seqs, config.num_blocks),
      max_blocks_per_sequence_((config.max_model_len + config.block_size - 1) / config.block_size),
      host_tables_(config.hybrid.lanes > 0 ? config.max_num_seqs : 0, max_blocks_per_sequence_) {
  max_delta_blocks_ = 2 * config.max_num_seqs + config.max_num_batched_tokens / config.block_size +
                      std::max(max_blocks_per_sequence_, kDeltaBlocksForPrefixes);
  const auto num_seqs = static_cast<size_t>(config.max_num_seqs);
  running_.reserve(num_seqs);
  forking_.reserve(num_seqs);
  deferred_.reserve(num_seqs);
  excess_.resize(num_seqs);
  prefix_.resize(static_cast<size_t>(max_blocks_per_sequence_));
  copied_from_.assign(static_cast<size_t>(config.num_blocks), -1);
  if (config.costs.known() && !config.targets.of_class.empty()) slot_targets_.resize(num_seqs);
  if (config.hybrid.lanes > 0) {
    host_rows_.resize(num_seqs);
    hosted_.reserve(num_seqs);
    lanes_used_.resize(static_cast<size_t>(config.hybrid.layers) + 1);
  }
  for (int32_t slot = config.max_num_seqs - 1; slot >= 0; --slot) free_slots_.push_back(slot);
}

StepLimits Scheduler::limits() const {
  return {config_.max_num_seqs, config_.max_num_batched_tokens, max_delta_blocks_, config_.max_samples,
          config_.max_update_words, config_.max_result_words, config_.mask_words, config_.hybrid.lanes,
          config_.hybrid.lanes > 0 ? config_.hybrid.layers + 1 : 0};
}

void Scheduler::add(Request* request) {
  stats_.prompt_tokens += request->prompt_len;
  waiting_.enter(*request);
  holders_changed_ = true;
  enqueue(&request->sequences[0]);
}

void Scheduler::abort(Request* request, Outbox& outbox) {
  bool any_left = false;
  for (Sequence& sequence : request->sequences) {
    if (sequence.state == SequenceState::kFinished || sequence.state == SequenceState::kReleased) continue;
    if (!sequence.abort_requested.load(std::memory_order_seq_cst)) {
      any_left = true;
      continue;
    }
    if (sequence.index == 0) forking_.push_back(request);  // siblings that wait for its prompt wait in vain
    finish(sequence, FinishReason::kAborted);
    if (!in_flight(sequence)) settle(sequence, &outbox);
  }
  if (!any_left) leave_queue(*request);
}

void Scheduler::after_aborts() {
  wake_siblings();
  compact_running();
}

// ---- schedule ------------------------------------------------------------------------------------------------------

void Scheduler::schedule(StepPlan& plan, int64_t now_ns) {
  const int64_t gave_way = stats_.num_preemptions;
  if (waiting_.shared()) [[unlikely]] share_out(plan);
  const int64_t preemptions = stats_.num_preemptions;
  token_budget_ = config_.max_num_batched_tokens;
  if (!hosted_.empty()) [[unlikely]] find_ready_rows(plan);
  schedule_decodes(plan);
  set_pace(plan);
  if (prefilling_ > 0) schedule_prefills(plan);
  // Who was just preempted must not take back in the same breath what it gave.
  if (stats_.num_preemptions == preemptions) admit(plan, now_ns, /*only_within=*/preemptions != gave_way);
  compact_running();
  wake_siblings();
  for (const BlockCopy& copy : plan.copies) copied_from_[static_cast<size_t>(copy.target)] = -1;
  if (attention_ != nullptr) [[unlikely]] {
    if (plan.num_lanes > 0) schedule_lanes(plan);
    place_sequences(plan);
    compact_running();
  }
  if (config_.costs.known()) plan.predicted_ns = predict(0, 0, plan);
}

void Scheduler::wake_siblings() {
  for (Request* request : forking_) {
    for (Sequence& sequence : request->sequences) {
      if (sequence.state == SequenceState::kDormant) enqueue(&sequence);
    }
  }
  forking_.clear();
}

[[gnu::always_inline]] inline void Scheduler::add_row(Slot& slot, int32_t query_len, bool from_device, StepPlan& plan) {
  const int32_t row = index(slot), context_len = slot.computed;
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
  const int32_t dirty = tables_.length(row) - tables_.dirty_begin(row);
  plan.num_delta_blocks += std::max(0, dirty);
  slot.planned_step = static_cast<uint32_t>(plan.step);
  ++slot.in_flight;
  if (sample) {
    ++slot.pending;
    plan.needs |= slot.needs;
    if (!from_device) {
      note_first_sample(*slot.sequence, plan);
      slot.on_device = true;
    }
  }
  if (slot.extras) add_extras(slot, planned, plan);
}

[[gnu::always_inline]] inline bool Scheduler::add_decode(Slot& slot, StepPlan& plan) {
  if (slot.extras) [[unlikely]] return add_decode_extras(slot, plan);
  if (!reserve(slot, slot.computed + 1, plan)) return false;
  add_row(slot, 1, /*from_device=*/true, plan);
  return true;
}

bool Scheduler::add_decode_extras(Slot& slot, StepPlan& plan) {
  const int32_t count = std::min<int32_t>(slot.step_tokens, slot.max_total - slot.total());
  if (!reserve(slot, slot.computed + count, plan)) return false;
  add_row(slot, count, /*from_device=*/true, plan);
  return true;
}

// The rows of running_ from `i` on that are plain, to the first one that is not: its index. What they add to the plan is
// counted apart and added once, for the compiler cannot know that a row does not change the plan's counters.
size_t Scheduler::add_plain_rows(size_t i, StepPlan& plan) {
  const size_t count = running_.size(), first = plan.rows.size();
  const size_t end = std::min(count, i + static_cast<size_t>(token_budget_ - plan.num_tokens));
  const auto step = static_cast<uint32_t>(plan.step);
  int64_t attended = 0;
  Needs needs = 0;
  for (; i < end; ++i) {
    if (i + kAhead < count) prefetch(running_[i + kAhead]);
    Slot& slot = *running_[i];
    if (!slot.is_plain()) break;
    if (slot.computed + 1 == slot.capacity) plan.full_rows.push_back(static_cast<int32_t>(plan.rows.size()));
    plan.rows.emplace_back(slot.sequence, index(slot), 1, slot.computed, 1, 0, int8_t{1}, true, false, /*plain=*/true);
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
  prefilling_ = 0;
  bool results = false;
  for (size_t i = 0; i < running_.size() && plan.num_tokens < token_budget_; ++i) {
    i = add_plain_rows(i, plan);
    if (i == running_.size() || plan.num_tokens >= token_budget_) break;
    Slot& slot = *running_[i];
    if (slot.state != SequenceState::kRunning || !slot.wants_more()) continue;
    if (!slot.decodes()) {
      ++prefilling_;
    } else if (slot.results) {
      results = true;
    } else {
      add_decode(slot, plan);
    }
  }
  if (results) schedule_decodes_with_results(plan);
  plan.decode_attended = plan.attended;
}

void Scheduler::schedule_prefills(StepPlan& plan) {
  for (size_t i = 0; i < running_.size() && plan.num_tokens < token_budget_; ++i) {
    Slot& slot = *running_[i];
    if (slot.state != SequenceState::kRunning || !slot.wants_more() || slot.decodes() || waits_for_mask(slot)) continue;
    if (has_time(slot.computed, plan)) add_chunk(slot, plan);
  }
}

// The next part of a prompt; false if there is no room for it.
bool Scheduler::add_chunk(Slot& slot, StepPlan& plan) {
  if (slot.needs & kNeedMask) slot.sequence->tokens.settle(slot.tail, published(slot));  // its row may bring new ones
  const int32_t query_len = prefill_chunk(slot, plan);
  if (query_len == 0 || !reserve(slot, slot.computed + query_len, plan)) return false;
  add_row(slot, query_len, /*from_device=*/false, plan);
  if (config_.costs.known()) plan.chunks_ns += config_.costs.attention_ns(query_len, slot.computed - query_len);
  pace_.chunked = true;
  return true;
}

// As much of the prompt as the step has tokens and time for and the free blocks can hold, down to a bucket; at least one token,
// unless there is no room for the samples or the records of one.
int32_t Scheduler::prefill_chunk(const Slot& slot, const StepPlan& plan) {
  const int32_t left = slot.total() - slot.computed;
  int64_t chunk = std::min(left, token_budget_ - plan.num_tokens);
  const int32_t size = pace_.target_ns > 0 ? config_.paced_chunk_size : config_.prefill_chunk_size;
  if (size > 0) chunk = std::min<int64_t>(chunk, size);
  const int64_t room = int64_t{tables_.length(index(slot)) + blocks_.num_free()} * config_.block_size - slot.computed;
  chunk = std::max<int64_t>(1, std::min(chunk, room));
  if (pace_.target_ns > 0) chunk = paced_chunk(slot.computed, static_cast<int32_t>(chunk), plan);
  if (chunk < left) {
    const int32_t taken = plan.num_tokens + plan.num_lanes;
    const auto above = std::ranges::upper_bound(config_.token_buckets, taken + chunk);
    if (above != config_.token_buckets.begin() && *(above - 1) > taken) chunk = *(above - 1) - taken;
  }
  return slot.extras ? fit_samples(slot, static_cast<int32_t>(chunk), plan) : static_cast<int32_t>(chunk);
}

// Blocks that positions [computed, num_tokens) of the sequence need: for new entries, and for copies of shared ones.
int32_t Scheduler::count_missing(const Slot& slot, int32_t num_tokens) const {
  const int32_t row = index(slot), held = tables_.length(row), wanted = blocks_.blocks_for(num_tokens);
  int32_t missing = std::max(0, wanted - held);
  for (int32_t i = slot.computed / config_.block_size; i < std::min(held, wanted); ++i) {
    missing += !blocks_.writable(tables_.at(row, i));
  }
  return missing;
}

// Makes these positions writable: own blocks, copied if they are shared.
bool Scheduler::reserve_blocks(Slot& slot, int32_t num_tokens, StepPlan& plan) {
  // A sibling that gives way may leave a shared block to this sequence alone: fewer are missing then.
  for (int32_t missing; (missing = count_missing(slot, num_tokens)) > blocks_.num_free();) {
    if (!make_room(slot, missing, plan)) return false;
  }
  const int32_t row = index(slot), held = tables_.length(row), wanted = blocks_.blocks_for(num_tokens);
  for (int32_t i = slot.computed / config_.block_size; i < std::min(held, wanted); ++i) {
    if (!blocks_.writable(tables_.at(row, i))) copy_shared(slot, i, plan);
  }
  for (int32_t i = held; i < wanted; ++i) tables_.append(row, blocks_.allocate());
  if (wanted > held) slot.capacity = wanted * config_.block_size;
  slot.forked = false;
  return true;
}

void Scheduler::copy_shared(const Slot& slot, int32_t entry, StepPlan& plan) {
  const int32_t source = tables_.at(index(slot), entry), target = blocks_.allocate();
  tables_.replace(index(slot), entry, target);
  // A sibling may have copied the block in this very step: both then copy from where it came from.
  const int32_t origin = copied_from_[static_cast<size_t>(source)];
  copied_from_[static_cast<size_t>(target)] = origin < 0 ? source : origin;
  plan.copies.push_back({copied_from_[static_cast<size_t>(target)], target});
  plan.held_blocks.push_back(source);
}

// `only_within`: of tenants that hold less than their share, for whom others gave way.
void Scheduler::admit(StepPlan& plan, int64_t now_ns, bool only_within) {
  while (!waiting_.empty() && !free_slots_.empty() && plan.num_tokens < token_budget_ && has_time(0, plan)) {
    if (only_within && waiting_.first_within() == nullptr) break;
    Sequence& next = waiting_.front();
    if (!fits_budgets(next, plan)) {
      if (deferred_.size() == deferred_.capacity()) break;  // a step's work has a bound
      waiting_.remove(&next);
      deferred_.push_back(&next);
    } else if (!admit_one(next, plan, now_ns) && !step_back(next, plan)) {
      break;  // nobody overtakes: the order is first come, first served
    }
  }
  for (Sequence* sequence : deferred_) waiting_.push(sequence);
  deferred_.clear();
}

bool Scheduler::admit_one(Sequence& sequence, StepPlan& plan, int64_t now_ns) {
  // Matching a long prompt again at every step would be wasted while no block has come back.
  if (&sequence == blocked_ && blocks_.num_free() <= blocked_free_ && !running_.empty()) return false;
  // Not before there is room for all of it (apart from what it shares): half a prompt would only be preempted again.
  const int32_t whole = blocks_.blocks_for(sequence.tokens.size());
  Sequence* source = fork_source(sequence, plan);
  const int32_t shared = find_prefix(sequence, source);
  int32_t unused = 0;
  for (int32_t i = 0; i < shared; ++i) unused += blocks_.ref_count(prefix_[static_cast<size_t>(i)]) == 0;
  if (tier_ != nullptr && source == nullptr && !sequence.loaded) [[unlikely]] {
    if (load_from_host(sequence, whole)) return true;
  }
  const bool copies = source != nullptr && shared > (sequence.request->prompt_len - 1) / config_.block_size;
  if (blocks_.num_free() - unused < whole - shared + copies) {
    blocked_ = &sequence;
    blocked_free_ = blocks_.num_free();
    blocked_size_ = whole - shared + copies;
    blocked_needs_ = unused + blocked_size_;
    return false;
  }
  const int32_t deltas_left = max_delta_blocks_ - plan.num_delta_blocks;
  if (!plan.empty() && std::min(whole, shared + config_.max_num_batched_tokens / config_.block_size + 2) > deltas_left) return false;

  waiting_.remove(&sequence);
  blocked_ = nullptr;
  sequence.loaded = false;
  sequence.reads_from = 0;
  sequence.slot = free_slots_.back();
  free_slots_.pop_back();
  waiting_.took_slot(sequence);
  excess_[static_cast<size_t>(sequence.slot)] = 0;
  holders_changed_ = true;
  for (int32_t i = 0; i < shared; ++i) {
    blocks_.retain(prefix_[static_cast<size_t>(i)]);
    tables_.append(sequence.slot, prefix_[static_cast<size_t>(i)]);
  }
  assert(!running_changed_);  // running_ may name slots that were given back until it is compacted
  Slot& slot = slot_of(sequence) = Slot(sequence);
  slot.computed = source != nullptr ? sequence.request->prompt_len - 1 : shared * config_.block_size;
  slot.capacity = shared * config_.block_size;
  if (source != nullptr) slot.forked = slot_of(*source).forked = true;
  if (!slot_targets_.empty()) slot_targets_[static_cast<size_t>(sequence.slot)] = config_.targets.of(sequence.request->priority);
  start_chain(slot, source, shared);
  if (sequence.masks != nullptr) begin_masks(slot);
  sequence.state = SequenceState::kRunning;
  running_.insert(std::upper_bound(running_.begin(), running_.end(), &slot,
                                   [](const Slot* a, const Slot* b) { return runs_before(a->sequence, b->sequence); }),
                  &slot);

  Request& request = *sequence.request;
  if (request.scheduled_ns == 0) {
    request.scheduled_ns = now_ns;
    request.cached_tokens = slot.computed;
    stats_.prefix_cache_queries += request.prompt_len;
    stats_.prefix_cache_hits += request.cached_tokens;
  }
  leave_queue(request);
  plan.filled_slots.push_back(sequence.slot);
  if (const int32_t words = sequence.update_words(); words > 0) {
    plan.num_update_words += words;
    plan.needs |= sequence.needs;  // whoever reads the entries is in the graph of these needs
  }
  [[maybe_unused]] const bool added = add_chunk(slot, plan);
  assert(added);
  return true;
}

// n > 1: a sibling whose prompt is computed, by steps already launched, shares all of its blocks.
Sequence* Scheduler::fork_source(const Sequence& sequence, const StepPlan& plan) const {
  Sequence& first = sequence.request->sequences[0];
  const bool usable = &first != &sequence && first.state == SequenceState::kRunning && slot_of(first).on_device &&
                      first.first_sample_step < plan.step &&  // copies run before this step's own writes
                      sequence.tokens.size() == sequence.request->prompt_len &&
                      sequence.request->prompt_len > 1;
  return usable ? &first : nullptr;
}

// Fills prefix_ with the blocks that hold the start of the sequence and returns their count. At least one token is left
// to compute, because its logits are wanted.
int32_t Scheduler::find_prefix(const Sequence& sequence, const Sequence* source, bool with_host) {
  if (source != nullptr) {
    const int32_t shared = blocks_.blocks_for(sequence.request->prompt_len - 1);
    std::copy_n(tables_.blocks(source->slot).begin(), shared, prefix_.begin());
    return shared;
  }
  const auto tokens_at = [&](int32_t position) { return sequence.tokens.at(position); };
  return blocks_.match_prefix(tokens_at, prefix_limit(sequence), sequence.request->salt, prefix_.data(), with_host);
}

// Blocks of it that may come from the prefix cache.
int32_t Scheduler::prefix_limit(const Sequence& sequence) const {
  if ((sequence.needs & kNeedMean) != 0) return 0;
  const int32_t most = (sequence.tokens.size() - 1) / config_.block_size, from = sequence.scores_from();
  return from >= 0 ? std::min(most, from / config_.block_size) : most;
}

void Scheduler::start_chain(Slot& slot, const Sequence* source, int32_t shared_blocks) {
  const Request& request = *slot.sequence->request;
  slot.chain = request.salt;
  if (source == nullptr && shared_blocks > 0) {
    slot.published_end = shared_blocks * config_.block_size;
    slot.chain = blocks_.chain_of(prefix_[static_cast<size_t>(shared_blocks) - 1]).id;
  } else if (source != nullptr && slot_of(*source).published_end < request.prompt_len) {
    slot.published_end = slot_of(*source).published_end;
    slot.chain = slot_of(*source).chain;
  }
}

// The first of several sequences has its prompt computed with this step: the others may share it from the next one on.
void Scheduler::note_first_sample(Sequence& sequence, const StepPlan& plan) {
  sequence.first_sample_step = plan.step;
  Request& request = *sequence.request;
  if (sequence.index > 0 || request.sequences.size() == 1) return;
  const auto dormant = [](const Sequence& sibling) { return sibling.state == SequenceState::kDormant; };
  if (std::ranges::any_of(request.sequences, dormant)) forking_.push_back(&request);
}

// ---- ends and queues -----------------------------------------------------------------------------------------------

// The sequence runs no more. What it holds comes back in settle().
void Scheduler::finish(Sequence& sequence, FinishReason reason) {
  if (sequence.state == SequenceState::kWaiting) dequeue(&sequence);
  if (sequence.loading) tier_->cancel(sequence);
  if (sequence.slot >= 0 && attends(sequence.slot)) attention_->cancel(sequence.slot);
  sequence.finish = reason;
  retire(sequence, SequenceState::kFinished);
}

void Scheduler::retire(Sequence& sequence, SequenceState state) {
  if (sequence.state != SequenceState::kPreempting) {
    ++retiring_;
    if (sequence.slot >= 0 && sequence.blocks_coming == 0) {
      for (const int32_t block : tables_.blocks(sequence.slot)) sequence.blocks_coming += blocks_.ref_count(block) == 1;
      blocks_coming_ += sequence.blocks_coming;
    }
    if (sequence.slot >= 0) waiting_.gives_slot(sequence, sequence.blocks_coming);
    holders_changed_ = true;
  }
  sequence.state = state;
  if (sequence.slot >= 0) slot_of(sequence).state = state;
  running_changed_ = true;
}

// No step in flight touches the sequence any more: its blocks and slot may be reused.
void Scheduler::settle(Sequence& sequence, Outbox* outbox) {
  --retiring_;
  blocks_coming_ -= sequence.blocks_coming;
  sequence.blocks_coming = 0;
  if (sequence.slot >= 0) {
    Slot& slot = slot_of(sequence);
    assert(slot.in_flight == 0 && slot.pending == 0);
    if (sequence.state == SequenceState::kPreempting) sequence.tokens.settle(slot.tail, published(slot));
    release_blocks(sequence.slot);
    if (is_hosted(sequence.slot)) release_host_blocks(slot);
    free_slots_.push_back(sequence.slot);
    sequence.slot = -1;
  }
  if (sequence.state == SequenceState::kPreempting) return enqueue(&sequence);
  sequence.state = SequenceState::kReleased;
  if (sequence.masks != nullptr) sequence.masks->sequence = nullptr;
  if (--sequence.request->unreleased > 0) return;
  waiting_.leave(*sequence.request);
  holders_changed_ = true;
  outbox->filling().released.push_back(sequence.request);
}

// Deepest block first: of a cached prefix the end is evicted before the beginning.
void Scheduler::release_blocks(int32_t slot) {
  const auto held = tables_.blocks(slot);
  for (auto block = held.rbegin(); block != held.rend(); ++block) blocks_.release(*block);
  tables_.clear(slot);
}

void Scheduler::enqueue(Sequence* sequence) {
  sequence->state = SequenceState::kWaiting;
  waiting_.push(sequence);
}

void Scheduler::dequeue(const Sequence* sequence) {
  waiting_.remove(sequence);
  if (sequence == blocked_) blocked_ = nullptr;  // a new sequence may come to lie at its address
}

void Scheduler::leave_queue(Request& request) {
  if (!request.queued) return;
  request.queued = false;
  if (observer_ != nullptr) observer_->left_queue(request);
}

void Scheduler::compact_running() {
  if (!std::exchange(running_changed_, false)) return;
  std::erase_if(running_, [](const Slot* slot) { return slot->state != SequenceState::kRunning; });
}

bool Scheduler::quiescent() const {
  return idle() && blocks_coming_ == 0 && blocks_.num_free() == blocks_.num_blocks() && blocks_.num_host_pinned() == 0 &&
         free_slots_.size() == static_cast<size_t>(config_.max_num_seqs) && blocks_.consistent();
}

}  // namespace asyncengine
