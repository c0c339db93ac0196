// Workers that attend for host rows: what they compute beside CpuKernels, and how their jobs begin and end.
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "platform/cpu/kernels.h"
#include "platform/host/host_timing.h"
#include "platform/host/host_workers.h"

using namespace asyncengine;

namespace {

constexpr int32_t kBlockSize = 16;
constexpr auto kLong = std::chrono::seconds(60);

size_t sized(int64_t count) { return static_cast<size_t>(count); }

// Elements of one dtype.
struct Elements {
  Elements(Dtype type, int64_t count, unsigned seed) : dtype(type), bytes(sized(count * dtype_size(type))) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < count; ++i) set(i, normal(generator));
  }
  void set(int64_t i, float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint16_t high = static_cast<uint16_t>(bits >> 16);
    if (dtype == Dtype::kFloat32) {
      std::memcpy(&bytes[sized(4 * i)], &bits, 4);
    } else {
      std::memcpy(&bytes[sized(2 * i)], &high, 2);
    }
  }
  uint32_t bits(int64_t i) const {
    uint32_t value = 0;
    std::memcpy(&value, &bytes[sized(i * dtype_size(dtype))], sized(dtype_size(dtype)));
    return value;
  }
  std::byte* at(int64_t i) { return bytes.data() + i * dtype_size(dtype); }

  Dtype dtype;
  std::vector<std::byte> bytes;
};

float to_float(Dtype dtype, const std::byte* p, int64_t i) {
  uint32_t bits = 0;
  std::memcpy(&bits, p + i * dtype_size(dtype), sized(dtype_size(dtype)));
  return std::bit_cast<float>(dtype == Dtype::kFloat32 ? bits : bits << 16);
}

// Writes as a device does: words in any order, each whole.
void write_mailbox(const HostExchange& exchange, int32_t slot, uint32_t step, const Elements& heads, size_t begin, size_t end) {
  const HostShape& shape = exchange.shape();
  const size_t words = shape.head_words();
  for (size_t w = begin; w < end; ++w) {
    const auto element = static_cast<int64_t>(w / words) * shape.head_dim + static_cast<int64_t>(w % words);
    uint32_t payload = heads.bits(element);
    if (shape.dtype == Dtype::kBFloat16) payload |= heads.bits(element + shape.head_dim / 2) << 16;
    std::atomic_ref(exchange.mailbox(slot)[w]).store(uint64_t{step} << 32 | payload, std::memory_order_relaxed);
  }
}

void write_mailbox(const HostExchange& exchange, int32_t slot, uint32_t step, const Elements& heads) {
  write_mailbox(exchange, slot, step, heads, 0, exchange.shape().mailbox_words());
}

HostAttentionStatus wait(HostWorkers& workers, int32_t slot) {
  const auto limit = std::chrono::steady_clock::now() + kLong;
  while (workers.poll(slot) == HostAttentionStatus::kPending && std::chrono::steady_clock::now() < limit) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return workers.poll(slot);
}

// Rows of one block each for tests of what becomes of jobs: what they attend to is of no interest.
struct Setup {
  explicit Setup(int32_t num_slots, int num_workers = 1, std::function<void(const HostAttentionJob&)> hook = {}, size_t layers = 1)
      : exchange(std::make_shared<HostExchange>(HostShape{Dtype::kFloat32, num_slots, 2, 1, 8})), heads(Dtype::kFloat32, 4 * 8, 1) {
    const size_t block_bytes = layers * 2 * 8 * kBlockSize * sizeof(float);
    memory = std::make_shared<std::vector<std::byte>>(block_bytes * sized(num_slots));
    for (int32_t slot = 0; slot < num_slots; ++slot) tables.push_back({slot});
    workers = std::make_unique<HostWorkers>(select_cpu_isa("auto"),
                                            HostWorkers::Config{.exchange = exchange,
                                                                .blocks = {memory->data(), block_bytes, kBlockSize, false, memory},
                                                                .layers = std::vector<HostLayer>(layers),
                                                                .num_workers = num_workers,
                                                                .before_attending = std::move(hook)});
  }
  HostAttentionJob job(int32_t slot, uint32_t step, int32_t layer = 0, int32_t position = 0) const {
    return {slot, layer, step, position, tables[sized(slot)].data()};
  }
  void post_filled(int32_t slot, uint32_t step) {
    write_mailbox(*exchange, slot, step, heads);
    workers->post(job(slot, step));
  }

  std::shared_ptr<HostExchange> exchange;
  Elements heads;
  std::shared_ptr<std::vector<std::byte>> memory;
  std::vector<std::vector<int32_t>> tables;
  std::unique_ptr<HostWorkers> workers;
};

// A gate at which a hook of a worker waits.
struct Gate {
  void pass() {
    std::unique_lock lock(mutex);
    arrived = true;
    changed.notify_all();
    changed.wait(lock, [this] { return open; });
  }
  void wait_for_arrival() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return arrived; });
  }
  void let_pass() {
    const std::lock_guard lock(mutex);
    open = true;
    changed.notify_all();
  }
  std::mutex mutex;
  std::condition_variable changed;
  bool arrived = false, open = false;
};

// ---- beside CpuKernels ---------------------------------------------------------------------------------------------------

struct Shape {
  int64_t q_heads, kv_heads, dim, length;
};

// A row of `length` tokens in a cache of the CPU's own, whose last token is yet to be stored.
struct Reference {
  Reference(CpuKernels& own, Dtype type, bool float8, const Shape& of)
      : kernels(own),
        dtype(type),
        shape(of),
        element(float8 ? 1 : dtype_size(type)),
        blocks((of.length + kBlockSize - 1) / kBlockSize),
        cell(of.dim * kBlockSize * element),
        k(sized(blocks * of.kv_heads * cell), std::byte{0xff}),
        v(k),
        scales(sized(4 * of.kv_heads)),
        heads(type, (of.q_heads + 2 * of.kv_heads) * of.dim, 7) {
    for (int64_t head = 0; head < of.kv_heads; ++head) {  // keys, values: scales and inverses
      const float scale = 0.01f * static_cast<float>(head + 1);
      for (int64_t i = 0; i < 4; ++i) scales[sized(i * of.kv_heads + head)] = i % 2 == 0 ? scale : 1.f / scale;
    }
    for (int64_t b = 0; b < blocks; ++b) table.push_back(static_cast<int32_t>(blocks - 1 - b));
    const int64_t width = of.kv_heads * of.dim, before = of.length - 1;
    Elements keys(type, before * width, 2), values(type, before * width, 3);
    kernels.store_kv(type, keys.at(0), width, values.at(0), width, cache(), batch(0, before));
  }

  PagedKV cache() { return {k.data(), v.data(), shape.kv_heads, shape.dim, kBlockSize, 0, element == 1 ? scales.data() : nullptr}; }
  StepBatch batch(int64_t begin, int64_t end) const {
    StepBatch made;
    made.num_tokens = static_cast<int32_t>(end - begin);
    made.num_rows = 1;
    for (int64_t p = begin; p < end; ++p) made.slot_mapping.push_back(table[sized(p / kBlockSize)] * kBlockSize + p % kBlockSize);
    made.query_start = {0, static_cast<int32_t>(end - begin)};
    made.context_len = {static_cast<int32_t>(begin)};
    made.block_tables = {table.data()};
    return made;
  }
  std::vector<std::byte> attend(float scale, int64_t window, float softcap) {
    std::vector<std::byte> out(sized(shape.q_heads * shape.dim * dtype_size(dtype)));
    const StepBatch last = batch(shape.length - 1, shape.length);
    kernels.attention(dtype, heads.at(0), shape.q_heads, out.data(), cache(), last, scale, window, softcap);
    return out;
  }
  // Planes of block b of a layer among two, in either layout.
  void copy_block(int64_t b, int64_t layer, bool transposed, std::byte* to) const {
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      const int64_t at = (b * shape.kv_heads + head) * cell;
      std::byte* keys = to + 2 * layer * shape.kv_heads * cell + head * cell;
      std::memcpy(keys + shape.kv_heads * cell, v.data() + at, sized(cell));
      for (int64_t i = 0; i < shape.dim * kBlockSize; ++i) {
        const int64_t d = i / kBlockSize, token = i % kBlockSize, target = transposed ? i : token * shape.dim + d;
        std::memcpy(keys + target * element, k.data() + at + i * element, sized(element));
      }
    }
  }

  CpuKernels& kernels;
  Dtype dtype;
  Shape shape;
  int64_t element, blocks, cell;
  std::vector<std::byte> k, v;
  std::vector<float> scales;
  Elements heads;
  std::vector<int32_t> table;
};

struct Kind {
  int64_t window;
  float softcap;
};

// The row's last token, in each of two layers.
void compare_with_cpu(const std::string& isa, Reference reference, bool transposed, const Kind& kind) {
  const Shape& shape = reference.shape;
  const auto blocks = reference.blocks;
  const int64_t block_bytes = 4 * shape.kv_heads * reference.cell;
  std::vector<std::byte> memory(sized(blocks * block_bytes)), after(sized(block_bytes));
  for (int64_t b = 0; b < blocks; ++b) {
    for (const int64_t layer : {0, 1}) reference.copy_block(b, layer, transposed, memory.data() + b * block_bytes);
  }
  const HostShape rows{reference.dtype, 2, static_cast<int32_t>(shape.q_heads), static_cast<int32_t>(shape.kv_heads),
                       static_cast<int32_t>(shape.dim)};
  const auto exchange = std::make_shared<HostExchange>(rows);
  const HostLayer layer{0.25f, kind.window, kind.softcap, reference.cache().scales};
  HostWorkers workers(select_cpu_isa(isa), {.exchange = exchange,
                                            .blocks = {memory.data(), sized(block_bytes), kBlockSize, transposed, nullptr},
                                            .layers = {layer, layer}});
  for (const int32_t l : {0, 1}) {
    write_mailbox(*exchange, 1, 5 + static_cast<uint32_t>(l), reference.heads);
    workers.post({1, l, 5 + static_cast<uint32_t>(l), static_cast<int32_t>(shape.length - 1), reference.table.data()});
    CHECK(wait(workers, 1) == HostAttentionStatus::kDone);
    const std::vector<std::byte> expected = reference.attend(0.25f, kind.window, kind.softcap);
    const std::byte* result = exchange->result(1);
    if (transposed) CHECK(std::memcmp(result, expected.data(), expected.size()) == 0);
    const float tolerance = reference.dtype == Dtype::kFloat32 ? 1e-5f : 1.6e-2f;
    for (int64_t i = 0; i < shape.q_heads * shape.dim; ++i) {
      const float value = to_float(reference.dtype, result, i), wanted = to_float(reference.dtype, expected.data(), i);
      CHECK(std::abs(value - wanted) <= tolerance * std::max(1.f, std::abs(wanted)));
    }
    const int32_t last = reference.table[sized((shape.length - 1) / kBlockSize)];  // now with the token
    std::memcpy(after.data(), memory.data() + last * block_bytes, after.size());
    reference.copy_block(last, l, transposed, after.data());
    CHECK(std::memcmp(after.data(), memory.data() + last * block_bytes, after.size()) == 0);
  }
}

void compare_all_with_cpu(bool transposed) {
  for (const std::string& isa : available_cpu_isas()) {
    CpuKernels kernels(2, isa);
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
      for (const bool float8 : {false, true}) {
        for (const Shape& shape : {Shape{6, 2, 20, 530}, Shape{8, 1, 64, 33}, Shape{3, 3, 96, 17}, Shape{35, 1, 6, 40}}) {
          const Reference reference(kernels, dtype, float8, shape);
          for (const Kind& kind : {Kind{0, 0.f}, Kind{19, 0.f}, Kind{515, 0.8f}}) {
            compare_with_cpu(isa, reference, transposed, kind);
          }
        }
      }
    }
  }
}

}  // namespace

TEST(host_workers_attend_like_the_cpu_bit_for_bit) { compare_all_with_cpu(true); }

TEST(host_workers_attend_over_blocks_of_the_device) { compare_all_with_cpu(false); }

TEST(host_workers_reject_blocks_of_another_shape) {
  const auto exchange = std::make_shared<HostExchange>(HostShape{Dtype::kFloat32, 1, 2, 1, 8});
  for (const size_t bytes : {size_t{1023}, size_t{2048}}) {
    bool thrown = false;
    try {
      HostWorkers(select_cpu_isa("auto"),
                  {.exchange = exchange, .blocks = {nullptr, bytes, kBlockSize, false, nullptr}, .layers = {HostLayer{}}});
    } catch (const std::invalid_argument&) {
      thrown = true;
    }
    CHECK(thrown);
  }
}

// ---- jobs ----------------------------------------------------------------------------------------------------------------

TEST(host_workers_take_jobs_in_the_order_in_which_they_are_posted) {
  std::vector<int32_t> taken;  // by the one worker
  Setup setup(6, 1, [&](const HostAttentionJob& job) { taken.push_back(job.slot); });
  const std::vector<int32_t> order{3, 0, 5, 1, 4, 2};
  for (const int32_t slot : order) setup.workers->post(setup.job(slot, 9));
  for (int32_t slot = 5; slot >= 0; --slot) write_mailbox(*setup.exchange, slot, 9, setup.heads);
  for (const int32_t slot : order) CHECK(wait(*setup.workers, slot) == HostAttentionStatus::kDone);
  CHECK(setup.workers->close(kLong));
  CHECK(taken == order);
}

TEST(host_workers_wait_for_every_word_of_a_mailbox) {
  Setup setup(1);
  const size_t words = setup.exchange->shape().mailbox_words();
  setup.post_filled(0, 1);
  CHECK(wait(*setup.workers, 0) == HostAttentionStatus::kDone);
  std::memset(setup.exchange->result(0), 0xff, setup.exchange->shape().result_bytes());
  setup.workers->post(setup.job(0, 2));
  for (size_t word = words; word-- > 0;) {  // the first one comes last
    if (word % 8 == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      CHECK(setup.workers->poll(0) == HostAttentionStatus::kPending);
    }
    write_mailbox(*setup.exchange, 0, 2, setup.heads, word, word + 1);
  }
  CHECK(wait(*setup.workers, 0) == HostAttentionStatus::kDone);
  // A single key has all the weight.
  CHECK(std::memcmp(setup.exchange->result(0), setup.heads.at(3 * 8), 8 * sizeof(float)) == 0);
}

TEST(host_workers_end_a_cancelled_job_whose_mailbox_does_not_come) {
  Setup setup(3);
  setup.workers->post(setup.job(0, 4));
  setup.workers->post(setup.job(1, 4));  // behind it in the queue
  setup.workers->post(setup.job(2, 4));
  write_mailbox(*setup.exchange, 2, 4, setup.heads);
  setup.workers->cancel(1);
  CHECK(setup.workers->poll(1) == HostAttentionStatus::kFailed);
  CHECK(setup.workers->poll(0) == HostAttentionStatus::kPending);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));  // long enough to be waited for in naps
  setup.workers->cancel(0);
  CHECK(wait(*setup.workers, 0) == HostAttentionStatus::kFailed);
  CHECK(wait(*setup.workers, 2) == HostAttentionStatus::kDone);
  setup.workers->cancel(2);  // too late to matter
  CHECK(setup.workers->poll(2) == HostAttentionStatus::kDone);
  for (const int32_t slot : {1, 0}) {
    setup.post_filled(slot, 5);
    CHECK(wait(*setup.workers, slot) == HostAttentionStatus::kDone);
  }
}

TEST(host_workers_fail_a_job_that_throws_and_go_on) {
  Setup setup(2, 1, [](const HostAttentionJob& job) {
    if (job.slot == 0) throw std::runtime_error("broken");
  });
  setup.post_filled(0, 1);
  setup.post_filled(1, 1);
  CHECK(wait(*setup.workers, 0) == HostAttentionStatus::kFailed);
  CHECK(wait(*setup.workers, 1) == HostAttentionStatus::kDone);
}

TEST(host_workers_close_while_jobs_wait) {
  Setup setup(3, 2);
  for (const int32_t slot : {0, 1, 2}) setup.workers->post(setup.job(slot, 1));
  CHECK(setup.workers->close(kLong));
  for (const int32_t slot : {0, 1, 2}) CHECK(setup.workers->poll(slot) == HostAttentionStatus::kFailed);
  setup.post_filled(0, 2);
  CHECK(setup.workers->poll(0) == HostAttentionStatus::kFailed);
  CHECK(setup.workers->close(kLong));
}

TEST(host_workers_that_hang_keep_what_they_use) {
  const auto gate = std::make_shared<Gate>();
  std::weak_ptr<void> memory, exchange;
  {
    Setup setup(2, 2, [gate](const HostAttentionJob& job) {
      if (job.slot == 0) gate->pass();
    });
    memory = setup.memory;
    exchange = setup.exchange;
    setup.post_filled(0, 1);
    gate->wait_for_arrival();
    setup.post_filled(1, 1);
    CHECK(wait(*setup.workers, 1) == HostAttentionStatus::kDone);
    setup.workers->cancel(0);
    CHECK(!setup.workers->close(std::chrono::milliseconds(1)));
    CHECK(setup.workers->poll(0) == HostAttentionStatus::kPending);
  }
  CHECK(!memory.expired() && !exchange.expired());
  gate->let_pass();
  const auto limit = std::chrono::steady_clock::now() + kLong;
  while (!(memory.expired() && exchange.expired()) && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
  CHECK(memory.expired() && exchange.expired());
}

// Rows go through layers and positions with several workers as with one, while a device fills mailboxes behind the jobs.
TEST(host_workers_attend_for_many_slots_at_once) {
  constexpr int32_t kSlots = 12, kLayers = 3;
  constexpr uint32_t kSteps = kLayers * kBlockSize;
  auto run = [&](int num_workers) {
    Setup setup(kSlots, num_workers, {}, kLayers);
    std::vector<std::vector<std::byte>> results(kSlots);
    std::atomic<uint32_t> posted{0};
    std::vector<Elements> heads;
    for (unsigned i = 0; i < kSlots * kSteps; ++i) heads.emplace_back(Dtype::kFloat32, 4 * 8, i);
    std::thread device([&] {
      for (uint32_t step = 1; step <= kSteps; ++step) {
        while (posted.load(std::memory_order_acquire) < step) std::this_thread::yield();
        for (int32_t slot = 0; slot < kSlots; ++slot) {
          write_mailbox(*setup.exchange, slot, step, heads[(step - 1) * kSlots + static_cast<uint32_t>(slot)]);
        }
      }
    });
    for (uint32_t step = 1; step <= kSteps; ++step) {
      const auto layer = static_cast<int32_t>((step - 1) % kLayers), position = static_cast<int32_t>((step - 1) / kLayers);
      for (int32_t slot = 0; slot < kSlots; ++slot) setup.workers->post(setup.job(slot, step, layer, position));
      posted.store(step, std::memory_order_release);
      for (int32_t slot = 0; slot < kSlots; ++slot) {
        CHECK(wait(*setup.workers, slot) == HostAttentionStatus::kDone);
        const std::byte* result = setup.exchange->result(slot);
        results[sized(slot)].insert(results[sized(slot)].end(), result, result + setup.exchange->shape().result_bytes());
      }
    }
    device.join();
    return std::pair(results, *setup.memory);
  };
  CHECK(run(4) == run(1));
}

TEST(host_attention_is_timed_in_either_layout) {
  for (const bool transposed : {true, false}) {
    const double nanoseconds = time_host_attention(select_cpu_isa("auto"), {.shape = {Dtype::kBFloat16, 1, 2, 1, 16},
                                                                            .transposed_keys = transposed,
                                                                            .num_workers = 2,
                                                                            .tokens = 20,
                                                                            .bytes = 1 << 16});
    CHECK(std::isfinite(nanoseconds) && nanoseconds > 0);
  }
}

TEST(host_attention_is_timed_in_blocks_of_a_pool) {
  HostTiming timing{.shape = {Dtype::kBFloat16, 1, 2, 1, 16}, .num_workers = 2, .tokens = 40, .num_layers = 3};
  const size_t block = 3 * timing.layer_bytes();
  timing.num_pool_blocks = timing.num_slots() + 2;
  constexpr std::byte kBefore{0x3c};
  std::vector<std::byte> pool(static_cast<size_t>(timing.num_pool_blocks) * block, kBefore);
  timing.pool = pool.data();
  const double nanoseconds = time_host_attention(select_cpu_isa("auto"), timing);
  CHECK(std::isfinite(nanoseconds) && nanoseconds > 0);
  // Keys and values of a row's last token, zeros, go to its last block, which is behind those that rows share.
  const auto written = [&](size_t i) {
    return std::ranges::any_of(std::span(pool).subspan(i * block, block), [](std::byte b) { return b != kBefore; });
  };
  CHECK(!written(0) && !written(1) && written(2));
}
