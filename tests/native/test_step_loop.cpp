// The whole step loop on the simulated device: the model reads every token of its context back through block tables and
// KV, so a block reused too early, a missing copy or a stale table changes its answers.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "check.h"
#include "engine_fixture.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

void run_random(const Options& options, int num_requests, unsigned seed, int32_t longest_prompt, int32_t longest_output) {
  std::mt19937 rng(seed);
  Engine engine(options);
  for (int i = 0; i < num_requests; ++i) {
    CHECK(engine.submit(random_spec(rng, options, longest_prompt, longest_output)) == SubmitResult::kAccepted);
    if (rng() % 4 == 0) engine.receive(0ms);
    if (rng() % 5 == 0) engine.abort(engine.last_id() - rng() % std::min<uint64_t>(engine.last_id(), 8));
  }
  CHECK(engine.run());
  CHECK(!engine.results.empty());
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.settles());
}

}  // namespace

TEST(outputs_do_not_depend_on_steps_in_flight) {
  for (const int depth : {1, 2, 3}) {
    Options options;
    options.steps_in_flight = depth;
    run_random(options, 200, 1, 60, 40);
  }
}

TEST(outputs_do_not_depend_on_late_launch) {
  for (const bool late_launch : {true, false}) {
    Options options;
    options.late_launch = late_launch;
    options.latency = 700us;
    options.num_blocks = 24;  // with preemption
    run_random(options, 100, 6, 60, 40);
  }
}

TEST(outputs_do_not_depend_on_chunk_size) {
  for (const int chunk : {1, 2, 7, 16, 33, 0}) {
    Options options;
    options.prefill_chunk_size = chunk;
    run_random(options, 80, 2, 100, 20);
  }
}

TEST(outputs_do_not_depend_on_prefix_cache) {
  Options options;
  options.prefix_caching = false;
  run_random(options, 100, 3, 60, 30);
}

TEST(preemption_recomputes_and_progresses) {
  Options options;
  options.num_blocks = 12;  // eight sequences of up to nine blocks
  options.max_model_len = 160;
  for (unsigned seed = 0; seed < 4; ++seed) run_random(options, 120, seed, 80, 60);
}

TEST(preemption_happens_when_blocks_run_out) {
  Options options;
  options.num_blocks = 10;
  Engine engine(options);
  for (int i = 0; i < 8; ++i) {
    RequestSpec spec;
    spec.prompt.assign(20, i);
    spec.max_tokens = 100;
    CHECK(engine.submit(spec) == SubmitResult::kAccepted);
  }
  CHECK(engine.run());
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.loop->stats().num_preemptions > 0);
  CHECK(engine.settles());
}

TEST(a_fork_that_fills_the_pool_is_computed_afresh) {
  Options options;
  options.num_blocks = 4;
  options.max_model_len = 64;
  Engine engine(options);
  RequestSpec spec;
  spec.prompt.assign(62, 3);
  spec.max_tokens = 2;
  spec.n = 4;
  spec.sampling.temperature = 1.f;
  CHECK(engine.submit(spec) == SubmitResult::kAccepted);
  CHECK(engine.run());
  CHECK_EQ(engine.results.size(), size_t{4});
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.settles());
}

TEST(shared_prompts_hit_the_prefix_cache) {
  Engine engine(Options{});
  RequestSpec spec;
  for (int32_t i = 0; i < 100; ++i) spec.prompt.push_back(i % 50);
  spec.max_tokens = 4;
  CHECK(engine.submit(spec) == SubmitResult::kAccepted);
  CHECK(engine.run());
  CHECK_EQ(engine.loop->stats().prefix_cache_hits, 0);
  CHECK(engine.submit(spec) == SubmitResult::kAccepted);
  CHECK(engine.run());
  CHECK_EQ(engine.loop->stats().prefix_cache_hits, 96);
  spec.salt = 99;  // another tenant sees nothing of it
  CHECK(engine.submit(spec) == SubmitResult::kAccepted);
  CHECK(engine.run());
  CHECK_EQ(engine.loop->stats().prefix_cache_hits, 96);
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.settles());
}

TEST(aborts_give_everything_back) {
  Options options;
  options.latency = 200us;
  std::mt19937 rng(5);
  Engine engine(options);
  for (int i = 0; i < 300; ++i) {
    CHECK(engine.submit(random_spec(rng, options, 60, 60)) == SubmitResult::kAccepted);
    if (i % 3) engine.abort(engine.last_id());
    if (i % 7 == 0) engine.receive(1ms);
  }
  CHECK(engine.run());
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.settles());
}

// All modes of staging, also the one that makes its caller wait for the device.
constexpr StagingMode kAllStaging[] = {StagingMode::kPageable, StagingMode::kPinned, StagingMode::kMapped, StagingMode::kAhead};

TEST(a_device_fault_fails_the_engine_with_its_error) {
  for (const StagingMode staging : kAllStaging)
    for (const auto latency : {0us, 1000us}) {  // with latency, launches are held back
      Options options;
      options.latency = latency;
      options.staging = staging;
      Engine engine(options);
      engine.device.fail_at(10);
      RequestSpec spec;
      spec.prompt = {1, 2, 3};
      spec.max_tokens = 200;
      CHECK(engine.submit(spec) == SubmitResult::kAccepted);
      CHECK(!engine.run());
      CHECK(engine.loop->error().find("illegal memory access") != std::string::npos);
      CHECK(engine.submit(spec) == SubmitResult::kClosed);
      CHECK(engine.loop->stop(1s));
    }
}

TEST(a_hung_kernel_becomes_an_error_within_the_time_limit) {
  for (const StagingMode staging : kAllStaging)
    for (const auto latency : {0us, 1000us}) {
      Options options;
      options.latency = latency;
      options.staging = staging;
      options.step_timeout = 50ms;
      Engine engine(options);
      engine.device.hang_at(10);
      RequestSpec spec;
      spec.prompt = {1, 2, 3};
      spec.max_tokens = 200;
      CHECK(engine.submit(spec) == SubmitResult::kAccepted);
      CHECK(!engine.run());
      CHECK(engine.loop->error().find("did not finish within") != std::string::npos);
      CHECK(!engine.loop->stop(10ms));  // still hanging: its buffers may not be freed
      engine.device.resume();
      CHECK(engine.loop->stop(5s));
    }
}

TEST(the_queue_is_limited) {
  Options options;
  options.max_num_seqs = 1;
  options.max_queued_requests = 3;
  options.latency = 1ms;
  Engine engine(options);
  RequestSpec spec;
  spec.prompt = {1};
  spec.max_tokens = 200;
  int full = 0;
  for (int i = 0; i < 10; ++i) full += engine.submit(spec) == SubmitResult::kQueueFull;
  CHECK(full >= 6);
  CHECK(engine.run());
  CHECK(engine.settles());
  CHECK(engine.submit(spec) == SubmitResult::kAccepted);
  spec.max_tokens = 10000;
  CHECK(engine.submit(spec) == SubmitResult::kTooLarge);
  CHECK(engine.run());
}

TEST(devices_leak_nothing) {
  Options options;
  SimulatedDevice device;
  {
    SimulatedModelConfig config;
    const auto limits = StepLoop::limits(options.loop());
    SimulatedModel model(device, config, limits, options.num_blocks, options.block_size, 17);
    const auto executor = model.make_executor(2, 20us);
    CHECK(device.live_objects() > 0);
  }
  CHECK_EQ(device.live_objects(), 0);
}

TEST(staging_modes_give_the_same_tokens) {
  using enum StagingMode;
  for (const StagingMode mode : {kPageable, kPinned, kMapped, kAhead}) {
    for (const int steps_in_flight : {1, 2, 3}) {
      Options options;
      options.staging = mode;
      options.steps_in_flight = steps_in_flight;
      run_random(options, 60, 4, 60, 30);
    }
  }
}

TEST(a_step_waits_for_its_input_which_is_copied_while_the_one_before_runs) {
  SimulatedDevice device;
  const StepLimits limits{4, 64, 16};
  const auto staging = std::make_shared<Staging>(device.cuda(), limits, 2, StagingMode::kAhead);
  std::vector<std::byte> inputs(2 * staging->input_stride());
  staging->set_device_buffers({inputs.data(), nullptr});
  std::atomic<bool> both_launched = false;
  std::vector<int64_t> seen;
  GraphExecutor::Graphs graphs;
  graphs.buckets.push_back({4, 64, false, kAnyContext, {}});
  graphs.buckets[0].variants.push_back(
      {0, device.add_graph(
              [&] {
                while (!both_launched) std::this_thread::sleep_for(100us);  // the second step's copy is enqueued, and not yet made
                seen.push_back(StepInputView(staging->device_input(static_cast<int>(seen.size()))).header().step);
              },
              0ns)});
  GraphExecutor executor(device.cuda(), staging, graphs, 20us);
  for (const int i : {0, 1}) {
    StepInputHeader header{};
    header.step = i + 1;
    std::memcpy(executor.staging(i).data(), &header, sizeof(header));
    CHECK(executor.launch(i, sizeof(header)) == LaunchStatus::kLaunched);
  }
  both_launched = true;
  while (executor.poll(1) == StepStatus::kPending) std::this_thread::sleep_for(1ms);
  CHECK(seen == std::vector<int64_t>({1, 2}));
}

TEST(memory_that_cannot_be_pinned_is_replaced) {
  SimulatedDevice device;
  device.refuse_pinning();
  const Staging staging(device.cuda(), {4, 64, 16}, 2, StagingMode::kMapped);
  CHECK(staging.mode() == StagingMode::kPageable);
  CHECK(staging.input(1).data() - staging.input(0).data() >= static_cast<ptrdiff_t>(StepLimits{4, 64, 16}.max_bytes()));
  CHECK_EQ(reinterpret_cast<uintptr_t>(staging.input(1).data()) % 4096, 0u);
  CHECK_EQ(device.live_objects(), 0);
}

TEST(a_step_that_leaves_no_token_is_an_error) {
  // A graph that does nothing: the words of its rows still name another step.
  SimulatedDevice device;
  const StepLimits limits{4, 64, 16};
  const auto staging = std::make_shared<Staging>(device.cuda(), limits, 2, StagingMode::kMapped);
  GraphExecutor::Graphs graphs;
  graphs.buckets.push_back({4, 64, false, kAnyContext, {}});
  graphs.buckets[0].variants.push_back({0, device.add_graph([] {}, 0ns)});
  GraphExecutor executor(device.cuda(), staging, graphs, 20us);
  StepInputHeader header{};
  header.step = 7;
  header.num_rows = header.num_tokens = header.num_samples = header.num_heads = 1;
  std::memcpy(executor.staging(1).data(), &header, sizeof(header));
  CHECK(executor.launch(1, sizeof(header)) == LaunchStatus::kLaunched);
  StepStatus status;
  while ((status = executor.poll(1)) == StepStatus::kPending) std::this_thread::sleep_for(1ms);
  CHECK(status == StepStatus::kFailed);
  CHECK(executor.error().find("step 7") != std::string::npos);
}

TEST(a_step_takes_the_first_bucket_that_its_rows_tokens_and_contexts_fit) {
  SimulatedDevice device;
  const StepLimits limits{4, 64, 16};
  const auto staging = std::make_shared<Staging>(device.cuda(), limits, 2, StagingMode::kMapped);
  GraphExecutor::Graphs graphs;
  graphs.buckets = {{2, 2, true, 100, {}}, {2, 2, true, kAnyContext, {}}, {4, 4, true, 50, {}}, {4, 64, false, kAnyContext, {}}};
  for (GraphBucket& bucket : graphs.buckets) bucket.variants.push_back({0, device.add_graph([] {}, 0ns)});
  GraphExecutor executor(device.cuda(), staging, graphs, 20us);
  const auto bucket_of = [&](int32_t rows, int32_t tokens, int32_t max_context) {
    StepInputHeader header{};
    header.num_rows = rows;
    header.num_tokens = tokens;
    header.max_context = max_context;
    std::memcpy(executor.staging(0).data(), &header, sizeof(header));
    return executor.kind(0);
  };
  CHECK_EQ(bucket_of(2, 2, 100), 0);
  CHECK_EQ(bucket_of(2, 2, 101), 1);
  CHECK_EQ(bucket_of(3, 3, 50), 2);
  CHECK_EQ(bucket_of(3, 3, 51), 3);
  CHECK_EQ(bucket_of(1, 2, 0), 3);
}

TEST(a_step_with_lanes_takes_the_first_bucket_that_has_them_and_fits) {
  SimulatedDevice device;
  const StepLimits limits{4, 64, 16};
  const auto staging = std::make_shared<Staging>(device.cuda(), limits, 2, StagingMode::kMapped);
  GraphExecutor::Graphs graphs;
  graphs.buckets = {{4, 4, true, kAnyContext, {}, 0},
                    {4, 4, true, kAnyContext, {}, 2},
                    {4, 64, false, kAnyContext, {}, 0},
                    {4, 64, false, kAnyContext, {}, 2}};
  for (GraphBucket& bucket : graphs.buckets) bucket.variants.push_back({0, device.add_graph([] {}, 0ns)});
  GraphExecutor executor(device.cuda(), staging, graphs, 20us);
  const auto bucket_of = [&](int32_t rows, int32_t tokens, int32_t lanes, int32_t lane_rows) {
    StepInputHeader header{};
    header.num_rows = rows;
    header.num_tokens = tokens;
    header.host_rows.num_lanes = lanes;
    header.host_rows.num_rows = lane_rows;
    std::memcpy(executor.staging(0).data(), &header, sizeof(header));
    return executor.kind(0);
  };
  CHECK_EQ(bucket_of(2, 2, 0, 0), 0);
  CHECK_EQ(bucket_of(2, 2, 2, 0), 1);
  CHECK_EQ(bucket_of(3, 2, 2, 1), 1);  // a row of a lane has no token among the others
  CHECK_EQ(bucket_of(0, 0, 2, 0), 1);
  CHECK_EQ(bucket_of(3, 3, 2, 0), 3);
  CHECK_EQ(bucket_of(2, 62, 2, 0), 3);
  CHECK_EQ(bucket_of(2, 62, 0, 0), 2);
}

TEST(an_executor_closes_what_attends_for_host_rows) {
  struct Attention final : HostAttention {
    int32_t num_layers() const override { return 1; }
    void post(const HostAttentionJob&) override {}
    HostAttentionStatus poll(int32_t) override { return HostAttentionStatus::kPending; }
    void cancel(int32_t) override {}
    bool close(std::chrono::nanoseconds limit) override {
      limits.push_back(limit);
      return !hangs;
    }
    bool hangs = false;
    std::vector<std::chrono::nanoseconds> limits;
  };
  for (const bool hangs : {false, true}) {
    SimulatedDevice device;
    const StepLimits limits{4, 64, 16};
    const auto staging = std::make_shared<Staging>(device.cuda(), limits, 2, StagingMode::kMapped);
    const auto attention = std::make_shared<Attention>();
    attention->hangs = hangs;
    GraphExecutor::Graphs graphs;
    graphs.buckets = {{4, 64, false, kAnyContext, {{0, device.add_graph([] {}, 0ns)}}}};
    graphs.host_attention = attention;
    GraphExecutor executor(device.cuda(), staging, graphs, 20us);
    CHECK(executor.host_attention() == attention.get());
    CHECK_EQ(executor.close(50ms), !hangs);
    CHECK(attention->limits == std::vector<std::chrono::nanoseconds>({50ms}));
  }
}

TEST(a_step_takes_the_first_variant_that_serves_its_needs) {
  SimulatedDevice device;
  const StepLimits limits{4, 64, 16};
  const auto staging = std::make_shared<Staging>(device.cuda(), limits, 2, StagingMode::kMapped);
  std::vector<Needs> launched;
  const auto variants = [&](std::vector<Needs> all) {
    std::vector<GraphVariant> result;
    for (const Needs needs : all) {
      result.push_back({needs, device.add_graph([&launched, needs] { launched.push_back(needs); }, 0ns)});
    }
    return result;
  };
  GraphExecutor::Graphs graphs;
  graphs.buckets = {{2, 2, true, kAnyContext, variants({0, kSamplingNeeds, kSamplingNeeds | kNeedLogprobs})},
                    {4, 64, false, kAnyContext, variants({0, kSamplingNeeds | kNeedLogprobs | kNeedBias})}};
  GraphExecutor executor(device.cuda(), staging, graphs, 20us);
  CHECK_EQ(executor.needs(), kSamplingNeeds | kNeedLogprobs);  // what every bucket has a variant for
  CHECK_EQ(executor.num_kinds(), 5);
  const auto run = [&](int32_t tokens, Needs needs) {
    StepInputHeader header{};
    header.num_rows = 1;
    header.num_tokens = tokens;
    header.needs = needs;
    std::memcpy(executor.staging(0).data(), &header, sizeof(header));
    const int kind = executor.kind(0);
    CHECK(executor.launch(0, sizeof(header)) == LaunchStatus::kLaunched);
    while (executor.poll(0) == StepStatus::kPending) std::this_thread::sleep_for(100us);
    return std::pair(kind, launched.back());
  };
  CHECK(run(1, 0) == std::pair(0, Needs{0}));
  CHECK(run(1, kNeedTemperature) == std::pair(1, kSamplingNeeds));
  CHECK(run(1, kNeedLogprobs) == std::pair(2, kSamplingNeeds | kNeedLogprobs));
  CHECK(run(2, 0) == std::pair(3, Needs{0}));
  CHECK(run(2, kNeedFilters) == std::pair(4, kSamplingNeeds | kNeedLogprobs | kNeedBias));
}

TEST(a_request_whose_needs_nothing_serves_is_refused) {
  Engine engine{Options()};
  RequestSpec spec;
  spec.prompt = {1, 2, 3};
  spec.max_tokens = 4;
  spec.extras.needs = Needs{1} << 8;  // no executor's
  CHECK(engine.submit(spec) == SubmitResult::kUnserved);
  spec.extras.needs = kNeedTemperature;  // though it has none
  CHECK(engine.submit(spec) == SubmitResult::kAccepted);
  CHECK(engine.run());
  CHECK(engine.settles());
}
