#include "step_loop/graph_mover.h"

#include <utility>

namespace asyncengine {

GraphMover::GraphMover(const CudaDevice& device, std::shared_ptr<HostPool> pool, const Graphs& graphs)
    : StreamMover(device), pool_(std::move(pool)), graphs_(graphs) {}

bool GraphMover::enqueue(int number, std::span<const BlockMove> moves, CudaStream cuda_stream) {
  if (pool_->block_bytes() == 0) return true;  // layers keep states alone: blocks only name what leads to these
  int32_t* list = pool_->list(number);
  *list++ = static_cast<int32_t>(moves.size());
  for (const BlockMove& move : moves) *list++ = move.block;
  const auto run = [&] {
    return device().runtime().graph_launch(graphs_[static_cast<size_t>(number)], cuda_stream) == kCudaSuccess;
  };
  return brings_in(number) ? copy_runs(number, moves, cuda_stream) && run() : run() && copy_runs(number, moves, cuda_stream);
}

bool GraphMover::copy_runs(int number, std::span<const BlockMove> moves, CudaStream cuda_stream) {
  const size_t bytes = pool_->block_bytes();
  for (size_t first = 0, end; first < moves.size(); first = end) {
    for (end = first + 1; end < moves.size() && moves[end].host == moves[end - 1].host + 1;) ++end;
    std::byte *host = pool_->block(moves[first].host), *gathered = pool_->gathered(number) + first * bytes;
    if (!copy(gathered, host, (end - first) * bytes, brings_in(number), cuda_stream)) return false;
  }
  return true;
}

}  // namespace asyncengine
