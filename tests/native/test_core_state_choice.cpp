// Copy or compute again: what the host keeps of states comes back where that is sooner.
#include <algorithm>
#include <span>
#include <vector>

#include "check.h"
#include "scheduler_fixture.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

// Transfers that are over when they are next asked for.
class PromptMover final : public BlockMover {
 public:
  PromptMover(int32_t num_host_blocks, size_t block_bytes) : num_host_blocks_(num_host_blocks), block_bytes_(block_bytes) {}
  int32_t num_host_blocks() const override { return num_host_blocks_; }
  int32_t max_moves() const override { return 4; }
  size_t block_bytes() const override { return block_bytes_; }
  std::byte* host_block(int32_t) override { return nullptr; }
  bool start(int, std::span<const BlockMove>) override { return true; }
  MoveStatus poll(int) override { return MoveStatus::kDone; }

 private:
  int32_t num_host_blocks_;
  size_t block_bytes_;
};

constexpr int64_t kTokenNs = 1000;
constexpr int32_t kHostBlocks = 60, kHostStates = 12;

// A token of a prompt takes a microsecond, a byte so many nanoseconds.
StepCosts costs_of(double byte_ns) {
  const std::vector<StepCosts::Point> points{{1, kTokenNs, 0}, {64, 64 * kTokenNs, 0}};
  return {points, points, {1, byte_ns}, {1, byte_ns}, {}};
}
const StepCosts kCopyingIsCheap = costs_of(0.1), kComputingIsCheap = costs_of(10);

SchedulerConfig small(const StepCosts& costs) {
  SchedulerConfig config{.num_blocks = 10, .max_num_seqs = 2, .max_num_batched_tokens = 64, .max_model_len = 160};
  config.num_host_blocks = kHostBlocks;
  config.num_state_slots = config.max_num_seqs + 3;
  config.num_host_states = kHostStates;
  config.costs = costs;
  return config;
}

struct Start {
  int32_t context_len = 0, computed_before = 0;
};

// One request after another, or several at once. Whatever may be copied to the host is there before the next step.
struct States {
  explicit States(const StepCosts& costs) : blocks(kHostBlocks, 20'000), states(kHostStates, 100'000), bench(small(costs), 2) {
    bench.scheduler.move_blocks_with(blocks, nullptr, &states);
  }
  bool step(uint64_t watched) {
    while (bench.scheduler.move_blocks(bench.outbox, 1, 1)) {
    }
    if (const StepPlan* plan = bench.launch(); plan != nullptr) {
      for (const PlanRow& row : plan->rows) {
        if (row.sequence->request->id != watched) continue;
        if (std::ranges::count(plan->filled_slots, row.slot) > 0) starts.push_back({row.context_len, computed});
        computed = row.context_len + row.query_len;
      }
    }
    bench.commit(7);
    bench.collect();
    return !bench.requests.empty();
  }
  void run(uint64_t watched = 0) {
    for (int i = 0; i < 2000 && step(watched); ++i) {
    }
    CHECK(bench.requests.empty());
    CHECK(bench.scheduler.quiescent());
  }
  Stats stats() { return bench.scheduler.stats(); }

  PromptMover blocks, states;
  Bench bench;
  std::vector<Start> starts;  // of the request that is watched
  int32_t computed = 0;
};

// Returns the beginning that a prompt of 100 tokens finds when four others have come and gone since.
int32_t found_again(const StepCosts& costs, int64_t& from_host) {
  States s(costs);
  for (uint64_t id = 1; id <= 5; ++id) {
    s.bench.add(make_spec(id, 100, 4, 1, static_cast<int32_t>(7 * id)));
    s.run();
  }
  s.bench.add(make_spec(6, 100, 4, 1, 7));
  s.run(/*watched=*/6);
  CHECK_EQ(s.starts.size(), size_t{1});
  from_host = s.stats().snapshots_from_host;
  return s.starts[0].context_len;
}

TEST(a_snapshot_comes_back_where_copying_is_cheap_and_is_computed_where_that_is) {
  int64_t from_host = -1;
  CHECK_EQ(found_again(kCopyingIsCheap, from_host), 96);
  CHECK_EQ(from_host, 1);
  CHECK_EQ(found_again({}, from_host), 96);  // nothing is known
  CHECK_EQ(from_host, 1);
  CHECK_EQ(found_again(kComputingIsCheap, from_host), 0);
  CHECK_EQ(from_host, 0);
}

// The second of two gives way, and its blocks and its state leave the device before it goes on.
Start goes_on(const StepCosts& costs, Stats& stats) {
  States s(costs);
  s.bench.add(make_spec(1, 40, 100), 1);
  s.bench.add(make_spec(2, 35, 100, 1, 9), 2);
  while (s.stats().num_preemptions == 0) CHECK(s.step(2));
  for (uint64_t id = 3; id < 6; ++id) s.bench.add(make_spec(id, 40, 3, 1, static_cast<int32_t>(7 * id)), 0);
  s.run(/*watched=*/2);
  CHECK(s.starts.size() >= 2);
  stats = s.stats();
  return s.starts[1];
}

TEST(a_state_that_was_swapped_comes_back_where_copying_is_cheap_and_is_computed_where_that_is) {
  Stats stats;
  for (const StepCosts& costs : {kCopyingIsCheap, StepCosts{}}) {
    const Start start = goes_on(costs, stats);
    CHECK_EQ(start.context_len, start.computed_before);  // not one token is computed again
    CHECK(start.context_len > 64);
    CHECK(start.context_len % 16 != 0);
    CHECK(stats.resumed_states > 0);
    CHECK(stats.snapshots_from_host > 0);
  }
  const Start start = goes_on(kComputingIsCheap, stats);
  CHECK(start.computed_before > 64);
  CHECK(start.context_len < 32);
  CHECK_EQ(stats.kept_states, 0);
  CHECK_EQ(stats.snapshots_from_host, 0);
}

}  // namespace
