#include "core/admission.h"

#include <algorithm>
#include <cassert>
#include <span>

namespace asyncengine {

Admission::Admission(const SchedulerConfig& config, Roster& roster, const Pace& pace)
    : config_(config),
      roster_(roster),
      pace_(pace),
      block_size_(config.block_size),
      max_num_batched_tokens_(config.max_num_batched_tokens),
      max_delta_blocks_(config.max_delta_blocks()),
      prefix_(static_cast<size_t>(config.max_blocks_per_sequence())),
      window_prefix_(static_cast<size_t>(config.window_groups) * prefix_.size()) {
  deferred_.reserve(static_cast<size_t>(config.max_num_seqs));
  forking_.reserve(static_cast<size_t>(config.max_num_seqs));
}

void Admission::leave_queue(Request& request) {
  if (!request.queued) return;
  request.queued = false;
  if (observer_ != nullptr) observer_->left_queue(request);
}

bool Admission::defer(Sequence& sequence) {
  if (deferred_.size() == deferred_.capacity()) return false;  // a step's work has a bound
  roster_.waiting().remove(&sequence);
  deferred_.push_back(&sequence);
  return true;
}

void Admission::end_step() {
  for (Sequence* sequence : deferred_) roster_.waiting().push(sequence);
  deferred_.clear();
}

Admission::Result Admission::admit(Sequence& sequence, StepPlan& plan, int64_t now_ns) {
  const BlockManager& blocks = roster_.blocks();
  // Matching a long prompt again at every step would be wasted while no block has come back.
  const Roster::Blocked& last = roster_.blocked();
  if (&sequence == last.sequence && blocks.num_free() <= last.free && !roster_.running().empty()) return Result::kWaits;
  // Not before there is room for all of it (apart from what it shares): half a prompt would only be preempted again.
  const int32_t whole = blocks.blocks_for(sequence.tokens.size());
  if (roster_.saves_state_of(sequence)) return Result::kWaits;
  Sequence* source = fork_source(sequence, plan);
  const Prefix prefix = find_prefix(sequence, source);
  const int32_t shared = prefix.blocks;
  const Start begin = start(sequence, source, prefix);
  int32_t unused = 0;
  for (int32_t i = begin.holes; i < shared; ++i) unused += blocks.ref_count(prefix_[static_cast<size_t>(i)]) == 0;
  if (config_.window_groups > 0) [[unlikely]] {
    unused += find_window_blocks(source, shared, begin.group_holes);
  }
  if (roster_.tier() != nullptr && source == nullptr && !sequence.loaded) [[unlikely]] {
    if (load_from_host(sequence, whole, prefix)) return Result::kLeft;
  }
  const bool copies = source != nullptr && shared > (sequence.request->prompt_len - 1) / block_size_;  // not with states
  const int32_t size = blocks_to_begin(sequence, shared) + (copies ? config_.num_groups() : 0);
  if (blocks.num_free() - unused < size) {
    roster_.block({&sequence, blocks.num_free(), unused + size, size});
    return Result::kWaits;
  }
  const int32_t deltas_left = max_delta_blocks_ - plan.num_delta_blocks;
  if (!plan.empty() && deltas_to_begin(whole, shared) > deltas_left) return Result::kWaits;

  // Somebody copies the block: it is over soon.
  const int32_t back = takes_back(source, prefix) ? prefix_[static_cast<size_t>(shared) - 1] : -1;
  if (back >= 0 && blocks.ref_count(back) > 0) return Result::kWaits;

  resumed_states_ += sequence.resumes_at > 0 && prefix.tokens == sequence.resumes_at;
  sequence.loaded = false;
  sequence.reads_from = sequence.resumes_at = 0;
  Slot& slot = roster_.take_slot(sequence, std::span(prefix_).first(static_cast<size_t>(shared)), begin.holes);
  if (config_.window_groups > 0) [[unlikely]] {
    take_window_blocks(sequence.slot, shared, begin.group_holes);
  }
  if (back >= 0) {
    roster_.blocks().take_back(back);
    plan.spent_states.push_back(begin.state);
  }
  slot.computed = begin.computed;
  slot.published_end = begin.published_end;
  slot.chain = begin.chain;
  slot.capacity = shared * block_size_;
  if (source != nullptr && !roster_.states().any()) slot.forked = roster_.slot_of(*source).forked = true;
  if (roster_.states().any()) start_state(slot, source, begin.state, plan);
  roster_.run(slot);
  note_scheduled(*sequence.request, slot.computed, now_ns);
  plan.filled_slots.push_back(sequence.slot);
  if (const int32_t words = sequence.update_words(); words > 0) {
    plan.num_update_words += words;
    plan.needs |= sequence.needs;  // whoever reads the entries is in the graph of these needs
  }
  return Result::kAdmitted;
}

void Admission::note_scheduled(Request& request, int32_t cached_tokens, int64_t now_ns) {
  if (request.scheduled_ns == 0) {
    request.scheduled_ns = now_ns;
    request.cached_tokens = cached_tokens;
    prefix_cache_queries_ += request.prompt_len;
    prefix_cache_hits_ += request.cached_tokens;
  }
  leave_queue(request);
}

void Admission::report(Stats& stats) const {
  stats.prefix_cache_queries = prefix_cache_queries_;
  stats.prefix_cache_hits = prefix_cache_hits_;
  stats.resumed_states = resumed_states_;
}

// The state that the sequence begins with: of its sibling's prompt, of the prefix that was found, or none. Whatever another
// sequence left in the slot is gone.
void Admission::start_state(const Slot& slot, const Sequence* source, uint64_t chain, StepPlan& plan) {
  StatePool& states = roster_.states();
  Request& request = *slot.sequence->request;
  int32_t snapshot = -1;
  if (source != nullptr) {
    snapshot = request.fork_state;
  } else if (slot.computed > 0) {
    snapshot = states.find(chain);
    assert(snapshot >= 0);
  }
  if (snapshot >= 0) states.use(snapshot, plan.step);
  plan.state_copies.push_back({snapshot, roster_.index(slot)});
  const auto waits = [&](const Sequence& other) {
    const bool may_fork = other.state == SequenceState::kDormant || other.state == SequenceState::kWaiting;
    return &other != slot.sequence && other.index > 0 && may_fork;
  };
  if (request.fork_state >= 0 && std::ranges::none_of(request.sequences, waits)) roster_.drop_fork_state(request);
}

// Blocks that must be free beside the shared ones: those of all its tokens, or where layers have a window those of the window,
// of the largest chunk behind it and of a chunk in flight.
int32_t Admission::blocks_to_begin(const Sequence& sequence, int32_t shared) const {
  const BlockManager& blocks = roster_.blocks();
  const int32_t rest = blocks.blocks_for(sequence.tokens.size()) - shared, window = config_.window_of_blocks();
  if (window > 0) return std::min(rest, blocks.blocks_for(int64_t{window} + 2 * max_num_batched_tokens_) + 1);
  return rest + config_.window_groups * config_.blocks_in_group(rest);
}

// Entries of block tables that the first step of the sequence brings, at most.
int32_t Admission::deltas_to_begin(int32_t whole, int32_t shared) const {
  return config_.num_groups() * std::min(whole, shared + max_num_batched_tokens_ / block_size_ + 2);
}

// Fills window_prefix_ with the blocks [holes, shared) of each window group, and returns how many of them nobody holds. A hole has
// the number of the full group's block: no row sees what is there.
int32_t Admission::find_window_blocks(const Sequence* source, int32_t shared, int32_t holes) {
  int32_t unused = 0;
  for (int32_t group = 0; group < config_.window_groups; ++group) {
    int32_t* blocks = window_prefix_.data() + static_cast<size_t>(group) * prefix_.size();
    std::copy_n(prefix_.data(), std::min(holes, shared), blocks);
    for (int32_t i = holes; i < shared; ++i) {
      blocks[i] = source != nullptr ? roster_.tables().windows().at(group, source->slot, i)
                                    : roster_.blocks().companion(prefix_[static_cast<size_t>(i)], group);
      unused += roster_.blocks().ref_count(blocks[i]) == 0;
    }
  }
  return unused;
}

// The slot, which has its full blocks, gets those of the window groups.
void Admission::take_window_blocks(int32_t slot, int32_t shared, int32_t holes) {
  WindowTables& windows = roster_.tables().windows();
  for (int32_t group = 0; group < config_.window_groups; ++group) {
    const int32_t* blocks = window_prefix_.data() + static_cast<size_t>(group) * prefix_.size();
    for (int32_t i = 0; i < shared; ++i) windows.at(group, slot, i) = blocks[i];
  }
  windows.let_go(slot, holes);
  roster_.tables().for_each_window_block(slot, [&](int32_t block) { roster_.blocks().retain(block); });
}

// ---- blocks that are there already ---------------------------------------------------------------------------------

// n > 1: a sibling whose prompt is computed, by steps already launched, shares all of its blocks.
Sequence* Admission::fork_source(const Sequence& sequence, const StepPlan& plan) const {
  Sequence& first = sequence.request->sequences[0];
  const bool usable = &first != &sequence && first.state == SequenceState::kRunning && roster_.slot_of(first).on_device &&
                      first.first_sample_step < plan.step &&  // copies run before this step's own writes
                      sequence.tokens.size() == sequence.request->prompt_len && sequence.request->prompt_len > 1 &&
                      (!roster_.states().any() || sequence.request->fork_state >= 0);
  return usable && shares_what_is_seen(first) ? &first : nullptr;
}

// True if the sequence, whose prompt is computed, still holds what a sibling sees of it; and unless it holds all, what the
// sibling needs to go on with its chain.
bool Admission::shares_what_is_seen(const Sequence& first) const {
  const int32_t holes = roster_.tables().first_held(first.slot), prompt_len = first.request->prompt_len;
  const int32_t group_holes = roster_.tables().windows().first_held(first.slot);
  if (group_holes > 0 && group_holes > config_.unseen_in_groups(prompt_len - 1, prompt_len)) return false;
  if (holes == 0) return true;
  const int32_t whole = (prompt_len - 1) / block_size_;
  if (holes > config_.unseen_blocks(roster_.states().any() ? whole * block_size_ : prompt_len - 1, prompt_len)) return false;
  return roster_.slot_of(first).published_end < prompt_len ||
         (holes < whole && roster_.blocks().findable(roster_.tables().at(first.slot, whole - 1)));
}

// Fills prefix_ with the blocks that hold the start of the sequence. At least one token is left to compute, because its logits
// are wanted.
Admission::Prefix Admission::find_prefix(const Sequence& sequence, const Sequence* source, bool with_host) {
  if (source != nullptr) {
    const int32_t last = sequence.request->prompt_len - 1;  // a state is there as of the last whole block
    const int32_t shared = roster_.states().any() ? last / block_size_ : roster_.blocks().blocks_for(last);
    std::copy_n(roster_.tables().blocks(source->slot).begin(), shared, prefix_.begin());
    return {shared, roster_.states().any() ? shared * block_size_ : last};
  }
  const auto tokens_at = [&](int32_t position) { return sequence.tokens.at(position); };
  const int32_t most = prefix_limit(sequence);
  int32_t found = roster_.blocks().match_prefix(tokens_at, most, sequence.request->salt, prefix_.data(), with_host);
  if (config_.window_groups > 0) [[unlikely]] {
    const auto first_seen = [&](int32_t blocks) { return config_.unseen_in_groups(blocks * block_size_, blocks * block_size_); };
    found = roster_.blocks().match_windows(prefix_.data(), found, first_seen);
    return {found, found * block_size_};
  }
  return roster_.states().any() ? find_state(sequence, found, with_host) : Prefix{found, found * block_size_};
}

// The part of what was found behind which there is a state. One that gave way may have had some computed behind its last whole
// block: with that it goes on where it was.
Admission::Prefix Admission::find_state(const Sequence& sequence, int32_t found, bool with_host) {
  const StateTier* tier = with_host && roster_.tier() != nullptr ? roster_.tier()->states() : nullptr;
  const auto known = [&](int32_t id) {
    const uint64_t chain = roster_.blocks().chain_of(id).id;
    return roster_.states().find(chain) >= 0 || (tier != nullptr && tier->holds(chain));
  };
  const auto known_behind = [&](int32_t blocks) { return known(prefix_[static_cast<size_t>(blocks) - 1]); };
  const int32_t whole = sequence.resumes_at / block_size_;
  while (found > whole && !known_behind(found)) --found;
  if (found == whole && sequence.resumes_at % block_size_ > 0) {
    const Chain parent = whole > 0 ? roster_.blocks().chain_of(prefix_[static_cast<size_t>(whole) - 1])
                                   : Chain{sequence.request->salt, /*root=*/true};
    const int32_t* rest = roster_.rest_of(sequence.tokens, sequence.resumes_at);
    prefix_[static_cast<size_t>(whole)] = roster_.blocks().find(parent, rest, with_host);
    if (prefix_[static_cast<size_t>(whole)] >= 0 && known_behind(whole + 1)) return {whole + 1, sequence.resumes_at};
  }
  while (found > 0 && !known_behind(found)) --found;
  return {found, found * block_size_};
}

// Blocks of it that may come from the prefix cache.
int32_t Admission::prefix_limit(const Sequence& sequence) const {
  if ((sequence.needs & kNeedMean) != 0) return 0;
  const int32_t most = (sequence.tokens.size() - 1) / block_size_, from = sequence.scores_from();
  return from >= 0 ? std::min(most, from / block_size_) : most;
}

Admission::Start Admission::start(const Sequence& sequence, const Sequence* source, const Prefix& prefix) const {
  const Request& request = *sequence.request;
  const auto chain_behind = [&](int32_t blocks) { return roster_.blocks().chain_of(prefix_[static_cast<size_t>(blocks) - 1]).id; };
  if (source == nullptr) {
    const int32_t whole = prefix.tokens / block_size_, end = whole * block_size_;
    return {prefix.tokens,
            end,
            whole > 0 ? chain_behind(whole) : request.salt,
            prefix.blocks > 0 ? chain_behind(prefix.blocks) : 0,
            config_.unseen_blocks(end, end),
            config_.window_groups > 0 ? config_.unseen_in_groups(end, end) : 0};
  }
  const Slot& slot = roster_.slot_of(*source);
  const int32_t holes = roster_.tables().first_held(source->slot);
  Start start{prefix.tokens, 0, request.salt};
  if (slot.published_end < request.prompt_len) {
    start.published_end = slot.published_end;
    start.chain = slot.chain;
  } else if (holes > 0) {  // what is let go cannot be published once more
    const int32_t whole = start.computed / block_size_;
    start.published_end = whole * block_size_;
    start.chain = chain_behind(whole);
  }
  start.group_holes = roster_.tables().windows().first_held(source->slot);
  start.holes = std::max(holes, config_.unseen_blocks(start.computed, start.published_end));
  return start;
}

// The chain behind so many blocks of prefix_, if its state is on the host alone; 0: it is not.
uint64_t Admission::missing_state(int32_t blocks) const {
  if (blocks == 0 || !roster_.states().any()) return 0;
  const uint64_t chain = roster_.blocks().chain_of(prefix_[static_cast<size_t>(blocks) - 1]).id;
  return roster_.states().find(chain) < 0 ? chain : 0;
}

// True: the sequence has left the queue, to wait for blocks from the host, or for this step with those that load some. It
// shares so many blocks with what is on the device.
bool Admission::load_from_host(Sequence& sequence, int32_t whole, const Prefix& shared) {
  const Prefix prefix = find_prefix(sequence, nullptr, /*with_host=*/true);
  const int32_t found = prefix.blocks;
  const std::span chain(prefix_.data(), static_cast<size_t>(found));
  int32_t here = 0, unused = 0;
  for (const int32_t id : chain) {
    if (id >= roster_.blocks().num_blocks()) continue;
    ++here;
    unused += roster_.blocks().ref_count(id) == 0;
  }
  // As for admission, which is next: what comes in is to stay.
  if (roster_.blocks().num_free() - unused < whole - here) return false;
  const int32_t most = prefix_limit(sequence);
  if (found < most && !takes_back(nullptr, prefix) && roster_.tier()->read_disk(sequence, chain, most)) {
    start_loading(sequence);
    return true;
  }
  const uint64_t state = missing_state(found);
  if ((here == found && state == 0) || deferred_.size() == deferred_.capacity()) return false;
  const int64_t bytes = int64_t{found - here} * static_cast<int64_t>(roster_.tier()->block_bytes()) +
                        (state != 0 ? static_cast<int64_t>(roster_.tier()->states()->state_bytes()) : 0);
  // With states, blocks of the device behind the last state that is there are computed again, too.
  const int32_t kept = roster_.states().any() ? shared.tokens : here * block_size_;
  if (!copying_pays(bytes, prefix.tokens - kept, kept)) return false;
  switch (roster_.tier()->load(sequence, chain, state)) {
    case HostTier::Loading::kNothing: return false;
    case HostTier::Loading::kLater:
      roster_.dequeue(sequence);
      deferred_.push_back(&sequence);
      return true;
    case HostTier::Loading::kStarted:
      sequence.loaded = true;
      start_loading(sequence);
      return true;
  }
  return false;
}

// True if so many bytes come sooner than so many tokens are computed, after others. Where no costs are known they do.
bool Admission::copying_pays(int64_t bytes, int32_t tokens, int32_t context) const {
  if (!pace_.costs().known()) return true;
  const int64_t copy = pace_.costs().copy_ns(bytes, /*to_device=*/true);
  return copy == 0 || copy < pace_.costs().recompute_ns(tokens, context);
}

void Admission::start_loading(Sequence& sequence) {
  roster_.dequeue(sequence);
  sequence.state = SequenceState::kLoading;
  sequence.loading = true;
}

// ---- siblings ------------------------------------------------------------------------------------------------------

void Admission::note_first_sample(Sequence& sequence, const StepPlan& plan) {
  sequence.first_sample_step = plan.step;
  Request& request = *sequence.request;
  if (sequence.index > 0 || request.sequences.size() == 1) return;
  const auto dormant = [](const Sequence& sibling) { return sibling.state == SequenceState::kDormant; };
  if (std::ranges::any_of(request.sequences, dormant)) forking_.push_back(&request);
}

void Admission::wake_siblings() {
  for (Request* request : forking_) {
    for (Sequence& sequence : request->sequences) {
      if (sequence.state == SequenceState::kDormant) roster_.enqueue(sequence);
    }
  }
  forking_.clear();
}

}  // namespace asyncengine
