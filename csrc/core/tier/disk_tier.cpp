#include "core/tier/disk_tier.h"

#include <algorithm>
#include <limits>

namespace asyncengine {

DiskTier::DiskTier(BlockManager& blocks, BlockMover& mover, BlockDisk& disk, int32_t max_blocks)
    : blocks_(blocks), mover_(mover), disk_(disk), max_blocks_(max_blocks) {
  const auto hosts = static_cast<size_t>(blocks.num_host_blocks());
  places_.assign(hosts, kNobody);
  to_write_.resize(hosts);
  is_to_write_.assign(hosts, 0);
  for (Read& read : reads_) {
    read.hosts.reserve(static_cast<size_t>(max_blocks));
    read.names.reserve(static_cast<size_t>(max_blocks));
    read.done.reserve(static_cast<size_t>(max_blocks));
  }
}

void DiskTier::write(int32_t host) {
  if (std::exchange(is_to_write_[static_cast<size_t>(host)], 1) != 0) return;
  to_write_[(to_write_begin_ + to_write_count_++) % to_write_.size()] = host;
}

// A block that was evicted meanwhile is written if it holds something else by now: that is to be written as well.
void DiskTier::write_some() {
  for (; to_write_count_ > 0; --to_write_count_) {
    const int32_t host = to_write_[to_write_begin_];
    if (blocks_.host_holds(host)) {
      const int32_t id = blocks_.id_of_host(host);
      const std::span tokens(blocks_.tokens_of(id), static_cast<size_t>(blocks_.block_size()));
      const BlockName& name = blocks_.name_of(blocks_.num_blocks() + host);
      if (tokens.back() >= 0 && !disk_.contains(name.key)) {  // a part of a block is this process's
        if (!disk_.put(name, tokens, mover_.host_block(host), static_cast<uint64_t>(host))) return;  // later
        blocks_.pin_host(host);
        begin(DiskCalls::kWrites);
      }
    }
    is_to_write_[static_cast<size_t>(host)] = 0;
    to_write_begin_ = (to_write_begin_ + 1) % to_write_.size();
  }
}

bool DiskTier::read(Sequence& sequence, std::span<const int32_t> chain, int32_t most) {
  const auto found = static_cast<int32_t>(chain.size());
  const auto free = std::ranges::find_if(reads_, [](const Read& read) { return read.sequence == nullptr; });
  if (free == reads_.end() || found < sequence.reads_from) return false;
  Read& read = *free;
  int32_t held = 0;
  for (auto id = chain.rbegin(); id != chain.rend(); ++id) {  // the beginning last: it is evicted behind the end
    const int32_t host = *id >= blocks_.num_blocks() ? *id - blocks_.num_blocks() : blocks_.host_copy_of(*id);
    if (host < 0) continue;
    blocks_.touch_host(host);
    ++held;
  }
  const uint64_t salt = sequence.request->salt;
  read.last = chain.empty() ? disk_.root(salt) : blocks_.name_of(chain.back()).key;
  read.parent = chain.empty() ? Chain{salt, true} : blocks_.chain_of(chain.back());
  read.first = found;
  read.most = std::min(most, found + blocks_.num_host_blocks() - blocks_.num_host_pinned() - held);
  read.sequence = &sequence;
  read.since_ns = awake_ns_;
  ask(read);
  if (read.hosts.empty()) {
    read.sequence = nullptr;
    return false;
  }
  sequence.reads_from = found + 1;
  ++num_reads_;
  return true;
}

// For the next blocks, as many as the disk takes.
void DiskTier::ask(Read& read) {
  const int64_t first_place = (&read - reads_.data()) * max_blocks_;
  while (read.pending < kPendingBlocks) {
    const auto i = static_cast<int32_t>(read.hosts.size());
    const int32_t block = read.first + i;
    read.over = true;
    if (block >= read.most) return;
    const std::span tokens(read.sequence->tokens.at(block * blocks_.block_size()), static_cast<size_t>(blocks_.block_size()));
    const BlockName name{next_key(read.last, tokens), read.last};
    if (!disk_.contains(name.key)) return;
    const int32_t host = blocks_.take_host_block(/*even_copies=*/true);
    if (host < 0) return;
    read.over = false;
    if (!disk_.get(name, tokens, mover_.host_block(host), kReadTicket | static_cast<uint64_t>(host))) {
      return blocks_.give_back_host_block(host);  // later
    }
    begin(DiskCalls::kReads);
    places_[static_cast<size_t>(host)] = first_place + i;
    read.hosts.push_back(host);
    read.names.push_back(name);
    read.done.push_back(kComes);
    read.last = name.key;
    ++read.pending;
  }
}

void DiskTier::complete(uint64_t ticket, bool done) {
  failed_ += !done;
  const auto host = static_cast<int32_t>(ticket & ~kReadTicket);
  const bool is_read = (ticket & kReadTicket) != 0;
  UnderWay& others = under_way(is_read ? DiskCalls::kReads : DiskCalls::kWrites);
  others = {others.count - 1, awake_ns_};
  if (!is_read) {
    written_ += done;
    return blocks_.unpin_host(host);
  }
  const int64_t place = std::exchange(places_[static_cast<size_t>(host)], kNobody);
  if (place == kNobody) return blocks_.give_back_host_block(host);
  Read& read = reads_[static_cast<size_t>(place / max_blocks_)];
  read.done[static_cast<size_t>(place % max_blocks_)] = done ? kCame : kFailed;
  read.since_ns = awake_ns_;
  --read.pending;
}

// The prefix cache knows of what has come, in order. Behind a block that did not come nothing is of use. The tokens of a
// sequence that has ended are still there.
void DiskTier::go_on(Read& read) {
  for (; read.entered < read.hosts.size() && read.done[read.entered] == kCame; ++read.entered, ++read_blocks_) {
    const int32_t block = read.first + static_cast<int32_t>(read.entered);
    const int32_t* tokens = read.sequence->tokens.at(block * blocks_.block_size());
    read.parent = blocks_.enter_host(read.hosts[read.entered], read.parent, tokens, read.names[read.entered]);
  }
  if (read.entered < read.hosts.size() && read.done[read.entered] == kFailed) {
    read.over = true;
    read.sequence->reads_from = std::numeric_limits<int32_t>::max();
  }
  read.over = read.over || read.sequence->state == SequenceState::kFinished;
  if (!read.over) ask(read);
}

void DiskTier::begin(DiskCalls calls) {
  if (under_way(calls).count++ == 0) under_way(calls).since_ns = awake_ns_;
}

// Also where nobody waits any more: the next one would.
void DiskTier::leave_if_late(DiskCalls calls) {
  UnderWay& late = under_way(calls);
  if (late.count == 0 || awake_ns_ - late.since_ns < kPatienceNs) return;
  late.since_ns = awake_ns_;
  disk_.leave_alone(calls);
}

// It has waited too long for the disk. The sequence is computed from where what has come ends.
bool DiskTier::given_up(Read& read) {
  if (awake_ns_ - read.since_ns < kPatienceNs) return false;
  read.sequence->reads_from = std::numeric_limits<int32_t>::max();
  disk_.leave_alone(DiskCalls::kReads);
  return true;
}

void DiskTier::end(Read& read) {
  for (size_t i = read.entered; i < read.hosts.size(); ++i) {
    const int32_t host = read.hosts[i];
    if (read.done[i] == kComes) {
      places_[static_cast<size_t>(host)] = kNobody;  // complete() gives it back
    } else {
      blocks_.give_back_host_block(host);
    }
  }
  read.pending = 0;
  read.hosts.clear();
  read.names.clear();
  read.done.clear();
  read.entered = 0;
  --num_reads_;
}

}  // namespace asyncengine
