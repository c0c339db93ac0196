// Threads that attend for host rows (core/hybrid/host_rows.h).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "core/hybrid/host_rows.h"
#include "core/record.h"
#include "platform/cpu/isa.h"
#include "platform/cuda/link_attention.h"
#include "platform/host/host_exchange.h"

namespace asyncengine {

// Attention of a layer, beside its shape.
struct HostLayer {
#define RECORD HostLayer
#define FIELDS "platform/host/host_layer.inl"
#include "core/record.inl"
};

// Blocks of the host, each the planes [layers][keys, values] of the device's block side by side.
struct HostBlocks {
  std::byte* base = nullptr;
  size_t block_bytes = 0;
  int32_t block_size = 16;
  bool transposed_keys = false;  // [num_kv_heads, head_dim, block_size]; else, like values, [num_kv_heads, block_size, head_dim]
  std::shared_ptr<void> keep_alive;  // whatever owns them
};

class HostWorkers final : public HostAttention {
 public:
  struct Config {
    std::shared_ptr<HostExchange> exchange;
    HostBlocks blocks;
    std::vector<HostLayer> layers;
    int num_workers = 1;  // 0: the link attends alone
    std::shared_ptr<LinkAttention> link = {};  // takes jobs beside the workers, from a thread of its own; or none
    // Runs in a worker, once it has the mailbox and before it attends: for tests. An exception fails the job, and a
    // hook that does not return hangs the worker.
    std::function<void(const HostAttentionJob&)> before_attending = {};
    std::shared_ptr<void> keep_alive = {};  // whatever else must live as long as a worker
  };
  // Throws std::invalid_argument if a block's planes have not the size that the shape says.
  HostWorkers(const CpuIsa& isa, Config config);
  // Waits for the threads as close() does, for a second.
  ~HostWorkers() override;
  HostWorkers(const HostWorkers&) = delete;
  HostWorkers& operator=(const HostWorkers&) = delete;

  int32_t num_layers() const override;
  void post(const HostAttentionJob& job) override;
  HostAttentionStatus poll(int32_t slot) override;
  void cancel(int32_t slot) override;
  HostAttentionTimes times() const override;

  // Ends the threads; jobs that are not done fail. False: one of them hangs in a job, and goes on owning what it uses.
  bool close(std::chrono::nanoseconds limit) override;

 private:
  struct Shared;  // owned by the threads too
  std::shared_ptr<Shared> shared_;
  std::vector<std::thread> threads_;
};

}  // namespace asyncengine
