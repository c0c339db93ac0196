// Attention for host rows by a device that reads the host's memory over its link.
#pragma once

#include <cstdint>
#include <span>

#include "core/hybrid/host_rows.h"
#include "core/tier/block_mover.h"

namespace asyncengine {

// One batch of jobs at a time, whose mailboxes are there. All calls come from one thread, and none waits.
class LinkAttention {
 public:
  virtual ~LinkAttention() = default;
  virtual int32_t max_jobs() const = 0;  // of a batch
  // False: nothing was started.
  virtual bool start(std::span<const HostAttentionJob> jobs) = 0;
  virtual MoveStatus poll() = 0;
};

}  // namespace asyncengine
