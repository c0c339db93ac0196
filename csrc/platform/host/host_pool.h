// Host memory for KV blocks, and what a device needs to copy them in few large pieces.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "core/tier/block_mover.h"
#include "platform/cuda/pinned_memory.h"
#include "platform/host/host_states.h"

namespace asyncengine {

// A block's planes (of keys and values, layer by layer) lie scattered in the device's cache and side by side on the host. A
// graph gathers the blocks of a transfer in device memory, from where each goes over the link in one copy; or the other way.
class HostPool {
 public:
  // Pins `num_blocks`, or half of them, or a quarter, and so on, down to those of one transfer. Throws
  // CudaError if not even that. Blocks of 0 bytes take no memory.
  HostPool(const CudaDevice& device, size_t block_bytes, int32_t num_blocks, int32_t max_moves)
      : block_bytes_(block_bytes), num_blocks_(num_blocks), max_moves_(max_moves) {
    if (block_bytes > 0) memory_ = pin_most(device, block_bytes, num_blocks_, max_moves);
    lists_ = allocate_pinned(device, BlockMover::kTransfers * list_words() * sizeof(int32_t));
    std::fill_n(reinterpret_cast<int32_t*>(lists_.data()), BlockMover::kTransfers * list_words(), 0);
  }

  // Snapshots of states beside the blocks; null: there are none.
  void keep_states(std::shared_ptr<HostStates> states) { states_ = std::move(states); }
  const std::shared_ptr<HostStates>& states() const { return states_; }
  size_t block_bytes() const { return block_bytes_; }
  int32_t num_blocks() const { return num_blocks_; }
  int32_t max_moves() const { return max_moves_; }
  std::byte* block(int32_t host) const { return memory_.get() + static_cast<size_t>(host) * block_bytes_; }
  size_t list_words() const { return (static_cast<size_t>(max_moves_) + 1 + 15) / 16 * 16; }
  // The list of a transfer: the count of the device's blocks, then the blocks. The transfer's graph reads it.
  int32_t* list(int transfer) const {
    return reinterpret_cast<int32_t*>(lists_.data()) + static_cast<size_t>(transfer) * list_words();
  }
  // Memory of the device, of max_moves() blocks for each transfer. Before the first transfer.
  void set_gathered(std::byte* memory) { gathered_ = memory; }
  // Memory in which the graph of a transfer finds the blocks side by side, or puts them.
  std::byte* gathered(int transfer) const {
    return gathered_ + static_cast<size_t>(transfer) * static_cast<size_t>(max_moves_) * block_bytes_;
  }

 private:
  size_t block_bytes_;
  int32_t num_blocks_, max_moves_;
  std::shared_ptr<std::byte[]> memory_;
  PinnedBuffer lists_;
  std::shared_ptr<HostStates> states_;
  std::byte* gathered_ = nullptr;
};

}  // namespace asyncengine
