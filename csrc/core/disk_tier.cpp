#include "core/disk_tier.h"

#include <algorithm>
#include <limits>

namespace asyncengine {

DiskTier::DiskTier(BlockManager& blocks, BlockMover& mover, BlockDisk& disk, int32_t max_blocks)
    : blocks_(blocks), mover_(mover), disk_(disk) {
  const auto hosts = static_cast<size_t>(blocks.num_host_blocks());
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
      if (!disk_.contains(name.key)) {
        if (!disk_.put(name, tokens, mover_.host_block(host), static_cast<uint64_t>(host))) return;  // later
        blocks_.pin_host(host);
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
  const auto number = static_cast<uint64_t>(&read - reads_.data());
  while (read.pending < kPendingBlocks) {
    const auto i = static_cast<uint64_t>(read.hosts.size());
    const int32_t block = read.first + static_cast<int32_t>(i);
    read.over = true;
    if (block >= read.most) return;
    const std::span tokens(read.sequence->tokens.at(block * blocks_.block_size()), static_cast<size_t>(blocks_.block_size()));
    const BlockName name{next_key(read.last, tokens), read.last};
    if (!disk_.contains(name.key)) return;
    const int32_t host = blocks_.take_host_block(/*even_copies=*/true);
    if (host < 0) return;
    read.over = false;
    if (!disk_.get(name, tokens, mover_.host_block(host), kReadTicket | number << 32 | i)) {
      return blocks_.give_back_host_block(host);  // later
    }
    read.hosts.push_back(host);
    read.names.push_back(name);
    read.done.push_back(kComes);
    read.last = name.key;
    ++read.pending;
  }
}

void DiskTier::complete(uint64_t ticket, bool done) {
  failed_ += !done;
  if ((ticket & kReadTicket) == 0) {
    written_ += done;
    return blocks_.unpin_host(static_cast<int32_t>(ticket));
  }
  Read& read = reads_[ticket >> 32 & (kReads - 1)];
  read.done[ticket & 0xFFFFFFFF] = done ? kCame : kFailed;
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

void DiskTier::end(Read& read) {
  for (size_t i = read.entered; i < read.hosts.size(); ++i) blocks_.give_back_host_block(read.hosts[i]);
  read.hosts.clear();
  read.names.clear();
  read.done.clear();
  read.entered = 0;
  --num_reads_;
}

}  // namespace asyncengine
