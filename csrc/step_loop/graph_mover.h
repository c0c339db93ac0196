// Moves KV blocks between a device and the host on CUDA streams of their own, beside the steps.
#pragma once

#include <array>
#include <memory>
#include <span>

#include "core/tier/block_mover.h"
#include "platform/host/host_pool.h"

namespace asyncengine {

// A transfer is one graph, a copy for each run of host blocks that lie side by side, and an event. Each has a CUDA stream, so
// that both directions of the link are in use, and nothing that waits is behind something that is not urgent.
class GraphMover final : public BlockMover {
 public:
  using Graphs = std::array<CudaGraphExec, kTransfers>;  // of those that go out they gather, of the others they scatter

  GraphMover(const CudaDevice& device, std::shared_ptr<HostPool> pool, const Graphs& graphs);
  ~GraphMover() override;
  GraphMover(const GraphMover&) = delete;
  GraphMover& operator=(const GraphMover&) = delete;

  int32_t num_host_blocks() const override { return pool_->num_blocks(); }
  int32_t max_moves() const override { return pool_->max_moves(); }
  size_t block_bytes() const override { return pool_->block_bytes(); }
  std::byte* host_block(int32_t host) override { return pool_->block(host); }
  bool start(int transfer, std::span<const BlockMove> moves) override;
  MoveStatus poll(int transfer) override;

  // True if no transfer that was started may still touch the pool.
  bool at_rest();

 private:
  struct Transfer {
    CudaStream cuda_stream = nullptr;
    CudaEvent done = nullptr;
    bool running = false;
    bool recorded = false;  // the event comes after all that was enqueued
    bool failed = false;    // part of it was not enqueued
  };
  bool enqueue(int transfer, std::span<const BlockMove> moves);
  bool copy(int transfer, std::span<const BlockMove> moves);

  CudaDevice device_;
  std::shared_ptr<HostPool> pool_;
  Graphs graphs_;
  std::array<Transfer, kTransfers> transfers_;
};

}  // namespace asyncengine
