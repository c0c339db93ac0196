#include "platform/host/host_workers.h"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#ifdef __linux__
#include <sys/prctl.h>
#endif

#include "core/wait_clock.h"
#include "platform/cpu/kernels.h"
#include "platform/cpu/kv_cell.h"

namespace asyncengine {
namespace {

using Clock = std::chrono::steady_clock;
using Nanoseconds = std::chrono::nanoseconds;

// The device computes about as long between two layers: a mailbox that is not there then belongs to a step that waits.
constexpr auto kMailboxPoll = std::chrono::microseconds(50);
constexpr auto kMailboxNap = std::chrono::microseconds(20);
// A worker that slept between two jobs of a step would cost a wake-up (5-50 us) for each.
constexpr auto kIdlePoll = std::chrono::microseconds(100);
constexpr auto kDestructorLimit = std::chrono::seconds(1);
constexpr auto kForEver = std::chrono::hours(24 * 365);

void relax() {
  for (int i = 0; i < 16; ++i) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
}

// Without this a nap lasts 50 us longer than it asked for.
void sleep_no_longer_than_asked() {
#ifdef __linux__
  (void)prctl(PR_SET_TIMERSLACK, 1UL);
#endif
}

void require_config(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(std::string("host workers: ") + message);
}

// A slot's last job. It is in the queue at most once, so that the queue needs no memory of its own.
struct alignas(64) SlotJob {
  HostAttentionJob job;
  int32_t previous = -1, next = -1;  // in the queue
  bool queued = false;
  std::atomic<bool> cancelled{false};
  std::atomic<HostAttentionStatus> status{HostAttentionStatus::kFailed};
};

struct Scratch {
  std::vector<std::byte> heads;  // [heads, head_dim] of the mailbox
  ScratchBuffer attention;
};

}  // namespace

struct HostWorkers::Shared {
  Shared(const CpuIsa& instruction_set, Config given);

  // ---- the queue, in posted order; under the mutex ----
  void append(int32_t slot);
  void unlink(SlotJob& slot);
  // The next job; null: the workers end. Polls for a while, then sleeps.
  SlotJob* take();
  SlotJob* pop();

  // ---- in a worker; the link's thread is the last ----
  void run(size_t worker);
  void attend_as_they_come(Scratch& scratch);
  void attend_over_link();
  size_t collect(std::span<SlotJob*> batch);
  void attend_batch(std::span<SlotJob* const> batch, std::span<HostAttentionJob> jobs);
  bool mailbox_came(const HostAttentionJob& job) const;
  // Since `begun` somebody has attended to so many tokens.
  void count(Clock::time_point begun, int64_t tokens);
  int64_t tokens_of(const HostAttentionJob& job) const {
    const int64_t all = job.position + 1, window = config.layers[static_cast<size_t>(job.layer)].window;
    return window > 0 ? std::min(all, window) : all;
  }
  bool attend(const SlotJob& slot, Scratch& scratch);
  bool take_mailbox(const SlotJob& slot, std::byte* heads) const;
  void attend_head(const HostAttentionJob& job, const AttentionTask& task, int32_t kv_head, float* memory) const;
  bool stopped(const SlotJob& slot) const {
    return slot.cancelled.load(std::memory_order_relaxed) || closing.load(std::memory_order_relaxed);
  }

  size_t num_threads() const { return static_cast<size_t>(config.num_workers) + (config.link != nullptr ? 1 : 0); }

  const CpuIsa& isa;
  const Config config;
  const HostShape shape;
  std::vector<std::vector<float>> scales;  // by layer
  std::vector<AttentionTask> tasks;        // by layer, without q and out
  std::vector<Scratch> scratches;          // by worker
  std::vector<SlotJob> slots;

  std::mutex mutex;  // never held while something is computed
  std::condition_variable posted, ended;
  int32_t first = -1, last = -1;
  int sleeping = 0, running = 0;
  std::vector<char> finished;  // by worker
  std::atomic<int32_t> num_queued{0};
  std::atomic<int64_t> busy_ns{0}, tokens{0};
  std::atomic<bool> closing{false};
};

HostWorkers::Shared::Shared(const CpuIsa& instruction_set, Config given)
    : isa(instruction_set),
      config(std::move(given)),
      shape(config.exchange->shape()),
      scales(config.layers.size()),
      slots(static_cast<size_t>(shape.num_slots)) {
  const HostBlocks& blocks = config.blocks;
  require_config(!config.layers.empty() && num_threads() >= 1, "at least one layer, and a worker or a link");
  require_config(shape.num_kv_heads >= 1 && shape.num_q_heads % shape.num_kv_heads == 0,
                 "query heads must be a multiple of KV heads");
  require_config(shape.head_dim >= 2 && shape.head_dim % 2 == 0, "head_dim must be even");
  require_config(blocks.block_size >= 16 && blocks.block_size % 16 == 0, "block_size must be a multiple of 16");
  const size_t elements = static_cast<size_t>(shape.num_kv_heads) * static_cast<size_t>(shape.head_dim * blocks.block_size);
  const size_t num_scales = 4 * static_cast<size_t>(shape.num_kv_heads), planes = 2 * config.layers.size();
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const HostLayer& layer = config.layers[i];
    if (layer.scales != nullptr) scales[i].assign(layer.scales, layer.scales + num_scales);
    const size_t element = layer.scales != nullptr ? 1 : static_cast<size_t>(dtype_size(shape.dtype)), plane = elements * element;
    require_config(blocks.block_bytes == planes * plane, "a block is not [layers][keys, values] planes of this shape");
    tasks.push_back({.q = nullptr,
                     .q_stride = 0,
                     .out = nullptr,
                     .k_cache = blocks.base + 2 * i * plane,
                     .v_cache = blocks.base + (2 * i + 1) * plane,
                     .num_q_heads = shape.num_q_heads,
                     .num_kv_heads = shape.num_kv_heads,
                     .head_dim = shape.head_dim,
                     .block_size = blocks.block_size,
                     .window = layer.window,
                     .scale = layer.scale,
                     .softcap = layer.softcap,
                     .scales = {layer.scales != nullptr ? scales[i].data() : nullptr, shape.num_kv_heads},
                     .block_stride = static_cast<int64_t>(blocks.block_bytes / element),
                     .keys_by_token = !blocks.transposed_keys});
  }
  finished.resize(num_threads());
  scratches.resize(static_cast<size_t>(config.num_workers));
  for (Scratch& scratch : scratches) {
    scratch.heads.resize(shape.heads() * static_cast<size_t>(shape.head_dim * dtype_size(shape.dtype)));
    scratch.attention.reserve(attention_scratch_floats(shape.head_dim));
  }
}

void HostWorkers::Shared::append(int32_t slot) {
  SlotJob& added = slots[static_cast<size_t>(slot)];
  added.previous = last;
  added.next = -1;
  added.queued = true;
  (last < 0 ? first : slots[static_cast<size_t>(last)].next) = slot;
  last = slot;
  num_queued.fetch_add(1, std::memory_order_relaxed);
}

void HostWorkers::Shared::unlink(SlotJob& slot) {
  (slot.previous < 0 ? first : slots[static_cast<size_t>(slot.previous)].next) = slot.next;
  (slot.next < 0 ? last : slots[static_cast<size_t>(slot.next)].previous) = slot.previous;
  slot.queued = false;
  num_queued.fetch_sub(1, std::memory_order_relaxed);
}

SlotJob* HostWorkers::Shared::pop() {
  if (first < 0) return nullptr;
  SlotJob& slot = slots[static_cast<size_t>(first)];
  unlink(slot);
  return &slot;
}

SlotJob* HostWorkers::Shared::take() {
  const auto deadline = Clock::now() + kIdlePoll;
  while (Clock::now() < deadline && !closing.load(std::memory_order_relaxed)) {
    if (num_queued.load(std::memory_order_relaxed) > 0) {
      const std::lock_guard lock(mutex);
      if (SlotJob* slot = pop()) return slot;
    }
    relax();
  }
  std::unique_lock lock(mutex);
  ++sleeping;
  posted.wait(lock, [this] { return first >= 0 || closing.load(std::memory_order_relaxed); });
  --sleeping;
  return pop();  // closing leaves nothing in the queue
}

void HostWorkers::Shared::run(size_t worker) {
  sleep_no_longer_than_asked();
  worker < scratches.size() ? attend_as_they_come(scratches[worker]) : attend_over_link();
  const std::lock_guard lock(mutex);
  finished[worker] = 1;
  --running;
  ended.notify_all();
}

void HostWorkers::Shared::attend_as_they_come(Scratch& scratch) {
  while (SlotJob* slot = take()) {
    bool done = false;
    try {
      done = attend(*slot, scratch);
    } catch (...) {  // of the hook
    }
    slot->status.store(done ? HostAttentionStatus::kDone : HostAttentionStatus::kFailed, std::memory_order_release);
  }
}

void HostWorkers::Shared::attend_over_link() {
  const auto most = static_cast<size_t>(config.link->max_jobs());
  std::vector<SlotJob*> batch(most);
  std::vector<HostAttentionJob> jobs(most);
  while (SlotJob* slot = take()) {
    if (!take_mailbox(*slot, nullptr)) {
      slot->status.store(HostAttentionStatus::kFailed, std::memory_order_release);
      continue;
    }
    batch[0] = slot;
    const size_t count = 1 + collect(std::span(batch).subspan(1));
    attend_batch(std::span(batch).first(count), std::span(jobs).first(count));
  }
}

// More jobs whose mailboxes are there.
size_t HostWorkers::Shared::collect(std::span<SlotJob*> batch) {
  const std::lock_guard lock(mutex);
  size_t count = 0;
  while (count < batch.size() && first >= 0 && mailbox_came(slots[static_cast<size_t>(first)].job)) batch[count++] = pop();
  return count;
}

// Words come in any order.
bool HostWorkers::Shared::mailbox_came(const HostAttentionJob& job) const {
  const std::span words(config.exchange->mailbox(job.slot), shape.mailbox_words());
  return std::ranges::all_of(
      words, [&](uint64_t& word) { return std::atomic_ref(word).load(std::memory_order_relaxed) >> 32 == job.step; });
}

void HostWorkers::Shared::attend_batch(std::span<SlotJob* const> batch, std::span<HostAttentionJob> jobs) {
  const auto begun = Clock::now();
  std::ranges::transform(batch, jobs.begin(), [](const SlotJob* slot) { return slot->job; });
  MoveStatus status = config.link->start(jobs) ? MoveStatus::kPending : MoveStatus::kFailed;
  // A batch under way is waited for whoever closes: it writes to memory.
  while (status == MoveStatus::kPending && (status = config.link->poll()) == MoveStatus::kPending) {
    std::this_thread::sleep_for(kMailboxNap);
  }
  const auto result = status == MoveStatus::kDone ? HostAttentionStatus::kDone : HostAttentionStatus::kFailed;
  int64_t seen = 0;
  for (const HostAttentionJob& job : jobs) seen += tokens_of(job);
  if (status == MoveStatus::kDone) count(begun, seen);
  for (SlotJob* slot : batch) slot->status.store(result, std::memory_order_release);
}

void HostWorkers::Shared::count(Clock::time_point begun, int64_t seen) {
  busy_ns.fetch_add(std::chrono::duration_cast<Nanoseconds>(Clock::now() - begun).count(), std::memory_order_relaxed);
  tokens.fetch_add(seen, std::memory_order_relaxed);
}

// Words say for themselves whether they have come, so each is taken as it is there: nothing orders them.
bool HostWorkers::Shared::take_mailbox(const SlotJob& slot, std::byte* heads) const {
  uint64_t* word = config.exchange->mailbox(slot.job.slot);
  const auto tag = slot.job.step;
  auto poll_until = Clock::time_point::max();
  auto next = [&](uint32_t& payload) {
    while (true) {
      const uint64_t value = std::atomic_ref(*word).load(std::memory_order_relaxed);
      payload = static_cast<uint32_t>(value);
      if (value >> 32 == tag) return ++word, true;
      if (stopped(slot)) return false;
      const auto now = Clock::now();
      if (poll_until == Clock::time_point::max()) poll_until = now + kMailboxPoll;
      if (now < poll_until) {
        relax();
      } else {
        std::this_thread::sleep_for(kMailboxNap);
      }
    }
  };
  uint32_t payload = 0;
  const size_t words = shape.head_words();
  for (size_t head = 0; head < shape.heads(); ++head) {
    auto* floats = reinterpret_cast<uint32_t*>(heads) + head * words;
    auto* halves = reinterpret_cast<uint16_t*>(heads) + head * 2 * words;
    for (size_t i = 0; i < words; ++i) {
      if (!next(payload)) return false;
      if (heads == nullptr) continue;
      if (shape.dtype == Dtype::kFloat32) {
        floats[i] = payload;
      } else {
        halves[i] = static_cast<uint16_t>(payload);
        halves[i + words] = static_cast<uint16_t>(payload >> 16);
      }
    }
  }
  return true;
}

// The row's own key and value first, then what CpuKernels::attention() does: so the result has the same bits.
void HostWorkers::Shared::attend_head(const HostAttentionJob& job, const AttentionTask& task, int32_t kv_head,
                                      float* memory) const {
  const bool float8 = task.scales.values != nullptr;
  const int64_t head_bytes = task.head_dim * dtype_size(shape.dtype), group = task.num_q_heads / task.num_kv_heads;
  const int64_t cell_bytes = task.head_dim * task.block_size * (float8 ? 1 : dtype_size(shape.dtype));
  const auto block = static_cast<size_t>(job.blocks[job.position / task.block_size]) * config.blocks.block_bytes;
  const size_t at = block + static_cast<size_t>(kv_head * cell_bytes);
  const auto* key = static_cast<const std::byte*>(task.q) + (task.num_q_heads + kv_head) * head_bytes;
  auto plane = [&](const void* cache) { return const_cast<std::byte*>(static_cast<const std::byte*>(cache)) + at; };
  store_head(isa, shape.dtype, key, key + task.num_kv_heads * head_bytes,
             {.k = plane(task.k_cache),
              .v = plane(task.v_cache),
              .head_dim = task.head_dim,
              .block_size = task.block_size,
              .offset = job.position % task.block_size,
              .keys_by_token = task.keys_by_token,
              .scales = task.scales,
              .head = kv_head});
  const int64_t first_key = task.window > 0 ? std::max<int64_t>(0, job.position - task.window + 1) : 0;
  for (int64_t head = 0; head < group; head += kAttentionRows) {
    isa.attend(shape.dtype, task,
               {.block_table = job.blocks,
                .first_token = 0,
                .first_position = job.position,
                .num_queries = 1,
                .kv_head = kv_head,
                .head_begin = static_cast<int32_t>(head),
                .head_end = static_cast<int32_t>(std::min(group, head + kAttentionRows)),
                .partition_begin = first_key / kPartitionKeys,
                .partition_end = job.position / kPartitionKeys + 1,
                .partials = nullptr},
               memory);
  }
}

bool HostWorkers::Shared::attend(const SlotJob& slot, Scratch& scratch) {
  const HostAttentionJob& job = slot.job;
  if (!take_mailbox(slot, scratch.heads.data())) return false;
  const auto begun = Clock::now();
  if (config.before_attending) config.before_attending(job);
  AttentionTask task = tasks[static_cast<size_t>(job.layer)];
  task.q = scratch.heads.data();
  task.out = config.exchange->result(job.slot);
  for (int32_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    if (stopped(slot)) return false;  // whoever closes may take the block table away, though not the blocks
    attend_head(job, task, kv_head, scratch.attention.data());
  }
  count(begun, tokens_of(job));
  return true;
}

HostWorkers::HostWorkers(const CpuIsa& isa, Config config) : shared_(std::make_shared<Shared>(isa, std::move(config))) {
  const size_t count = shared_->num_threads();
  threads_.reserve(count);
  try {
    for (size_t worker = 0; worker < count; ++worker) {
      {
        const std::lock_guard lock(shared_->mutex);
        ++shared_->running;
      }
      threads_.emplace_back([shared = shared_, worker] { shared->run(worker); });
    }
  } catch (...) {
    {
      const std::lock_guard lock(shared_->mutex);
      --shared_->running;  // of the one that did not start
    }
    close(kDestructorLimit);
    throw;
  }
}

HostWorkers::~HostWorkers() {
  if (close(kDestructorLimit)) return;
  const std::lock_guard lock(shared_->mutex);
  for (size_t worker = 0; worker < threads_.size(); ++worker) {
    if (!shared_->finished[worker]) threads_[worker].detach();
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

bool HostWorkers::close(Nanoseconds limit) {
  {
    std::unique_lock lock(shared_->mutex);
    shared_->closing.store(true, std::memory_order_relaxed);
    while (SlotJob* slot = shared_->pop()) slot->status.store(HostAttentionStatus::kFailed, std::memory_order_relaxed);
    shared_->posted.notify_all();
    // Some limits are for ever, which no clock can add.
    const auto deadline = WaitClock::now() +
                          std::chrono::duration_cast<WaitClock::duration>(std::min<Nanoseconds>(limit, kForEver));
    if (!shared_->ended.wait_until(lock, deadline, [this] { return shared_->running == 0; })) return false;
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  return true;
}

int32_t HostWorkers::num_layers() const { return static_cast<int32_t>(shared_->config.layers.size()); }

void HostWorkers::post(const HostAttentionJob& job) {
  SlotJob& slot = shared_->slots[static_cast<size_t>(job.slot)];
  assert(slot.status.load(std::memory_order_relaxed) != HostAttentionStatus::kPending);
  assert(job.layer >= 0 && job.layer < num_layers() && job.position >= 0);
  slot.job = job;
  slot.cancelled.store(false, std::memory_order_relaxed);
  bool wake = false;
  {
    const std::lock_guard lock(shared_->mutex);
    const bool closing = shared_->closing.load(std::memory_order_relaxed);
    slot.status.store(closing ? HostAttentionStatus::kFailed : HostAttentionStatus::kPending, std::memory_order_relaxed);
    if (!closing) shared_->append(job.slot);
    wake = !closing && shared_->sleeping > 0;
  }
  if (wake) shared_->posted.notify_one();
}

HostAttentionStatus HostWorkers::poll(int32_t slot) {
  return shared_->slots[static_cast<size_t>(slot)].status.load(std::memory_order_acquire);
}

HostAttentionTimes HostWorkers::times() const {
  return {shared_->busy_ns.load(std::memory_order_relaxed), shared_->tokens.load(std::memory_order_relaxed)};
}

void HostWorkers::cancel(int32_t slot) {
  SlotJob& cancelled = shared_->slots[static_cast<size_t>(slot)];
  cancelled.cancelled.store(true, std::memory_order_relaxed);
  const std::lock_guard lock(shared_->mutex);
  if (!cancelled.queued) return;
  shared_->unlink(cancelled);
  cancelled.status.store(HostAttentionStatus::kFailed, std::memory_order_relaxed);
}

}  // namespace asyncengine
