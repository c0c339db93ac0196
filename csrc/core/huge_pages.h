// Memory for arrays that a step touches in scattered places.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace asyncengine {

// Starts at a cache line, so that 16 tokens are one line. A large array asks for huge pages, where the system gives them
// to those who ask: a miss of the cache is then mostly not one of the page tables as well.
template <typename T>
struct HugePageAllocator {
  using value_type = T;
  static constexpr size_t kHugePage = size_t{2} << 20, kCacheLine = 64;

  HugePageAllocator() = default;
  template <typename U>
  HugePageAllocator(const HugePageAllocator<U>&) {}

  static constexpr std::align_val_t alignment(size_t bytes) {
    return std::align_val_t{bytes >= kHugePage ? kHugePage : kCacheLine};
  }
  T* allocate(size_t count) {
    const size_t bytes = count * sizeof(T);
    void* memory = ::operator new(bytes, alignment(bytes));
#ifdef MADV_HUGEPAGE
    if (bytes >= kHugePage) madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);  // advice: failing is fine
#endif
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t count) { ::operator delete(memory, alignment(count * sizeof(T))); }
  bool operator==(const HugePageAllocator&) const = default;
};

// Untouched until it is used.
inline std::shared_ptr<std::byte[]> huge_memory(size_t bytes) {
  HugePageAllocator<std::byte> allocator;
  return {allocator.allocate(bytes), [allocator, bytes](std::byte* memory) mutable { allocator.deallocate(memory, bytes); }};
}

// By `threads` at once: the system hands out pages to whoever touches them first, one at a time.
inline void fill_memory(std::byte* memory, size_t bytes, int value, int threads) {
  std::vector<std::jthread> fillers;
  const size_t part = bytes / static_cast<size_t>(threads);
  for (int i = 0; i < threads; ++i) {
    const size_t begin = part * static_cast<size_t>(i), end = i + 1 == threads ? bytes : begin + part;
    fillers.emplace_back([=] { std::memset(memory + begin, value, end - begin); });
  }
}

template <typename T>
using HugeVector = std::vector<T, HugePageAllocator<T>>;

}  // namespace asyncengine
