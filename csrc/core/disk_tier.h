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
  static constexpr size_t kReads = 4;
  // Of a read, that the disk has at once: the key of a block takes a microsecond to compute.
  static constexpr size_t kPendingBlocks = 32;

  // A sequence has `max_blocks` at most.
  DiskTier(BlockManager& blocks, BlockMover& mover, BlockDisk& disk, int32_t max_blocks);

  // The host block holds something new. It is written as soon as the disk takes it, unless it is evicted before.
  void write(int32_t host);
  // Reads what follows the chain: the ids of the first blocks of the sequence's tokens. No block beyond `most`, and no more
  // than the host holds beside the chain. True: the sequence waits for it. Each read of a sequence begins behind the one
  // before: where others evict the beginning of what is read, the sequence is served without.
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
      if (read.sequence == nullptr) continue;
      go_on(read);
      if (read.pending > 0) continue;
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
  static constexpr uint64_t kReadTicket = uint64_t{1} << 63;

  static constexpr uint8_t kComes = 0, kCame = 1, kFailed = 2;

  struct Read {
    Sequence* sequence = nullptr;
    Chain parent;                  // what the next block that is entered follows
    BlockKey last;                 // of the last block that was asked for
    int32_t first = 0, most = 0;   // of its blocks, by their numbers in the sequence
    std::vector<int32_t> hosts;    // of all that were asked for
    std::vector<BlockName> names;
    std::vector<uint8_t> done;
    size_t pending = 0;
    size_t entered = 0;            // the prefix cache knows so many of them
    bool over = false;             // no more is asked for
  };
  void complete(uint64_t ticket, bool done);
  void go_on(Read& read);
  void ask(Read& read);
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
