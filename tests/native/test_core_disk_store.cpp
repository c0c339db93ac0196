// Blocks of KV on a disk: what is written comes back or does not count, through restarts, eviction and neighbours.
#include <fstream>
#include <list>

#include "disk_fixture.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;
using enum DiskResult;

std::string content(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void overwrite(const fs::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

}  // namespace

TEST(a_block_on_disk_comes_back_as_it_was) {
  Folder folder;
  for (const size_t bytes : {size_t{1}, size_t{1000}, size_t{1} << 20}) {
    DiskStore::Config config = disk_config(folder, 1000);
    config.layout.block_bytes = bytes;
    Disk disk(config);
    CHECK(!disk.contains(1));
    CHECK_EQ(disk.get_now(1), kMissing);
    CHECK_EQ(disk.put_now(1), kDone);
    CHECK(disk.contains(1));
    CHECK_EQ(disk.get_now(1), kDone);
    const DiskStore::Counters counters = disk.counters();
    CHECK_EQ(counters.blocks, 1);
    CHECK_EQ(counters.bytes, (static_cast<int64_t>(bytes) + 144 + 4095) / 4096 * 4096);
    CHECK_EQ(counters.written, 1);
    CHECK_EQ(counters.read, 1);
    CHECK_EQ(counters.missing, 1);
  }
}

TEST(a_block_that_is_on_disk_is_not_written_again) {
  Folder folder;
  Disk disk(disk_config(folder));
  CHECK_EQ(disk.put_now(1), kDone);
  const int writes = faults.writes;
  CHECK_EQ(disk.put_now(1), kDone);
  CHECK_EQ(faults.writes.load(), writes);
  CHECK_EQ(disk.counters().written, 1);
}

TEST(files_of_blocks_are_the_users_alone) {
  Folder folder;
  fs::create_directory(folder.path / "parent");
  DiskStore::Config config = disk_config(folder);
  config.path = (folder.path / "parent" / "made" / "deeper").string();
  Disk disk(config);
  CHECK_EQ(disk.put_now(1), kDone);
  int folders = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder.path / "parent")) {
    const bool is_folder = entry.is_directory();
    folders += is_folder;
    CHECK((entry.status().permissions() & fs::perms::mask) ==
          (is_folder ? fs::perms::owner_all : fs::perms::owner_read | fs::perms::owner_write));
  }
  CHECK_EQ(folders, 4);
}

TEST(a_restart_finds_the_blocks_on_disk) {
  Folder folder;
  {
    Disk disk(disk_config(folder));
    for (uint32_t id = 0; id < 90; ++id) CHECK_EQ(disk.put_now(id), kDone);
  }
  Disk disk(disk_config(folder));
  CHECK_EQ(disk.counters().blocks, 90);
  for (uint32_t id = 0; id < 90; ++id) {
    CHECK(disk.contains(id));
    CHECK_EQ(disk.get_now(id), kDone);
  }
  CHECK(!disk.contains(90));
}

TEST(blocks_of_other_models_are_left_alone_and_count_for_nothing) {
  Folder folder;
  {
    Disk disk(disk_config(folder));
    for (uint32_t id = 0; id < 5; ++id) CHECK_EQ(disk.put_now(id), kDone);
  }
  for (int change = 0; change < 3; ++change) {
    DiskStore::Config config = disk_config(folder, 1);
    if (change == 0) config.layout.fingerprint = "other";
    if (change == 1) config.layout.block_bytes *= 2;
    if (change == 2) config.layout.fingerprint = "model ";
    Disk disk(config);
    CHECK_EQ(disk.counters().blocks, 0);
    CHECK_EQ(disk.get_now(1), kMissing);
    CHECK_EQ(disk.put_now(7), kDone);
    CHECK_EQ(disk.put_now(8), kDone);
    CHECK_EQ(disk.counters().blocks, 1);
  }
  CHECK_EQ(folder.files().size(), 5U + 3U);
  Disk disk(disk_config(folder));
  CHECK_EQ(disk.get_now(1), kDone);
}

TEST(a_file_with_any_byte_changed_or_missing_is_not_believed) {
  Folder folder;
  Disk disk(disk_config(folder));
  CHECK_EQ(disk.put_now(1), kDone);
  const fs::path path = file_of(folder, 1);
  const std::string right = content(path);
  CHECK_EQ(right.size(), 128 + kBlockTokens * 4 + kBlockBytes);
  for (size_t i = 0; i < right.size(); ++i) {
    std::string wrong = right;
    wrong[i] = static_cast<char>(wrong[i] ^ (1 << i % 8));
    for (const std::string& bytes : {wrong, right.substr(0, i)}) {
      overwrite(path, bytes);
      CHECK_EQ(disk.get_now(1), kCorrupt);
      CHECK(!fs::exists(path));
      CHECK(!disk.contains(1));
    }
  }
  CHECK_EQ(disk.counters().corrupt, static_cast<int64_t>(2 * right.size()));
  overwrite(path, right);
  CHECK_EQ(disk.get_now(1), kDone);
}

TEST(a_file_of_another_block_is_not_believed) {
  Folder folder;
  Disk disk(disk_config(folder));
  CHECK_EQ(disk.put_now(1), kDone);
  CHECK_EQ(disk.put_now(2), kDone);
  fs::copy_file(file_of(folder, 2), file_of(folder, 1), fs::copy_options::overwrite_existing);
  CHECK_EQ(disk.get_now(1), kCorrupt);
  CHECK_EQ(disk.get_now(2), kDone);
  // The same key, as by a collision, with another parent, or with other tokens.
  for (const bool other_parent : {true, false}) {
    CHECK_EQ(disk.put_now(1), kDone);
    const Block block(1), other(2);
    std::vector<std::byte> target(kBlockBytes);
    CHECK(disk.store->get(block.key, other_parent ? other.parent : block.parent, other_parent ? block.tokens : other.tokens,
                          target.data(), 0));
    CHECK_EQ(disk.only_result(), kCorrupt);
  }
}

TEST(what_a_crash_leaves_on_disk_is_removed) {
  Folder folder;
  fs::path path;
  {
    Disk disk(disk_config(folder));
    for (uint32_t id = 0; id < 4; ++id) CHECK_EQ(disk.put_now(id), kDone);
    path = file_of(folder, 1);
    overwrite(path.string() + ".0123456789abcdef-7.tmp", "half");
    {
      Disk neighbour(disk_config(folder));  // the file may be of somebody who lives
      CHECK_EQ(folder.files(".tmp").size(), 1U);
    }
  }
  overwrite(path, content(path).substr(0, 100));
  overwrite(path.parent_path() / "notes.txt", "not ours");
  overwrite(path.parent_path() / "abc.kv", "not ours");
  Disk disk(disk_config(folder));
  CHECK(folder.files(".tmp").empty());
  CHECK_EQ(folder.files(".txt").size(), 1U);
  CHECK_EQ(folder.files().size(), 3U + 1U);
  CHECK_EQ(disk.counters().blocks, 3);
  CHECK_EQ(disk.counters().corrupt, 1);
  CHECK(!disk.contains(1));
}

TEST(a_smaller_limit_keeps_the_blocks_used_last) {
  Folder folder;
  {
    Disk disk(disk_config(folder));
    for (uint32_t id = 0; id < 10; ++id) CHECK_EQ(disk.put_now(id), kDone);
  }
  const auto now = fs::file_time_type::clock::now();
  for (uint32_t id = 0; id < 10; ++id) fs::last_write_time(file_of(folder, id), now - std::chrono::hours(id + 1));
  {
    Disk disk(disk_config(folder));
    CHECK_EQ(disk.get_now(9), kDone);  // used again: the next start knows
  }
  Disk disk(disk_config(folder, 4));
  for (uint32_t id = 0; id < 10; ++id) CHECK_EQ(disk.contains(id), id < 3 || id == 9);
  CHECK_EQ(folder.files().size(), 4U);
  CHECK_EQ(disk.counters().evicted, 6);
  CHECK_EQ(disk.put_now(20), kDone);
  CHECK(!disk.contains(2));  // the oldest of those that an earlier store left
  CHECK(disk.contains(1));
}

TEST(a_disk_store_evicts_as_its_model_does) {
  Folder folder;
  constexpr size_t kBlocks = 50;
  Disk disk(disk_config(folder, kBlocks));
  std::list<uint32_t> used;  // the one used last comes first
  std::map<uint32_t, std::list<uint32_t>::iterator> model;
  const auto use = [&](uint32_t id) {
    if (const auto known = model.find(id); known != model.end()) used.erase(known->second);
    used.push_front(id);
    model[id] = used.begin();
  };
  std::mt19937 random(1);
  int64_t hits = 0, evicted = 0;
  for (int i = 0; i < check::sample_of(10'000, 2'000); ++i) {
    const uint32_t id = random() % 120;
    const bool known = model.contains(id);
    CHECK_EQ(disk.contains(id), known);
    if (random() % 2 == 0) {
      CHECK_EQ(disk.get_now(id), known ? kDone : kMissing);
      hits += known;
      if (known) use(id);
      continue;
    }
    CHECK_EQ(disk.put_now(id), kDone);
    use(id);
    if (model.size() > kBlocks) {
      model.erase(used.back());
      used.pop_back();
      ++evicted;
    }
  }
  const DiskStore::Counters counters = disk.counters();
  CHECK_EQ(counters.read, hits);
  CHECK_EQ(counters.evicted, evicted);
  CHECK_EQ(counters.blocks, static_cast<int64_t>(model.size()));
  CHECK_EQ(folder.files().size(), model.size());
  CHECK_EQ(counters.corrupt + counters.failed + counters.dropped, 0);
}

TEST(many_reads_and_writes_at_once_stay_within_the_limit) {
  Folder folder;
  constexpr int64_t kBlocks = 20;
  DiskStore::Config config = disk_config(folder, kBlocks);
  config.num_threads = 4;
  Disk disk(config);
  std::mt19937 random(2);
  std::vector<uint32_t> ids(64);
  for (uint32_t i = 0; i < ids.size(); ++i) ids[i] = i;
  for (int round = 0; round < 200; ++round) {
    std::shuffle(ids.begin(), ids.end(), random);
    std::map<uint32_t, bool> reads;
    for (size_t i = 0; i < 16; ++i) {  // each block once
      const bool reading = random() % 2 == 0;
      reads[ids[i]] = reading;
      CHECK(reading ? disk.get(ids[i]) : disk.put(ids[i]));
    }
    disk.await(16);
    for (const auto& [id, result] : std::exchange(disk.results, {})) {
      CHECK(result == kDone || (reads.at(id) && result == kMissing));
      if (reads.at(id) && result == kDone) CHECK(disk.right(id));
    }
    CHECK(disk.counters().blocks <= kBlocks);
  }
  CHECK_EQ(static_cast<int64_t>(folder.files().size()), disk.counters().blocks);
  CHECK_EQ(disk.counters().blocks, kBlocks);
  CHECK(folder.files(".tmp").empty());
}

TEST(two_stores_share_a_directory) {
  Folder folder;
  Disk one(disk_config(folder)), two(disk_config(folder));
  CHECK_EQ(one.put_now(1), kDone);
  CHECK(!two.contains(1));  // it looks at the start, and where it is asked to
  CHECK_EQ(two.get_now(1), kDone);
  fs::remove(file_of(folder, 1));
  CHECK(one.contains(1));
  CHECK_EQ(one.get_now(1), kMissing);
  CHECK(!one.contains(1));
  CHECK_EQ(one.put_now(1), kDone);
  CHECK_EQ(two.get_now(1), kDone);
}

TEST(two_stores_that_evict_from_one_directory_corrupt_nothing) {
  Folder folder;
  const auto run = [&folder](uint32_t seed) {
    Disk disk(disk_config(folder, 10), false);
    std::mt19937 random(seed);
    for (int i = 0; i < 500; ++i) {
      const uint32_t id = random() % 20;
      if (random() % 2 == 0) {
        CHECK_EQ(disk.put_now(id), kDone);
      } else {
        const DiskResult result = disk.get_now(id);
        CHECK(result == kDone || result == kMissing);
      }
    }
    CHECK_EQ(disk.counters().corrupt, 0);
  };
  {
    // The first is alone when it starts, and through with its start before the other one writes.
    Disk first(disk_config(folder, 10));
    std::thread other([&run] { run(3); });
    run(4);
    other.join();
  }
  CHECK(folder.files(".tmp").empty());
  CHECK(folder.files().size() <= 20U);
}

TEST(a_disk_store_refuses_what_cannot_work) {
  Folder folder;
  const auto refusal = [](const DiskStore::Config& config) -> std::string {
    try {
      DiskStore store(config, [] {});
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  };
  const auto names = [&refusal](const DiskStore::Config& config) { return refusal(config).find(config.path) != std::string::npos; };
  DiskStore::Config config = disk_config(folder);
  overwrite(folder.path / "file", "");
  config.path = (folder.path / "file" / "deeper").string();
  CHECK(names(config));
  config.path = (folder.path / "file").string();
  CHECK(names(config));
  config = disk_config(folder);
  faults.create = EROFS;
  CHECK(names(config));
  faults.create = 0;
  faults.mkdir = EACCES;
  CHECK(names(config));
  faults.mkdir = 0;
  CHECK_EQ(refusal(config), "");
  for (const auto& entry : fs::directory_iterator(folder.path)) {
    if (entry.is_directory()) fs::permissions(entry.path(), fs::perms::all);
  }
  CHECK(names(config));
  for (int i = 0; i < 5; ++i) {
    DiskStore::Config wrong = disk_config(folder);
    if (i == 0) wrong.max_bytes = kPageBytes - 1;
    if (i == 1) wrong.max_pending = 0;
    if (i == 2) wrong.num_threads = 0;
    if (i == 3) wrong.layout.block_bytes = 0;
    if (i == 4) wrong.path = "";
    if (i == 0) wrong.layout.fingerprint = "other";
    CHECK(refusal(wrong) != "");
  }
}
