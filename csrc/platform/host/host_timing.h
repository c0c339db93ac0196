// Timing of attention for host rows on this machine: it decides whether host rows pay (core/step_costs.h).
#pragma once

#include "platform/host/host_workers.h"

namespace asyncengine {

struct HostTiming {
  HostShape shape;  // num_slots is chosen
  int32_t block_size = 16;
  bool transposed_keys = false, float8 = false;
  int num_workers = 1;
  int32_t tokens = 2048;  // of context
  size_t bytes = size_t{256} << 20;  // of keys and values: more than caches hold; with many workers more
  int32_t num_layers = 1;  // of a block
  // Memory in place of its own: so many blocks, which nobody uses yet.
  std::byte* pool = nullptr;
  int32_t num_pool_blocks = 0;

  size_t layer_bytes() const;  // of a block's keys and values in a layer
  int32_t num_slots() const { return 3 * num_workers; }  // a worker finds the next job in the queue
};

// Nanoseconds of a worker per token of context in a layer, while all of them attend at once, over rows that are not in caches.
// A pool holds more than num_slots() blocks, and is written to.
double time_host_attention(const CpuIsa& isa, const HostTiming& timing);

}  // namespace asyncengine
