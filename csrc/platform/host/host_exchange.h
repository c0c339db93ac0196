// The memory through which host rows cross (core/hybrid/host_rows.h): for each slot a mailbox, where the device leaves its query, key
// and value, and a place for the result of attention, which the device takes in.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "core/record.h"
#include "platform/cpu/isa.h"
#include "platform/cuda/pinned_memory.h"

namespace asyncengine {

struct HostShape {
#define RECORD HostShape
#define FIELDS "platform/host/host_shape.inl"
#include "core/record.inl"

  size_t heads() const { return static_cast<size_t>(num_q_heads) + 2 * static_cast<size_t>(num_kv_heads); }
  size_t head_words() const { return static_cast<size_t>(dtype == Dtype::kFloat32 ? head_dim : head_dim / 2); }
  size_t mailbox_words() const { return heads() * head_words(); }
  size_t result_bytes() const {
    return static_cast<size_t>(num_q_heads) * static_cast<size_t>(head_dim) * static_cast<size_t>(dtype_size(dtype));
  }
};

class HostExchange {
 public:
  // Memory that steps on the host alone touch.
  explicit HostExchange(const HostShape& shape) : shape_(shape), plain_(new std::byte[bytes()]), memory_(plain_.get()) { clear(); }
  // Memory that a device reads and writes over the link. Throws CudaError if it cannot be pinned.
  HostExchange(const CudaDevice& device, const HostShape& shape) : shape_(shape) {
    pinned_ = allocate_pinned(device, bytes());
    memory_ = pinned_.data();
    clear();
  }

  const HostShape& shape() const { return shape_; }
  // Words [heads][head_words]: each the low half of its step's number << 32 | a payload.
  uint64_t* mailbox(int32_t slot) const {
    return reinterpret_cast<uint64_t*>(memory_) + static_cast<size_t>(slot) * shape_.mailbox_words();
  }
  // [num_q_heads, head_dim] in the shape's dtype.
  std::byte* result(int32_t slot) const { return memory_ + mailbox_bytes() + static_cast<size_t>(slot) * shape_.result_bytes(); }

 private:
  size_t mailbox_bytes() const { return static_cast<size_t>(shape_.num_slots) * shape_.mailbox_words() * sizeof(uint64_t); }
  size_t bytes() const {
    return std::max<size_t>(1, mailbox_bytes() + static_cast<size_t>(shape_.num_slots) * shape_.result_bytes());
  }
  void clear() { std::memset(memory_, 0, bytes()); }

  HostShape shape_;
  std::unique_ptr<std::byte[]> plain_;
  PinnedBuffer pinned_;
  std::byte* memory_ = nullptr;
};

}  // namespace asyncengine
