#include "platform/host/host_timing.h"

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
constexpr uint32_t kStep = 1;
constexpr int kSomeByte = 0x3c;  // a small positive number in any dtype

struct Rows {
  std::vector<std::vector<int32_t>> blocks;  // of each
  int32_t position, num_layers;
  int32_t num_posted = 0;

  void post(HostWorkers& workers, int32_t slot) {
    const int32_t* own = blocks[static_cast<size_t>(slot)].data();
    workers.post({.slot = slot, .layer = num_posted++ % num_layers, .step = kStep, .position = position, .blocks = own});
  }
};

// Rows share blocks, except the last one, which each writes: they read different ones at any time. Blocks lie as scattered as
// they do in a pool that has been in use.
Rows scattered_rows(int32_t count, int32_t tokens, int32_t block_size, int32_t shared_blocks, int32_t num_layers) {
  std::vector<int32_t> order(static_cast<size_t>(shared_blocks));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(0));
  Rows rows{.blocks = {}, .position = tokens - 1, .num_layers = num_layers};
  const size_t length = static_cast<size_t>((tokens + block_size - 1) / block_size);
  for (int32_t row = 0; row < count; ++row) {
    std::vector<int32_t>& blocks = rows.blocks.emplace_back(length, shared_blocks + row);
    const size_t start = order.size() * static_cast<size_t>(row) / static_cast<size_t>(count);
    for (size_t i = 0; i + 1 < length; ++i) blocks[i] = order[(start + i) % order.size()];
  }
  return rows;
}

struct Blocks {
  HostBlocks host;
  int32_t num_shared;  // by rows; behind them comes one for each slot
};

Blocks make_blocks(const HostTiming& timing) {
  const size_t block = static_cast<size_t>(timing.num_layers) * timing.layer_bytes();
  if (timing.pool != nullptr) {
    return {{timing.pool, block, timing.block_size, timing.transposed_keys, nullptr}, timing.num_pool_blocks - timing.num_slots()};
  }
  const size_t wanted = timing.bytes * std::max(kManyWorkers, static_cast<size_t>(timing.num_workers)) / kManyWorkers;
  const auto shared = static_cast<int32_t>(std::max<size_t>(1, wanted / block));
  const size_t bytes = static_cast<size_t>(shared + timing.num_slots()) * block;
  const auto memory = huge_memory(bytes);
  fill_memory(memory.get(), bytes, kSomeByte, timing.num_workers);
  return {{memory.get(), block, timing.block_size, timing.transposed_keys, memory}, shared};
}

// Nanoseconds of `count` slots' jobs, each posted again while there is time, and how many they were.
std::pair<double, int64_t> run_jobs(HostWorkers& workers, Rows& rows, int32_t count, std::chrono::nanoseconds time) {
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

size_t HostTiming::layer_bytes() const {
  const size_t element = float8 ? 1 : static_cast<size_t>(dtype_size(shape.dtype));
  return 2 * static_cast<size_t>(shape.num_kv_heads) * static_cast<size_t>(shape.head_dim * block_size) * element;
}

double time_host_attention(const CpuIsa& isa, const HostTiming& timing) {
  HostShape shape = timing.shape;
  shape.num_slots = timing.num_slots();
  auto exchange = std::make_shared<HostExchange>(shape);
  for (int32_t slot = 0; slot < shape.num_slots; ++slot) {
    std::fill_n(exchange->mailbox(slot), shape.mailbox_words(), uint64_t{kStep} << 32);
  }
  const Blocks blocks = make_blocks(timing);
  const std::vector<float> scales(4 * static_cast<size_t>(shape.num_kv_heads), 1.f);
  const HostLayer layer{.scale = 1.f, .scales = timing.float8 ? scales.data() : nullptr};
  HostWorkers workers(isa, {.exchange = exchange,
                            .blocks = blocks.host,
                            .layers = std::vector<HostLayer>(static_cast<size_t>(timing.num_layers), layer),
                            .num_workers = timing.num_workers});
  Rows rows = scattered_rows(shape.num_slots, timing.tokens, timing.block_size, blocks.num_shared, timing.num_layers);
  run_jobs(workers, rows, shape.num_slots, std::chrono::nanoseconds(0));  // wakes the threads up
  const auto [nanoseconds, jobs] = run_jobs(workers, rows, shape.num_slots, kMeasured);
  return nanoseconds * timing.num_workers / (static_cast<double>(jobs) * timing.tokens);
}

}  // namespace asyncengine
