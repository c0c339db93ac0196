// Disks that are full, refuse, lie or hang: a result, a counter, and nobody waits.
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>

#include "disk_fixture.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;
using enum DiskResult;

void make_socket(const fs::path& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // A path that is relative to the folder, because there is room for a hundred characters.
  const fs::path here = fs::current_path();
  fs::current_path(path.parent_path());
  std::strncpy(address.sun_path, path.filename().c_str(), sizeof(address.sun_path) - 1);
  const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
  CHECK_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  ::close(fd);
  fs::current_path(here);
}

}  // namespace

TEST(only_regular_files_are_read) {
  Folder folder;
  Disk disk(disk_config(folder));
  CHECK_EQ(disk.put_now(2), kDone);
  const auto replace = [&](void (*make)(const fs::path&, const fs::path&)) {
    CHECK_EQ(disk.put_now(1), kDone);
    const fs::path path = file_of(folder, 1), right = folder.path / "right";
    fs::rename(path, right);
    make(path, right);
    CHECK_EQ(disk.get_now(1), kCorrupt);
    CHECK(!disk.contains(1));
    CHECK(!fs::exists(fs::symlink_status(path)) || fs::is_directory(path));
    fs::remove(path);
    CHECK_EQ(disk.get_now(2), kDone);
  };
  replace([](const fs::path& path, const fs::path&) { CHECK_EQ(::mkfifo(path.c_str(), 0600), 0); });
  replace([](const fs::path& path, const fs::path&) { fs::create_directory(path); });
  replace([](const fs::path& path, const fs::path& right) { fs::create_symlink(right, path); });
  replace([](const fs::path& path, const fs::path&) { make_socket(path); });
  CHECK_EQ(disk.counters().corrupt, 4);
}

TEST(a_directory_whose_lock_is_a_fifo_is_refused) {
  Folder folder;
  {
    const Disk disk(disk_config(folder));
  }
  const fs::path lock = fs::directory_iterator(folder.path)->path() / "lock";
  fs::remove(lock);
  CHECK_EQ(::mkfifo(lock.c_str(), 0600), 0);
  std::string why;
  try {
    const Disk disk(disk_config(folder));
  } catch (const std::runtime_error& error) {
    why = error.what();
  }
  CHECK(why.find(lock.string()) != std::string::npos);
}

TEST(a_write_that_fails_leaves_nothing_on_disk) {
  Folder folder;
  Disk disk(disk_config(folder));
  CHECK_EQ(disk.put_now(100), kDone);
  uint32_t id = 0;
  for (std::atomic<int>* fault : {&faults.create, &faults.write, &faults.close, &faults.rename}) {
    *fault = EIO;
    CHECK_EQ(disk.put_now(id), kFailed);
    *fault = 0;
    CHECK(!disk.contains(id));
    CHECK_EQ(disk.get_now(id++), kMissing);
  }
  for (const size_t room : {0, 100, 128 + 16 + 10}) {  // the head, and a part of the KV
    faults.room = room;
    CHECK_EQ(disk.put_now(id++), kFailed);
  }
  CHECK_EQ(disk.counters().failed, 7);
  CHECK_EQ(folder.files().size(), 1U);
  CHECK(folder.files(".tmp").empty());
  CHECK_EQ(disk.get_now(100), kDone);
}

TEST(short_and_interrupted_calls_go_on) {
  Folder folder;
  Disk disk(disk_config(folder));
  faults.most_bytes = 7;
  faults.interrupt = 5;
  CHECK_EQ(disk.put_now(1), kDone);
  faults.interrupt = 5;
  CHECK_EQ(disk.get_now(1), kDone);
  CHECK_EQ(faults.interrupt.load(), 0);
}

TEST(writing_pauses_while_the_disk_is_full) {
  Folder folder;
  Disk disk(disk_config(folder));
  faults.room = 50;
  uint32_t id = 0;
  for (; id < Backoff::kPatience; ++id) CHECK_EQ(disk.put_now(id), kFailed);
  const int writes = faults.writes;
  CHECK(!disk.put(++id));
  CHECK_EQ(disk.counters().dropped, 1);
  CHECK_EQ(faults.writes.load(), writes);
  CHECK_EQ(disk.get_now(1), kMissing);  // reads go on
  faults.now_ns += Backoff::kFirstPauseNs;
  CHECK_EQ(disk.put_now(++id), kFailed);  // one more, and it pauses for twice as long
  faults.now_ns += Backoff::kFirstPauseNs;
  CHECK(!disk.put(++id));
  faults.now_ns += Backoff::kFirstPauseNs;
  faults.room = SIZE_MAX;
  CHECK_EQ(disk.put_now(++id), kDone);
  faults.room = 50;
  for (int i = 0; i < Backoff::kPatience; ++i) CHECK_EQ(disk.put_now(++id), kFailed);
  CHECK(!disk.put(++id));
}

TEST(a_pause_is_a_minute_at_most) {
  Folder folder;
  Disk disk(disk_config(folder));
  faults.create = EACCES;
  uint32_t id = 0;
  for (int i = 1; i < Backoff::kPatience; ++i) CHECK_EQ(disk.put_now(++id), kFailed);
  for (int i = 0; i < 20; ++i) {
    CHECK_EQ(disk.put_now(++id), kFailed);
    CHECK(!disk.put(++id));
    faults.now_ns += Backoff::kLongestPauseNs;
  }
}

TEST(what_was_queued_before_a_pause_is_not_tried) {
  Folder folder;
  DiskStore::Config config = disk_config(folder);
  config.num_threads = 1;
  Disk disk(config);
  faults.write = EIO;
  faults.write_gate.shut(true);
  for (uint32_t id = 0; id < 16; ++id) CHECK(disk.put(id));
  faults.write_gate.await_waiting();
  faults.write_gate.shut(false);
  disk.await(16);
  for (const auto& [id, result] : disk.results) CHECK_EQ(result, kFailed);
  CHECK_EQ(faults.writes.load(), Backoff::kPatience);
  CHECK_EQ(disk.counters().failed, Backoff::kPatience);
  CHECK_EQ(disk.counters().dropped, 16 - Backoff::kPatience);
}

TEST(a_block_that_cannot_be_read_is_forgotten) {
  Folder folder;
  Disk disk(disk_config(folder));
  for (const int i : {0, 1}) {
    CHECK_EQ(disk.put_now(1), kDone);
    (i == 0 ? faults.read : faults.open) = EIO;
    CHECK_EQ(disk.get_now(1), kFailed);
    faults.read = faults.open = 0;
    CHECK(!disk.contains(1));
    CHECK_EQ(folder.files().size(), 0U);
  }
  CHECK_EQ(disk.put_now(1), kDone);
  faults.flip = true;
  CHECK_EQ(disk.get_now(1), kCorrupt);
  CHECK_EQ(disk.counters().failed, 2);
  CHECK_EQ(disk.counters().corrupt, 1);
}

TEST(reading_pauses_while_the_disk_refuses) {
  Folder folder;
  Disk disk(disk_config(folder));
  for (uint32_t id = 0; id < 10; ++id) CHECK_EQ(disk.put_now(id), kDone);
  faults.open = EACCES;
  for (uint32_t id = 0; id < Backoff::kPatience; ++id) CHECK_EQ(disk.get_now(id), kFailed);
  faults.open = 0;
  CHECK(!disk.contains(9));
  CHECK(!disk.get(9));
  CHECK_EQ(disk.put_now(11), kDone);
  faults.now_ns += Backoff::kFirstPauseNs;
  CHECK(disk.contains(9));
  CHECK_EQ(disk.get_now(9), kDone);
}

TEST(a_block_that_cannot_be_removed_stays) {
  Folder folder;
  Disk disk(disk_config(folder, 3));
  for (uint32_t id = 0; id < 3; ++id) CHECK_EQ(disk.put_now(id), kDone);
  faults.unlink = EROFS;
  CHECK_EQ(disk.put_now(3), kFailed);
  for (uint32_t id = 0; id < 3; ++id) CHECK_EQ(disk.get_now(id), kDone);
  faults.unlink = 0;
  CHECK_EQ(disk.put_now(3), kDone);
  CHECK(!disk.contains(0));
  CHECK_EQ(folder.files().size(), 3U);
}

TEST(a_directory_may_vanish_and_come_back) {
  Folder folder;
  Disk disk(disk_config(folder));
  for (uint32_t id = 0; id < 3; ++id) CHECK_EQ(disk.put_now(id), kDone);
  fs::remove_all(folder.path);
  CHECK_EQ(disk.get_now(1), kMissing);
  CHECK_EQ(disk.put_now(3), kFailed);
  CHECK(!fs::exists(folder.path));  // a mount that is gone is not written beside
  fs::create_directory(folder.path);
  CHECK_EQ(disk.put_now(4), kDone);
  CHECK_EQ(disk.get_now(4), kDone);
}

TEST(a_write_that_hangs_holds_up_no_read_and_no_caller) {
  Folder folder;
  Disk disk(disk_config(folder));
  for (uint32_t id = 0; id < 3; ++id) CHECK_EQ(disk.put_now(id), kDone);
  faults.write_gate.shut(true);
  for (uint32_t id = 10; id < 26; ++id) CHECK(disk.put(id));
  faults.write_gate.await_waiting();
  CHECK(!disk.put(26));  // too many pending
  CHECK_EQ(disk.counters().dropped, 1);
  for (uint32_t id = 0; id < 3; ++id) CHECK_EQ(disk.get_now(id), kDone);
  faults.write_gate.shut(false);
  disk.await(16);
  for (const auto& [id, result] : disk.results) CHECK_EQ(result, kDone);
}

TEST(reads_from_disk_go_ahead_of_writes) {
  Folder folder;
  DiskStore::Config config = disk_config(folder);
  config.num_threads = 1;
  Disk disk(config);
  CHECK_EQ(disk.put_now(0), kDone);
  faults.write_gate.shut(true);
  CHECK(disk.put(1));
  CHECK(disk.put(2));
  faults.write_gate.await_waiting();
  CHECK(disk.get(0));
  faults.write_gate.shut(false);
  disk.await(3);
  CHECK_EQ(disk.results[0].first, 1U);
  CHECK_EQ(disk.results[1].first, 0U);
  CHECK_EQ(disk.results[2].first, 2U);
}

TEST(no_mixture_of_faults_hands_out_wrong_kv) {
  Folder folder;
  DiskStore::Config config = disk_config(folder, 20);
  config.num_threads = 4;
  Disk disk(config);
  std::atomic<int>* const errors[] = {&faults.create, &faults.open,   &faults.write,  &faults.read,
                                      &faults.close,  &faults.rename, &faults.unlink, &faults.mkdir};
  std::mt19937 random(5);
  int64_t done = 0, failed = 0;
  for (int round = 0; round < 300; ++round) {
    const uint32_t first = random() % 48;
    std::map<uint32_t, bool> reads;
    for (uint32_t i = 0; i < 16; ++i) {
      const uint32_t id = (first + i * 3) % 48;
      const bool reading = random() % 2 == 0;
      if (reading ? disk.get(id) : disk.put(id)) reads[id] = reading;
      if (random() % 8 == 0) *errors[random() % 8] = random() % 3 == 0 ? EIO : 0;
      if (random() % 16 == 0) faults.flip = random() % 4 == 0;
      if (random() % 16 == 0) faults.room = random() % 4 == 0 ? random() % 200 : SIZE_MAX;
    }
    disk.await(reads.size());
    for (const auto& [id, result] : std::exchange(disk.results, {})) {
      if (reads.at(id) && result == kDone) CHECK(disk.right(id));
      done += result == kDone;
      failed += result == kFailed;
    }
    CHECK(disk.counters().blocks <= 20);
    faults.now_ns += Backoff::kLongestPauseNs;
  }
  CHECK(done > 100);
  CHECK(failed > 100);
  faults.clear();
  for (uint32_t id = 0; id < 20; ++id) CHECK_EQ(disk.put_now(id), kDone);  // it recovers
  for (uint32_t id = 0; id < 20; ++id) CHECK_EQ(disk.get_now(id), kDone);
}

TEST(a_store_whose_thread_hangs_says_so_and_is_not_waited_for) {
  Folder folder;
  for (const bool reading : {true, false}) {
    Disk disk(disk_config(folder));
    for (uint32_t id = 0; id < 6; ++id) CHECK_EQ(disk.put_now(id), kDone);
    Gate& gate = reading ? faults.read_gate : faults.write_gate;
    gate.shut(true);
    for (uint32_t id = 0; id < 6; ++id) CHECK(reading ? disk.get(id) : disk.put(10 + id));
    gate.await_waiting();
    CHECK(!disk.store->close(1ms));
    CHECK(!DiskStore::dispose(disk.store, 1ms));  // it lives
    CHECK(!disk.put(20));
    CHECK(!disk.get(20));
    CHECK(disk.counters().dropped >= 2 + 4);  // at most two were under way
    gate.shut(false);
    CHECK(disk.store->close(20s));
    CHECK(disk.store->close(0s));
  }
}

TEST(a_disk_that_was_left_alone_is_asked_again_after_a_pause) {
  Folder folder;
  DiskStore::Config config = disk_config(folder);
  config.num_threads = 3;
  Disk disk(config);
  for (uint32_t id = 0; id < 8; ++id) CHECK_EQ(disk.put_now(id), kDone);
  for (const int64_t pause : {1, 2, 4}) {
    faults.open_gate.shut(true);
    CHECK(disk.get(0));
    faults.open_gate.await_waiting();
    disk.store->leave_alone(DiskCalls::kReads);
    disk.store->leave_alone(DiskCalls::kReads);  // the same call is late once
    CHECK(!disk.contains(5));
    CHECK(!disk.get(5));
    CHECK_EQ(disk.put_now(10 + static_cast<uint32_t>(pause)), kDone);  // writes go on
    faults.open_gate.shut(false);
    CHECK_EQ(disk.only_result(), kDone);  // late, and right
    CHECK(disk.right(0));
    CHECK(!disk.contains(5));
    faults.now_ns += pause * Backoff::kFirstPauseNs - 1;
    CHECK(!disk.contains(5));
    faults.now_ns += 1;
    CHECK(disk.contains(5));
  }
  CHECK_EQ(disk.get_now(5), kDone);
}

TEST(what_is_queued_behind_calls_that_hang_comes_to_nothing) {
  Folder folder;
  for (const bool reading : {true, false}) {
    Disk disk(disk_config(folder));
    for (uint32_t id = 0; id < 6; ++id) CHECK_EQ(disk.put_now(id), kDone);
    Gate& gate = reading ? faults.open_gate : faults.write_gate;
    gate.shut(true);
    for (uint32_t id = 0; id < 6; ++id) CHECK(reading ? disk.get(id) : disk.put(10 + id));
    gate.await_waiting();
    disk.store->leave_alone(reading ? DiskCalls::kReads : DiskCalls::kWrites);
    disk.await(4);  // at most two are under way
    for (const auto& [id, result] : disk.results) CHECK_EQ(result, kFailed);
    CHECK(!(reading ? disk.get(30) : disk.put(30)));
    gate.shut(false);
    disk.await(6);
    faults.now_ns += Backoff::kFirstPauseNs;
    disk.results.clear();
    CHECK_EQ(disk.put_now(20), kDone);
    CHECK_EQ(disk.get_now(20), kDone);
  }
}

// Else it would be over before the limit.
TEST(a_store_that_was_left_alone_is_not_waited_for) {
  Folder folder;
  Disk disk(disk_config(folder));
  CHECK_EQ(disk.put_now(0), kDone);
  faults.open_gate.shut(true);
  CHECK(disk.get(0));
  faults.open_gate.await_waiting();
  disk.store->leave_alone(DiskCalls::kReads);
  std::thread later([] {
    std::this_thread::sleep_for(500ms);
    faults.open_gate.shut(false);
  });
  CHECK(!disk.store->close(20s));
  later.join();
  for (int i = 0; i < 20'000 && disk.counters().read == 0; ++i) std::this_thread::sleep_for(1ms);
  CHECK(disk.store->close(20s));
}
