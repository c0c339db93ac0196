// A disk store in a temporary directory, over files that fail on demand.
#pragma once

#include <fcntl.h>
#include <stdlib.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <filesystem>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "core/wait_clock.h"
#include "platform/disk/disk_store.h"
#include "step_loop/notifier.h"

namespace asyncengine {

inline std::ostream& operator<<(std::ostream& out, DiskResult result) {
  constexpr const char* kNames[] = {"done", "missing", "corrupt", "failed"};
  return out << kNames[static_cast<size_t>(result)];
}

}  // namespace asyncengine

namespace asyncengine::testing {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

// Holds whoever passes while it is shut.
class Gate {
 public:
  void shut(bool on) {
    std::lock_guard lock(mutex_);
    shut_ = on;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !shut_; });
    --waiting_;
  }
  // Somebody stands before the shut gate.
  void await_waiting() {
    std::unique_lock lock(mutex_);
    CHECK(changed_.wait_until(lock, WaitClock::now() + 20s, [this] { return shut_ && waiting_ > 0; }));
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool shut_ = false;
  int waiting_ = 0;
};

// Faults of system calls: an errno each, 0 for no fault. One test at a time, so one for all.
struct Faults {
  std::atomic<int> create{0}, open{0}, write{0}, read{0}, close{0}, rename{0}, unlink{0}, mkdir{0};
  std::atomic<int> interrupt{0};                 // so many calls are interrupted
  std::atomic<size_t> most_bytes{SIZE_MAX};      // of one call
  std::atomic<size_t> room{SIZE_MAX};            // a file does not grow beyond it
  std::atomic<bool> flip{false};                 // a bit of what is read
  std::atomic<int64_t> now_ns{1};
  std::atomic<int> writes{0}, reads{0};          // calls
  Gate open_gate, write_gate, read_gate;

  void clear() {
    for (auto* error : {&create, &open, &write, &read, &close, &rename, &unlink, &mkdir, &interrupt}) *error = 0;
    most_bytes = room = SIZE_MAX;
    flip = false;
    writes = reads = 0;
  }
};
inline Faults faults;

inline int fails(const std::atomic<int>& error) {
  errno = error;
  return error != 0 ? -1 : 0;
}

inline bool interrupted() {
  int left = faults.interrupt;
  while (left > 0 && !faults.interrupt.compare_exchange_weak(left, left - 1)) {
  }
  errno = EINTR;
  return left > 0;
}

inline const FileOperations& faulty_files() {
  struct F {
    static int open(const char* path, int flags, mode_t mode) {
      if ((flags & O_CREAT) == 0) faults.open_gate.pass();
      return fails((flags & O_CREAT) != 0 ? faults.create : faults.open) ? -1 : system_files().open(path, flags, mode);
    }
    static ssize_t pread(int fd, void* target, size_t bytes, off_t offset) {
      ++faults.reads;
      faults.read_gate.pass();
      if (interrupted() || fails(faults.read)) return -1;
      const ssize_t got = system_files().pread(fd, target, std::min(bytes, faults.most_bytes.load()), offset);
      if (got > 0 && faults.flip) static_cast<char*>(target)[got / 2] ^= 4;
      return got;
    }
    static ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
      ++faults.writes;
      faults.write_gate.pass();
      if (interrupted() || fails(faults.write)) return -1;
      const size_t room = faults.room - std::min(faults.room.load(), static_cast<size_t>(offset));
      errno = ENOSPC;
      if (room == 0) return -1;
      return system_files().pwrite(fd, data, std::min({bytes, room, faults.most_bytes.load()}), offset);
    }
    static int close(int fd) {
      const int closed = system_files().close(fd);
      return fails(faults.close) ? -1 : closed;
    }
    static int rename(const char* from, const char* to) { return fails(faults.rename) ? -1 : system_files().rename(from, to); }
    static int unlink(const char* path) { return fails(faults.unlink) ? -1 : system_files().unlink(path); }
    static int mkdir(const char* path, mode_t mode) { return fails(faults.mkdir) ? -1 : system_files().mkdir(path, mode); }
    static int64_t now_ns() { return faults.now_ns; }
  };
  static const FileOperations files = {F::open,  system_files().fstat, F::pread, F::pwrite, F::close, F::rename, F::unlink,
                                       F::mkdir, system_files().touch, F::now_ns};
  return files;
}

class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "asyncengine-disk-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
    path = name;
    faults.clear();
  }
  ~Folder() {
    faults.clear();
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  std::vector<fs::path> files(const std::string& suffix = ".kv") const {
    std::vector<fs::path> found;
    if (!fs::exists(path)) return found;
    for (const auto& entry : fs::recursive_directory_iterator(path)) {
      if (entry.is_regular_file() && entry.path().extension() == suffix) found.push_back(entry.path());
    }
    return found;
  }

  fs::path path;
};

constexpr size_t kBlockBytes = 64;
constexpr int kBlockTokens = 4;
constexpr int64_t kPageBytes = 4096;  // what such a block counts for

inline DiskStore::Config disk_config(const Folder& folder, int64_t blocks = 100) {
  return {folder.path.string(), {"model", kBlockBytes, kBlockTokens}, blocks * kPageBytes, 16, 2, &faulty_files()};
}

// Block `id`: its tokens, its place in the chain, its KV.
struct Block {
  explicit Block(uint32_t id, size_t bytes = kBlockBytes)
      : tokens(kBlockTokens, static_cast<int32_t>(id)),
        parent(root_key("model", id % 3)),
        key(next_key(parent, tokens)),
        data(bytes) {
    std::mt19937 random(id);
    for (std::byte& byte : data) byte = static_cast<std::byte>(random());
  }
  std::vector<int32_t> tokens;
  BlockKey parent, key;
  std::vector<std::byte> data;
};

class Disk {
 public:
  explicit Disk(const DiskStore::Config& config, bool await = true)
      : bytes(config.layout.block_bytes), store(new DiskStore(config, [this] { notifier.notify(); })) {
    if (await) await_scan();
  }
  ~Disk() {
    for (Gate* gate : {&faults.open_gate, &faults.write_gate, &faults.read_gate}) gate->shut(false);
    CHECK(DiskStore::dispose(store, 20s));
  }

  void await_scan() const {
    for (int i = 0; i < 20'000 && !store->counters().scanned; ++i) std::this_thread::sleep_for(1ms);
    CHECK(store->counters().scanned);
  }
  bool put(uint32_t id) {
    const Block& block = kept.try_emplace(id, id, bytes).first->second;
    return store->put(block.key, block.parent, block.tokens, block.data.data(), id);
  }
  bool get(uint32_t id) {
    const Block block(id, bytes);
    std::vector<std::byte>& target = targets[id] = std::vector<std::byte>(bytes);
    return store->get(block.key, block.parent, block.tokens, target.data(), id);
  }
  // Waits until there are `count` results in all.
  void await(size_t count) {
    const auto end = std::chrono::steady_clock::now() + 20s;
    while (true) {
      store->take_completions([this](uint64_t id, DiskResult result) { results.push_back({static_cast<uint32_t>(id), result}); });
      if (results.size() >= count) return;
      if (std::chrono::steady_clock::now() > end) throw std::runtime_error("no completion");
      notifier.wait(1s);
    }
  }
  DiskResult put_now(uint32_t id) {
    CHECK(put(id));
    return only_result();
  }
  DiskResult get_now(uint32_t id) {
    CHECK(get(id));
    const DiskResult result = only_result();
    if (result == DiskResult::kDone) CHECK(right(id));
    return result;
  }
  bool right(uint32_t id) const { return targets.at(id) == Block(id, bytes).data; }
  bool contains(uint32_t id) const { return store->contains(Block(id, bytes).key); }
  DiskStore::Counters counters() const { return store->counters(); }
  DiskResult only_result() {
    await(1);
    CHECK_EQ(results.size(), 1U);
    return std::exchange(results, {}).front().second;
  }

  size_t bytes;
  Notifier notifier;
  std::map<uint32_t, Block> kept;  // the store reads it
  std::map<uint32_t, std::vector<std::byte>> targets;
  std::vector<std::pair<uint32_t, DiskResult>> results;
  DiskStore* store;
};

inline fs::path file_of(const Folder& folder, uint32_t id) {
  for (const fs::path& path : folder.files()) {
    if (path.stem() == hex(Block(id).key.bytes)) return path;
  }
  return {};
}

}  // namespace asyncengine::testing
