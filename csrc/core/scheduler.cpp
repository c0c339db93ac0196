#include "core/scheduler.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace asyncengine {
namespace {

bool runs_later(const Sequence* a, const Sequence* b) {
  if (a->request != b->request) return b->request->before(*a->request);
  return a->index > b->index;
}

// Admission of long cached prefixes may fill this many block-table entries per step beside what running rows need.
constexpr int32_t kDeltaBlocksForPrefixes = 4096;

// Sequences lie scattered in memory: a walk over many asks for the one that comes so many rows later.
constexpr size_t kAhead = 8;
inline void prefetch(const void* address) { __builtin_prefetch(address, /*write=*/1); }

}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config)
    : config_(config),
      blocks_(config.num_blocks, config.block_size, config.prefix_caching),
      tables_(config.max_num_seqs, (config.max_model_len + config.block_size - 1) / config.block_size),
      max_blocks_per_sequence_((config.max_model_len + config.block_size - 1) / config.block_size) {
  max_delta_blocks_ = 2 * config.max_num_seqs + config.max_num_batched_tokens / config.block_size +
                      std::max(max_blocks_per_sequence_, kDeltaBlocksForPrefixes);
  const auto num_seqs = static_cast<size_t>(config.max_num_seqs);
  running_.reserve(num_seqs);
  forking_.reserve(num_seqs);
  prefix_.resize(static_cast<size_t>(max_blocks_per_sequence_));
  for (int32_t slot = config.max_num_seqs - 1; slot >= 0; --slot) free_slots_.push_back(slot);
}

StepLimits Scheduler::limits() const {
  return {config_.max_num_seqs, config_.max_num_batched_tokens, max_delta_blocks_};
}

void Scheduler::add(Request* request) {
  stats_.prompt_tokens += request->prompt_len;
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
    if (sequence.in_flight == 0) settle(sequence, &outbox);
  }
  if (!any_left) leave_queue(*request);
  wake_siblings();
  compact_running();
}

// ---- schedule ------------------------------------------------------------------------------------------------------

void Scheduler::schedule(StepPlan& plan, int64_t now_ns) {
  const int64_t preemptions = stats_.preemptions;
  schedule_decodes(plan);
  if (prefilling_) schedule_prefills(plan);
  // Who was just preempted for lack of blocks must not take them back in the same breath.
  if (stats_.preemptions == preemptions) admit(plan, now_ns);
  compact_running();
  wake_siblings();
}

void Scheduler::wake_siblings() {
  for (Request* request : forking_) {
    for (Sequence& sequence : request->sequences) {
      if (sequence.state == SequenceState::kDormant) enqueue(&sequence);
    }
  }
  forking_.clear();
}

void Scheduler::schedule_decodes(StepPlan& plan) {
  prefilling_ = false;
  for (size_t i = 0; i < running_.size() && plan.num_tokens < config_.max_num_batched_tokens; ++i) {
    if (i + kAhead < running_.size()) prefetch(running_[i + kAhead]);
    Sequence& sequence = *running_[i];
    if (sequence.state != SequenceState::kRunning || !wants_more(sequence)) continue;
    if (!decodes(sequence)) {
      prefilling_ = true;
    } else if (reserve(sequence, sequence.computed + 1, plan)) {
      add_row(sequence, 1, plan);
    }
  }
}

void Scheduler::schedule_prefills(StepPlan& plan) {
  for (size_t i = 0; i < running_.size() && plan.num_tokens < config_.max_num_batched_tokens; ++i) {
    Sequence& sequence = *running_[i];
    if (sequence.state != SequenceState::kRunning || !wants_more(sequence) || decodes(sequence)) continue;
    const int32_t query_len = prefill_chunk(sequence, plan);
    if (reserve(sequence, sequence.computed + query_len, plan)) add_row(sequence, query_len, plan);
  }
}

// As much of the prompt as the step has tokens for and the free blocks can hold, down to a bucket; at least one token.
int32_t Scheduler::prefill_chunk(const Sequence& sequence, const StepPlan& plan) const {
  int64_t chunk = std::min<int64_t>(sequence.total() - sequence.computed, config_.max_num_batched_tokens - plan.num_tokens);
  if (config_.prefill_chunk_size > 0) chunk = std::min<int64_t>(chunk, config_.prefill_chunk_size);
  const int64_t room = int64_t{tables_.length(sequence.slot) + blocks_.num_free()} * config_.block_size - sequence.computed;
  chunk = std::max<int64_t>(1, std::min(chunk, room));
  if (chunk < sequence.total() - sequence.computed) {
    const auto above = std::ranges::upper_bound(config_.token_buckets, plan.num_tokens + chunk);
    if (above != config_.token_buckets.begin() && *(above - 1) > plan.num_tokens) chunk = *(above - 1) - plan.num_tokens;
  }
  return static_cast<int32_t>(chunk);
}

// Makes positions [computed, num_tokens) of the sequence writable: own blocks, copied if they are shared.
bool Scheduler::reserve(Sequence& sequence, int32_t num_tokens, StepPlan& plan) {
  if (num_tokens <= sequence.capacity && !sequence.forked) return true;
  const int32_t slot = sequence.slot, held = tables_.length(slot), wanted = blocks_.blocks_for(num_tokens);
  const int32_t first = sequence.computed / config_.block_size;
  int32_t shared = 0;
  for (int32_t i = first; i < std::min(held, wanted); ++i) shared += !blocks_.writable(tables_.at(slot, i));
  const int32_t missing = std::max(0, wanted - held) + shared;
  if (missing == 0) {
    sequence.forked = false;
    return true;
  }
  if (blocks_.num_free() < missing && !make_room(sequence, missing, plan)) return false;
  for (int32_t i = first; shared > 0; ++i) {
    const int32_t source = tables_.at(slot, i);
    if (blocks_.writable(source)) continue;
    const int32_t target = blocks_.allocate();
    tables_.replace(slot, i, target);
    // A sibling may have copied the block in this very step: both then copy from where it came from.
    const auto made = std::find_if(plan.copies.begin(), plan.copies.end(),
                                   [source](const BlockCopy& copy) { return copy.target == source; });
    plan.copies.push_back({made == plan.copies.end() ? source : made->source, target});
    plan.held_blocks.push_back(source);
    --shared;
  }
  for (int32_t i = held; i < wanted; ++i) tables_.append(slot, blocks_.allocate());
  sequence.capacity = std::max(held, wanted) * config_.block_size;
  sequence.forked = false;
  return true;
}

bool Scheduler::make_room(const Sequence& sequence, int32_t num_blocks, const StepPlan& plan) {
  for (size_t i = running_.size(); blocks_.num_free() < num_blocks; --i) {
    if (blocks_.num_free() + blocks_coming_ >= num_blocks) return false;  // they are on their way
    while (i > 0 && (running_[i - 1]->state != SequenceState::kRunning || running_[i - 1]->planned_step == plan.step)) --i;
    if (i == 0 || !runs_later(running_[i - 1], &sequence)) return false;
    preempt(*running_[i - 1]);
  }
  return true;
}

void Scheduler::preempt(Sequence& sequence) {
  ++stats_.preemptions;
  retire(sequence, SequenceState::kPreempting);
  if (sequence.in_flight == 0) settle(sequence, nullptr);
}

void Scheduler::admit(StepPlan& plan, int64_t now_ns) {
  while (!waiting_.empty() && !free_slots_.empty() && plan.num_tokens < config_.max_num_batched_tokens) {
    if (!admit_one(*waiting_.back(), plan, now_ns)) return;  // nobody overtakes: the order is first come, first served
  }
}

bool Scheduler::admit_one(Sequence& sequence, StepPlan& plan, int64_t now_ns) {
  // Matching a long prompt again at every step would be wasted while no block has come back.
  if (&sequence == blocked_ && blocks_.num_free() <= blocked_free_ && !running_.empty()) return false;
  // Not before there is room for all of it (apart from what it shares): half a prompt would only be preempted again.
  const int32_t whole = blocks_.blocks_for(sequence.total());
  Sequence* source = fork_source(sequence, plan);
  const int32_t shared = find_prefix(sequence, source);
  int32_t unused = 0;
  for (int32_t i = 0; i < shared; ++i) unused += blocks_.ref_count(prefix_[static_cast<size_t>(i)]) == 0;
  const bool copies = source != nullptr && shared > (sequence.request->prompt_len - 1) / config_.block_size;
  if (blocks_.num_free() - unused < whole - shared + copies) {
    blocked_ = &sequence;
    blocked_free_ = blocks_.num_free();
    return false;
  }
  const int32_t deltas_left = max_delta_blocks_ - plan.num_delta_blocks;
  if (!plan.empty() && std::min(whole, shared + config_.max_num_batched_tokens / config_.block_size + 2) > deltas_left) return false;

  waiting_.pop_back();
  blocked_ = nullptr;
  sequence.slot = free_slots_.back();
  free_slots_.pop_back();
  for (int32_t i = 0; i < shared; ++i) {
    blocks_.retain(prefix_[static_cast<size_t>(i)]);
    tables_.append(sequence.slot, prefix_[static_cast<size_t>(i)]);
  }
  sequence.computed = source != nullptr ? sequence.request->prompt_len - 1 : shared * config_.block_size;
  sequence.capacity = shared * config_.block_size;
  if (source != nullptr) sequence.forked = source->forked = true;
  sequence.committed = sequence.computed;
  start_chain(sequence, source, shared);
  sequence.state = SequenceState::kRunning;
  running_.insert(std::upper_bound(running_.begin(), running_.end(), &sequence,
                                   [](const Sequence* a, const Sequence* b) { return runs_later(b, a); }),
                  &sequence);

  Request& request = *sequence.request;
  if (request.scheduled_ns == 0) {
    request.scheduled_ns = now_ns;
    request.cached_tokens = sequence.computed;
    stats_.prefix_queries += request.prompt_len;
    stats_.prefix_hits += request.cached_tokens;
  }
  leave_queue(request);
  const int32_t query_len = prefill_chunk(sequence, plan);
  [[maybe_unused]] const bool reserved = reserve(sequence, sequence.computed + query_len, plan);
  assert(reserved);
  plan.filled_slots.push_back(sequence.slot);
  add_row(sequence, query_len, plan);
  return true;
}

// n > 1: a sibling whose prompt is computed, by steps already launched, shares all of its blocks.
Sequence* Scheduler::fork_source(const Sequence& sequence, const StepPlan& plan) const {
  Sequence& first = sequence.request->sequences[0];
  const bool usable = &first != &sequence && first.state == SequenceState::kRunning && first.on_device &&
                      first.first_sample_step < plan.step &&  // copies run before this step's own writes
                      sequence.num_tokens == sequence.request->prompt_len &&
                      sequence.request->prompt_len > 1;
  return usable ? &first : nullptr;
}

// Fills prefix_ with the blocks that hold the start of the sequence and returns their count. At least one token is left
// to compute, because its logits are wanted.
int32_t Scheduler::find_prefix(const Sequence& sequence, const Sequence* source) {
  if (source != nullptr) {
    const int32_t shared = blocks_.blocks_for(sequence.request->prompt_len - 1);
    std::copy_n(tables_.blocks(source->slot).begin(), shared, prefix_.begin());
    return shared;
  }
  const int32_t most = (sequence.total() - 1) / config_.block_size;
  return blocks_.match_prefix(sequence.tokens.data(), most, sequence.request->salt, prefix_.data());
}

void Scheduler::start_chain(Sequence& sequence, const Sequence* source, int32_t shared_blocks) const {
  sequence.published_end = 0;
  sequence.chain = BlockManager::root_chain(sequence.request->salt);
  if (source == nullptr && shared_blocks > 0) {
    sequence.published_end = shared_blocks * config_.block_size;
    sequence.chain = blocks_.chain_of(prefix_[static_cast<size_t>(shared_blocks) - 1]);
  } else if (source != nullptr && source->published_end < sequence.request->prompt_len) {
    sequence.published_end = source->published_end;
    sequence.chain = source->chain;
  }
}

void Scheduler::add_row(Sequence& sequence, int32_t query_len, StepPlan& plan) {
  const bool from_device = decodes(sequence);
  const int32_t context_len = sequence.computed;
  sequence.computed += query_len;
  const bool sample = sequence.computed == sequence.total();
  plan.rows.push_back({&sequence, sequence.slot, query_len, context_len, sample, from_device});
  plan.num_tokens += query_len;
  plan.num_decode_rows += from_device;
  plan.num_samples += sample;
  const int32_t dirty = tables_.length(sequence.slot) - tables_.dirty_begin(sequence.slot);
  plan.num_delta_blocks += std::max(0, dirty);
  sequence.planned_step = plan.step;
  ++sequence.in_flight;
  if (sample) {
    ++sequence.pending;
    if (!sequence.on_device) sequence.first_sample_step = plan.step;
    sequence.on_device = true;
    if (!from_device) wake_siblings_of(sequence);
  }
}

// The first of several sequences has its prompt computed with this step: the others may share it from the next one on.
void Scheduler::wake_siblings_of(Sequence& sequence) {
  Request& request = *sequence.request;
  if (request.sequences.size() > 1 && sequence.index == 0 && request.sequences[1].state == SequenceState::kDormant) {
    forking_.push_back(&request);
  }
}

// ---- commit --------------------------------------------------------------------------------------------------------

void Scheduler::commit(StepPlan& plan, const int32_t* tokens, Outbox& outbox, int64_t now_ns) {
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    if (i + kAhead < plan.rows.size()) {
      const Sequence* later = plan.rows[i + kAhead].sequence;
      prefetch(later);
      prefetch(&later->tokens);
      const Sequence* soon = plan.rows[i + kAhead / 2].sequence;
      prefetch(soon->tokens.data() + soon->num_tokens);
    }
    const PlanRow& row = plan.rows[i];
    Sequence& sequence = *row.sequence;
    --sequence.in_flight;
    const bool alive = sequence.state == SequenceState::kRunning || sequence.state == SequenceState::kPreempting;
    if (alive) {
      sequence.committed = row.context_len + row.query_len;
      if (sequence.committed - sequence.published_end >= config_.block_size) publish_blocks(sequence);
    }
    if (row.sample) {
      --sequence.pending;
      const int32_t token = *tokens++;
      // A sequence that ended, or was aborted, while this step was under way: the surplus row never shows.
      if (alive) take_token(sequence, token, outbox, now_ns);
    }
    if (sequence.in_flight == 0 && sequence.state != SequenceState::kRunning) settle(sequence, &outbox);
  }
  for (const int32_t block : plan.held_blocks) blocks_.release(block);
  compact_running();
}

void Scheduler::take_token(Sequence& sequence, int32_t token, Outbox& outbox, int64_t now_ns) {
  if (token < 0) {
    // Non-finite logits concern this request alone. Its other sequences may have rows later in this very plan.
    for (Sequence& other : sequence.request->sequences) {
      if (other.state == SequenceState::kFinished || other.state == SequenceState::kReleased) continue;
      outbox.filling().events.push_back({&other, -1, FinishReason::kFailed, now_ns});
      finish(other, FinishReason::kFailed);
      if (&other != &sequence && other.in_flight == 0) settle(other, &outbox);
    }
    return;
  }
  sequence.append(token);
  ++stats_.generated_tokens;
  FinishReason reason = FinishReason::kNone;
  if (sequence.stops_at(token)) {
    reason = FinishReason::kStop;
  } else if (sequence.num_tokens >= sequence.max_total) {
    reason = FinishReason::kLength;
  }
  outbox.filling().events.push_back({&sequence, token, reason, now_ns});
  if (reason != FinishReason::kNone) finish(sequence, reason);
}

void Scheduler::publish_blocks(Sequence& sequence) {
  if (!blocks_.prefix_caching()) return;
  for (int32_t& end = sequence.published_end; sequence.committed - end >= config_.block_size; end += config_.block_size) {
    const int32_t block = tables_.at(sequence.slot, end / config_.block_size);
    sequence.chain = blocks_.publish(block, sequence.chain, sequence.tokens.data() + end);
  }
}

// The sequence runs no more. What it holds comes back in settle().
void Scheduler::finish(Sequence& sequence, FinishReason reason) {
  if (sequence.state == SequenceState::kWaiting) dequeue(&sequence);
  sequence.finish = reason;
  retire(sequence, SequenceState::kFinished);
}

void Scheduler::retire(Sequence& sequence, SequenceState state) {
  if (sequence.state != SequenceState::kPreempting) {
    ++retiring_;
    if (sequence.slot >= 0) {
      for (const int32_t block : tables_.blocks(sequence.slot)) sequence.blocks_coming += blocks_.ref_count(block) == 1;
      blocks_coming_ += sequence.blocks_coming;
    }
  }
  sequence.state = state;
  running_changed_ = true;
}

// No step in flight touches the sequence any more: its blocks and slot may be reused.
void Scheduler::settle(Sequence& sequence, Outbox* outbox) {
  assert(sequence.in_flight == 0 && sequence.pending == 0);
  --retiring_;
  blocks_coming_ -= sequence.blocks_coming;
  sequence.blocks_coming = 0;
  if (sequence.slot >= 0) {
    // Deepest block first: of a cached prefix the end is evicted before the beginning.
    const auto held = tables_.blocks(sequence.slot);
    for (auto block = held.rbegin(); block != held.rend(); ++block) blocks_.release(*block);
    tables_.clear(sequence.slot);
    free_slots_.push_back(sequence.slot);
    sequence.slot = -1;
    sequence.capacity = 0;
    sequence.forked = false;
  }
  if (sequence.state == SequenceState::kPreempting) {
    sequence.computed = sequence.committed = 0;
    sequence.on_device = false;
    enqueue(&sequence);
    return;
  }
  sequence.state = SequenceState::kReleased;
  if (--sequence.request->unreleased == 0) outbox->filling().released.push_back(sequence.request);
}

// ---- queues --------------------------------------------------------------------------------------------------------

void Scheduler::enqueue(Sequence* sequence) {
  sequence->state = SequenceState::kWaiting;
  waiting_.insert(std::lower_bound(waiting_.begin(), waiting_.end(), sequence, runs_later), sequence);
}

void Scheduler::dequeue(const Sequence* sequence) {
  const auto place = std::lower_bound(waiting_.begin(), waiting_.end(), sequence, runs_later);
  assert(place != waiting_.end() && *place == sequence);
  waiting_.erase(place);
  if (sequence == blocked_) blocked_ = nullptr;  // a new sequence may come to lie at its address
}

void Scheduler::leave_queue(Request& request) {
  if (!request.queued) return;
  request.queued = false;
  if (observer_ != nullptr) observer_->left_queue(request);
}

void Scheduler::compact_running() {
  if (!std::exchange(running_changed_, false)) return;
  std::erase_if(running_, [](const Sequence* s) { return s->state != SequenceState::kRunning; });
}

const SchedulerStats& Scheduler::stats() {
  stats_.running = static_cast<int64_t>(running_.size());
  stats_.waiting = static_cast<int64_t>(waiting_.size());
  stats_.free_blocks = blocks_.num_free();
  stats_.free_slots = static_cast<int64_t>(free_slots_.size());
  return stats_;
}

bool Scheduler::quiescent() const {
  return idle() && blocks_coming_ == 0 && blocks_.num_free() == blocks_.num_blocks() &&
         free_slots_.size() == static_cast<size_t>(config_.max_num_seqs) && blocks_.consistent();
}

}  // namespace asyncengine
