#include "core/step_costs.h"

#include <cstdint>
#include <cstdlib>

#include "check.h"
#include "scheduler_fixture.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

StepCosts some_costs() { return StepCosts({{1, 100, 1}, {4, 130, 2}}, {{16, 1000, 1}, {64, 2000, 5}}, {10, 0.5}, {20, 0.25}, {}); }

// A token takes 10 us, whatever else there is.
StepCosts by_tokens(double context_ns = 0) {
  return StepCosts({{1, 10'000, 0}, {64, 640'000, 0}}, {{1, 10'000, context_ns}, {64, 640'000, 64 * context_ns}}, {}, {}, {});
}

// Three sequences decode; then prompts of these lengths come. The sizes of the chunks in the next step.
std::vector<int32_t> chunks_beside_three(Bench& bench, const std::vector<int32_t>& prompts, int32_t priority = 0) {
  for (uint64_t id = 1; id <= 3; ++id) {
    RequestSpec spec = make_spec(id, 1, 40);
    spec.priority = id == 1 ? priority : 0;
    bench.add(spec);
  }
  CHECK(bench.launch() != nullptr);
  bench.pack();
  CHECK(bench.commit(1));
  uint64_t id = 10;
  for (const int32_t length : prompts) {
    ++id;
    bench.add(make_spec(id, length, 5, 1, static_cast<int32_t>(id)));
  }
  const StepPlan* plan = bench.launch();
  CHECK(plan != nullptr);
  bench.pack();
  std::vector<int32_t> chunks;
  for (const PlanRow& row : plan->rows) {
    if (!row.from_device) chunks.push_back(row.query_len);
  }
  return chunks;
}

SchedulerConfig paced(int64_t target_ns) {
  SchedulerConfig config{256, 16, 8, 200, 32, 400, false};
  config.costs = by_tokens();
  config.targets.ns = target_ns;
  return config;
}

}  // namespace

TEST(unknown_costs_are_zero) {
  StepCosts costs;
  CHECK(!costs.known());
  CHECK_EQ(costs.decode_ns(4, 100), 0);
  CHECK_EQ(costs.mixed_ns(64, 4, 100, 5), 0);
  CHECK_EQ(costs.recompute_ns(1000, 0), 0);
  CHECK_EQ(costs.copy_ns(1 << 20, true), 0);
  costs.learn_mixed(0, 0, 1000);
  costs.learn_decode(0, 1000);
  CHECK(costs.factors().rest == 1 && costs.factors().decode == 1);
}

TEST(costs_lie_between_those_that_were_measured) {
  const StepCosts costs = some_costs();
  CHECK_EQ(costs.decode_ns(1, 50), 150);
  CHECK_EQ(costs.decode_ns(2, 0), 110);
  CHECK_EQ(costs.decode_ns(4, 100), 330);
  CHECK_EQ(costs.decode_ns(8, 100), 460);      // twice the rows; a token of context takes no longer
  CHECK_EQ(costs.mixed_ns(8, 0, 0, 0), 1000);  // weights are read all the same
  CHECK_EQ(costs.mixed_ns(40, 4, 100, 7), 1707);
  CHECK_EQ(costs.mixed_ns(128, 0, 0, 0), 4000);
  CHECK(costs.attention_ns(64, 100) == 5 * 132.0);
  CHECK(costs.attention_ns(40, 0) == 3 * 20.0);
  CHECK_EQ(costs.recompute_ns(128, 0), 4000 + 2 * 5 * 64);
  CHECK_EQ(costs.recompute_ns(16, 100), 1000 + 108);
  CHECK_EQ(costs.copy_ns(100, true), 60);
  CHECK_EQ(costs.copy_ns(100, false), 45);
}

TEST(costs_follow_steps_slowly_and_outliers_hardly) {
  StepCosts costs = some_costs();
  costs.learn_mixed(1000, 0, 1'000'000'000);
  CHECK(costs.factors().rest > 1 && costs.factors().rest < 1.1);
  for (int i = 0; i < 200; ++i) costs.learn_mixed(costs.mixed_ns(64, 0, 0, 0), 0, 3000);
  CHECK(costs.mixed_ns(64, 0, 0, 0) > 2900 && costs.mixed_ns(64, 0, 0, 0) < 3100);
  CHECK(costs.factors().decode == 1 && costs.factors().attention == 1);
  for (int i = 0; i < 1000; ++i) costs.learn_mixed(1000, 0, 1);
  CHECK(costs.mixed_ns(64, 0, 0, 0) > 0);
  costs.learn_decode(1000, 1100);
  CHECK(costs.factors().decode > 1.006 && costs.factors().decode < 1.007);
}

TEST(steps_with_lanes_have_a_factor_of_their_own) {
  StepCosts costs = some_costs();
  const int64_t alone = costs.decode_ns(4, 100), read_by_two = 133;  // lanes attend to nothing
  CHECK_EQ(costs.hybrid_ns(2, 2, 100, 70), 130 + read_by_two + 70);
  for (int i = 0; i < 300; ++i) costs.learn_hybrid(costs.hybrid_ns(2, 2, 100, 70), 800);
  CHECK_EQ(costs.decode_ns(4, 100), alone);
  CHECK(std::abs(costs.hybrid_ns(2, 2, 100, 70) - 800) <= 8);
  // If all steps take longer, steps with lanes take longer as well.
  for (int i = 0; i < 64; ++i) costs.learn_decode(costs.decode_ns(4, 100), alone);
  for (int i = 0; i < 300; ++i) costs.learn_decode(costs.decode_ns(4, 100), 2 * alone);
  CHECK(std::abs(costs.hybrid_ns(2, 2, 100, 70) - 1600) <= 32);
  CHECK_EQ(StepCosts().hybrid_ns(2, 2, 100, 70), 0);
}

// An engine that had rows on the host from its first steps on: what all steps take longer counts as the lanes', until some have none.
TEST(the_first_steps_without_lanes_leave_what_lanes_take) {
  StepCosts costs = some_costs();
  const int64_t alone = costs.decode_ns(2, 100), together = costs.hybrid_ns(2, 2, 100, 70);
  for (int i = 0; i < 300; ++i) costs.learn_hybrid(costs.hybrid_ns(2, 2, 100, 70), 3 * together / 2);
  for (int i = 0; i < 64; ++i) costs.learn_decode(costs.decode_ns(2, 100), 3 * alone / 2);
  CHECK(std::abs(costs.hybrid_ns(2, 2, 100, 70) - 3 * together / 2) <= 6);
  CHECK(std::abs(costs.decode_ns(2, 100) - 3 * alone / 2) <= 6);
  for (int i = 0; i < 300; ++i) costs.learn_decode(costs.decode_ns(2, 100), 3 * alone);
  CHECK(std::abs(costs.hybrid_ns(2, 2, 100, 70) - 3 * together) <= 40);
}

TEST(attention_and_the_rest_are_told_apart) {
  // The rest takes 1.5 times as long as was measured, attention 0.8 times: steps of few tokens and of many say so.
  StepCosts costs = some_costs();
  for (int i = 0; i < 2000; ++i) {
    const int32_t tokens = i % 2 == 0 ? 16 : 64;
    const double chunks_ns = costs.attention_ns(tokens, (i * 37) % 2000);
    const double base_ns = tokens == 16 ? 1000 : 2000;
    const auto took = static_cast<int64_t>(1.5 * base_ns + 0.8 * chunks_ns);
    costs.learn_mixed(costs.mixed_ns(tokens, 0, 0, chunks_ns), chunks_ns, took);
  }
  CHECK(costs.factors().rest > 1.45 && costs.factors().rest < 1.55);
  CHECK(costs.factors().attention > 0.77 && costs.factors().attention < 0.83);
}

TEST(a_chunk_takes_the_time_that_the_target_leaves) {
  {
    Bench bench(paced(1'000'000), 2);
    CHECK(chunks_beside_three(bench, {300}) == std::vector<int32_t>{97});  // prefill_chunk_size does not count
  }
  {
    SchedulerConfig config = paced(1'000'000);
    config.paced_chunk_size = 40;
    Bench bench(config, 2);
    CHECK(chunks_beside_three(bench, {300}) == std::vector<int32_t>{40});
  }
  {
    SchedulerConfig config = paced(1'000'000);
    config.token_buckets = {16, 32, 64, 128, 200};  // 100 tokens would be padded to 128, which takes too long
    Bench bench(config, 2);
    CHECK(chunks_beside_three(bench, {300}) == std::vector<int32_t>{61});
  }
  {
    SchedulerConfig config = paced(1'000'000);
    config.costs = by_tokens(/*context_ns=*/1000);
    Bench bench(config, 2);
    const std::vector<int32_t> chunks = chunks_beside_three(bench, {300});
    // 3 + q tokens at 10 us, and q * q / 2 pairs at 1 us.
    CHECK(chunks == std::vector<int32_t>{35});
  }
}

TEST(a_chunk_is_made_however_short_the_target) {
  Bench bench(paced(1000), 2);
  CHECK((chunks_beside_three(bench, {300, 200}) == std::vector<int32_t>{16}));
}

TEST(without_a_target_or_decode_rows_chunks_are_of_the_usual_size) {
  {
    Bench bench(paced(0), 2);
    CHECK(chunks_beside_three(bench, {300}) == std::vector<int32_t>{32});
  }
  {
    SchedulerConfig config = paced(1'000'000);
    config.costs = {};
    Bench bench(config, 2);
    CHECK(chunks_beside_three(bench, {300}) == std::vector<int32_t>{32});
  }
  Bench bench(paced(1'000'000), 2);
  bench.add(make_spec(1, 300, 5));
  CHECK_EQ(bench.launch()->num_tokens, 32);
}

TEST(prompts_share_the_time_of_a_step) {
  Bench bench(paced(1'030'000), 2);
  CHECK((chunks_beside_three(bench, {300, 10, 300}) == std::vector<int32_t>{33, 10, 57}));
}

TEST(the_strictest_target_of_those_that_decode_counts) {
  SchedulerConfig config = paced(1'000'000);
  config.targets.of_class = {{-1, 500'000}, {7, 100'000}};
  {
    Bench bench(config, 2);
    CHECK(chunks_beside_three(bench, {300}, /*priority=*/-1) == std::vector<int32_t>{47});
  }
  {
    Bench bench(config, 2);
    CHECK(chunks_beside_three(bench, {300}, /*priority=*/2) == std::vector<int32_t>{97});
  }
  config.targets.ns = 0;  // a class that is not named has none
  Bench bench(config, 2);
  CHECK(chunks_beside_three(bench, {300}, /*priority=*/2) == std::vector<int32_t>{32});
}
