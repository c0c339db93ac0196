#include "core/tier/host_tier.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace asyncengine {

HostTier::HostTier(const Config& config, BlockManager& blocks, BlockMover& mover, BlockDisk* disk)
    : config_(config), blocks_(blocks), mover_(mover) {
  assert(mover.num_host_blocks() == blocks.num_host_blocks());
  coming_.assign(static_cast<size_t>(blocks.num_host_blocks()), 0);
  if (disk != nullptr) {
    blocks.keep_names();
    disk_ = std::make_unique<DiskTier>(blocks, mover, *disk, config.max_blocks);
  }
  for (Transfer& transfer : transfers_) transfer.moves.reserve(static_cast<size_t>(mover.max_moves()));
  for (Load& load : loads_) {
    load.held.reserve(static_cast<size_t>(config.max_blocks));
    load.moves.reserve(static_cast<size_t>(config.max_blocks));
  }
  leaving_.reserve(static_cast<size_t>(blocks.num_blocks()));
  for (auto* list : {&store_.blocks, &store_.hosts}) list->reserve(static_cast<size_t>(config.max_blocks));
  store_.moves.reserve(static_cast<size_t>(config.max_blocks));
}

void HostTier::report(Stats& stats) const {
  stats.num_host_blocks = blocks_.num_host_blocks();
  stats.host_cached_blocks = blocks_.num_host_cached();
  stats.blocks_to_host = copied_out_;
  stats.blocks_from_host = copied_in_;
  stats.failed_transfers = failed_transfers_;
  if (states_ != nullptr) states_->report(stats);
  if (disk_ == nullptr) return;
  stats.blocks_to_disk = disk_->written();
  stats.blocks_from_disk = disk_->read_blocks();
  stats.failed_disk_transfers = disk_->failed();
}

HostTier::Loading HostTier::load(Sequence& sequence, std::span<const int32_t> chain, uint64_t state) {
  const int32_t device_blocks = blocks_.num_blocks();
  const auto on_host = [&](int32_t id) { return id >= device_blocks; };
  const auto comes = [&](int32_t id) { return on_host(id) && coming_[static_cast<size_t>(id - device_blocks)] != 0; };
  if (broken() || (state == 0 && std::ranges::none_of(chain, on_host))) return Loading::kNothing;
  const auto free = std::ranges::find_if(loads_, [](const Load& load) { return load.sequence == nullptr; });
  if (free == loads_.end() || std::ranges::any_of(chain, comes)) return Loading::kLater;
  if (state != 0 && states_->comes(state)) return Loading::kLater;
  const int load = state != 0 ? states_->load(state) : -1;
  if (state != 0 && load < 0) return Loading::kNothing;
  free->sequence = &sequence;
  free->state = load;
  free->started = free->ended = 0;
  free->cancelled = false;
  // First what is here: it must not be evicted for what comes.
  for (const int32_t id : chain) {
    if (!on_host(id)) blocks_.retain(id);
  }
  for (const int32_t id : chain) {
    free->held.push_back(on_host(id) ? blocks_.allocate() : id);
    if (!on_host(id)) continue;
    const int32_t host = id - device_blocks;
    blocks_.pin_host(host);
    coming_[static_cast<size_t>(host)] = 1;
    free->moves.push_back({free->held.back(), host});
  }
  ++num_loads_;
  return Loading::kStarted;
}

void HostTier::cancel(const Sequence& sequence) {
  if (store_.sequence == &sequence) store_.failed = true;
  const auto load = std::ranges::find(loads_, &sequence, &Load::sequence);
  if (load == loads_.end()) return;  // the disk reads for it, and advance() ends that
  load->cancelled = true;
  if (load->state >= 0) states_->cancel(load->state);
}

bool HostTier::finish_transfer(int i) {
  Transfer& transfer = transfers_[static_cast<size_t>(i)];
  if (transfer.moves.empty()) return false;
  const MoveStatus status = mover_.poll(i);
  if (status == MoveStatus::kPending) return false;
  conclude(i, status == MoveStatus::kDone);
  return true;
}

void HostTier::conclude(int i, bool done) {
  Transfer& transfer = transfers_[static_cast<size_t>(i)];
  done ? backoff_.succeeded() : backoff_.failed(awake_ns_);
  failed_transfers_ += !done;
  BlockMover::brings_in(i) ? finish_load(transfer, done) : finish_spill(transfer, done);
  transfer.moves.clear();
  transfer.of_store = transfer.of_leaving = false;
  --num_transfers_;
}

bool HostTier::start_transfer(int i) {
  Transfer& transfer = transfers_[static_cast<size_t>(i)];
  if (!transfer.moves.empty()) return false;
  BlockMover::brings_in(i) ? collect_load(transfer) : collect_spill(transfer);
  if (transfer.moves.empty()) return false;
  ++num_transfers_;
  if (!mover_.start(i, transfer.moves)) conclude(i, false);
  return true;
}

// ---- out -----------------------------------------------------------------------------------------------------------

// The next blocks to be evicted, in the order of their release. Half of the free blocks stay free: a step may want some.
void HostTier::collect_spill(Transfer& transfer) {
  if (broken()) return let_go();
  if (collect_store(transfer)) return;
  if (!leaving_.empty()) return collect_leaving(transfer);
  const int32_t most = std::min(mover_.max_moves(), blocks_.num_free() / 2);
  while (static_cast<int32_t>(transfer.moves.size()) < most && blocks_.num_spare() < config_.spare_blocks) {
    const int32_t block = blocks_.next_without_copy();
    if (block < 0) break;
    const int32_t host = blocks_.take_host_block();
    if (host < 0) break;
    blocks_.retain(block);
    transfer.moves.push_back({block, host});
  }
  blocks_coming_ += static_cast<int32_t>(transfer.moves.size());
}

void HostTier::hold(std::span<const int32_t> blocks) {
  if (broken()) return;
  for (const int32_t block : blocks) {
    if (blocks_.ref_count(block) > 1 || !needs_copy(block)) continue;
    blocks_.retain(block);
    leaving_.push_back(block);
    ++blocks_coming_;
  }
}

int64_t HostTier::swap_ns(const StepCosts& costs, int32_t blocks) const {
  const int64_t held = std::min(blocks, mover_.max_moves()) * static_cast<int64_t>(mover_.block_bytes());
  const int64_t state = states_ != nullptr ? costs.copy_ns(static_cast<int64_t>(states_->state_bytes()), /*to_device=*/true) : 0;
  return costs.copy_ns(held, /*to_device=*/false) + state;
}

void HostTier::collect_leaving(Transfer& transfer) {
  size_t taken = 0;
  for (; taken < leaving_.size() && transfer.moves.size() < static_cast<size_t>(mover_.max_moves()); ++taken) {
    const int32_t host = blocks_.take_host_block(/*even_copies=*/true);
    if (host < 0) break;
    transfer.moves.push_back({leaving_[taken], host});
  }
  transfer.of_leaving = true;
  leaving_.erase(leaving_.begin(), leaving_.begin() + static_cast<ptrdiff_t>(taken));
  if (taken == 0) let_go();
}

// The others are copied out in the order of their release, as all that is free.
void HostTier::let_go() {
  for (const int32_t block : leaving_) blocks_.release(block);
  blocks_coming_ -= static_cast<int32_t>(leaving_.size());
  leaving_.clear();
}

void HostTier::finish_spill(const Transfer& transfer, bool done) {
  if (transfer.of_store) {
    store_.ended += transfer.moves.size();
    store_.failed = store_.failed || !done;
    copied_out_ += done ? static_cast<int64_t>(transfer.moves.size()) : 0;
    return;
  }
  blocks_coming_ -= static_cast<int32_t>(transfer.moves.size());
  copied_out_ += done ? static_cast<int64_t>(transfer.moves.size()) : 0;
  for (const BlockMove& move : transfer.moves) {
    if (done && blocks_.host_copy_of(move.block) < 0) {  // a store may have copied it meanwhile
      blocks_.copied_out(move.block, move.host);
      if (disk_ != nullptr) disk_->write(move.host);
    } else {
      blocks_.give_back_host_block(move.host);
    }
    blocks_.release_moved(move.block);
  }
  if (transfer.of_leaving) let_go();
}

// ---- a sequence's blocks, whether the prefix cache knows them or not ----------------------------------------------------

bool HostTier::store(Sequence& sequence, std::span<const int32_t> blocks) {
  if (broken() || storing()) return false;
  for (const int32_t block : blocks) {  // first what is here: it must not be evicted for what comes
    store_.hosts.push_back(blocks_.host_copy_of(block));
    if (store_.hosts.back() >= 0) blocks_.pin_host(store_.hosts.back());
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    int32_t& host = store_.hosts[i];
    if (host >= 0) continue;
    host = blocks_.take_host_block(/*even_copies=*/true);
    if (host < 0) return give_up_store();
    store_.moves.push_back({blocks[i], host});
  }
  for (const int32_t block : blocks) {
    blocks_.retain(block);
    store_.blocks.push_back(block);
  }
  store_.sequence = &sequence;
  store_.started = store_.ended = 0;
  store_.failed = false;
  return true;
}

bool HostTier::give_up_store() {
  for (const int32_t host : store_.hosts) {
    if (host >= 0) blocks_.drop_host_block(host);
  }
  store_.hosts.clear();
  store_.moves.clear();
  return false;
}

// True: the transfer is the store's, if there is something left to copy.
bool HostTier::collect_store(Transfer& transfer) {
  if (!storing() || store_.failed || store_.started == store_.moves.size()) return false;
  const size_t count = std::min(static_cast<size_t>(mover_.max_moves()), store_.moves.size() - store_.started);
  const auto first = store_.moves.begin() + static_cast<ptrdiff_t>(store_.started);
  transfer.moves.assign(first, first + static_cast<ptrdiff_t>(count));
  transfer.of_store = true;
  store_.started += count;
  return true;
}

// True if all of it is on the host. What the prefix cache knows of the device's blocks it knows of the copies now.
bool HostTier::end_store() {
  if (!store_.failed) {
    for (const BlockMove& move : store_.moves) {
      if (!blocks_.findable(move.block) || blocks_.host_copy_of(move.block) >= 0) continue;
      blocks_.copied_out(move.block, move.host);
      blocks_.pin_host(move.host);
      entered(move.host);
    }
  } else {
    give_up_store();
  }
  for (auto block = store_.blocks.rbegin(); block != store_.blocks.rend(); ++block) blocks_.release(*block);
  store_.blocks.clear();
  store_.moves.clear();
  return !store_.failed;
}

// ---- in ------------------------------------------------------------------------------------------------------------

void HostTier::collect_load(Transfer& transfer) {
  const auto wants = [](const Load& load) {
    return load.sequence != nullptr && !load.cancelled && load.started < load.moves.size();
  };
  const auto load = std::ranges::find_if(loads_, wants);
  if (load == loads_.end()) return;
  const size_t count = std::min(static_cast<size_t>(mover_.max_moves()), load->moves.size() - load->started);
  const auto first = load->moves.begin() + static_cast<ptrdiff_t>(load->started);
  transfer.moves.assign(first, first + static_cast<ptrdiff_t>(count));
  transfer.load = &*load;
  load->started += count;
}

// Blocks that have not come are computed: the sequence is admitted with what there is.
void HostTier::finish_load(const Transfer& transfer, bool done) {
  Load& load = *transfer.load;
  load.ended += transfer.moves.size();
  load.cancelled = load.cancelled || !done;
  copied_in_ += done ? static_cast<int64_t>(transfer.moves.size()) : 0;
  if (!done) return;
  for (const BlockMove& move : transfer.moves) blocks_.moved_in(move.host, move.block);
}

void HostTier::end(Load& load) {
  if (load.state >= 0) states_->end(load.state);
  load.state = -1;
  for (const BlockMove& move : load.moves) {
    blocks_.unpin_host(move.host);
    coming_[static_cast<size_t>(move.host)] = 0;
  }
  // Deepest block first: of a cached prefix the end is evicted before the beginning.
  for (auto block = load.held.rbegin(); block != load.held.rend(); ++block) blocks_.release(*block);
  load.held.clear();
  load.moves.clear();
  --num_loads_;
}

}  // namespace asyncengine
