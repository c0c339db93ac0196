// Snapshots of states on the host: copied out before the device's pool evicts them, and back when a prompt asks for them.
#pragma once

#include <array>
#include <cstdint>

#include "core/backoff.h"
#include "core/state_pool.h"
#include "core/stats.h"
#include "core/tier/block_mover.h"

namespace asyncengine {

// A snapshot on the host is known by the chain of the blocks before it, as one of the device's pool is, and goes with the chain
// or by least recent use. Both pools may know the same one.
//
// A snapshot is pinned in both pools while it is copied. A load writes to a snapshot of the device that no step in flight reads.
// The device's pool knows it when the load ends: a step that begins with it is planned behind that.
class StateTier {
 public:
  // A block of the mover is the state of all layers in a state slot. A transfer moves one.
  StateTier(StatePool& device, BlockMover& mover);

  bool holds(uint64_t chain) const { return host_.find(chain) >= 0; }
  // A load brings it in.
  bool comes(uint64_t chain) const;
  // Brings in what the host holds for the chain, which stays known until end(). A load's number, or -1: there is no room for it.
  int load(uint64_t chain);
  // It came, or came to nothing.
  bool over(int load) const { return at(load).phase == Phase::kCame || at(load).phase == Phase::kFailed; }
  // Nobody has a use for it; end() is still to be called when it is over.
  void cancel(int load);
  void end(int load);

  // Takes in transfers that are over and starts others. True: something moved. Of `awake_ns` see TimeLimit::awake().
  bool advance(int64_t awake_ns);
  bool busy() const { return num_busy_ > 0; }
  size_t state_bytes() const { return mover_.block_bytes(); }
  void report(Stats& stats) const;
  // Nothing is under way, and the pool of the host is as it should be.
  bool at_rest() const { return num_busy_ == 0 && host_.num_pinned() == 0 && host_.consistent(); }

 private:
  static constexpr int32_t kAhead = 8;  // of the snapshots that are evicted next, so many have copies or are about to
  static constexpr size_t kLoads = 8;
  static constexpr int32_t kFirst = 1;  // state slot of the first snapshot in host_

  enum class Phase : uint8_t { kNone, kWaits, kMoves, kCame, kFailed };
  struct Load {
    uint64_t chain = 0;
    int32_t state = -1, host = -1;
    Phase phase = Phase::kNone;
  };
  struct Transfer {
    uint64_t chain = 0, last_read = 0;
    int32_t state = -1, host = -1;
    int load = -1;
    bool running = false;
  };
  Load& at(int load) { return loads_[static_cast<size_t>(load)]; }
  const Load& at(int load) const { return loads_[static_cast<size_t>(load)]; }
  bool finish(int transfer);
  bool start(int transfer);
  bool choose_load(Transfer& transfer);
  bool choose_spill(Transfer& transfer);
  void conclude(int transfer, bool done);
  void end_spill(const Transfer& transfer, bool done);

  StatePool& device_;
  BlockMover& mover_;
  StatePool host_;
  std::array<Transfer, BlockMover::kTransfers> transfers_;
  std::array<Load, kLoads> loads_;
  int num_busy_ = 0;  // transfers and loads
  int64_t awake_ns_ = 0;
  Backoff backoff_;
  int64_t copied_out_ = 0, copied_in_ = 0, failed_ = 0;
};

}  // namespace asyncengine
