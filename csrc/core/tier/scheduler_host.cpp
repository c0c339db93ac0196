// What a host tier changes for the scheduler: a prefix that is on the host comes back before its sequence is admitted.
#include <algorithm>
#include <cassert>

#include "core/scheduler.h"

namespace asyncengine {

void Scheduler::move_blocks_with(BlockMover& mover, BlockDisk* disk) {
  // What a step may want: the next steps' chunks, and a block for each sequence.
  const int32_t wanted = std::max(256, 4 * config_.max_num_batched_tokens / config_.block_size + config_.max_num_seqs);
  const HostTier::Config config{std::min(config_.num_blocks, wanted), max_blocks_per_sequence_};
  tier_ = std::make_unique<HostTier>(config, blocks_, mover, disk);
}

bool Scheduler::move_blocks(Outbox& outbox, int64_t now_ns, int64_t awake_ns) {
  if (tier_ == nullptr) return false;
  awake_ns_ = awake_ns;
  const auto loaded = [&](Sequence& sequence) {
    sequence.loading = false;
    if (sequence.state == SequenceState::kFinished) return settle(sequence, &outbox);
    enqueue(&sequence);
  };
  const auto stored = [&](Sequence& sequence, std::span<const int32_t> hosts) { take_stored(sequence, hosts, outbox); };
  const bool moved = tier_->advance(awake_ns, loaded, stored);
  return hosted_.empty() ? moved : advance_host_rows(outbox, now_ns) | moved;
}

// True: the sequence has left the queue, to wait for blocks from the host, or for this step with those that load some.
bool Scheduler::load_from_host(Sequence& sequence, int32_t whole) {
  const int32_t found = find_prefix(sequence, nullptr, /*with_host=*/true);
  const std::span chain(prefix_.data(), static_cast<size_t>(found));
  int32_t here = 0, unused = 0;
  for (const int32_t id : chain) {
    if (id >= blocks_.num_blocks()) continue;
    ++here;
    unused += blocks_.ref_count(id) == 0;
  }
  // As for admission, which is next: what comes in is to stay.
  if (blocks_.num_free() - unused < whole - here) return false;
  const int32_t most = prefix_limit(sequence);
  if (found < most && tier_->read_disk(sequence, chain, most)) {
    start_loading(sequence);
    return true;
  }
  if (here == found || !copying_pays(found - here, here) || deferred_.size() == deferred_.capacity()) return false;
  switch (tier_->load(sequence, chain)) {
    case HostTier::Loading::kNothing:
      return false;
    case HostTier::Loading::kLater:
      dequeue(&sequence);
      deferred_.push_back(&sequence);
      return true;
    case HostTier::Loading::kStarted:
      sequence.loaded = true;
      start_loading(sequence);
      return true;
  }
  return false;
}

// Whether so many blocks come sooner than they are computed, after others. Where no costs are known they do.
bool Scheduler::copying_pays(int32_t blocks, int32_t context_blocks) const {
  if (!config_.costs.known()) return true;
  const int64_t bytes = static_cast<int64_t>(blocks) * static_cast<int64_t>(tier_->block_bytes());
  const int64_t copy = config_.costs.copy_ns(bytes, /*to_device=*/true);
  return copy == 0 || copy < config_.costs.recompute_ns(blocks * config_.block_size, context_blocks * config_.block_size);
}

void Scheduler::start_loading(Sequence& sequence) {
  dequeue(&sequence);
  sequence.state = SequenceState::kLoading;
  sequence.loading = true;
}

// A block that is about to be published, by those before it.
void Scheduler::name_block(const Slot& slot, const int32_t* tokens) {
  const int32_t i = slot.published_end / config_.block_size;
  const BlockKey parent = i == 0 ? tier_->disk()->root(slot.sequence->request->salt)
                                 : blocks_.name_of(tables_.at(index(slot), i - 1)).key;
  const std::span span(tokens, static_cast<size_t>(config_.block_size));
  blocks_.name_of(block_to_publish(slot)) = {next_key(parent, span), parent};
}

}  // namespace asyncengine
