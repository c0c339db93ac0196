#include "step_loop/graph_mover.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace asyncengine {

GraphMover::GraphMover(const CudaRuntime& cuda, int device, std::shared_ptr<HostPool> pool, const Graphs& graphs)
    : cuda_(cuda), device_(device), pool_(std::move(pool)), graphs_(graphs) {
  check_cuda(cuda_, cuda_.set_device(device_), "cudaSetDevice");
  for (Transfer& transfer : transfers_) {
    check_cuda(cuda_, cuda_.stream_create(&transfer.cuda_stream, kCudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check_cuda(cuda_, cuda_.event_create(&transfer.done, kCudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
}

GraphMover::~GraphMover() {
  for (const Transfer& transfer : transfers_) {
    if (transfer.done != nullptr) cuda_.event_destroy(transfer.done);
    if (transfer.cuda_stream != nullptr) cuda_.stream_destroy(transfer.cuda_stream);
  }
}

bool GraphMover::start(int number, std::span<const BlockMove> moves) {
  Transfer& transfer = transfers_[static_cast<size_t>(number)];
  assert(!transfer.running && moves.size() <= static_cast<size_t>(max_moves()));
  if (!device_set_) {
    if (cuda_.set_device(device_) != kCudaSuccess) return false;
    device_set_ = true;
  }
  int32_t* list = pool_->list(number);
  *list++ = static_cast<int32_t>(moves.size());
  for (const BlockMove& move : moves) *list++ = move.block;
  // Whatever was enqueued of a transfer that failed may still write: its end is told by the event, as that of others.
  transfer.failed = !enqueue(number, moves);
  transfer.running = true;
  transfer.recorded = cuda_.event_record(transfer.done, transfer.cuda_stream) == kCudaSuccess;
  return true;
}

bool GraphMover::enqueue(int number, std::span<const BlockMove> moves) {
  const CudaStream cuda_stream = transfers_[static_cast<size_t>(number)].cuda_stream;
  const auto run = [&] { return cuda_.graph_launch(graphs_[static_cast<size_t>(number)], cuda_stream) == kCudaSuccess; };
  return brings_in(number) ? copy(number, moves) && run() : run() && copy(number, moves);
}

bool GraphMover::copy(int number, std::span<const BlockMove> moves) {
  const size_t bytes = pool_->block_bytes();
  for (size_t first = 0, end; first < moves.size(); first = end) {
    for (end = first + 1; end < moves.size() && moves[end].host == moves[end - 1].host + 1;) ++end;
    std::byte *host = pool_->block(moves[first].host), *device = pool_->gathered(number) + first * bytes;
    const CudaStream cuda_stream = transfers_[static_cast<size_t>(number)].cuda_stream;
    const int error = brings_in(number)
                          ? cuda_.memcpy_async(device, host, (end - first) * bytes, kCudaMemcpyHostToDevice, cuda_stream)
                          : cuda_.memcpy_async(host, device, (end - first) * bytes, kCudaMemcpyDeviceToHost, cuda_stream);
    if (error != kCudaSuccess) return false;
  }
  return true;
}

MoveStatus GraphMover::poll(int number) {
  Transfer& transfer = transfers_[static_cast<size_t>(number)];
  assert(transfer.running);
  transfer.recorded = transfer.recorded || cuda_.event_record(transfer.done, transfer.cuda_stream) == kCudaSuccess;
  const int error = cuda_.event_query(transfer.done);
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
