// Moves KV blocks between a device and the host by graphs that gather and scatter them.
#pragma once

#include <array>
#include <memory>
#include <span>

#include "platform/host/host_pool.h"
#include "step_loop/stream_mover.h"

namespace asyncengine {

// A transfer is one graph and a copy for each run of host blocks that lie side by side.
class GraphMover final : public StreamMover {
 public:
  using Graphs = std::array<CudaGraphExec, kTransfers>;  // of those that go out they gather, of the others they scatter

  GraphMover(const CudaDevice& device, std::shared_ptr<HostPool> pool, const Graphs& graphs);

  int32_t num_host_blocks() const override { return pool_->num_blocks(); }
  int32_t max_moves() const override { return pool_->max_moves(); }
  size_t block_bytes() const override { return pool_->block_bytes(); }
  std::byte* host_block(int32_t host) override { return pool_->block(host); }

 private:
  bool enqueue(int transfer, std::span<const BlockMove> moves, CudaStream cuda_stream) override;
  bool copy_runs(int transfer, std::span<const BlockMove> moves, CudaStream cuda_stream);

  std::shared_ptr<HostPool> pool_;
  Graphs graphs_;
};

}  // namespace asyncengine
