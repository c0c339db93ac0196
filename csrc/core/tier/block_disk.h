// A third place for KV blocks, behind the host's: named by what they hold, not by who wrote them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "core/digest.h"

namespace asyncengine {

struct BlockName {
  BlockKey key, parent;
};

enum class DiskCalls : uint8_t { kReads, kWrites };

// No call waits. The memory at `data` and `target` is the disk's until the completion is taken.
class BlockDisk {
 public:
  virtual ~BlockDisk() = default;
  virtual BlockKey root(uint64_t salt) const = 0;
  virtual bool contains(const BlockKey& key) const = 0;
  // False: not now, and no completion follows.
  virtual bool put(const BlockName& name, std::span<const int32_t> tokens, const std::byte* data, uint64_t ticket) = 0;
  virtual bool get(const BlockName& name, std::span<const int32_t> tokens, std::byte* target, uint64_t ticket) = 0;
  // Its reads, or writes, take too long. They are still to be completed; until then, and for a while, contains() and get(), or
  // put(), answer false.
  virtual void leave_alone(DiskCalls calls) = 0;
  using Visit = std::function<void(uint64_t ticket, bool done)>;
  virtual void take_completions(const Visit& visit) = 0;
};

}  // namespace asyncengine
