#include "step_loop/stream_mover.h"

#include <cassert>

namespace asyncengine {

StreamMover::StreamMover(const CudaDevice& device) : device_(device) {
  for (Transfer& transfer : transfers_) {
    device_.check<&CudaRuntime::stream_create>("cudaStreamCreateWithFlags", &transfer.cuda_stream, kCudaStreamNonBlocking);
    device_.check<&CudaRuntime::event_create>("cudaEventCreateWithFlags", &transfer.done, kCudaEventDisableTiming);
  }
}

StreamMover::~StreamMover() {
  for (const Transfer& transfer : transfers_) {
    if (transfer.done != nullptr) device_.call<&CudaRuntime::event_destroy>(transfer.done);
    if (transfer.cuda_stream != nullptr) device_.call<&CudaRuntime::stream_destroy>(transfer.cuda_stream);
  }
}

bool StreamMover::start(int number, std::span<const BlockMove> moves) {
  Transfer& transfer = transfers_[static_cast<size_t>(number)];
  assert(!transfer.running && moves.size() <= static_cast<size_t>(max_moves()));
  const CudaDevice::Scope scope(device_);
  if (scope.error() != kCudaSuccess) return false;
  // Whatever was enqueued of a transfer that failed may still write: its end is told by the event, as that of others.
  transfer.failed = !enqueue(number, moves, transfer.cuda_stream);
  transfer.running = true;
  transfer.recorded = device_.runtime().event_record(transfer.done, transfer.cuda_stream) == kCudaSuccess;
  return true;
}

bool StreamMover::copy(std::byte* device, std::byte* host, size_t bytes, bool to_device, CudaStream cuda_stream) const {
  const int error = to_device ? device_.runtime().memcpy_async(device, host, bytes, kCudaMemcpyHostToDevice, cuda_stream)
                              : device_.runtime().memcpy_async(host, device, bytes, kCudaMemcpyDeviceToHost, cuda_stream);
  return error == kCudaSuccess;
}

MoveStatus StreamMover::poll(int number) {
  Transfer& transfer = transfers_[static_cast<size_t>(number)];
  assert(transfer.running);
  const CudaDevice::Scope scope(device_);
  transfer.recorded = transfer.recorded || device_.runtime().event_record(transfer.done, transfer.cuda_stream) == kCudaSuccess;
  const int error = device_.runtime().event_query(transfer.done);
  // An event that was not recorded speaks of an earlier transfer, unless the device has failed: then nothing runs any more.
  if (error == kCudaErrorNotReady || (error == kCudaSuccess && !transfer.recorded)) return MoveStatus::kPending;
  transfer.running = false;
  return error == kCudaSuccess && !transfer.failed ? MoveStatus::kDone : MoveStatus::kFailed;
}

bool StreamMover::at_rest() {
  for (int i = 0; i < kTransfers; ++i) {
    if (transfers_[static_cast<size_t>(i)].running && poll(i) == MoveStatus::kPending) return false;
  }
  return true;
}

}  // namespace asyncengine
