// KV blocks on a disk: what the host holds is written behind it, and read back to the host when a prompt asks for it.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/block_disk.h"
#include "core/block_manager.h"
#include "core/block_mover.h"
#include "core/sequence.h"

namespace asyncengine {

class DiskTier {
 public:
  DiskTier(BlockManager& blocks, BlockMover& mover, BlockDisk& disk);

  // The host block holds something new. It is written as soon as the disk takes it, unless it is evicted before.
  void write(int32_t host);
  // Reads what follows the chain: the ids of the first blocks of the sequence's tokens. No block beyond `most`. True: the sequence
  // waits for it, and what the host holds of the chain is not evicted for what comes. Each read of a sequence begins behind the one before: where the
  // host cannot hold all of a prefix, what is read evicts what was, and the sequence is served without.
  bool read(Sequence& sequence, std::span<const int32_t> chain, int32_t most);
  int32_t num_reads() const { return num_reads_; }
  // What the name of a first block follows.
  BlockKey root(uint64_t salt) const { return disk_.root(salt); }

  // Takes in what is over, and writes. `ended(sequence)` for each sequence that waits no more. True: something moved.
  template <typename Ended>
  bool advance(Ended&& ended) {
    bool moved = false;
    disk_.take_completions([this](uint64_t ticket, bool done) { complete(ticket, done); });
    for (Read& read : reads_) {
      if (read.sequence == nullptr || read.pending > 0) continue;
      end(read);
      ended(*std::exchange(read.sequence, nullptr));
      moved = true;
    }
    write_some();
    return moved;
  }

  int64_t written() const { return written_; }
  int64_t read_blocks() const { return read_blocks_; }
  int64_t failed() const { return failed_; }

 private:
  static constexpr size_t kReads = 4;
  static constexpr int32_t kBlocksOfARead = 64;  // the key of a block takes a microsecond to compute
  static constexpr uint64_t kReadTicket = uint64_t{1} << 63;

  struct Read {
    Sequence* sequence = nullptr;
    Chain parent;                  // what the first of its blocks follows
    int32_t first = 0;             // its number in the sequence
    std::vector<int32_t> hosts;
    std::vector<BlockName> names;
    std::vector<uint8_t> done;
    size_t pending = 0;
  };
  void complete(uint64_t ticket, bool done);
  void end(Read& read);
  void write_some();

  BlockManager& blocks_;
  BlockMover& mover_;
  BlockDisk& disk_;
  std::array<Read, kReads> reads_;
  std::vector<int32_t> to_write_;    // a ring of host blocks
  std::vector<uint8_t> is_to_write_;  // by host block
  size_t to_write_begin_ = 0, to_write_count_ = 0;
  int32_t num_reads_ = 0;
  int64_t written_ = 0, read_blocks_ = 0, failed_ = 0;
};

}  // namespace asyncengine
