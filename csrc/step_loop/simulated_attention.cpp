#include "step_loop/simulated_attention.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

#include "core/wait_clock.h"

namespace asyncengine {

struct SimulatedAttention::Shared {
  struct Row {
    std::atomic<uint64_t> mailbox{0};
    std::atomic<HostAttentionStatus> status{HostAttentionStatus::kFailed};
    std::atomic<bool> cancelled{false};
    uint64_t result = 0;
  };
  Shared(const Config& given, std::shared_ptr<HostPool> blocks)
      : config(given), pool(std::move(blocks)), rows(static_cast<size_t>(given.num_slots)) {}

  Row& row(int32_t slot) { return rows[static_cast<size_t>(slot)]; }
  void run();
  bool attend(const HostAttentionJob& job, Row& row);
  bool take_token(const HostAttentionJob& job, Row& row, int32_t& token);

  const Config config;
  const std::shared_ptr<HostPool> pool;
  std::vector<Row> rows;  // by slot
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<HostAttentionJob> jobs;
  int running = 0;
  std::atomic<bool> closing{false};
};

void SimulatedAttention::Shared::run() {
  std::unique_lock lock(mutex);
  while (true) {
    changed.wait(lock, [this] { return closing || !jobs.empty(); });
    if (closing) break;
    const HostAttentionJob job = jobs.front();
    jobs.pop_front();
    lock.unlock();
    Row& mine = row(job.slot);
    bool done = false;
    try {
      done = attend(job, mine);
    } catch (...) {  // of the hook
    }
    mine.status.store(done ? HostAttentionStatus::kDone : HostAttentionStatus::kFailed, std::memory_order_release);
    lock.lock();
  }
  --running;
  changed.notify_all();
}

bool SimulatedAttention::Shared::take_token(const HostAttentionJob& job, Row& mine, int32_t& token) {
  while (true) {
    const uint64_t word = mine.mailbox.load(std::memory_order_acquire);
    token = static_cast<int32_t>(static_cast<uint32_t>(word));
    if (word >> 32 == job.step) return true;
    if (mine.cancelled || closing) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

bool SimulatedAttention::Shared::attend(const HostAttentionJob& job, Row& mine) {
  int32_t token = 0;
  if (!take_token(job, mine, token)) return false;
  if (config.before) config.before(job);
  if (mine.cancelled || closing) return false;
  const int32_t size = config.block_size;
  const auto cell = [&](int32_t position) -> int32_t& {
    return reinterpret_cast<int32_t*>(pool->block(job.blocks[position / size]))[position % size];
  };
  cell(job.position) = token;
  uint64_t hash = TokenHash::kEmpty;
  for (int32_t p = 0; p <= job.position; ++p) hash = TokenHash::extend(hash, cell(p));
  mine.result = hash ^ TokenHash::mix(static_cast<uint64_t>(job.layer) + 1);
  return true;
}

SimulatedAttention::SimulatedAttention(const Config& config, std::shared_ptr<HostPool> pool)
    : shared_(std::make_shared<Shared>(config, std::move(pool))) {
  shared_->running = config.num_workers;
  for (int i = 0; i < config.num_workers; ++i) threads_.emplace_back([shared = shared_] { shared->run(); });
}

SimulatedAttention::~SimulatedAttention() {
  if (close(std::chrono::seconds(1))) return;
  for (std::thread& thread : threads_) thread.detach();
}

void SimulatedAttention::leave(int32_t slot, uint64_t step, int32_t token) {
  shared_->row(slot).mailbox.store(step << 32 | static_cast<uint32_t>(token), std::memory_order_release);
}

uint64_t SimulatedAttention::enter(int32_t slot, int32_t layer) const {
  return shared_->row(slot).result ^ TokenHash::mix(static_cast<uint64_t>(layer) + 1);
}

int32_t SimulatedAttention::num_layers() const { return shared_->config.num_layers; }

void SimulatedAttention::post(const HostAttentionJob& job) {
  const std::lock_guard lock(shared_->mutex);
  shared_->row(job.slot).cancelled = false;
  shared_->row(job.slot).status.store(HostAttentionStatus::kPending, std::memory_order_relaxed);
  shared_->jobs.push_back(job);
  shared_->changed.notify_all();
}

HostAttentionStatus SimulatedAttention::poll(int32_t slot) { return shared_->row(slot).status.load(std::memory_order_acquire); }

void SimulatedAttention::cancel(int32_t slot) {
  const std::lock_guard lock(shared_->mutex);
  shared_->row(slot).cancelled = true;
  const auto of_slot = [&](const HostAttentionJob& job) { return job.slot == slot; };
  if (std::erase_if(shared_->jobs, of_slot) > 0) shared_->row(slot).status = HostAttentionStatus::kFailed;
}

bool SimulatedAttention::close(std::chrono::nanoseconds limit) {
  {
    std::unique_lock lock(shared_->mutex);
    shared_->closing = true;
    shared_->changed.notify_all();
    const auto deadline = WaitClock::now() + std::chrono::duration_cast<WaitClock::duration>(limit);
    if (!shared_->changed.wait_until(lock, deadline, [this] { return shared_->running == 0; })) return false;
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  return true;
}

}  // namespace asyncengine
