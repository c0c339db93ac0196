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
  HostStates(const CudaDevice& device, std::vector<Layer> layers, int32_t num_states) : layers_(std::move(layers)) {
    for (const Layer& layer : layers_) state_bytes_ += layer.bytes_per_slot;
    int error = kCudaErrorMemoryAllocation;
    for (; error != kCudaSuccess && num_states > 0; num_states /= 2) {
      memory_ = pin_huge(device, static_cast<size_t>(num_states) * state_bytes_, error);
      num_states_ = num_states;
    }
    if (error != kCudaSuccess) throw CudaError(device.describe(error, "cudaHostAlloc"));
  }

  const std::vector<Layer>& layers() const { return layers_; }
  int32_t num_states() const { return num_states_; }
  size_t state_bytes() const { return state_bytes_; }
  std::byte* state(int32_t host) const { return memory_.get() + static_cast<size_t>(host) * state_bytes_; }

 private:
  std::vector<Layer> layers_;
  size_t state_bytes_ = 0;
  int32_t num_states_ = 0;
  std::shared_ptr<std::byte[]> memory_;
};

}  // namespace asyncengine
