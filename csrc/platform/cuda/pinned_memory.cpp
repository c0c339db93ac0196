#include "platform/cuda/pinned_memory.h"

#include <algorithm>
#include <exception>
#include <thread>

#include "core/huge_pages.h"

namespace asyncengine {
namespace {

constexpr size_t kHugePage = HugePageAllocator<std::byte>::kHugePage;
constexpr unsigned kMostThreads = 16;  // more gain nothing: memory is the limit

// Null if the system gives or pins no such memory.
std::shared_ptr<std::byte[]> register_huge(const CudaDevice& device, size_t bytes) try {
  const size_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;  // nobody else's memory is pinned with it
  std::shared_ptr<std::byte[]> memory = huge_memory(whole);
  fill_memory(memory.get(), whole, 0, static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, kMostThreads)));
  if (device.call<&CudaRuntime::host_register>(memory.get(), whole, kCudaHostRegisterMapped) != kCudaSuccess) return nullptr;
  std::byte* const address = memory.get();
  return {address, [device, memory = std::move(memory)](std::byte* pinned) { device.call<&CudaRuntime::host_unregister>(pinned); }};
} catch (const std::exception&) {  // no memory, or no thread
  return nullptr;
}

}  // namespace

std::shared_ptr<std::byte[]> pin_huge(const CudaDevice& device, size_t bytes, int& error) {
  error = kCudaSuccess;
  if (std::shared_ptr<std::byte[]> memory = register_huge(device, bytes)) return memory;
  const auto memory = std::make_shared<PinnedBuffer>(pin(device, bytes, error));
  return {memory, memory->data()};
}

std::shared_ptr<std::byte[]> pin_most(const CudaDevice& device, size_t bytes, int32_t& count, int32_t least) {
  int error = kCudaErrorMemoryAllocation;
  for (; count >= least; count /= 2) {
    auto memory = pin_huge(device, static_cast<size_t>(count) * bytes, error);
    if (error == kCudaSuccess) return memory;
  }
  throw CudaError(device.describe(error, "cudaHostAlloc"));
}

}  // namespace asyncengine
