// KV blocks on the host: cached blocks are copied out before they are evicted, and come back when a prompt asks for them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/backoff.h"
#include "core/block_manager.h"
#include "core/sequence.h"
#include "core/stats.h"
#include "core/step_costs.h"
#include "core/tier/block_mover.h"
#include "core/tier/disk_tier.h"
#include "core/tier/state_tier.h"

namespace asyncengine {

// A preempted sequence needs nothing of its own here: its blocks are a prefix that the prefix cache knows, and so it resumes by
// copies instead of computing its prompt and output once more. Where layers keep a state, its last block is one as well, with what
// it has, and all are held until those that others would use first have copies.
//
// Blocks that are copied out are held meanwhile, and so are those that come in; nobody's step touches either. A load ends as
// a whole: then the prefix cache of the device knows all of it, and the sequence is admitted as any other.
class HostTier {
 public:
  struct Config {
    int32_t spare_blocks = 0;   // so many blocks of the device are kept ready for use: without content, or copied out
    int32_t max_blocks = 0;     // of a sequence
  };
  // Without a disk there is no third tier.
  HostTier(const Config& config, BlockManager& blocks, BlockMover& mover, BlockDisk* disk = nullptr);
  // Snapshots of states go with their blocks.
  void keep_states(StatePool& states, BlockMover& mover) { states_ = std::make_unique<StateTier>(states, mover); }
  const StateTier* states() const { return states_.get(); }

  // Blocks that transfers out hold, and are about to release.
  int32_t blocks_coming() const { return blocks_coming_; }
  bool busy() const {
    return num_transfers_ > 0 || !leaving_.empty() || num_loading() > 0 || storing() || (states_ != nullptr && states_->busy());
  }

  // Takes in transfers that are over and starts others. `ended(sequence)` for each load that is over, and
  // `stored(sequence, hosts)` for a store. True: something moved. Of `awake_ns` see TimeLimit::awake().
  template <typename Ended, typename Stored>
  bool advance(int64_t awake_ns, Ended&& ended, Stored&& stored) {
    bool moved = false;
    awake_ns_ = awake_ns;
    for (int i = 0; i < BlockMover::kTransfers; ++i) moved |= finish_transfer(i) | start_transfer(i);
    if (states_ != nullptr) moved |= states_->advance(awake_ns);
    for (Load& load : loads_) {
      if (load.sequence == nullptr || !load.over() || (load.state >= 0 && !states_->over(load.state))) continue;
      end(load);
      ended(*std::exchange(load.sequence, nullptr));
      moved = true;
    }
    if (store_.sequence != nullptr && store_.over()) {
      const bool done = end_store();
      stored(*std::exchange(store_.sequence, nullptr), done ? std::span<const int32_t>(store_.hosts) : std::span<const int32_t>());
      store_.hosts.clear();
      moved = true;
    }
    return disk_ == nullptr ? moved : disk_->advance(awake_ns, ended) | moved;
  }

  enum class Loading : uint8_t { kNothing, kStarted, kLater };
  // `chain`: the blocks of a prefix, in order, of both kinds. Blocks of the device must be free for those of the host.
  // `state`: the chain behind them, if its snapshot is on the host alone; 0: it is not to come.
  // kNothing: all are on the device. kLater: some come for another sequence, or too many sequences load.
  Loading load(Sequence& sequence, std::span<const int32_t> chain, uint64_t state = 0);
  // A sequence is about to give these back, the first before the others. They are held until a transfer's have copies: whoever
  // lacks blocks would use others before that, and what is behind them would be worth nothing.
  void hold(std::span<const int32_t> blocks);
  // Nanoseconds that a swap of so many blocks costs the sequences that wait for them, and the sequence that comes back.
  int64_t swap_ns(const StepCosts& costs, int32_t blocks) const;
  // Copies out the blocks of a sequence that no step in flight touches; meanwhile it waits. At the end stored() gets the host
  // blocks in their order, pinned: copies that were there already, which others may share, and new ones. None: it came to
  // nothing. False: another store is under way, or the host has no room.
  bool store(Sequence& sequence, std::span<const int32_t> blocks);
  bool storing() const { return store_.sequence != nullptr; }
  // True if a store of so many blocks would begin.
  bool can_store(int32_t blocks) const {
    return !broken() && !storing() && blocks <= blocks_.num_host_blocks() - blocks_.num_host_pinned();
  }
  // A host block holds what the prefix cache knows of now.
  void entered(int32_t host) {
    if (disk_ != nullptr && blocks_.host_holds(host)) disk_->write(host);
  }
  // The disk's part of load(): reads what follows the chain. See DiskTier::read.
  bool read_disk(Sequence& sequence, std::span<const int32_t> chain, int32_t most) {
    return disk_ != nullptr && disk_->read(sequence, chain, most);
  }
  const DiskTier* disk() const { return disk_.get(); }
  size_t block_bytes() const { return mover_.block_bytes(); }
  // The sequence has no use for the rest of its load.
  void cancel(const Sequence& sequence);

  // Blocks of the device that transfers and loads hold, one by one.
  template <typename Visit>
  void visit_held(Visit&& visit) const {
    for (int i = 0; i < BlockMover::kTransfers / 2; ++i) {
      if (transfers_[static_cast<size_t>(i)].of_store) continue;
      for (const BlockMove& move : transfers_[static_cast<size_t>(i)].moves) visit(move.block);
    }
    std::ranges::for_each(leaving_, visit);
    std::ranges::for_each(store_.blocks, visit);
    for (const Load& load : loads_) std::ranges::for_each(load.held, visit);
  }
  // Likewise of the host, but for those that the disk holds.
  template <typename Visit>
  void visit_pinned(Visit&& visit) const {
    for (int i = 0; i < BlockMover::kTransfers / 2; ++i) {
      if (transfers_[static_cast<size_t>(i)].of_store) continue;
      for (const BlockMove& move : transfers_[static_cast<size_t>(i)].moves) visit(move.host);
    }
    std::ranges::for_each(store_.hosts, visit);
    for (const Load& load : loads_) {
      for (const BlockMove& move : load.moves) visit(move.host);
    }
  }

  int64_t copied_out() const { return copied_out_; }
  void report(Stats& stats) const;
  // Sequences that wait for blocks.
  int32_t num_loading() const { return num_loads_ + (disk_ != nullptr ? disk_->num_reads() : 0); }

 private:
  static constexpr size_t kLoads = 8;

  struct Load {
    Sequence* sequence = nullptr;
    std::vector<int32_t> held;     // blocks of the device, in the order of the prefix
    std::vector<BlockMove> moves;  // those of them that come in
    size_t started = 0, ended = 0;
    int state = -1;                // load of a snapshot, or none
    bool cancelled = false;
    bool over() const { return ended == started && (cancelled || ended == moves.size()); }
  };
  struct Store {
    Sequence* sequence = nullptr;
    std::vector<int32_t> blocks, hosts;  // of the device, which are held; and of the host
    std::vector<BlockMove> moves;        // of those that have no copy yet
    size_t started = 0, ended = 0;
    bool failed = false;  // or it has no use any more
    bool over() const { return ended == started && (failed || ended == moves.size()); }
  };
  struct Transfer {
    std::vector<BlockMove> moves;  // empty: none is under way
    Load* load = nullptr;
    bool of_store = false;
    bool of_leaving = false;
  };

  bool finish_transfer(int i);
  void conclude(int i, bool done);
  bool start_transfer(int i);
  void collect_spill(Transfer& transfer);
  void collect_leaving(Transfer& transfer);
  void let_go();
  void collect_load(Transfer& transfer);
  void finish_spill(const Transfer& transfer, bool done);
  void finish_load(const Transfer& transfer, bool done);
  void end(Load& load);
  bool collect_store(Transfer& transfer);
  bool end_store();
  bool give_up_store();
  bool needs_copy(int32_t block) const { return blocks_.findable(block) && blocks_.host_copy_of(block) < 0; }
  bool broken() const { return backoff_.paused(awake_ns_); }

  Config config_;
  BlockManager& blocks_;
  BlockMover& mover_;
  std::unique_ptr<DiskTier> disk_;
  std::unique_ptr<StateTier> states_;  // null: layers keep none, or none is kept on the host
  std::array<Transfer, BlockMover::kTransfers> transfers_;
  std::array<Load, kLoads> loads_;
  Store store_;
  std::vector<int32_t> leaving_;  // blocks that are held and in no transfer yet
  std::vector<uint8_t> coming_;  // by host block: a load brings it in
  int num_transfers_ = 0;
  int64_t awake_ns_ = 0;
  Backoff backoff_;  // of transfers
  int32_t num_loads_ = 0, blocks_coming_ = 0;
  int64_t copied_out_ = 0, copied_in_ = 0, failed_transfers_ = 0;
};

}  // namespace asyncengine
