// Transfers between a device and the host on CUDA streams of their own, beside the steps.
#pragma once

#include <array>
#include <span>

#include "core/tier/block_mover.h"
#include "platform/cuda/cuda_device.h"

namespace asyncengine {

// Each transfer has a CUDA stream and an event behind what it enqueues: both directions of the link are in use, and nothing that
// waits is behind something that is not urgent.
class StreamMover : public BlockMover {
 public:
  explicit StreamMover(const CudaDevice& device);
  ~StreamMover() override;
  StreamMover(const StreamMover&) = delete;
  StreamMover& operator=(const StreamMover&) = delete;

  bool start(int transfer, std::span<const BlockMove> moves) final;
  MoveStatus poll(int transfer) final;
  // True if no transfer that was started may still touch the host's memory.
  bool at_rest();

 protected:
  const CudaDevice& device() const { return device_; }
  // Copies on the CUDA stream. False: part of it was not enqueued.
  virtual bool enqueue(int transfer, std::span<const BlockMove> moves, CudaStream cuda_stream) = 0;
  bool copy(std::byte* device, std::byte* host, size_t bytes, bool to_device, CudaStream cuda_stream) const;

 private:
  struct Transfer {
    CudaStream cuda_stream = nullptr;
    CudaEvent done = nullptr;
    bool running = false;
    bool recorded = false;  // the event comes after all that was enqueued
    bool failed = false;    // part of it was not enqueued
  };

  CudaDevice device_;
  std::array<Transfer, kTransfers> transfers_;
};

}  // namespace asyncengine
