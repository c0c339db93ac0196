#include "core/disk_tier.h"

#include <algorithm>
#include <limits>

namespace asyncengine {

DiskTier::DiskTier(BlockManager& blocks, BlockMover& mover, BlockDisk& disk) : blocks_(blocks), mover_(mover), disk_(disk) {
  const auto hosts = static_cast<size_t>(blocks.num_host_blocks());
  to_write_.resize(hosts);
  is_to_write_.assign(hosts, 0);
  for (Read& read : reads_) {
    read.hosts.reserve(kBlocksOfARead);
    read.names.reserve(kBlocksOfARead);
    read.done.reserve(kBlocksOfARead);
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
  for (auto id = chain.rbegin(); id != chain.rend(); ++id) {  // the beginning last: it is evicted behind the end
    const int32_t host = *id >= blocks_.num_blocks() ? *id - blocks_.num_blocks() : blocks_.host_copy_of(*id);
    if (host >= 0) blocks_.touch_host(host);
  }
  const uint64_t salt = sequence.request->salt;
  const auto number = static_cast<uint64_t>(free - reads_.begin());
  BlockKey parent = chain.empty() ? disk_.root(salt) : blocks_.name_of(chain.back()).key;
  read.parent = chain.empty() ? Chain{salt, true} : blocks_.chain_of(chain.back());
  read.first = found;
  const auto size = static_cast<size_t>(blocks_.block_size());
  for (int32_t i = found; i < std::min(most, found + kBlocksOfARead); ++i) {
    const std::span tokens(sequence.tokens.at(i * blocks_.block_size()), size);
    const BlockName name{next_key(parent, tokens), parent};
    if (!disk_.contains(name.key)) break;
    const int32_t host = blocks_.take_host_block(/*even_copies=*/true);
    if (host < 0) break;
    if (!disk_.get(name, tokens, mover_.host_block(host), kReadTicket | number << 32 | static_cast<uint64_t>(i - found))) {
      blocks_.give_back_host_block(host);
      break;
    }
    read.hosts.push_back(host);
    read.names.push_back(name);
    parent = name.key;
  }
  if (read.hosts.empty()) return false;
  read.done.assign(read.hosts.size(), 0);
  read.pending = read.hosts.size();
  read.sequence = &sequence;
  sequence.reads_from = found + 1;
  ++num_reads_;
  return true;
}

void DiskTier::complete(uint64_t ticket, bool done) {
  failed_ += !done;
  if ((ticket & kReadTicket) == 0) {
    written_ += done;
    return blocks_.unpin_host(static_cast<int32_t>(ticket));
  }
  Read& read = reads_[ticket >> 32 & (kReads - 1)];
  read.done[ticket & 0xFFFFFFFF] = done;
  --read.pending;
}

// Behind a block that did not come nothing is of use. The tokens of a sequence that has ended are still there.
void DiskTier::end(Read& read) {
  bool usable = true;
  for (size_t i = 0; i < read.hosts.size(); ++i) {
    usable = usable && read.done[i] != 0;
    if (!usable) {
      blocks_.give_back_host_block(read.hosts[i]);
      continue;
    }
    const auto position = (read.first + static_cast<int32_t>(i)) * blocks_.block_size();
    read.parent = blocks_.enter_host(read.hosts[i], read.parent, read.sequence->tokens.at(position), read.names[i]);
    ++read_blocks_;
  }
  if (!usable) read.sequence->reads_from = std::numeric_limits<int32_t>::max();
  read.hosts.clear();
  read.names.clear();
  --num_reads_;
}

}  // namespace asyncengine
