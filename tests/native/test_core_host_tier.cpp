// The host tier on the simulated device: results do not depend on where a prefix was kept, and copies that fail cost nobody.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <string>
#include <thread>

#include "check.h"
#include "engine_fixture.h"
#include "step_loop/callback_executor.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

class TemporaryFolder {
 public:
  TemporaryFolder() : path_(std::filesystem::temp_directory_path() / ("asyncengine-tier-" + std::to_string(::getpid()))) {
    std::filesystem::remove_all(path_);
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  std::string path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// Few blocks, so that sequences are preempted and prefixes evicted all the time.
Options pressed() {
  Options options;
  options.num_blocks = 20;
  options.num_host_blocks = 120;
  options.max_num_seqs = 6;
  options.max_model_len = 128;
  return options;
}

RequestSpec long_prompt(int32_t family, int32_t length, int32_t max_tokens = 4) {
  RequestSpec spec;
  for (int32_t i = 0; i < length; ++i) spec.prompt.push_back((family * 11 + i * 5) % 50);
  spec.max_tokens = max_tokens;
  return spec;
}

// A device under load copies late, and what is evicted before that is lost.
void wait_for_copies(Engine& engine, int64_t blocks) {
  for (int i = 0; i < 500 && engine.loop->stats().blocks_to_host < blocks; ++i) engine.receive(10ms);
  CHECK(engine.loop->stats().blocks_to_host >= blocks);
}

void churn(Engine& engine, const Options& options, int count, unsigned seed) {
  std::mt19937 rng(seed);
  std::vector<uint64_t> aborted;
  for (int i = 0; i < count; ++i) {
    CHECK(engine.submit(random_spec(rng, options, 90, 30)) == SubmitResult::kAccepted);
    if (rng() % 8 == 0) engine.abort(engine.last_id());
    if (rng() % 4 == 0) engine.receive(1ms);
  }
}

TEST(results_are_the_same_whatever_moves) {
  for (const bool late : {false, true}) {
    Options options = pressed();
    options.late_launch = late;
    Engine engine(options);
    churn(engine, options, 400, 1);
    CHECK(engine.run());
    CHECK_EQ(engine.mismatches(), 0);
    CHECK(engine.settles());
    const Stats stats = engine.loop->stats();
    CHECK(stats.num_preemptions > 0);
    CHECK(stats.blocks_to_host > 0);
    CHECK(stats.blocks_from_host > 0);
    CHECK_EQ(stats.failed_transfers, 0);
  }
}

// A prefix that was evicted comes back by copies; with another salt it is nobody's.
TEST(an_evicted_prefix_comes_from_the_host) {
  const Options options = pressed();
  Engine engine(options);
  for (int32_t family = 0; family < 6; ++family) {
    engine.submit(long_prompt(family, 100));
    CHECK(engine.run());
    wait_for_copies(engine, 6 * (family + 1));
  }
  const int64_t before = engine.loop->stats().blocks_from_host;
  engine.submit(long_prompt(0, 100));
  CHECK(engine.run());
  const Stats stats = engine.loop->stats();
  CHECK(stats.blocks_from_host >= before + 5);
  CHECK(stats.prefix_cache_hits >= 96);
  RequestSpec other = long_prompt(1, 100);
  other.salt = 7;
  const int64_t hits = stats.prefix_cache_hits;
  engine.submit(other);
  CHECK(engine.run());
  CHECK_EQ(engine.loop->stats().prefix_cache_hits, hits);
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.settles());
}

// A preempted sequence is computed again from what was copied: hardly anything.
TEST(a_preempted_sequence_comes_back_by_copies) {
  Options options = pressed();
  options.max_num_seqs = 3;
  Engine engine(options);
  for (int32_t family = 0; family < 3; ++family) engine.submit(long_prompt(family, 60, 60));
  CHECK(engine.run());
  CHECK(engine.loop->stats().num_preemptions > 0);
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.settles());
}

// A host pool that holds next to nothing, so that most of what comes back was on the disk; then another engine finds it there.
TEST(prefixes_come_back_from_the_disk) {
  const TemporaryFolder folder;
  Options options = pressed();
  options.num_host_blocks = 24;
  options.disk_path = folder.path();
  int64_t read = 0;
  for (const unsigned seed : {11U, 12U}) {
    Engine engine(options);
    churn(engine, options, 250, seed);
    CHECK(engine.run());
    CHECK_EQ(engine.mismatches(), 0);
    CHECK(engine.settles());
    const Stats stats = engine.loop->stats();
    CHECK(stats.blocks_to_disk > 0);
    CHECK_EQ(stats.failed_disk_transfers, 0);
    read += stats.blocks_from_disk;
  }
  CHECK(read > 0);
}

// A block that is read for a prompt evicts one that was read before it, and the prompt is served all the same.
TEST(a_prefix_on_the_disk_that_the_host_cannot_hold_is_computed) {
  const TemporaryFolder folder;
  Options options = pressed();
  options.disk_path = folder.path();
  {
    Engine engine(options);
    for (int32_t family = 0; family < 6; ++family) {
      engine.submit(long_prompt(family, 100));
      CHECK(engine.run());
      wait_for_copies(engine, 6 * (family + 1));
    }
    for (int i = 0; i < 500 && engine.loop->stats().blocks_to_disk < 36; ++i) engine.receive(10ms);
    CHECK_EQ(engine.loop->stats().blocks_to_disk, 36);
    CHECK(engine.settles());
  }
  options.num_host_blocks = 4;
  Engine engine(options);
  engine.receive(1000ms);  // the folder's files become known one after the other
  for (int32_t family = 0; family < 6; ++family) {
    engine.submit(long_prompt(family, 100));
    CHECK(engine.run());
  }
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.loop->stats().blocks_from_disk > 0);
  CHECK(engine.settles());
}

// Moves blocks at once.
class InstantMover final : public BlockMover {
 public:
  explicit InstantMover(int32_t num_host_blocks = 4) : memory_(static_cast<size_t>(num_host_blocks)) {}
  int32_t num_host_blocks() const override { return static_cast<int32_t>(memory_.size()); }
  int32_t max_moves() const override { return 4; }
  size_t block_bytes() const override { return 1; }
  std::byte* host_block(int32_t host) override { return memory_.data() + host; }
  bool start(int, std::span<const BlockMove>) override { return true; }
  MoveStatus poll(int) override { return MoveStatus::kDone; }

 private:
  std::vector<std::byte> memory_;
};

// Takes every write, and ends none.
class HangingDisk final : public BlockDisk {
 public:
  BlockKey root(uint64_t salt) const override { return root_key("", salt); }
  bool contains(const BlockKey&) const override { return false; }
  bool put(const BlockName&, std::span<const int32_t>, const std::byte*, uint64_t) override { return ++writes > 0; }
  bool get(const BlockName&, std::span<const int32_t>, std::byte*, uint64_t) override { return false; }
  void leave_alone(DiskCalls) override {}
  void take_completions(const Visit&) override {}
  int writes = 0;
};

TEST(a_write_that_hangs_keeps_no_block_on_the_host) {
  BlockManager blocks(2, 16, true, 4);
  InstantMover mover;
  HangingDisk disk;
  HostTier tier({2, 2}, blocks, mover, &disk);
  const std::vector<int32_t> tokens(16, 3);
  const Chain root{5, true};
  const int32_t block = blocks.allocate();
  blocks.name_of(block) = {next_key(disk.root(5), tokens), disk.root(5)};
  blocks.publish(block, root, tokens.data(), blocks.prefetch(block, root, tokens.data()));
  blocks.release(block);
  const auto ended = [](Sequence&) {};
  const auto stored = [](Sequence&, std::span<const int32_t>) {};
  for (int i = 0; i < 4; ++i) tier.advance(1, ended, stored);
  CHECK_EQ(disk.writes, 1);
  for (int i = 0; i < 2; ++i) blocks.allocate();
  for (int i = 0; i < 2; ++i) blocks.release(i);
  int32_t found[1];
  const auto tokens_at = [&](int32_t) { return tokens.data(); };
  CHECK_EQ(blocks.match_prefix(tokens_at, 1, 5, found, /*with_host=*/true), 1);
  CHECK(found[0] >= blocks.num_blocks());
  Sequence waiting;
  CHECK(tier.load(waiting, found) == HostTier::Loading::kStarted);
  Sequence other;
  CHECK(tier.load(other, found) == HostTier::Loading::kLater);  // the same comes already
  int done = 0;
  for (int i = 0; i < 4; ++i) tier.advance(1, [&](Sequence&) { ++done; }, stored);
  CHECK_EQ(done, 1);
  CHECK(blocks.match_prefix(tokens_at, 1, 5, found) == 1);
}

// Copied or not, in several transfers: a block that stayed for ever would keep its copy on the host as well.
TEST(blocks_leave_the_device_in_the_order_in_which_they_were_released) {
  constexpr int32_t kBlocks = 12;
  InstantMover mover(40);
  BlockManager blocks(kBlocks, 16, true, mover.num_host_blocks());
  HostTier tier({8, kBlocks}, blocks, mover);
  const auto ended = [](Sequence&) {};
  const auto stored = [](Sequence&, std::span<const int32_t>) {};
  std::vector<int32_t> order;
  for (int32_t round = 0; round < 5; ++round) {
    std::vector<int32_t> taken;
    for (int32_t i = 0; i < (round == 0 ? kBlocks : 5); ++i) taken.push_back(blocks.allocate());
    if (round > 0) {
      CHECK(taken == std::vector<int32_t>(order.begin(), order.begin() + 5));
      order.erase(order.begin(), order.begin() + 5);
    }
    for (const int32_t block : taken) {
      const std::vector<int32_t> tokens(16, 100 * round + block);
      const Chain root{5, true};
      blocks.publish(block, root, tokens.data(), blocks.prefetch(block, root, tokens.data()));
    }
    for (const int32_t block : taken) blocks.release(block);
    order.insert(order.end(), taken.begin(), taken.end());
    for (int i = 0; i < 20; ++i) tier.advance(1, ended, stored);
    CHECK(blocks.consistent());
    CHECK(tier.copied_out() >= 5 * round + 5);
  }
}

// One block a transfer, which is over when it has been looked at many times.
class ManyLooksMover final : public BlockMover {
 public:
  int32_t num_host_blocks() const override { return 120; }
  int32_t max_moves() const override { return 1; }
  size_t block_bytes() const override { return 1; }
  std::byte* host_block(int32_t host) override { return memory_ + host; }
  bool start(int transfer, std::span<const BlockMove>) override {
    looks_[transfer] = 0;
    return true;
  }
  MoveStatus poll(int transfer) override { return allowed && looks_[transfer]++ > 100 ? MoveStatus::kDone : MoveStatus::kPending; }

  std::atomic<bool> allowed{false};

 private:
  std::byte memory_[120] = {};
  int looks_[kTransfers] = {};
};

// An executor that tells when a step is over, with a mover that does not.
class QuietMoves final : public Executor {
 public:
  QuietMoves(std::unique_ptr<CallbackExecutor> steps, BlockMover& mover) : steps_(std::move(steps)), mover_(mover) {}
  int num_staging() const override { return steps_->num_staging(); }
  std::span<std::byte> staging(int i) override { return steps_->staging(i); }
  StepResults results(int i) const override { return steps_->results(i); }
  BlockMover* mover() override { return &mover_; }
  LaunchStatus launch(int i, size_t bytes) override {
    steps_->attach(notifier_);
    return steps_->launch(i, bytes);
  }
  StepStatus poll(int i) override { return steps_->poll(i); }
  std::string error() const override { return steps_->error(); }
  std::chrono::nanoseconds poll_interval() const override { return steps_->poll_interval(); }
  bool close(std::chrono::nanoseconds limit) override { return steps_->close(limit); }

 private:
  std::unique_ptr<CallbackExecutor> steps_;
  BlockMover& mover_;
};

// However long it takes. Else a long prompt would evict what has not been copied.
TEST(copies_go_on_beside_a_step) {
  Options options = pressed();
  options.num_blocks = 60;
  options.max_model_len = 60 * options.block_size;
  options.max_num_batched_tokens = options.max_model_len;
  options.step_timeout = 600s;
  const auto config = options.loop();
  std::atomic<bool> held{false};
  ManyLooksMover mover;
  auto steps = std::make_unique<CallbackExecutor>(
      StepLoop::limits(config), options.max_model_len / options.block_size + 1, options.block_size, options.steps_in_flight,
      std::vector<CallbackExecutor::BlockRegion>{}, kSamplingNeeds, [&](const StepBatch& batch, int32_t* tokens) {
        while (held) std::this_thread::sleep_for(1ms);
        std::fill_n(tokens, batch.num_samples, 1);
      });
  StepLoop loop(config, std::make_unique<QuietMoves>(std::move(steps), mover));
  loop.start();
  int ends = 0;
  const auto eventually = [&](auto condition) {
    for (int i = 0; i < 2000 && !condition(); ++i) {
      std::this_thread::sleep_for(10ms);
      loop.drain([&](const StepLoop::News& news) { ends += news.finish == FinishReason::kLength; });
    }
    return condition();
  };
  RequestSpec spec = long_prompt(0, 50 * options.block_size, 1);
  spec.id = 1;
  CHECK(loop.submit(spec) == SubmitResult::kAccepted);
  CHECK(eventually([&] { return ends == 1; }));
  held = true;
  RequestSpec other = long_prompt(1, 3, 1);
  other.id = 2;
  CHECK(loop.submit(other) == SubmitResult::kAccepted);
  CHECK(eventually([&] { return loop.stats().num_steps_in_flight == 1; }));
  mover.allowed = true;
  CHECK(eventually([&] { return loop.stats().blocks_to_host >= 40; }));
  CHECK_EQ(loop.stats().num_steps_in_flight, 1);
  held = false;
  CHECK(eventually([&] { return ends == 2; }));
  CHECK(loop.stop(5s));
}

TEST(transfers_that_fail_cost_nobody) {
  using Call = SimulatedDevice::Call;
  for (const Call call : {Call::kCopy, Call::kGraphLaunch, Call::kEventRecord}) {
    Options options = pressed();
    options.staging = StagingMode::kMapped;  // steps copy nothing: what fails is a transfer's
    if (call != Call::kCopy) continue;       // of the others, steps have some as well: they are the engine's faults
    Engine engine(options);
    std::mt19937 rng(3);
    for (int i = 0; i < 300; ++i) {
      engine.submit(random_spec(rng, options, 90, 20));
      if (i % 10 == 0) engine.device.fail_call(call, 0, kCudaErrorMemoryAllocation);
      engine.receive(1ms);
    }
    CHECK(engine.run());
    CHECK_EQ(engine.mismatches(), 0);
    CHECK(engine.settles());
    CHECK(engine.loop->stats().failed_transfers > 0);
  }
}

// If everything fails, results are as if there were no host tier.
TEST(a_host_tier_that_always_fails_is_left_alone) {
  Options options = pressed();
  options.staging = StagingMode::kMapped;
  Engine engine(options);
  std::mt19937 rng(5);
  for (int i = 0; i < 200; ++i) {
    engine.submit(random_spec(rng, options, 90, 20));
    engine.device.fail_call(SimulatedDevice::Call::kCopy, 0, kCudaErrorMemoryAllocation);
    engine.receive(1ms);
  }
  CHECK(engine.run());
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.settles());
}

TEST(pinning_that_fails_gives_a_smaller_pool_or_none) {
  SimulatedDevice device;
  CHECK_EQ(HostPool(device.cuda(), 64, 100, 4).num_blocks(), 100);
  CHECK_EQ(device.live_objects(), 0);
  device.refuse_registering();
  CHECK_EQ(HostPool(device.cuda(), 64, 100, 4).num_blocks(), 100);  // cudaHostAlloc's
  CHECK_EQ(device.live_objects(), 0);
  device.refuse_pinning();
  bool refused = false;
  try {
    const HostPool pool(device.cuda(), 64, 100, 4);
  } catch (const CudaError&) {
    refused = true;
  }
  CHECK(refused);
  CHECK_EQ(device.live_objects(), 0);
}

// The event of a transfer can be recorded no more, and nothing runs any more either.
TEST(transfers_of_a_device_that_failed_are_over) {
  SimulatedDevice device;
  auto pool = std::make_shared<HostPool>(device.cuda(), 64, 4, 4);
  const DeviceBuffer gathered = allocate_device(device.cuda(), size_t{BlockMover::kTransfers} * 4 * 64);
  pool->set_gathered(gathered.data());
  GraphMover::Graphs graphs;
  for (CudaGraphExec& graph : graphs) graph = device.add_graph([] {}, 0ns);
  GraphMover mover(device.cuda(), pool, graphs);
  device.fault();
  const BlockMove move{0, 0};
  CHECK(mover.start(0, {&move, 1}));
  CHECK(mover.at_rest());
}

// A device that dies in the middle of copies ends the engine and nothing else.
TEST(a_device_that_fails_ends_the_engine_while_blocks_move) {
  Options options = pressed();
  Engine engine(options);
  churn(engine, options, 100, 9);
  engine.device.fault();
  CHECK(!engine.run());
  CHECK(engine.loop->stop(2s));
}

}  // namespace
