// Lanes of steps that the host computes (core/hybrid/host_rows.h): rows leave and enter by copies.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "core/step_batch.h"
#include "platform/host/host_exchange.h"

namespace asyncengine {

class CpuLanes {
 public:
  CpuLanes(const HostShape& shape, int32_t hidden_size)
      : exchange_(std::make_shared<HostExchange>(shape)),
        residual_bytes_(static_cast<size_t>(hidden_size) * static_cast<size_t>(dtype_size(shape.dtype))),
        saved_(static_cast<size_t>(shape.num_slots) * residual_bytes_) {}

  const std::shared_ptr<HostExchange>& memory() const { return exchange_; }

  // To be called behind attention of a layer, with contiguous rows, one for each token of the step: heads [heads,
  // head_dim], normed and rotated, its result x [num_q_heads * head_dim], and the residual, which nothing is pending
  // for. Then lanes have the positions of the next layer.
  void exchange(StepBatch& batch, int32_t layer, const std::byte* heads, std::byte* x, std::byte* residual) {
    const HostShape& shape = exchange_->shape();
    const size_t heads_bytes = shape.heads() * static_cast<size_t>(shape.head_dim) * static_cast<size_t>(dtype_size(shape.dtype));
    const auto lanes = static_cast<size_t>(batch.num_host_tokens), first = static_cast<size_t>(batch.num_tokens) - lanes;
    const auto leaving = batch.host_rows.subspan(static_cast<size_t>(layer) * lanes, lanes);
    const auto entering = batch.host_rows.subspan(static_cast<size_t>(layer + 1) * lanes, lanes);
    for (size_t lane = 0; lane < lanes; ++lane) {
      const size_t token = first + lane;
      std::byte* of_token = residual + token * residual_bytes_;
      if (const int32_t slot = leaving[lane].slot; slot >= 0) {
        std::memcpy(saved(slot), of_token, residual_bytes_);
        send(slot, static_cast<uint32_t>(batch.step), heads + token * heads_bytes);
      }
      if (const int32_t slot = entering[lane].slot; slot >= 0) {
        std::memcpy(x + token * shape.result_bytes(), exchange_->result(slot), shape.result_bytes());
        std::memcpy(of_token, saved(slot), residual_bytes_);
      }
      batch.positions[token] = entering[lane].position;
    }
  }

 private:
  std::byte* saved(int32_t slot) { return saved_.data() + static_cast<size_t>(slot) * residual_bytes_; }

  void send(int32_t slot, uint32_t step, const std::byte* heads) {
    const HostShape& shape = exchange_->shape();
    const size_t words = shape.head_words();
    uint64_t* mailbox = exchange_->mailbox(slot);
    for (size_t head = 0; head < shape.heads(); ++head) {
      for (size_t i = 0; i < words; ++i) {
        std::atomic_ref(*mailbox++).store(uint64_t{step} << 32 | payload(heads, head, i), std::memory_order_relaxed);
      }
    }
  }

  uint32_t payload(const std::byte* heads, size_t head, size_t i) const {
    const auto dim = static_cast<size_t>(exchange_->shape().head_dim);
    uint32_t bits = 0;
    if (exchange_->shape().dtype == Dtype::kFloat32) {
      std::memcpy(&bits, heads + (head * dim + i) * sizeof bits, sizeof bits);
      return bits;
    }
    uint16_t low = 0, high = 0;
    std::memcpy(&low, heads + (head * dim + i) * sizeof low, sizeof low);
    std::memcpy(&high, heads + (head * dim + i + dim / 2) * sizeof high, sizeof high);
    return uint32_t{high} << 16 | low;
  }

  std::shared_ptr<HostExchange> exchange_;
  size_t residual_bytes_;
  std::vector<std::byte> saved_;  // of rows that have left, by slot
};

}  // namespace asyncengine
