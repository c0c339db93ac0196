// BlockEvents: changes of the prefix cache, from the step thread to one reader.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/prefix_chain.h"

namespace asyncengine {

// A block became known under a chain (kStored), is known no more (kRemoved), or went to other memory (kMoved). kCleared: events
// were lost, and what the reader knows from those before is worth nothing.
struct BlockEvent {
  enum Kind : uint8_t { kStored, kRemoved, kMoved, kCleared };
  Kind kind = kCleared;
  bool on_host = false;  // where the block is now, or was
  int32_t group = 0;     // 0: the block itself; g + 1: the block of window group g that is found through it
  uint64_t chain = 0;
  Chain parent;
};

// A ring of fixed size. The writer neither waits nor allocates. It drops and counts an event that finds no room, and all events
// after it until the reader has read that some were lost.
class BlockEvents {
 public:
  // `num_device_blocks`: ids from there on are of the host. A capacity of 0 records nothing.
  BlockEvents(size_t capacity, int32_t block_size, int32_t num_device_blocks)
      : num_device_blocks_(num_device_blocks),
        block_size_(static_cast<size_t>(block_size)),
        events_(capacity),
        tokens_(capacity * block_size_) {}

  bool on() const { return !events_.empty(); }
  // Number of events that found no room, for any thread.
  int64_t num_lost() const { return num_lost_.load(std::memory_order_relaxed); }
  size_t block_size() const { return block_size_; }

  // Step thread. `tokens` are those of the block; null for kRemoved.
  void add(BlockEvent::Kind kind, int32_t block, uint64_t chain, Chain parent, const int32_t* tokens, int32_t group = 0) {
    const uint64_t end = end_.load(std::memory_order_relaxed);
    if (lost_.load(std::memory_order_acquire) || end - begin_.load(std::memory_order_acquire) == events_.size()) {
      lost_.store(true, std::memory_order_release);
      num_lost_.store(num_lost() + 1, std::memory_order_relaxed);
      return;
    }
    const size_t i = end % events_.size();
    events_[i] = {kind, block >= num_device_blocks_, group, chain, parent};
    if (tokens != nullptr) std::copy_n(tokens, block_size_, tokens_.begin() + static_cast<ptrdiff_t>(i * block_size_));
    end_.store(end + 1, std::memory_order_release);
  }

  // One thread at a time. Hands `visit` the oldest events, at most `most`, each with the tokens of its block, and kCleared in
  // the place of those that were lost.
  template <typename Visit>
  void drain(size_t most, Visit&& visit) {
    const bool lost = lost_.load(std::memory_order_acquire);  // if so, no event is added until it is false
    const uint64_t end = end_.load(std::memory_order_acquire);
    uint64_t at = begin_.load(std::memory_order_relaxed);
    for (; at < end && most > 0; ++at, --most) {
      const size_t i = at % events_.size();
      visit(events_[i], tokens_.data() + i * block_size_);
    }
    begin_.store(at, std::memory_order_release);
    if (!lost || at < end || most == 0) return;
    visit(BlockEvent{}, nullptr);
    lost_.store(false, std::memory_order_release);
  }

 private:
  int32_t num_device_blocks_;
  size_t block_size_;
  std::vector<BlockEvent> events_;
  std::vector<int32_t> tokens_;  // of each event
  std::atomic<uint64_t> begin_{0}, end_{0};
  std::atomic<bool> lost_{false};
  std::atomic<int64_t> num_lost_{0};
};

}  // namespace asyncengine
