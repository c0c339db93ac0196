// Host memory that a device copies from and to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "platform/cuda/cuda_device.h"

namespace asyncengine {

// Memory of one allocator call, freed with its owner. The two kinds differ in who may touch it, not in how it is held.
template <int (*CudaRuntime::*Free)(void*)>
class CudaBuffer {
 public:
  CudaBuffer() = default;
  CudaBuffer(const CudaDevice& device, void* memory, size_t bytes) : device_(device), memory_(memory), bytes_(bytes) {}
  CudaBuffer(CudaBuffer&& other) noexcept { swap(other); }
  CudaBuffer& operator=(CudaBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~CudaBuffer() {
    if (memory_ != nullptr) device_->template call<Free>(memory_);
  }
  std::byte* data() const { return static_cast<std::byte*>(memory_); }
  std::span<std::byte> bytes() const { return {data(), bytes_}; }

 private:
  void swap(CudaBuffer& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
  }
  std::optional<CudaDevice> device_;  // none without memory
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

using PinnedBuffer = CudaBuffer<&CudaRuntime::free_host>;
using DeviceBuffer = CudaBuffer<&CudaRuntime::free>;

// Empty: `error` says why.
inline PinnedBuffer pin(const CudaDevice& device, size_t bytes, int& error) {
  void* memory = nullptr;
  error = device.call<&CudaRuntime::host_alloc>(&memory, bytes, kCudaHostAllocMapped);
  return error == kCudaSuccess ? PinnedBuffer{device, memory, bytes} : PinnedBuffer{};
}

// Pins gigabytes. Threads clear huge pages side by side, which are then pinned where they lie; cudaHostAlloc clears
// small ones on one thread, and takes ten times as long. cudaHostAlloc is asked where the other way fails.
std::shared_ptr<std::byte[]> pin_huge(const CudaDevice& device, size_t bytes, int& error);
// Pins `count` pieces of so many bytes, or half of them, or a quarter, and so on, down to `least`, and sets `count` to how many.
// Throws CudaError if not even those can be pinned.
std::shared_ptr<std::byte[]> pin_most(const CudaDevice& device, size_t bytes, int32_t& count, int32_t least);

// The functions below throw CudaError.
inline PinnedBuffer allocate_pinned(const CudaDevice& device, size_t bytes) {
  int error = kCudaSuccess;
  PinnedBuffer memory = pin(device, bytes, error);
  if (error != kCudaSuccess) throw CudaError(device.describe(error, "cudaHostAlloc"));
  return memory;
}
inline DeviceBuffer allocate_device(const CudaDevice& device, size_t bytes) {
  void* memory = nullptr;
  device.check<&CudaRuntime::malloc>("cudaMalloc", &memory, bytes);
  return {device, memory, bytes};
}

}  // namespace asyncengine
