// Snapshots of states on the host: they leave and come back beside the steps, and what fails or comes late costs nobody.
#include <algorithm>
#include <array>
#include <vector>

#include "check.h"
#include "core/tier/state_tier.h"
#include "engine_fixture.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

// Transfers that are over when the test says so.
class LateMover final : public BlockMover {
 public:
  explicit LateMover(int32_t num_host_states) : num_host_states_(num_host_states) {}
  int32_t num_host_blocks() const override { return num_host_states_; }
  int32_t max_moves() const override { return 1; }
  size_t block_bytes() const override { return 8; }
  std::byte* host_block(int32_t) override { return nullptr; }
  bool start(int transfer, std::span<const BlockMove> moves) override {
    CHECK_EQ(moves.size(), size_t{1});
    move(transfer) = moves[0];
    status(transfer) = MoveStatus::kPending;
    ++started;
    return true;
  }
  MoveStatus poll(int transfer) override { return status(transfer); }
  BlockMove& move(int transfer) { return moves_[static_cast<size_t>(transfer)]; }
  MoveStatus& status(int transfer) { return status_[static_cast<size_t>(transfer)]; }
  void end_all(MoveStatus with) {
    for (MoveStatus& status : status_) status = status == MoveStatus::kPending ? with : status;
  }
  int started = 0;

 private:
  int32_t num_host_states_;
  std::array<BlockMove, kTransfers> moves_;
  std::array<MoveStatus, kTransfers> status_{};
};

constexpr int32_t kStateSlots = 2, kTierSnapshots = 12;
constexpr int kIn = BlockMover::kTransfers / 2;

struct Tier {
  explicit Tier(int32_t num_host_states = 40)
      : states(kStateSlots, kStateSlots + kTierSnapshots), mover(num_host_states), tier(states, mover) {}
  int32_t enter(uint64_t chain) {
    const int32_t state = states.take(/*step=*/1);
    CHECK(state >= 0);
    states.enter(state, chain);
    states.unpin(state);
    return state;
  }
  // Until nothing moves.
  void move(MoveStatus with = MoveStatus::kDone) {
    for (int i = 0; i < 100; ++i) {
      mover.end_all(with);
      if (!tier.advance(1) && !tier.busy()) break;
    }
    CHECK(!tier.busy());
    CHECK(tier.at_rest());
    CHECK(states.consistent());
  }
  StatePool states;
  LateMover mover;
  StateTier tier;
};

TEST(snapshots_leave_before_they_are_evicted_and_in_the_order_of_their_use) {
  Tier t;
  for (uint64_t chain = 1; chain <= 12; ++chain) t.enter(chain);
  t.move();
  for (uint64_t chain = 1; chain <= 8; ++chain) CHECK(t.tier.holds(chain));
  for (uint64_t chain = 11; chain <= 12; ++chain) CHECK(!t.tier.holds(chain));  // two that moved were not counted meanwhile
  for (uint64_t chain = 13; chain <= 30; ++chain) {
    t.enter(chain);
    CHECK_EQ(t.states.find(chain - 12), -1);  // the one that was used least recently
    t.move();
    CHECK(t.tier.holds(chain - 12));
  }
}

TEST(what_comes_in_is_known_at_the_end_and_not_before) {
  Tier t;
  for (uint64_t chain = 1; chain <= 30; ++chain) {
    t.enter(chain);
    t.move();
  }
  CHECK_EQ(t.states.find(3), -1);
  const int load = t.tier.load(3);
  CHECK(load >= 0);
  CHECK(t.tier.comes(3));
  CHECK(!t.tier.over(load));
  CHECK_EQ(t.states.num_pinned(), 1);
  t.tier.advance(1);
  CHECK(t.mover.status(kIn) == MoveStatus::kPending);
  const int32_t target = t.mover.move(kIn).block;
  CHECK(t.states.pins(target) == 1);
  CHECK_EQ(t.states.find(3), -1);
  t.mover.end_all(MoveStatus::kDone);
  t.tier.advance(1);
  CHECK(t.tier.over(load));
  CHECK_EQ(t.states.find(3), -1);
  t.tier.end(load);
  CHECK_EQ(t.states.find(3), target);
  CHECK(!t.tier.comes(3));
  t.move();
}

TEST(a_snapshot_that_a_step_reads_is_not_written_over) {
  Tier t;
  for (uint64_t chain = 1; chain <= 13; ++chain) {
    t.enter(chain);
    t.move();
  }
  CHECK_EQ(t.states.find(1), -1);
  for (uint64_t chain = 2; chain <= 13; ++chain) t.states.use(t.states.find(chain), /*step=*/7);
  t.states.retire(6);
  CHECK_EQ(t.tier.load(1), -1);  // each is read by step 7, which may run
  t.states.retire(7);
  const int load = t.tier.load(1);
  CHECK(load >= 0);
  t.tier.advance(1);
  t.tier.cancel(load);  // under way: the copy is waited for
  CHECK(!t.tier.over(load));
  t.mover.end_all(MoveStatus::kDone);
  t.tier.advance(1);
  CHECK(t.tier.over(load));
  t.tier.end(load);
  t.move();
}

TEST(a_load_that_is_cancelled_or_fails_leaves_nothing) {
  Tier t;
  for (uint64_t chain = 1; chain <= 16; ++chain) {
    t.enter(chain);
    t.move();
  }
  const int cancelled = t.tier.load(1);
  t.tier.cancel(cancelled);
  CHECK(t.tier.over(cancelled));
  t.tier.end(cancelled);
  CHECK_EQ(t.states.find(1), -1);
  const int failed = t.tier.load(2);
  t.tier.advance(1);
  t.mover.end_all(MoveStatus::kFailed);
  t.tier.advance(1);
  CHECK(t.tier.over(failed));
  t.tier.end(failed);
  CHECK_EQ(t.states.find(2), -1);
  CHECK(t.tier.holds(2));
  t.move();
}

TEST(what_is_forgotten_while_it_is_copied_is_found_nowhere) {
  Tier t;
  for (uint64_t chain = 1; chain <= 12; ++chain) t.enter(chain);
  t.tier.advance(1);
  CHECK_EQ(t.mover.started, 2);
  t.states.forget(1);
  CHECK_EQ(t.states.num_pinned(), 2);  // the copy still reads it
  t.move();
  CHECK(!t.tier.holds(1));
  CHECK(t.tier.holds(2));
  t.states.forget(2);
  CHECK(!t.tier.holds(2));
  CHECK_EQ(t.states.num_cached(), 10);
}

TEST(a_snapshot_that_is_used_while_it_is_copied_is_evicted_last) {
  Tier t;
  for (uint64_t chain = 1; chain <= 12; ++chain) t.enter(chain);
  t.tier.advance(1);
  CHECK_EQ(t.states.find(1), t.mover.move(0).block);
  t.states.use(t.states.find(1), /*step=*/5);
  t.move();
  t.enter(13);
  CHECK(t.states.find(1) >= 0);
  CHECK_EQ(t.states.find(2), -1);
}

// A host with less room than the device, or with none to speak of: copying comes to an end.
TEST(a_full_host_gives_up_what_was_used_least_recently) {
  for (const int32_t room : {1, 2, 3, 4, 9, 12, 20}) {
    Tier t(room);
    for (uint64_t chain = 1; chain <= 60; ++chain) {
      t.enter(chain);
      t.move();
    }
    const int32_t before = t.mover.started;
    t.move();
    CHECK_EQ(t.mover.started, before);
    int32_t held = 0;
    for (uint64_t chain = 1; chain <= 60; ++chain) held += t.tier.holds(chain);
    CHECK_EQ(held, room <= 2 ? 0 : room);
  }
}

TEST(copies_that_fail_again_and_again_are_left_alone_for_a_while) {
  Tier t;
  for (uint64_t chain = 1; chain <= 12; ++chain) t.enter(chain);
  t.move(MoveStatus::kFailed);
  CHECK(t.mover.started >= 8);
  CHECK(t.mover.started < 20);
  CHECK(!t.tier.holds(1));
  CHECK_EQ(t.tier.load(1), -1);
}

// ---- on the simulated device ----------------------------------------------------------------------------------------

// Few blocks and fewer snapshots, so that sequences are preempted and states leave all the time.
Options pressed() {
  Options options;
  options.num_blocks = 20;
  options.num_host_blocks = 120;
  options.max_num_seqs = 6;
  options.max_model_len = 128;
  options.num_state_slots = options.max_num_seqs + 6;
  options.num_host_states = 60;
  return options;
}

void churn_states(Engine& engine, const Options& options, int count, unsigned seed, bool copies_fail = false) {
  std::mt19937 rng(seed);
  for (int i = 0; i < count; ++i) {
    CHECK(engine.submit(random_spec(rng, options, 90, 30)) == SubmitResult::kAccepted);
    if (copies_fail && i % 7 == 0) {
      engine.device.fail_call(SimulatedDevice::Call::kCopy, static_cast<int64_t>(rng() % 3), kCudaErrorMemoryAllocation);
    }
    if (rng() % 8 == 0) engine.abort(engine.last_id());
    if (rng() % 4 == 0) engine.receive(1ms);
  }
  CHECK(engine.run());
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.settles());
}

TEST(results_are_the_same_wherever_states_were_kept) {
  for (const StagingMode staging : {StagingMode::kPinned, StagingMode::kMapped, StagingMode::kAhead}) {
    for (const int depth : {1, 2, 3}) {
      Options options = pressed();
      options.staging = staging;
      options.steps_in_flight = depth;
      options.latency = std::chrono::microseconds(100 * (depth - 1));
      Engine engine(options);
      churn_states(engine, options, 150, static_cast<unsigned>(depth));
      const Stats stats = engine.loop->stats();
      CHECK(stats.num_preemptions > 0);
      CHECK(stats.snapshots_to_host > 0);
      CHECK(stats.snapshots_from_host > 0);
      CHECK_EQ(stats.failed_transfers, 0);
    }
  }
}

TEST(copies_of_states_that_fail_cost_nobody) {
  Options options = pressed();
  options.staging = StagingMode::kMapped;  // steps copy nothing: what fails is a transfer's
  Engine engine(options);
  churn_states(engine, options, 300, 9, /*copies_fail=*/true);
  CHECK(engine.loop->stats().failed_transfers > 0);
}

// The state of a prompt that was used long ago is not in the device's pool any more, and neither are its blocks.
TEST(an_evicted_state_comes_from_the_host_with_its_blocks) {
  const Options options = pressed();
  Engine engine(options);
  const auto prompt = [](int32_t family) {
    RequestSpec spec;
    for (int32_t i = 0; i < 100; ++i) spec.prompt.push_back((family * 11 + i * 5) % 50);
    spec.max_tokens = 4;
    return spec;
  };
  for (int32_t family = 0; family < 6; ++family) {
    engine.submit(prompt(family));
    CHECK(engine.run());
    for (int i = 0; i < 500 && engine.loop->stats().blocks_to_host < 6 * (family + 1); ++i) engine.receive(10ms);
  }
  const Stats before = engine.loop->stats();
  engine.submit(prompt(0));
  CHECK(engine.run());
  const Stats stats = engine.loop->stats();
  CHECK_EQ(stats.prefix_cache_hits - before.prefix_cache_hits, 96);
  CHECK_EQ(stats.snapshots_from_host - before.snapshots_from_host, 1);
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.settles());
}

}  // namespace
