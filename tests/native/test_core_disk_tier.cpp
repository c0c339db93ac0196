// Reads and writes of the disk tier that take too long: a prompt is computed instead, and whoever is aborted is gone at once.
#include <map>
#include <thread>
#include <vector>

#include "check.h"
#include "disk_fixture.h"
#include "hybrid_fixture.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

// Knows every block, and completes calls when the test says so.
class SlowDisk final : public BlockDisk {
 public:
  BlockKey root(uint64_t salt) const override { return root_key("", salt); }
  bool contains(const BlockKey&) const override { return reads_too; }
  bool put(const BlockName&, std::span<const int32_t>, const std::byte*, uint64_t ticket) override { return add(ticket, kWrites); }
  bool get(const BlockName&, std::span<const int32_t>, std::byte*, uint64_t ticket) override { return add(ticket, kReads); }
  void leave_alone(DiskCalls calls) override { ++left_alone[calls]; }
  void take_completions(const Visit& visit) override {
    for (const auto& [ticket, done] : std::exchange(completions_, {})) visit(ticket, done);
  }
  void complete(size_t count, bool done) {
    for (; count > 0 && !pending.empty(); --count) {
      completions_.push_back({pending.front(), done});
      pending.erase(pending.begin());
    }
  }
  using enum DiskCalls;
  bool reads_too = true;
  std::vector<uint64_t> pending;
  std::map<DiskCalls, int> left_alone;

 private:
  bool add(uint64_t ticket, DiskCalls calls) {
    if (left_alone[calls] > 0) return false;
    pending.push_back(ticket);
    return true;
  }
  std::vector<std::pair<uint64_t, bool>> completions_;
};

class DiskBench : public Bench {
 public:
  DiskBench() : Bench(config(), 1), mover(config().num_host_blocks) { scheduler.move_blocks_with(mover, &disk); }
  // Something is planned.
  bool round(int64_t now_ns) {
    scheduler.move_blocks(outbox, now_ns, now_ns);
    const bool planned = launch() != nullptr;
    if (planned) pack();
    commit(2);
    return planned;
  }
  SequenceState state(uint64_t id) const { return requests.at(id)->sequences[0].state; }
  int32_t pinned() { return scheduler.blocks().num_host_pinned(); }
  void end(int64_t now_ns) {
    for (int i = 0; i < 100; ++i) round(now_ns);
    collect();
    CHECK(requests.empty());
    CHECK(scheduler.quiescent());
  }

  SlowDisk disk;
  DoneMover mover;

 private:
  static SchedulerConfig config() {
    SchedulerConfig config{.num_blocks = 32, .max_num_seqs = 6, .max_num_batched_tokens = 64, .max_model_len = 128};
    config.num_host_blocks = 40;
    return config;
  }
};

constexpr int64_t kLimit = DiskTier::kPatienceNs;

TEST(a_read_that_hangs_is_given_up_and_its_prompt_computed) {
  DiskBench bench;
  bench.add(make_spec(1, 60, 4));
  CHECK(!bench.round(1));
  CHECK(bench.state(1) == SequenceState::kLoading);
  CHECK_EQ(bench.pinned(), 3);
  CHECK(!bench.round(kLimit));
  CHECK_EQ(bench.disk.left_alone[DiskCalls::kReads], 0);
  CHECK(bench.round(kLimit + 1));
  CHECK(bench.state(1) == SequenceState::kRunning);
  CHECK(bench.disk.left_alone[DiskCalls::kReads] > 0);
  CHECK_EQ(bench.requests.at(1)->cached_tokens, 0);
  for (int i = 0; i < 10; ++i) bench.round(kLimit + 2);
  bench.collect();
  CHECK(bench.requests.empty());
  CHECK(bench.scheduler.idle());
  CHECK_EQ(bench.pinned(), 3);  // the disk may still write there
  bench.disk.complete(3, true);
  bench.round(kLimit + 3);
  CHECK_EQ(bench.pinned(), 0);
  bench.end(kLimit + 3);
}

TEST(an_aborted_request_does_not_wait_for_the_disk) {
  DiskBench bench;
  Request& request = bench.add(make_spec(1, 60, 4));
  bench.round(1);
  CHECK_EQ(bench.pinned(), 3);
  bench.abort(request);
  bench.round(2);
  bench.collect();
  CHECK(bench.requests.empty());
  CHECK(bench.scheduler.idle());
  CHECK_EQ(bench.disk.left_alone[DiskCalls::kReads], 0);
  CHECK_EQ(bench.pinned(), 3);
  // Another one reads meanwhile: what comes for the first is not taken for the second's.
  bench.add(make_spec(2, 60, 4, 1, 7));
  bench.round(3);
  CHECK_EQ(bench.pinned(), 6);
  bench.disk.complete(3, true);
  bench.round(4);
  CHECK_EQ(bench.pinned(), 3);
  CHECK(bench.state(2) == SequenceState::kLoading);
  bench.disk.complete(3, true);
  for (int i = 0; i < 5; ++i) bench.round(5);
  CHECK_EQ(bench.scheduler.stats().blocks_from_disk, 3);
  bench.end(6);
  CHECK_EQ(bench.pinned(), 0);
}

// The disk is left alone also where nobody waits for the reads any more.
TEST(a_disk_that_hangs_after_every_abort_is_left_alone) {
  DiskBench bench;
  for (uint64_t id = 1; id <= 3; ++id) {
    Request& request = bench.add(make_spec(id, 60, 4, 1, static_cast<int32_t>(10 * id)));
    bench.round(static_cast<int64_t>(id) * kLimit / 4);
    bench.abort(request);
  }
  bench.round(kLimit);
  CHECK_EQ(bench.disk.left_alone[DiskCalls::kReads], 0);
  bench.round(2 * kLimit);
  CHECK_EQ(bench.disk.left_alone[DiskCalls::kReads], 1);
  bench.add(make_spec(4, 60, 4));
  CHECK(bench.round(2 * kLimit));
  bench.disk.complete(9, false);
  bench.end(2 * kLimit + 1);
  CHECK_EQ(bench.pinned(), 0);
}

TEST(a_read_that_goes_on_is_not_given_up) {
  DiskBench bench;
  bench.add(make_spec(1, 100, 4));
  bench.round(1);
  CHECK_EQ(bench.pinned(), 6);
  for (int64_t i = 1; i <= 6; ++i) {
    CHECK(bench.state(1) == SequenceState::kLoading);
    bench.disk.complete(1, true);
    bench.round(i * (kLimit - 1));
  }
  CHECK_EQ(bench.disk.left_alone[DiskCalls::kReads], 0);
  for (int i = 0; i < 4; ++i) bench.round(6 * kLimit);
  CHECK_EQ(bench.requests.at(1)->cached_tokens, 96);
  bench.end(6 * kLimit);
}

TEST(what_came_before_the_disk_hung_counts) {
  DiskBench bench;
  bench.add(make_spec(1, 100, 4));
  bench.round(1);
  bench.disk.complete(2, true);
  bench.round(2);
  for (int i = 0; i < 4; ++i) bench.round(2 + kLimit);
  CHECK_EQ(bench.requests.at(1)->cached_tokens, 32);
  bench.disk.complete(4, true);
  bench.end(3 + kLimit);
  CHECK_EQ(bench.pinned(), 0);
}

TEST(writes_that_hang_are_left_alone) {
  DiskBench bench;
  bench.disk.reads_too = false;
  bench.add(make_spec(1, 60, 4));
  for (int i = 0; i < 20; ++i) bench.round(1);
  bench.collect();
  CHECK(bench.requests.empty());
  CHECK(!bench.disk.pending.empty());
  const auto writes = static_cast<int32_t>(bench.disk.pending.size());
  CHECK_EQ(bench.pinned(), writes);
  bench.round(kLimit);
  CHECK_EQ(bench.disk.left_alone[DiskCalls::kWrites], 0);
  bench.round(kLimit + 1);
  CHECK_EQ(bench.disk.left_alone[DiskCalls::kWrites], 1);
  CHECK_EQ(bench.disk.left_alone[DiskCalls::kReads], 0);
  bench.disk.complete(bench.disk.pending.size(), false);
  bench.round(kLimit + 2);
  CHECK_EQ(bench.pinned(), 0);
  bench.end(kLimit + 2);
}

RequestSpec prompt(int32_t family) {
  RequestSpec spec = make_spec(0, 100, 4, 1, family * 11);
  spec.sampling = {};
  return spec;
}

// Real files, of a mount that answers no more: requests go on after the limit, others are aborted at once, and the step thread
// looks less and less.
TEST(a_mount_that_answers_no_more_ends_no_request_and_keeps_nobody) {
  Folder folder;
  Options options = crowded();
  options.hybrid = {};
  options.disk_path = folder.path.string();
  options.files = &faulty_files();
  {
    Engine engine(options);
    for (int32_t family = 0; family < 4; ++family) {
      engine.submit(prompt(family));
      CHECK(engine.run());
    }
    for (int i = 0; i < 2000 && engine.loop->stats().blocks_to_disk < 24; ++i) engine.receive(10ms);
    CHECK(engine.loop->stats().blocks_to_disk >= 24);
    CHECK(engine.settles());
  }
  Engine engine(options);
  engine.receive(1000ms);  // the folder's files become known one after the other
  faults.open_gate.shut(true);
  for (int32_t family = 0; family < 3; ++family) CHECK(engine.submit(prompt(family)) == SubmitResult::kAccepted);
  faults.open_gate.await_waiting();
  engine.abort(1);
  for (int i = 0; i < 500 && engine.loop->stats().live_requests > 2; ++i) engine.receive(10ms);
  CHECK_EQ(engine.loop->stats().live_requests, 2);
  CHECK_EQ(engine.open(), size_t{2});
  clock_ahead += 8'000'000'000;  // as if they had waited for so long: but the process was stopped
  engine.receive(10ms);
  clock_reads = 0;
  std::this_thread::sleep_for(500ms);
  CHECK(clock_reads < 1000);  // 25 looks, and not 25,000
  CHECK_EQ(engine.open(), size_t{2});
  while (engine.open() > 0) pass_time(engine);
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.settles());
  CHECK_EQ(engine.loop->stats().blocks_from_disk, 0);
  engine.submit(prompt(3));  // nobody asks the disk
  CHECK(engine.run());
  faults.open_gate.shut(false);
  CHECK(engine.settles());
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.loop->stop(20s));
}

}  // namespace
