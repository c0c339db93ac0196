// Moves states between a device and the host: a copy for each layer, of megabytes as a rule.
#pragma once

#include <memory>
#include <span>
#include <utility>

#include "platform/host/host_states.h"
#include "step_loop/stream_mover.h"

namespace asyncengine {

class StateMover final : public StreamMover {
 public:
  StateMover(const CudaDevice& device, std::shared_ptr<HostStates> states) : StreamMover(device), states_(std::move(states)) {}

  int32_t num_host_blocks() const override { return states_->num_states(); }
  int32_t max_moves() const override { return 1; }
  size_t block_bytes() const override { return states_->state_bytes(); }
  std::byte* host_block(int32_t host) override { return states_->state(host); }

 private:
  bool enqueue(int transfer, std::span<const BlockMove> moves, CudaStream cuda_stream) override {
    for (const BlockMove& move : moves) {
      std::byte* host = states_->state(move.host);
      for (const HostStates::Layer& layer : states_->layers()) {
        std::byte* own = layer.base + static_cast<size_t>(move.block) * layer.bytes_per_slot;
        if (!copy(own, host, layer.bytes_per_slot, brings_in(transfer), cuda_stream)) return false;
        host += layer.bytes_per_slot;
      }
    }
    return true;
  }

  std::shared_ptr<HostStates> states_;
};

}  // namespace asyncengine
