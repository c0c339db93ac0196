// Host memory for snapshots of states, and where a device has its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "platform/cuda/pinned_memory.h"

namespace asyncengine {

// The states of a slot lie layer by layer in the device's memory, and side by side on the host.
class HostStates {
 public:
  struct Layer {
    std::byte* base;       // of state slot 0
    size_t bytes_per_slot;
  };
  // Pins `num_states`, or half of them, and so on. Throws CudaError if not even one.
  HostStates(const CudaDevice& device, std::vector<Layer> layers, int32_t num_states)
      : layers_(std::move(layers)), num_states_(num_states) {
    for (const Layer& layer : layers_) state_bytes_ += layer.bytes_per_slot;
    memory_ = pin_most(device, state_bytes_, num_states_, /*least=*/1);
  }

  const std::vector<Layer>& layers() const { return layers_; }
  int32_t num_states() const { return num_states_; }
  size_t state_bytes() const { return state_bytes_; }
  std::byte* state(int32_t host) const { return memory_.get() + static_cast<size_t>(host) * state_bytes_; }

 private:
  std::vector<Layer> layers_;
  size_t state_bytes_ = 0;
  int32_t num_states_;
  std::shared_ptr<std::byte[]> memory_;
};

}  // namespace asyncengine
