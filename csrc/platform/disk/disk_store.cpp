#include "platform/disk/disk_store.h"

#include <algorithm>
#include <cassert>
#include <exception>
#include <stdexcept>
#include <utility>

#include "core/wait_clock.h"

namespace asyncengine {
namespace {

constexpr int64_t kMostBlocks = int64_t{1} << 30;

const DiskStore::Config& checked(const DiskStore::Config& config) {
  const BlockLayout& layout = config.layout;
  if (config.path.empty()) throw std::invalid_argument("a disk store needs a path");
  if (layout.block_bytes == 0 || layout.block_tokens < 1 || config.max_pending < 1 || config.num_threads < 1) {
    throw std::invalid_argument("a disk store's block_bytes, block_tokens, max_pending and num_threads must be positive");
  }
  return config;
}

int64_t capacity_of(const DiskStore::Config& config, int64_t bytes_per_block) {
  if (config.max_bytes < bytes_per_block) {
    throw std::invalid_argument("a disk store of " + std::to_string(config.max_bytes) + " bytes in " + config.path +
                                " has no room for a block, which takes " + std::to_string(bytes_per_block));
  }
  return std::min(config.max_bytes / bytes_per_block, kMostBlocks);
}

}  // namespace

DiskStore::DiskStore(const Config& config, std::function<void()> notify)
    : files_(*checked(config).files),
      directory_(config.path, config.layout, files_),
      capacity_(capacity_of(config, directory_.bytes_per_block())),
      max_pending_(config.max_pending),
      block_tokens_(static_cast<size_t>(config.layout.block_tokens)),
      notify_(std::move(notify)),
      index_(static_cast<size_t>(capacity_)) {
  const auto pending = static_cast<size_t>(max_pending_);
  jobs_.resize(2 * pending);
  tokens_.resize(2 * pending * block_tokens_);
  done_.items.resize(2 * pending);
  taken_.reserve(2 * pending);
  for (JobQueue* queue : {&reads_, &writes_}) {
    queue->ring.items.resize(pending);
    queue->most_running = config.num_threads;
  }
  writes_.most_running = static_cast<int>(std::min<int64_t>(capacity_, std::max(config.num_threads - 1, 1)));
  for (int32_t i = 0; i < max_pending_; ++i) {
    reads_.free.push_back(i);
    writes_.free.push_back(max_pending_ + i);
  }
  try {
    threads_.reserve(static_cast<size_t>(config.num_threads) + 1);
    start(&DiskStore::load);
    for (int i = 0; i < config.num_threads; ++i) start(&DiskStore::work);
  } catch (...) {
    close(std::chrono::nanoseconds::max());
    throw;
  }
}

DiskStore::~DiskStore() { close(std::chrono::nanoseconds::max()); }

bool DiskStore::dispose(DiskStore* store, std::chrono::nanoseconds limit) {
  if (!store->close(limit)) return false;
  delete store;
  return true;
}

bool DiskStore::close(std::chrono::nanoseconds limit) {
  {
    std::unique_lock lock(mutex_);
    closing_ = true;
    counters_.dropped += static_cast<int64_t>(reads_.ring.size + writes_.ring.size);
    reads_.ring.size = writes_.ring.size = 0;
    work_.notify_all();
    const auto idle = [this] { return running_threads_ == 0; };
    if (limit == std::chrono::nanoseconds::max()) {
      idle_.wait(lock, idle);
    } else if (reads_.late + writes_.late > 0 || !idle_.wait_until(lock, WaitClock::now() + limit, idle)) {
      return false;
    }
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  return true;
}

// ---- the step thread ---------------------------------------------------------------------------------------------------

bool DiskStore::contains(const BlockKey& key) const {
  std::lock_guard lock(mutex_);
  return index_.contains(key) && !reads_.left_alone(files_);
}

bool DiskStore::put(const BlockKey& key, const BlockKey& parent, std::span<const int32_t> block, const std::byte* data,
                    uint64_t ticket) {
  bool known = false;
  {
    std::lock_guard lock(mutex_);
    const int32_t job = take_job(writes_, key, parent, block, ticket);
    if (job < 0) return false;
    jobs_[static_cast<size_t>(job)].data = data;
    known = index_.touch(key);
    known ? complete(job, DiskResult::kDone) : writes_.ring.push(job);
  }
  known ? notify_() : work_.notify_one();
  return true;
}

bool DiskStore::get(const BlockKey& key, const BlockKey& parent, std::span<const int32_t> block, std::byte* target,
                    uint64_t ticket) {
  {
    std::lock_guard lock(mutex_);
    const int32_t job = take_job(reads_, key, parent, block, ticket);
    if (job < 0) return false;
    jobs_[static_cast<size_t>(job)].target = target;
    index_.touch(key);
    reads_.ring.push(job);
  }
  work_.notify_one();
  return true;
}

void DiskStore::leave_alone(DiskCalls calls) {
  {
    std::lock_guard lock(mutex_);
    JobQueue& queue = calls == DiskCalls::kReads ? reads_ : writes_;
    while (queue.ring.size > 0) {
      ++counters_.dropped;
      complete(queue.ring.pop(), DiskResult::kFailed);
    }
    for (Job& job :
         std::span(jobs_).subspan(&queue == &reads_ ? 0 : static_cast<size_t>(max_pending_), static_cast<size_t>(max_pending_))) {
      if (job.runs && !std::exchange(job.late, true)) ++queue.late;
    }
  }
  notify_();
}

DiskStore::Counters DiskStore::counters() const {
  std::lock_guard lock(mutex_);
  Counters counters = counters_;
  counters.blocks = static_cast<int64_t>(index_.size());
  counters.bytes = counters.blocks * directory_.bytes_per_block();
  return counters;
}

std::span<int32_t> DiskStore::tokens(int32_t job) {
  return std::span(tokens_).subspan(static_cast<size_t>(job) * block_tokens_, block_tokens_);
}

int32_t DiskStore::take_job(JobQueue& queue, const BlockKey& key, const BlockKey& parent, std::span<const int32_t> block,
                            uint64_t ticket) {
  assert(block.size() == block_tokens_);
  if (closing_ || queue.free.empty() || queue.left_alone(files_)) {
    ++counters_.dropped;
    return -1;
  }
  const int32_t job = queue.free.back();
  queue.free.pop_back();
  jobs_[static_cast<size_t>(job)] = {.key = key, .parent = parent, .ticket = ticket};
  std::copy_n(block.begin(), block_tokens_, tokens(job).begin());
  return job;
}

void DiskStore::complete(int32_t job, DiskResult result) {
  jobs_[static_cast<size_t>(job)].result = result;
  done_.push(job);
  any_done_.store(true, std::memory_order_release);
}

void DiskStore::collect() {
  std::lock_guard lock(mutex_);
  any_done_.store(false, std::memory_order_relaxed);
  while (done_.size > 0) {
    const int32_t job = done_.pop();
    taken_.push_back({jobs_[static_cast<size_t>(job)].ticket, jobs_[static_cast<size_t>(job)].result});
    queue_of(job).free.push_back(job);
  }
}

// ---- the store's threads -----------------------------------------------------------------------------------------------

void DiskStore::start(void (DiskStore::*body)()) {
  {
    std::lock_guard lock(mutex_);
    ++running_threads_;
  }
  try {
    threads_.emplace_back([this, body] {
      (this->*body)();
      finish_thread();
    });
  } catch (...) {
    finish_thread();
    throw;
  }
}

void DiskStore::finish_thread() {
  std::lock_guard lock(mutex_);
  if (--running_threads_ == 0) idle_.notify_all();
}

// Makes the blocks of earlier stores known, as older than all that came meanwhile. Blocks beyond the limit are removed.
void DiskStore::load() try {
  constexpr size_t kBatch = 64;  // for which the lock is held
  const BlockDirectory::Scan scan = directory_.scan(closing_);
  size_t i = 0;
  while (i < scan.blocks.size() && !closing_) {
    std::unique_lock lock(mutex_);
    const size_t end = std::min(i + kBatch, scan.blocks.size());
    while (i < end && static_cast<int64_t>(index_.size()) + being_written_ < capacity_) {
      index_.insert_oldest(scan.blocks[i++].key);
    }
    if (i == end) continue;
    const BlockKey& surplus = scan.blocks[i++].key;
    if (index_.contains(surplus)) continue;
    ++counters_.evicted;
    lock.unlock();
    directory_.remove(surplus);
  }
  std::lock_guard lock(mutex_);
  counters_.corrupt += scan.broken;
  counters_.scanned = true;
} catch (const std::exception&) {  // no memory: what was not found is not known
  std::lock_guard lock(mutex_);
  ++counters_.failed;
  counters_.scanned = true;
}

void DiskStore::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    // A thread that sleeps is told of every job, and one that ends a write looks for the next job itself: so nobody needs to
    // be told that fewer threads write.
    work_.wait(lock, [this] { return closing_ || reads_.runnable() || writes_.runnable(); });
    if (closing_) return;
    JobQueue& queue = reads_.runnable() ? reads_ : writes_;
    const int32_t job = queue.ring.pop();
    ++queue.running;
    jobs_[static_cast<size_t>(job)].runs = true;
    const bool paused = queue.backoff.paused(files_.now_ns());
    lock.unlock();
    const DiskResult result = run(job, paused);
    lock.lock();
    --queue.running;
    jobs_[static_cast<size_t>(job)].runs = false;
    account(job, result, !paused);
    complete(job, result);
    lock.unlock();
    notify_();
    lock.lock();
  }
}

DiskResult DiskStore::run(int32_t job, bool paused) try {
  if (paused) return DiskResult::kFailed;
  return &queue_of(job) == &reads_ ? read(job) : write(job);
} catch (const std::exception&) {  // no memory for the name of a file
  return DiskResult::kFailed;
}

DiskResult DiskStore::read(int32_t i) {
  const Job& job = jobs_[static_cast<size_t>(i)];
  const DiskResult result = directory_.read(job.key, job.parent, tokens(i), job.target);
  // Whatever cannot be read is not tried again.
  if (result == DiskResult::kCorrupt || result == DiskResult::kFailed) directory_.remove(job.key);
  return result;
}

DiskResult DiskStore::write(int32_t i) {
  const Job& job = jobs_[static_cast<size_t>(i)];
  const std::optional<BlockKey> oldest = take_room();
  bool removed = !oldest;
  DiskResult result = DiskResult::kFailed;
  try {
    removed = removed || directory_.remove(*oldest);
    if (removed) result = directory_.write(job.key, job.parent, tokens(i), job.data);
  } catch (const std::exception&) {  // no memory for the name of a file
  }
  std::lock_guard lock(mutex_);
  --being_written_;
  if (result == DiskResult::kDone) index_.insert(job.key);
  if (!removed) index_.insert_oldest(*oldest);
  if (removed && oldest) ++counters_.evicted;
  return result;
}

// Makes room for one block more in being_written_. Answers the block whose room it is, if one must be removed. At most
// capacity_ threads write, so there is one.
std::optional<BlockKey> DiskStore::take_room() {
  std::lock_guard lock(mutex_);
  std::optional<BlockKey> oldest;
  if (static_cast<int64_t>(index_.size()) + being_written_ >= capacity_) {
    oldest = index_.oldest();
    index_.erase(*oldest);
  }
  ++being_written_;
  return oldest;
}

void DiskStore::account(int32_t job, DiskResult result, bool tried) {
  JobQueue& its = queue_of(job);
  const bool reads = &its == &reads_, late = jobs_[static_cast<size_t>(job)].late;
  const BlockKey& key = jobs_[static_cast<size_t>(job)].key;
  if (late) {
    --its.late;
    its.backoff.pause(files_.now_ns());
  }
  if (!tried) {
    ++counters_.dropped;
    return;
  }
  if (reads && result != DiskResult::kDone) index_.erase(key);
  switch (result) {
    case DiskResult::kDone:
      if (!late) its.backoff.succeeded();
      ++(reads ? counters_.read : counters_.written);
      return;
    case DiskResult::kMissing: ++counters_.missing; return;
    case DiskResult::kCorrupt: ++counters_.corrupt; return;
    case DiskResult::kFailed:
      ++counters_.failed;
      its.backoff.failed(files_.now_ns());
      return;
  }
}

}  // namespace asyncengine
