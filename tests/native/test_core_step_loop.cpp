// Threads: submit and abort while the step thread runs; leases of staging buffers; failures of the executor.
#include <cstring>
#include <thread>

#include "check.h"
#include "engine_fixture.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

// Takes as long as it likes over a step, and checks meanwhile that nobody touches the step's buffer.
class SuspiciousExecutor final : public Executor {
 public:
  SuspiciousExecutor(const StepLimits& limits, int steps_in_flight)
      : steps_(static_cast<size_t>(steps_in_flight)), tokens_(static_cast<size_t>(limits.max_rows), 1) {
    for (Step& step : steps_) step.input.resize(limits.max_bytes());
  }
  int num_staging() const override { return static_cast<int>(steps_.size()); }
  std::span<std::byte> staging(int i) override { return at(i).input; }
  StepResults results(int i) const override {
    violations_ += steps_[static_cast<size_t>(i)].running;
    return {tokens_.data(), nullptr};
  }
  LaunchStatus launch(int i, size_t bytes) override {
    Step& step = at(i);
    violations_ += step.running;
    step.launched.assign(step.input.begin(), step.input.begin() + static_cast<std::ptrdiff_t>(bytes));
    step.polls_left = static_cast<int>(rng_() % 4);
    step.running = true;
    order_.push_back(i);
    deepest_ = std::max(deepest_.load(), static_cast<int>(order_.size()));
    return ++launches_ == fail_launch ? LaunchStatus::kFailed : LaunchStatus::kLaunched;
  }
  StepStatus poll(int i) override {
    Step& step = at(i);
    violations_ += order_.empty() || order_.front() != i;  // the oldest step is asked about
    violations_ += std::memcmp(step.launched.data(), step.input.data(), step.launched.size()) != 0;
    if (launches_ == fail_poll) return StepStatus::kFailed;
    if (step.polls_left-- > 0) return StepStatus::kPending;
    step.running = false;
    order_.erase(order_.begin());
    return StepStatus::kReady;
  }
  std::string error() const override { return "the executor broke"; }
  std::chrono::nanoseconds poll_interval() const override { return 5us; }
  bool close(std::chrono::nanoseconds) override { return true; }

  int fail_launch = -1, fail_poll = -1;
  mutable std::atomic<int> violations_{0};
  std::atomic<int> deepest_{0};

 private:
  struct Step {
    std::vector<std::byte> input, launched;
    int polls_left = 0;
    bool running = false;
  };
  Step& at(int i) { return steps_[static_cast<size_t>(i)]; }
  std::vector<Step> steps_;
  std::vector<int32_t> tokens_;
  std::vector<int> order_;
  std::mt19937 rng_{7};
  int launches_ = 0;
};

RequestSpec small_spec(uint64_t id, int32_t max_tokens) {
  RequestSpec spec;
  spec.id = id;
  spec.prompt.assign(20, static_cast<int32_t>(id % 50));
  spec.max_tokens = max_tokens;
  return spec;
}

template <typename Condition>
bool eventually(Condition condition) {
  for (int i = 0; i < 20'000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(500us);
  }
  return false;
}

}  // namespace

TEST(staging_buffers_are_leased_until_their_step_is_over) {
  for (const int depth : {1, 2, 3}) {
    Options options;
    options.steps_in_flight = depth;
    const auto config = options.loop();
    auto owned = std::make_unique<SuspiciousExecutor>(StepLoop::limits(config), depth);
    SuspiciousExecutor& executor = *owned;
    StepLoop loop(config, std::move(owned));
    loop.start();
    int finished = 0;
    for (uint64_t id = 1; id <= 40; ++id) CHECK(loop.submit(small_spec(id, 30)) == SubmitResult::kAccepted);
    CHECK(eventually([&] {
      CHECK(loop.drain([&](const StepLoop::News& news) { finished += news.finish != FinishReason::kNone; }));
      return finished == 40;
    }));
    CHECK_EQ(executor.violations_.load(), 0);
    CHECK_EQ(executor.deepest_.load(), depth);  // as many as allowed, and no more
    CHECK(loop.stop(1s));
  }
}

TEST(tokens_of_a_step_are_counted_up_to_their_bound) {
  StepTokens tokens;
  int64_t sum = 0;
  for (const int64_t bound : StepTokens::kBounds) {
    for (const int64_t more : {0, 1}) {
      tokens.add(bound + more);
      sum += bound + more;
    }
  }
  const auto counts = tokens.counts();
  for (size_t i = 0; i < counts.size(); ++i) CHECK_EQ(counts[i], i == 0 || i + 1 == counts.size() ? 1 : 2);
  CHECK_EQ(tokens.sum(), sum);
}

TEST(executor_failures_end_the_loop_with_the_reason) {
  for (const bool at_launch : {true, false}) {
    Options options;
    const auto config = options.loop();
    auto owned = std::make_unique<SuspiciousExecutor>(StepLoop::limits(config), config.steps_in_flight);
    (at_launch ? owned->fail_launch : owned->fail_poll) = 5;
    StepLoop loop(config, std::move(owned));
    loop.start();
    CHECK(loop.submit(small_spec(1, 100)) == SubmitResult::kAccepted);
    FinishReason finish = FinishReason::kNone;
    CHECK(eventually([&] { return !loop.drain([&](const StepLoop::News& news) { finish = news.finish; }); }));
    CHECK(finish == FinishReason::kNone);  // a failure of the engine is no end of a sequence
    CHECK_EQ(loop.error(), std::string("the executor broke"));
    CHECK(loop.submit(small_spec(2, 1)) == SubmitResult::kClosed);
    loop.abort(1);
    CHECK(loop.stop(1s));
  }
}

TEST(submit_and_abort_race_with_the_step_thread) {
  for (const int depth : {1, 2, 3}) {
    Options options;
    options.steps_in_flight = depth;
    options.num_blocks = 24;
    std::mt19937 rng(static_cast<unsigned>(depth));
    Engine engine(options);
    std::atomic<bool> done{false};
    // Snapshots may be taken from any thread.
    std::thread watcher([&] {
      while (!done) {
        const Stats s = engine.loop->stats();
        CHECK(s.num_free_blocks >= 0 && s.num_free_blocks <= options.num_blocks && s.num_steps_in_flight <= depth &&
              s.live_requests >= 0);
        std::this_thread::sleep_for(50us);
      }
    });
    for (int i = 0; i < 1500; ++i) {
      CHECK(engine.submit(random_spec(rng, options, 40, 20)) == SubmitResult::kAccepted);
      switch (rng() % 6) {
        case 0: engine.abort(engine.last_id()); break;  // perhaps before it was ever scheduled
        case 1: engine.abort(engine.last_id() - rng() % std::min<uint64_t>(engine.last_id(), 30)); break;  // perhaps over
        case 2:  // twice, while the first message may be under way
          engine.abort(engine.last_id());
          engine.abort(engine.last_id());
          break;
        default: break;
      }
      if (rng() % 3 == 0) engine.receive(0ms);
    }
    CHECK(engine.run());
    done = true;
    watcher.join();
    CHECK_EQ(engine.mismatches(), 0);
    CHECK(engine.settles());
  }
}

TEST(one_sequence_of_several_can_be_aborted) {
  Options options;
  options.latency = 300us;
  Engine engine(options);
  RequestSpec spec = small_spec(0, 100);
  spec.n = 4;
  spec.sampling.temperature = 1.f;
  CHECK(engine.submit(spec) == SubmitResult::kAccepted);
  const uint64_t id = engine.last_id();
  CHECK(eventually([&] {
    engine.receive(1ms);
    return engine.results.size() == 4;  // all of them run
  }));
  engine.loop->abort(id, 2);
  CHECK(eventually([&] {
    engine.receive(1ms);
    int ended = 0;
    for (const auto& [key, result] : engine.results) ended += result.finish == FinishReason::kLength;
    return ended == 3;
  }));
  CHECK(engine.results.at({id, 2}).tokens.size() < 100);
  CHECK(engine.results.at({id, 2}).finish == FinishReason::kNone);
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.settles());  // the request is over although one of its sequences never said so
}

TEST(aborting_the_first_of_several_wakes_its_siblings) {
  Options options;
  options.max_num_batched_tokens = 16;
  options.max_model_len = 4096;
  options.num_blocks = 400;
  options.latency = 200us;
  Engine engine(options);
  RequestSpec spec = small_spec(0, 5);
  spec.prompt.assign(2000, 3);  // a long prefill, during which the siblings sleep
  spec.n = 3;
  CHECK(engine.submit(spec) == SubmitResult::kAccepted);
  const uint64_t id = engine.last_id();
  engine.loop->abort(id, 0);
  CHECK(eventually([&] {
    engine.receive(1ms);
    int ended = 0;
    for (const auto& [key, result] : engine.results) ended += result.finish == FinishReason::kLength;
    return ended == 2;
  }));
  CHECK(!engine.results.contains({id, 0}));
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.settles());
}

TEST(stopping_early_is_clean) {
  for (int i = 0; i < 20; ++i) {
    Options options;
    options.latency = 100us;
    Engine engine(options);
    for (int k = 0; k < 5; ++k) CHECK(engine.submit(small_spec(0, 100)) == SubmitResult::kAccepted);
    std::this_thread::sleep_for(std::chrono::microseconds(i * 50));
    CHECK(engine.loop->stop(5s));
    CHECK(engine.loop->stop(5s));
    CHECK(engine.submit(small_spec(0, 1)) == SubmitResult::kClosed);
  }
}

TEST(a_class_runs_first_until_the_other_has_aged) {
  // Submitted in this order: a later class first. Beside an hour, the time between two submissions is nothing; beside a
  // nanosecond it is for ever.
  const std::vector<std::pair<std::chrono::nanoseconds, std::vector<uint64_t>>> cases = {{1h, {3, 2, 1}}, {1ns, {1, 2, 3}}};
  for (const auto& [ageing, expected] : cases) {
    Options options;
    options.max_num_seqs = 1;
    auto config = options.loop();
    config.priority_ageing_s = ageing;
    StepLoop loop(config, std::make_unique<SuspiciousExecutor>(StepLoop::limits(config), config.steps_in_flight));
    for (const auto& [id, priority] : {std::pair{uint64_t{1}, 1}, {uint64_t{2}, 0}, {uint64_t{3}, -1}}) {
      RequestSpec spec = small_spec(id, 3);
      spec.priority = priority;
      CHECK(loop.submit(spec) == SubmitResult::kAccepted);
      std::this_thread::sleep_for(1us);
    }
    loop.start();
    std::vector<uint64_t> finished;
    CHECK(eventually([&] {
      CHECK(loop.drain([&](const StepLoop::News& news) {
        if (news.finish != FinishReason::kNone) finished.push_back(news.sequence->request->id);
      }));
      return finished.size() == 3;
    }));
    CHECK(finished == expected);
    CHECK(loop.stop(1s));
  }
}

TEST(sequences_of_a_request_are_aborted_one_after_the_other) {
  Options options;
  options.num_blocks = 256;
  options.max_model_len = 2048;
  options.latency = 500us;  // far from done when the last abort comes
  Engine engine(options);
  RequestSpec spec = small_spec(1, 1500);
  spec.n = 3;
  CHECK(engine.submit(spec) == SubmitResult::kAccepted);
  const uint64_t id = engine.last_id();
  const auto running = [&](int64_t count) {
    return eventually([&] {
      engine.receive(0ms);
      return engine.loop->stats().num_requests_running == count;
    });
  };
  CHECK(running(3));
  int64_t left = 3;
  for (const int32_t index : {2, 0, 1}) {
    engine.loop->abort(id, index);
    CHECK(running(--left));
  }
  CHECK(engine.settles());
  for (const auto& [key, result] : engine.results) CHECK(result.tokens.size() < 1500);
}
