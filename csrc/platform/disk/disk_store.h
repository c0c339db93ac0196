// Blocks of KV on a disk, written and read by threads of their own.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/backoff.h"
#include "core/tier/block_disk.h"
#include "platform/disk/block_directory.h"
#include "platform/disk/disk_index.h"

namespace asyncengine {

// contains, put, get and take_completions never wait for the disk: they hold a lock for as long as it takes to change a few
// words, and allocate nothing. They never throw. Reads go ahead of writes, and of two threads or more all but one may write at
// a time. Whatever goes wrong with the disk is a result and a counter: KV that cannot be had is computed again. A disk that
// fails again and again is left alone for a while (Backoff), and so is one whose calls hang, from when its user says so.
class DiskStore {
 public:
  struct Config {
    std::string path;
    BlockLayout layout;
    // Most bytes of blocks of this layout, in whole pages; the block used least recently makes room. A store counts the
    // files that it knows: two stores at once on a directory may fill it twice.
    int64_t max_bytes = 0;
    int max_pending = 64;   // reads that are not completed and taken, and as many writes
    int num_threads = 2;
    const FileOperations* files = &system_files();  // outlives the store
  };
  struct Counters {
    int64_t blocks = 0, bytes = 0;      // known and believed readable
    int64_t written = 0, read = 0;      // blocks
    int64_t missing = 0, corrupt = 0;   // reads; and files of a wrong length that the scan found
    int64_t failed = 0;                 // reads, writes and removals that the disk refused
    int64_t dropped = 0;                // reads and writes that were not tried: too many pending, a pause, the end
    int64_t evicted = 0;                // blocks
    bool scanned = false;               // the blocks of earlier stores are known
  };

  // notify() is called from the store's threads, and from put(), when there is a completion to take; a store that is leaked
  // may call it long after. Throws std::invalid_argument, or std::runtime_error with the path in it. A thread reads the
  // directory: the blocks in it become known one after the other.
  DiskStore(const Config& config, std::function<void()> notify);
  // Waits for calls under way: close() first, and dispose() of a store whose close() answers false.
  ~DiskStore();
  DiskStore(const DiskStore&) = delete;
  DiskStore& operator=(const DiskStore&) = delete;

  // False for all blocks while reads fail or hang.
  bool contains(const BlockKey& key) const;
  // False: not now, and no completion follows. `tokens` has block_tokens tokens and is copied. The memory at `data` and
  // `target` is the store's until the completion is taken, or until close() has answered true. kDone of a put: the block is
  // in the directory, perhaps because it was known to be there before. A get of a block that is not known looks for its
  // file: another process may have written it.
  bool put(const BlockKey& key, const BlockKey& parent, std::span<const int32_t> tokens, const std::byte* data, uint64_t ticket);
  bool get(const BlockKey& key, const BlockKey& parent, std::span<const int32_t> tokens, std::byte* target, uint64_t ticket);
  // visit(ticket, DiskResult) for everything that was completed, for one thread. visit may put and get, and must not throw.
  template <typename Visit>
  void take_completions(Visit&& visit) {
    if (!any_done_.load(std::memory_order_acquire)) return;
    collect();
    for (const Completion& completion : taken_) visit(completion.ticket, completion.result);
    taken_.clear();
  }
  // Calls under way take too long: what is queued behind them comes to nothing, and nothing is taken before they have
  // returned. Then follows a pause, as after failures.
  void leave_alone(DiskCalls calls);
  Counters counters() const;

  // Ends the threads; what is queued is not tried any more and is not completed. False: a thread hangs in a call after
  // `limit`, or at once if it was left alone. May be called again.
  bool close(std::chrono::nanoseconds limit);
  // Frees a store that must not be waited for: one whose thread hangs is leaked, and so must be the memory of its blocks
  // (the answer is false).
  static bool dispose(DiskStore* store, std::chrono::nanoseconds limit);

 private:
  struct Job {
    BlockKey key, parent;
    const std::byte* data = nullptr;  // of a write
    std::byte* target = nullptr;      // of a read
    uint64_t ticket = 0;
    DiskResult result{};
    bool runs = false, late = false;  // late: it was left alone
  };
  struct Completion {
    uint64_t ticket;
    DiskResult result;
  };
  // A queue of fixed room.
  struct Ring {
    std::vector<int32_t> items;
    size_t first = 0, size = 0;

    void push(int32_t item) { items[(first + size++) % items.size()] = item; }
    int32_t pop() {
      const int32_t item = items[first];
      first = (first + 1) % items.size(), --size;
      return item;
    }
  };
  struct JobQueue {
    std::vector<int32_t> free;  // jobs
    Ring ring;
    Backoff backoff;
    int running = 0, most_running = 0, late = 0;

    bool left_alone(const FileOperations& files) const { return late > 0 || backoff.paused(files.now_ns()); }
    bool runnable() const { return ring.size > 0 && running < most_running; }
  };

  JobQueue& queue_of(int32_t job) { return job < max_pending_ ? reads_ : writes_; }
  std::span<int32_t> tokens(int32_t job);
  int32_t take_job(JobQueue& queue, const BlockKey& key, const BlockKey& parent, std::span<const int32_t> tokens, uint64_t ticket);
  void complete(int32_t job, DiskResult result);
  void collect();
  void start(void (DiskStore::*body)());
  void finish_thread();
  // The methods below run on the store's threads.
  void load();
  void work();
  DiskResult run(int32_t job, bool paused);
  DiskResult read(int32_t job);
  DiskResult write(int32_t job);
  std::optional<BlockKey> take_room();
  void account(int32_t job, DiskResult result, bool tried);

  const FileOperations& files_;
  BlockDirectory directory_;
  const int64_t capacity_;  // blocks
  const int32_t max_pending_;
  const size_t block_tokens_;
  const std::function<void()> notify_;

  mutable std::mutex mutex_;  // of all that follows
  std::condition_variable work_, idle_;
  DiskIndex index_;
  int64_t being_written_ = 0;    // blocks that have room and are not yet in the index; both are at most capacity_
  std::vector<Job> jobs_;        // reads, then writes
  std::vector<int32_t> tokens_;  // of the jobs
  JobQueue reads_, writes_;
  Ring done_;
  Counters counters_;
  int running_threads_ = 0;
  std::atomic<bool> closing_{false};
  std::atomic<bool> any_done_{false};
  std::vector<Completion> taken_;  // of the thread that takes completions
  std::vector<std::thread> threads_;
};

}  // namespace asyncengine
