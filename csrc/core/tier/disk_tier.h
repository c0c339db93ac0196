// KV blocks on a disk: what the host holds is written behind it, and read back to the host when a prompt asks for it.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/block_manager.h"
#include "core/sequence.h"
#include "core/tier/block_disk.h"
#include "core/tier/block_mover.h"

namespace asyncengine {

class DiskTier {
 public:
  static constexpr size_t kReads = 4;
  // Blocks of a read that the disk is handed at once: the key of a block takes a microsecond to compute.
  static constexpr size_t kPendingBlocks = 32;
  // Without a block more, or a write less: the read is given up, and the disk is left alone. A disk that is slow but well has
  // 4 * 32 blocks before a read's first one.
  static constexpr int64_t kPatienceNs = 5'000'000'000;

  // A sequence has `max_blocks` at most.
  DiskTier(BlockManager& blocks, BlockMover& mover, BlockDisk& disk, int32_t max_blocks);

  // The host block holds something new. It is written as soon as the disk takes it, unless it is evicted before.
  void write(int32_t host);
  // Reads what follows the chain: the ids of the first blocks of the sequence's tokens. No block beyond `most`, and no more
  // than the host holds beside the chain. True: the sequence waits for it. Each read of a sequence begins behind the one
  // before: where others evict the beginning of what is read, the sequence is served without. It waits no longer than the
  // disk takes for each block, at most kPatienceNs, and not at all once it has ended; a host block that the disk may still
  // write to stays pinned until the disk has completed it.
  bool read(Sequence& sequence, std::span<const int32_t> chain, int32_t most);
  int32_t num_reads() const { return num_reads_; }
  // The name that the name of a first block follows.
  BlockKey root(uint64_t salt) const { return disk_.root(salt); }

  // Takes in what is over, and writes. `ended(sequence)` for each sequence that waits no more. True: something moved. Of
  // `awake_ns` see TimeLimit::awake().
  template <typename Ended>
  bool advance(int64_t awake_ns, Ended&& ended) {
    bool moved = false;
    awake_ns_ = awake_ns;
    disk_.take_completions([this](uint64_t ticket, bool done) { complete(ticket, done); });
    for (Read& read : reads_) {
      if (read.sequence == nullptr) continue;
      go_on(read);
      if (read.pending > 0 && read.sequence->state != SequenceState::kFinished && !given_up(read)) continue;
      end(read);
      ended(*std::exchange(read.sequence, nullptr));
      moved = true;
    }
    write_some();
    for (const DiskCalls calls : {DiskCalls::kReads, DiskCalls::kWrites}) leave_if_late(calls);
    return moved;
  }

  int64_t written() const { return written_; }
  int64_t read_blocks() const { return read_blocks_; }
  int64_t failed() const { return failed_; }

 private:
  // A ticket names a host block; this bit says that it is read.
  static constexpr uint64_t kReadTicket = uint64_t{1} << 63;
  static constexpr int64_t kNobody = -1;

  static constexpr uint8_t kComes = 0, kCame = 1, kFailed = 2;

  struct UnderWay {
    int32_t count = 0;     // blocks that the disk is to complete
    int64_t since_ns = 0;  // it has completed none, or had none
  };
  struct Read {
    Sequence* sequence = nullptr;
    Chain parent;                  // what the next block that is entered follows
    BlockKey last;                 // of the last block that was asked for
    int32_t first = 0, most = 0;   // of its blocks, by their numbers in the sequence
    std::vector<int32_t> hosts;    // of all that were asked for
    std::vector<BlockName> names;
    std::vector<uint8_t> done;
    size_t pending = 0;
    int64_t since_ns = 0;          // it waits for the next block
    size_t entered = 0;            // the prefix cache knows so many of them
    bool over = false;             // no more is asked for
  };
  void complete(uint64_t ticket, bool done);
  void go_on(Read& read);
  void ask(Read& read);
  UnderWay& under_way(DiskCalls calls) { return under_way_[static_cast<size_t>(calls)]; }
  void begin(DiskCalls calls);
  void leave_if_late(DiskCalls calls);
  bool given_up(Read& read);
  void end(Read& read);
  void write_some();

  BlockManager& blocks_;
  BlockMover& mover_;
  BlockDisk& disk_;
  std::array<Read, kReads> reads_;
  const int64_t max_blocks_;
  std::vector<int64_t> places_;      // by host block that is read: its read * max_blocks + its place there, or kNobody
  std::vector<int32_t> to_write_;    // a ring of host blocks
  std::vector<uint8_t> is_to_write_;  // by host block
  size_t to_write_begin_ = 0, to_write_count_ = 0;
  int32_t num_reads_ = 0;
  std::array<UnderWay, 2> under_way_;  // by DiskCalls
  int64_t awake_ns_ = 0;
  int64_t written_ = 0, read_blocks_ = 0, failed_ = 0;
};

}  // namespace asyncengine
