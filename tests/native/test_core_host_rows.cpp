// Host rows on the simulated device: results do not depend on where a sequence decodes, and whatever fails fails alone.
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "hybrid_fixture.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

RequestSpec long_spec(int32_t family, int32_t prompt_len = 40, int32_t max_tokens = 60) {
  RequestSpec spec = make_spec(0, prompt_len, max_tokens, 1, family * 7);
  spec.sampling = {};
  return spec;
}

void submit(Engine& engine, int count, int32_t prompt_len = 40, int32_t max_tokens = 60) {
  for (int32_t i = 0; i < count; ++i) CHECK(engine.submit(long_spec(i, prompt_len, max_tokens)) == SubmitResult::kAccepted);
}

// Work until the job that is to hang has begun. Eight requests may give few jobs: rows go back to the device where
// workers are slow beside steps.
void work_until_a_job_hangs(Engine& engine) {
  for (int i = 0; i < 20'000 && !workers.hanging(); ++i) {
    if (engine.open() < 8) submit(engine, static_cast<int>(8 - engine.open()));
    engine.receive(1ms);
  }
  CHECK(workers.hanging());
}

void churn(Engine& engine, const Options& options, int count, unsigned seed) {
  std::mt19937 rng(seed);
  for (int i = 0; i < count; ++i) {
    CHECK(engine.submit(random_spec(rng, options, 90, 60)) == SubmitResult::kAccepted);
    if (rng() % 8 == 0) engine.abort(engine.last_id());
    if (rng() % 4 == 0) engine.receive(1ms);
  }
}

// Counts the sequences that ended for `reason`, and takes them out of all later comparisons.
int take_failed(Engine& engine, FinishReason reason = FinishReason::kStepFailed) {
  int failed = 0;
  for (auto& [key, result] : engine.results) {
    if (result.finish != reason) continue;
    ++failed;
    result.finish = FinishReason::kNone;
  }
  return failed;
}

TEST(results_are_the_same_wherever_a_sequence_decodes) {
  for (const int lanes : {1, 2, 5}) {
    for (const int layers : {1, 4}) {
      Options options = crowded();
      options.hybrid.lanes = lanes;
      options.hybrid.layers = layers;
      options.late_launch = lanes != 2;
      options.steps_in_flight = 1 + lanes % 3;
      workers.delay_us = lanes == 5 ? 300 : 0;
      Engine engine(options);
      churn(engine, options, 120, static_cast<unsigned>(10 * lanes + layers));
      CHECK(engine.run());
      CHECK_EQ(engine.mismatches(), 0);
      CHECK(engine.settles());
      const Stats stats = engine.loop->stats();
      CHECK(stats.moved_to_host > 0);
      CHECK(stats.host_row_tokens > 0);
      CHECK_EQ(stats.failed_host_rows, 0);
      CHECK_EQ(stats.num_host_rows, 0);
    }
  }
}

TEST(sequences_come_back_from_the_host) {
  const Options options = crowded();
  Engine engine(options);
  submit(engine, 6, 60, 20);
  CHECK(engine.submit(long_spec(9, 40, 150)) == SubmitResult::kAccepted);
  CHECK(engine.run());
  churn(engine, options, 200, 4);
  CHECK(engine.run());
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.loop->stats().moved_from_host > 0);
  CHECK(engine.settles());
}

// Full blocks that were computed on the host are found by others, with the right tokens.
TEST(what_a_host_row_computed_is_a_prefix_for_others) {
  Options options = crowded();
  options.max_num_seqs = 4;
  Engine engine(options);
  submit(engine, 4, 60, 100);
  CHECK(engine.run());
  CHECK(engine.loop->stats().host_row_tokens > 0);
  for (int32_t i = 0; i < 4; ++i) {
    RequestSpec spec = long_spec(i, 60, 20);
    const std::vector<int32_t> output = engine.results.at({static_cast<uint64_t>(i) + 1, 0}).tokens;
    spec.prompt.insert(spec.prompt.end(), output.begin(), output.end());
    const int64_t hits = engine.loop->stats().prefix_cache_hits;
    CHECK(engine.submit(spec) == SubmitResult::kAccepted);
    CHECK(engine.run());
    CHECK(engine.loop->stats().prefix_cache_hits >= hits + 64);  // more than the prompt
  }
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.settles());
}

TEST(a_worker_that_fails_costs_nobody) {
  for (int64_t n = 0; n < 12; ++n) {
    const Options options = crowded();
    workers.fails = n;
    Engine engine(options);
    submit(engine, 8);
    CHECK(engine.run());
    CHECK_EQ(engine.mismatches(), 0);
    CHECK(engine.settles());
    CHECK(workers.jobs > n);
    CHECK_EQ(engine.loop->stats().failed_host_rows, 1);
  }
}

// Workers that fail are left alone for a second, and then for longer and longer.
TEST(workers_that_always_fail_are_left_alone_and_tried_again) {
  const Options options = crowded();
  workers.all_fail = true;
  Engine engine(options);
  const auto wave = [&] {
    submit(engine, 8);
    CHECK(engine.run());
  };
  for (int i = 0; i < 20; ++i) wave();
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.settles());
  const Stats stats = engine.loop->stats();
  CHECK(stats.failed_host_rows >= Backoff::kPatience);
  // Rows that were on their way when the eighth failed, and one after each pause.
  CHECK(stats.failed_host_rows < Backoff::kPatience + options.max_num_seqs + 8);
  CHECK_EQ(stats.moved_to_host, stats.failed_host_rows);
  CHECK_EQ(stats.host_row_tokens, 0);
  workers.all_fail = false;
  for (int i = 0; i < 100 && engine.loop->stats().host_row_tokens == 0; ++i) {
    for (int k = 0; k < 10; ++k) pass_time(engine);
    wave();
  }
  CHECK(engine.loop->stats().host_row_tokens > 0);
  CHECK_EQ(engine.loop->stats().failed_host_rows, stats.failed_host_rows);
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.settles());
}

TEST(a_worker_that_hangs_fails_its_request_alone) {
  for (const int64_t n : {0, 1, 2, 7}) {
    const Options options = crowded();
    workers.hangs = n;
    Engine engine(options);
    submit(engine, 8);
    workers.await_hanging();
    while (engine.open() > 1) CHECK(engine.receive(1s));  // others go on
    clock_ahead += int64_t{1000} * options.hybrid.job_timeout_ns;  // the process was stopped: that does not count
    for (int i = 0; i < 100; ++i) pass_time(engine);
    CHECK_EQ(engine.open(), size_t{1});
    while (engine.open() > 0) pass_time(engine);
    CHECK_EQ(take_failed(engine), 1);
    CHECK_EQ(engine.mismatches(), 0);
    CHECK(engine.loop->take_step_error().find("attention on the host") != std::string::npos);
    CHECK_EQ(engine.loop->error(), std::string());
    Stats stats = engine.loop->stats();
    CHECK_EQ(stats.failed_host_rows, 1);
    CHECK_EQ(stats.num_host_rows, 1);  // its blocks stay while somebody may write to them
    CHECK(!engine.loop->quiescent());
    const int64_t moved = stats.moved_to_host;
    submit(engine, 8);
    CHECK(engine.run());
    CHECK_EQ(engine.loop->stats().moved_to_host, moved);  // nobody else comes near
    workers.release();
    CHECK(engine.settles());
    submit(engine, 8);
    CHECK(engine.run());
    CHECK_EQ(engine.mismatches(), 0);
    CHECK(engine.loop->stats().moved_to_host > moved);
    CHECK(engine.settles());
  }
}

// All of a request ends, wherever its sequences are.
TEST(siblings_of_a_row_that_hangs_end_with_it) {
  for (int64_t n = 0; n < 4; ++n) {
    Options options = crowded();
    options.num_blocks = 14;
    workers.hangs = n;
    Engine engine(options);
    for (int32_t i = 0; i < 2; ++i) {
      RequestSpec spec = long_spec(i, 40, 100);
      spec.n = 4;
      spec.sampling.temperature = 1.f;
      CHECK(engine.submit(spec) == SubmitResult::kAccepted);
    }
    workers.await_hanging();
    while (engine.open() > 0) pass_time(engine);
    workers.release();
    CHECK(take_failed(engine) >= 1);
    CHECK_EQ(engine.mismatches(), 0);
    CHECK(engine.settles());
  }
}

TEST(a_loop_ends_while_a_worker_hangs) {
  const Options options = crowded();
  workers.hangs = 3;
  Engine engine(options);
  submit(engine, 8);
  workers.await_hanging();
  CHECK(!engine.loop->stop(50ms));
  workers.release();
  CHECK(engine.loop->stop(20s));
}

TEST(an_abort_at_any_moment_gives_everything_back) {
  for (int64_t n = 0; n < 40; ++n) {
    Options options = crowded();
    options.steps_in_flight = 1 + static_cast<int>(n % 3);
    workers.delay_us = n % 2 == 0 ? 0 : 200;
    Engine engine(options);
    workers.hangs = n;
    work_until_a_job_hangs(engine);
    if (n % 4 < 2) workers.release();  // as well before the abort as behind it
    engine.abort(engine.last_id() - static_cast<uint64_t>(n % 8));
    if (n % 5 == 0) engine.abort(engine.last_id() - static_cast<uint64_t>((n + 4) % 8));
    workers.release();
    CHECK(engine.run());
    CHECK_EQ(engine.mismatches(), 0);
    CHECK(engine.settles());
  }
}

TEST(a_store_that_fails_leaves_the_sequence_where_it_is) {
  for (int i = 0; i < 12; ++i) {
    Options options = crowded();
    options.staging = StagingMode::kMapped;  // steps copy nothing: what fails is a transfer's
    Engine engine(options);
    engine.device.fail_call(SimulatedDevice::Call::kCopy, i, kCudaErrorMemoryAllocation);
    submit(engine, 8);
    CHECK(engine.run());
    CHECK_EQ(engine.mismatches(), 0);
    CHECK(engine.settles());
    CHECK_EQ(engine.loop->stats().failed_transfers, 1);
  }
}

TEST(a_full_host_pool_costs_nobody) {
  for (const int32_t host_blocks : {4, 7, 9, 16}) {
    Options options = crowded();
    options.num_host_blocks = host_blocks;
    Engine engine(options);
    churn(engine, options, 120, static_cast<unsigned>(host_blocks));
    CHECK(engine.run());
    CHECK_EQ(engine.mismatches(), 0);
    CHECK(engine.settles());
  }
}

TEST(a_step_that_fails_with_rows_in_its_lanes_fails_their_requests_alone) {
  for (const int depth : {1, 2, 3}) {
    Options options = crowded();
    options.steps_in_flight = depth;
    options.latency = 100us;
    Engine engine(options);
    int failed = 0;
    for (int wave = 0; wave < 12; ++wave) {
      const int64_t before = workers.jobs;
      submit(engine, 8);
      for (int i = 0; i < 2000 && workers.jobs < before + wave; ++i) engine.receive(1ms);
      engine.device.fail_call(SimulatedDevice::Call::kGraphLaunch, wave % 3, kCudaErrorMemoryAllocation);
      CHECK(engine.run());
      failed += take_failed(engine);
      CHECK_EQ(engine.mismatches(), 0);
    }
    CHECK(failed > 0);
    CHECK(engine.settles());
    CHECK_EQ(engine.loop->error(), std::string());
  }
}

TEST(a_device_that_is_lost_ends_the_engine_while_workers_attend) {
  for (const int64_t n : {0, 5, 20}) {
    const Options options = crowded();
    workers.delay_us = 500;
    workers.hangs = n;
    Engine engine(options);
    work_until_a_job_hangs(engine);
    engine.device.fault();
    for (int32_t i = 0; i < 8; ++i) (void)engine.submit(long_spec(i));  // it may have noticed
    CHECK(!engine.run());
    workers.release();
    CHECK(engine.loop->stop(20s));
  }
}

}  // namespace
