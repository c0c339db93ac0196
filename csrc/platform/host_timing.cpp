#include "platform/host_timing.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "core/huge_pages.h"

namespace asyncengine {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kMeasured = std::chrono::milliseconds(50);
constexpr size_t kManyWorkers = 8;  // share the bytes; others have as much each as one of these
constexpr int kRowsOfWorker = 3;  // a worker finds the next one in the queue
constexpr uint32_t kStep = 1;
constexpr int kSomeByte = 0x3c;  // a small positive number in any dtype

struct Rows {
  std::vector<std::vector<int32_t>> blocks;  // of each
  int32_t position;

  void post(HostWorkers& workers, int32_t slot) const {
    const int32_t* own = blocks[static_cast<size_t>(slot)].data();
    workers.post({.slot = slot, .layer = 0, .step = kStep, .position = position, .blocks = own});
  }
};

// Rows share blocks, except the last one, which each writes: they read different ones at any time. Blocks lie as scattered as
// they do in a pool that has been in use.
Rows scattered_rows(int32_t count, int32_t tokens, int32_t block_size, int32_t shared_blocks) {
  std::vector<int32_t> order(static_cast<size_t>(shared_blocks));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(0));
  Rows rows{.blocks = {}, .position = tokens - 1};
  const size_t length = static_cast<size_t>((tokens + block_size - 1) / block_size);
  for (int32_t row = 0; row < count; ++row) {
    std::vector<int32_t>& blocks = rows.blocks.emplace_back(length, shared_blocks + row);
    const size_t start = order.size() * static_cast<size_t>(row) / static_cast<size_t>(count);
    for (size_t i = 0; i + 1 < length; ++i) blocks[i] = order[(start + i) % order.size()];
  }
  return rows;
}

// Nanoseconds of `count` slots' jobs, each posted again while there is time, and how many they were.
std::pair<double, int64_t> run_jobs(HostWorkers& workers, const Rows& rows, int32_t count, std::chrono::nanoseconds time) {
  const auto start = Clock::now();
  int64_t done = 0;
  std::vector<int32_t> slots(static_cast<size_t>(count));
  std::iota(slots.begin(), slots.end(), 0);
  for (const int32_t slot : slots) rows.post(workers, slot);
  while (!slots.empty()) {
    std::erase_if(slots, [&](int32_t slot) {
      if (workers.poll(slot) == HostAttentionStatus::kPending) return false;
      ++done;
      if (Clock::now() - start >= time) return true;
      rows.post(workers, slot);
      return false;
    });
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return {std::chrono::duration<double, std::nano>(Clock::now() - start).count(), done};
}

}  // namespace

double time_host_attention(const CpuIsa& isa, const HostTiming& timing) {
  HostShape shape = timing.shape;
  shape.num_slots = timing.num_workers * kRowsOfWorker;
  auto exchange = std::make_shared<HostExchange>(shape);
  for (int32_t slot = 0; slot < shape.num_slots; ++slot) {
    std::fill_n(exchange->mailbox(slot), shape.mailbox_words(), uint64_t{kStep} << 32);
  }
  const size_t element = timing.float8 ? 1 : static_cast<size_t>(dtype_size(shape.dtype));
  const size_t cell = static_cast<size_t>(shape.head_dim * timing.block_size) * element;
  const size_t block = 2 * static_cast<size_t>(shape.num_kv_heads) * cell;
  const size_t wanted = timing.bytes * std::max(kManyWorkers, static_cast<size_t>(timing.num_workers)) / kManyWorkers;
  const auto shared_blocks = static_cast<int32_t>(std::max<size_t>(1, wanted / block));
  const size_t bytes = (static_cast<size_t>(shared_blocks) + static_cast<size_t>(shape.num_slots)) * block;
  const auto memory = huge_memory(bytes);
  fill_memory(memory.get(), bytes, kSomeByte, timing.num_workers);
  const std::vector<float> scales(4 * static_cast<size_t>(shape.num_kv_heads), 1.f);
  HostWorkers workers(isa, {.exchange = exchange,
                            .blocks = {memory.get(), block, timing.block_size, timing.transposed_keys, memory},
                            .layers = {{.scale = 1.f, .scales = timing.float8 ? scales.data() : nullptr}},
                            .num_workers = timing.num_workers});
  const Rows rows = scattered_rows(shape.num_slots, timing.tokens, timing.block_size, shared_blocks);
  run_jobs(workers, rows, shape.num_slots, std::chrono::nanoseconds(0));  // wakes the threads up
  const auto [nanoseconds, jobs] = run_jobs(workers, rows, shape.num_slots, kMeasured);
  return nanoseconds * timing.num_workers / (static_cast<double>(jobs) * timing.tokens);
}

}  // namespace asyncengine
