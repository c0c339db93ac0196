// View of a watcher of the step loop: whole records in order, nothing while nobody watches, every block in its state.
#include "step_loop/step_watch.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "check.h"
#include "engine_fixture.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

StepRecord numbered(int64_t n) { return {n, n, n, n, n, n, n, n, n, n}; }

bool whole(const StepRecord& r) {
  const int64_t n = r.step;
  return r.begun_ns == n && r.packed_ns == n && r.launched_ns == n && r.ready_ns == n && r.committed_ns == n && r.rows == n &&
         r.tokens == n && r.decode_rows == n && r.predicted_ns == n;
}

void sweep(StepWatch& watch, const BlockManager& blocks) {
  watch.ask_for_sweep();
  while (watch.sweep(blocks)) {
  }
}

}  // namespace

TEST(step_watch_has_the_last_records_in_order) {
  StepWatch watch(1);
  CHECK(watch.last(10).empty());
  constexpr auto kAll = static_cast<int64_t>(StepWatch::kSteps);
  for (int64_t n = 1; n <= 3 * kAll + 5; ++n) {
    watch.add(numbered(n));
    const auto last = watch.last(3);
    CHECK_EQ(static_cast<int64_t>(last.size()), std::min<int64_t>(n, 3));
    CHECK_EQ(last.back().step, n);
    for (size_t i = 1; i < last.size(); ++i) CHECK_EQ(last[i].step, last[i - 1].step + 1);
  }
  CHECK_EQ(watch.last(1'000'000).size(), StepWatch::kSteps);
  CHECK(watch.last(0).empty());
}

TEST(step_watch_gives_no_record_that_is_being_overwritten) {
  StepWatch watch(1);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (int64_t n = 1; !stop.load(std::memory_order_relaxed); ++n) watch.add(numbered(n));
  });
  int64_t seen = 0;
  for (int round = 0; round < 3000; ++round) {
    const auto records = watch.last(StepWatch::kSteps);
    for (size_t i = 0; i < records.size(); ++i) {
      CHECK(whole(records[i]));
      CHECK(i == 0 || records[i].step == records[i - 1].step + 1);
    }
    if (records.empty()) continue;
    CHECK(records.back().step >= seen);
    seen = records.back().step;
  }
  stop.store(true, std::memory_order_relaxed);
  writer.join();
}

TEST(block_map_tells_the_states_of_blocks_apart) {
  BlockManager blocks(8, 16, /*prefix_caching=*/true);
  StepWatch watch(8);
  CHECK_EQ(watch.blocks_per_cell(), 1);
  const int32_t held = blocks.allocate(), shared = blocks.allocate(), cached = blocks.allocate(), freed = blocks.allocate();
  blocks.retain(shared);
  const int32_t tokens[16] = {1, 2};
  const Chain root{7, true};
  (void)blocks.publish(cached, root, tokens, blocks.prefetch(cached, root, tokens));
  blocks.release(cached);
  blocks.release(freed);
  CHECK(!watch.sweep(blocks));  // nobody has asked
  CHECK_EQ(int{watch.cells()[static_cast<size_t>(held)].held}, 0);
  sweep(watch, blocks);
  const auto cells = watch.cells();
  for (int32_t b = 0; b < 8; ++b) {
    const BlockCell cell = cells[static_cast<size_t>(b)];
    CHECK_EQ(int{cell.held}, b == held ? 255 : 0);
    CHECK_EQ(int{cell.shared}, b == shared ? 255 : 0);
    CHECK_EQ(int{cell.cached}, b == cached ? 255 : 0);
  }
}

TEST(block_map_of_many_blocks_is_swept_in_shares) {
  constexpr int32_t kBlocks = 10 * StepWatch::kMostCells + 3;
  BlockManager blocks(kBlocks, 1, /*prefix_caching=*/false);
  StepWatch watch(kBlocks);
  CHECK_EQ(watch.blocks_per_cell(), 11);
  std::vector<int> held(watch.cells().size(), 0);
  for (int i = 0; i < 500; ++i) ++held[static_cast<size_t>(blocks.allocate() / 11)];
  watch.ask_for_sweep();
  int rounds = 1;
  while (watch.sweep(blocks)) ++rounds;
  CHECK(rounds >= kBlocks / StepWatch::kBlocksPerRound);
  const auto cells = watch.cells();
  CHECK_EQ(cells.size(), size_t{(kBlocks + 10) / 11});
  for (size_t c = 0; c + 1 < cells.size(); ++c) CHECK_EQ(int{cells[c].held}, (held[c] * 255 + 10) / 11);
}

TEST(a_watched_loop_tells_when_its_steps_began_ran_and_ended) {
  Options options;
  options.latency = 200us;
  Engine engine(options);
  std::mt19937 rng(1);
  const auto serve = [&] {
    for (int i = 0; i < 8; ++i) CHECK(engine.submit(random_spec(rng, options, 40, 20)) == SubmitResult::kAccepted);
    CHECK(engine.run());
  };
  serve();
  CHECK(engine.loop->last_steps(100).empty());  // nobody watched
  engine.loop->watch(true);
  serve();
  CHECK(engine.settles());
  const auto steps = engine.loop->last_steps(StepWatch::kSteps);
  CHECK(steps.size() > 10);
  for (size_t i = 0; i < steps.size(); ++i) {
    const StepRecord& s = steps[i];
    CHECK(s.begun_ns <= s.packed_ns && s.packed_ns <= s.launched_ns && s.launched_ns <= s.ready_ns);
    CHECK(s.ready_ns <= s.committed_ns);
    CHECK(s.rows >= 1 && s.tokens >= s.rows);
    if (i > 0) CHECK(s.step == steps[i - 1].step + 1 && s.ready_ns >= steps[i - 1].committed_ns);
  }
  engine.loop->watch(false);
  serve();
  CHECK_EQ(engine.loop->last_steps(1).at(0).step, steps.back().step);

  const auto count = [&] {  // cells that the prefix cache keeps
    const auto cells = engine.loop->block_map().first;
    return std::ranges::count_if(cells, [](const BlockCell& cell) { return cell.cached > 0; });
  };
  CHECK(engine.settles());
  for (int i = 0; i < 1000 && count() < engine.loop->stats().cached_blocks; ++i) std::this_thread::sleep_for(1ms);
  CHECK_EQ(count(), engine.loop->stats().cached_blocks);
  CHECK(engine.mismatches() == 0);
}
