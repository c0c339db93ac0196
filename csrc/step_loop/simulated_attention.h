// Attention for host rows of the simulated model: threads that hash the tokens in a row's host blocks.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "core/hybrid/host_rows.h"
#include "platform/host/host_pool.h"

namespace asyncengine {

// Hash of a sequence of tokens, by which the simulated model stands for its computations.
class TokenHash {
 public:
  // splitmix64's finaliser.
  static constexpr uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
  }
  static constexpr uint64_t kEmpty = 0x243F6A8885A308D3;
  static constexpr uint64_t extend(uint64_t hash, int64_t token) {
    return mix(hash + 0x9E3779B97F4A7C15 * (static_cast<uint64_t>(token) + 1));
  }
};

// A mailbox is one word whose payload is the token. A worker stores it in the row's block, as the device's key and value are
// the token too, and hashes all tokens up to it. The result also depends on the layer, so that a stale one shows.
class SimulatedAttention final : public HostAttention {
 public:
  struct Config {
    int32_t num_layers = 0, num_slots = 0, block_size = 16;
    int num_workers = 2;
    // Runs in a worker, before it attends. An exception fails the job, and a hook that does not return hangs the
    // worker.
    std::function<void(const HostAttentionJob&)> before = {};
  };
  SimulatedAttention(const Config& config, std::shared_ptr<HostPool> pool);
  // Waits for the threads as close() does, for a second.
  ~SimulatedAttention() override;

  // The device's part.
  void leave(int32_t slot, uint64_t step, int32_t token);
  // Returns the hash of the tokens that the layer's result of attention stands for.
  uint64_t enter(int32_t slot, int32_t layer) const;

  int32_t num_layers() const override;
  void post(const HostAttentionJob& job) override;
  HostAttentionStatus poll(int32_t slot) override;
  void cancel(int32_t slot) override;
  bool close(std::chrono::nanoseconds limit) override;

 private:
  struct Shared;  // owned by the threads too
  std::shared_ptr<Shared> shared_;
  std::vector<std::thread> threads_;
};

}  // namespace asyncengine
