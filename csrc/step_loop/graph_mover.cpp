#include "step_loop/graph_mover.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace asyncengine {

GraphMover::GraphMover(const CudaDevice& device, std::shared_ptr<HostPool> pool, const Graphs& graphs)
    : device_(device), pool_(std::move(pool)), graphs_(graphs) {
  for (Transfer& transfer : transfers_) {
    device_.check<&CudaRuntime::stream_create>("cudaStreamCreateWithFlags", &transfer.cuda_stream, kCudaStreamNonBlocking);
    device_.check<&CudaRuntime::event_create>("cudaEventCreateWithFlags", &transfer.done, kCudaEventDisableTiming);
  }
}

GraphMover::~GraphMover() {
  for (const Transfer& transfer : transfers_) {
    if (transfer.done != nullptr) device_.call<&CudaRuntime::event_destroy>(transfer.done);
    if (transfer.cuda_stream != nullptr) device_.call<&CudaRuntime::stream_destroy>(transfer.cuda_stream);
  }
}

bool GraphMover::start(int number, std::span<const BlockMove> moves) {
  Transfer& transfer = transfers_[static_cast<size_t>(number)];
  assert(!transfer.running && moves.size() <= static_cast<size_t>(max_moves()));
  const CudaDevice::Scope scope(device_);
  if (scope.error() != kCudaSuccess) return false;
  int32_t* list = pool_->list(number);
  *list++ = static_cast<int32_t>(moves.size());
  for (const BlockMove& move : moves) *list++ = move.block;
  // Whatever was enqueued of a transfer that failed may still write: its end is told by the event, as that of others.
  transfer.failed = !enqueue(number, moves);
  transfer.running = true;
  transfer.recorded = device_.runtime().event_record(transfer.done, transfer.cuda_stream) == kCudaSuccess;
  return true;
}

bool GraphMover::enqueue(int number, std::span<const BlockMove> moves) {
  const CudaStream cuda_stream = transfers_[static_cast<size_t>(number)].cuda_stream;
  const auto run = [&] {
    return device_.runtime().graph_launch(graphs_[static_cast<size_t>(number)], cuda_stream) == kCudaSuccess;
  };
  return brings_in(number) ? copy(number, moves) && run() : run() && copy(number, moves);
}

bool GraphMover::copy(int number, std::span<const BlockMove> moves) {
  const size_t bytes = pool_->block_bytes();
  for (size_t first = 0, end; first < moves.size(); first = end) {
    for (end = first + 1; end < moves.size() && moves[end].host == moves[end - 1].host + 1;) ++end;
    std::byte *host = pool_->block(moves[first].host), *device = pool_->gathered(number) + first * bytes;
    const CudaStream cuda_stream = transfers_[static_cast<size_t>(number)].cuda_stream;
    const int error = brings_in(number) ? device_.runtime().memcpy_async(device, host, (end - first) * bytes,
                                                                         kCudaMemcpyHostToDevice, cuda_stream)
                                        : device_.runtime().memcpy_async(host, device, (end - first) * bytes,
                                                                         kCudaMemcpyDeviceToHost, cuda_stream);
    if (error != kCudaSuccess) return false;
  }
  return true;
}

MoveStatus GraphMover::poll(int number) {
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

bool GraphMover::at_rest() {
  for (int i = 0; i < kTransfers; ++i) {
    if (transfers_[static_cast<size_t>(i)].running && poll(i) == MoveStatus::kPending) return false;
  }
  return true;
}

}  // namespace asyncengine
