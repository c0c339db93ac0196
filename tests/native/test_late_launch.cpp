// Times at which steps are launched: a loop that the test drives, on a device whose steps take exactly as long as the
// test says.
#include <algorithm>
#include <functional>
#include <vector>

#include "check.h"
#include "engine_fixture.h"
#include "scripted_executor.h"
#include "step_loop/launch_timing.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

constexpr int64_t kUs = 1000;

int64_t clock_ns = 0;
int64_t read_clock() { return clock_ns; }

// Runs steps back to back, each from its launch or the end of the one before.
class TimedExecutor final : public ScriptedExecutor {
 public:
  struct Run {
    int32_t rows, tokens;
    int64_t launched, begin, end;
  };
  TimedExecutor(const StepLimits& limits, int steps_in_flight)
      : ScriptedExecutor(limits, steps_in_flight), latest_(static_cast<size_t>(steps_in_flight)) {}
  LaunchStatus launch(int i, size_t) override {
    clock_ns += launch_cost;
    const StepInputHeader& h = header(i);
    const int64_t begin = runs.empty() ? clock_ns : std::max(clock_ns, runs.back().end);
    latest_[static_cast<size_t>(i)] = runs.size();
    runs.push_back({h.num_rows, h.num_tokens, clock_ns, begin, begin + duration(h)});
    return LaunchStatus::kLaunched;
  }
  StepStatus poll(int i) override {
    ++polls;
    return clock_ns >= runs[latest_[static_cast<size_t>(i)]].end ? StepStatus::kReady : StepStatus::kPending;
  }
  int num_kinds() const override { return 2; }
  int kind(int i) const override { return header(i).num_tokens > header(i).num_rows; }
  std::chrono::nanoseconds poll_interval() const override { return 5us; }

  std::function<int64_t(const StepInputHeader&)> duration = [](const StepInputHeader&) { return 1000 * kUs; };
  int64_t launch_cost = 20 * kUs;
  std::vector<Run> runs;
  size_t polls = 0;

 private:
  const StepInputHeader& header(int i) const { return StepInputView(staging_[static_cast<size_t>(i)].data()).header(); }
  std::vector<size_t> latest_;
};

struct TimedEngine {
  explicit TimedEngine(bool late_launch, int steps_in_flight = 2) {
    clock_ns = 1'000'000 * kUs;
    Options options;
    options.steps_in_flight = steps_in_flight;
    options.num_blocks = 4096;
    options.max_model_len = 8192;
    options.late_launch = late_launch;
    auto config = options.loop();
    config.clock = &read_clock;
    auto owned = std::make_unique<TimedExecutor>(StepLoop::limits(config), steps_in_flight);
    device = owned.get();
    loop = std::make_unique<StepLoop>(config, std::move(owned));
  }
  void submit(int32_t prompt_len = 20, int32_t max_tokens = 6000) {
    RequestSpec spec;
    spec.id = next_id++;
    spec.prompt.assign(static_cast<size_t>(prompt_len), static_cast<int32_t>(spec.id % 50));
    spec.max_tokens = max_tokens;
    CHECK(loop->submit(spec) == SubmitResult::kAccepted);
  }
  // Runs as the step thread does: again at once while anything moves, else after a sleep. An idle one sleeps until the
  // test submits something.
  void look() {
    if (!loop->advance()) clock_ns += loop->stats().num_steps_in_flight > 0 ? loop->patience().count() + oversleep_ns : 5 * kUs;
    loop->drain([](const StepLoop::News&) {});
  }
  void run_steps(size_t count) {
    for (const size_t goal = device->runs.size() + count; device->runs.size() < goal;) look();
  }
  void run_to_the_middle_of_a_step() {
    const TimedExecutor::Run newest = device->runs.back();
    while (clock_ns < (newest.begin + newest.end) / 2) look();
  }
  // Number of the step that runs.
  size_t running() const {
    const auto& runs = device->runs;
    return static_cast<size_t>(std::ranges::find_if(runs, [](const auto& run) { return run.end > clock_ns; }) - runs.begin());
  }
  // Count and duration of the device's waits for a step, from step `first` on.
  std::pair<int64_t, int64_t> bubbles(size_t first) const {
    std::pair<int64_t, int64_t> result{0, 0};
    for (size_t k = first; k < device->runs.size(); ++k) {
      const int64_t idle = device->runs[k].begin - device->runs[k - 1].end;
      result.first += idle > 0;
      result.second += idle;
    }
    return result;
  }
  int64_t late_launches() const { return loop->stats().num_late_launches; }

  TimedExecutor* device;
  std::unique_ptr<StepLoop> loop;
  int64_t oversleep_ns = 0;
  uint64_t next_id = 1;
};

}  // namespace

TEST(what_arrives_while_a_step_runs_is_in_the_next) {
  for (const bool late_launch : {true, false}) {
    for (const int depth : {2, 3}) {
      TimedEngine engine(late_launch, depth);
      engine.submit();
      engine.run_steps(20);
      engine.run_to_the_middle_of_a_step();
      const size_t running = engine.running();
      engine.submit();
      engine.run_steps(4);
      const auto& runs = engine.device->runs;
      size_t first = running;
      while (runs[first].tokens == 1) ++first;
      CHECK_EQ(first - running, late_launch ? size_t{1} : static_cast<size_t>(depth));
      CHECK(runs[first].rows == 2);
      CHECK_EQ(engine.bubbles(1).first, 0);
      CHECK_EQ(engine.late_launches(), 0);
    }
  }
}

TEST(one_step_in_flight_is_launched_when_the_last_is_over) {
  for (const bool late_launch : {true, false}) {
    TimedEngine engine(late_launch, 1);
    engine.submit();
    engine.run_steps(50);
    const auto& runs = engine.device->runs;
    for (size_t k = 1; k < runs.size(); ++k) CHECK(runs[k].launched - runs[k - 1].end <= 5 * kUs + 20 * kUs);
    CHECK_EQ(engine.late_launches(), 0);
  }
}

TEST(a_device_with_steady_steps_never_waits) {
  for (const int64_t duration : {30, 120, 500, 4600, 60'000}) {
    TimedEngine engine(true);
    engine.device->duration = [duration](const StepInputHeader&) { return duration * kUs; };
    for (int i = 0; i < 4; ++i) engine.submit();
    engine.run_steps(20);
    const size_t warm = engine.device->runs.size();
    engine.run_steps(500);
    CHECK_EQ(engine.bubbles(warm).first, 0);
    CHECK_EQ(engine.late_launches(), 0);
    const auto& last = engine.device->runs.back();
    CHECK(last.begin - last.launched <= std::min<int64_t>(200, duration) * kUs);
  }
}

TEST(a_step_is_watched_at_its_end) {
  for (const bool late_launch : {true, false}) {
    TimedEngine engine(late_launch);
    engine.device->duration = [](const StepInputHeader&) { return 4600 * kUs; };
    engine.submit();
    engine.run_steps(20);
    const size_t before = engine.device->polls;
    int64_t latest = 0;
    for (size_t steps = 0; steps < 100; ++steps) {
      const size_t running = engine.running();
      while (engine.running() == running) engine.look();
      latest = std::max(latest, clock_ns - engine.device->runs[running].end);
    }
    CHECK(latest <= 25 * kUs);  // a poll interval and a launch
    CHECK(engine.device->polls - before <= 100 * (4600 / 16 / 5 + 5));
  }
}

TEST(a_long_step_that_nobody_foresaw_is_looked_at_less_and_less) {
  for (const bool late_launch : {true, false}) {
    TimedEngine engine(late_launch);
    engine.device->duration = [](const StepInputHeader&) { return 50'000 * kUs; };
    engine.submit();
    engine.run_steps(2);
    const size_t before = engine.device->polls, running = engine.running();
    while (engine.running() == running) engine.look();
    CHECK(clock_ns - engine.device->runs[running].end <= (50'000 / 200 + 20) * kUs);
    CHECK(engine.device->polls - before <= 50'000 / 5 / 10);  // a tenth of what a poll interval each would be
  }
}

TEST(a_launch_that_takes_long_begins_early) {
  TimedEngine engine(true);
  engine.submit();
  engine.run_steps(20);
  engine.device->launch_cost = 700 * kUs;
  engine.run_steps(2);
  const size_t warm = engine.device->runs.size();
  engine.run_steps(200);
  CHECK_EQ(engine.bubbles(warm).first, 0);
  engine.device->launch_cost = 20 * kUs;
  engine.run_steps(300);
  const auto& last = engine.device->runs.back();
  CHECK(last.begin - last.launched <= 200 * kUs);  // forgotten
}

TEST(late_launches_are_counted_and_rare) {
  for (unsigned seed = 1; seed <= check::sample_of(3u, 1u); ++seed) {
    std::mt19937 rng(seed);
    TimedEngine engine(true);
    engine.device->duration = [&](const StepInputHeader&) { return std::uniform_int_distribution<int64_t>(700, 1300)(rng) * kUs; };
    engine.submit();
    engine.run_steps(5000);
    const auto [bubbles, idle_ns] = engine.bubbles(1);
    CHECK(bubbles > 0);
    CHECK(engine.late_launches() >= bubbles);  // a launch just in time counts too
    CHECK(engine.late_launches() <= 5000 / 150);
    CHECK(idle_ns <= 5000 * 1000 * kUs / 1000);
  }
}

TEST(steps_that_become_shorter_are_late_once) {
  TimedEngine engine(true);
  engine.submit();
  engine.run_steps(50);
  engine.device->duration = [](const StepInputHeader&) { return 400 * kUs; };
  engine.run_steps(3);
  CHECK_EQ(engine.late_launches(), 1);
  const size_t warm = engine.device->runs.size();
  engine.run_steps(200);
  CHECK_EQ(engine.bubbles(warm).first, 0);
  CHECK_EQ(engine.late_launches(), 1);
}

TEST(a_thread_that_sleeps_too_long_makes_few_launches_late) {
  std::mt19937 rng(3);
  TimedEngine engine(true);
  engine.submit();
  engine.run_steps(20);
  const size_t warm = engine.device->runs.size();
  for (const size_t goal = warm + 3000; engine.device->runs.size() < goal;) {
    engine.oversleep_ns = std::uniform_int_distribution<int64_t>(0, 115)(rng) * kUs;
    engine.look();
  }
  CHECK(engine.late_launches() <= 3000 / 150);
  CHECK(engine.bubbles(warm).first <= engine.late_launches());
}

// Otherwise the duration that it expects of a step would grow until it sleeps past steps that were over long ago.
TEST(a_thread_that_sleeps_too_long_does_not_take_that_for_the_step) {
  for (const int depth : {1, 2}) {
    for (const int64_t oversleep : {0, 10, 20, 55}) {
      TimedEngine engine(true, depth);
      engine.device->duration = [](const StepInputHeader&) { return 100 * kUs; };
      engine.oversleep_ns = oversleep * kUs;
      engine.submit();
      engine.run_steps(200);
      const int64_t from = clock_ns;
      engine.run_steps(1000);
      CHECK((clock_ns - from) / 1000 <= (125 + oversleep) * kUs);
    }
  }
}

TEST(what_runs_for_an_unknown_time_is_followed_at_once) {
  TimedEngine engine(true);
  engine.device->duration = [](const StepInputHeader& h) { return (h.num_tokens > h.num_rows ? 3000 : 1000) * kUs; };
  engine.submit();
  engine.run_steps(20);
  engine.run_to_the_middle_of_a_step();
  engine.submit();
  engine.run_steps(3);
  const auto& runs = engine.device->runs;
  const auto prompt = std::ranges::find_if(runs.begin() + 10, runs.end(), [](const auto& run) { return run.tokens > run.rows; });
  CHECK((prompt + 1)->launched <= prompt->begin + 50 * kUs);
  CHECK_EQ(engine.bubbles(1).first, 0);
}

TEST(nothing_in_flight_holds_nothing_back) {
  TimedEngine engine(true);
  engine.submit(20, 10);
  while (!engine.loop->quiescent() || engine.device->runs.empty()) engine.look();
  const size_t before = engine.device->runs.size();
  clock_ns += 5000 * kUs;
  engine.submit();
  engine.look();
  CHECK_EQ(engine.device->runs.size(), before + 1);
}

// If only half of it were forgotten in 89 launches, a launch of ten minutes would leave nothing held back for 2,000.
TEST(a_launch_during_which_the_process_was_stopped_is_soon_forgotten) {
  LaunchTiming timing(1);
  for (int i = 0; i < 100; ++i) timing.launched(20 * kUs);
  const int64_t before = timing.lead();
  timing.launched(600'000'000 * kUs);
  int launches = 0;
  for (; timing.lead() > before + 1000 * kUs; ++launches) timing.launched(20 * kUs);
  CHECK(launches < 1000);
}

TEST(step_times_are_those_of_steps_alike) {
  LaunchTiming timing(2);
  CHECK_EQ(timing.expected(0, 1000), 0);
  for (const int64_t duration : {50, 40, 60}) timing.ran(0, 1000, duration);
  CHECK_EQ(timing.expected(0, 1000), 40);
  CHECK_EQ(timing.expected(0, 990), 40);    // a little less attention
  CHECK_EQ(timing.expected(0, 5000), 40);   // more takes longer, if anything
  CHECK_EQ(timing.expected(0, 500), 0);     // less may take less
  CHECK_EQ(timing.expected(1, 1000), 0);
  for (int i = 0; i < 8; ++i) timing.ran(0, 1000, 70);
  CHECK_EQ(timing.expected(0, 1000), 70);   // the past is over
}
