#include "core/tier/state_tier.h"

#include <algorithm>
#include <cassert>

namespace asyncengine {

StateTier::StateTier(StatePool& device, BlockMover& mover)
    : device_(device), mover_(mover), host_(kFirst, kFirst + mover.num_host_blocks()) {
  device_.forget_with(host_);
}

bool StateTier::comes(uint64_t chain) const {
  return std::ranges::any_of(loads_, [=](const Load& load) { return load.phase != Phase::kNone && load.chain == chain; });
}

int StateTier::load(uint64_t chain) {
  const int32_t host = host_.find(chain);
  const auto free = std::ranges::find(loads_, Phase::kNone, &Load::phase);
  if (host < 0 || free == loads_.end() || backoff_.paused(awake_ns_)) return -1;
  const int32_t state = device_.take_at_rest();
  if (state < 0) return -1;
  host_.pin(host);
  *free = {chain, state, host, Phase::kWaits};
  ++num_busy_;
  return static_cast<int>(free - loads_.begin());
}

void StateTier::cancel(int load) {
  if (at(load).phase == Phase::kWaits) at(load).phase = Phase::kFailed;
}

void StateTier::end(int load) {
  Load& over = at(load);
  assert(this->over(load));
  if (over.phase == Phase::kCame) device_.enter(over.state, over.chain);
  device_.unpin(over.state);
  host_.unpin(over.host);
  over = {};
  --num_busy_;
}

bool StateTier::advance(int64_t awake_ns) {
  awake_ns_ = awake_ns;
  bool moved = false;
  for (int i = 0; i < BlockMover::kTransfers; ++i) moved |= finish(i) | start(i);
  return moved;
}

bool StateTier::finish(int i) {
  if (!transfers_[static_cast<size_t>(i)].running) return false;
  const MoveStatus status = mover_.poll(i);
  if (status == MoveStatus::kPending) return false;
  conclude(i, status == MoveStatus::kDone);
  return true;
}

bool StateTier::start(int i) {
  Transfer& transfer = transfers_[static_cast<size_t>(i)];
  if (transfer.running || !(BlockMover::brings_in(i) ? choose_load(transfer) : choose_spill(transfer))) return false;
  transfer.running = true;
  ++num_busy_;
  const BlockMove move{transfer.state, transfer.host - kFirst};
  if (!mover_.start(i, {&move, 1})) conclude(i, false);
  return true;
}

bool StateTier::choose_load(Transfer& transfer) {
  const auto load = std::ranges::find(loads_, Phase::kWaits, &Load::phase);
  if (load == loads_.end()) return false;
  load->phase = Phase::kMoves;
  transfer = {load->chain, 0, load->state, load->host, static_cast<int>(load - loads_.begin())};
  return true;
}

// The next snapshot to be evicted that has no copy. As the host has room for as many copies as are looked at, none of these
// loses its own to another one of them.
bool StateTier::choose_spill(Transfer& transfer) {
  if (backoff_.paused(awake_ns_)) return false;
  const int32_t state = device_.next_known(std::min(kAhead, host_.num_snapshots() - BlockMover::kTransfers / 2),
                                           [this](uint64_t chain) { return host_.find(chain) < 0; });
  if (state < 0) return false;
  const int32_t host = host_.take(/*step=*/1);
  if (host < 0) return false;
  device_.pin(state);
  transfer = {device_.chain_of(state), device_.last_read(state), state, host};
  return true;
}

void StateTier::conclude(int i, bool done) {
  Transfer& transfer = transfers_[static_cast<size_t>(i)];
  done ? backoff_.succeeded() : backoff_.failed(awake_ns_);
  failed_ += !done;
  if (BlockMover::brings_in(i)) {
    at(transfer.load).phase = done ? Phase::kCame : Phase::kFailed;
    copied_in_ += done;
  } else {
    end_spill(transfer, done);
    copied_out_ += done;
  }
  transfer = {};
  --num_busy_;
}

// Its chain may be forgotten meanwhile. Unless a prompt has begun with it, it is evicted where its turn was.
void StateTier::end_spill(const Transfer& transfer, bool done) {
  if (done && device_.chain_of(transfer.state) == transfer.chain) host_.enter(transfer.host, transfer.chain);
  host_.unpin(transfer.host);
  device_.unpin(transfer.state, /*in_place=*/device_.last_read(transfer.state) == transfer.last_read);
}

void StateTier::report(Stats& stats) const {
  stats.num_host_snapshots = host_.num_snapshots();
  stats.cached_host_snapshots = host_.num_cached();
  stats.pinned_host_snapshots = host_.num_pinned();
  stats.snapshots_to_host = copied_out_;
  stats.snapshots_from_host = copied_in_;
  stats.failed_transfers += failed_;
}

}  // namespace asyncengine
