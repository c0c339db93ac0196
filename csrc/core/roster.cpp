#include "core/roster.h"

#include <cassert>

namespace asyncengine {

Roster::Roster(const SchedulerConfig& config)
    : blocks_(config.num_blocks, config.block_size, config.prefix_caching, config.num_host_blocks, config.num_block_events,
              config.window_groups),
      tables_(config.max_num_seqs, config.max_blocks_per_sequence(), config.window_groups),
      states_(config.max_num_seqs, config.num_state_slots),
      slots_(static_cast<size_t>(config.max_num_seqs)),
      answer_snapshot_tokens_(config.answer_snapshot_tokens),
      waiting_(config.max_num_seqs, config.num_blocks) {
  if (states_.any()) blocks_.tell_of_evictions(states_);
  running_.reserve(static_cast<size_t>(config.max_num_seqs));
  left_states_.reserve(static_cast<size_t>(config.max_num_seqs));
  rest_.resize(static_cast<size_t>(config.block_size));
  held_.reserve(static_cast<size_t>(config.max_blocks_per_sequence()));
  for (int32_t slot = config.max_num_seqs - 1; slot >= 0; --slot) free_slots_.push_back(slot);
}

bool Roster::quiescent() const {
  return idle() && blocks_coming_ == 0 && blocks_.num_free() == blocks_.num_blocks() && blocks_.num_host_pinned() == 0 &&
         num_unused_slots() == slots_.size() && blocks_.consistent() && states_.num_pinned() == 0 && states_.consistent() &&
         (tier_ == nullptr || tier_->states() == nullptr || tier_->states()->at_rest());
}

// ---- the queue -----------------------------------------------------------------------------------------------------

void Roster::enter(const Request& request) {
  waiting_.enter(request);
  ++changes_;
}

void Roster::enqueue(Sequence& sequence) {
  sequence.state = SequenceState::kWaiting;
  waiting_.push(&sequence);
}

void Roster::dequeue(const Sequence& sequence) {
  waiting_.remove(&sequence);
  if (&sequence == blocked_.sequence) blocked_.sequence = nullptr;  // a new sequence may come to lie at its address
}

// ---- a sequence that runs ------------------------------------------------------------------------------------------

Slot& Roster::take_slot(Sequence& sequence, std::span<const int32_t> shared, int32_t holes) {
  waiting_.remove(&sequence);
  blocked_.sequence = nullptr;
  sequence.slot = free_slots_.back();
  free_slots_.pop_back();
  waiting_.took_slot(sequence);
  ++changes_;
  for (const int32_t block : shared) tables_.append(sequence.slot, block);
  tables_.let_go(sequence.slot, holes);
  for (const int32_t block : tables_.held(sequence.slot)) blocks_.retain(block);
  return slot_of(sequence) = Slot(sequence);
}

void Roster::run(Slot& slot) {
  assert(!running_changed_);  // running_ may name slots that were given back until it is compacted
  slot.state = slot.sequence->state = SequenceState::kRunning;
  const auto before = [](const Slot* a, const Slot* b) { return runs_before(a->sequence, b->sequence); };
  running_.insert(std::upper_bound(running_.begin(), running_.end(), &slot, before), &slot);
}

void Roster::append(Slot& slot, int32_t token, Outbox& outbox, int64_t now_ns) {
  Sequence& sequence = *slot.sequence;
  if (token < 0) return fail(sequence, FinishReason::kFailed, outbox, now_ns);
  sequence.tokens.append(slot.tail, token, published(slot));
  ++appended_;
  FinishReason reason = FinishReason::kNone;
  if (slot.stops_at(token)) {
    reason = FinishReason::kStop;
  } else if (slot.num_tokens() >= slot.max_total) {
    reason = FinishReason::kLength;
  }
  outbox.filling().events.push_back({&sequence, token, reason, false, now_ns});
  if (reason != FinishReason::kNone) finish(sequence, reason);
}

// ---- a sequence on its way to the host -----------------------------------------------------------------------------

void Roster::begin_leaving(Slot& slot) {
  slot.state = slot.sequence->state = SequenceState::kHosted;
  running_changed_ = true;
  ++changes_;
  expect_blocks(*slot.sequence);
}

void Roster::left_device(Slot& slot) {
  blocks_coming_ -= std::exchange(slot.sequence->blocks_coming, 0);
  release_blocks(index(slot));
  slot.capacity = 0;
  slot.forked = false;
}

void Roster::stay(Slot& slot) {
  compact();
  blocks_coming_ -= std::exchange(slot.sequence->blocks_coming, 0);
  ++changes_;
  run(slot);
}

// ---- ends ----------------------------------------------------------------------------------------------------------

void Roster::finish(Sequence& sequence, FinishReason reason) {
  if (sequence.state == SequenceState::kWaiting) dequeue(sequence);
  if (sequence.loading) tier_->cancel(sequence);
  if (sequence.slot >= 0 && placement_ != nullptr) placement_->cancel(sequence.slot);
  sequence.finish = reason;
  retire(sequence, SequenceState::kFinished);
}

void Roster::retire(Sequence& sequence, SequenceState state) {
  if (sequence.state != SequenceState::kPreempting) {
    ++retiring_;
    if (sequence.slot >= 0 && sequence.blocks_coming == 0) expect_blocks(sequence);
    if (sequence.slot >= 0) waiting_.gives_slot(sequence, sequence.blocks_coming);
    ++changes_;
  }
  sequence.state = state;
  if (sequence.slot >= 0) slot_of(sequence).state = state;
  running_changed_ = true;
}

void Roster::give_way(Sequence& sequence) {
  retire(sequence, SequenceState::kPreempting);
  if (!in_flight(sequence)) settle(sequence, nullptr);
}

void Roster::settle(Sequence& sequence, Outbox* outbox) {
  --retiring_;
  blocks_coming_ -= sequence.blocks_coming;
  sequence.blocks_coming = 0;
  if (sequence.slot >= 0) {
    Slot& slot = slot_of(sequence);
    assert(slot.in_flight == 0 && slot.pending == 0);
    uint64_t chain = 0;
    if (sequence.state == SequenceState::kPreempting) {
      sequence.tokens.settle(slot.tail, published(slot));
      if (states_.any()) chain = keep_computed(slot);
      if (chain != 0) hold_blocks(sequence.slot);
    }
    release_blocks(sequence.slot);
    if (on_host(sequence.slot)) placement_->release(slot);
    if (chain != 0) {
      left_states_.push_back({sequence.slot, chain});
    } else {
      free_slots_.push_back(sequence.slot);
    }
    sequence.slot = -1;
  }
  if (sequence.state == SequenceState::kPreempting) return enqueue(sequence);
  sequence.state = SequenceState::kReleased;
  if (sequence.masks != nullptr) sequence.masks->sequence = nullptr;
  if (--sequence.request->unreleased > 0) return;
  drop_fork_state(*sequence.request);
  waiting_.leave(*sequence.request);
  ++changes_;
  outbox->filling().released.push_back(sequence.request);
}

// Whole blocks are known already. What is behind them is known with the tokens that it has, so that it is kept, goes to the host
// and comes back as they do. Returns the chain behind all, or 0 if the sequence is to compute some of it again.
uint64_t Roster::keep_computed(const Slot& slot) {
  Sequence& sequence = *slot.sequence;
  const int32_t size = blocks_.block_size(), end = slot.computed;
  sequence.resumes_at = 0;
  if (tier_ == nullptr || states_.num_snapshots() == 0 || end == 0 || end >= sequence.tokens.size() ||
      slot.published_end != end / size * size || !keeping_pays(slot)) {
    return 0;
  }
  sequence.resumes_at = end;
  if (end % size == 0) return slot.chain;
  const int32_t block = tables_.at(index(slot), end / size);
  const int32_t* tokens = rest_of(sequence.tokens, end);
  return blocks_.publish(block, slot.prefix(), tokens, blocks_.prefetch(block, slot.prefix(), tokens)).id;
}

// Compares a swap with the tokens behind the newest snapshot, of the answer or else of the prompt, which are computed otherwise.
bool Roster::keeping_pays(const Slot& slot) const {
  if (costs_ == nullptr || !costs_->known()) return true;
  const int32_t size = blocks_.block_size(), own = (slot.sequence->request->prompt_len - 1) / size * size;
  const int32_t before = slot.computed - 1, answer = before / answer_snapshot_tokens_ * answer_snapshot_tokens_;
  const int32_t newest = before < own ? 0 : std::max(own, answer);
  const auto held = static_cast<int32_t>(tables_.held(index(slot)).size());
  return tier_->swap_ns(*costs_, held) < costs_->recompute_ns(slot.computed - newest, newest);
}

// Blocks are held in the order in which they are released.
void Roster::hold_blocks(int32_t slot) {
  const auto held = tables_.held(slot);
  held_.assign(held.rbegin(), held.rend());
  tier_->hold(held_);
}

const int32_t* Roster::rest_of(const Tokens& tokens, int32_t end) {
  const int32_t count = end % blocks_.block_size();
  std::copy_n(tokens.at(end - count), count, rest_.begin());
  std::fill(rest_.begin() + count, rest_.end(), kNoToken);
  return rest_.data();
}

void Roster::free_left_slots(uint64_t step) {
  for (const LeftState& left : left_states_) free_slots_.push_back(left.slot);
  left_states_.clear();
  saved_step_ = std::max(saved_step_, step);
}

void Roster::drop_fork_state(Request& request) {
  if (const int32_t state = std::exchange(request.fork_state, -1); state >= 0) states_.unpin(state);
}

void Roster::fail(Sequence& sequence, FinishReason reason, Outbox& outbox, int64_t now_ns) {
  for (Sequence& other : sequence.request->sequences) {
    if (other.state == SequenceState::kFinished || other.state == SequenceState::kReleased) continue;
    outbox.filling().events.push_back({&other, -1, reason, false, now_ns});
    finish(other, reason);
    if (&other != &sequence && !in_flight(other)) settle(other, &outbox);
  }
}

// The blocks that the sequence alone holds come back.
void Roster::expect_blocks(Sequence& sequence) {
  for (const int32_t block : tables_.held(sequence.slot)) sequence.blocks_coming += blocks_.ref_count(block) == 1;
  tables_.for_each_window_block(sequence.slot, [&](int32_t block) { sequence.blocks_coming += blocks_.ref_count(block) == 1; });
  blocks_coming_ += sequence.blocks_coming;
}

// Deepest block first: of a cached prefix the end is evicted before the beginning.
void Roster::release_blocks(int32_t slot) {
  const auto held = tables_.held(slot);
  for (auto block = held.rbegin(); block != held.rend(); ++block) blocks_.release(*block);
  tables_.for_each_window_block(slot, [&](int32_t block) { blocks_.release(block); });
  tables_.clear(slot);
}

}  // namespace asyncengine
